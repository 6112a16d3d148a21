"""Stores finished measurements as JSON lines, so that an interrupted benchmark resumes after the last of them.

A measurement is looked up by all of its parameters and by the commit of the code that was measured, because a report
names one commit. A commit does not identify uncommitted changes. A measurement that was interrupted is not in the
journal, and is repeated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .provenance import commit


def rotated(names: Sequence[str], number: int) -> list[str]:
    """The contenders in the order of round `number`: each round begins with another one.

    Example: `rotated(["a", "b", "c"], 1)` is `["b", "c", "a"]`.
    """
    start = number % len(names)
    return [*names[start:], *names[:start]]


class Journal:
    """A file of JSON lines at `path`, which is created by the first `put` if it is missing.

    `common` holds parameters that are part of every key, such as the machine. The commit is always one.
    """

    def __init__(self, path: Path, common: Mapping[str, Any] | None = None) -> None:
        self._path, self._common = path, {"commit": commit(), **(common or {})}
        self._found = {_key(entry["key"]): entry["found"] for entry in entries(path)}

    def get(self, **key: Any) -> dict[str, Any] | None:
        """Return the measurement with this key, or None."""
        return self._found.get(_key({**self._common, **key}))

    def put(self, found: Mapping[str, Any], **key: Any) -> dict[str, Any]:
        """Append a measurement to the file and return it. It survives a kill of this process, but not loss of power."""
        entry = {"key": {**self._common, **key}, "found": dict(found)}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a+b") as file:
            if file.seek(0, os.SEEK_END) and not _ends_line(file):
                file.write(b"\n")  # end a line that a kill truncated, so that the new one stands alone
            file.write(json.dumps(entry, allow_nan=False).encode() + b"\n")
        self._found[_key(entry["key"])] = entry["found"]
        return dict(entry["found"])


def entries(path: Path) -> list[dict[str, Any]]:
    """Return every complete line of a journal as {"key": ..., "found": ...}, without truncated lines.

    Without a journal at `path`, the list is empty.
    """
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and {"key", "found"} <= entry.keys():
            found.append(entry)
    return found


def _key(parameters: Mapping[str, Any]) -> str:
    return json.dumps(parameters, sort_keys=True)


def _ends_line(file: Any) -> bool:
    file.seek(-1, os.SEEK_END)
    return bool(file.read(1) == b"\n")

"""The journal of a bench: finished measurements, one JSON line each, so that a long run resumes where it stopped.

A measurement is found again by its parameters, all of them; what was being measured when a run stopped is not in it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Journal:
    """`path`: a file of JSON lines, made when it is missing. `common` is part of every key: the machine."""

    def __init__(self, path: Path, common: Mapping[str, Any] | None = None) -> None:
        self._path, self._common = path, dict(common or {})
        self._found = {_key(entry["key"]): entry["found"] for entry in entries(path)}

    def get(self, **key: Any) -> dict[str, Any] | None:
        """What was measured under this key, or None."""
        return self._found.get(_key({**self._common, **key}))

    def put(self, found: Mapping[str, Any], **key: Any) -> dict[str, Any]:
        """Keep a measurement; it survives the end of this process."""
        entry = {"key": {**self._common, **key}, "found": dict(found)}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a+b") as file:
            if file.seek(0, os.SEEK_END) and not _ends_line(file):
                file.write(b"\n")  # a line that a kill cut short stays a line of its own
            file.write(json.dumps(entry, allow_nan=False).encode() + b"\n")
        self._found[_key(entry["key"])] = entry["found"]
        return dict(entry["found"])


def entries(path: Path) -> list[dict[str, Any]]:
    """Every whole line of a journal: {"key": ..., "found": ...}. Empty when there is none; torn lines are left out."""
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

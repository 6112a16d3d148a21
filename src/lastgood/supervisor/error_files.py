"""What a rank has left of the error that ended it: read, and made fit for records and reports. Decides nothing."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import NamedTuple

from .program import error_in_memory
from .watch import RankProcess

TEXT_CHARACTERS = 65_536
"""of an error and of its stack, which are searched, stored and printed: a message may hold a whole response"""


class ErrorLeft(NamedTuple):
    """`text`: type and message; empty: there is no error. `at_seconds`: of the monotonic clock; 0.0: not known."""

    text: str
    stack: str
    at_seconds: float


def left_by(one: RankProcess) -> ErrorLeft:
    """What a rank has left, also in the format of torch's @record; a file of another format counts as none."""
    for path in (one.folder / "error.json", Path(error_in_memory(str(one.page)))):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            message = json.loads(path.read_text())["message"]
            if isinstance(message, str):
                return ErrorLeft(_shown(message), "", 0.0)
            extra = message["extraInfo"]
            at = float(extra.get("monotonic", 0.0)) if isinstance(extra, dict) else 0.0
            at = at if math.isfinite(at) else 0.0
            return ErrorLeft(_shown(message["message"]), _shown(extra["py_callstack"]), at)
    return ErrorLeft("", "", 0.0)


def _shown(text: object) -> str:
    """A text without its middle if it is long. Raises TypeError for what is no text."""
    if not isinstance(text, str):
        raise TypeError(f"{type(text).__name__} is no text")
    half = TEXT_CHARACTERS // 2
    left_out = len(text) - TEXT_CHARACTERS
    if left_out > 0:  # guard: long-error-is-cut
        text = f"{text[:half]} ... ({left_out} characters left out) ... {text[-half:]}"
    return printable(text)


def printable(text: str) -> str:
    """A text whose bytes that are no text, as in names of files, are written out: it can be stored and printed."""
    return text.encode(errors="backslashreplace").decode()

"""Reports outside of exceptions: through the logger `lastgood`, and on stderr. Holds no state; never raises.

    info(text)     level INFO: a fact, such as the most bytes that the run will take on its disk
    warning(text)  level WARNING: something went wrong, but no save is endangered
    threat(text)   level ERROR: saves fail or stored data is damaged; without action the run may be lost

If the application has configured no logging handler, the text goes to stderr as `lastgood: <text>`. A threat always
reaches stderr, even if the logger is disabled or filtered, or its handlers write to files only.
The `warnings` module is not used, because very many training scripts filter all warnings.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

LOGGER = logging.getLogger("lastgood")
if LOGGER.level == logging.NOTSET:
    LOGGER.setLevel(logging.INFO)  # else the root logger's default, WARNING, would drop what `info` reports


def info(text: str) -> None:
    """Report a fact. `logging.getLogger("lastgood").setLevel(logging.WARNING)` suppresses it."""
    _report(logging.INFO, text)


def warning(text: str) -> None:
    """Report something that went wrong but endangers no save."""
    _report(logging.WARNING, text)


def threat(text: str) -> None:
    """Report something that may cost the run its checkpoints. No logging configuration keeps it from stderr."""
    shown = _report(logging.ERROR, text)
    if not shown:
        _print(text)


def is_reported(count: int) -> bool:
    """Whether the occurrence number `count` of something that repeats is reported: the 1st, 2nd, 4th, 8th, ..."""
    return count & (count - 1) == 0


def _report(level: int, text: str) -> bool:
    """Log `text`, or print it where no handler is configured. Returns whether it reached stdout or stderr."""
    if not LOGGER.isEnabledFor(level):
        return False
    if not LOGGER.hasHandlers():
        _print(text)
        return True
    LOGGER.log(level, "%s", text, stacklevel=3)
    return any(_writes_to_terminal(handler, level) for handler in _handlers())


def _handlers() -> Iterator[logging.Handler]:
    """The handlers that a record of the logger reaches."""
    logger: logging.Logger | None = LOGGER
    while logger is not None:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None


def _writes_to_terminal(handler: logging.Handler, level: int) -> bool:
    """Whether a record of `level` appears on stdout or stderr; a handler with filters does not count."""
    stream = getattr(handler, "stream", None)
    standard = (sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__)
    return (
        stream is not None and stream in standard and level >= handler.level and not (handler.filters or LOGGER.filters)
    )


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may be closed, or None
        sys.stderr.write(f"lastgood: {text}\n")  # in one call: lines of several processes must not run together

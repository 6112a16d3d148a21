"""What this package reports outside of exceptions: the logger `lastgood`, and stderr. Holds no state; never raises.

    info(text)     level INFO: facts worth a line, such as the bound of the disk
    warning(text)  level WARNING: something went wrong, and every save is as safe as before
    threat(text)   level ERROR: saves fail or stored data is damaged; without action the run may be lost

Where the application has configured no logging handler, the text goes to stderr as `lastgood: <text>`. A threat always
reaches stderr: also where the logger is disabled or filtered, or where its handlers write to files only.
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
    """Report a fact. `logging.getLogger("lastgood").setLevel(logging.WARNING)` silences it."""
    _report(logging.INFO, text)


def warning(text: str) -> None:
    """Report something that went wrong and threatens no save."""
    _report(logging.WARNING, text)


def threat(text: str) -> None:
    """Report what may cost the run its checkpoints. No logging configuration keeps it from stderr."""
    shown = _report(logging.ERROR, text)
    if not shown:
        _print(text)


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
        print(f"lastgood: {text}", file=sys.stderr)

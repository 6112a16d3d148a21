"""The terminal: colours, width and progress bars. Knows no run and no command.

Text that comes from a run is cleaned of control characters before it is printed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ..run.watched import CountBytes

PIPE_COLUMNS = 1000  # wide enough that nothing is wrapped in a pipe
QUIET_SECONDS = 1.0  # a bar is drawn only after this time
REDRAW_SECONDS = 0.1


def clean(text: str, allowed: str = "") -> str:
    """`text` with control characters escaped, except those in `allowed`."""
    return "".join(c if c.isprintable() or c in allowed else c.encode("unicode_escape").decode() for c in text)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(stderr: bool = False) -> Console:
    """A console without colours if NO_COLOR is set or the stream is no terminal; in a pipe nothing is wrapped."""
    stream = sys.stderr if stderr else sys.stdout
    return _Console(
        stderr=stderr,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        width=None if stream.isatty() or "COLUMNS" in os.environ else PIPE_COLUMNS,
        markup=False,
        emoji=False,
        highlight=False,
    )


@contextlib.contextmanager
def progress(what: str, total_bytes: int) -> Iterator[CountBytes]:
    """A bar on stderr, drawn on a terminal only, after QUIET_SECONDS.

    Yields a function that any thread may call with the number of bytes that it has read or written.
    """
    out = console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(TextColumn(what, markup=False), *columns, console=out, transient=True, auto_refresh=False)
    task = bar.add_task(what, total=total_bytes)
    lock, begun, drawn = threading.Lock(), time.monotonic(), 0.0

    def count_bytes(count: int) -> None:
        nonlocal drawn
        with lock:
            bar.advance(task, count)
            now = time.monotonic()
            if out.is_terminal and now - begun > QUIET_SECONDS and now - drawn > REDRAW_SECONDS:
                bar.start()
                bar.refresh()
                drawn = now

    try:
        yield count_bytes
    finally:
        if drawn:
            bar.stop()

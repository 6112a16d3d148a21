"""The terminal that the command line speaks to: who looks, how wide, how much is done. Knows no run and no command.

Text that comes from a run is cleaned of control characters before a terminal sees it.
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

from ..run.watched import Seen

PIPE_COLUMNS = 1000  # in a pipe nothing is wrapped
QUIET_SECONDS = 1.0  # how long work goes on before a bar is drawn


def clean(text: str, allowed: str = "") -> str:
    """Without anything that a terminal would obey."""
    return "".join(c if c.isprintable() or c in allowed else c.encode("unicode_escape").decode() for c in text)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(stderr: bool = False) -> Console:
    """Plain where NO_COLOR is set or nobody looks; as wide as the terminal, and unwrapped in a pipe."""
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
def progress(what: str, total_bytes: int) -> Iterator[Seen]:
    """A bar on stderr, on a terminal only, once it has taken a second. Yields what any thread tells of its bytes."""
    out = console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(TextColumn(what, markup=False), *columns, console=out, transient=True, auto_refresh=False)
    task = bar.add_task(what, total=total_bytes)
    lock, begun, drawn = threading.Lock(), time.monotonic(), 0.0

    def seen(count: int) -> None:
        nonlocal drawn
        with lock:
            bar.advance(task, count)
            now = time.monotonic()
            if out.is_terminal and now - begun > QUIET_SECONDS and now - drawn > 0.1:
                bar.start()
                bar.refresh()
                drawn = now

    try:
        yield seen
    finally:
        if drawn:
            bar.stop()

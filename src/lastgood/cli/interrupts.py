"""Signals that end a command as Ctrl-C does, so that it removes what it has made. Holds no rule of a command."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def ended_as_by_ctrl_c() -> Iterator[None]:
    """In the block SIGTERM and SIGHUP raise KeyboardInterrupt, so that a command that they end removes its copies.

    Only the first of them does: a terminal that is closed sends several, and the removal goes on. One that is ignored,
    as by nohup, stays ignored.
    """

    def interrupt(*_: object) -> None:
        for one in before:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = dict[signal.Signals, Any]()
    try:
        if threading.current_thread() is threading.main_thread():
            for one in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(one) is not signal.SIG_IGN:
                    before[one] = signal.signal(one, interrupt)  # guard: signals-remove-copies
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)

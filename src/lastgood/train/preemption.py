"""Preemption: a signal asks for a last save at the next step, and for the end of the run. Saves nothing itself.

A handler notes the time and no more; the rest is done in the training loop, by `Checkpointer.step`. Until that is
called nothing can be saved: whoever sent the signal ends a loop that hangs.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

from ..errors import Refused

EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: nothing was wrong, run it again"""
SAME_SECONDS = 1.0
"""in which a further signal is the same request once more: a launcher passes on what its process group had already"""


@dataclass(frozen=True)
class Preemption:
    """Which signals ask, how long the end may take from the first one on, and the exit code that tells of it.

    A second signal, more than a second after the first, ends the process at once.
    """

    signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1)
    grace_seconds: float = 30.0
    exit_code: int = EXIT_CODE

    def __post_init__(self) -> None:
        if not (self.signals and 0 < self.grace_seconds < float("inf") and 0 <= self.exit_code < 256):
            raise Refused(f"{self}", todo="Give signals, seconds above 0, and an exit code from 0 to 255.")


class Preempted(SystemExit):
    """The run was asked to end, and ends: `durable` is the newest step that survives, None if there is none.

    Not caught, the process ends with the exit code of `Preemption`.
    """

    def __init__(self, code: int, durable: int | None, left_seconds: float) -> None:
        super().__init__(code)
        self.durable, self.left_seconds = durable, left_seconds


class Asked:
    """The handlers of a run, until `close`. Raises Refused outside of the main thread, where Python hears no signal."""

    def __init__(self, wish: Preemption, monotonic_seconds: Callable[[], float] = time.monotonic) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise Refused("preemption= outside of the main thread", todo="Open the run in the main thread.")
        self.wish, self._now, self._process = wish, monotonic_seconds, os.getpid()
        self.at: float | None = None
        """when the first signal came"""
        self._before = {one: signal.signal(one, self._hear) for one in wish.signals}

    @property
    def left_seconds(self) -> float:
        """Of the grace."""
        return max(0.0, self.wish.grace_seconds - (self._now() - (self.at or self._now())))

    def close(self) -> None:
        """Whoever handled these signals before does so again."""
        for one, handler in self._before.items():
            signal.signal(one, handler)
        self._before = {}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a worker that was forked: it is asked for nothing, and ended as ever
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self.at is None:
            self.at = self._now()
        elif self._now() - self.at > SAME_SECONDS:
            os.write(2, b"lastgood: a second signal: leaving at once; what is durable stays\n")
            os._exit(self.wish.exit_code)

"""Preemption: a signal asks for a last save at the next step, and for the end of the run. Saves nothing itself.

A handler notes the time and sets a timer; the rest is done in the training loop, by `Checkpointer.step`. When the grace
is over the timer ends the process, wherever it is: in a loop that comes to no step, on a disk that hangs. That is as
safe as any kill.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ..errors import Refused
from ..policy.arguments import is_positive, is_whole, require

EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: nothing was wrong, run it again"""
SAME_SECONDS = 1.0
"""in which a further signal is the same request once more: a launcher passes on what its process group had already"""


@dataclass(frozen=True)
class Preemption:
    """Which signals ask, how long the end may take from the first one on, and the exit code that tells of it.

    A second signal, more than a second after the first, ends the process at once. A handler that a signal had before
    is called too, once, after the request is noted (but for Python's own of SIGINT, which raises KeyboardInterrupt).
    """

    signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1)
    grace_seconds: float = 30.0
    exit_code: int = EXIT_CODE

    def __post_init__(self) -> None:
        signals, seconds, code = self.signals, self.grace_seconds, self.exit_code
        known = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
        listed = isinstance(signals, Collection) and not isinstance(signals, (str, bytes))
        require(
            listed and len(signals) > 0 and all(is_whole(one, 1) and one in known for one in signals),
            f"Preemption(signals={signals!r})",
            "Give a tuple of signals that a process can handle: (signal.SIGTERM,).",
        )
        require(
            is_positive(seconds) and seconds <= threading.TIMEOUT_MAX,
            f"Preemption(grace_seconds={seconds!r})",
            "Give a number of seconds above 0.",
        )
        require(
            is_whole(code, 0) and code < 256, f"Preemption(exit_code={code!r})", "Give a whole number from 0 to 255."
        )


class Preempted(SystemExit):
    """The run was asked to end, and ends: `durable` is the newest step that survives, None if there is none.

    Not caught, the process ends with the exit code of `Preemption`.
    """

    def __init__(self, code: int, durable: int | None) -> None:
        super().__init__(code)
        self.durable = durable


class Asked:
    """The handlers of a run, until `close`. Raises Refused outside of the main thread, where Python hears no signal."""

    def __init__(self, wish: Preemption, monotonic_seconds: Callable[[], float] = time.monotonic) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise Refused("preemption= outside of the main thread", todo="Open the run in the main thread.")
        self.wish, self._now, self._process = wish, monotonic_seconds, os.getpid()
        self.at: float | None = None
        """when the grace began: with the first signal, or that of another rank"""
        self._first: float | None = None
        self._timer: threading.Timer | None = None
        self._closed = False
        self._before = {one: signal.getsignal(one) for one in wish.signals}
        for one in self._before:
            signal.signal(one, self._hear)

    @property
    def left_seconds(self) -> float:
        """Of the grace."""
        return max(0.0, self.wish.grace_seconds - (self._now() - (self.at or self._now())))

    def ask(self) -> None:
        """As the first signal does; of several ranks, when another has heard it."""
        if self.at is None:
            self.at = self._now()
            self._timer = threading.Timer(self.wish.grace_seconds, self._leave, ["the grace is over"])
            self._timer.start()

    def close(self) -> None:
        """The run has been let go of. Whoever handled these signals before does so again, unless the process is ending:
        then the same signal may still come once more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        elif threading.current_thread() is threading.main_thread():
            for one, handler in self._before.items():
                if signal.getsignal(one) == self._hear:  # else somebody else handles it by now
                    signal.signal(one, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a worker that was forked: it is asked for nothing, and ended as ever
            if number == signal.SIGTERM:
                _die_of(number)
        elif self.at is None and self._closed:
            _die_of(number)
        elif self._first is None:
            self._first = self._now()
            self.ask()
            before = self._before[number]
            if callable(before) and before is not signal.default_int_handler:  # which would end the loop by itself
                self._call(before, number, frame)
        elif self._now() - self._first > SAME_SECONDS:
            self._leave("a second signal")

    def _call(self, before: Callable[..., Any], number: int, frame: FrameType | None) -> None:
        """Call the handler that was there before. What it raises is reported: it would end the loop unsaved."""
        try:
            before(number, frame)
        except BaseException as error:  # noqa: BLE001 - a handler that ends the process by SystemExit, as a rule
            text = (
                f"lastgood: the earlier handler of signal {number} raised {type(error).__name__}; the last save goes on"
            )
            with contextlib.suppress(OSError):
                os.write(2, f"{text}\n".encode())

    def _leave(self, why: str) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"lastgood: {why}: leaving at once; what is durable stays\n".encode())
        os._exit(self.wish.exit_code)


def _die_of(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)

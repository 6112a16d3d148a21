"""Preemption: a signal requests a last save at the next step, and then the end of the run. Saves nothing itself.

A signal handler records the time and starts a timer. `Checkpointer.step` does the rest in the training loop. When the
grace period is over, the timer ends the process, even if the loop reaches no step or the disk hangs. That is as safe as
a kill, because committed generations survive any kill. A process that ends by itself does not wait for its timer.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from ..errors import Refused
from ..io.heartbeat import VARIABLE
from ..policy.arguments import is_positive, is_whole, require
from ..policy.recovery import PREEMPTED
from ..run.thread_pools import EXIT_POLL_SECONDS, interpreter_is_ending

EXIT_CODE = PREEMPTED
"""EX_TEMPFAIL of sysexits.h: nothing was wrong, start the job again"""
SAME_SECONDS = 1.0
"""a further signal within this time is the same request: a launcher forwards a signal that its whole group received"""


@dataclass(frozen=True)
class Preemption:
    """How a run ends when its machine is taken away: `Checkpointer(..., preemption=Preemption())`.

    After the first signal, the next `step(n)` makes a last save and raises `Preempted`; uncaught, that ends the process
    with `exit_code`. A second signal, more than 1 second after the first, ends the process at once. A handler that was
    installed before is called once too, after the request is recorded; Python's own handler of SIGINT, which raises
    KeyboardInterrupt, is not. Raises Refused for values outside of the ranges below.

        preemption = lastgood.Preemption(signals=(signal.SIGTERM,), grace_seconds=60)
        with lastgood.Checkpointer("run", state, preemption=preemption) as ckpt:
            ...
    """

    signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1)
    """signals that request the end; at least one, and neither SIGKILL nor SIGSTOP (default: SIGTERM and SIGUSR1)"""
    grace_seconds: float = 30.0
    """seconds from the first signal until the process is ended without waiting any longer; above 0 (default: 30)"""
    exit_code: int = EXIT_CODE
    """exit code of the process, from 0 to 255 (default: 75, EX_TEMPFAIL); under `lastgood run` always the default,
    with which it ends too"""

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
    """Raised by `Checkpointer.step` after a signal of `Preemption`, once the last save is durable or cannot be.

    `durable`: the newest step that survives, None if there is none. It is a SystemExit: if it is not caught, the
    process ends with `Preemption.exit_code`.
    """

    def __init__(self, code: int, durable: int | None) -> None:
        super().__init__(code)
        self.durable = durable


class EndRequest:
    """The signal handlers of a run, from its construction to `close`.

    Raises Refused outside of the main thread, because Python runs signal handlers in the main thread only.
    """

    def __init__(self, options: Preemption, monotonic_seconds: Callable[[], float] = time.monotonic) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise Refused("preemption= outside of the main thread", todo="Open the run in the main thread.")
        if VARIABLE in os.environ:  # its exit code tells `lastgood run` what the end was
            options = replace(options, exit_code=EXIT_CODE)  # guard: supervised-run-ends-with-75
        self.options, self._now, self._process = options, monotonic_seconds, os.getpid()
        self.at: float | None = None
        """when the grace period began: at the first signal to this or another rank; None before"""
        self._first: float | None = None
        self._timer: _GraceTimer | None = None
        self._closed = False
        self._before = {one: _handler_of(one) for one in options.signals}
        for one in self._before:
            signal.signal(one, self._on_signal)
        atexit.register(self._ignore_signals)

    @property
    def left_seconds(self) -> float:
        """Seconds that are left of the grace period."""
        return max(0.0, self.options.grace_seconds - (self._now() - (self.at or self._now())))

    def begin_grace(self) -> None:
        """Begin the grace period, as the first signal does; with several ranks also if another rank received it."""
        if self.at is None:
            self.at = self._now()
            self._timer = _GraceTimer(self.options.grace_seconds, self._exit_now, ["the grace period is over"])
            self._timer.start()

    def close(self) -> None:
        """Restore the handlers that were installed before. After a request they stay replaced, because the same signal
        may arrive once more while the process ends."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        elif threading.current_thread() is threading.main_thread():
            atexit.unregister(self._ignore_signals)
            for one, handler in self._before.items():
                if signal.getsignal(one) == self._on_signal:  # otherwise another handler was installed since
                    signal.signal(one, handler)

    def _ignore_signals(self) -> None:
        """At the end of the interpreter, after a request: Python would put the default action in the place of each
        handler that is not this one, and the same signal once more would end the process with another exit code."""
        if self.at is not None and self._process == os.getpid():
            for one in self._before:
                if signal.getsignal(one) == self._on_signal:
                    signal.signal(one, signal.SIG_IGN)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked worker: SIGTERM ends it as without this handler
            if number == signal.SIGTERM:
                _end_by(number)
        elif self.at is None and self._closed:
            _end_by(number)
        elif self._first is None:
            self._first = self._now()
            self.begin_grace()
            before = self._before[number]
            if (
                callable(before) and before is not signal.default_int_handler
            ):  # the default one of SIGINT would end the loop
                self._call(before, number, frame)
        elif self._now() - self._first > SAME_SECONDS:
            self._exit_now("a second signal")

    def _call(self, before: Callable[..., Any], number: int, frame: FrameType | None) -> None:
        """Call the earlier handler. What it raises is reported and not raised: it would end the loop without a save."""
        try:
            before(number, frame)
        except BaseException as error:  # noqa: BLE001 - most such handlers raise SystemExit
            text = (
                f"lastgood: the earlier handler of signal {number} raised {type(error).__name__}; the last save goes on"
            )
            with contextlib.suppress(OSError):
                os.write(2, f"{text}\n".encode())

    def _exit_now(self, why: str) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"lastgood: {why}: the process ends at once; durable generations stay\n".encode())
        os._exit(self.options.exit_code)


class _GraceTimer(threading.Timer):
    """A timer that also ends when nothing but such timers keeps the interpreter from its end.

    The interpreter waits for all threads before it calls what atexit has and writes what stdout holds. A timer that
    went on would delay that to the end of the grace period, and then leave it out. While another thread hangs, this one
    goes on, and ends the process then.
    """

    def run(self) -> None:
        until = time.monotonic() + self.interval
        while (left := until - time.monotonic()) > 0:
            if self.finished.wait(min(left, EXIT_POLL_SECONDS)) or _only_timers_run():
                return
        self.function(*self.args, **self.kwargs)


def _only_timers_run() -> bool:
    """Whether the main thread has ended, and all other threads for which the interpreter waits, but for timers."""
    others = (one for one in threading.enumerate() if not one.daemon and not isinstance(one, _GraceTimer))
    return interpreter_is_ending() and not any(one.is_alive() for one in others)  # guard: last-timer-delays-no-exit


def _handler_of(number: int) -> Any:
    """The handler of a signal. That of a run which has ended stays installed after its request, and is passed over."""
    found = signal.getsignal(number)
    while isinstance(run := getattr(found, "__self__", None), EndRequest) and run._closed:
        found = run._before[number]
    return found


def _end_by(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)

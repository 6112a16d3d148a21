"""Signals to the supervisor: some ask for the end of the job, others are passed on to the ranks only."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence

PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
"""Schedulers announce with these that time is short (Slurm's --signal=USR1@60): the ranks decide what they do."""


class Signals:
    """`ends`: those that ask for the end of the job. `descriptor` can be read once a signal has come."""

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends, self._pending = ends, list[int]()
        self.end: int | None = None
        """the first signal that has asked for the end"""
        self.descriptor, self._write = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._write, False)

    def received(self, number: int, frame: object) -> None:
        """A signal has come: called by Python between two instructions of any code."""
        self._pending.append(number)
        if self.end is None and number in self._ends:
            self.end = number
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b"x")

    def ask_to_end(self) -> None:
        """As if SIGTERM had come from outside, whatever signals end the job."""
        self.end = self.end or signal.SIGTERM
        self.received(signal.SIGTERM, None)

    def drain(self) -> None:
        """Make `descriptor` wait for the next signal."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.descriptor, 4096)

    def taken(self) -> list[int]:
        """The signals since the last call, oldest first."""
        self.drain()
        pending, self._pending = self._pending, []
        return pending

    def asked_to_end(self) -> list[int]:
        """The signals since the last call that ask for the end. Warnings stay for `taken`: no rank has them yet."""
        came = self.taken()
        self._pending += [one for one in came if one in PASSED_ON]  # guard: warning-waits-for-ranks
        return [one for one in came if one not in PASSED_ON]

    def keep(self, number: int) -> None:
        """A signal that was taken comes again at the next call of `taken`."""
        self._pending.append(number)

    def close(self) -> None:
        os.close(self.descriptor)
        os.close(self._write)


@contextlib.contextmanager
def handled(ends: Sequence[int]) -> Iterator[Signals]:
    """In the block, signals are received by what it yields. SIGHUP stays ignored where it is, as `nohup` starts it."""
    found, numbers = Signals(ends), dict.fromkeys((*ends, *PASSED_ON))
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # guard: nohup-outlives-its-terminal
        numbers.pop(signal.SIGHUP, None)
    before = {number: signal.signal(number, found.received) for number in numbers}
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        found.close()

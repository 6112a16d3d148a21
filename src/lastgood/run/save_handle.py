"""The handle of one save: how far it has come, and what it ended with. Starts nothing and stops nothing."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from ..errors import Overtaken, TimedOut, TornSnapshot
from ..policy.arguments import require_seconds
from ..records import Generation


class Save:
    """A save under way. Every method may be called from any thread."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.stall_seconds = 0.0
        """how long the training loop waited for it: in the call, and at the fence"""
        self._begun = time.monotonic()
        self._ended: float | None = None
        self._staged, self._written = threading.Event(), threading.Event()
        self._outcome: Future[Generation] = Future()

    @classmethod
    def of(cls, generation: Generation) -> Save:
        """The save that this generation came from, as one that has ended."""
        save = cls(generation.step)
        save.note_staged()
        save.note_written()
        save.note_outcome(generation, None)
        return save

    def staged(self) -> bool:
        """Whether the live state may change again."""
        return self._staged.is_set()

    def written(self) -> bool:
        """Whether every byte has been written; it is not committed yet."""
        return self._written.is_set()

    def durable(self) -> bool:
        """Whether the generation exists and survives power loss."""
        return self._outcome.done() and self._outcome.exception() is None

    def dropped(self) -> bool:
        """Whether it was given up on purpose: a newer one was committed first, or the state changed under the copy."""
        return isinstance(self.error(), (Overtaken, TornSnapshot))

    def ended(self) -> bool:
        """Whether nothing more is done for it."""
        return self._outcome.done()

    def failed(self) -> bool:
        """Whether it ended without a generation."""
        return self.error() is not None

    def error(self) -> BaseException | None:
        """What it ended with; None while it is under way, and when it is durable."""
        return self._outcome.exception() if self._outcome.done() else None

    def result(self, timeout: float | None = None) -> Generation:
        """Wait until it is durable. Raises what made it fail, or TimedOut after `timeout` seconds."""
        require_seconds(timeout)
        try:
            return self._outcome.result(timeout)
        except FutureTimeout:
            raise TimedOut(
                f"step {self.step} is not durable after {timeout} s", safe="It is still under way."
            ) from None

    def wait_ended(self) -> None:
        """Wait until nothing more is done for it; raises nothing."""
        self._outcome.exception()

    @property
    def seconds(self) -> float:
        """From the call to durable, or until now."""
        return (self._ended or time.monotonic()) - self._begun

    def note_staged(self) -> None:
        """The copy of the live state is complete, or has failed."""
        self._staged.set()

    def note_written(self) -> None:
        """Every byte has been written."""
        self._written.set()

    def note_outcome(self, generation: Generation | None, error: BaseException | None) -> None:
        """The save has ended, with one of the two."""
        self._ended = time.monotonic()
        if error is not None:
            self._outcome.set_exception(error)
        elif generation is not None:
            self._outcome.set_result(generation)

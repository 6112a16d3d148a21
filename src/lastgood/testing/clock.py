"""A clock that a test moves."""

from __future__ import annotations


class Clock:
    """A monotonic clock that stands still until `advance` is called. Calling it returns its time in seconds.

    Pass it to code that takes a function like `time.monotonic`, and `clock.advance` to code that takes one like
    `time.sleep`. `seconds`: its time at the start. Default 0.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def __call__(self) -> float:
        return self._seconds

    def advance(self, seconds: float) -> None:
        """Move the clock forward by `seconds`. Raises ValueError for a negative number: time does not run backwards."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back: advance({seconds})")
        self._seconds += seconds

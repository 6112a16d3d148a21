"""When to save. Pure: the clock is the caller's."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import Refused


@dataclass(frozen=True)
class Every:
    """Save every so many `steps`, or as soon as so many `seconds` have passed; either, or both."""

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        steps_hold = self.steps is None or self.steps >= 1
        seconds_hold = self.seconds is None or self.seconds > 0  # a NaN does not
        if not (steps_hold and seconds_hold) or self.steps is self.seconds is None:
            raise Refused(f"{self} says nothing", todo="Give Every(steps=...) >= 1, or Every(seconds=...) > 0.")

    def due(self, step: int, seconds_since_save: float) -> bool:
        """Whether a save is due after `step`."""
        by_step = self.steps is not None and step % self.steps == 0
        return by_step or (self.seconds is not None and seconds_since_save >= self.seconds)

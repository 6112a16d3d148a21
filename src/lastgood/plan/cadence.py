"""When to save. Pure: the clock is the caller's."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import Refused


@dataclass(frozen=True)
class Every:
    """Save when a multiple of `steps` is reached or passed, or as soon as `seconds` have passed; either, or both.

    Raises Refused for values that cannot be meant.
    """

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        flags = isinstance(self.steps, bool) or isinstance(self.seconds, bool)
        steps_hold = self.steps is None or (hasattr(self.steps, "__index__") and self.steps >= 1)
        seconds_hold = self.seconds is None or (isinstance(self.seconds, (int, float)) and self.seconds > 0)
        if flags or not (steps_hold and seconds_hold) or self.steps is self.seconds is None:
            raise Refused(
                f"{self} says nothing",
                safe="Nothing was touched.",
                todo="Give Every(steps=...), a whole number >= 1, or Every(seconds=...) > 0.",
            )

    def due(self, step: int, seconds_since_save: float, since: int | None = None) -> bool:
        """Whether a save is due after `step`. `since`: the step before it that was looked at, or saved (step - 1)."""
        by_step = self.steps is not None and crossed(self.steps, step - 1 if since is None else since, step)
        return by_step or (self.seconds is not None and seconds_since_save >= self.seconds)


def crossed(interval: int, since: int, step: int) -> bool:
    """Whether a multiple of `interval` lies after `since`, up to and with `step`. Steps need not count by ones."""
    return step // interval > since // interval

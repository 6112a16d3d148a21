"""When to save. Pure: the clock is the caller's."""

from __future__ import annotations

from dataclasses import dataclass

from .arguments import is_number, is_whole, require


@dataclass(frozen=True)
class Every:
    """Save when a multiple of `steps` is reached or passed, or as soon as `seconds` have passed; either, or both.

    Raises Refused for values that cannot be meant.
    """

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        require(
            not (self.steps is None and self.seconds is None),
            "Every() says nothing",
            "Give Every(steps=...), a whole number of at least 1, or Every(seconds=...), a number above 0.",
        )
        require(
            self.steps is None or is_whole(self.steps, 1),
            f"Every(steps={self.steps!r})",
            "Give a whole number of at least 1.",
        )
        require(
            self.seconds is None or (is_number(self.seconds) and self.seconds > 0),
            f"Every(seconds={self.seconds!r})",
            "Give a number above 0.",
        )

    def due(self, step: int, seconds_since_save: float, since: int | None = None) -> bool:
        """Whether a save is due after `step`. `since`: the step before it that was looked at, or saved (step - 1)."""
        by_step = self.steps is not None and crossed(self.steps, step - 1 if since is None else since, step)
        return by_step or (self.seconds is not None and seconds_since_save >= self.seconds)


def crossed(interval: int, since: int, step: int) -> bool:
    """Whether a multiple of `interval` lies after `since`, up to and with `step`. Steps need not count by ones."""
    return step // interval > since // interval

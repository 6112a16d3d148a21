"""Cadence: when a save is due. Pure: the caller reads the clock."""

from __future__ import annotations

from dataclasses import dataclass

from .arguments import is_number, is_whole, require


@dataclass(frozen=True)
class Every:
    """Save when a multiple of `steps` is reached or passed, or when `seconds` have passed since the last save.

    `steps`: a whole number of at least 1. `seconds`: a number above 0. Both default to None; with both given, a save is
    due when either condition holds. Raises Refused for other values, or if neither is given.

    Example: `Every(steps=1000, seconds=600)`.
    """

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        require(
            not (self.steps is None and self.seconds is None),
            "Every() has neither steps nor seconds",
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
        """Whether a save is due after `step`.

        `since` (default `step - 1`): the last step before it for which this was evaluated, or that was saved.
        """
        by_step = self.steps is not None and crossed(self.steps, step - 1 if since is None else since, step)
        return by_step or (self.seconds is not None and seconds_since_save >= self.seconds)


def crossed(interval: int, since: int, step: int) -> bool:
    """Whether a multiple of `interval` is greater than `since` and at most `step`. Step numbers may have gaps."""
    return step // interval > since // interval

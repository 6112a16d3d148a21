"""Pacing: what the training loop shows of itself, measured for `plan.tune.adapt`. Holds no clock; decides nothing."""

from __future__ import annotations

from statistics import median

from ..policy.tune import Auto, adapt
from ..run.pipeline import Save


class Pace:
    """An interval that follows the loop: every call on the training thread, `now` in seconds of a monotonic clock."""

    def __init__(self, auto: Auto) -> None:
        self.auto = auto
        self._before: tuple[int, float] | None = None
        """the step that was passed last, and when; None where a save has been begun since"""
        self._free: list[float] = []
        """seconds of steps that no save was in flight in, since the last adaption"""
        self._flying: list[Save] = []
        self._period: tuple[int, float] = (0, 0.0)
        """step and time at which the first of the saves in flight began"""
        self._saves = 0
        """begun in this period"""
        self._waited_seconds = 0.0
        """in this period, for a place in flight"""

    def passed(self, n: int, now: float) -> str:
        """A step is complete. Returns why the interval changed, if it did."""
        ended = [one for one in self._flying if one.ended()]
        self._flying = [one for one in self._flying if not one.ended()]
        if self._before is not None and self._before[0] == n - 1:
            self._free.append(now - self._before[1])
        self._before = None if self._flying else (n, now)
        before = self.auto
        for save in ended:
            if save.durable():
                free = median(self._free) if self._free else None
                self.auto = adapt(self.auto, free, save.seconds, self._lost_seconds(n, now, free), step=n)
                self._free.clear()
        return self.auto.reason if self.auto.interval_steps != before.interval_steps else ""

    def begun(self, save: Save, n: int, now: float, waited_seconds: float) -> None:
        """A save of step `n` was begun at `now`, after so long a wait for its place."""
        if not self._flying:
            self._period, self._saves, self._waited_seconds = (n, now), 0, 0.0
        self._flying.append(save)
        self._saves += 1
        self._waited_seconds += waited_seconds
        self._before = None

    def _lost_seconds(self, n: int, now: float, free: float | None) -> float | None:
        """What each save of this period cost the steps beside it, the wait for a place not counted."""
        known = free if free is not None else median(self.auto.recent_step_seconds or (0.0,))
        if not known:
            return None
        first, began = self._period
        return max(now - began - (n - first) * known - self._waited_seconds, 0.0) / self._saves

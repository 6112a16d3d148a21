"""When copies to one place below are due, at an interval that adapts to what they cost. Reads no clock.

Measures the training loop for `policy.tune.adapt`, which decides. Of several ranks only rank 0 knows when copies end,
and it alone decides what is copied; the others measure nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

from ..policy.tune import Auto, adapt
from ..run.save_handle import Save
from .reports import Reports

REMEMBERED_STEPS = 50
"""durations of steps that are kept for each kind of step"""


@dataclass
class _Copy:
    """A copy that was asked for. `began`: when its save began. `steps`: those beside which it was under way."""

    save: Save
    began: float
    steps: int = 0


class CopyPace:
    """The copies to one place below; the same methods as `PlaceCadence`.

    `auto`: the interval to start with, and its bounds. `place`: as tiers name it; empty at ranks that copy nothing.
    `reports`: receives each change of the interval. All methods are called on the training thread; `now` is in seconds
    of a monotonic clock.
    """

    def __init__(self, auto: Auto, place: str, reports: Reports) -> None:
        self.auto, self._place, self._reports = auto, place, reports
        self.is_due = False
        """whether the next save is to be copied to this place"""
        self._copied_step = 0
        self._saves: list[Save] = []
        """the saves in flight in the place above"""
        self._copies: list[_Copy] = []
        self._before: tuple[int, float, bool, bool] | None = None
        """the last completed step, its time, and whether a save and a copy were in flight then"""
        self._seconds: dict[tuple[bool, bool], deque[float]] = {}
        """whether a save and a copy were in flight -> durations of the newest such steps"""

    def restored(self, n: int, now: float) -> None:
        """Note that the state is that of step `n`: intervals begin there."""
        self._copied_step, self.is_due = n, False
        self._before, self._saves, self._copies = None, [], []

    def due(self, n: int, now: float) -> bool:
        """Note that step `n` is completed, at `now`. False: an interval that adapts asks for no save; the next one that
        is made is copied here."""
        self._saves = [one for one in self._saves if not one.ended()]
        under_way = [one for one in self._copies if one.save.copying(self._place)]
        self._measure(n, now, bool(self._saves), bool(under_way))
        for one in under_way:
            one.steps += 1
        # A save that is not committed yet, or whose copy is noted in this instant, is looked at again.
        ended = [one for one in self._copies if one not in under_way and one.save.ended()]
        self._copies = [one for one in self._copies if one not in ended]
        for one in ended:
            if self._place in one.save.where():
                self._adapt(n, now, one)
        self.is_due |= self.auto.due(n, self._copied_step)
        return False

    def begun(self, save: Save, copied: bool, now: float) -> None:
        """Note that a save has begun, and whether it is copied to this place."""
        self._saves.append(save)
        if copied:
            self._copies.append(_Copy(save, now))
            self._copied_step, self.is_due = save.step, False

    def _measure(self, n: int, now: float, saving: bool, copying: bool) -> None:
        before, self._before = self._before, (n, now, saving, copying)
        if before is not None and (before[0], *before[2:]) == (n - 1, saving, copying):
            self._seconds.setdefault((saving, copying), deque(maxlen=REMEMBERED_STEPS)).append(now - before[1])

    def _adapt(self, n: int, now: float, copy: _Copy) -> None:
        """Take a copy that has ended by step `n` as a measurement."""
        before = self.auto
        self.auto = adapt(before, self._median(copying=False), now - copy.began, self._lost_seconds(copy), step=n)
        if self.auto.interval_steps != before.interval_steps:
            self._reports.emit("tuned", n, f"{self._place}: {self.auto.reason}")

    def _median(self, copying: bool) -> float | None:
        """The usual duration of a step, rather of those without a save in flight; None: none is known."""
        known = [self._seconds.get((saving, copying)) for saving in (False, True)]
        return next((median(one) for one in known if one), None)

    def _lost_seconds(self, copy: _Copy) -> float | None:
        """By how many seconds a copy has slowed its steps: compared are steps that differ in nothing else; None if
        there were none."""
        for saving in (False, True):
            beside, without = self._seconds.get((saving, True)), self._seconds.get((saving, False))
            if beside and without:
                return max(0.0, median(beside) - median(without)) * copy.steps
        return None

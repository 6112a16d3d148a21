"""When copies to one place below are due, at an interval that adapts to what they cost. Reads no clock.

Measures the training loop for `policy.tune.adapt`, which decides. Of several ranks only rank 0 knows when copies end,
and it alone decides what is copied; the others measure nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import fmean

from ..policy.tune import Auto, adapt
from ..run.save_handle import Save
from .reports import Reports

REMEMBERED_STEPS = 50
"""durations of undisturbed steps that are kept"""


@dataclass(frozen=True)
class _Copy:
    """A copy that was asked for. `began`: when its save began."""

    save: Save
    began: float

    def under_way(self, place: str) -> bool:
        """Whether its save, or the copy to `place`, has not ended."""
        return not self.save.ended() or self.save.copying(place)


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
        self._copies: list[_Copy] = []
        self._before: tuple[int, float] | None = None
        """the last completed step, and its time"""
        self._free = deque[float](maxlen=REMEMBERED_STEPS)
        """durations, in seconds, of steps beside which no copy was under way for a moment; saves above may have been"""

    def restored(self, n: int, now: float) -> None:
        """Note that the state is that of step `n`: intervals begin there."""
        self._copied_step, self.is_due = n, False
        self._before, self._copies = None, []

    def due(self, n: int, now: float) -> bool:
        """Note that step `n` is completed, at `now`. False: an interval that adapts asks for no save; the next one that
        is made is copied here. Step numbers may have gaps."""
        if self._before is not None and self._before[0] < n and not self._copies:
            self._free.append((now - self._before[1]) / (n - self._before[0]))
        self._before = n, now
        ended = [one for one in self._copies if not one.under_way(self._place)]
        self._copies = [one for one in self._copies if one not in ended]
        for one in ended:
            if self._place in one.save.where():
                self._adapt(n, now, one)
        self.is_due |= self.auto.due(n, self._copied_step)
        return False

    def begun(self, save: Save, copied: bool, now: float) -> None:
        """Note that a save has begun, and whether it is copied to this place."""
        if copied:
            self._copies = [one for one in self._copies if one.under_way(self._place)]  # of a loop without `due`
            self._copies.append(_Copy(save, now))
            self._copied_step, self.is_due = save.step, False

    def _adapt(self, n: int, now: float, copy: _Copy) -> None:
        """Take a copy that has ended by step `n` as a measurement: of how long it took, and of how much longer its
        steps took than as many undisturbed ones."""
        before, seconds = self.auto, now - copy.began
        free = fmean(self._free) if self._free else None
        lost = None if free is None else max(0.0, seconds - (n - copy.save.step) * free)
        self.auto = adapt(before, free, seconds, lost, step=n)
        if self.auto.interval_steps != before.interval_steps:
            self._reports.emit("tuned", n, f"{self._place}: {self.auto.reason}")

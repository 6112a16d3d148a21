"""Watches how long the steps of the ranks take, and samples where the ranks are once they take longer than usual.

policy/slow.py decides; this measures, asks ranks for their stacks, and reports each slow time once.

    usual     windows of training are measured, and the usual duration of a step is learned
    sampling  the last windows were slow: the stacks of all ranks are taken several times
    reported  a slow rank was named: nothing more is reported until the steps are as fast as before
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

from .. import reporting
from ..policy import slow
from ..policy.hang import Stuck
from ..policy.slow import Pace
from .attempt_log import Slow, SlowRank
from .watch import PAUSE_SECONDS, RankProcess, stacks, stuck


class SlowWatch:
    """The steps of the ranks of one attempt on this node. `pace`: when they count as slow."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._phase: Literal["usual", "sampling", "reported"] = "usual"
        self._usual: float | None = None
        self._windows = list[float]()
        """seconds per step in the last windows, oldest first"""
        self._began_step, self._seconds = 0, 0.0
        """of the window that is open: the step at which it began, and the time of training in it"""
        self._looked_at: float | None = None
        """when it was looked last, if all ranks were training then"""
        self._samples = list[list[Stuck]]()
        self._next_sample_at = 0.0

    def poll(self, ranks: Sequence[RankProcess], now: float) -> list[Slow]:
        """Poll the ranks that have not ended. Returns what was reported just now; mostly nothing."""
        if len(ranks) < 2 or not self._pace.factor:
            return []
        if self._measured(ranks, now):
            self._follow()
        if self._phase == "sampling" and now >= self._next_sample_at and self._looked_at is not None:
            self._samples.append(stuck(ranks, stacks(ranks)))
            self._next_sample_at = now + slow.pause_seconds(self._windows[-1])
            if len(self._samples) == slow.SAMPLES:
                return self._judged(min(one.shown.step for one in ranks))
        return []

    # ---- steps ---------------------------------------------------------------------------------------------

    def _measured(self, ranks: Sequence[RankProcess], now: float) -> bool:
        """Add the time since the last look to the open window, if all ranks trained. Returns whether it is full."""
        step = min(one.shown.step for one in ranks)
        if self._looked_at is not None and now - self._looked_at < PAUSE_SECONDS:
            self._seconds += now - self._looked_at
        self._looked_at = now if all(map(_trains, ranks)) else None
        if (self._looked_at is None and not self._seconds) or step < self._began_step:
            self._began_step, self._seconds = step, 0.0
        if step == self._began_step or self._seconds < self._pace.window_seconds:
            return False
        self._windows.append(self._seconds / (step - self._began_step))
        del self._windows[: -slow.USUAL_WINDOWS]
        self._began_step, self._seconds = step, 0.0
        return True

    def _follow(self) -> None:
        """Decide again, after a window."""
        self._usual = slow.usual_seconds(self._usual, self._windows)
        if self._phase == "usual" and slow.is_slow(self._windows, self._usual, self._pace):
            self._phase, self._next_sample_at = "sampling", 0.0
            self._samples.clear()
        elif self._phase == "reported" and self._usual and slow.is_over(self._windows, self._usual, self._pace):
            self._phase = "usual"

    def _judged(self, step: int) -> list[Slow]:
        """Report what the samples show, unless the steps are fast again."""
        assert self._usual is not None
        recent, usual = self._windows[-slow.WINDOWS :], self._usual
        self._phase = "usual"
        if recent[-1] <= self._pace.factor * usual:
            return []
        found = slow.slow_ranks(self._samples)
        if found:
            self._phase = "reported"
        else:  # all are slower: that is usual from now on
            self._usual = None
            self._windows.clear()
        seconds = statistics.median(recent)
        what = slow.described(step, seconds, usual, found)
        reporting.warning(what)
        ranks = [SlowRank(rank=one.rank, samples=one.samples, at=one.at) for one in found]
        return [Slow(step=step, step_seconds=seconds, usual_step_seconds=usual, ranks=ranks, what=what)]


def _trains(one: RankProcess) -> bool:
    """Whether a rank has completed a step, and is in none of the phases that take as long as they take."""
    return one.shown.first is not None and one.shown.phase_began is None and one.shown.closed is None

"""Watches how long the steps of the ranks take, and samples where the ranks are at first, and once they take longer.

policy/slow.py decides; this measures, lets the stacks of ranks be read, and reports each slow time once.

    first     the usual duration of a step is learned, and meanwhile samples show if a rank is slow from the beginning
    usual     windows of training are measured
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
from ..policy.slow import Apart, Pace
from .attempt_log import Slow, SlowRank
from .stack_reader import Reading, StackReader
from .watch import PAUSE_SECONDS, RankProcess


class SlowWatch:
    """The steps of the ranks of one attempt on this node. `pace`: when they count as slow. `reader`: of their
    stacks."""

    def __init__(self, pace: Pace, reader: StackReader) -> None:
        self._pace, self._reader = pace, reader
        self._phase: Literal["first", "usual", "sampling", "reported"] = "first"
        self._usual: float | None = None
        self._windows = list[float]()
        """seconds per step in the last windows, oldest first"""
        self._began_step, self._seconds = 0, 0.0
        """of the window that is open: the step at which it began, and the time of training in it"""
        self._looked_at: float | None = None
        """when it was looked last, if all ranks were training then"""
        self._samples = list[list[Stuck]]()
        """those in which the stacks of all ranks were found"""
        self._reading: Reading | None = None
        self._tried = self._tried_in_window = 0
        """how many samples were begun, in all and since the window began that is open"""
        self._next_sample_at = 0.0

    def poll(self, ranks: Sequence[RankProcess], now: float) -> list[Slow]:
        """Poll the ranks that have not ended. Returns what was reported just now; mostly nothing."""
        if len(ranks) < 2 or not self._pace.factor:
            return []
        step = min(one.shown.step for one in ranks)
        if self._measured(ranks, now):
            self._tried_in_window = 0
            if self._phase == "first" and len(self._windows) == slow.USUAL_WINDOWS:
                return self._first_judged(step)
            self._follow()
        if self._phase in ("first", "sampling"):
            self._sample(ranks, now)
        enough = not self._wants_more() and self._reading is None
        if self._phase == "sampling" and (enough or not self._reader.usable):
            return self._judged(step)
        return []

    # ---- samples -------------------------------------------------------------------------------------------

    def _sample(self, ranks: Sequence[RankProcess], now: float) -> None:
        """Begin a sample if one is due, or take the one that was begun."""
        if self._reading is not None:
            found = self._reading.poll(now)
            if found is None:
                return
            self._reading = None
            if all(one.stack for one in found):
                self._samples.append(found)
        may = self._tried_in_window < slow.SAMPLES_IN_WINDOW  # guard: one-stall-is-no-slow-rank
        if may and self._wants_more() and now >= self._next_sample_at and self._looked_at is not None:
            self._next_sample_at = now + self._pause_seconds()
            self._tried += 1
            self._tried_in_window += 1
            self._reading = self._reader.read(ranks, now)

    def _wants_more(self) -> bool:
        return self._phase == "first" or (len(self._samples) < slow.SAMPLES and self._tried < slow.MOST_TRIED)

    def _drop_reading(self) -> None:
        if self._reading is not None:
            self._reading.drop()
        self._reading = None

    def _pause_seconds(self) -> float:
        """How long to wait until the next sample."""
        if self._phase == "sampling":
            return slow.pause_seconds(self._windows[-1])
        window_seconds = max([self._pace.window_seconds, *self._windows[-1:]])  # a longer step is a window
        return slow.first_pause_seconds(window_seconds, self._tried)

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
            self._phase, self._next_sample_at, self._tried = "sampling", 0.0, 0
            self._samples.clear()
        elif self._phase == "reported" and self._usual and slow.is_over(self._windows, self._usual, self._pace):
            self._phase = "usual"

    def _first_judged(self, step: int) -> list[Slow]:
        """Report the ranks that the first windows show as slow."""
        self._phase, self._usual = "usual", slow.usual_seconds(None, self._windows)
        self._drop_reading()
        found = slow.first_slow_ranks(self._samples, self._pace)
        return [_reported(step, statistics.median(self._windows), None, found, len(self._samples))] if found else []

    def _judged(self, step: int) -> list[Slow]:
        """Report what the samples show, unless the steps are fast again."""
        assert self._usual is not None
        recent, usual = self._windows[-slow.WINDOWS :], self._usual
        self._phase = "usual"
        self._drop_reading()
        if recent[-1] <= self._pace.factor * usual:
            return []
        found = slow.slow_ranks(self._samples)
        few = len(self._samples) < slow.LEAST_SAMPLES and self._reader.usable
        if found or few:  # guard: few-samples-make-nothing-usual
            self._phase = "reported"
        else:  # all are slower: that is usual from now on
            self._usual = None
            self._windows.clear()
        return [_reported(step, statistics.median(recent), usual, found, len(self._samples))]


def _reported(step: int, seconds: float, usual: float | None, found: Sequence[Apart], samples: int) -> Slow:
    """Report a slow time. The arguments are those of `slow.described`."""
    what = slow.described(step, seconds, usual, found, samples)
    reporting.warning(what)
    ranks = [SlowRank(rank=one.rank, samples=one.samples, at=one.at) for one in found]
    return Slow(step=step, step_seconds=seconds, usual_step_seconds=usual or 0.0, ranks=ranks, what=what)


def _trains(one: RankProcess) -> bool:
    """Whether a rank has completed a step, and is in none of the phases that take as long as they take."""
    return one.shown.first is not None and one.shown.phase_began is None and one.shown.closed is None

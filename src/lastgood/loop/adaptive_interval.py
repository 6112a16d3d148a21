"""The adaptive interval: measures the training loop for `policy.tune.adapt`, which decides. Reads no clock.

`known_failures` reads once, when a run is opened, how often its job has failed.
"""

from __future__ import annotations

from statistics import median

from ..coordination.single_rank import AnyRanks
from ..errors import Unavailable
from ..policy.failures import Failures, Known
from ..policy.tune import Auto, adapt
from ..run import side_records
from ..run.outcomes import Outcomes
from ..run.save_handle import Save
from ..supervisor import attempt_log
from .options import Options


def known_failures(options: Options, url: str, ranks: AnyRanks, outcomes: Outcomes) -> Known:
    """What is known of the failures of the job that saves to the run at `url`; those seen at rank 0, which decides.

    Where the run cannot be read, that is reported, and only what is expected counts. Raises UnknownFormat.
    """
    mtbf = options.tuning.mtbf
    expected = Known(Failures(mtbf), Failures(mtbf))
    if not options.adapts or not ranks.is_coordinator:
        return expected
    try:
        with side_records.opened(url) as tier:
            return attempt_log.failures(attempt_log.read(tier, True, url), ranks.size, mtbf)
    except Unavailable as error:
        outcomes.put(error)
        return expected


class Pace:
    """An interval between saves that adapts to the measured times of steps and saves.

    `auto`: the interval to start with, and its bounds. All methods are called on the training thread; `now` is in
    seconds of a monotonic clock.
    """

    def __init__(self, auto: Auto) -> None:
        self.auto = auto
        self.first_steps = auto.interval_steps
        """the interval to start with: the same on all ranks, of which only rank 0 adapts its own"""
        self._before: tuple[int, float] | None = None
        """the last completed step, and its time; None after a step with a save in flight, and after `begun`"""
        self._free: list[float] = []
        """durations, in seconds, of the steps without a save in flight, since the last adaptation"""
        self._flying: list[tuple[Save, float]] = []
        """the saves in flight, each with the seconds for which the loop waited for its place"""
        self._period: tuple[int, float] = (0, 0.0)
        """step and time at which this period began: with a save while no other was in flight"""
        self._saves = 0
        """number of saves that were started in this period"""
        self._waited_seconds = 0.0
        """how long the loop waited in this period for a place among the saves in flight"""

    def restored(self) -> None:
        """The state is that of another step: what was measured up to here has no end."""
        self._before, self._flying = None, []  # guard: restore-costs-no-save

    def passed(self, n: int, now: float) -> str:
        """Record that step `n` is completed. Returns why the interval changed; empty if it did not."""
        ended = [one for one in self._flying if one[0].ended()]
        self._flying = [one for one in self._flying if one not in ended]
        if self._before is not None and self._before[0] < n:  # step numbers may have gaps
            self._free.append((now - self._before[1]) / (n - self._before[0]))
        self._before = None if self._flying else (n, now)
        before = self.auto
        for save, waited_seconds in ended:
            if save.is_committed():
                free = median(self._free) if self._free else None
                lost = self._lost_seconds(n, now, free)
                if lost is not None:  # steps whose times vary may hide what a save costs, but not that the loop stood
                    lost = max(lost, save.stall_seconds - waited_seconds)
                first, began = self._period
                busy = (now - began) / (n - first) if n > first else None
                self.auto = adapt(self.auto, free, save.seconds, lost, step=n, busy_seconds=busy)
                self._free.clear()
        return self.auto.reason if self.auto.interval_steps != before.interval_steps else ""

    def begun(self, save: Save, now: float, waited_seconds: float) -> None:
        """Record that a save was started at `now`; `waited_seconds`: the wait for a place in flight."""
        if not self._flying:
            self._period, self._saves, self._waited_seconds = (save.step, now), 0, 0.0
        self._flying.append((save, waited_seconds))
        self._saves += 1
        self._waited_seconds += waited_seconds
        self._before = None

    def _lost_seconds(self, n: int, now: float, free: float | None) -> float | None:
        """By how many seconds each save of this period has slowed the steps, without the wait for a place in flight.

        `free`: median duration of an undisturbed step. None if that is unknown.
        """
        known = free if free is not None else median(self.auto.recent_step_seconds or (0.0,))
        if not known:
            return None
        first, began = self._period
        return max(now - began - (n - first) * known - self._waited_seconds, 0.0) / self._saves

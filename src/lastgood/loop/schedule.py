"""Schedule: at which steps a save is due, and whether a place in flight is free for it; the same on all ranks.

Each rank knows by itself which saves are due by steps. What depends on a clock, or on how long saves take, only rank 0
knows. It announces that to the others some steps ahead (coordination/announcements.py), as one of three kinds:

    "save"    a save at a step, because enough seconds have passed
    "every"   another interval in steps, from a step on, because cadence="auto" has measured a better one
    "ended"   the end of a save and of all earlier ones, whose places in flight are free again from a step on

A rank that receives an announcement only after its step may have missed saves of the others: those that were announced,
and those that it left out because it still counted a place as taken. It then fails these for all ranks, with HeardLate,
so that none of them waits for it. After each save that failed so, rank 0 announces further ahead.
Everything here runs on the training thread.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from ..coordination.announcements import Announcements
from ..coordination.rounds import RankGroup
from ..errors import HeardLate
from ..limits import MAX_IN_FLIGHT, STEPS_REMEMBERED
from ..policy.cadence import Every, crossed
from ..run.save_handle import Save
from .adaptive_interval import Pace
from .reports import Reports


class Schedule:
    """The schedule of a world of one. `now` is in seconds of a monotonic clock."""

    def __init__(self, cadence: Every | Pace, reports: Reports) -> None:
        self._cadence, self._reports = cadence, reports
        self._saved_at, self._saved_step = 0.0, 0
        self._begun: int | None = None
        """the step of the last save that was started, by the cadence or by the user"""
        self.previous_step = 0
        """the last step of the loop for which `due` was called"""

    def restored(self, n: int, now: float) -> None:
        """Record that the state is that of step `n`: intervals begin there."""
        self._saved_at, self._saved_step, self.previous_step = now, n, n
        if isinstance(self._cadence, Pace):
            self._cadence.restored()

    def due(self, n: int, now: float) -> bool:
        """Whether to save at step `n`. Called once for each step of the loop."""
        since, self.previous_step = max(self.previous_step, self._saved_step), n
        if isinstance(self._cadence, Every):
            return n != self._begun and self._cadence.due(n, now - self._saved_at, since)
        if why := self._cadence.passed(n, now):
            self._reports.emit("tuned", n, why)
        return self._cadence.auto.due(n, self._saved_step)

    def announce(self, n: int, now: float) -> None:
        """At rank 0 of several: publish what the others cannot know. Raises TierDown; the next call tries again."""

    def full(self) -> bool | None:
        """Whether as many saves are in flight as are allowed, as far as all ranks know the same.

        None: the ranks need not agree, so this rank acquires a place if one is free, and else does as `when_full` says.
        """
        return None

    def admitted(self, n: int) -> None:
        """Record that a save of step `n` has a place in flight, even if it fails later."""

    def left_out(self, n: int) -> None:
        """Record that step `n` is not saved because too many saves are in flight."""

    def begun(self, save: Save, began: float, now: float, waited_seconds: float) -> None:
        """Record a save that was planned and started from `began` to `now`, after a wait for its place."""
        self._saved_at, self._saved_step, self._begun = now, save.step, save.step
        if isinstance(self._cadence, Pace):
            self._cadence.begun(save, began, waited_seconds)


class _Step(NamedTuple):
    """A step of the loop, and whether a save was due at it."""

    n: int
    due: bool


class AgreedSchedule(Schedule):
    """The schedule of one of several ranks. `in_flight`: how many saves at a time; None: a further save waits."""

    def __init__(
        self, cadence: Every | Pace, reports: Reports, ranks: RankGroup, ahead: Announcements, in_flight: int | None
    ) -> None:
        super().__init__(cadence, reports)
        self._ranks, self._ahead, self._in_flight = ranks, ahead, in_flight
        # Only rank 0 has an adapted interval, which it announces again after a restore.
        # guard: restore-begins-with-first-interval
        self._interval = cadence.first_steps if isinstance(cadence, Pace) else cadence.steps or 0
        """steps between two saves; 0: none is due by steps"""
        self._from = 0
        """the step from which the interval counts"""
        self._announced_interval = self._interval
        self.expects_announcements = isinstance(cadence, Pace) or cadence.seconds is not None or in_flight is not None
        """whether rank 0 has anything to announce with this cadence"""
        self._unended: dict[int, Save | None] = {}
        """step -> save, in ascending order, of the saves that occupy a place until an announced end takes effect"""
        self._announced_end: int | None = None
        """the step of the last save whose end was announced, until that takes effect"""
        self._left_out: deque[int] = deque(maxlen=STEPS_REMEMBERED)
        """the newest steps that were not saved because too many saves were in flight"""
        self._started: deque[Save] = deque(maxlen=MAX_IN_FLIGHT)
        """at rank 0: the saves that were under way when it last checked"""
        self._steps: deque[_Step] = deque(maxlen=STEPS_REMEMBERED)

    def restored(self, n: int, now: float) -> None:
        super().restored(n, now)
        self._steps.clear()
        if isinstance(self._cadence, Pace):
            self._from = n

    def due(self, n: int, now: float) -> bool:
        """As `Schedule.due`. Fails, for all ranks, each save that was announced to this rank after its step."""
        since, before, self.previous_step = max(self.previous_step, self._saved_step), self.previous_step, n
        due, missed = self._take_announced(n, before)
        for step in missed:
            late = HeardLate(f"this rank received only at its step {n} that step {step} is saved")
            self._ranks.step_topic("save", step).fail(late)
            self._reports.emit("failed", step, f"{type(late).__name__}: {late}")
        due = (due or self._by_steps(n, since)) and n != self._begun
        self._steps.append(_Step(n, due))
        return due

    def announce(self, n: int, now: float) -> None:
        if not self._ranks.is_coordinator:
            return
        ahead, cadence = self._ahead, self._cadence
        ended = [one for one in self._started if one.ended()]
        self._started = deque((one for one in self._started if one not in ended), MAX_IN_FLIGHT)
        if any(isinstance(one.error(), HeardLate) for one in ended):  # guard: late-rank-extends-lead
            ahead.extend_lead()
        if isinstance(cadence, Pace):
            if why := cadence.passed(n, now):
                self._reports.emit("tuned", n, why)
            steps = cadence.auto.interval_steps
            if steps != self._announced_interval and ahead.announce(n, "every", steps):
                self._announced_interval = steps
        elif self._due_by_time(now, cadence) and not self.full():
            ahead.announce(n, "save")
        end = self._newest_end()
        # guard: save-end-announced
        if end is not None and end != self._announced_end and ahead.announce(n, "ended", end):
            self._announced_end = end

    def _newest_end(self) -> int | None:
        """The step of the newest save in flight that has ended, as have all earlier ones; None: the oldest has not."""
        # guard: ends-announced-in-order
        ended = itertools.takewhile(lambda one: one[1] is None or one[1].ended(), self._unended.items())
        return max((step for step, _ in ended), default=None)

    def _due_by_time(self, now: float, cadence: Every) -> bool:
        """Whether enough seconds have passed since the last save, and no save is announced for a later step."""
        late = cadence.seconds is not None and now - self._saved_at >= cadence.seconds
        return late and not any(one.kind == "save" for one in self._ahead.pending)

    def full(self) -> bool | None:
        # guard: unannounced-end-counts-in-flight
        return None if self._in_flight is None else len(self._unended) >= self._in_flight

    def admitted(self, n: int) -> None:
        if self._in_flight is not None:
            self._unended[n] = None
        if n in self._left_out:
            self._left_out.remove(n)

    def left_out(self, n: int) -> None:
        self._left_out.append(n)

    def begun(self, save: Save, began: float, now: float, waited_seconds: float) -> None:
        self._saved_at, self._saved_step, self._begun = now, save.step, save.step
        if self._ranks.is_coordinator:
            self._started.append(save)
            if isinstance(self._cadence, Pace):
                self._cadence.begun(save, began, waited_seconds)
        if save.step in self._unended:
            self._unended[save.step] = save

    def _by_steps(self, n: int, since: int) -> bool:
        since = max(since, self._from)
        return bool(self._interval) and n > since and crossed(self._interval, since - self._from, n - self._from)

    def _take_announced(self, n: int, before: int) -> tuple[bool, list[int]]:
        """Apply the announcements that take effect by step `n`. `before`: the step of the loop before it.

        Returns whether a save was announced for step `n`, and the steps of the loop at which the other ranks save and
        this rank did not. Step numbers may have gaps: what is announced for a number that lies between two steps of the
        loop takes effect at the second of them.
        """
        due, missed = False, list[int]()
        for one in self._ahead.pop_due(n):  # in the order of their steps
            if one.kind == "ended":
                self._free(one.value)
                if one.step <= before and not self._ranks.is_coordinator:
                    missed += self._take_left_out(one.step)  # guard: missed-place-fails
            elif one.kind == "save":
                due |= one.step > before
                if one.step <= before:
                    missed += self._take_unsaved([one.step])  # guard: missed-timed-save-fails
            elif one.kind == "every":
                self._interval, self._from = one.value, one.step  # guard: interval-holds-from-its-step
                # guard: missed-interval-save-fails
                missed += self._take_unsaved(range(one.step + one.value, before + 1, one.value))
        return due, sorted(set(missed))

    def _free(self, last: int) -> None:
        """Free the places of the saves up to step `last`."""
        for step in [step for step in self._unended if step <= last]:
            del self._unended[step]
        if self._announced_end == last:
            self._announced_end = None

    def _take_left_out(self, since: int) -> list[int]:
        """The steps from `since` on that this rank has left out, as many as have a place now: the others save these."""
        missed = list[int]()
        for step in sorted(self._left_out):
            if step >= since and not self.full():
                self.admitted(step)
                missed.append(step)
        return missed

    def _take_unsaved(self, announced: Iterable[int]) -> list[int]:
        """The steps of the loop, of those announced too late, that this rank has not saved and the others have.

        An announced number between two steps of the loop means the second of them. Steps that the others have left out
        may be among these: nobody waits for them, so to fail them too is harmless.
        """
        missed = list[int]()
        for number in announced:
            step = next((one for one in self._steps if one.n >= number), _Step(number, False))
            if not step.due or step.n in self._left_out:
                missed.append(step.n)
                if not self.full():
                    self.admitted(step.n)
        return missed

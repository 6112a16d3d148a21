"""Timing: at which steps a save is due, and whether there is a place for it; of several ranks, the same on all.

By steps every rank knows alone. What depends on a clock or on how long saves take rank 0 knows, and tells the others
some steps ahead (coordination/announcements.py): a save, another interval, the end of a save that makes room for the
next. Everything here runs on the training thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ..coordination.announcements import Announcements
from ..coordination.rounds import RankGroup
from ..errors import HeardLate
from ..events import EventKind
from ..policy.cadence import Every, crossed
from ..policy.tune import FIRST_STEPS
from ..run.save_handle import Save
from .adaptive_interval import Pace

Note = Callable[[EventKind, int, str], None]
"""of an event: kind, step, detail"""
REMEMBERED_STEPS = 10_000
"""of the loop, among which the one is found at which the other ranks have saved"""


class Timing:
    """Of one process."""

    def __init__(self, cadence: Every | Pace, note: Note) -> None:
        self._cadence, self._note = cadence, note
        self._saved_at, self._saved_step = 0.0, 0
        self._begun: int | None = None
        """the step of the last save that was begun, due or by hand"""
        self.before = 0
        """the step of the loop that was asked about last"""

    def restored(self, n: int, now: float) -> None:
        """The state is that of step `n`."""
        self._saved_at, self._saved_step, self.before = now, n, n

    def due(self, n: int, now: float) -> bool:
        """Whether to save at step `n`. `now`: seconds of a monotonic clock."""
        since, self.before = max(self.before, self._saved_step), n
        if isinstance(self._cadence, Every):
            return n != self._begun and self._cadence.due(n, now - self._saved_at, since)
        if why := self._cadence.passed(n, now):
            self._note("tuned", n, why)
        return self._cadence.auto.due(n, self._saved_step)

    def tell(self, n: int, now: float) -> None:
        """Let other ranks know what they cannot know by themselves. Raises TierDown, and does so again later."""

    def full(self) -> bool | None:
        """Whether as many saves are in flight as may be, where that must be the same for all; None: look for itself."""
        return None

    def counted(self, n: int) -> None:
        """A save of step `n` has its place; whatever becomes of it."""

    def begun(self, save: Save, began: float, now: float, waited_seconds: float) -> None:
        """Its state was cut from `began` on, after so long a wait for its place."""
        self._saved_at, self._saved_step, self._begun = now, save.step, save.step
        if isinstance(self._cadence, Pace):
            self._cadence.begun(save, save.step, began, waited_seconds)


class TimingTogether(Timing):
    """Of one of several ranks. `in_flight`: saves at a time, where there may be no more; None: the next one waits."""

    def __init__(
        self, cadence: Every | Pace, note: Note, ranks: RankGroup, ahead: Announcements, in_flight: int | None
    ) -> None:
        super().__init__(cadence, note)
        self._ranks, self._ahead, self._in_flight = ranks, ahead, in_flight
        self._interval = FIRST_STEPS if isinstance(cadence, Pace) else cadence.steps or 0
        self._from = 0
        self._told_interval = self._interval
        self.listens = isinstance(cadence, Pace) or cadence.seconds is not None or in_flight is not None
        """whether there is something to be told"""
        self._flying: dict[int, Save | None] = {}
        """saves of which the end has not been told, or does not hold yet"""
        self._told_ends: set[int] = set()
        self._last: Save | None = None
        self._steps: deque[tuple[int, bool]] = deque(maxlen=REMEMBERED_STEPS)
        """the newest steps of the loop, and whether a save was due"""

    def restored(self, n: int, now: float) -> None:
        super().restored(n, now)
        self._steps.clear()
        if isinstance(self._cadence, Pace):
            self._from = n

    def due(self, n: int, now: float) -> bool:
        """As of one process. What was announced to this rank too late fails, on all ranks."""
        since, before, self.before = max(self.before, self._saved_step), self.before, n
        due, missed = self._take_announced(n, before)
        for step in missed:
            late = HeardLate(f"heard of step {step} at step {n} only")
            self._ranks.step_topic("save", step).fail(late)
            self._note("failed", step, str(late))
        due = (due or self._by_steps(n, since)) and n != self._begun
        self._steps.append((n, due))
        return due

    def tell(self, n: int, now: float) -> None:
        if not self._ranks.is_coordinator:
            return
        ahead, cadence = self._ahead, self._cadence
        if isinstance(cadence, Pace):
            if why := cadence.passed(n, now):
                self._note("tuned", n, why)
            steps = cadence.auto.interval_steps
            if steps != self._told_interval and ahead.announce(n, "every", steps):
                self._told_interval = steps
        elif self._due_by_time(now, cadence) and not self.full():
            if self._last is not None and isinstance(self._last.error(), HeardLate):
                ahead.extend_lead()
            ahead.announce(n, "save")
        for step, save in self._flying.items():
            # guard: save-end-announced
            if step not in self._told_ends and (save is None or save.ended()) and ahead.announce(n, "ended", step):
                self._told_ends.add(step)

    def _due_by_time(self, now: float, cadence: Every) -> bool:
        """And not told yet."""
        late = cadence.seconds is not None and now - self._saved_at >= cadence.seconds
        return late and not any(one.kind == "save" for one in self._ahead.pending)

    def full(self) -> bool | None:
        # guard: unannounced-end-counts-in-flight
        return None if self._in_flight is None else len(self._flying) >= self._in_flight

    def counted(self, n: int) -> None:
        if self._in_flight is not None:
            self._flying[n] = None

    def begun(self, save: Save, began: float, now: float, waited_seconds: float) -> None:
        self._saved_at, self._saved_step, self._begun, self._last = now, save.step, save.step, save
        if isinstance(self._cadence, Pace) and self._ranks.is_coordinator:
            self._cadence.begun(save, save.step, began, waited_seconds)
        if save.step in self._flying:
            self._flying[save.step] = save

    def _by_steps(self, n: int, since: int) -> bool:
        since = max(since, self._from)
        return bool(self._interval) and n > since and crossed(self._interval, since - self._from, n - self._from)

    def _take_announced(self, n: int, before: int) -> tuple[bool, list[int]]:
        """Whether a save was announced for this step, and the steps of which it was announced too late.

        Steps need not count by ones: what was announced for a step that lies between two holds at the second one.
        """
        due, missed = False, list[int]()
        for one in self._ahead.pop_due(n):
            if one.kind == "ended":
                self._flying.pop(one.value, None)
                self._told_ends.discard(one.value)
            elif one.kind == "save":
                due |= one.step > before
                missed += [one.step] if one.step <= before else []  # guard: missed-timed-save-fails
            elif one.kind == "every":
                self._interval, self._from = one.value, one.step  # guard: interval-holds-from-its-step
                missed += range(one.step + one.value, before + 1, one.value)  # guard: missed-interval-save-fails
        held = [self._held_at(step) for step in missed]
        return due, sorted({step for step, saved in held if not saved})

    def _held_at(self, announced: int) -> tuple[int, bool]:
        """The step of the loop at which an announced one held, and whether this rank saved at it all the same."""
        return next((one for one in self._steps if one[0] >= announced), (announced, False))

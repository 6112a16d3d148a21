"""Saves of one training loop, as the training thread makes them: a place in flight, a plan, and the start.

What follows the start runs behind the loop (run/pipeline.py). Nothing here decides when a save is due (schedule.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

from .. import reporting
from ..coordination.announcements import Announcements
from ..coordination.rounds import RankGroup
from ..coordination.single_rank import AnyRanks, AnyTopic
from ..errors import Damaged, InFlightFull, StepTaken
from ..format import commit
from ..format import parity_layout as striping
from ..policy.arguments import require
from ..policy.cadence import Every
from ..policy.retention import wanted
from ..policy.tune import Auto
from ..records import Generation, GenerationId
from ..run import disk_space
from ..run.pipeline import Pipeline
from ..run.planned_save import PlannedSave
from ..run.save_handle import Save
from ..snapshot.unchanged import changed, is_same, require_unchanged
from ..state.live_check import Numbers
from .adaptive_interval import Pace
from .load import LoadRequest
from .options import Options
from .save_planner import SavePlanner
from .schedule import Timing, TimingTogether

Emit = Callable[..., None]
"""kind, step, detail="", seconds=0.0 of an event"""


class Saver:
    """Makes the saves of one `Checkpointer`."""

    def __init__(
        self,
        request: LoadRequest,
        options: Options,
        pipeline: Pipeline,
        planner: SavePlanner,
        ranks: AnyRanks,
        emit: Emit,
    ) -> None:
        self._request, self._options, self._pipeline, self._planner = request, options, pipeline, planner
        self._ranks, self._emit = ranks, emit
        self.busy = False
        """whether the state is being copied by the training thread"""
        self.half_loaded = False
        """whether the live state is a part of a step, after a restore that failed half way"""
        self.last: Save | None = None
        """the newest save that was begun since the run was opened or restored"""
        self._restored: Generation | None = None
        """what was restored, where the next process would resume there too"""
        self._cadence: Every | Pace = _cadence(options)
        self._fence_seconds = 0.0
        self.follow(0)

    def follow(self, n: int, restored: Generation | None = None) -> None:
        """The steps after `n` follow; what was announced of others does not hold any more."""
        state, options = self._request.state, self._options
        self.last, self._restored = None, restored
        self._numbers = Numbers(state, options.include, options.exclude)
        self.announcements: Announcements | None = None
        """with several ranks: what rank 0 publishes some steps ahead"""
        self.schedule: Timing
        self.listens = False
        """whether other ranks may announce anything"""
        if isinstance(self._ranks, RankGroup):
            self.announcements = Announcements(self._ranks)
            bound = None if options.tuning.when_full == "wait" else options.tuning.in_flight
            self.schedule = several = TimingTogether(self._cadence, self._emit, self._ranks, self.announcements, bound)
            self.listens = several.listens or options.preemption is not None
        else:
            self.schedule = Timing(self._cadence, self._emit)
        self.schedule.restored(n, time.monotonic())

    # ---- a save --------------------------------------------------------------------------------------------

    def save(
        self,
        n: int,
        milestone: bool,
        metrics: Mapping[str, float],
        must: bool,
        timeout_seconds: float | None = None,
    ) -> Save | None:
        """Begin a save of step `n`; None where `when_full` skips it.

        `must`: it is wanted for itself, and never skipped. `timeout_seconds`: how long it waits for a place, whatever
        `when_full` says.
        """
        require(not self.half_loaded, "the live state is half of another step", "restore() it first.")
        if self.last is not None and not self.last.failed() and n <= self.last.step:
            raise StepTaken(
                f"step {n} cannot follow step {self.last.step}",
                safe="Nothing was written.",
                todo="Save ascending steps; to go back, restore(step=...) first.",
            )
        if self._ranks.size == 1:
            self._request.patterns.report(self._request.state)
        waited = self._wait_for_a_place(n, must, timeout_seconds)
        if waited is None:
            return None
        begun = time.monotonic()
        self.schedule.counted(n)
        topic = self._ranks.step_topic("save", n)
        with self._reading_the_state():
            try:
                at, planned = self._planned(n, topic)
                newest_only = self._pipeline.run.tier.newest_only  # an older one would take the place of a newer one
                pinned = (must and not newest_only) or wanted(self._options.retention, n, milestone, metrics)
            except BaseException as error:
                self._pipeline.leave(n, topic, error)  # guard: unstarted-save-frees-place
                raise
            save = Save(n)  # its seconds are those of the write: planning may have waited for other ranks
            self._pipeline.start(save, at, planned, topic, pinned, milestone, metrics)
            if planned.overlapped:
                self._planner.begun(planned)
        now = time.monotonic()
        save.stall_seconds, self.last = waited + now - begun, save
        self.schedule.begun(save, begun, now, waited)
        self._numbers.saved(n, self._request.state)
        return save

    @contextlib.contextmanager
    def _reading_the_state(self) -> Iterator[None]:
        """`busy` inside; an exception that is no Exception may come between any two lines of the copy."""
        self.busy = True
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception):
                self._planner.interrupted()
            raise
        finally:
            self.busy = False

    def _planned(self, n: int, topic: AnyTopic) -> tuple[GenerationId, PlannedSave]:
        """Where the save of step `n` goes, and how the state gets there."""
        if self._ranks.size > 1:
            self._pipeline.admit_step(n)  # the first opens the incarnation: nobody waits there for a plan that fails
        planned = self._planner.plan(self._request.state, topic)
        at = self._pipeline.admit_step(n)
        if self.last is None:
            if self._ranks.size > 1 and self._ranks.is_coordinator:
                self.report_bound(planned.bytes * self._ranks.size)  # all write about as much
            if self._planner.note:
                reporting.info(self._planner.note)
        return at, planned

    def _wait_for_a_place(self, n: int, must: bool, timeout_seconds: float | None) -> float | None:
        """Take a place in flight, as `when_full` says: how many seconds that took; None where this save is skipped.

        With `timeout_seconds` it waits so long, whatever `when_full` says.
        """
        full = self.schedule.full()
        if not full and self._pipeline.admit(0.0):
            return 0.0
        if full is not False and self._options.tuning.when_full == "raise" and timeout_seconds is None:
            raise InFlightFull(
                f"step {n} was not saved: {self._options.tuning.in_flight} saves are in flight",
                safe="They go on.",
                todo='Save less often, allow more (in_flight=...), or wait (when_full="wait").',
            )
        begun = time.monotonic()
        skips = (
            full is not False and self._options.tuning.when_full == "skip" and not must
        )  # guard: manual-save-not-skipped
        if skips or not self._pipeline.admit(timeout_seconds):  # guard: due-save-skipped-when-full
            self._emit("skipped", n)
            return None
        waited = time.monotonic() - begun
        self._emit("waited", n, seconds=waited)
        return waited

    # ---- a step that is saved already ----------------------------------------------------------------------

    def again(self, n: int, milestone: bool, metrics: Mapping[str, float]) -> Save | None:
        """The save of step `n` that exists or is about to; milestone and metrics are added. None where there is none.

        Raises StepTaken where the state is another one than was saved of this step.
        """
        last = self.last
        if last is not None and last.step == n:
            if self._ranks.size > 1:
                last.wait_ended()  # so that all ranks come to the same decision
            if last.failed():
                return None
            self._pipeline.add(last, False, {})  # from now on no newer save stands in for it
            self._require_same_state(last)
            return self._pipeline.add(last, milestone, metrics)
        if last is None and (restored := self._restored_save(n)) is not None:
            return self._pipeline.add(restored, milestone, metrics)
        return None

    def _require_same_state(self, save: Save) -> None:
        """A step that is saved a second time is what was saved of it, on every rank. Waits until that is durable."""
        save.wait_ended()
        if not save.durable():
            return
        topic = self._ranks.step_topic("same", save.step)
        with topic.failing():
            manifest = commit.read_manifest(self._pipeline.run.tier, save.result(), self._ranks.rank)
            names = changed(self._planner.captured(self._request.state), manifest)
        names = topic.agree(names, lambda posts: sorted({name for one in posts for name in one}))
        require_unchanged(save.step, names)

    def _restored_save(self, n: int) -> Save | None:
        """The save that was restored, where step `n` is that step and the state is as it was saved."""
        generation = self._restored
        if generation is None or generation.step != n:
            return None
        with contextlib.suppress(Damaged):  # it cannot be compared any more: the step is written anew
            manifest = commit.read_manifest(self._pipeline.run.tier, generation)
            if is_same(self._planner.captured(self._request.state), manifest):  # guard: unchanged-restore-not-rewritten
                return Save.of(generation)
        return None

    # ---- reports -------------------------------------------------------------------------------------------

    def report_bound(self, state_bytes: int) -> None:
        """Report the most that the run takes on its disk. `state_bytes`: of one generation, of all ranks."""
        run, options = self._pipeline.run, self._options
        spare = striping.share(options.parity) if options.parity else 0.0
        total = state_bytes + round(state_bytes * spare)
        held = sum(one.bytes for one in run.known.survey.generations.values())
        disk_space.report_bound(run.tier, options.retention, options.tuning.in_flight, total, held)

    def note_fence(self) -> None:
        """What the loop waited for at the fence is part of what its last save cost."""
        waited = self._planner.fence.waited_seconds - self._fence_seconds
        if waited and self.last is not None:
            self._fence_seconds += waited
            self.last.stall_seconds += waited
            self._emit("fenced", self.last.step, seconds=waited)


def _cadence(options: Options) -> Every | Pace:
    if isinstance(options.cadence, Every):
        return options.cadence
    if options.tuning.overhead is None:
        return Pace(Auto(in_flight=options.tuning.in_flight))
    return Pace(Auto(overhead=options.tuning.overhead, in_flight=options.tuning.in_flight))

"""Saver: one save as the training thread makes it: it takes a place in flight, plans the save and starts it.

    check the step -> wait for a place -> plan (save_planner.py) -> Pipeline.start       all on the training thread

What follows the start runs behind the loop (run/pipeline.py). schedule.py decides when a save is due.

Invariants
  1. A place in flight that was acquired is released: by the flight that `Pipeline.start` registers, or by `Saver.save`
     if the save does not get so far.
  2. What keeps this rank from a save once it has a place is posted in the topic of its step, so that no other rank
     waits for this one. What comes before (ascending steps, a place in flight) is the same on all ranks; a rank that
     learns too late that it was not fails the steps that it left out (schedule.py).
  3. Steps that are saved ascend, and only a restore goes back. A step is saved again only if its save failed, or if it
     is the restored one and its state has changed, or its manifest can no longer be read.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from .. import reporting
from ..coordination.announcements import Announcements
from ..coordination.rounds import RankGroup
from ..coordination.single_rank import AnyRanks, AnyTopic
from ..errors import Damaged, InFlightFull, LastgoodError, NotWritable, StepTaken, Unavailable
from ..format import commit
from ..policy.arguments import is_switch, require
from ..policy.cadence import Every
from ..policy.failures import Known
from ..policy.retention import lacks_metric, wanted
from ..policy.tune import Auto
from ..records import Generation, GenerationId, Manifest
from ..run.pipeline import Pipeline
from ..run.planned_save import PlannedSave
from ..run.save_handle import Save
from ..snapshot.unchanged import changed, changed_beside, changed_values, is_same, require_unchanged
from ..state.capture import Captured
from ..state.live_check import Numbers
from ..state.parameter_versions import ParameterWatch
from ..units import shortened
from .adaptive_interval import Pace
from .bounds import Bounds
from .copy_pace import CopyPace
from .load import LoadRequest
from .metrics import checked
from .options import Options
from .reports import Reports
from .save_planner import SavePlanner
from .schedule import AgreedSchedule, Schedule
from .tiers import PlaceCadence


class Saver:
    """Makes the saves of one `Checkpointer`. All methods are called on the training thread.

    `failures`: what is known of those of the job.
    """

    def __init__(
        self,
        request: LoadRequest,
        options: Options,
        pipeline: Pipeline,
        planner: SavePlanner,
        ranks: AnyRanks,
        reports: Reports,
        failures: Known,
    ) -> None:
        self._request, self._options, self._pipeline, self._planner = request, options, pipeline, planner
        self._ranks, self._reports = ranks, reports
        self._bounds = Bounds(options, pipeline)
        self.busy = False
        """whether the training thread is reading the state for a save: no other call of the user may come now"""
        self.half_loaded = False
        """whether the live state is a part of a step, after a restore that failed half way: then nothing is saved"""
        self.examined = self._examined_metrics = False
        """whether `examine` has checked the state, or a restore has"""
        self._metrics = list[Mapping[str, float]]()
        """those of the first saves"""
        self.last: Save | None = None
        """the newest save that was started since the run was opened or restored"""
        self.first_step: int | None = None
        """of the first save that was started since then; None: none was"""
        self._restored: Generation | None = None
        """the restored generation, if the next process would resume at it too"""
        self._cadence: Every | Pace = _cadence(options, failures)
        self._below = [self._cadence_below(place, failures) for place in range(len(options.cadences_below()))]
        self._changed_late = 0
        """how many saves of a step that was saved already have found values that changed since"""
        self._fence_seconds = 0.0
        """the part of `Fence.waited_seconds` that is counted in a save already"""
        self.follow(0)

    def follow(self, n: int, restored: Generation | None = None) -> None:
        """Begin again after step `n`, of which `restored` is the generation. Earlier announcements no longer hold."""
        state, options = self._request.state, self._options
        self.last, self.first_step, self._restored = None, None, restored
        self._from = n
        """the step at which the loop began"""
        self._numbers = Numbers(state, options.include, options.exclude)
        self._watch = ParameterWatch(state if self._ranks.is_coordinator else {}, n)
        self.announcements: Announcements | None = None
        """with several ranks: what rank 0 publishes some steps ahead"""
        self.schedule: Schedule
        self.expects_announcements = False
        """whether rank 0 may publish anything for this run"""
        if isinstance(self._ranks, RankGroup):
            self.announcements = Announcements(self._ranks)
            bound = None if options.tuning.when_full == "wait" else options.tuning.in_flight
            self.schedule = agreed = AgreedSchedule(
                self._cadence, self._reports, self._ranks, self.announcements, bound
            )
            self.expects_announcements = agreed.expects_announcements or options.preemption is not None
        else:
            self.schedule = Schedule(self._cadence, self._reports)
        self.schedule.restored(n, time.monotonic())
        self._pipeline.places.forget_owed()
        for one in self._below:
            one.restored(n, time.monotonic())

    def _cadence_below(self, place: int, failures: Known) -> PlaceCadence | CopyPace:
        """When copies to the place of this position among the lower ones are due."""
        options, below = self._options, self._pipeline.places.below
        cadence = options.cadences_below()[place]
        if cadence != "auto":
            return PlaceCadence(cadence, self._ranks.size == 1)
        rule = options.rule_below(place, failures)
        return CopyPace(Auto.first(rule), below[place].tier.place if below else "", self._reports)

    def require_idle(self) -> None:
        """Raises Refused while a save reads the state: a signal handler may have interrupted it."""
        require(not self.busy, "a save was asked for while the state is copied", "In a signal handler set a flag only.")

    def examine(self, metrics: Mapping[str, Any] | None) -> None:
        """Before the first save: raise what every save would, and report the bound of each place.

        Raises NotRestored, Unstorable with everything that cannot be stored, and Refused for a pattern that matches no
        name, and for `metrics` that are no numbers. Only the first call examines anything; after NotRestored, the next
        call does so again.
        """
        if not self._examined_metrics:
            checked(metrics)  # guard: metrics-checked-at-first-step
            self._examined_metrics = True
        if self.examined:
            return
        self._pipeline.run.known.require_restored()  # guard: forgotten-restore-refused
        self.examine_state()

    def examine_state(self) -> None:
        """Raise what every save would, but for NotRestored and `metrics`, and report the bound of each place.

        Several ranks call it together, in a restore or in the first step after a fresh start.
        """
        self.examined = True
        self._planner.examine(self._request.state, self._request.patterns, self._pipeline.workers, self._bounds.report)

    def require_milestone(self, milestone: object) -> None:
        """Raise Refused for what is neither True nor False, such as metrics in its place, and for True in slots."""
        require(  # guard: milestone-is-true-or-false
            is_switch(milestone),
            f"milestone={milestone!r}",
            'Give True or False; metrics by name: save(n, metrics={"loss": loss}).',
        )
        require(
            not (milestone and self._pipeline.run.tier.newest_only),
            "a milestone in slots, which keep the newest only",
            "Save it to a directory: lastgood.save(path, ...).",
        )

    # ---- a save --------------------------------------------------------------------------------------------

    def save(
        self,
        n: int,
        milestone: bool,
        metrics: Mapping[str, float],
        must: bool,
        timeout_seconds: float | None = None,
    ) -> Save | None:
        """Start a save of step `n`. Returns its handle; None if `when_full` skips it.

        `milestone`, `metrics`: as for `Checkpointer.save`; metrics are finite numbers. `must`: whether the caller wants
        this very save, so that it is never skipped and no newer save replaces it. `timeout_seconds`: how long to wait
        for a place in flight, whatever `when_full` says; None: as `when_full` says. Raises Refused while the state is
        half loaded, StepTaken, InFlightFull, Unstorable, and what the other ranks raise.
        """
        require(not self.half_loaded, "the live state is half of another step", "restore() it first.")
        if self.last is not None and not self.last.failed() and n <= self.last.step:
            raise StepTaken(
                f"step {n} cannot follow step {self.last.step}",
                safe="Nothing was written.",
                todo="Save ascending steps; to go back, restore(step=...) first.",
            )
        self._watch.saved(n, self._request.state)
        if self._ranks.size == 1:
            self._request.patterns.report(self._request.state)
        topic: AnyTopic | None = None
        try:
            waited = self._wait_for_a_place(n, must, timeout_seconds)
            if waited is None:
                return None
            begun = time.monotonic()
            topic = self._ranks.step_topic("save", n)
            self.schedule.admitted(n)
            with self._reading_the_state():
                at, planned = self._planned(n, topic)
                newest_only = self._pipeline.run.tier.newest_only  # an older one would take the place of a newer one
                pinned = (must and not newest_only) or self._is_kept(n, milestone, metrics)
                save = Save(n)  # its seconds are those of the write: planning may have waited for other ranks
                copied = self._owe(n, must)
                self.first_step = n if self.first_step is None else self.first_step
                self._pipeline.start(save, at, planned, topic, pinned, milestone, metrics)
                for cadence, is_copied in zip(self._below, copied, strict=True):
                    cadence.begun(save, is_copied, time.monotonic())
                if planned.overlapped:
                    self._planner.hold_updates(planned)
        except BaseException as error:  # also Ctrl-C, between any two of these lines
            if self._pipeline.holds_place:
                self._pipeline.release_place(
                    n, topic or self._ranks.step_topic("save", n), error
                )  # guard: unstarted-save-frees-place
            raise
        now = time.monotonic()
        save.stall_seconds, self.last = waited + now - begun, save
        self.schedule.begun(save, begun, now, waited)
        self._reports.enqueued(n, now - begun)
        self._numbers.saved(n, self._request.state)
        self._report_lacking_metric(metrics)
        return save

    def _is_kept(self, n: int, milestone: bool, metrics: Mapping[str, float]) -> bool:
        """Whether retention selects a save of step `n`, as far as all ranks know the same: that of the last save that
        was begun, which may fail, or of the restored step counts as the one before it."""
        since = self.last.step if self.last is not None else self._from  # guard: passed-multiple-pinned
        return wanted(self._options.front.keep, n, milestone, metrics, since)

    def _report_lacking_metric(self, metrics: Mapping[str, float]) -> None:
        """Report, once and at rank 0, if the metric by which saves are kept never comes, in earlier jobs too."""
        keep = self._options.front.keep
        if keep.best is None or len(self._metrics) > keep.last:
            return
        self._metrics.append(metrics)
        text = lacks_metric(keep, self._metrics) if self._ranks.rank == 0 else ""  # guard: lacking-metric-reported
        if text and not any(keep.best[0] in one.commit.metrics for one in self._pipeline.run.known.lineage()):
            reporting.warning(text)

    def due(self, n: int, now: float) -> bool:
        """Whether to save at step `n`: in the place that is written first, or in one below. Once for each step."""
        self._watch.steps += 1  # guard: unchanged-steps-are-calls
        is_new = n > self.schedule.previous_step  # not in the middle of the accumulation of gradients
        below = [one.due(n, now) for one in self._below]
        return (self.schedule.due(n, now) or any(below)) and is_new  # guard: repeated-step-saves-nothing

    def _owe(self, n: int, must: bool) -> list[bool]:
        """A save of step `n` begins: note to which places below it is copied, and return that. `must`: to all."""
        copied = [must or one.is_due for one in self._below]
        for place, is_copied in enumerate(copied):
            if is_copied:
                self._pipeline.places.owe(place, n)
        return copied

    @contextlib.contextmanager
    def _reading_the_state(self) -> Iterator[None]:
        """`busy` is true inside. KeyboardInterrupt, which may come at any point, may lose a chunk of the arena."""
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
        """The id of the generation that a save of step `n` makes, and the plan of that save."""
        if self._ranks.size > 1:
            # The first call since the run was opened or restored begins the incarnation, which takes all ranks. It
            # comes before the plan, so that a rank whose plan fails takes part in it.
            self._pipeline.admit_step(n)
        planned = self._planner.plan(self._request.state, topic)
        at = self._pipeline.admit_step(n)
        if self.last is None and self._planner.note:
            reporting.info(self._planner.note)
        return at, planned

    def _wait_for_a_place(self, n: int, must: bool, timeout_seconds: float | None) -> float | None:
        """Take a place among the saves in flight. Returns the seconds that took; None if this save is skipped.

        If none is free, `when_full` decides whether to wait, to skip, or to raise InFlightFull. `must` and
        `timeout_seconds`: as for `save`.
        """
        full = self.schedule.full()
        if not full and self._pipeline.acquire_place(0.0):
            return 0.0
        if full is not False and self._options.tuning.when_full == "raise" and timeout_seconds is None:
            self.schedule.left_out(n)
            raise InFlightFull(
                f"step {n} was not saved: {self._options.tuning.in_flight} saves are in flight",
                safe="They go on.",
                todo='Save less often, allow more (in_flight=...), or wait (when_full="wait").',
            )
        begun = time.monotonic()
        skips = (
            full is not False and self._options.tuning.when_full == "skip" and not must
        )  # guard: manual-save-not-skipped
        if skips or not self._pipeline.acquire_place(timeout_seconds):  # guard: due-save-skipped-when-full
            self.schedule.left_out(n)
            self._reports.emit("skipped", n)
            return None
        waited = time.monotonic() - begun
        self._reports.emit("waited", n, seconds=waited)
        return waited

    # ---- a step that is saved already ----------------------------------------------------------------------

    def existing(self, n: int, milestone: bool, metrics: Mapping[str, float]) -> Save | None:
        """The save of step `n` that is durable or under way, with milestone and metrics added. None if there is none.

        Raises StepTaken if the state differs from the one that was saved for this step. Where that cannot be read, the
        handle has ended with the error, on all ranks, and nothing was added.
        """
        last = self.last
        if last is not None and last.step == n:
            if self._ranks.size > 1:
                last.wait_ended()  # so that all ranks come to the same decision
            if last.failed():
                return None
            self._pipeline.pin_and_label(last, False, {})  # from now on no newer save replaces it
            try:
                self._require_same_state(last)
            except (Damaged, NotWritable, Unavailable) as error:
                return self._not_added(n, error)  # guard: unread-step-does-not-end-loop
            self._metrics[-1:] = [{**one, **metrics} for one in self._metrics[-1:]]
            return self._pipeline.pin_and_label(last, milestone, metrics)
        if last is None and (restored := self._restored_save(n)) is not None:
            return self._pipeline.pin_and_label(restored, milestone, metrics)
        return None

    def _require_same_state(self, save: Save) -> None:
        """Raises StepTaken unless the state is, on every rank, the one that `save` stored. Waits until it has ended."""
        save.wait_ended()
        if not save.is_committed():
            return
        topic = self._ranks.step_topic("same", save.step)
        with topic.failing():
            captured = self._planner.captured(self._request.state)  # all ranks take part
            manifest = commit.read_manifest(self._pipeline.run.tier, save.committed(), self._ranks.rank)
            names = changed(captured, manifest)
        names = topic.agree(names, lambda posts: sorted({name for one in posts for name in one}))
        require_unchanged(save.step, names)
        self._report_changed_values(save.step, captured, manifest)

    def _not_added(self, n: int, error: LastgoodError) -> Save:
        """Report why nothing was added to step `n`, which is saved; returns a handle that has ended with that error."""
        self._pipeline.outcomes.put_always(error)
        save = Save(n)
        save.note_staged()
        save.note_outcome(None, error)
        return save

    def compare_values(self, save: Save, buffers: Collection[str]) -> None:
        """Report data and schedules that have changed since `save` stored them, and those of these `buffers` that have.
        All ranks call it: to read a state may take all of them."""
        manifest = commit.read_manifest(self._pipeline.run.tier, save.committed(), self._ranks.rank)
        self._report_changed_values(save.step, self._planner.captured(self._request.state), manifest, buffers)

    def _report_changed_values(
        self, step: int, captured: Captured, manifest: Manifest, among: Collection[str] | None = None
    ) -> None:
        """`among`: the buffers and tensors in containers to compare; default None: all of them."""
        if not self._ranks.is_coordinator:
            return
        late = changed_values(self._request.state, captured, manifest)
        # guard: changed-buffers-reported
        late += changed_beside(self._request.state, captured, manifest, among)
        self._changed_late += bool(late)
        if late and reporting.is_reported(self._changed_late):
            reporting.warning(
                f"step {step} was saved before {shortened(late, 3)} changed, and what was saved has the "
                "values from before. What is done once an epoch, as a schedule, goes before step()"
            )

    def _restored_save(self, n: int) -> Save | None:
        """The save of the restored generation, if step `n` is its step and the state is still the same."""
        generation = self._restored
        if generation is None or generation.step != n:
            return None
        tier = self._pipeline.run.tier
        # What cannot be compared is written again.
        with contextlib.suppress(Damaged, NotWritable, Unavailable):  # guard: unread-restored-step-saved-again
            manifest = commit.read_manifest(tier, generation)
            if is_same(self._planner.captured(self._request.state), manifest):  # guard: unchanged-restore-not-rewritten
                return Save.of(generation, tier.place)
        return None

    # ---- reports -------------------------------------------------------------------------------------------

    def note_fence(self) -> None:
        """Add the time that the loop has waited at the fence to the stall of its last save."""
        waited = self._planner.fence.waited_seconds - self._fence_seconds
        if waited and self.last is not None:
            self._fence_seconds += waited
            self.last.stall_seconds += waited
            self._reports.fenced(self.last.step, waited)


def _cadence(options: Options, failures: Known) -> Every | Pace:
    front = options.front_cadence()
    if isinstance(front, Every):
        return front
    return Pace(Auto.first(options.rule(failures), options.tuning.in_flight))

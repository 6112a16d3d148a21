"""Ending: the last save of a training loop, after a signal or at a normal end, and the line that closes the run.

After a signal, the loop ends at the next step; of several ranks, at a step that rank 0 announces, so that all of them
save the same one. Everything here runs on the training thread.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import NoReturn

from .. import reporting
from ..coordination.single_rank import AnyRanks
from ..errors import CommitUnknown, LastgoodError, NotRestored, Refused, TrainingDiverged
from ..records import Generation
from ..run import paths
from ..run.follower import Follower
from ..run.pipeline import Pipeline
from ..run.save_handle import Save
from ..units import shortened
from .beat import Beat
from .preemption import EndRequest, Preempted
from .progress import Progress
from .saver import Saver
from .sentinel import DivergenceCheck

EXIT_SECONDS = 60.0
"""how long leaving the `with` on an exception waits for saves in flight"""


class Ending:
    """How one `Checkpointer` ends. `end_request`: the signals that request the end; None: no signal does."""

    def __init__(
        self,
        pipeline: Pipeline,
        saver: Saver,
        progress: Progress,
        ranks: AnyRanks,
        divergence: DivergenceCheck,
        end_request: EndRequest | None,
        beat: Beat,
    ) -> None:
        self._pipeline, self._saver, self._progress, self._ranks = pipeline, saver, progress, ranks
        self._divergence, self._end_request, self._beat = divergence, end_request, beat

    @property
    def preempted(self) -> bool:
        """Whether this rank has received a signal, or has begun its grace period because rank 0 announced the end."""
        return self._end_request is not None and self._end_request.at is not None

    def timeout_seconds(self) -> float:
        """How long closing after an exception waits for saves: what is left of the grace period after a signal."""
        return self._end_request.left_seconds if self._end_request is not None and self.preempted else EXIT_SECONDS

    def end_if_requested(self, n: int) -> None:
        """Make a last save and raise Preempted, if the run is to end at step `n`; TrainingDiverged instead if the last
        steps have diverged.

        Of several ranks, one that has received a signal has requested the end of rank 0, which announced the step.
        """
        announced = self._saver.announcements
        if self._end_request is None:
            return
        if announced is None:
            ends = self.preempted
        elif announced.end is None:
            return
        else:
            self._end_request.begin_grace()
            ends = n >= announced.end and announced.end_holds(n)
        if ends:
            with self._beat.saving():
                self._end(n, self._end_request)

    def close(self) -> None:
        """Restore the signal handlers that were installed before."""
        if self._end_request is not None:
            self._end_request.close()

    def _end(self, n: int, request: EndRequest) -> NoReturn:
        """Make the last save, if it can be durable in time, and raise Preempted. The timer of `request` bounds this."""
        problem: Exception | None = None
        for _ in range(2):  # a save that was torn, or failed, is tried once more: nothing changes the state now
            try:
                self._divergence.finish()  # guard: last-steps-compared-before-the-end
                last = self._saver.last
                if (last is None or last.step < n or last.failed()) and self._in_time(last, request.left_seconds):
                    self._progress.report_begun_step()
                    last = self._saver.save(n, False, {}, must=True, timeout_seconds=request.left_seconds) or last
                if last is not None:
                    last.committed(request.left_seconds)
                    self._pipeline.pin_and_label(last, False, {})  # it is copied to all places
                    self._wait_for_copies(last, request.left_seconds)
                problem = None
                break
            except TrainingDiverged:
                raise
            except Exception as error:  # noqa: BLE001 - reported below; the run ends all the same
                problem = error
        with contextlib.suppress(LastgoodError):  # then the report is about what this rank knew before
            refresh(self._pipeline)
        newest = newest_durable(self._pipeline)
        durable = f"step {newest.step} is durable" if newest else "nothing is durable"
        more = f" {type(problem).__name__}: {problem}" if problem else ""
        level = reporting.threat if newest is None or problem else reporting.warning
        level(f"asked to end at step {n}: {durable}, exit {request.options.exit_code}.{more}")
        raise Preempted(request.options.exit_code, newest.step if newest else None)

    def _wait_for_copies(self, last: Save, left_seconds: float) -> None:
        """Wait until the last save is in all places. Ranks other than 0 copy their parts until rank 0 has all of it."""
        topic = self._ranks.step_topic("copied", last.step)
        with topic.failing():
            last.result(left_seconds)
        if self._pipeline.run.known.below:
            topic.agree(None, lambda _: None)

    def _in_time(self, last: Save | None, left_seconds: float) -> bool:
        """Whether a save would be durable in time if it took as long as the `last` one; with several ranks, on all."""
        mine = (last.seconds if last is not None and last.is_committed() else 0.0) <= left_seconds
        announced = self._saver.announcements
        if announced is None or announced.end is None:
            return mine
        return bool(self._ranks.step_topic("leave", announced.end).agree(mine, all))

    def save_newest(self) -> None:
        """At a normal end: save the newest step of the loop, unless it is saved, and wait until that has ended.

        Does nothing if the loop has completed no step, or if the state is half loaded. Of several ranks each comes to
        the same decision by itself: it depends on the steps, and on saves that succeed or fail on all of them.
        """
        n = self._progress.step
        if n == self._progress.resumed_step or self._saver.half_loaded:
            return
        self._pipeline.wait()
        last = self._saver.last
        if last is not None and last.step == n and isinstance(last.error(), CommitUnknown):
            return  # the generation may exist: the next opening finds out, and the closing line says what is known
        if last is None or last.step < n or last.failed():
            if self._is_updated(n):
                return
            self._progress.report_begun_step()
            with contextlib.suppress(NotRestored):  # the state does not continue the run; the closing line reports that
                save = self._saver.save(n, False, {}, must=True, timeout_seconds=threading.TIMEOUT_MAX)
                assert save is not None
                save.wait_ended()
        elif last.is_committed():
            self._pipeline.pin_and_label(last, False, {})  # so that every place receives the newest step
            self._compare_values(last)

    def _compare_values(self, last: Save) -> None:
        """Report an update that has begun on this rank since the last save; if none has, values that have changed."""
        if self._progress.update_begun:
            what = f"{self._pipeline.run.tier.place}: an optimizer has stepped since step {last.step}"
            todo = "call step() after each step of the optimizer, after the last one too"
            reporting.warning(f"{what}, and what it has changed is not saved: {todo}")
            return
        try:
            self._saver.compare_values(last, self._progress.buffers.changed())
        except LastgoodError as error:
            self._pipeline.outcomes.put(error)

    def _is_updated(self, n: int) -> bool:
        """Whether an optimizer has begun a step on any rank since the loop has completed step `n`, or a forward pass
        has brought NaN into a buffer: then the state is that of no step, or of a later one, and the save of `n` fails.
        All ranks agree, and fail if one does not come.
        """
        try:
            what = "an optimizer has stepped" if self._progress.update_begun else ""
            if not what and (spoiled := self._progress.buffers.spoiled()):  # guard: nan-of-next-step-not-saved
                what = f"a forward pass has brought NaN into {shortened(spoiled, 3)}"
            what = self._ranks.agree("updated at the end", what, lambda posts: next(filter(None, posts), ""))
            if what:  # guard: updated-state-not-saved-on-exit
                raise Refused(
                    f"{what} since step {n} was completed, so this is not the state of step {n}",
                    safe="The saves of earlier steps are untouched.",
                    todo="Start again: the newest of them is restored, and what followed it is trained again. "
                    "Call step() after each step of the optimizer, after the last one too, and leave the loop there.",
                )
        except LastgoodError as error:
            self._pipeline.outcomes.put(error, n)
            return True
        return False

    def report(self) -> None:
        """Write the closing line, at rank 0: what is not durable or has no copies, or that nothing was saved."""
        if not self._ranks.is_coordinator:
            return
        step = self._progress.step
        if not self._progress.called:
            self._report_unused()
        elif step > self._progress.resumed_step or self._pipeline.outcomes.failures:
            newest = newest_durable(self._pipeline)
            copies = self._pipeline.places.copies
            lacks, volatile = copies.lacking() if copies is not None else "", in_memory_only(self._pipeline, newest)
            self._pipeline.outcomes.report_end(newest.step if newest else None, step, lacks, volatile)

    def _report_unused(self) -> None:
        """Report that nothing was saved, unless an exception ends the run, or a state was restored and not changed."""
        changed = self._progress.parameters_changed()
        if sys.exc_info()[0] is None and (changed or not self._progress.restored_generation):
            what = f"{self._pipeline.run.tier.place}: nothing was saved: step() and save() were never called"
            reporting.warning(f"{what}, and the parameters have changed" if changed else what)


def newest_durable(pipeline: Pipeline) -> Generation | None:
    """The newest good generation that survives power loss, as far as this rank knows.

    Only rank 0 knows of the copies below memory; another rank takes what is in memory for durable.
    """
    known = pipeline.run.known
    if not paths.in_memory(known.tier.place) or isinstance(pipeline.run, Follower):
        return known.newest_restorable()
    found = [newest for one in known.below if (newest := one.newest_restorable()) is not None]
    return max(found, key=lambda one: (one.commit.order, one.step), default=None)


def in_memory_only(pipeline: Pipeline, durable: Generation | None) -> int | None:
    """The step of the newest good save in memory, where that is newer than the newest `durable` one; else None."""
    known = pipeline.run.known
    newest = known.newest_restorable() if paths.in_memory(known.tier.place) else None
    if newest is None or (durable and (durable.commit.order, durable.step) >= (newest.commit.order, newest.step)):
        return None
    return newest.step


def refresh(pipeline: Pipeline) -> None:
    """On a rank other than 0: list what rank 0 has committed and verified since the last time."""
    if isinstance(pipeline.run, Follower):
        pipeline.run.refresh()
        pipeline.upkeep.note_latest()

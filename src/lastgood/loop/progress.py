"""Progress: which steps the training loop has completed, and what that means for the samplers of its state.

Everything here runs on the training thread.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator

from torch.amp.grad_scaler import GradScaler

from .. import reporting
from ..coordination.single_rank import AnyRanks
from ..data.sampler import ResumableSampler
from ..data.step_counting import count_step, report_left_out, report_uncounted
from ..data.trained import by_epoch
from ..errors import StepTaken
from ..format.values import Filter, join
from ..io.heartbeat import Position
from ..limits import ENTRIES_SEARCHED, STEP_LIMIT
from ..policy.arguments import is_whole, require
from ..records import Generation
from ..run.outcomes import Outcomes
from ..snapshot.staging import Fence
from ..state.capture import wanted
from ..state.loader_positions import LoaderWatch
from ..state.objects import find_objects, held_by_objects, instances_of
from ..state.parameter_versions import BufferWatch, stepped, version
from ..units import shortened
from .load import LoadRequest

_COUNT = "Count completed optimizer steps."


class Progress:
    """How far one training loop has come since its run was opened or restored."""

    def __init__(self, request: LoadRequest, ranks: AnyRanks, outcomes: Outcomes, fence: Fence) -> None:
        self._state, self._ranks, self._outcomes, self._fence = request.state, ranks, outcomes, fence
        self._included, self._saved = Filter(request.include), wanted(request.include, request.exclude)
        self.step = 0
        """the newest step that the loop has completed"""
        self.resumed_step = 0
        """the step from which the loop goes on: that of the restored generation; 0 without one"""
        self.called = False
        """whether `step()` or `save()` was called"""
        self.restored_generation = False
        """whether the state was restored from a generation"""
        self._version, self.buffers, self._loaders = version(self._state), BufferWatch(), LoaderWatch()
        self._had_stepped = bool(stepped(self._state))
        """whether an optimizer had stepped before the run was opened or restored"""
        self._behind_reported = self._buffers_reported = self._ahead_reported = False
        self.samplers = instances_of(self._state, ResumableSampler)
        """those of the state, as of the last step: it may get more"""
        self._longest = sys.maxsize
        """how many entries a dict or list of the state has at most in which a step looks for samplers"""
        self.trained: Position | None = None
        """the windows that the last step has trained, from the position before it on; None if that is not known"""

    def checked(self, n: object) -> int:
        """`n` as the number of a step that may follow. Raises Refused unless it is one, StepTaken if it is smaller."""
        require(is_whole(n, 0), f"step {n!r} is no whole number", _COUNT)
        step = operator.index(n)  # type: ignore[arg-type]
        require(step < STEP_LIMIT, f"step {n!r} is not below {STEP_LIMIT}", _COUNT)
        if step < self.step:
            raise StepTaken(
                f"step {step} cannot follow step {self.step}",
                safe="Nothing was written.",
                todo="Give ascending steps, over all epochs; to go back, restore(step=...) first.",
            )
        return step

    def advance(self, n: int) -> None:
        """Record that step `n` is completed, and count it on the samplers of the state. A second call does nothing."""
        if n > self.step:
            rank, ranks, first = self._ranks.rank, self._ranks.size, self.step == self.resumed_step
            self.samplers = self._found_samplers(first)
            before = self._position()
            if first and rank == 0:
                report_left_out(self._left_out(), n)
            count_step(self.samplers, n, self.step, rank=rank, ranks=ranks, first=first)
            if first and rank == 0:
                report_uncounted(held_by_objects(self._state, ResumableSampler), n)
            if first:
                self.buffers.begin(self._state, self._saved)
                self._loaders.begin(self._state, self._saved)
            self.step = self._outcomes.completed = n
            self._note_trained(before)
            self._fence.update_begun = False
            self.buffers.note()
            self._loaders.note()

    def _left_out(self) -> dict[str, ResumableSampler]:
        """The samplers of the state that `include` leaves out of saves, by path."""
        found = {} if self._included.everything else find_objects(self._state)
        every = {path: one for path, one in found.items() if isinstance(one, ResumableSampler)}
        saved = {id(one) for path, one in every.items() if self._included.keeps(join(path, "epoch"))}
        return {path: one for path, one in every.items() if id(one) not in saved}

    def report_behind(self) -> None:
        """`step` was called with the number of the newest step, or of a later one: report, once and at rank 0, if an
        optimizer has stepped since the first call with this number."""
        if self._behind_reported or self._ranks.rank:
            return
        first = self.step == self.resumed_step and not self._had_stepped
        if self.update_begun or (first and stepped(self._state)):  # guard: number-behind-is-reported
            self._behind_reported = True
            reporting.warning(
                f"step({self.step}): an optimizer has stepped, and the number of completed steps is still {self.step}: "
                "what is saved under this number is a later state, and a resume trains the batches of that update "
                "again. Give the number of completed optimizer steps: a loop over range(start, total) calls "
                "step(i + 1), and one that accumulates gradients counts after optimizer.step()"
            )

    def report_begun_step(self) -> None:
        """The state is saved as that of the newest step: report, once and at rank 0, what shows that the loop has begun
        the next one: buffers that have changed since, and loaders that have yielded a batch."""
        ahead = [] if self._ahead_reported or self._ranks.rank else self._loaders.ahead()
        if ahead:  # guard: batch-without-step-is-reported
            self._ahead_reported = True
            reporting.warning(
                f"step {self.step} is saved after {shortened(ahead, 3)} has yielded a batch that no completed step has "
                "trained: a resume leaves this batch out. Leave the loop right after step(), before the loader yields "
                "the next batch; or give the loader a ResumableSampler, whose position is that of the last step"
            )
        changed = [] if self._buffers_reported or self._ranks.rank else self.buffers.changed()
        if changed:  # guard: forward-after-step-is-reported
            self._buffers_reported = True
            reporting.warning(
                f"step {self.step} is saved with buffers that have changed since it was completed: "
                f"{shortened(changed, 3)}. If a forward pass of the next step has changed them, as before a break, "
                "what follows a resume is not exactly what would have followed: leave the loop right after step(), or "
                "let an exception leave the with block, after which the newest save before it is restored. If an "
                "average or an evaluation has changed them, nothing is wrong"
            )
        self.buffers.note()

    def report_update(self) -> None:
        """The state is saved as that of the newest step: report at rank 0 if an optimizer has stepped since, or what
        shows that the next step has begun."""
        if self.update_begun and self.step > self.resumed_step and self._ranks.rank == 0:
            reporting.warning(
                f"save({self.step}): an optimizer has stepped since step {self.step} was completed, so a later state "
                "is saved under this number, and a resume trains the batches of that update again: after each step of "
                "the optimizer, call step() or save() with the number of completed steps"
            )
        else:
            self.report_begun_step()
        self._fence.update_begun = False

    def _found_samplers(self, first: bool) -> list[ResumableSampler]:
        """The samplers of the state, which may get more with each step. Only the first step since the run was opened or
        restored looks into long lists of records, and the following ones too if it finds a sampler there."""
        found = instances_of(self._state, ResumableSampler, sys.maxsize if first else self._longest)
        if first:
            in_short = instances_of(self._state, ResumableSampler, ENTRIES_SEARCHED)
            self._longest = ENTRIES_SEARCHED if found == in_short else sys.maxsize
        elif not {*map(id, self.samplers)} <= {*map(id, found)}:  # what holds one has grown past the bound, or lost it
            self._longest = sys.maxsize
            return instances_of(self._state, ResumableSampler)
        return found

    def _note_trained(self, before: tuple[int, int, int] | None) -> None:
        after = self._position()
        self.trained = None
        if before is not None and after is not None:
            windows = after[1] - before[1] + before[2] * (after[0] - before[0])
            self.trained = Position(before[0], before[1], max(0, windows))

    def next_position(self) -> Position | None:
        """Where the sampler of the state stands, and how many windows the next step is expected to train: as many as
        `batches_per_step` says, else as the last one. None if there is not exactly one sampler."""
        found = self._position()
        if found is None:
            return None
        (sampler,) = self.samplers
        if sampler.batches_per_step is not None or self.trained is None:
            return Position(*found[:2], sampler.batches_per_step or 1)
        epoch, first, count = self.trained
        behind = (window + (at - epoch) * sampler.steps_per_epoch for at, window in sampler.skipped)
        left_out = sum(first <= window < first + count for window in behind)
        return Position(*found[:2], max(1, count - left_out))

    def scales_loss(self) -> bool:
        """Whether the state has a GradScaler that is in use."""
        return any(one.is_enabled() for one in instances_of(self._state, GradScaler))

    def samples(self, trained: Position) -> Iterator[tuple[int, range, list[int]]]:
        """Epoch, windows and ids of the samples, of all ranks, that a step has trained, epoch by epoch.

        Nothing if there is not exactly one sampler.
        """
        if len(self.samplers) == 1:
            (one,) = self.samplers
            for epoch, windows in by_epoch(one, *trained):
                yield epoch, windows, one.order(epoch)[windows.start : windows.stop].reshape(-1).tolist()

    def _position(self) -> tuple[int, int, int] | None:
        """Epoch and window of the first batch that is not counted, and the windows of an epoch."""
        if len(self.samplers) != 1:
            return None
        (one,) = self.samplers
        return (*one.counted, one.steps_per_epoch)

    def restored(self, step: int, generation: Generation | None) -> None:
        """Record that the state is that of `step`, restored from `generation`, or (None) that the loop starts over."""
        self.step = self.resumed_step = step
        self.restored_generation, self._version = generation is not None, version(self._state)
        self._had_stepped, self.buffers = bool(stepped(self._state)), BufferWatch()
        self._loaders = LoaderWatch()
        self._outcomes.restored(step if generation else None)
        self.samplers = instances_of(self._state, ResumableSampler)
        for one in self.samplers:
            one.restart_after(step)  # guard: sampler-restarts-after-restore
        self.trained = None
        self._fence.update_begun = False

    @property
    def update_begun(self) -> bool:
        """Whether an optimizer of the state has begun a step since the newest step of the loop, as far as its hook
        shows it: then the state is not that of this step."""
        return self._fence.update_begun

    def parameters_changed(self) -> bool:
        """Whether parameters have changed since the run was opened or restored."""
        return version(self._state) != self._version

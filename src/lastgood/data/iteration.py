"""One iteration over a sampler's order: how many batches it has fetched, and whether it is still valid."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import FrameType

from torch.utils.data import BatchSampler

from .. import reporting
from ..errors import Refused
from .division import Division

_AHEAD = (
    "the loader yielded one batch more before the first step of this iteration than before the second. If it is "
    "fetched ahead of the step, as frameworks do, a resume leaves it out: give the sampler batches_per_step."
)


@dataclass
class Iteration:
    """One iteration over the rest of an epoch."""

    epoch: int
    first_step: int
    next_step: int
    """window of the batch that is yielded next; in a DataLoader of the user's own, of that fetched next"""
    counts_yielded: bool
    """whether a counted step has trained on all batches that were yielded since the last one: `loader()` without
    `batches_per_step`. Otherwise it has trained on `batches_per_step` batches, or one"""
    earlier_counted: bool
    """whether all batches that earlier iterations fetched have been counted; then several steps counted at once
    have all trained on batches of this iteration"""
    division: Division
    """into which batches a window is divided"""
    batches: int = 0
    """how many batches were yielded, or fetched"""
    read: set[str] = field(default_factory=set)
    """which of the loader's `weight` and `completes_step` the training loop has read"""
    stale: str = ""
    """why the iteration is no longer valid; empty while it is valid"""
    ended: bool = False
    """whether the loader has yielded every batch and has been asked for the next one"""
    fetched_all: bool = False
    """whether a DataLoader of the user's own has fetched every batch and has asked for the next one"""
    at_last_step: int = 0
    """how many batches had been yielded when the last step was counted"""
    without_batch: int = 0
    """how many steps were counted after the end that had no batch since the one before; 0 without `counts_yielded`,
    because batches may be fetched ahead of their steps there"""
    counted: list[int] = field(default_factory=list)
    """numbers of batches yielded before the first counted step, and between the first and the second"""

    def require_live(self) -> None:
        """Raises Refused if the iteration is no longer valid."""
        if self.stale:  # guard: stale-iteration-refused
            raise Refused(
                f"this iteration over epoch {self.epoch} is over: {self.stale} since it began",
                safe="The cursor is where the load, or the newer iteration, has set it.",
                todo="Restore before the loop makes its iterator (in Lightning: in on_fit_start, not on_train_start); "
                "otherwise leave the loop and begin a new one over the same loader.",
            )

    def note_fetched(self, window: int) -> None:
        """A batch of this window is yielded, or fetched in a DataLoader of the user's own."""
        self.batches += 1
        if self.window_completed:
            self.next_step = window + 1

    @property
    def window_completed(self) -> bool:
        """Whether the newest batch is the last one of its window, or there is no batch yet."""
        return self.batches % self.division.batches == 0

    def weight(self) -> float:
        """The weight of the newest batch, on this rank."""
        return self.division.weight((self.batches - 1) % self.division.batches)

    def require_step_due(self) -> None:
        """Raises Refused unless a step that is counted now has trained on whole windows, with their weights."""
        if not self.window_completed:  # guard: step-completes-window
            raise Refused(
                f"a step was counted after {self.batches} batches of this iteration, in the middle of a window: each "
                f"rank trains a window in {self.division.batches} batches here",
                safe="The cursor is where the last step was counted.",
                todo="Make the optimizer step, and call step(n), where loader.completes_step is true. Frameworks that "
                "fetch a batch ahead cannot use largest_batch; leave the sampler of an evaluation out of the state.",
            )
        unread = {"weight", "completes_step"} - self.read
        if self.division.largest_batch is not None and self.batches and unread:  # guard: weight-and-end-are-read
            raise Refused(
                f"a step was counted, and the loop has not read {' and '.join(sorted(unread))} of its loader: in "
                "another number of ranks its gradients would be those of another global batch",
                safe="The cursor is where the last step was counted.",
                todo="Multiply the mean loss of each batch by loader.weight, and make the optimizer step where "
                "loader.completes_step is true; or leave largest_batch out.",
            )

    def note_step(self, ends_epoch: bool) -> None:
        """A step is counted. If a batch was probably fetched ahead of the first one, report it.

        That is so if this is the second counted step, and it has one batch less than the first. A loop that takes
        equally many batches for each step, or reports every k-th step, does this at the end of an epoch only.
        """
        self.earlier_counted = True
        self.without_batch += self.counts_yielded and self.ended and self.batches == self.at_last_step
        self.at_last_step = self.batches
        if len(self.counted) == 2:
            return
        self.counted.append(self.batches - sum(self.counted))
        ahead = len(self.counted) == 2 and self.counted[0] - 1 == self.counted[1] > 0 and not ends_epoch
        if ahead and self.counts_yielded and self.division.rank == 0:
            reporting.warning(_AHEAD)

    def report_repeated(self, batches: int, each: int) -> None:
        """The last `batches` of this iteration, in which all were fetched, come again: no step has counted them.
        `each`: of how many batches a step is.

        An iteration without a counted step is not one of a training. Workers fetch ahead, so a loop that was left
        before its end has not received as many batches as were fetched ahead of its first step: these are no fault.
        """
        if self.counted and batches > self.counted[0] - each and self.division.rank == 0:
            reporting.warning(
                f"the batches of epoch {self.epoch} were fetched to its end, and {batches} of them belong to no step "
                "that was counted: they come again now. If the loop has trained with them, make an optimizer step at "
                "the end of each epoch, and call step(n) then; with gradient accumulation give the sampler "
                "batches_per_step too: without it a step counts one batch"
            )


def require_no_joining_batch_sampler(sampler: object, caller: FrameType | None) -> None:
    """Raises Refused if a BatchSampler that joins several batches begins to iterate `sampler`.

    `DataLoader(dataset, sampler=sampler, batch_size=4)` makes such a BatchSampler. The numbers of batches do not prove
    this, because fetching ahead gives the same numbers. `caller`: the frame that calls `iter(sampler)`. The
    BatchSampler is that frame or the next one (torch, torchdata).
    """
    for frame in (caller, caller and caller.f_back):
        one = frame.f_locals.get("self") if frame else None
        if not isinstance(one, BatchSampler) or getattr(one, "sampler", None) is not sampler:
            continue  # a subclass may lack these attributes: those of accelerate pass the batches on unchanged
        several = getattr(one, "batch_size", None) or 1
        if several > 1:  # guard: sampler-argument-refused
            raise Refused(
                f"a DataLoader has this sampler as sampler=, with batch_size={several}: the sampler yields "
                f"whole batches, so each batch of that loader holds {several} of them, and a step counts one",
                safe="Nothing was read.",
                todo="Give it as batch_sampler=sampler, without batch_size, or use sampler.loader(dataset).",
            )

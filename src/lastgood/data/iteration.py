"""One iteration over a sampler's order: what it has fetched, and whether it is still the one that counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import FrameType

from torch.utils.data import BatchSampler

from ..errors import Refused


@dataclass
class Iteration:
    """One iteration over the rest of an epoch."""

    epoch: int
    first_step: int
    next_step: int
    """of the batch that is handed out next; of the window that is fetched next, in a DataLoader of the user's own"""
    follows: bool
    """a step has trained on all that was handed out, however much that is"""
    sure: bool
    """no batch that an earlier iteration fetched can still wait to be counted"""
    stale: str = ""
    """why it is over"""
    ended: bool = False
    """a loader has handed out all of it, and was asked for more"""
    taken: list[int] = field(default_factory=list)
    """batches that were handed out before the first count, and from there to the second"""

    def require_live(self) -> None:
        """Raises Refused once it is over."""
        if self.stale:  # guard: stale-iteration-refused
            raise Refused(
                f"this iteration over epoch {self.epoch} is over: {self.stale} since it began",
                safe="The cursor is where the load, or the newer iteration, has put it.",
                todo="Restore before the loop makes its iterator (in Lightning: in on_fit_start, not on_train_start); "
                "else leave the loop and begin a new one over the same loader.",
            )

    def fetched(self, steps_per_epoch: int) -> tuple[int, int]:
        """Epoch and cursor once all that was fetched is counted."""
        finished, cursor = divmod(self.next_step, steps_per_epoch)
        return self.epoch + finished, cursor

    def count(self) -> bool:
        """Note a count. Whether it is the second, of one batch less than the first: then one was fetched ahead.

        No loop that takes as many batches for each step, or reports each k-th step, looks like that.
        """
        if len(self.taken) == 2:
            return False
        self.taken.append(self.next_step - self.first_step - sum(self.taken))
        return len(self.taken) == 2 and self.taken[0] - 1 == self.taken[1] > 0


def require_batch_sampler(sampler: object, caller: FrameType | None) -> None:
    """Raises Refused where `caller`, which begins to iterate `sampler`, is a BatchSampler that puts several of its
    batches into one.

    `DataLoader(dataset, sampler=sampler, batch_size=4)` does that. Nothing that the sampler yields or counts shows it
    for certain: fetching ahead looks the same. The iterating BatchSampler stands one or two frames above (torch,
    torchdata).
    """
    for frame in (caller, caller and caller.f_back):
        one = frame.f_locals.get("self") if frame else None
        if not isinstance(one, BatchSampler) or getattr(one, "sampler", None) is not sampler:
            continue  # a subclass need not have these attributes: accelerate's wrap the sampler, and yield as it does
        several = getattr(one, "batch_size", None) or 1
        if several > 1:  # guard: sampler-argument-refused
            raise Refused(
                f"a DataLoader has this sampler as sampler=, with batch_size={several}: the sampler yields "
                f"whole batches, so each batch of that loader holds {several} of them, and a step counts one",
                safe="Nothing was read.",
                todo="Give it as batch_sampler=sampler, without batch_size, or use sampler.loader(dataset).",
            )

"""The loader that yields the batches of a `ResumableSampler`, and keeps count of what it has yielded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from ..errors import Refused
from .iteration import Iteration
from .worker_seeding import Window, entropy

if TYPE_CHECKING:
    from .sampler import ResumableSampler


class Loader:
    """The result of `ResumableSampler.loader`. Iterate it once an epoch; each starts at the sampler's cursor."""

    def __init__(self, sampler: ResumableSampler, batches: DataLoader[Any]) -> None:
        self._sampler, self._batches = sampler, batches

    def __len__(self) -> int:
        """Batches of a whole epoch, before and after a resume."""
        return len(self._sampler)

    @property
    def remaining(self) -> int:
        """Batches left in the current epoch: what an iteration that starts now yields."""
        return self._sampler.remaining

    def __iter__(self) -> Iterator[Any]:
        at = self._sampler._begin(counts_yielded=self._sampler.batches_per_step is None)  # guard: prefetch-not-counted
        # iter(DataLoader) draws a base seed for its workers: from this generator, never from the global one
        self._batches.generator.manual_seed(entropy("workers", self._sampler._seed, at.epoch)[0])
        return self._batches_of(at, iter(self._batches))

    def _batches_of(self, at: Iteration, batches: Iterator[Any]) -> Iterator[Any]:
        sampler = self._sampler
        at.require_live()
        for batch in batches:
            window = sampler._skips.next(at.epoch, at.next_step)
            if at.counts_yielded:
                sampler._last_yielded = (at.epoch, window)
            at.note_fetched(window)
            yield batch
            at.require_live()
        if sampler._skips.next(at.epoch, at.next_step) < sampler.steps_per_epoch:
            raise Refused(
                f"step {at.next_step} of epoch {at.epoch}: a StopIteration from the dataset or from collate_fn ended "
                f"the epoch before its {sampler.steps_per_epoch} steps",
                safe="The cursor has not moved past the windows that were trained.",
                todo="Let the dataset raise another error, or return every sample.",
            )
        at.ended = True
        if at.counts_yielded:  # guard: prefetch-not-counted-at-epoch-end
            sampler._move(at.epoch, at.next_step)  # the loop asks for the next batch: it has trained on all before


class Fetching:
    """The `batch_sampler` of a Loader's DataLoader: windows of the iteration that is beginning."""

    def __init__(self, sampler: ResumableSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[Window]:
        assert self._sampler._iteration is not None
        return self._sampler._windows(self._sampler._iteration)

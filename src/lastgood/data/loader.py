"""The loader that yields the batches of a `ResumableSampler`, and keeps count of what it has yielded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from ..errors import Refused
from .iteration import Iteration
from .worker_seeding import Window, entropy

if TYPE_CHECKING:
    from .sampler import ResumableSampler


class Loader:
    """The result of `ResumableSampler.loader`. Iterate it once an epoch; each starts at the sampler's cursor.

    With `largest_batch`, a window is trained in one or several batches: see `weight` and `completes_step`.
    """

    def __init__(self, sampler: ResumableSampler, batches: DataLoader[Any]) -> None:
        self._sampler, self._batches = sampler, batches
        self._at: Iteration | None = None

    def __len__(self) -> int:
        """Batches of a whole epoch, before and after a resume."""
        return len(self._sampler)

    @property
    def remaining(self) -> int:
        """Batches left in the current epoch: what an iteration that starts now yields."""
        return self._sampler.remaining

    @property
    def weight(self) -> float:
        """By what to multiply the mean loss of the batch that was yielded last: size * world_size / global_batch.

            (cross_entropy(model(inputs), targets) * loader.weight).backward()

        Where the ranks average their gradients (DDP, FSDP), every sample of the window then counts 1 / global_batch,
        into whatever batches it is divided. Raises Refused before the first batch, and without `largest_batch`.
        """
        return self._yielded("weight").weight()

    @property
    def completes_step(self) -> bool:
        """Whether the batch that was yielded last is the last one of its window, so that the optimizer step is due.

            with nullcontext() if loader.completes_step else model.no_sync():  # DDP
                (cross_entropy(model(inputs), targets) * loader.weight).backward()

        It is true at the same batch on all ranks. Raises Refused before the first batch, and without `largest_batch`.
        """
        return self._yielded("completes_step").window_completed

    @property
    def completes_epoch(self) -> bool:
        """Whether the batch that was yielded last is the last one of its epoch. False before the first batch.

        A save in `ckpt.step` of that batch resumes in the next epoch. So do before it what is done once an epoch:

            if loader.completes_epoch:
                scheduler.step()
            ckpt.step(n)
        """
        at = self._at
        if at is None or not at.batches or not at.window_completed:
            return False
        return self._sampler._skips.next(at.epoch, at.next_step) >= self._sampler.steps_per_epoch

    def _yielded(self, what: str) -> Iteration:
        if self._sampler.largest_batch is None:
            raise Refused(
                f"this loader does not know {what}: its sampler has no largest_batch, so the loop decides how many "
                "batches a step has",
                todo="Give ResumableSampler the largest batch that fits on one rank: largest_batch=...",
            )
        if self._at is None or not self._at.batches:
            raise Refused(f"no batch was yielded yet, so there is no {what}", todo="Read it inside of the loop.")
        self._at.read.add(what)
        return self._at

    def __iter__(self) -> Iterator[Any]:
        at = self._sampler._begin(counts_yielded=self._sampler.batches_per_step is None)  # guard: prefetch-not-counted
        # iter(DataLoader) draws a base seed for its workers: from this generator, never from the global one
        self._batches.generator.manual_seed(entropy("workers", self._sampler._seed, at.epoch)[0])
        self._at = at
        with torch.device("cpu"):  # of that generator, whatever torch.set_default_device() says
            batches = iter(self._batches)
        return self._batches_of(at, batches)

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
        sampler._end(at)


class Fetching:
    """The `batch_sampler` of a Loader's DataLoader: windows of the iteration that is beginning."""

    def __init__(self, sampler: ResumableSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[Window]:
        assert self._sampler._iteration is not None
        return self._sampler._windows(self._sampler._iteration)

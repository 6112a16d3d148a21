"""Counting: on which samplers of a state an optimizer step counts, and whether the loop reads from them at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .. import reporting
from .sampler import ResumableSampler

_UNREAD = (
    "no batch was read from a ResumableSampler in the state before this step. If the loop trains on another loader, a "
    "resume continues at a place in the data that means nothing: iterate the sampler that is in the state, as "
    "sampler.loader(dataset) or DataLoader(dataset, batch_sampler=sampler), or leave it out of the state"
)


def samplers_in(container: object) -> Iterator[ResumableSampler]:
    """Every sampler in nested dicts, lists and tuples."""
    if isinstance(container, ResumableSampler):
        yield container
    elif isinstance(container, Mapping):
        for one in container.values():
            yield from samplers_in(one)
    elif isinstance(container, (list, tuple)):
        for one in container:
            yield from samplers_in(one)


def count_step(state: object, step: int, previous: int, *, rank: int = 0, ranks: int = 1, first: bool = False) -> None:
    """Count the optimizer steps from number `previous` to `step` on the samplers in `state` that batches come from.

    A sampler that nothing was read from in this process stands still while another one is read: it belongs to an
    evaluation, or to a later phase of the training. Where nothing was read from any of them, all count, because another
    process may read for this one (a worker of a DataLoader; another rank, where a sampler is for fewer ranks than the
    job has). It may also be that the loop trains on another loader: rank 0 reports a threat at the `first` step.
    """
    samplers = {id(one): one for one in samplers_in(state)}.values()
    read = [one for one in samplers if not one.is_unread_at(step)]
    if samplers and not read and first and rank == 0:  # guard: unread-sampler-reported
        reporting.threat(f"step {step}: {_UNREAD}")
    for one in samplers:
        if not read or one in read or one.world_size < ranks:  # guard: idle-sampler-stands-still
            one.advance_to(step, previous)

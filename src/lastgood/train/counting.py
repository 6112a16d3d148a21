"""Counting: on which samplers of a state an optimizer step counts, and whether the loop reads from them at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .. import reporting
from ..errors import Refused
from .sampler import ResumableSampler

_ELSEWHERE = (
    "no batch was read from the ResumableSampler in the state before this step. If the loop trains on another loader, "
    "a resume continues at a place in the data that means nothing"
)
_TODO = (
    "Iterate the sampler that is in the state: loader = sampler.loader(dataset), or DataLoader(dataset, "
    "batch_sampler=sampler). Where the loop has a resumable loader of its own, leave the sampler out of the state."
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
    """Count the optimizer steps from number `previous` to `step` on every sampler in `state` that batches come from.

    A sampler that nothing was read from in this process stands still while another one is read: it belongs to an
    evaluation, or to a later phase of the training. Where nothing was read from any of them, the loop trains on another
    loader: raises Refused, with every cursor as it was.

    A sampler for fewer ranks than the job has (tensor or pipeline parallelism) need not be read on each rank, so it
    counts on every rank. There rank 0 reports a threat, at the `first` step, if it has read nothing.
    """
    samplers = {id(one): one for one in samplers_in(state)}.values()
    unread = [one for one in samplers if one.is_unread_at(step)]
    maybe_elsewhere = [one for one in unread if one.world_size < ranks]
    if unread and len(unread) == len(samplers):
        if not maybe_elsewhere:
            raise Refused(_ELSEWHERE, safe="Nothing was saved, and every cursor is as it was.", todo=_TODO)
        if first and rank == 0:
            reporting.threat(f"rank 0, step {step}: {_ELSEWHERE}. {_TODO}")
    for one in samplers:
        if one not in unread or one in maybe_elsewhere:
            one.advance_to(step, previous)

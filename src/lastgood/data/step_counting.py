"""On which samplers of a state an optimizer step counts, and reports of samplers that do not fit the training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .. import reporting
from .sampler import ResumableSampler

_UNREAD = (
    "no batch was read from a ResumableSampler in the state before this step. If the loop trains on another loader, a "
    "resume continues at a position in the data that has no meaning: iterate the sampler that is in the state, as "
    "sampler.loader(dataset) or DataLoader(dataset, batch_sampler=sampler), or leave it out of the state"
)
_EXHAUSTED = (
    "all batches of the epoch were trained before the step before this one, and the loader was not iterated anew. If "
    "the loop trains them again, as itertools.cycle(loader) repeats those of its first pass, a resume goes on with "
    "other ones: iterate the loader anew in each epoch. If it trains on another loader now, take the sampler of this "
    "one out of the state"
)


def count_step(
    samplers: Sequence[ResumableSampler],
    step: int,
    previous: int,
    *,
    rank: int = 0,
    ranks: int = 1,
    first: bool = False,
) -> None:
    """Count the optimizer steps from number `previous` to `step` on those of the `samplers` that are in use.

    `samplers`: those of the state. `rank`, `ranks`: of this process and of the job. `first`: whether this is the first
    step since the run was opened.

    While batches are read from one sampler, a sampler from which this process has read nothing does not move: it
    belongs to an evaluation, or to a later phase of the training. One that is made for fewer ranks than the job has
    moves all the same, because another rank may read it. If nothing was read from any sampler, the step counts on all
    of them, because another process, such as a worker of a DataLoader, may read the batches. It is also possible that
    the loop trains on another loader. So rank 0 reports a threat at the `first` step.

    A sampler on which this step is counted already, by another Checkpointer, is taken for one that is read.
    """
    read = [one for one in samplers if not one.is_unread_at(step)]
    if samplers and not read and first and rank == 0:  # guard: unread-sampler-reported
        reporting.threat(f"step {step}: {_UNREAD}")
    exhausted_before = any(one.is_exhausted for one in samplers)
    for one in samplers:
        if not read or one in read or one.world_size < ranks:  # guard: idle-sampler-stands-still
            one.advance_to(step, previous)
    exhausted = bool(read) and all(one.is_exhausted for one in read)
    if exhausted and not exhausted_before and rank == 0:  # guard: steps-without-batches-are-reported
        reporting.threat(f"step {step}: {_EXHAUSTED}")


def report_left_out(samplers: Mapping[str, ResumableSampler], step: int) -> None:
    """Report each sampler from which the loop reads, although `include` leaves it out of saves. Called at the first
    `step`, before that is counted. `samplers`: by path; none of them is saved. An iteration that has ended is probably
    that of an evaluation, and what `exclude` names is left out on purpose: these are not reported."""
    for path, one in samplers.items():
        if one.is_read_uncounted:  # guard: sampler-left-out-is-reported
            reporting.warning(
                f"step {step}: batches are read from {path}, which include= leaves out of saves: a resume of this "
                f'run begins its epoch again, and trains the same samples twice. Save it too: include=[..., "{path}"]'
            )


def report_uncounted(held: Mapping[str, ResumableSampler], step: int) -> None:
    """Report each sampler that an object of the state holds if the loop reads from it, and nobody counts its steps.

    Called at the first `step`. `held`: by path; none of them is in the state itself. The object may count the steps of
    its sampler (`consumed`), and an iteration that has ended is probably that of an evaluation: these are not reported.
    """
    for path, one in held.items():
        if one.is_read_uncounted:
            reporting.warning(
                f"step {step}: {path} is a ResumableSampler that an object of the state holds. Steps are counted only "
                "on samplers that are in the state themselves, so a resume begins its epoch again: give it an entry of "
                'its own, as state={"sampler": sampler, ...}'
            )


def report_missing_parts(posts: Sequence[Mapping[str, tuple[int, int]]]) -> None:
    """Report samplers that divide the windows among ranks of this job where no rank has one of the parts.

    `posts`: of each rank of the job, (world_size, rank) of its samplers, by path. Several ranks may have the same part,
    as those of a tensor-parallel group do. A sampler that some ranks do not have, or that is made for more ranks than
    the job has, is not looked at: the missing part may be trained elsewhere.
    """
    for path in sorted(set.intersection(*map(set, posts))):
        worlds, held = ({one[path][index] for one in posts} for index in (0, 1))
        missing = sorted(set(range(max(worlds))) - held)
        if missing and len(worlds) == 1 and max(worlds) <= len(posts):
            reporting.threat(
                f"{path}: all ranks have a ResumableSampler with world_size={max(worlds)}, and none of them has rank="
                f"{', '.join(map(str, missing))}: no rank trains that part of the windows, and several ranks train "
                "the same one. Give each its data-parallel rank: ResumableSampler(..., rank=rank, world_size=...)"
            )

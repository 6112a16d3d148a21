"""Which step can be saved for all ranks from what those have written that survived another one. Pure: no I/O, no clock,
no threads."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from ..units import shortened

LISTED = 3
"""names and ranks in a reason"""

Holders = tuple[int, ...]
"""Ranks that hold the same parts of tensors, ascending: all ranks under replication, the replicas of a shard under
HSDP, one rank under FSDP."""


class Noted(NamedTuple):
    """What a rank has noted when it had completed a step.

    `structure`: digest of names, dtypes, shapes, meshes and shared memory of its tensors. `samples`: holders -> digest
    of samples of the tensors that only training changes and that these ranks hold alike; this rank is one of them.
    """

    structure: str
    samples: Mapping[Holders, str]


class Choice(NamedTuple):
    """The step that can be saved; None: none can, and `why`."""

    step: int | None
    why: str


def choose(ranks: int, noted: Mapping[int, Mapping[int, Noted]], written: Mapping[int, Collection[Holders]]) -> Choice:
    """The newest step of which survivors have written all. `ranks`: how many there are.

    `noted`: rank -> step -> what it has noted. `written`: step -> holders whose parts of tensors one of them has
    written. Example: where ranks 1 and 3 hold the same shards and rank 3 was killed, rank 1 has written those of
    (1, 3). With no step that is covered, the reason is that of the newest one.
    """
    reasons = list[str]()
    for step in sorted(written, reverse=True):
        why = why_not(step, {rank: noted.get(rank, {}).get(step) for rank in range(ranks)}, written[step])
        if not why:
            return Choice(step, "")
        reasons.append(why)
    return Choice(None, reasons[0] if reasons else "no rank that survived has written anything")


def why_not(step: int, noted: Mapping[int, Noted | None], written: Collection[Holders]) -> str:
    """Why `step` cannot be saved; empty if it can. As `choose`, of one step; None: nothing was noted."""
    missing = [rank for rank, at in noted.items() if at is None]
    if missing:  # guard: every-rank-has-noted-the-step
        return f"{listed(missing)} did not complete step {step}, or what was noted there is lost"
    known = {rank: at for rank, at in noted.items() if at is not None}
    for rank, at in known.items():
        if at.structure != known[0].structure:
            return f"ranks 0 and {rank} hold tensors of different names or shapes"
        for held, samples in at.samples.items():
            for other in held:
                if known[other].samples.get(held) != samples:  # guard: survivor-is-a-replica
                    return f"ranks {rank} and {other} are no replicas: their parameters or optimizer states differ"
    uncovered = sorted({held for at in known.values() for held in at.samples} - {*written})
    if uncovered:  # guard: every-shard-was-written
        held = uncovered[0]
        alone = "which no other rank holds" if len(held) == 1 else "which only these ranks hold"
        return f"no survivor has written the tensors of step {step} on {listed(held)}, {alone}"
    return ""


def changed_text(step: int, changed: Sequence[str]) -> str:
    """Why a rank of which these tensors have changed has nothing to save."""
    return f"{shortened(changed, LISTED)} changed after step {step} was completed"


def listed(ranks: Sequence[int]) -> str:
    """Ranks, as text."""
    return f"rank{'s' if len(ranks) > 1 else ''} {shortened([*map(str, sorted(ranks))], LISTED)}"

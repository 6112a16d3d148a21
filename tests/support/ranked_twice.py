"""Functions that the ranks of tests/ranks/test_ranks_faults.py run."""

from __future__ import annotations

from pathlib import Path

import torch

from lastgood_lab.campaigns.rank_jobs import made, outcome_of
from ranked import opened


def saved_again(rank: int, size: int, kind: str, root: Path, changed_ranks: tuple[int, ...]) -> tuple[bool, str, str]:
    """Save a step, save it again after an evaluation, change the parameters on the ranks `changed_ranks`, and save
    it a third time, then save the next step. Returns whether the second save returned the first one's generation,
    and the outcomes of the last two."""
    loop = made(kind, size)
    with opened(root, loop.state) as ckpt:
        loop.step(1)
        first = ckpt.save(1).result()
        torch.rand(1)
        second = ckpt.save(1, milestone=True, metrics={"loss": 1.0}).result()
        originals = [one.clone() for one in loop.net.parameters()]
        if rank in changed_ranks:
            for one in loop.net.parameters():
                one.data.add_(1)
        third = outcome_of(lambda: ckpt.save(1, metrics={"loss": 2.0}))
        for one, original in zip(loop.net.parameters(), originals, strict=True):
            one.data.copy_(original)
        fourth = outcome_of(lambda: ckpt.save(2).result())
    return first.id == second.id, third, fourth

"""What the ranks of tests/ranks/test_ranks_faults.py run."""

from __future__ import annotations

from pathlib import Path

import torch

from ranked import made, opened, outcome_of


def saved_again(rank: int, size: int, kind: str, root: Path, who: tuple[int, ...]) -> tuple[bool, str, str]:
    """Whether a step that was saved is that generation when it is saved again, evaluated in between; and what became
    of a third save of it, after the ranks `who` have changed their parameters, and of one of the next step."""
    loop = made(kind, size)
    with opened(root, loop.state) as ckpt:
        loop.step(1)
        first = ckpt.save(1).result()
        torch.rand(1)
        again = ckpt.save(1, milestone=True, metrics={"loss": 1.0}).result()
        kept = [one.clone() for one in loop.net.parameters()]
        if rank in who:
            for one in loop.net.parameters():
                one.data.add_(1)
        third = outcome_of(lambda: ckpt.save(1, metrics={"loss": 2.0}))
        for one, before in zip(loop.net.parameters(), kept, strict=True):
            one.data.copy_(before)
        fourth = outcome_of(lambda: ckpt.save(2).result())
    return first.id == again.id, third, fourth

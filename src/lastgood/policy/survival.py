"""Whether the ranks that survive another one can save a step for all of them. Pure: no I/O, no clock, no threads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

LISTED = 3
"""names of tensors in a reason"""


class Noted(NamedTuple):
    """What a rank has noted when it had completed a step.

    `structure`: digest of names, dtypes, shapes and shared memory of its tensors. `samples`: digest of samples of all
    tensors that only training changes, which are equal on all ranks where the ranks are replicas.
    """

    step: int
    structure: str
    samples: str


def why_not(step: int, rank: int, noted: Mapping[int, Noted | None], changed: list[str]) -> str:
    """Why a survivor cannot save `step` for all ranks; empty if it can.

    `rank`: the survivor, which has noted the step. `noted`: every rank -> what it has noted at this step; None: nothing
    that can be read. `changed`: names of tensors of the survivor that have changed since. Example: with a rank that was
    killed before it had completed the step, "rank 2 has not completed step 7".
    """
    mine = noted[rank]
    assert mine is not None and mine.step == step
    if changed:  # guard: changed-state-not-saved
        more = f" and {len(changed) - LISTED} more" if len(changed) > LISTED else ""
        return f"{', '.join(changed[:LISTED])}{more} changed after step {step} was completed"
    missing = [one for one, at in noted.items() if at is None or at.step != step]
    if missing:  # guard: every-rank-has-noted-the-step
        return f"rank {missing[0]} has not completed step {step}"
    for one, at in noted.items():
        assert at is not None
        if at.structure != mine.structure:
            return f"ranks {rank} and {one} hold tensors of different names or shapes"
        if at.samples != mine.samples:  # guard: survivor-is-a-replica
            return f"ranks {rank} and {one} are no replicas: their parameters or optimizer states differ"
    return ""

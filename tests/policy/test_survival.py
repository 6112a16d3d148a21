"""Which step can be saved from what survivors have written, and the reason where none can."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest

from lastgood.policy.survival import Choice, Holders, Noted, choose, why_not

EVERYONE = (0, 1, 2, 3)
REPLICAS = {rank: Noted("s", {EVERYONE: "p"}) for rank in range(4)}
HYBRID = {rank: Noted("s", {EVERYONE: "p", held: f"q{held}"}) for held in ((0, 2), (1, 3)) for rank in held}
"""ranks 0 and 2 hold the same shards, and so do 1 and 3"""
SHARDED = {rank: Noted("s", {(rank,): f"q{rank}"}) for rank in range(4)}
ALL_BUT_ONE = {EVERYONE, (0, 2)}


@pytest.mark.parametrize(
    ("noted", "written"),
    [(REPLICAS, [EVERYONE]), (HYBRID, [EVERYONE, (0, 2), (1, 3)]), (SHARDED, [(0,), (1,), (2,), (3,)])],
)
def test_a_step_is_covered_once_each_shard_is_written(
    noted: Mapping[int, Noted | None], written: Collection[Holders]
) -> None:
    assert why_not(7, noted, written) == ""
    assert all(why_not(7, noted, {*written} - {one}) for one in written)


@pytest.mark.parametrize(
    ("noted", "written", "why"),
    [
        (SHARDED, {(0,), (1,), (3,)}, "tensors of step 7 on rank 2, which no other rank holds"),
        (HYBRID, ALL_BUT_ONE, "tensors of step 7 on ranks 1, 3, which only these ranks hold"),
        (REPLICAS | {1: None, 3: None}, {EVERYONE}, "ranks 1, 3 did not complete step 7"),
        (REPLICAS | {1: Noted("t", {EVERYONE: "p"})}, {EVERYONE}, "different names or shapes"),
        (REPLICAS | {1: Noted("s", {EVERYONE: "q"})}, {EVERYONE}, "ranks 0 and 1 are no replicas"),
        (HYBRID | {3: Noted("s", {EVERYONE: "p", (1, 3): "r"})}, HYBRID[3].samples, "ranks 1 and 3 are no replicas"),
    ],
)
def test_the_reason_is_given_why_a_step_cannot_be_saved(
    noted: Mapping[int, Noted | None], written: Collection[Holders], why: str
) -> None:
    assert why in why_not(7, noted, written)


def test_the_newest_step_that_is_covered_is_chosen() -> None:
    """A rank that was killed before it had completed step 8 had noted steps 6 and 7."""
    noted = {rank: dict.fromkeys((7, 8) if rank else (6, 7), REPLICAS[rank]) for rank in range(4)}
    assert choose(4, noted, {7: [EVERYONE], 8: [EVERYONE]}) == Choice(7, "")
    assert choose(4, noted, {8: [EVERYONE]}).why.startswith("rank 0 did not complete step 8")
    assert choose(4, noted, {}) == Choice(None, "no rank that survived has written anything")

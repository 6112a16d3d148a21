"""`lastgood.save` of what one of several ranks holds, and metrics of which each rank has a part."""

from __future__ import annotations

from pathlib import Path

import pytest

import lastgood
from lastgood_lab.worlds import world
from ranked_once import compared_in_slots, saved_beside_another, saved_by_one_call, saved_whole, with_sharded_metrics

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "callers"), [("fsdp", (0,)), ("fsdp", (0, 1)), ("tp", (0,)), ("tp", (0, 1)), ("fsdp1", (0, 1))]
)
def test_one_ranks_part_of_a_model_is_not_saved_as_the_whole(tmp_path: Path, kind: str, callers) -> None:
    """The shards of one rank were committed as whole tensors, and verified; those of the others were nowhere."""
    outcomes = world(2, saved_by_one_call, kind, tmp_path / "run", callers)
    assert [one != "" for one in outcomes] == [rank in callers for rank in (0, 1)]
    for rank in callers:
        named = "net" if kind == "fsdp1" else "net.up.weight, net.up.bias, net.down.weight"
        assert outcomes[rank].startswith(f"Refused: this process holds only a part of {named}")
        assert "Checkpointer.save(step) on all ranks" in outcomes[rank]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["fsdp", "tp"])
def test_a_model_that_all_ranks_gather_is_saved_whole_by_one(tmp_path: Path, kind: str) -> None:
    assert world(2, saved_whole, kind, tmp_path / "run") == [True, True]


def test_a_replica_is_saved_by_one_rank(tmp_path: Path) -> None:
    assert world(2, saved_by_one_call, "ddp", tmp_path / "run", (0,)) == ["step 3", ""]


def test_a_rank_that_saves_beside_another_learns_which_one_is_to(tmp_path: Path) -> None:
    """Where all ranks called it, some ended with the advice to end the process of another rank."""
    _, (beside, alone) = world(2, saved_beside_another, tmp_path / "run")
    assert beside.startswith("RunLocked: rank 1 of 2 called lastgood.save, and ")
    assert "call it on rank 0 only, or give each rank a path of its own" in beside
    assert alone == "step 1" and [one.step for one in lastgood.open(tmp_path / "own").generations()] == [1]


def test_a_metric_of_which_each_rank_has_a_part_counts_as_a_whole(tmp_path: Path) -> None:
    """The norm that `clip_grad_norm_` of FSDP2 returns ended the first comparison of a Sentinel on a device; and what
    was stored, for Keep(best=...), was the part of rank 0; and what was logged, that of its rank."""
    for stored, what, logged in world(2, with_sharded_metrics, tmp_path / "run"):
        assert stored == [3.0, 5.0] and "step 3: norm inf" in what and logged is None


def test_slots_whose_saves_are_compared_too_late_are_reported(tmp_path: Path) -> None:
    """Slots keep the newest save only. Where several ranks save between two comparisons of a Sentinel, what had
    diverged replaced the last good state, and no report had said that it might."""
    assert world(2, compared_in_slots, tmp_path / "run") == [[True, False, False], [False] * 3]

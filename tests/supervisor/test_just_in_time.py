"""When a rank dies under `lastgood run`, the survivors save the newest step for all ranks: real ranks are killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgood.run import access
from lastgood.supervisor import attempt_log
from survivors import content, supervised, supervised_nodes

pytestmark = pytest.mark.slow


def went_on_from(run: str, steps: list[int], shown: object) -> list[attempt_log.Attempt]:
    """The attempts after the first one went on from these steps, and each was saved as all ranks would have saved it.
    `shown`: what the supervisors have reported. Returns the attempts."""
    attempts = attempt_log.read(access.for_reading(run))
    assert [one.restored_step for one in attempts] == [0, *steps], shown
    for step in steps:
        assert content(run, step) == content(f"{run}.usual", step), step
    return attempts


def test_survivors_save_what_all_ranks_would_have_saved(tmp_path: Path) -> None:
    """The steps since the last save were trained again after each death, though the survivors had their result."""
    run = str(tmp_path / "run")
    done = supervised(tmp_path, "ddp", run, 14, "kill:0:2:8", "kill:1:0:13", ranks=4)
    assert done.returncode == 0, done.stderr
    attempts = went_on_from(run, [7, 12], done.stderr)
    assert [one.replayed_steps for one in attempts] == [0, 0, 0]
    assert [one.cause.rank for one in attempts if one.cause is not None] == [2, 0]
    assert "saved step 7 for all ranks" in done.stderr


def test_a_survivor_that_dies_while_it_saves_leaves_the_last_good_one(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    done = supervised(tmp_path, "ddp", run, 9, "kill:0:1:8", "kill_saving:0", ranks=2)
    assert done.returncode == 0, done.stderr
    attempts = attempt_log.read(access.for_reading(run))
    assert [one.restored_step for one in attempts] == [0, 5]


def test_the_shards_of_a_dead_rank_are_saved_by_its_replica(tmp_path: Path) -> None:
    """Ranks 0 and 2 hold the same shards, and so do 1 and 3 (HSDP): no survivor has the whole state."""
    run = str(tmp_path / "run")
    done = supervised(tmp_path, "hsdp", run, 14, "kill:0:3:8", "kill:1:0:13", ranks=4)
    assert done.returncode == 0, done.stderr
    went_on_from(run, [7, 12], done.stderr)


@pytest.mark.long
def test_survivors_save_past_the_memory_of_the_machine(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves go to memory every 3 steps, and from there to the directory. What survivors save goes to the directory at
    once, and is newer than what is in memory."""
    monkeypatch.setenv("TEST_FIRST_TIER", "memory://")
    run = str(tmp_path / "run")
    done = supervised(tmp_path, "ddp", run, 15, "kill:0:1:9", "kill:1:0:15", ranks=2)
    assert done.returncode == 0, done.stderr
    went_on_from(run, [8, 14], done.stderr)


@pytest.mark.parametrize(
    ("kind", "ranks", "troubles", "reason"),
    [
        pytest.param(
            *("hsdp", 4, ["kill:0:1:8", "kill:0:3:8"]),
            "no survivor has written the tensors of step 7 on ranks 1, 3",
            id="no replica is left",
            marks=pytest.mark.long,
        ),
        # The survivors fail in the collective after `optimizer.step()`.
        pytest.param(
            *("hsdp", 4, ["kill_late:0:3:8"]),
            "changed after step 7 was completed",
            id="changed by an update",
            marks=pytest.mark.long,
        ),
        pytest.param(
            *("fsdp", 2, ["kill:0:1:8"]),
            "is sharded: what a dead rank held of it, no other rank has",
            id="one rank alone holds them",
        ),
    ],
)
def test_shards_that_no_survivor_can_save_are_not_saved(
    tmp_path: Path, kind: str, ranks: int, troubles: list[str], reason: str
) -> None:
    run = str(tmp_path / "run")
    done = supervised(tmp_path, kind, run, 9, *troubles, ranks=ranks)
    assert done.returncode == 0, done.stderr
    attempts = attempt_log.read(access.for_reading(run))
    assert [one.restored_step for one in attempts] == [0, 5]
    assert reason in done.stderr


def test_the_survivors_of_several_nodes_save_what_a_node_has_lost(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 0 and 1 are on one node, and 2 and 3, their replicas, on the other one. First one rank dies, then all ranks
    of a node, of which only the supervisor is left. Usual saves go to the memory of each node, every 3 steps.

    Rank 0 saved nothing at times: it waited until the dead node had deleted an older generation. So the ranks of that
    node die before they have."""
    monkeypatch.setenv("TEST_FIRST_TIER", "memory://")
    run = str(tmp_path / "run")
    troubles = ["kill:0:0:8", "no_deletions:1:2:12", "kill:1:2:14", "kill:1:3:14"]
    logs = supervised_nodes(tmp_path, "hsdp", run, 14, *troubles, nodes=2, ranks=2)
    attempts = went_on_from(run, [7, 13], logs)
    assert [one.nodes for one in attempts] == [2, 2, 2]

"""Runs of several ranks whose nodes have disks of their own: each node keeps the files of its ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import lastgood
from harness import flip, steps
from lastgood_lab.worlds import world
from ranked_nodes import in_slots, refused_commit, trained

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    root = tmp_path_factory.mktemp("whole")
    return world(2, trained, [root / "a", root / "a"], root / "last", 12)[0]["losses"]


def names(disk: Path, step: int) -> set[str]:
    (found,) = disk.glob(f"gen/{step:012d}-*")
    return {one.name for one in found.iterdir()}


def test_each_node_keeps_the_files_of_its_ranks_and_all_records(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    world(2, trained, [a, b], tmp_path / "last", 6)
    records = {"COMMIT.json", "VERIFIED.json"}
    assert names(a, 6) == records | {"r00000.safetensors", "r00000.manifest.json"}
    assert names(b, 6) == records | {"r00001.safetensors", "r00001.manifest.json"}
    assert steps(a) == steps(b) == [4, 6], "retention deletes on every node"
    assert steps(tmp_path / "last") == [4, 6] and lastgood.open(tmp_path / "last").verify(6).good


NOTHING_BELOW = {"nothing_below": True}


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_go_on_exactly_from_the_disks_of_their_nodes(tmp_path, size):
    disks = [tmp_path / ("a" if rank < size // 2 else "b") for rank in range(size)]
    before = world(size, trained, disks, tmp_path / "last", 6, "fsdp", {**NOTHING_BELOW, "unsaved": 6})
    after = world(size, trained, disks, tmp_path / "last", 12, "fsdp", NOTHING_BELOW)
    for rank in range(size):
        assert after[rank]["step"] == 6 and str(disks[rank]) in after[rank]["sources"]
        assert after[rank]["losses"] == before[rank]["losses"][6:]


def test_a_replaced_node_reads_its_part_from_the_place_below(tmp_path, uninterrupted):
    disks, last = [tmp_path / "a", tmp_path / "b"], tmp_path / "last"
    before = world(2, trained, disks, last, 8)
    shutil.rmtree(disks[1])
    after = world(2, trained, disks, last, 12)
    assert {one["step"] for one in after} == {8}
    assert before[1]["losses"] + after[1]["losses"] == uninterrupted
    assert names(disks[1], 12) >= {"COMMIT.json", "r00001.safetensors"}


def test_what_only_a_lost_node_had_is_stepped_over(tmp_path, uninterrupted):
    disks, last = [tmp_path / "a", tmp_path / "b"], tmp_path / "last"
    before = world(2, trained, disks, last, 6, "fsdp", {"save_on_exit": False})  # step 6 was not due below
    shutil.rmtree(disks[0])
    after = world(2, trained, disks, last, 12)
    assert {one["step"] for one in after} == {4} and after[0]["stepped_over"] == [6]
    assert before[0]["losses"][:4] + after[0]["losses"] == uninterrupted
    assert not list(tmp_path.glob("*/gen/*/DAMAGED.json")), "the node may come back"


def test_ranks_that_changed_nodes_fetch_their_files_from_each_other(tmp_path, uninterrupted):
    a, b, last = tmp_path / "a", tmp_path / "b", tmp_path / "last"
    before = world(2, trained, [a, b], last, 6, "fsdp", NOTHING_BELOW)
    after = world(2, trained, [b, a], last, 12, "fsdp", NOTHING_BELOW)
    assert {one["step"] for one in after} == {6}
    assert before[0]["losses"] + after[0]["losses"] == uninterrupted
    assert set(after[0]["sources"]) == {str(b), "other nodes"}
    assert not list(tmp_path.glob("*/gen/*/*.tmp")), "what was fetched is deleted"


def test_replicas_are_read_once_by_each_node(tmp_path):
    """Under DDP each rank writes a part of the state and needs all of it."""
    disks = [tmp_path / "a", tmp_path / "a", tmp_path / "b", tmp_path / "b"]
    before = world(4, trained, disks, tmp_path / "last", 6, "ddp", {**NOTHING_BELOW, "unsaved": 6})
    held = {disk: sum(one.stat().st_size for one in disk.glob("gen/*6-*/*.safetensors")) for disk in disks}
    after = world(4, trained, disks, tmp_path / "last", 12, "ddp", NOTHING_BELOW)
    for rank in range(4):
        assert after[rank]["step"] == 6
        assert after[rank]["sources"]["other nodes"] == held[disks[rank - 2]], "for both ranks of a node together"
        assert after[rank]["losses"] == before[rank]["losses"][6:]


@pytest.mark.parametrize("size", [1, 3])
def test_other_numbers_of_ranks_go_on_from_the_disks_that_are_left(tmp_path, size):
    a, b, last = tmp_path / "a", tmp_path / "b", tmp_path / "last"
    world(4, trained, [a, a, b, b], last, 8)
    after = world(size, trained, [a, b, b][:size], last, 10)
    assert {one["step"] for one in after} == {8}


def test_nodes_with_different_runs_are_refused_and_left_alone(tmp_path):
    """The error named a rank of each run, and not which folder of which machine is to be emptied."""
    a, b = tmp_path / "a", tmp_path / "b"
    for disk in (a, b):
        world(2, trained, [disk, disk], tmp_path / f"last of {disk.name}", 2)
    before = {one: one.stat().st_mtime_ns for disk in (a, b) for one in disk.rglob("*") if one.is_file()}
    with pytest.raises(Exception, match=rf"different runs: \w+ in {a} on \S+; \w+ in {b} on \S+\. Nothing was touched"):
        world(2, trained, [a, b], tmp_path / "last", 4)
    assert {one: one.stat().st_mtime_ns for disk in (a, b) for one in disk.rglob("*") if one.is_file()} == before


def test_a_commit_that_one_node_refuses_is_unknown_and_completed_later(tmp_path):
    disks, last = [tmp_path / "a", tmp_path / "b"], tmp_path / "last"
    assert world(2, refused_commit, disks, last, 1) == [["durable", "CommitUnknown", "durable"]] * 2
    assert "COMMIT.json" in names(disks[0], 2) and "COMMIT.json" not in names(disks[1], 2)
    shutil.rmtree(last)
    shutil.rmtree(next(disks[0].glob(f"gen/{3:012d}-*")))
    (next(disks[1].glob(f"gen/{3:012d}-*")) / "COMMIT.json").unlink()
    after = world(2, trained, disks, last, 4, "fsdp", NOTHING_BELOW)
    assert {one["step"] for one in after} == {2}, "every file of step 2 was durable"
    assert "COMMIT.json" in names(disks[1], 2)


def test_a_damaged_file_of_another_node_is_found_and_mended(tmp_path, uninterrupted):
    disks, last = [tmp_path / "a", tmp_path / "b"], tmp_path / "last"
    world(2, trained, disks, last, 8)
    (damaged,) = disks[1].glob(f"gen/{8:012d}-*/r00001.safetensors")
    good = damaged.read_bytes()
    flip(damaged)
    after = world(2, trained, disks, last, 9, "fsdp", {"save_on_exit": False})
    assert {one["step"] for one in after} == {8} and after[0]["losses"] == uninterrupted[8:9]
    assert damaged.read_bytes() == good


def test_ranks_in_slots_go_on_exactly_where_they_stopped(tmp_path, uninterrupted):
    path = f"slots://{tmp_path}/run"
    before = world(2, in_slots, path, 6)
    after = world(2, in_slots, path, 12)
    assert {one["step"] for one in after} == {6} and after[0]["outcomes"] == ["durable"] * 3
    assert before[0]["losses"] + after[0]["losses"] == uninterrupted
    assert sorted(one.name for one in (tmp_path / "run").iterdir()) == ["r00000", "r00001"]


@pytest.mark.parametrize("faulty_rank", [0, 1])
def test_a_slot_is_freed_only_after_all_ranks_have_committed(tmp_path, faulty_rank, uninterrupted):
    """PCcheck's peer check. A rank that has committed step 6 would overwrite step 4 next, which the other rank still
    needs, because step 6 does not exist for it."""
    path = f"slots://{tmp_path}/run"
    before = world(2, in_slots, path, 12, 6, faulty_rank)
    assert before[0]["outcomes"] == before[1]["outcomes"] == ["durable", "durable", "CommitUnknown"]
    after = world(2, in_slots, path, 12)
    assert {one["step"] for one in after} == {4}
    assert before[0]["losses"][:4] + after[0]["losses"] == uninterrupted


def test_a_rank_that_lost_its_slots_goes_on_from_the_place_below(tmp_path, uninterrupted):
    disks = [f"slots://{tmp_path}/run"] * 2
    before = world(2, trained, disks, tmp_path / "last", 8, "fsdp", {"in_slots": True})
    shutil.rmtree(tmp_path / "run" / "r00001")
    after = world(2, trained, disks, tmp_path / "last", 12, "fsdp", {"in_slots": True})
    assert {one["step"] for one in after} == {8}
    assert before[1]["losses"] + after[1]["losses"] == uninterrupted


def test_slots_of_ranks_are_enough_although_nothing_is_verified(tmp_path):
    found = world(2, in_slots, f"slots://{tmp_path}/run", 20, 0, 0, False)
    assert {tuple(one["outcomes"]) for one in found} == {("durable",) * 10}


def test_slots_of_several_ranks_are_named_to_one_process(tmp_path):
    world(2, in_slots, f"slots://{tmp_path}/run", 2)
    with pytest.raises(lastgood.errors.NotARun, match=r"slots of a job of several ranks.*as many"):
        lastgood.Checkpointer(f"slots://{tmp_path}/run", {"w": torch.zeros(1)})
    assert lastgood.open(f"slots://{tmp_path}/run/r00001").generation(2).commit.world.ranks == 2


def test_refused_commits_do_not_use_up_the_slots(tmp_path):
    """Each commit that one rank refused kept one more slot at the others, until no save found a free one."""
    path = f"slots://{tmp_path}/run"
    found = world(2, in_slots, path, 20, 4, 0, True, (4, 6, 8, 10, 12))
    outcomes = ["durable", *["CommitUnknown"] * 5, *["durable"] * 4]
    assert [one["outcomes"] for one in found] == [outcomes] * 2
    assert world(2, in_slots, path, 24)[0]["outcomes"] == ["durable"] * 2


def test_more_ranks_go_on_from_slots(tmp_path):
    """The new ranks have no COMMIT in their slots, and read other messages of the restore than the others."""
    disks = [f"slots://{tmp_path}/run"] * 4
    world(2, trained, disks, tmp_path / "last", 8, "fsdp", {"in_slots": True})
    after = world(4, trained, disks, tmp_path / "last", 10, "fsdp", {"in_slots": True})
    assert {one["step"] for one in after} == {8}


def test_slots_of_one_process_are_not_taken_for_an_empty_place(tmp_path):
    with lastgood.Checkpointer(f"slots://{tmp_path}/run", {"w": torch.zeros(1)}) as ckpt:
        ckpt.save(1).result()
    with pytest.raises(Exception, match="holds the slots of a run of one process"):
        world(2, in_slots, f"slots://{tmp_path}/run", 2)


def test_a_damaged_chunk_below_is_fetched_from_the_node_that_has_it(tmp_path, uninterrupted):
    a, b, last = tmp_path / "a", tmp_path / "b", tmp_path / "last"
    world(2, trained, [a, b], last, 8)
    for damaged in last.glob(f"gen/{8:012d}-*/*.safetensors"):
        flip(damaged)
    after = world(2, trained, [b, a], last, 9, "fsdp", {"save_on_exit": False})
    assert {one["step"] for one in after} == {8} and after[0]["losses"] == uninterrupted[8:9]


def test_a_generation_that_lost_a_part_is_deleted_in_time(tmp_path):
    a, b, last = tmp_path / "a", tmp_path / "b", tmp_path / "last"
    world(2, trained, [a, b], last, 6, "fsdp", {"save_on_exit": False})
    shutil.rmtree(a)
    world(2, trained, [a, b], last, 14, "fsdp", {"save_on_exit": False})
    assert steps(a) == steps(b) == [12, 14]


def test_a_requested_step_that_lost_a_part_gets_no_mark(tmp_path):
    a, b, last = tmp_path / "a", tmp_path / "b", tmp_path / "last"
    world(2, trained, [a, b], last, 6, "fsdp", {"save_on_exit": False})
    kept = tmp_path / "kept"
    a.rename(kept)
    with pytest.raises(Exception, match="missing on every node"):
        world(2, trained, [a, b], last, 8, "fsdp", {"save_on_exit": False, "restored_step": 6})
    assert not list(tmp_path.glob("*/gen/*/DAMAGED.json")), "the node may come back"
    shutil.rmtree(a)
    kept.rename(a)
    assert {one["step"] for one in world(2, trained, [a, b], last, 8)} == {6}


def test_a_replaced_node_belongs_to_the_run_from_its_first_opening_on(tmp_path):
    """It had no header, and passed for a node of any other run."""
    a, b, last = tmp_path / "a", tmp_path / "b", tmp_path / "last"
    world(2, trained, [a, b], last, 4)
    shutil.rmtree(b)
    world(2, trained, [a, b], last, 4)
    assert (b / "lastgood.json").read_bytes() == (a / "lastgood.json").read_bytes()


def test_a_damaged_commit_of_one_node_does_not_stop_the_run(tmp_path, uninterrupted):
    a, b, last = tmp_path / "a", tmp_path / "b", tmp_path / "last"
    world(2, trained, [a, b], last, 6, "fsdp", {"save_on_exit": False})
    (record,) = b.glob(f"gen/{6:012d}-*/COMMIT.json")
    flip(record)
    after = world(2, trained, [a, b], last, 7, "fsdp", {"save_on_exit": False})
    assert {one["step"] for one in after} == {6} and after[0]["losses"] == uninterrupted[6:7]

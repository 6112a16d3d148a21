"""Runs of several ranks in several places: each rank copies its own part, and each restores from the nearest place."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

import lastgood
from harness import flip, reports, steps
from lastgood_lab.campaigns.rank_jobs import PATIENCE, Loop
from lastgood_lab.worlds import world
from ranked import saved_from_own_folder
from ranked_places import copied_by, failing, interrupted, preempted, replicas_restored, trained

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    root = tmp_path_factory.mktemp("whole")
    return world(2, trained, root, root / "last", 12)[0]["losses"]


def test_every_rank_copies_its_own_part_to_the_place_below(tmp_path):
    copied = world(2, copied_by, tmp_path, tmp_path / "last")
    assert copied == [["r00000.safetensors"], ["r00001.safetensors"]]
    assert steps(tmp_path / "front") == [2, 4] and steps(tmp_path / "last") == [4]
    for place in ("front", "last"):
        run = lastgood.open(tmp_path / place)
        assert run.generation(4).commit.world.ranks == 2 and run.verify(4).good and run.generation(4).verified


def test_ranks_in_different_folders_open_one_run_by_its_url(tmp_path):
    """The name by which ranks meet had the working directory in it: each waited for the other, and the job ended with
    a remedy about another directory."""
    assert world(2, saved_from_own_folder, tmp_path / "run") == [1, 1]


@pytest.mark.parametrize("lost", ["front", "last"])
def test_ranks_that_lost_a_place_go_on_exactly_from_the_other(tmp_path, lost, uninterrupted):
    before = world(2, trained, tmp_path, tmp_path / "last", 8)
    shutil.rmtree(tmp_path / lost)
    after = world(2, trained, tmp_path, tmp_path / "last", 12)
    other = "last" if lost == "front" else "front"
    for rank in (0, 1):
        assert after[rank]["step"] == 8 and list(after[rank]["sources"]) == [str(tmp_path / other)]
        assert before[rank]["losses"] + after[rank]["losses"] == uninterrupted
    assert lastgood.open(tmp_path / lost).verify(12).good and steps(tmp_path / "last")[-1] == 12


def tensor_file(run: Path, step: int, rank: int) -> Path:
    (found,) = run.glob(f"gen/{step:012d}-*/r{rank:05d}.safetensors")
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_damage_in_front_is_repaired_from_the_place_below(tmp_path, rank, uninterrupted):
    world(2, trained, tmp_path, tmp_path / "last", 8)
    damaged = tensor_file(tmp_path / "front", 8, rank)
    good = damaged.read_bytes()
    flip(damaged)
    flip(tensor_file(tmp_path / "last", 8, 1 - rank))
    after = world(2, trained, tmp_path, tmp_path / "last", 9)
    assert {one["step"] for one in after} == {8} and after[1]["losses"] == uninterrupted[8:9]
    assert damaged.read_bytes() == good, "the damaged files of both places are of different ranks"
    assert [step for step, _ in after[0]["repaired"]] == [8]


def test_one_process_applies_nothing_of_a_damaged_generation_of_ranks(tmp_path):
    """With strict=False, and where no older generation was left, the first of two readings read nothing of a generation
    of several ranks, so damage was found only when the live state was half written."""
    world(2, trained, tmp_path, tmp_path / "last", 8)
    damaged = tensor_file(tmp_path / "front", 8, 1)
    flip(damaged)
    (damaged.parent / "VERIFIED.json").unlink()
    net = Loop("plain", 1).net
    before = [one.clone() for one in net.parameters()]
    with pytest.raises(lastgood.errors.SumMismatch):
        lastgood.load(tmp_path / "front", {"net": net}, step=8)
    assert all(torch.equal(one, old) for one, old in zip(net.parameters(), before, strict=True))
    with reports():
        # On a busy machine step 8 may have overtaken step 6.
        assert lastgood.load(tmp_path / "front", {"net": net}, strict=False).step == steps(tmp_path / "front")[-2]


def test_more_and_fewer_ranks_go_on_from_the_place_below(tmp_path):
    world(3, trained, tmp_path, tmp_path / "last", 8)
    for size in (2, 1, 3):
        shutil.rmtree(tmp_path / "front")
        found = world(size, trained, tmp_path, tmp_path / "last", 8)
        assert {one["step"] for one in found} == {8}, f"{size} ranks"


def test_ranks_go_on_in_a_bucket_behind_their_disk(bucket, tmp_path, uninterrupted):
    environ = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    before = world(2, trained, tmp_path, bucket, 8, environ)
    shutil.rmtree(tmp_path / "front")
    after = world(2, trained, tmp_path, bucket, 12, environ)
    assert {tuple(one["sources"]) for one in after} == {(bucket,)}
    assert before[1]["losses"] + after[1]["losses"] == uninterrupted


@pytest.mark.parametrize("faulty_rank", [0, 1])
def test_a_copy_that_fails_on_one_rank_is_made_again(tmp_path, faulty_rank):
    first, _ = world(2, failing, tmp_path, tmp_path / "last", faulty_rank)
    assert "not_copied" in first["events"] and "copied" in first["events"]
    assert steps(tmp_path / "last")[-1] == 8 and lastgood.open(tmp_path / "last").verify(8).good


@pytest.mark.parametrize("faulty_rank", [0, 1])
def test_a_rank_that_raises_does_not_wait_for_the_copies_of_others(tmp_path, faulty_rank):
    world(2, interrupted, tmp_path, tmp_path / "last", faulty_rank)
    assert float((tmp_path / "left").read_text()) < PATIENCE


def test_a_signal_leaves_the_last_step_of_all_ranks_in_all_places(tmp_path):
    assert world(2, preempted, tmp_path, tmp_path / "last") == [75, 75]
    newest = steps(tmp_path / "front")[-1]
    assert steps(tmp_path / "last")[-1] == newest >= 5
    assert lastgood.open(tmp_path / "last").verify(newest).good


def reads_of_tensors(proxy) -> int:
    """The bytes of tensor files that the store has sent."""
    return sum(one.received for one in proxy.requests if one.method == "GET" and ".safetensors" in one.target)


@pytest.mark.parametrize("size", [2, 3])
def test_what_all_ranks_of_a_machine_want_is_read_once_from_a_bucket(bucket, proxy, tmp_path, size):
    """Each of the ranks under DDP read all of the state from the store."""
    environ = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    environ["TMPDIR"] = str(tmp_path)
    whole = world(2, replicas_restored, bucket, 4, environ)
    run = lastgood.open(bucket)
    generation = run.generation(4)
    stored = sum(blob.length for rank in (0, 1) for blob in run.manifest(generation, rank).blobs)
    proxy.clear()
    after = world(size, replicas_restored, bucket, 4, environ)
    assert {one["step"] for one in after} == {4} and reads_of_tensors(proxy) == stored
    assert not list(tmp_path.glob("lastgood-*")), "the shared file has no name any more"
    proxy.clear()
    alone = world(size, replicas_restored, bucket, 4, environ, False)
    assert {one["step"] for one in alone} == {4} and reads_of_tensors(proxy) >= size * stored, "no room for the file"
    assert len(whole[0]["losses"]) == 4

"""Parity and scrubs with several ranks: each rank writes the parity of its own files, and rank 0 mends."""

from __future__ import annotations

from pathlib import Path

import pytest

import lastgood
from harness import flip
from lastgood.format import layout, parity_layout
from lastgood_lab.worlds import world
from ranked_places import protected, scrubbed, trained

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return world(2, protected, tmp_path_factory.mktemp("whole"), 6)[0]["losses"]


def folder_of(run: Path, step: int) -> Path:
    (found,) = run.glob(f"gen/{step:012d}-*")
    return found


def test_every_rank_writes_the_parity_of_its_own_files(tmp_path):
    world(2, protected, tmp_path, 4)
    names = [one.name for one in folder_of(tmp_path, 4).iterdir() if parity_layout.is_parity(one.name)]
    assert sorted(names) == sorted(
        name for rank in (0, 1) for name in (parity_layout.parity_name(rank, 0), parity_layout.record_name(rank, 0))
    )


@pytest.mark.parametrize(
    "damaged",
    [["r00000.safetensors"], ["r00001.safetensors"], ["r00000.safetensors", "r00001.safetensors"]],
    ids=["rank 0", "rank 1", "both"],
)
def test_damaged_files_of_any_rank_are_rebuilt_in_a_restore(tmp_path, damaged, uninterrupted):
    world(2, protected, tmp_path, 4)
    files = [folder_of(tmp_path, 4) / name for name in damaged]
    good = [one.read_bytes() for one in files]
    for one in files:
        flip(one)
    after = world(2, protected, tmp_path, 6)
    assert {one["step"] for one in after} == {4} and [step for step, _ in after[0]["repaired"]] == [4]
    assert after[1]["losses"] == uninterrupted[4:]
    assert [one.read_bytes() for one in files] == good


@pytest.mark.parametrize("lost", [layout.COMMIT, "r00000.manifest.json", "r00001.manifest.json"])
def test_a_lost_record_of_several_ranks_comes_back_from_parity(tmp_path, lost):
    world(2, protected, tmp_path, 4)
    (folder_of(tmp_path, 4) / lost).unlink()
    after = world(2, protected, tmp_path, 4)
    assert {one["step"] for one in after} == {4} and lastgood.open(tmp_path).verify(4).good


def test_a_scrub_rebuilds_the_files_of_every_rank(tmp_path):
    world(2, protected, tmp_path, 6)
    file = folder_of(tmp_path, 4) / "r00001.safetensors"
    good = file.read_bytes()
    flip(file)
    first, _ = world(2, scrubbed, tmp_path, 14)
    assert "repaired" in first
    assert file.read_bytes() == good


def test_a_place_below_gets_the_parity_of_every_rank(tmp_path):
    world(2, trained, tmp_path, tmp_path / "last", 4, None, "3+1")
    names = {one.name for one in folder_of(tmp_path / "last", 4).iterdir()}
    assert {parity_layout.record_name(rank, 0) for rank in (0, 1)} <= names
    assert not any(parity_layout.is_parity(one.name) for one in folder_of(tmp_path / "front", 4).iterdir())


def test_the_command_scrub_mends_the_files_and_parity_of_all_ranks(tmp_path, call_json):
    world(2, protected, tmp_path, 4)
    folder = folder_of(tmp_path, 4)
    for rank in (0, 1):
        flip(folder / f"r0000{rank}.safetensors")
    assert call_json("scrub", str(tmp_path))[0] == 0 and lastgood.open(tmp_path).verify(4).good
    (folder / parity_layout.record_name(1, 0)).unlink()
    assert call_json("scrub", str(tmp_path))[0] == 0
    assert parity_layout.record_name(1, 0) in {one.name for one in folder.iterdir()}

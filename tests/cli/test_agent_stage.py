"""`lastgood agent stage`: a generation in the memory of a node, before a training process needs it there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

import lastgood
from harness import steps
from lastgood.format import layout
from lastgood.records import PlaceList
from lastgood.run import access, agent_link, copying, memory_place
from lastgood.run.agent_messages import AgentSpec, CopyTo
from lastgood.supervisor.staging import Reserve

GOLDEN = Path(__file__).parents[1] / "golden" / "ranks"
"""a run of two ranks, with the steps 2 and 4"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "home"))


def names(home: Path) -> dict[int, set[str]]:
    """Step -> the names of its files in memory."""
    folder = Path(memory_place.folder_of(home))
    return {int(one.name[:12]): {file.name for file in one.iterdir()} for one in (folder / "gen").iterdir()}


RECORDS = {"COMMIT.json", "VERIFIED.json"}


def test_the_newest_generation_comes_into_memory_and_the_older_one_goes(home, memory, call_json):
    assert call_json("agent", "stage", str(home), "2")[0] == 0
    assert names(home).keys() == {2}
    status, found = call_json("agent", "stage", str(home))
    assert status == 0 and found["step"] == 4 and found["bytes"] > 0
    assert names(home).keys() == {4}
    assert lastgood.open(f"memory://{memory_place.folder_of(home)}").verify(4).good


def test_only_the_files_of_some_ranks_come(home, memory, call_json):
    assert call_json("agent", "stage", str(home), "--ranks", "1")[0] == 0
    assert names(home) == {4: {"r00001.safetensors", "r00001.manifest.json", *RECORDS}}


def test_a_part_of_a_save_is_no_more_verified_than_where_it_came_from(home, memory, call_json):
    """A save that nobody had read yet was good in memory once the files of one rank were read."""
    (mark,) = home.glob("gen/000000000004-*/VERIFIED.json")
    mark.unlink()
    for _ in range(2):
        assert call_json("agent", "stage", str(home), "--ranks", "1")[0] == 0
        assert names(home) == {4: {"r00001.safetensors", "r00001.manifest.json", "COMMIT.json"}}
        (Path(memory_place.folder_of(home)) / "gen" / mark.parent.name / "DAMAGED.json").touch()  # as of a bad copy


def test_the_next_start_reads_from_memory(tmp_path, memory, call_json):
    home, state = tmp_path / "home", {"w": torch.arange(1000.0)}
    tiers = [lastgood.Tier("memory://", cadence=lastgood.Every(steps=1))]
    with lastgood.Checkpointer(home, state) as ckpt:
        ckpt.save(3).result()
    assert call_json("agent", "stage", str(home))[0] == 0
    with lastgood.Checkpointer(home, state, tiers=tiers) as ckpt:
        found = ckpt.restore()
        assert found.step == 3 and list(found.sources) == [f"memory://{memory_place.folder_of(home)}"]
        ckpt.wait()


def test_what_is_only_in_memory_stays(home, memory, call_json):
    """Another generation of the run, which no agent has copied yet."""
    assert call_json("agent", "stage", str(home))[0] == 0
    shutil.rmtree(next((home / "gen").glob("000000000004-*")))
    assert call_json("agent", "stage", str(home))[0] == 0
    assert names(home).keys() == {2, 4}


def test_a_node_in_reserve_follows_the_newest_generation(home, memory, caplog):
    """As `lastgood run --stage RUN` does it. It begins before the run exists, as on the first start of a job."""
    caplog.set_level("INFO")
    listed = PlaceList(format=layout.FORMAT, places=[memory_place.url_of(home), str(home)])
    (home / layout.PLACES).write_bytes(layout.encode(listed))
    later, reserve = home.with_name("later"), Reserve(str(home))
    home.rename(later)
    reserve.refresh()
    reserve.refresh()
    later.rename(home)
    newest = next((home / "gen").glob("000000000004-*"))
    newest.rename(home / "kept")
    reserve.refresh()
    assert names(home).keys() == {2}
    (home / "kept").rename(newest)
    reserve.refresh()
    reserve.refresh()
    assert names(home).keys() == {4}
    reported = [one.getMessage().partition(" in the memory of this node")[0] for one in caplog.records]
    assert reported == [
        "nothing is staged",
        "step 2 is staged",
        "step 4 is staged",
    ]


@pytest.mark.parametrize("ranks", ["x", "3-1", "1-", "0,,1", "0-99999999"])
def test_a_text_that_names_no_ranks_is_refused(home, memory, call_json, ranks):
    assert call_json("agent", "stage", str(home), "--ranks", ranks)[0] == 2
    assert not Path(memory_place.folder_of(home)).exists()


def test_a_rank_that_wrote_nothing_is_refused_before_anything_is_made(home, memory, call_json):
    assert call_json("agent", "stage", str(home), "--ranks", "0-2")[0] != 0
    assert not Path(memory_place.folder_of(home)).exists()


def test_memory_that_an_agent_has_is_left_alone(tmp_path, memory, call_json):
    home, tiers = tmp_path / "home", [lastgood.Tier("memory://", cadence=lastgood.Every(steps=1))]
    with lastgood.Checkpointer(home, {"w": torch.zeros(10)}, tiers=tiers) as ckpt:
        ckpt.restore()
        ckpt.save(1).result()
        assert call_json("agent", "stage", str(home))[0] != 0
    assert steps(home) == [1]


def test_a_start_that_comes_meanwhile_goes_first(home, memory, call_json, monkeypatch):
    """It was refused, because the staging had the memory locked, and the whole job failed."""
    real = copying.copy_incarnations

    def started(source, target) -> None:
        real(source, target)
        with open(os.path.join(memory_place.folder_of(home), access.LOCK + access.WANTED), "w"):
            """As a training process asks an agent to give way."""

    monkeypatch.setattr(copying, "copy_incarnations", started)
    assert call_json("agent", "stage", str(home))[0] != 0
    assert not lastgood.open(f"memory://{memory_place.folder_of(home)}").generations()
    with access.for_writing(memory_place.url_of(home), "atomic_dirsync"):
        """The lock is free."""
    monkeypatch.undo()


def test_what_an_agent_is_to_copy_is_not_forgotten(home, memory, call_json):
    assert call_json("agent", "stage", str(home), "2")[0] == 0
    folder = memory_place.folder_of(home)
    keep = CopyTo(url="file:///nfs/a", keep=lastgood.Keep(every=1000))
    spec = AgentSpec(format=1, places=[keep], order=9, spill=None)
    with access.for_writing(memory_place.url_of(home), "atomic_dirsync") as tier:
        agent_link.write_spec(tier, spec)
    assert call_json("agent", "stage", str(home))[0] == 0
    assert agent_link.read_spec(folder) == spec


def test_another_run_is_not_staged_for_this_one(home, tmp_path, memory, call_json):
    with lastgood.Checkpointer(tmp_path / "other", {"w": torch.zeros(3)}) as ckpt:
        ckpt.save(9).result()
    assert call_json("agent", "stage", str(home), "--from", str(tmp_path / "other"))[0] != 0
    assert not Path(memory_place.folder_of(home)).exists()


def test_a_staging_that_was_interrupted_leaves_nothing_behind(home, memory, call_json, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(copying, "complete", lambda *_: copying.copy_files(*_[:3], None, _[3]) and 1 / 0)
        with pytest.raises(ZeroDivisionError):
            call_json("agent", "stage", str(home), "2")
    assert names(home).keys() == {2}
    assert call_json("agent", "stage", str(home))[0] == 0
    assert names(home).keys() == {4}

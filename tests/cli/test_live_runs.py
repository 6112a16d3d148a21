"""Commands that read a run from which training deletes generations meanwhile: that is no damage."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lastgood
from cli_runs import DATA, at, writing
from harness import flip, save
from lastgood.cli import copying, exporting, replay, sweep, verify
from lastgood.engine.inline_executor import Inline
from lastgood.errors import Cancelled, LastgoodError
from lastgood.format import commit, folders, layout
from lastgood.io.reused_files import LEAST_BYTES
from lastgood.ports import Tier
from lastgood.records import GenerationId
from lastgood.run import access, drill, drill_acts, kept, memory_place, paths, read_places
from lastgood.run.content import Content
from lastgood.run.writer import RunWriter


@pytest.fixture
def home(tmp_path: Path) -> Path:
    writing(tmp_path / "home", 1, 2, 3)
    return tmp_path / "home"


@pytest.fixture
def only_in_memory(home: Path, memory: Path) -> Path:
    """`home`, with all of its generations in the memory of this machine, and none at home."""
    folder = Path(memory_place.folder_of(home))
    memory_place.make(str(folder))
    shutil.copytree(home, folder, dirs_exist_ok=True)
    shutil.rmtree(home / "gen")
    (home / "gen").mkdir()
    return home


def delete(tier: Tier, one: GenerationId) -> None:
    """Delete a generation as training does."""
    with access.for_writing(tier.place, "atomic_dirsync") as place:
        commit.retire(place, one)


@contextlib.contextmanager
def deleted_before(tier: Tier, one: GenerationId) -> Iterator[Tier]:
    """In place of `kept`: the generation is deleted before it is kept."""
    delete(tier, one)
    with kept.kept(tier, one) as place:
        yield place


@contextlib.contextmanager
def deleted_after(tier: Tier, one: GenerationId) -> Iterator[Tier]:
    """In place of `kept`: the generation is deleted once it is kept."""
    with kept.kept(tier, one) as place:
        delete(tier, one)
        yield place


# ---- memory ------------------------------------------------------------------------------------------------------


def test_memory_of_a_deleted_generation_is_not_used_while_it_is_kept(tmp_path, memory):
    """Training deleted a step that was read, and the next save was written into the memory where it had been."""
    url = f"{paths.MEMORY}{memory_place.folder_of(tmp_path / 'home')}"
    memory_place.make(paths.parsed(url).root)
    with access.for_writing(url, "atomic_dirsync") as tier:
        run = RunWriter(tier, Inline())
        run.begin(None)
        first = save(run, 1, {"weight": b"1" * LEAST_BYTES})
        with kept.kept(tier, first.id) as place:
            commit.retire(tier, first.id)
            save(run, 2, {"weight": b"2" * LEAST_BYTES})
            assert Content(place, first).tensor("weight")[1] == b"1" * LEAST_BYTES
        assert not place.list(layout.folder(first.id))


def test_a_drill_copies_a_generation_that_is_deleted_meanwhile(only_in_memory, call_json, monkeypatch):
    """Saves were only in memory, one each half second: each drill ended with "damage", exit code 4."""
    monkeypatch.setattr(drill, "kept", deleted_after)
    code, document = call_json("drill", only_in_memory)
    assert code == 0 and document["step"] == 3 and document["good"]


@pytest.mark.parametrize("place", ["home", "only_in_memory"])
def test_deletions_end_a_drill_with_an_error_that_is_no_damage(place, request, call, monkeypatch):
    """It said "no generation of this run is good", or that a file is missing, with exit code 4."""
    run = request.getfixturevalue(place)
    monkeypatch.setattr(drill, "kept", deleted_before)
    monkeypatch.setattr(drill, "ATTEMPTS", 2)  # the last generation is never deleted
    code, _, err = call("drill", run)
    assert code == 5 and "training has deleted 2 generations" in err and "Nothing is damaged" in err


def test_a_drill_takes_the_next_generation_after_a_deletion(home, call_json, monkeypatch):
    """Within the reading of the newest one, which was not tried again."""
    found = iter([deleted_before])
    monkeypatch.setattr(drill, "kept", lambda tier, one: next(found, kept.kept)(tier, one))
    code, document = call_json("drill", home)
    assert code == 0 and document["step"] == 2


def test_copies_that_a_deletion_has_cut_short_are_removed(home, call_json, monkeypatch):
    copy, copied = drill_acts.Stage._copy, []

    def deleting(stage: drill_acts.Stage, tier: Tier, place: Any) -> None:
        if not copied:
            delete(tier, stage._original.generation.id)
        copied.append(sorted(Path(place.root).glob("gen/*")))
        copy(stage, tier, place)

    monkeypatch.setattr(drill_acts.Stage, "_copy", deleting)
    code, document = call_json("drill", home)
    assert code == 0 and document["step"] == 2 and copied[:2] == [[], []]


# ---- other readers -----------------------------------------------------------------------------------------------


def test_a_load_reads_a_generation_that_is_deleted_meanwhile(only_in_memory, monkeypatch):
    """It said that nothing is good, and to restore the files from a copy or to start over."""
    monkeypatch.setattr(read_places, "kept", deleted_after)
    assert lastgood.load(only_in_memory).restored.step == 3


def test_a_load_of_a_deleted_generation_reports_the_deletion(home, monkeypatch):
    """Of all steps that were there when it began it said that they are damaged."""
    monkeypatch.setattr(read_places, "kept", deleted_before)
    with pytest.raises(Cancelled, match="step 3 was deleted while it was read"):
        lastgood.load(home)


def test_a_deletion_is_not_reported_as_damage_by_other_commands(home, tmp_path, call, call_json, monkeypatch):
    """`export` and `copy` said so, and `verify` that a generation is good of which it had read a part."""
    for module in (exporting, verify, copying):
        monkeypatch.setattr(module, "kept", deleted_before)
    code, _, err = call("export", home, "--to", tmp_path / "model.safetensors")
    assert code == 5 and "step 3 was deleted" in err
    code, _, err = call("verify", home)
    assert code == 5 and "step 2 was deleted" in err
    writing(home, 4)
    assert call("copy", home, tmp_path / "other", "1")[0] == 5
    writing(home, 5, 6, 7)
    first = iter([deleted_before, deleted_before])
    for module in (verify, copying):
        monkeypatch.setattr(module, "kept", lambda tier, one: next(first, kept.kept)(tier, one))
    code, document = call_json("verify", home, "--all")
    assert code == 0 and [one["step"] for one in document["generations"]] == [5, 4]
    writing(home, 8)
    first = iter([deleted_before])
    code, document = call_json("copy", home, tmp_path / "other")
    assert code == 0 and not document["failed"] and [one["step"] for one in document["copied"]] == [5, 8]


def test_a_run_that_vanishes_is_neither_good_nor_copied(home, tmp_path, call, monkeypatch):
    """The disk was not there any more: nothing was read, and `verify --all` and a nightly copy ended with 0."""

    @contextlib.contextmanager
    def vanished(tier: Tier, one: GenerationId) -> Iterator[Tier]:
        shutil.rmtree(home / "gen", ignore_errors=True)
        with kept.kept(tier, one) as place:
            yield place

    away = shutil.copytree(home, tmp_path / "away")
    for module in (verify, copying):
        monkeypatch.setattr(module, "kept", vanished)
    assert call("verify", home, "--all")[0] == 4
    shutil.copytree(away / "gen", home / "gen")
    assert call("copy", home, tmp_path / "other")[0] == 4


@pytest.mark.parametrize("command", ["verify --all", "copy"])
def test_a_command_that_read_nothing_for_deletions_has_failed(home, tmp_path, call, monkeypatch, command):
    newer = iter(range(10, 20))

    @contextlib.contextmanager
    def deleted_for_a_newer_one(tier: Tier, one: GenerationId) -> Iterator[Tier]:
        writing(home, next(newer))
        with deleted_before(tier, one) as place:
            yield place

    monkeypatch.setattr({"copy": copying}.get(command, verify), "kept", deleted_for_a_newer_one)
    name, *options = command.split()
    code, _, err = call(name, home, *options, *([tmp_path / "other"] if name == "copy" else []))
    assert code == 5 and "was deleted while it was read" in err


def test_a_copy_ends_well_although_training_deletes_the_last_generation(home, tmp_path, call_json, monkeypatch):
    """The older ones had been copied, and it ended as if nothing had."""
    newest = max(commit.survey(access.for_reading(home)).generations)
    monkeypatch.setattr(copying, "kept", lambda tier, one: (deleted_before if one == newest else kept.kept)(tier, one))
    code, document = call_json("copy", home, tmp_path / "other")
    assert code == 0 and [one["step"] for one in document["copied"]] == [1, 2]


def test_a_load_takes_from_another_place_what_one_has_deleted(home, tmp_path, monkeypatch):
    """It ended with the deletion, although a place below still had the step."""
    tiers = [access.for_reading(one) for one in (home, shutil.copytree(home, tmp_path / "below"))]
    places = read_places.ReadPlaces(tiers, [commit.survey(one) for one in tiers])
    monkeypatch.setattr(read_places, "found", lambda _: places)
    delete(tiers[0], max(places.survey.generations))
    assert lastgood.load(home).restored.step == 3


def test_gc_steps_over_a_generation_that_training_deletes(home, call_json, monkeypatch):
    writing(home, 4, verified=False)
    read, newest = sweep.read_all, max(commit.survey(access.for_reading(home)).generations)

    def deleting(tier: Tier, *arguments: Any, **options: Any) -> Any:
        delete(access.for_reading(home), newest)
        return read(tier, *arguments, **options)

    monkeypatch.setattr(sweep, "read_all", deleting)
    code, document = call_json("gc", home, "--keep-last", "1", "--dry-run")
    assert code == 0, document


def test_a_deletion_while_a_run_is_listed_is_no_damage(home, call_json, monkeypatch):
    """`ls` had a generation as damaged whose COMMIT was deleted after its folder was listed."""
    read, newest = commit.read_generation, at(home, 3)

    def deleting(*arguments: Any) -> Any:
        shutil.rmtree(newest, ignore_errors=True)
        return read(*arguments)

    monkeypatch.setattr(commit, "read_generation", deleting)
    code, document = call_json("ls", home)
    assert code == 0 and [one["step"] for one in document["generations"]] == [2, 1]


@pytest.mark.parametrize("function", ["read_generation", "folders.names"])
def test_a_writer_deletes_nothing_of_a_run_that_vanishes_for_a_moment(home, tmp_path, monkeypatch, function):
    """`gen` was not there while it was listed, or while its commits were read. They counted as deleted, and the opening
    removed their files once the folder was back."""
    module, name = (folders, "names") if "." in function else (commit, function)
    real, left = getattr(module, name), iter(range(3))

    def away(*arguments: Any) -> Any:
        if next(left, None) is None:
            return real(*arguments)
        (home / "gen").rename(tmp_path / "away")
        try:
            return real(*arguments)
        finally:
            (tmp_path / "away").rename(home / "gen")

    before = sorted(home.glob("gen/*/*"))
    monkeypatch.setattr(module, name, away)
    with pytest.raises(LastgoodError), lastgood.Checkpointer(home, {"w": torch.zeros(3)}) as ckpt:
        ckpt.restore()
    monkeypatch.undo()
    assert [one for one in before if one.exists()] == before


def test_a_replay_of_a_damaged_generation_is_not_begun(home, call):
    """Both replays began with nothing, and their steps were compared."""
    flip(at(home, 3) / DATA)
    code, _, err = call("replay", home, "--", "false")
    assert code == 4 and "step 3 cannot be copied" in err


def test_a_replay_goes_on_after_its_generation_was_deleted(home, call, monkeypatch):
    copy = replay._copy

    def deleting(source: str, target: str, generation: Any) -> None:
        copy(source, target, generation)
        if source == str(home):
            delete(access.for_reading(home), generation.id)

    monkeypatch.setattr(replay, "_copy", deleting)
    code, _, err = call("replay", home, "--", "false")
    assert code == 3 and "the command ended with status 1" in err

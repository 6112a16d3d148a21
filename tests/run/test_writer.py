"""Save, verify, point and clean, in this order: the state that each one finds, and how the failure of one affects
the others."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from harness import save
from lastgood.engine.arena import Arena
from lastgood.engine.inline_executor import Inline
from lastgood.errors import Damaged, Overtaken
from lastgood.format import commit, layout
from lastgood.io.files import PosixFiles
from lastgood.policy.retention import Keep
from lastgood.ports import Files
from lastgood.records import GenerationId
from lastgood.run import access
from lastgood.run.writer import RunWriter
from lastgood.storage.directory import Disk
from lastgood.testing import Fault, FaultyFiles


def writer(root: Path, files: Files | None = None) -> RunWriter:
    run = RunWriter(Disk(files or PosixFiles(), str(root)), Inline(), keep=Keep(last=1))
    run.begin(None)
    return run


def saved(run: RunWriter, *steps: int) -> None:
    for step in steps:
        save(run, step, {"w": bytes([step]) * 20_000})


def verify(run: RunWriter) -> None:
    run.verify(Arena(3 * 8192, 8192))


def test_damage_is_raised_and_the_pointer_moves_to_the_verified_older_one(tmp_path):
    run = writer(tmp_path)
    saved(run, 1, 2, 3)
    newest = max(run.survey.generations)
    blob = tmp_path / layout.folder(newest) / layout.blob_name(0)
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    with pytest.raises(Damaged, match="step 3 was committed and does not read back"):
        verify(run)
    survey = commit.survey(run.tier)
    marks = {at.step: (one.verified, bool(one.damaged)) for at, one in survey.generations.items()}
    assert marks == {1: (False, False), 2: (True, False), 3: (False, True)}
    assert survey.pointer is not None and survey.pointer.step == 2


def test_damage_is_raised_even_if_its_mark_cannot_be_written(tmp_path, caplog):
    """The disk was full when a damaged generation was to be marked. Only NoSpace was raised, and every later attempt
    skipped the generation: its damage was never reported."""
    files = FaultyFiles(Fault("open new", f"*{layout.DAMAGED}*", errno.ENOSPC))
    run = writer(tmp_path, files)
    saved(run, 1, 2)
    blob = tmp_path / layout.folder(max(run.survey.generations)) / layout.blob_name(0)
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    with pytest.raises(Damaged, match="step 2 was committed and does not read back"):
        verify(run)
    assert caplog.text.count("could not be marked") == 1
    assert {at.step: one.good for at, one in run.survey.generations.items()} == {1: True, 2: False}
    assert run.survey.pointer is not None and run.survey.pointer.step == 1


def test_an_opening_writes_missing_incarnation_records(tmp_path):
    """A process died between its first COMMIT and the record of its incarnation. When that COMMIT was deleted, no
    record linked the newest step to earlier steps: they counted as abandoned, and the best of them was deleted."""
    keep = Keep(last=1, best=("loss", "min", 1))
    for step, loss in (1, 0.1), (2, 0.5), (3, 0.5), (4, 0.5):
        run = RunWriter(Disk(PosixFiles(), str(tmp_path)), Inline(), keep=keep)
        run.begin(max(run.survey.generations, default=None))
        save(run, step, {"w": bytes(20)}, metrics={"loss": loss})
        verify(run)
        if step == 2:
            (record,) = tmp_path.glob(f"incarnations/000002-{run.lineage()[0].id.incarnation}*")
            record.unlink()
        else:
            run.clean()
    assert [one.step for one in run.lineage()] == [4, 1]


def test_a_rewind_moves_the_pointer_once_it_is_durable(tmp_path):
    """restore(step=1), used to evaluate an old step, moved the pointer, and the next session resumed at step 1."""
    run = writer(tmp_path)
    for step in (1, 2):
        saved(run, step)
        verify(run)
    run.begin(min(run.survey.generations))
    run.marks.point()
    assert commit.survey(run.tier).pointer.step == 2
    saved(run, 3)
    run.marks.point()
    assert commit.survey(run.tier).pointer.step == 1, "step 3 is not verified yet"


def test_a_pointer_that_cannot_move_keeps_only_the_generation_it_names(tmp_path, caplog):
    """The pointer is a hint. A failure to move it once stopped all deletions, and the disk ran full."""
    run = writer(tmp_path, files := FaultyFiles())
    saved(run, 1)
    verify(run)
    saved(run, 2)
    files.inject(Fault("rename", f"*{layout.POINTER}"))
    verify(run)
    saved(run, 3)
    verify(run)
    run.clean()
    assert {at.step for at in commit.survey(run.tier).generations} == {1, 3}
    assert caplog.text.count("cannot be moved") == 1
    files.clear()
    run.clean()
    survey = commit.survey(run.tier)
    assert {at.step for at in survey.generations} == {3} and survey.pointer and survey.pointer.step == 3


def test_an_older_save_is_dropped_once_a_newer_one_is_committed(tmp_path):
    run = writer(tmp_path)
    with pytest.raises(Overtaken):
        save(run, 1, {"w": bytes(20_000)}, meanwhile=lambda: saved(run, 2))
    assert [one.name[:12] for one in (tmp_path / "gen").iterdir()] == ["000000000002"], (
        "no file of the deleted generation is left"
    )


def test_a_save_that_is_overtaken_first_leaves_no_file_of_another_rank(tmp_path, monkeypatch):
    """Rank 1 had written its part when the lane of rank 0 began: that stayed until the next opening, in memory too."""
    run = writer(tmp_path)
    require = run.known.require_newest

    def passed(at: GenerationId, pinned: bool) -> None:
        monkeypatch.undo()
        saved(run, 2)
        part = tmp_path / layout.folder(at) / layout.blob_name(1)
        part.parent.mkdir()
        part.write_bytes(bytes(20_000))
        require(at, pinned)

    monkeypatch.setattr(run.known, "require_newest", passed)
    with pytest.raises(Overtaken):
        save(run, 1, {"w": bytes(20_000)})
    assert [one.name[:12] for one in (tmp_path / "gen").iterdir()] == ["000000000002"]


def test_an_older_save_that_retention_keeps_is_committed_with_its_parent(tmp_path):
    run = writer(tmp_path)
    saved(run, 1)
    kept = save(run, 2, {"w": bytes(20_000)}, meanwhile=lambda: saved(run, 3), milestone=True)
    assert kept.commit.parent == min(run.survey.generations)
    assert {at.step for at in commit.survey(run.tier).generations} == {1, 2, 3}


@pytest.mark.parametrize("stored", ["directory", "slots"])
def test_a_found_commit_is_durable_before_its_incarnation_is_recorded(tmp_path, stored):
    """A killed process left a COMMIT that was visible and not durable. The next one recorded its incarnation, the
    power failed, and the COMMIT was lost. A restore then took the acknowledged steps of the older incarnation for
    abandoned ones. The crash model found it."""

    def opened(files: FaultyFiles) -> RunWriter:
        root = str(tmp_path)
        return RunWriter(Disk(files, root) if stored == "directory" else access.slots(files, root), Inline())

    for parent in (None, 1):
        run = opened(FaultyFiles())
        run.begin(next((at for at in run.survey.generations if at.step == parent), None))
        save(run, 1 if parent is None else 2, {"w": bytes(100)})
    (record,) = tmp_path.glob("incarnations/*-after-*")
    record.unlink()
    files = FaultyFiles()
    opened(files)
    assert record.exists()
    changes = [(call, path.removeprefix(f"{tmp_path}/")) for call, path in files.changes()]
    folder = layout.folder(run.known.newest_restorable().id)
    confirmed = ("sync_dir", folder) if stored == "directory" else ("rename", "slots/table")
    recorded = next(n for n, (_, path) in enumerate(changes) if path.startswith(f"incarnations/{record.name}"))
    assert any(change == confirmed for change in changes[:recorded])


class Late:
    """A tier on which the creation of a COMMIT arrives while the files of its generation are being removed."""

    def __init__(self, tier: Disk) -> None:
        self._tier = tier

    def __getattr__(self, name: str) -> object:
        return getattr(self._tier, name)

    def delete(self, name: str) -> None:
        self._tier.delete(name)
        if name.endswith(".safetensors"):
            self._tier.put_new(f"{name.rpartition('/')[0]}/{layout.COMMIT}", b"{}")


def test_a_commit_that_arrives_during_a_removal_is_removed_too(tmp_path):
    tier = Disk(PosixFiles(), str(tmp_path))
    run = RunWriter(tier, Inline())
    run.begin(None)
    at = save(run, 1, {"w": bytes(100)}).id
    tier.delete(f"{layout.folder(at)}/{layout.COMMIT}")
    commit.retire(Late(tier), at)
    assert not tier.list("gen")

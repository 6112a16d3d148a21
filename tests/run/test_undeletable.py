"""An undeletable file is reported once, skipped and tried again later; saves, restores and deletions continue."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lastgood
from harness import continued, flip, load, save
from lastgood import errors
from lastgood.cli import app
from lastgood.engine.arena import Arena
from lastgood.format import commit, layout
from lastgood.io.files import PosixFiles
from lastgood.policy import restore
from lastgood.policy.retention import Keep
from lastgood.run.retire import RETRY_CLEANINGS
from lastgood.run.writer import RunWriter
from lastgood.storage.directory import Disk
from lastgood.testing import Fault, FaultyFiles


def sticky(path: str, number: int = errno.EPERM) -> FaultyFiles:
    """A file system that refuses to remove paths that contain this text."""
    return FaultyFiles(Fault("remove", f"*{path}*", number))


class SilentlyRenamed(PosixFiles):
    """An NFS client on which a process has the tensor files open: a removed file remains under another name."""

    def remove(self, path: str) -> None:
        if path.endswith(".safetensors"):
            os.rename(path, os.path.join(os.path.dirname(path), ".nfs0000000000000001"))
        elif ".nfs" in path:
            raise OSError(errno.EBUSY, "Device or resource busy", path)
        else:
            super().remove(path)


def opened(root: Path, files: PosixFiles, keep: int = 1) -> RunWriter:
    return continued(Disk(files, str(root)), Keep(last=keep))


def saved(run: RunWriter, *steps: int, clean: bool = True) -> None:
    for step in steps:
        save(run, step, {"w": bytes([step]) * 20_000})
        run.verify(Arena(3 * 8192, 8192))
        if clean:
            run.clean()


def steps_in(root: Path) -> list[int]:
    return sorted(at.step for at in commit.survey(Disk(PosixFiles(), str(root))).generations)


@pytest.fixture
def run_of_three(tmp_path: Path) -> Path:
    saved(opened(tmp_path, PosixFiles(), keep=9), 1, 2, 3)
    return tmp_path


STUCK = [layout.COMMIT, layout.blob_name(0), layout.manifest_name(0), layout.VERIFIED]


@pytest.mark.parametrize("name", STUCK)
def test_an_undeletable_generation_stops_no_other_deletion(run_of_three, caplog, name):
    """Twelve generations were left with Keep(last=3): the oldest was immutable, and nothing was deleted any more."""
    files = sticky(f"{one_folder(run_of_three, 1)}/{name}")
    run = opened(run_of_three, files)
    saved(run, 4, 5, 6)
    assert steps_in(run_of_three) == ([1, 6] if name == layout.COMMIT else [6])
    assert caplog.text.count("could not be deleted") == 1, "the file is reported once per opening"
    files.clear()
    reopened = opened(run_of_three, PosixFiles())
    reopened.clean()
    assert [one.name[:12] for one in (run_of_three / "gen").iterdir()] == ["000000000006"]


def one_folder(root: Path, step: int) -> str:
    (path,) = root.glob(f"gen/{step:012d}-*")
    return path.name


def test_an_undeletable_file_keeps_no_other_file_of_its_generation(run_of_three):
    files = sticky(f"{one_folder(run_of_three, 1)}/{layout.manifest_name(0)}")
    run = opened(run_of_three, files)
    run.clean()
    assert {one.step for one in run.survey.generations} == {3}, "the generation no longer counts"
    names = {one.name for one in (run_of_three / "gen" / one_folder(run_of_three, 1)).iterdir()}
    assert names == {layout.manifest_name(0), layout.GOING}


def test_a_generation_that_is_half_deleted_is_neither_lost_nor_damaged(run_of_three):
    """Its COMMIT is deleted and a later commit names it: without GOING it would count as lost for ever."""
    opened(run_of_three, sticky(one_folder(run_of_three, 1) + "/" + layout.blob_name(0))).clean()
    survey = commit.survey(Disk(PosixFiles(), str(run_of_three)))
    assert {at.step for at in survey.going} == {1} and not survey.broken and not survey.incomplete
    assert restore.lineage(survey).lost == []
    opened(run_of_three, PosixFiles())
    assert len([*(run_of_three / "gen").iterdir()]) == 1


def test_a_file_that_an_nfs_client_keeps_open_still_counts_as_deleted(run_of_three):
    run = opened(run_of_three, SilentlyRenamed())
    run.clean()
    survey = commit.survey(run.tier)
    assert {at.step for at in survey.going} == {1, 2} and restore.lineage(survey).lost == []
    opened(run_of_three, SilentlyRenamed())  # the opening succeeds as well
    opened(run_of_three, PosixFiles())
    assert len([*(run_of_three / "gen").iterdir()]) == 1


@pytest.mark.parametrize("litter", ["incarnations/x.1-2.tmp", "latest_ok.tmp", "gen/{}/COMMIT.json.1-2.tmp"])
def test_litter_that_cannot_be_removed_does_not_stop_an_opening(run_of_three, litter, caplog):
    path = run_of_three / litter.format(one_folder(run_of_three, 3))
    path.write_bytes(b"half")
    run = opened(run_of_three, sticky(path.name))
    assert load(run.tier)[0].generation.step == 3
    assert path.name in caplog.text


def test_an_undeletable_stale_incarnation_does_not_stop_a_restore(run_of_three):
    opened(run_of_three, PosixFiles())
    opened(run_of_three, sticky("incarnations/000002"))
    assert load(Disk(PosixFiles(), str(run_of_three)))[0].generation.step == 3


def test_a_failed_deletion_is_retried_after_some_cleanups(run_of_three):
    files = sticky(one_folder(run_of_three, 1), errno.EIO)
    run = opened(run_of_three, files)
    run.clean()
    files.clear()
    for _ in range(RETRY_CLEANINGS - 1):
        run.clean()
    assert steps_in(run_of_three) == [1, 3]
    run.clean()
    assert [one.name[:12] for one in (run_of_three / "gen").iterdir()] == ["000000000003"]


def test_gc_deletes_the_others_and_names_the_undeletable_one(run_of_three, capsys):
    name = one_folder(run_of_three, 1)
    with sticky(f"{name}/{layout.blob_name(0)}").installed():
        for _ in range(2):  # the second time, its COMMIT is already deleted
            assert app.main(["gc", str(run_of_three), "--keep-last", "1"]) == 5
            assert "step 1" in capsys.readouterr().out
    assert steps_in(run_of_three) == [3]


def test_gc_does_not_count_an_undeleted_folder_as_deleted(run_of_three, capsys):
    """Each call printed "deleted 2 generations" although a foreign subfolder kept one folder from being deleted."""
    (run_of_three / "gen" / one_folder(run_of_three, 1) / "plots").mkdir()
    for wanted in (["--keep-last", "1"], []):
        assert app.main(["gc", str(run_of_three), *wanted]) == 5
        output = " ".join(capsys.readouterr().out.split())
        assert f"deleted {len(wanted) // 2} generation" in output and "could not be deleted" in output
        assert "its folder stays, with plots" in output and "crash" not in output
    assert app.main(["ls", str(run_of_three)]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "a deletion that did not end" in output and "crash" not in output


def test_an_unwritable_mark_does_not_stop_a_restore(tmp_path):
    """After it had loaded the state of a generation that root had saved, restore() raised NotWritable."""
    lastgood.save(tmp_path / "run", {"w": torch.ones(4)}, 3)
    (mark,) = (tmp_path / "run").glob(f"gen/*/{layout.VERIFIED}")
    mark.unlink()
    files = FaultyFiles(Fault("open new", f"*{layout.VERIFIED}*", errno.EACCES))
    state = {"w": torch.zeros(4)}
    with files.installed(), lastgood.Checkpointer(tmp_path / "run", state) as ckpt:
        assert ckpt.restore().step == 3
    assert state["w"].sum() == 4


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A run with steps 1, 2 and 3, all verified."""
    with lastgood.Checkpointer(tmp_path / "run", {"w": torch.ones(4)}, retention=Keep(last=9)) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step).result()
            ckpt.wait()
    return tmp_path / "run"


def unread(step: int, of: str = "", number: int = errno.EACCES) -> Fault:
    """The folder of a step cannot be listed, or a file in it not be opened."""
    return Fault("open read" if of else "list", f"*/gen/{step:012d}-*{of}", number)


OF_STEP_1 = [unread(1), unread(1, "", errno.EUCLEAN), unread(1, "", errno.EIO), unread(1, layout.COMMIT)]


@pytest.mark.parametrize("fault", [*OF_STEP_1, unread(1, layout.VERIFIED)], ids=str)
def test_an_old_generation_that_cannot_be_read_stops_nothing(trained, faulty_files, caplog, fault):
    """One folder of step 1 that belonged to another user, or lay on a damaged sector, kept the run from opening: no
    restore of step 3, no save and no listing. It is not deleted either: it may be good."""
    faulty_files.inject(fault)
    state = {"w": torch.zeros(4)}
    assert lastgood.load(trained, state).step == 3
    with lastgood.Checkpointer(trained, state, retention=Keep(last=1)) as ckpt:
        assert ckpt.restore().step == 3
        ckpt.save(4).result()
        ckpt.wait()
    assert lastgood.save(trained, state, step=5).step == 5
    assert "1 generation cannot be read (step 1 (" in caplog.text
    faulty_files.clear()
    assert steps_in(trained) == [1, 4, 5], "it was neither counted nor deleted"


def test_the_records_of_incarnations_need_not_be_readable(trained, faulty_files):
    """What a job of another user has written with umask 077 kept the run from opening: its file name says the same."""
    faulty_files.inject(Fault("open read", "*/incarnations/*", errno.EACCES))
    assert lastgood.load(trained, {"w": torch.zeros(4)}).step == 3


@pytest.mark.parametrize("fault", [unread(3), unread(3, layout.COMMIT, errno.EMFILE)], ids=str)
def test_no_restore_goes_back_past_what_cannot_be_read(trained, faulty_files, fault):
    """Step 3 may be good: to go on from step 2 would give it up."""
    state, error = {"w": torch.zeros(4)}, (errors.NotWritable, errors.TierDown)
    faulty_files.inject(fault)
    with pytest.raises(error):
        lastgood.load(trained, state)
    with pytest.raises(error):
        lastgood.open(trained).generation()
    with pytest.raises(error):
        lastgood.save(trained, state, step=9)
    assert lastgood.load(trained, state, step=2).step == 2
    with lastgood.Checkpointer(trained, state) as ckpt:
        with pytest.raises(error):
            ckpt.restore()
        faulty_files.clear()
        assert ckpt.restore().step == 3, "the run is listed again"


def test_a_rewind_past_what_cannot_be_read_is_durable_at_once(trained, faulty_files):
    state = {"w": torch.zeros(4)}
    faulty_files.inject(unread(3))
    with lastgood.Checkpointer(trained, state) as ckpt:
        ckpt.restore(step=2)
        ckpt.save(2).result()
    faulty_files.clear()
    with lastgood.Checkpointer(trained, state) as ckpt:
        assert ckpt.restore().step == 2


def test_behind_a_damaged_one_no_restore_passes_what_cannot_be_read(trained, faulty_files):
    flip(next(trained.glob("gen/000000000003-*/*.safetensors")))
    faulty_files.inject(unread(2))
    with pytest.raises(errors.NotWritable, match="000000000002-"):
        lastgood.load(trained, {"w": torch.zeros(4)})


def test_an_unlistable_folder_of_generations_ends_an_opening(trained, faulty_files):
    faulty_files.inject(Fault("list", "*/gen", errno.EIO))
    with pytest.raises(errors.TierDown):
        lastgood.Checkpointer(trained, {"w": torch.zeros(4)})


def test_commands_show_and_leave_what_cannot_be_read(trained, faulty_files, capsys):
    faulty_files.inject(unread(1))
    assert app.main(["ls", str(trained)]) == 0
    output = capsys.readouterr().out
    assert "unreadable" in output and "a restore takes step 3" in " ".join(output.split())
    assert app.main(["gc", str(trained), "--keep-last", "1", "--damaged"]) == 0
    assert app.main(["verify", str(trained)]) == 0
    faulty_files.clear()
    assert steps_in(trained) == [1, 3]


@pytest.fixture
def immutable(run_of_three: Path) -> Iterator[Path]:
    """A run in which no file of step 1 can be changed or removed, not even by root."""
    folder = run_of_three / "gen" / one_folder(run_of_three, 1)
    paths = [str(one) for one in folder.iterdir()]
    try:
        subprocess.run(["chattr", "+i", *paths, str(folder)], check=True, capture_output=True)
    except (subprocess.CalledProcessError, FileNotFoundError):
        pytest.skip("needs root, e2fsprogs, and a file system that knows `chattr +i`")
    try:
        yield folder
    finally:
        subprocess.run(["chattr", "-i", str(folder), *paths], check=True)


def test_an_immutable_generation_stays_complete_and_stops_nothing(immutable, run_of_three, caplog):
    run = opened(run_of_three, PosixFiles())
    saved(run, 4, 5)
    assert steps_in(run_of_three) == [1, 5]
    assert load(run.tier)[0].generation.step == 5 and caplog.text.count("could not be deleted") == 1

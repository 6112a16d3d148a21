"""A run whose folder is moved while it is open, and a run that several users of one group write in turn."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from harness import load, save
from lastgood.engine.arena import Arena
from lastgood.engine.inline_executor import Inline
from lastgood.errors import TierDown
from lastgood.run import access
from lastgood.run.writer import RunWriter

STATE = {"w": bytes(20_000)}


@pytest.mark.parametrize("name", ["", "gen"])
@pytest.mark.parametrize("deleted", [False, True], ids=["moved", "deleted"])
def test_a_moved_run_is_reported_and_saves_resume_once_it_is_back(tmp_path, name, deleted):
    """Until a restart, each save warned of a missing r00000.safetensors, without a statement of what is safe and
    what to do."""
    root = tmp_path / "run"
    with access.for_writing(root, "atomic_dirsync") as tier:
        run = RunWriter(tier, Inline())
        run.begin(None)
        save(run, 1, STATE)
        away = tmp_path / "away"
        (root / name).rename(away)
        if deleted:
            shutil.copytree(away, tmp_path / "copy", symlinks=True)
            shutil.rmtree(away)
        for step in (2, 3):
            with pytest.raises(TierDown, match="does not exist any more: the run was moved or deleted") as found:
                save(run, step, STATE)
            assert found.value.safe and "Move it back" in found.value.todo
            assert not (root / name).exists(), "a new folder would be another run"
        (tmp_path / "copy" if deleted else away).rename(root / name)
        save(run, 4, STATE)
        run.verify(Arena(3 * 8192, 8192))
        assert load(tier)[0].generation.step == 4


@pytest.mark.parametrize(("umask", "file_mode", "folder_mode"), [(0o002, 0o664, 0o775), (0o077, 0o600, 0o700)])
def test_files_and_folders_have_the_permissions_of_the_umask(tmp_path, umask, file_mode, folder_mode):
    """Files, `.lock` among them, had the mode 0644 in folders of 0775: with umask 002, another user of the group
    could not resume."""
    before = os.umask(umask)
    try:
        with access.for_writing(tmp_path / "run", "atomic_dirsync") as tier:
            run = RunWriter(tier, Inline())
            run.begin(None)
            save(run, 1, STATE)
            run.verify(Arena(3 * 8192, 8192))
        with access.for_writing(f"slots://{tmp_path}/slots", "atomic_dirsync") as tier:
            run = RunWriter(tier, Inline())
            run.begin(None)
            save(run, 1, STATE)
    finally:
        os.umask(before)
    modes = {one: stat.S_IMODE(one.lstat().st_mode) for one in tmp_path.rglob("*") if not one.is_symlink()}
    assert {mode for one, mode in modes.items() if one.is_file()} == {file_mode}
    assert {mode for one, mode in modes.items() if one.is_dir()} == {folder_mode}
    assert Path(tmp_path / "run" / access.LOCK) in modes

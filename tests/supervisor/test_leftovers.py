"""What a killed supervisor has left is removed by the next one, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

from lastgood.supervisor import leftovers


def test_folders_of_ended_processes_are_removed_and_those_in_use_stay(tmp_path: Path) -> None:
    """Each killed supervisor left a folder in /tmp and one in /dev/shm, for ever."""
    with leftovers.folder("job-", str(tmp_path), "") as used:
        left = tmp_path / "job-left"
        left.mkdir()
        (left / leftovers.LOCK).touch()
        (left / "0").mkdir()
        (tmp_path / "job-foreign").mkdir()
        (tmp_path / "other").mkdir()
        os.symlink(used, tmp_path / "job-link")
        with leftovers.folder("job-", str(tmp_path), ""):
            assert not left.exists()
            assert used.exists() and (tmp_path / "other").exists() and (tmp_path / "job-foreign").exists()
    assert not used.exists()

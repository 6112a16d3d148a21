"""What a killed supervisor has left is removed by the next one, and nothing else; what an attempt has left stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from commands import Call
from lastgood.supervisor import leftovers, supervise
from lastgood.supervisor.placement import OneNode


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


class LeftOnce(OneNode):
    """All nodes leave the first attempt without a verdict, as where each takes the others for lost."""

    excluded, lived = False, False

    def reports(self, mine: str) -> dict[int, str] | None:  # type: ignore[override]
        self.excluded = not self.lived
        self.lived = True
        return None if self.excluded else super().reports(mine)

    def join(self, job: str) -> None:
        self.excluded = False
        super().join(job)


def test_an_attempt_without_a_verdict_is_lived_anew(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt had the number of the first one, whose folder was there: the node ended with exit code 5."""
    monkeypatch.setattr(supervise, "OneNode", LeftOnce)
    code, _, report = call("run", "--no-python", "--health-seconds", "0", "--log-dir", tmp_path, "true")
    assert code == 0, report
    assert sorted(one.name for one in tmp_path.glob("*/attempt_*")) == ["attempt_0", "attempt_0.2"]

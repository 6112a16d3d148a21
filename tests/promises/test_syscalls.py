"""Failing system calls, full disks, short writes and killed processes: a selection determined by a seed.

The complete campaigns are syscalls.py and kills.py of lastgood_lab/campaigns.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from lastgood_lab.campaigns import full_disks, kills, syscalls, trials
from lastgood_lab.campaigns.victim import live
from lastgood_lab.campaigns.victim_ledger import Ledger, litter

pytestmark = pytest.mark.slow

SEED = 1
ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


@pytest.fixture(scope="module")
def strace() -> str:
    found = shutil.which("strace")
    if not found:
        pytest.skip("needs strace: apt-get install strace")
    if subprocess.run([found, "-o", os.devnull, "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("needs the right to trace a process (ptrace)")
    return found


def lived(run: Path, *options: str) -> tuple[int, list[str]]:
    lines: list[str] = []
    return live([str(run), *options], lines.append), lines


# ---- faults of single calls ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sweep(strace: str) -> Iterator[syscalls.Sweep]:
    with trials.in_memory() as at:
        yield syscalls.Sweep(at, boxes=1)


def test_every_kind_of_system_call_may_fail_or_be_the_last(sweep: syscalls.Sweep) -> None:
    faults = syscalls.spread(sweep.faults(), 18, SEED)
    assert {one.scenario for one in faults} == set(syscalls.SCENARIOS)
    assert {one.what for one in faults} == {"KILL", "EIO", "ENOSPC", "EDQUOT"}
    wrong = [one for one in map(sweep.trial, faults) if one.problems]
    assert wrong == []


def first_fault(
    sweep: syscalls.Sweep, scenario: str, call: str, path: str, failure: str, sticky: bool
) -> syscalls.Result:
    """Inject the fault into the first such call on a path with this ending."""
    wanted = (scenario, call, failure, sticky)
    found = [one for one in sweep.faults() if (one.scenario, one.call, one.what, one.sticky) == wanted]
    return sweep.trial(next(one for one in found if fnmatch(one.path, f"*{path}")))


def test_a_sweep_continues_with_the_trials_that_have_no_kept_result(tmp_path: Path, monkeypatch) -> None:
    fault = syscalls.Fault("fresh", "fsync", 3, "run/gen", "EIO", False)
    kept = syscalls.Kept(tmp_path / "kept")
    kept.append(syscalls.Result(fault, "TierDown", []))
    kept.append(syscalls.Result(fault._replace(n=4), "ignored", ["not reported"]))
    with open(tmp_path / "kept", "a") as file:
        file.write('\n["cut')
    other = fault._replace(n=5)
    kept.append(syscalls.Result(other, "killed", []))
    found = {one: result.outcome for one, result in kept.read().items()}
    assert found == {fault: "TierDown", other: "killed"}, "one with a problem is tried again"
    monkeypatch.setattr(syscalls.provenance, "digest", lambda rooms: "other code")
    assert syscalls.Kept(tmp_path / "kept").read() == {}


@pytest.mark.parametrize(
    ("first", "outcome"), [("run/lastgood.json", "Unreadable"), ("/COMMIT.json", "NothingGood+unread")]
)
def test_a_temporarily_unreadable_run_is_not_started_over(sweep: syscalls.Sweep, first: str, outcome: str) -> None:
    """Every read failed with EIO during one opening. No commit and no incarnation could be read, so the run looked
    as if nothing had ever been committed: it got a new name, which made every commit invalid, and training started
    over at step 0."""
    result = first_fault(sweep, "resume", "preadv2", first, "EIO", True)
    assert (result.outcome, result.problems) == (outcome, [])


def test_an_unreadable_directory_does_not_count_as_empty(sweep: syscalls.Sweep) -> None:
    """os.path.lexists and isdir return False when stat fails: the owner of the folder was not checked, and the
    search for the first existing parent folder never ended at the root."""
    result = first_fault(sweep, "fresh", "newfstatat", "run", "EIO", True)
    assert (result.outcome, result.problems) == ("TierDown", [])


def test_a_temporarily_unreadable_incarnation_keeps_its_number(sweep: syscalls.Sweep) -> None:
    """The newest incarnation's record could not be read once. The next incarnation took the same order, and from
    then on their names decided which of the two was the newest: generations acknowledged by the later one were out
    of the lineage."""
    result = first_fault(sweep, "recover", "preadv2", "1c9338eb-*.json", "EIO", False)
    assert (result.outcome, result.problems) == ("ignored", [])


def test_a_commit_whose_link_failed_is_not_reported_as_lost(sweep: syscalls.Sweep) -> None:
    """link(COMMIT) failed with EIO, which correctly raised CommitUnknown. But the next commit named that step as its
    parent, so every later opening kept its folder and reported the loss of a generation that had never been
    acknowledged."""
    result = first_fault(sweep, "fresh", "link", "/COMMIT.json", "EIO", False)
    assert (result.outcome, result.problems) == ("CommitUnknown", [])


# ---- full disks ------------------------------------------------------------------------------------------------


@pytest.fixture(params=["ext4", "tmpfs"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if not ROOT or not shutil.which("mkfs.ext4"):
        pytest.skip("needs root, to mount a small file system, and e2fsprogs")
    if subprocess.run(["unshare", "--mount", "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("needs the right to mount a small file system")
    with full_disks.small_disk(request.param, tmp_path) as mount:
        yield mount


@pytest.mark.root
@pytest.mark.parametrize(("saved", "full"), [(1, "NoSpace"), (2, "warned")])
def test_a_full_disk_fails_only_the_save(small_disk: Path, saved: int, full: str) -> None:
    """Beside one generation nothing may be deleted, so that the save fails. Of two the older one is deleted, and the
    save succeeds; it failed there while the pointer could not be moved away from that one."""
    frees = (0, 1024, 5000, 40_000, 120_000)
    results = {free: full_disks.full_disk(small_disk, free, saved=saved) for free in frees}
    assert {free: problems for free, (_, problems) in results.items() if problems} == {}
    assert results[0][0] == full and results[120_000][0] == ""


@pytest.mark.parametrize("limit_bytes", [1, 100, 700, 4096, 36_000])
def test_a_file_size_limit_fails_only_the_save(tmp_path: Path, limit_bytes: int) -> None:
    assert full_disks.short_writes(tmp_path, limit_bytes) == ("NoSpace", [])


@pytest.mark.parametrize("how", ["--short", "--buffered"])
def test_short_reads_and_writes_are_continued(tmp_path: Path, how: str) -> None:
    run, ledger = tmp_path / "run", Ledger()
    for seed in (1, 2, 3):
        code, lines = lived(run, f"--seed={seed}", "--short", how)
        ledger.read(lines)
        ledger.judge(str(run))
        assert (code, ledger.problems, litter(str(run))) == (0, [], [])
    assert len(ledger.verified) == 9


# ---- kills -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_killed_twelve_times_ends_like_an_undisturbed_one(tmp_path: Path) -> None:
    result = kills.series(tmp_path, SEED, 12, kills.pause(tmp_path))
    assert result.problems == []
    assert result.ends.total() - result.ends["done"] >= 8, "too few processes were killed before they ended"

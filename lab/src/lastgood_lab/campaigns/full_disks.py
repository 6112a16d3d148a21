"""Saves on full disks and with short writes: faults that strace cannot inject.

RLIMIT_FSIZE shortens the write that reaches the limit. A small ext4 image and a small tmpfs, mounted as root, run full.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from lastgood_lab.campaigns.trials import VICTIM, environment
from lastgood_lab.campaigns.victim import live
from lastgood_lab.campaigns.victim_ledger import Ledger, litter


@contextlib.contextmanager
def small_disk(kind: str, at: Path) -> Iterator[Path]:
    """A file system of a few MB (ext4 or tmpfs), mounted until the end. Root only."""
    mount, image = at / f"small-{kind}", at / f"{kind}.img"
    mount.mkdir()
    options = ["-t", "tmpfs", "-o", "size=2m", "tmpfs"]
    if kind == "ext4":
        image.write_bytes(b"")
        os.truncate(image, 4 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", image], check=True)
        options = ["-o", "loop", str(image)]
    subprocess.run(["mount", *options, mount], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", mount], check=True)
        mount.rmdir()
        image.unlink(missing_ok=True)


def full_disk(mount: Path, free_bytes: int, tier: str = "directory", saved: int = 2) -> tuple[str, list[str]]:
    """Save to a disk with `free_bytes` left; returns what was reported, and the violations. Empties the mount.

    `saved`: how many generations there are before the disk is full; of one alone, nothing may be deleted.
    """
    run, ledger = mount / "run", Ledger(tier=tier)
    problems = [f"it reported {one}" for one in _life(ledger, run, f"--saves={saved}", "--seed=1")[0]]
    filler = mount / "filler"
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1024)):
            pass
    space = os.statvfs(mount)
    os.truncate(filler, max(os.path.getsize(filler) + space.f_bavail * space.f_frsize - free_bytes, 0))
    errors, more = _life(ledger, run, "--saves=3", "--seed=2")
    problems += more + [f"left behind: {one}" for one in litter(str(run))]
    problems += [f"{one} on a full disk" for one in errors if one not in ("NoSpace", "CommitUnknown")]
    outcome = _outcome(errors, ledger)
    ledger.judge(str(run))
    filler.unlink()
    ledger.go_on(str(run), 1000)
    shutil.rmtree(run)
    return outcome, problems + ledger.problems


def short_writes(at: Path, limit_bytes: int, tier: str = "directory") -> tuple[str, list[str]]:
    """Save under a limit of file size: the write at the limit is shortened, the next one fails. As `full_disk`."""
    run, ledger = at / "run", Ledger(tier=tier)
    problems = [f"it reported {one}" for one in _life(ledger, run, "--saves=2", "--seed=1")[0]]
    errors, more = _life(ledger, run, "--saves=2", "--seed=2", f"--file-limit={limit_bytes}", own_process=True)
    problems += more + [f"left behind: {one}" for one in litter(str(run))]
    problems += [f"{one} at a limit of file size" for one in errors if one not in ("NoSpace", "CommitUnknown")]
    outcome = _outcome(errors, ledger)
    ledger.judge(str(run))
    ledger.go_on(str(run), 1000)
    shutil.rmtree(run)
    return outcome, problems + ledger.problems


def _outcome(errors: list[str], ledger: Ledger) -> str:
    """The names of the errors of a life, joined with "+"; `warned` if it has reported warnings only."""
    return "+".join(sorted(set(errors))) or ("warned" if ledger.warned else "")


def _life(ledger: Ledger, run: Path, *options: str, own_process: bool = False) -> tuple[list[str], list[str]]:
    """Run one life; returns the errors that it reported, and the violations in how it ended."""
    lines: list[str] = []
    if own_process:
        done = subprocess.run(
            [*VICTIM, run, f"--tier={ledger.tier}", *options],
            capture_output=True,
            text=True,
            env=environment(run.parent),
        )
        code, lines = done.returncode, done.stdout.splitlines()
    else:
        code = live([str(run), f"--tier={ledger.tier}", *options], lines.append)
    ledger.read(lines)
    wrong = [] if (code in (3, 4, 5) if ledger.reported else code == 0) else [f"it ended with {code}: {lines[-1:]}"]
    return list(ledger.reported), wrong


def full_disks(at: Path, step_bytes: int, tier: str = "directory") -> Iterator[tuple[str, str, list[str]]]:
    """Try free space and limits of file size in steps of `step_bytes`; yields (name, what was reported, violations)."""
    (at / "limits").mkdir()
    for limit in range(1, 48_000, step_bytes):
        yield (f"file limit {limit:,}", *short_writes(at / "limits", limit, tier))
    if os.geteuid() == 0:
        for kind in ("ext4", "tmpfs"):
            with small_disk(kind, at) as mount:
                for saved, free in product((1, 2), range(0, 72_000, step_bytes)):
                    yield (f"{kind} {free:,} B free beside {saved}", *full_disk(mount, free, tier, saved))

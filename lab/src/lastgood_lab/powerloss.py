"""`lastgood lab powerloss`: power loss in a model of a disk, and on real file systems in image files.

The crash model runs the real code on a disk in memory that guarantees to keep only synced data, and may reorder and
tear the rest. Each crash state is loaded and compared with what was promised, and in some a next process continues. The
states are counted by the call before which the crash happens (`crashmodel.py`; `campaigns/crash_model.py` judges a
million states).

Then, as root, a process saves on each real file system (those of ext4, xfs and btrfs whose mkfs is installed) and
reports which steps are durable. *Power loss*: the image is cloned atomically at a random time (FICLONE, on an xfs that
holds the images) and mounted again, which replays its journal; data that the page cache had not written is lost.
*Killed*: SIGKILL, unmount, mount again. *Disk full*: saves until no space is left, then a large file is deleted.
*Read-only*: the mount becomes read-only during a save. Each time a restore must load, bit for bit, the newest state
that was reported as durable, or a newer one.

These trials do not cover a drive that loses or reorders the writes in its own cache; the crash model does. They need
root, Linux, loop devices and mkfs; without these they are skipped, and a line of progress gives the reason.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from lastgood.engine.arena import Arena
from lastgood.engine.inline_executor import Inline
from lastgood.errors import LastgoodError, Refused
from lastgood.io.files import PosixFiles, takes_direct
from lastgood.policy.retention import Keep
from lastgood.run.writer import RunWriter
from lastgood.storage.directory import Disk, WriteMode

from . import trials
from .crash import content
from .journal import Journal
from .judge import Judge
from .ledger import Violation
from .plain import load, save
from .report import Progress, Report, Table
from .scenarios import SCENARIOS, play
from .trials import Row, share

KINDS = ("ext4", "xfs", "btrfs")
TROUBLES = ("power loss", "killed", "disk full", "read-only")
MODES: tuple[WriteMode, ...] = ("atomic_dirsync", "atomic_nodirsync", "unsafe")
IMAGE_MIB = {"ext4": 64, "xfs": 320, "btrfs": 160}
"""Sizes of the images, close to the smallest that each file system accepts, so that a disk is soon full."""
CHUNK_BYTES = 16 << 10
FICLONE = 0x40049409
LAST = 400
"""The number of steps after which the saving process ends by itself."""


@dataclass(frozen=True)
class Options(trials.Options):
    """`trials` is the number for each trouble, file system and write mode, which run one after the other.

    `jobs` is the number of processes of the crash model.
    """

    trials: int = 40
    plays: int = 3
    """how often each scenario of the crash model is played in each write mode"""


# ---- file systems --------------------------------------------------------------------------------------------


def _tool(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Refused(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}", safe="Nothing was kept.")


def make(kind: str, image: Path, mib: int) -> None:
    """Create an empty file system in a sparse file."""
    with image.open("wb") as file:
        file.truncate(mib << 20)
    force = {"ext4": ["-F", "-q", "-m", "0"], "xfs": ["-f", "-q"], "btrfs": ["-f", "-q"]}[kind]
    _tool(f"mkfs.{kind}", *force, str(image))


@contextlib.contextmanager
def mounted(image: Path, at: Path) -> Iterator[Path]:
    """Mount an image at a directory, and unmount it at the end of the context, after an error too."""
    at.mkdir(exist_ok=True)
    _tool("mount", "-o", "loop", str(image), str(at))
    try:
        yield at
    finally:
        _unmount(at)


def _unmount(at: Path) -> None:
    for _ in range(50):  # the files of a killed process are closed a moment later
        if subprocess.run(["umount", str(at)], capture_output=True).returncode == 0:
            return
        time.sleep(0.1)
    _tool("umount", "--lazy", str(at))


def clone(image: Path, to: Path) -> None:
    """Clone a file atomically: the copy has the content of one instant."""
    with image.open("rb") as source, to.open("wb") as target:
        fcntl.ioctl(target.fileno(), FICLONE, source.fileno())


def here() -> list[str]:
    """Return the file systems that can be created on this machine.

    Raises Refused without root, or without mkfs.xfs, which is needed for the file system that holds the images.
    """
    if os.geteuid() != 0 or shutil.which("mount") is None:
        raise Refused("mounting needs root", safe="Nothing was changed.", todo="Run it as root, on Linux.")
    if shutil.which("mkfs.xfs") is None:
        raise Refused("mkfs.xfs is not installed", safe="Nothing was changed.", todo="apt install xfsprogs")
    return [kind for kind in KINDS if shutil.which(f"mkfs.{kind}")]


# ---- the saving process --------------------------------------------------------------------------------------


def _open(root: Path, mode: WriteMode) -> RunWriter:
    root.mkdir(exist_ok=True)
    tier = Disk(PosixFiles(), str(root), mode=mode, direct=takes_direct(str(root)))
    return RunWriter(tier, Inline(), keep=Keep(last=2))


def live(root: Path, mode: WriteMode, seed: int, send: Callable[[str], object]) -> None:
    """Save one step after the other. Send a message when each is durable, or with the error that ended the loop."""
    run = _open(root, mode)
    newest = next(iter(run.lineage()), None)
    run.begin(newest.id if newest else None)
    for step in range((newest.step if newest else 0) + 1, LAST):
        try:
            save(run, step, content(step, seed), chunk_bytes=CHUNK_BYTES)
            send(f"durable {step}")
            run.verify(Arena(3 * CHUNK_BYTES, CHUNK_BYTES))
            run.clean()
        except LastgoodError as error:
            send(f"error {type(error).__name__}")
            return


class Life:
    """A forked process that runs `live`, and its messages."""

    def __init__(self, root: Path, mode: WriteMode, seed: int) -> None:
        receive, send = os.pipe()
        self.child = os.fork()
        if self.child == 0:
            with contextlib.suppress(BaseException):  # its disk may disappear; the parent examines the remaining files
                live(root, mode, seed, lambda line: os.write(send, f"{line}\n".encode()))
            os._exit(0)
        os.close(send)
        self._lines = os.fdopen(receive)
        self.messages: list[str] = []

    def until(self, steps: int) -> None:
        """Wait until step `steps` is durable, or the process has ended."""
        while self.durable < steps and (line := self._lines.readline()):
            self.messages.append(line.strip())

    @property
    def durable(self) -> int:
        """The newest step reported as durable in the messages read so far."""
        return max((int(line.split()[1]) for line in self.messages if line.startswith("durable")), default=0)

    def end(self) -> None:
        """Kill the process, and read its remaining messages."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child, signal.SIGKILL)
        os.waitpid(self.child, 0)
        self.messages += [line.strip() for line in self._lines]
        self._lines.close()


# ---- one trial -----------------------------------------------------------------------------------------------


def one(key: Row, images: Path) -> Row:
    """Run one trial on a new file system."""
    chance = random.Random(str(sorted(key.items())))
    seed, mode = chance.getrandbits(40), key["mode"]
    image, at = images / "disk.img", images / "at"
    make(key["fs"], image, IMAGE_MIB[key["fs"]])
    steps = chance.randint(2, 6)
    if key["trouble"] == "power loss":
        lost = images / "lost.img"
        with mounted(image, at):
            life = Life(at / "run", mode, seed)
            try:
                life.until(steps)
                time.sleep(chance.uniform(0.0, 0.01))
                clone(image, lost)
                owed = life.durable  # from messages read before the clone; later saves may or may not be in it
            finally:
                life.end()
        found = _found(lost, images / "again", mode, seed)
        lost.unlink()
    elif key["trouble"] == "killed":
        with mounted(image, at):
            life = Life(at / "run", mode, seed)
            try:
                life.until(steps)
                time.sleep(chance.uniform(0.0, 0.01))
            finally:
                life.end()
        owed, found = life.durable, _found(image, at, mode, seed)
    elif key["trouble"] == "disk full":
        owed, found = _fill(image, at, mode, seed, chance)
    else:
        owed, found = _turn_read_only(image, at, mode, seed, steps)
    return {"owed": owed, **found, "kept": found["right"] and found["restored"] >= owed}


def _found(image: Path, at: Path, mode: WriteMode, seed: int) -> Row:
    """Resume from an image: which step is found, whether it is equal bit for bit, and whether a next save succeeds."""
    with mounted(image, at):
        return _resumed(at / "run", mode, seed)


def _resumed(root: Path, mode: WriteMode, seed: int) -> Row:
    why = ""
    try:
        found, state = load(Disk(PosixFiles(), str(root)), workers=Inline())
        step = found.generation.step if found.generation else 0
        right = step == 0 or state == content(step, seed)
        run = _open(root, mode)
        run.begin(found.generation.id if found.generation else None)
        save(run, LAST + 1, content(LAST + 1, seed), chunk_bytes=CHUNK_BYTES)
        goes_on = True
    except LastgoodError as error:
        step, right, goes_on, why = -1, False, False, type(error).__name__
    return {"restored": step, "right": right, "goes_on": goes_on, "why": why}


def _fill(image: Path, at: Path, mode: WriteMode, seed: int, chance: random.Random) -> tuple[int, Row]:
    """Save on a disk that is almost full until a save fails, then free space, and resume."""
    with mounted(image, at):
        ballast = at / "ballast"
        stat = os.statvfs(at)
        room = stat.f_bavail * stat.f_frsize
        with ballast.open("wb") as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, max(0, room - chance.randint(50_000, 500_000)))
        life = Life(at / "run", mode, seed)
        life.until(LAST)
        life.end()
        reported = any(line == "error NoSpace" for line in life.messages)
        ballast.unlink()
        found = _resumed(at / "run", mode, seed)
        return life.durable, {**found, "why": found["why"] or ("" if reported else "no NoSpace was reported")}


def _turn_read_only(image: Path, at: Path, mode: WriteMode, seed: int, steps: int) -> tuple[int, Row]:
    """Remount the file system read-only during saves, as a kernel does after an error in it, and resume."""
    with mounted(image, at):
        life = Life(at / "run", mode, seed)
        life.until(steps)
        os.kill(life.child, signal.SIGSTOP)  # the remount fails while a file is open for writing
        turned = subprocess.run(["mount", "-o", "remount,ro", str(at)], capture_output=True).returncode == 0
        os.kill(life.child, signal.SIGCONT)
        if turned:
            life.until(LAST)
        life.end()
        _tool("mount", "-o", "remount,rw", str(at))
        return life.durable, _resumed(at / "run", mode, seed)


# ---- the crash model -----------------------------------------------------------------------------------------


def play_one(key: Row) -> Row:
    """Play one scenario in the model; returns the number of judged states by the call before the crash."""
    scenario = next(one for one in SCENARIOS if one.name == key["scenario"])
    # The weaker modes may leave a run that cannot be continued, so that no next process is played in them.
    carry_on = Judge.carry_on if key["mode"] == "atomic_dirsync" else 0.0
    judge = Judge(random.Random(str(sorted(key.items()))), carry_on=carry_on)
    violation = ""
    try:
        play(scenario, judge, key["mode"])
    except Violation as error:
        violation = str(error)
    return {"states": dict(judge.by_step), "lost": judge.lost, "violation": violation}


def _model(options: Options, progress: Progress) -> list[Row]:
    """Play the crash model; returns a row for each scenario, write mode and step."""
    keys = [
        {"scenario": one.name, "mode": mode, "play": number, "seed": options.seed}
        for number in range(options.plays)
        for one in SCENARIOS
        for mode in MODES
        if not one.only_durable or mode == "atomic_dirsync"
    ]
    progress("the crash model")
    played = trials.run(keys, play_one, Journal(options.out / "model.jsonl"), options.jobs, progress)
    found: dict[tuple[str, str, str], Counter[str]] = {}
    for row in played:
        for step, states in row["states"].items():
            found.setdefault((row["scenario"], row["mode"], step), Counter()).update(states=states)
        if row["violation"]:
            found.setdefault((row["scenario"], row["mode"], row["violation"]), Counter()).update(violations=1)
        if row["lost"]:
            found.setdefault((row["scenario"], row["mode"], "anywhere"), Counter()).update(lost=row["lost"])
    return [
        {"scenario": scenario, "mode": mode, "step": step}
        | {name: counts[name] for name in ("states", "violations", "lost")}
        for (scenario, mode, step), counts in found.items()
    ]


# ---- all trials ----------------------------------------------------------------------------------------------


def run(options: Options, progress: Progress) -> list[Row]:
    rows = _model(options, progress)
    try:
        kinds = here()
    except Refused as error:
        progress(f"real file systems are left out: {error}")
        return rows
    return rows + _on_disks(kinds, options, progress)


def _on_disks(kinds: Sequence[str], options: Options, progress: Progress) -> list[Row]:
    journal = Journal(options.out / "trials.jsonl")
    keys = [
        {"fs": kind, "mode": mode, "trouble": trouble, "trial": trial, "seed": options.seed}
        for kind in kinds
        for trouble in TROUBLES
        for mode in MODES
        for trial in range(options.trials)
    ]
    for kind in KINDS:
        if kind not in kinds:
            progress(f"{kind} is left out: mkfs.{kind} is not installed")
    left = [key for key in keys if journal.get(**key) is None]
    with tempfile.TemporaryDirectory(prefix="lastgood-powerloss-", dir=options.out) as folder:
        holder = Path(folder) / "holder.img"
        make("xfs", holder, 1024)
        with mounted(holder, Path(folder) / "images") as images:
            for done, key in enumerate(left, 1):
                journal.put(one(key, images), **key)
                if done % 20 == 0 or done == len(left):
                    progress(f"{len(keys) - len(left) + done:,} of {len(keys):,} trials")
    return [{**key, **(journal.get(**key) or {})} for key in keys]


def _steps(rows: Sequence[Row]) -> list[list[str]]:
    """The table rows of the default write mode: step, states, violations."""
    states, violations = Counter[str](), Counter[str]()
    for row in rows:
        if row["mode"] == "atomic_dirsync" and "scenario" in row:
            states[row["step"]] += row["states"]
            violations[row["step"]] += row["violations"]
    lines = [[step, f"{count:,}", str(violations[step])] for step, count in states.most_common()]
    return [*lines, ["all", f"{states.total():,}", str(violations.total())]]


def report(rows: Sequence[Row], options: Options) -> Report:
    weaker = Counter[str]()
    for row in rows:
        if "scenario" in row and row["mode"] != "atomic_dirsync":
            weaker.update(states=row["states"], lost=row["lost"], violations=row["violations"])
    model, rows = rows, [row for row in rows if "fs" in row]
    lines = []
    for trouble in TROUBLES:
        for kind in dict.fromkeys(row["fs"] for row in rows):
            for mode in MODES:
                mine = [row for row in rows if (row["trouble"], row["fs"], row["mode"]) == (trouble, kind, mode)]
                reasons = sorted({row["why"] for row in mine if row["why"]})
                lines.append(
                    [
                        trouble,
                        kind,
                        mode,
                        share(mine, itemgetter("kept")).as_text(),
                        str(sum(row["restored"] > 0 and not row["right"] for row in mine)),
                        f"{sum(row['goes_on'] for row in mine)} of {len(mine)}",
                        ", ".join(reasons),
                    ]
                )
    head = [
        "trouble",
        "file system",
        "mode",
        "durable state found (Wilson 95 %)",
        "wrong loads",
        "saves again",
        "why not",
    ]
    return Report(
        name="powerloss",
        title="Restores after power loss",
        about="The model runs the real code on a disk that guarantees to keep only synced data. Each trial on a real "
        "file system uses a new one in an image. Durable means reported as durable before the fault.",
        tables=[
            Table("The crash model, by the call before the crash", ["call", "states", "violations"], _steps(model)),
            *([Table("Real file systems", head, lines)] if lines else []),
        ],
        rows=model,
        notes=[
            f"The weaker write modes in the model: {weaker['states']:,} states, in {weaker['lost']:,} of which an "
            f"acknowledged save is lost, and {weaker['violations']} in which a state loads that was not saved.",
            "The weaker write modes promise no durability: their rows show the effect of missing syncs on this kernel.",
            "Power loss: the image is cloned atomically. Data that the page cache had not written is lost, but data "
            "that the drive had received is not. Only the model loses and reorders that too.",
        ],
    )


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The content of summary.json."""
    model, rows = [row for row in rows if "scenario" in row], [row for row in rows if "fs" in row]
    mine = [row for row in rows if row["mode"] == "atomic_dirsync"]
    return {
        "model_states": sum(row["states"] for row in model),
        "model_violations": sum(row["violations"] for row in model),
        "trials": len(rows),
        "kept": {
            trouble: share([row for row in mine if row["trouble"] == trouble], itemgetter("kept")).record()
            for trouble in TROUBLES
        },
        "wrong_loads": share(rows, lambda row: row["restored"] > 0 and not row["right"]).record(),
    }

"""`lastgood lab crash`: kills a process at every step of the commit protocol, in all three write modes.

The experiment repeats one of a study of crash-consistent checkpointing on macOS (APFS), called "the study" below, which
killed only its unsafe write mode. Two things are examined after each kill. The *group*, which consists of the files of
one save, is complete, absent or torn; this is the study's question. The *run* is usable if a restore loads, bit for
bit, the newest state whose save was acknowledged, or the state that was being written. A kill is a mild crash, because
the page cache keeps everything that was written. One further arm writes as the study's unsafe mode did: in place and
under the final names, always into the same group.

In each trial, a forked process opens a run with one verified generation, saves the next one, and kills itself with
SIGKILL just before one call to the file system or in the middle of a write.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lastgood.engine.arena import Arena
from lastgood.engine.inline_executor import Inline
from lastgood.errors import LastgoodError
from lastgood.format import layout
from lastgood.io.files import PosixFiles
from lastgood.limits import PAGE_BYTES
from lastgood.policy.retention import Keep
from lastgood.ports import File
from lastgood.run.writer import RunWriter
from lastgood.storage.directory import Disk, WriteMode

from . import trials
from .journal import Journal
from .noting import NotingFiles
from .plain import State, load, save
from .report import Progress, Report, Table
from .trials import Options, Row, error_bars, share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODES: tuple[WriteMode, ...] = ("atomic_dirsync", "atomic_nodirsync", "unsafe")
IN_PLACE = "in place, as the study"
CHUNK_BYTES = 16 << 10
MODEL_BYTES, OPTIMIZER_BYTES, RNG_BYTES = 64 << 10, 128 << 10, 5 << 10
"""About 192 KB in all, as the study's group."""
MAIN = ("after_model", "before_manifest", "manifest_partial", "before_commit")
"""The four points at which the study killed its processes."""
MANIFEST, DATA = layout.manifest_name(0), layout.blob_name(0)


# ---- the calls of a save -------------------------------------------------------------------------------------


class KillingFiles(NotingFiles):
    """Kills its own process before call number `at` of those that change something, or after half of that write."""

    def __init__(self, root: Path, at: int = -1, half: bool = False) -> None:
        self.calls: list[str] = []
        self._root, self._at, self._half = str(root), at, half

    def note(self, call: str, path: str) -> None:
        self.calls.append(f"{call} {_short_path(path.removeprefix(self._root))}")
        if len(self.calls) - 1 == self._at and not self._half:
            die()

    def write(self, file: File, path: str, mv: memoryview, offset: int) -> int:
        half = self._half and len(self.calls) == self._at
        taken = super().write(file, path, mv[: len(mv) // 2] if half else mv, offset)
        if half:
            die()
        return taken


def _short_path(path: str) -> str:
    """Replace the names in a path that differ between trials."""
    name = re.sub(r"\.json\.[0-9]+-[0-9]+\.tmp$", ".json.tmp", os.path.basename(path))
    if not path:
        return "the run"
    if path.startswith("/incarnations/"):
        return "the incarnation" + (".tmp" if name.endswith(".tmp") else "")
    return "the folder" if layout.parse_folder(name) else name


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


# ---- the saved state -----------------------------------------------------------------------------------------


def content(step: int, seed: int) -> State:
    """The tensors of the group. The prefixes of their names place the model first in the file."""

    def some(name: str, size: int) -> bytes:
        return hashlib.shake_256(f"{step} {seed} {name}".encode()).digest(size)

    return {
        "a_model": some("model", MODEL_BYTES),
        "b_optimizer": some("optimizer", OPTIMIZER_BYTES),
        "c_rng": some("rng", RNG_BYTES),
    }


def _opened(root: Path, mode: WriteMode, files: PosixFiles) -> RunWriter:
    return RunWriter(Disk(files, str(root), mode=mode), Inline(), keep=Keep(last=1))


def _upkeep(run: RunWriter) -> None:
    run.verify(Arena(3 * CHUNK_BYTES, CHUNK_BYTES))
    run.clean()


def _begin_run(root: Path, mode: WriteMode, seed: int) -> None:
    run = _opened(root, mode, PosixFiles())
    save(run, 10, content(10, seed), chunk_bytes=CHUNK_BYTES)
    _upkeep(run)


def _go_on(
    root: Path, mode: WriteMode, seed: int, files: PosixFiles, acknowledged: Callable[[], object] = lambda: None
) -> None:
    """Do the work of the process that is killed: open, continue, save, verify, point and delete."""
    run = _opened(root, mode, files)
    newest = run.lineage()[0]
    run.begin(newest.id)
    save(run, 20, content(20, seed), chunk_bytes=CHUNK_BYTES)
    acknowledged()
    _upkeep(run)


def calls_of(mode: WriteMode) -> list[str]:
    """Return the names of all calls with which the process that is killed would change something, in order."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _begin_run(root, mode, 0)
        files = KillingFiles(root)
        _go_on(root, mode, 0, files)
        return files.calls


def points(mode: WriteMode) -> list[tuple[str, int, bool]]:
    """(name, number of the call, whether after half of it) of each kill: the study's four, then before every call."""
    calls = calls_of(mode)
    writes = [at for at, call in enumerate(calls) if call == f"write {DATA}"]
    manifest = [at for at, call in enumerate(calls) if MANIFEST in call]
    page_of_model = (PAGE_BYTES + MODEL_BYTES) // CHUNK_BYTES
    partly = next(at for at in manifest if calls[at].startswith("write"))
    commit = next(at for at, call in enumerate(calls) if layout.COMMIT in call and at > partly)
    main = [
        ("after_model", writes[page_of_model], False),
        ("before_manifest", manifest[0], False),
        ("manifest_partial", partly, True),
        ("before_commit", commit, False),
    ]
    return main + [(f"{at:02d} {call}", at, False) for at, call in enumerate(calls)]


# ---- the arm of the study ------------------------------------------------------------------------------------

_PARTS = {"model": "a_model", "optimizer": "b_optimizer", "rng": "c_rng"}


def _write_in_place(folder: Path, step: int, seed: int, stop: str) -> None:
    """Write every file under its final name without any fsync; the process is killed at the point `stop`, if any."""
    state, sums = content(step, seed), {}
    for name, part in _PARTS.items():
        (folder / f"{name}.bin").write_bytes(state[part])
        sums[name] = hashlib.sha256(state[part]).hexdigest()
        if stop == "after_model" and name == "model":
            die()
    text = json.dumps({"step": step, "sums": sums})
    if stop == "before_manifest":
        die()
    with (folder / "MANIFEST.json").open("w") as file:
        file.write(text[: len(text) // 2])
        file.flush()
        if stop == "manifest_partial":
            die()
        file.write(text[len(text) // 2 :])
    if stop == "before_commit":
        die()
    (folder / "COMMIT.json").write_text(json.dumps({"manifest": hashlib.sha256(text.encode()).hexdigest()}))


def _read_in_place(folder: Path, seed: int) -> tuple[str, str]:
    """Return the state of the group (complete, absent or torn), and the reason if it is torn."""
    try:
        text = (folder / "MANIFEST.json").read_bytes()
        manifest = json.loads(text)
        commit = json.loads((folder / "COMMIT.json").read_text())
    except (OSError, ValueError) as error:
        return "torn", type(error).__name__
    if commit["manifest"] != hashlib.sha256(text).hexdigest():
        return "torn", "commit and manifest disagree"
    for name in _PARTS:
        if hashlib.sha256((folder / f"{name}.bin").read_bytes()).hexdigest() != manifest["sums"][name]:
            return "torn", f"{name} and manifest disagree"
    return ("complete", "") if manifest["step"] == 20 else ("absent", "")


# ---- one trial -----------------------------------------------------------------------------------------------


def one(key: Row) -> Row:
    """Run one trial: kill a process, and examine the run that it left behind."""
    mode, seed = key["mode"], random.Random(str(sorted(key.items()))).getrandbits(40)
    with tempfile.TemporaryDirectory(prefix="lastgood-crash-", dir=trials.memory()) as folder:
        root = Path(folder)
        if mode == IN_PLACE:
            _write_in_place(root, 10, seed, "")
            status, _ = in_a_fork(lambda _: _write_in_place(root, 20, seed, key["point"]))
            group, why = _read_in_place(root, seed)
            outcome = {"killed": status, "acknowledged": False, "group": group, "usable": group != "torn"}
            return {**outcome, "restored": 0, "why": why}
        _begin_run(root, mode, seed)
        files = KillingFiles(root, key["call"], key["half"])
        status, message = in_a_fork(lambda send: _go_on(root, mode, seed, files, lambda: send("durable")))
        return {"killed": status, **_left(root, mode, seed, bool(message))}


def in_a_fork(life: Callable[[Callable[[str], object]], object]) -> tuple[bool, str]:
    """Run `life` in a forked process; returns whether it was killed, and its message.

    Raises RuntimeError if the process ends with any other error.
    """
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            life(lambda text: os.write(send, text.encode()))
            status = 0
        except Exception:  # noqa: BLE001 - printed, and raised by the parent
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(send)
    with os.fdopen(receive) as pipe:
        message = pipe.read()
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ended not in (0, -signal.SIGKILL):
        raise RuntimeError(f"a fork ended with status {ended}, after it sent {message!r}")
    return ended < 0, message


def _left(root: Path, mode: WriteMode, seed: int, acknowledged: bool) -> Row:
    tier = Disk(PosixFiles(), str(root), mode=mode)
    group, why = "absent", ""
    for folder in root.glob("gen/000000000020-*"):
        if (folder / layout.COMMIT).exists():
            try:
                _, state = load(tier, 20, Inline())
                group = "complete" if state == content(20, seed) else "torn"
            except LastgoodError as error:
                group, why = "torn", type(error).__name__
    try:
        found, state = load(tier, workers=Inline())
        step = found.generation.step if found.generation else 0
        right = step in (10, 20) and state == content(step, seed)
        usable = right and (step == 20 or not (acknowledged or group == "complete"))
    except LastgoodError as error:
        step, usable, why = -1, False, type(error).__name__
    return {"acknowledged": acknowledged, "group": group, "usable": usable, "restored": step, "why": why}


# ---- all trials ----------------------------------------------------------------------------------------------

REST = 10
"""The divisor of the number of trials at each point that is not one of the study's."""


def run(options: Options, progress: Progress) -> list[Row]:
    keys = [
        {"mode": mode, "point": name, "call": call, "half": half, "trial": trial, "seed": options.seed}
        for mode in MODES
        for name, call, half in points(mode)
        for trial in range(options.trials if name in MAIN else max(1, options.trials // REST))
    ]
    keys += [
        {"mode": IN_PLACE, "point": name, "call": -1, "half": False, "trial": trial, "seed": options.seed}
        for name in MAIN
        for trial in range(options.trials)
    ]
    return trials.run(keys, one, Journal(options.out / "trials.jsonl"), options.jobs, progress)


def report(rows: Sequence[Row], options: Options) -> Report:
    arms = [*MODES, IN_PLACE]
    lines: list[list[str]] = []
    every: list[list[str]] = []
    for mode in arms:
        mine = [row for row in rows if row["mode"] == mode]
        for point in dict.fromkeys(row["point"] for row in mine):
            here = [row for row in mine if row["point"] == point]
            line = [mode, point, str(len(here)), *(str(sum(row["group"] == one for row in here)) for one in GROUPS)]
            line += [share(here, itemgetter("usable")).as_text(), _why(here)]
            (lines if point in MAIN else every).append(line)
    head = ["mode", "killed", "trials", *GROUPS, "run usable (Wilson 95 %)", "reasons"]
    totals = [
        [mode, share([row for row in rows if row["mode"] == mode], itemgetter("usable")).as_text()] for mode in arms
    ]
    return Report(
        name="crash",
        title="Kills at every step of the commit protocol",
        about="A process with a run of one verified generation saves the next and is killed. The group being written "
        "is complete, absent or torn. The run is usable if a restore loads, bit for bit, that group or the previous "
        "one; the previous one only if the save had not been acknowledged.",
        tables=[
            Table("The study's four points", head, lines),
            Table("All points together", ["mode", "run usable (Wilson 95 %)"], totals),
            Table("Before every other call", head, every),
        ],
        rows=rows,
        notes=[
            f"Killed as planned: {share(rows, itemgetter('killed')).as_text()}.",
            "A kill does not empty the page cache, so that missing fsyncs have no effect here: only the arm that "
            "writes in place differs.",
            "Intervals are Wilson's; the study's are Clopper-Pearson.",
        ],
        figures={"usable": lambda: _figure(rows)},
    )


GROUPS = ("complete", "absent", "torn")


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The content of summary.json."""
    arms = {mode: [row for row in rows if row["mode"] == mode] for mode in (*MODES, IN_PLACE)}
    return {
        "trials": len(rows),
        "usable": {mode: share(mine, itemgetter("usable")).record() for mode, mine in arms.items()},
        "torn": {mode: share(mine, lambda row: row["group"] == "torn").record() for mode, mine in arms.items()},
        "main_points": {
            f"{mode}, {point}": share([row for row in mine if row["point"] == point], itemgetter("usable")).record()
            for mode, mine in arms.items()
            for point in MAIN
        },
    }


def _why(rows: Sequence[Row]) -> str:
    reasons = [row["why"] for row in rows if row["why"]]
    return ", ".join(f"{reasons.count(one)} {one}" for one in sorted(set(reasons)))


def _figure(rows: Sequence[Row]) -> Figure:
    """Draw the share of usable runs by mode and point, as in the study's figures 3 and 4."""
    from .figures import panels

    figure, (axes,) = panels(1, columns=1, wide=7.0, high=3.4)
    arms, wide = [*MODES, IN_PLACE], 0.2
    for at, mode in enumerate(arms):
        shares = [
            share([row for row in rows if (row["mode"], row["point"]) == (mode, point)], itemgetter("usable"))
            for point in MAIN
        ]
        heights = [one.value for one in shares]
        places = [place + at * wide for place in range(len(MAIN))]
        axes.bar(places, heights, wide, yerr=error_bars(shares), label=mode, error_kw={"linewidth": 0.6})
    axes.set_xticks([place + 1.5 * wide for place in range(len(MAIN))], MAIN)
    axes.set_ylabel("share of runs usable after the kill")
    axes.set_ylim(0, 1.05)
    axes.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure

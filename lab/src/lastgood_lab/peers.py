"""`lastgood lab peers`: the same damage, kills and failing writes for lastgood, torch.save and DCP.

The state is the group of `corrupt`. Each contender, used as is common, makes two saves of it. Then the newest save is
damaged; or the process is killed at a random time during the next save; or the files of the next save may not grow
beyond a random length, so that a write fails. The outcome is what a resume finds: the newest state, an older one, an
error, or wrong values without an error.
"""

from __future__ import annotations

import io
import os
import random
import resource
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from lastgood.loop.checkpointer import Checkpointer
from lastgood.policy.retention import Keep

from . import trials
from .corrupt import KINDS, advance, group, tensors_of
from .crash import in_a_fork
from .journal import Journal
from .report import Progress, Report, Table
from .trials import Options, Row, share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS = (10, 20, 30)
"""The steps of the saves, of which the last is killed or fails."""
DAMAGE = ("bitflip", "zerorange", "truncate", "garbage page", "swapped blocks", "lost file")
OUTCOMES = ("right", "older", "error", "wrong")
"""Outcomes of a resume: the newest state, an older one as it was saved, an error, or values that were never saved."""


# ---- contenders ----------------------------------------------------------------------------------------------


class Contender(NamedTuple):
    """A checkpointing package: `save` uses it as is common, `load` as a resume does. Both raise its own errors."""

    save: Callable[[Path, int, dict[str, Any]], None]
    load: Callable[[Path, dict[str, Any]], None]
    largest: Callable[[Path], Path]
    """the file of the newest save that holds its tensors"""


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    return {"model": state["model"].state_dict(), "optimizer": state["optimizer"].state_dict()}


def _put(state: dict[str, Any], found: dict[str, Any]) -> None:
    state["model"].load_state_dict(found["model"])
    state["optimizer"].load_state_dict(found["optimizer"])


def _torch_save(folder: Path, step: int, state: dict[str, Any]) -> None:
    staged = folder / "saving.tmp"
    torch.save(_plain(state), staged)
    staged.rename(folder / f"{step:06d}.pt")


def _torch_load(folder: Path, state: dict[str, Any]) -> None:
    _put(state, torch.load(max(folder.glob("*.pt")), weights_only=True))


def _dcp_save(folder: Path, step: int, state: dict[str, Any]) -> None:
    dcp.save(_plain(state), storage_writer=dcp.FileSystemWriter(str(folder / f"{step:06d}")), no_dist=True)


def _dcp_load(folder: Path, state: dict[str, Any]) -> None:
    found = _plain(state)
    dcp.load(found, storage_reader=dcp.FileSystemReader(str(max(folder.iterdir()))), no_dist=True)
    _put(state, found)


def _lastgood_save(folder: Path, step: int, state: dict[str, Any]) -> None:
    with Checkpointer(folder, state, retention=Keep(last=9), on_error="raise") as ckpt:
        if step > STEPS[0]:
            held = [one.detach().clone() for one in tensors_of(state)]
            ckpt.restore()
            with torch.no_grad():
                for one, value in zip(tensors_of(state), held, strict=True):
                    one.copy_(value)
        ckpt.save(step).result()


def _lastgood_load(folder: Path, state: dict[str, Any]) -> None:
    with Checkpointer(folder, state, retention=Keep(last=9)) as ckpt:
        ckpt.restore()


def _of_folder(folder: Path) -> Path:
    newest = max(path for path in folder.iterdir() if path.is_dir())
    return max(newest.rglob("*.distcp"), key=lambda path: path.stat().st_size)


CONTENDERS = {
    "lastgood": Contender(
        _lastgood_save, _lastgood_load, lambda folder: max((folder / "gen").iterdir()) / "r00000.safetensors"
    ),
    "torch.save + rename": Contender(_torch_save, _torch_load, lambda folder: max(folder.glob("*.pt"))),
    "DCP": Contender(_dcp_save, _dcp_load, _of_folder),
}


# ---- one trial -----------------------------------------------------------------------------------------------


def one(key: Row) -> Row:
    """Run one trial: two saves in processes that end, then the trouble, and a resume in another process."""
    contender, chance = CONTENDERS[key["contender"]], random.Random(str(sorted(key.items())))
    seed = chance.getrandbits(30)
    with tempfile.TemporaryDirectory(prefix="lastgood-peers-", dir=trials.memory()) as working:
        folder = Path(working)
        for step in STEPS[:2]:
            _save(contender, folder, step, made(seed, step))
        answer = ""
        if key["trouble"] in DAMAGE:
            path = contender.largest(folder)
            _damage(path, key["trouble"], chance)
        elif key["trouble"] == "killed":
            answer = _kill(contender, folder, seed, chance)
        else:
            answer = _fail(contender, folder, seed, chance)
        found_by_resume = in_a_fork(lambda send: send(_resumed(contender, folder, seed)))[1]
    if not found_by_resume.isdecimal():
        return {"outcome": "error", "found": -1, "told": found_by_resume, "acknowledged": answer == "returned"}
    found = int(found_by_resume)
    newest = STEPS[2] if answer == "returned" else STEPS[1]
    outcome = "wrong" if not found else "right" if found >= newest else "older"
    return {"outcome": outcome, "found": found, "told": answer, "acknowledged": answer == "returned"}


def _resumed(contender: Contender, folder: Path, seed: int) -> str:
    """Resume; returns the step whose state was found ("0": none of them), or the name of the error."""
    state = made(seed, 0)
    try:
        with _silence():
            contender.load(folder, state)
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - reported by name
        return type(error).__name__
    return str(next((step for step in STEPS[::-1] if _same(state, made(seed, step))), 0))


def made(seed: int, step: int) -> dict[str, Any]:
    """The state of `step`: one update for every ten steps."""
    state = group(seed)
    for _ in range(step // 10):
        advance(state)
    return state


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(map(torch.equal, tensors_of(one), tensors_of(other)))


def _damage(path: Path, kind: str, chance: random.Random) -> None:
    if kind == "lost file":
        path.unlink()
        return
    staged = path.parent / "r00000.safetensors"
    path.rename(staged)
    KINDS[kind](path.parent, chance)
    staged.rename(path)


def _kill(contender: Contender, folder: Path, seed: int, chance: random.Random) -> str:
    """Kill a process during a save. Returns "returned" if the save had returned before, else an empty text."""
    state = made(seed, STEPS[2])
    after = chance.uniform(0.0, 0.03)

    def life(send: Callable[[str], object]) -> None:
        timer = threading.Timer(after, lambda: os.kill(os.getpid(), signal.SIGKILL))
        timer.start()
        with _silence():
            contender.save(folder, STEPS[2], state)
        send("returned")
        timer.join()

    return in_a_fork(life)[1]


def _fail(contender: Contender, folder: Path, seed: int, chance: random.Random) -> str:
    """Make a write of a save fail. Returns the name of the save's error, or "returned"."""
    state = made(seed, STEPS[2])
    limit = chance.randrange(1, contender.largest(folder).stat().st_size)

    def life(send: Callable[[str], object]) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))  # Python ignores SIGXFSZ
        try:
            with _silence():
                contender.save(folder, STEPS[2], state)
        except BaseException as error:  # noqa: BLE001 - reported by name
            send(type(error).__name__)
        else:
            send("returned")

    return in_a_fork(life)[1]


def _save(contender: Contender, folder: Path, step: int, state: dict[str, Any]) -> None:
    """Make a save without trouble, in a process that ends."""

    def life(send: Callable[[str], object]) -> None:
        with _silence():
            contender.save(folder, step, state)

    in_a_fork(life)


def _silence() -> redirect_stderr[io.StringIO]:
    """Discard the output of the contenders on stderr, which would repeat in every trial; errors are still raised."""
    return redirect_stderr(io.StringIO())


# ---- all trials ----------------------------------------------------------------------------------------------

TROUBLES = (*DAMAGE, "killed", "a file that may not grow")


def begin() -> None:
    torch.set_num_threads(1)


def run(options: Options, progress: Progress) -> list[Row]:
    keys = [
        {"contender": name, "trouble": trouble, "trial": trial, "seed": options.seed}
        for trouble in TROUBLES
        for trial in range(options.trials)
        for name in CONTENDERS
    ]
    return trials.run(keys, one, Journal(options.out / "trials.jsonl"), options.jobs, progress, begin)


def report(rows: Sequence[Row], options: Options) -> Report:
    names = list(dict.fromkeys(row["contender"] for row in rows))
    lines = []
    for trouble in TROUBLES:
        for name in names:
            mine = [row for row in rows if (row["contender"], row["trouble"]) == (name, trouble)]
            counts = [str(sum(row["outcome"] == one for row in mine)) for one in OUTCOMES]
            lines.append([trouble, name, str(len(mine)), *counts, str(sum(map(_swallowed, mine)))])
    head = [
        "trouble",
        "contender",
        "trials",
        "newest, right",
        "older, right",
        "error",
        "wrong values",
        "error swallowed",
    ]
    notes = [
        f"{name}: wrong values without an error {share(_of(rows, name), _wrong).as_text()}; a resume that ends in an "
        f"error {share(_of(rows, name), lambda row: row['outcome'] == 'error').as_text()}."
        for name in names
    ]
    return Report(
        name="peers",
        title="The same trouble for lastgood, torch.save and DCP",
        about="Two saves, trouble, and a resume in a new process. An error swallowed: the third save returned, but the "
        "resume does not find its state.",
        tables=[Table("", head, lines)],
        rows=rows,
        notes=notes,
        figures={"outcomes": lambda: _figure(rows)},
    )


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The content of summary.json."""
    names = dict.fromkeys(row["contender"] for row in rows)
    return {
        "trials": len(rows),
        "wrong_values": {name: share(_of(rows, name), _wrong).record() for name in names},
        "resume_fails": {
            name: share(_of(rows, name), lambda row: row["outcome"] == "error").record() for name in names
        },
        "errors_swallowed": {name: share(_of(rows, name), _swallowed).record() for name in names},
    }


def _of(rows: Sequence[Row], name: str) -> list[Row]:
    return [row for row in rows if row["contender"] == name]


def _wrong(row: Mapping[str, Any]) -> bool:
    return bool(row["outcome"] == "wrong")


def _swallowed(row: Mapping[str, Any]) -> bool:
    return bool(row["acknowledged"]) and row["found"] != STEPS[2]


def _share_of(rows: Sequence[Row], name: str, trouble: str, outcome: str) -> float:
    mine = [row for row in _of(rows, name) if row["trouble"] == trouble]
    return share(mine, lambda row: row["outcome"] == outcome).value


def _figure(rows: Sequence[Row]) -> Figure:
    from .figures import panels

    names = list(dict.fromkeys(row["contender"] for row in rows))
    figure, all_axes = panels(len(names), columns=len(names), wide=3.4, high=3.6)
    colors = ("#009E73", "#56B4E9", "#E69F00", "#D55E00")
    for axes, name in zip(all_axes, names, strict=True):
        left = [0.0] * len(TROUBLES)
        for outcome, color in zip(OUTCOMES, colors, strict=True):
            shares = [_share_of(rows, name, trouble, outcome) for trouble in TROUBLES]
            axes.barh(range(len(TROUBLES)), shares, left=left, color=color, label=outcome)
            left = [before + more for before, more in zip(left, shares, strict=True)]
        axes.set_title(name)
        axes.set_yticks(range(len(TROUBLES)), TROUBLES if axes is all_axes[0] else [""] * len(TROUBLES))
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
    figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure

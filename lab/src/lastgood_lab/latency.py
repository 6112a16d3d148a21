"""`lastgood lab latency`: the latency of a save in each of the three write modes, for states from 192 KB to 1 GB.

The smallest state is the group of files of the study that `crash.py` describes: model, optimizer and random number
generators. A save is timed from its call until the write mode reports it as done. Verification and retention follow and
are not timed. The modes alternate from trial to trial.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lastgood.loop.checkpointer import Checkpointer
from lastgood.policy.cadence import Every
from lastgood.policy.retention import Keep
from lastgood.storage.directory import WriteMode
from lastgood.units import size as size_text

from .corrupt import advance, group
from .journal import Journal
from .report import Progress, Report, Table, quantile
from .trials import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODES: tuple[WriteMode, ...] = ("atomic_dirsync", "atomic_nodirsync", "unsafe")
GROUP_BYTES = 192_000
"""Stands for the study's group, whose exact length is in the report."""
SIZES = (GROUP_BYTES, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000)
LEAST = 5
"""The smallest number of trials of one mode and size."""
TICKS = (1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 500)
"""Ticks of the time axis, in milliseconds."""
BUDGET_BYTES = 20_000_000_000
"""The bytes after which the trials of one mode and size end, even if more were requested (but not before LEAST)."""


@dataclass(frozen=True)
class Options:
    out: Path
    trials: int = 400
    """trials of each mode; large sizes take fewer"""
    seed: int = 0
    sizes: tuple[int, ...] = SIZES
    place: Path | None = None
    """folder for the saves, on the disk to measure (default: `out`)"""


def state_of(size: int) -> dict[str, Any]:
    if size == GROUP_BYTES:
        return group(0)
    return {"w": torch.zeros(size // 4), "step": 0}


def change(state: dict[str, Any], step: int) -> None:
    if "model" in state:
        advance(state)
    else:
        state["w"].add_(1.0)
        state["step"] = step


def count(options: Options, size: int) -> int:
    return max(LEAST, min(options.trials, BUDGET_BYTES // size))


def run(options: Options, progress: Progress) -> list[Row]:
    journal = Journal(options.out / "trials.jsonl")
    keys = [
        {"bytes": size, "mode": mode, "trial": trial, "seed": options.seed}
        for size in options.sizes
        for trial in range(count(options, size))
        for mode in (*MODES[trial % 3 :], *MODES[: trial % 3])
    ]
    for size in options.sizes:
        left = [key for key in keys if key["bytes"] == size and journal.get(**key) is None]
        if left:
            progress(f"{size_text(size)}: {len(left):,} saves")
            with tempfile.TemporaryDirectory(prefix="lastgood-latency-", dir=options.place or options.out) as folder:
                _measure(Path(folder), size, left, journal)
    return [{**key, **(journal.get(**key) or {})} for key in keys]


def _measure(folder: Path, size: int, keys: Sequence[Row], journal: Journal) -> None:
    state = state_of(size)
    with contextlib.ExitStack() as opened:
        ckpts = {
            mode: opened.enter_context(
                Checkpointer(
                    folder / mode, state, write_mode=mode, retention=Keep(last=1), cadence=Every(steps=1), in_flight=1
                )
            )
            for mode in MODES
        }
        for ckpt in ckpts.values():  # not timed: the first save creates folders and faults in its memory
            ckpt.save(1)
            ckpt.wait()
        for step, key in enumerate(keys, 2):
            ckpt = ckpts[key["mode"]]
            change(state, step)
            begun = time.perf_counter()
            saved = ckpt.save(step).result()
            journal.put({"seconds": time.perf_counter() - begun, "stored": saved.bytes}, **key)
            ckpt.wait()


def report(rows: Sequence[Row], options: Options) -> Report:
    lines = []
    for size in options.sizes:
        base = statistics.median(seconds(rows, size, "unsafe"))
        for mode in MODES:
            found = seconds(rows, size, mode)
            stored = next(row["stored"] for row in rows if (row["bytes"], row["mode"]) == (size, mode))
            lines.append(
                [
                    size_text(stored),
                    mode,
                    str(len(found)),
                    *(f"{1000 * quantile(found, share):.2f}" for share in (0.5, 0.9, 0.99)),
                    f"{statistics.median(found) / base:.2f}x",
                ]
            )
    head = ["stored", "mode", "saves", "p50 ms", "p90 ms", "p99 ms", "p50 / unsafe"]
    return Report(
        name="latency",
        title="Latency of a save in the three write modes",
        about="From the call until the write mode reports the save as done; verification and retention follow and are "
        "not timed. The modes alternate.",
        tables=[Table("", head, lines)],
        rows=rows,
        notes=["Files are written with direct I/O if the file system supports it, in all three modes."],
        figures={"cdf": lambda: _distribution(rows, options.sizes[0]), "sizes": lambda: _by_size(rows, options.sizes)},
    )


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The content of summary.json."""
    kinds = dict.fromkeys((row["bytes"], row["mode"]) for row in rows)
    return {
        "saves": len(rows),
        "seconds": {
            f"{size} bytes, {mode}": {
                f"p{round(100 * share)}": quantile(seconds(rows, size, mode), share) for share in (0.5, 0.9, 0.99)
            }
            for size, mode in kinds
        },
    }


def seconds(rows: Sequence[Row], size: int, mode: str) -> list[float]:
    return [row["seconds"] for row in rows if (row["bytes"], row["mode"]) == (size, mode)]


def _distribution(rows: Sequence[Row], size: int) -> Figure:
    from .figures import panels

    figure, (axes,) = panels(1, columns=1, wide=5.5, high=3.4)
    for mode in MODES:
        found = sorted(seconds(rows, size, mode))
        axes.step([1000 * one for one in found], [at / len(found) for at in range(1, len(found) + 1)], label=mode)
    axes.set_xlabel("ms until done")
    axes.set_ylabel("share of saves")
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    ticks = [one for one in TICKS if low < one < high]
    axes.set_xticks(ticks, [f"{one}" for one in ticks])
    axes.minorticks_off()
    axes.legend()
    return figure


def _by_size(rows: Sequence[Row], sizes: Sequence[int]) -> Figure:
    from .figures import panels

    figure, (axes,) = panels(1, columns=1, wide=5.5, high=3.4)
    for mode in MODES:
        quantiles = [[quantile(seconds(rows, size, mode), share) for size in sizes] for share in (0.1, 0.5, 0.9)]
        axes.plot(sizes, quantiles[1], marker="o", label=mode)
        axes.fill_between(sizes, quantiles[0], quantiles[2], alpha=0.15)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("bytes of the state")
    axes.set_ylabel("s until done (p10, p50, p90)")
    axes.legend()
    return figure

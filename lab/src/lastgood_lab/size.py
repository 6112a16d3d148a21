"""`lastgood bench size`: the time of a save for states of several sizes, and for several values of each option.

The options are the saves in flight, the writers, the length of a chunk and the memory of the arena.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lastgood

from .contenders import CONTENDERS, OURS, RAW, SLOTS, Bench, Save
from .journal import Journal, rotated
from .models import Plain
from .report import Progress, Report, Table, hardware, spread
from .usage import working_place

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB = 1 << 20
NAMES = (RAW, OURS, SLOTS, "torch.save")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Options:
    """`sizes_mib` are the sizes of the state in MiB.

    `knob_mib` is the size of the state with which the options of a Checkpointer are varied (0: they are not), in
    `burst` saves in a row.
    """

    out: Path
    place: Path | None = None
    sizes_mib: Sequence[int] = (1, 4, 16, 64, 256, 1024, 4096)
    knob_mib: int = 512
    burst: int = 6
    rounds: int = 5
    device: str = "cpu"

    def knobs(self) -> dict[str, list[int]]:
        """Name of an argument of Checkpointer -> the values to measure."""
        whole = self.knob_mib * MIB
        return {
            "in_flight": [1, 2, 3, 4],
            "writers": [1, 2, 3, 4],
            "chunk": [one * MIB for one in (1, 2, 4, 8, 16, 32) if one <= self.knob_mib],
            "memory": [max(MIB, whole * share // 8) for share in (1, 2, 4, 8, 16)],
        }


def run(options: Options, progress: Progress) -> list[Row]:
    """Take the measurements that are missing in the journal in `out`; returns all rows, also those of earlier runs."""
    journal = Journal(options.out / "size.journal.jsonl", {"hardware": hardware(), "device": options.device})
    rows = [row for mib in options.sizes_mib for row in _by_size(options, mib, journal, progress)]
    if options.knob_mib:
        rows += _by_knob(options, journal, progress)
    return rows


def _by_size(options: Options, mib: int, journal: Journal, progress: Progress) -> list[Row]:
    names = [name for name in NAMES if CONTENDERS[name].available()]
    keys: list[dict[str, Any]] = [
        {"kind": "size", "mib": mib, "contender": name, "round": number}
        for number in range(options.rounds)
        for name in rotated(names, number)
    ]
    known = [journal.get(**key) for key in keys]
    if None in known:
        trained = Plain(mib * MIB, options.device)
        with contextlib.ExitStack() as stack:
            place = stack.enter_context(working_place(options))
            saves: dict[str, Save] = {}
            for name in names:
                bench = Bench(trained, place / str(len(saves)))
                bench.place.mkdir()
                saves[name] = CONTENDERS[name].made(bench, stack)
                saves[name]()
            for at, key in enumerate(keys):
                if known[at] is None:
                    trained.step(lambda: None)
                    os.sync()
                    found = saves[key["contender"]]()
                    known[at] = journal.put(found._asdict(), **key)
                    progress(f"{mib} MiB, round {key['round'] + 1}, {key['contender']}: {found.durable:.4f} s")
    return [{**key, **one} for key, one in zip(keys, known, strict=True) if one]


def _by_knob(options: Options, journal: Journal, progress: Progress) -> list[Row]:
    rows: list[Row] = []
    trained: Plain | None = None
    for number in range(options.rounds):
        for knob, values in options.knobs().items():
            for value in values:
                key = {"kind": "knob", "mib": options.knob_mib, "knob": knob, "value": value, "round": number}
                known = journal.get(**key)
                if known is None:
                    trained = trained or Plain(options.knob_mib * MIB, options.device)
                    with working_place(options) as place:
                        known = journal.put(_burst(trained, place / "run", {knob: value}, options.burst), **key)
                    progress(f"{knob} = {value}, round {number + 1}: {known['seconds_per_save']:.3f} s for a save")
                rows.append({**key, **known})
    return rows


def _burst(trained: Plain, place: Path, options: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Measure `count` saves, each requested as soon as possible, until the last one is durable."""
    state = {"model": trained.module, "optimizer": trained.optimizer}
    with lastgood.Checkpointer(
        str(place), state, cadence=lastgood.Every(steps=1), retention=lastgood.Keep(last=1), on_error="raise", **options
    ) as ckpt:
        ckpt.save(1).result()
        ckpt.wait()
        begun, saves, waits = time.perf_counter(), [], []
        for step in range(2, 2 + count):
            trained.step(ckpt.fence)
            at = time.perf_counter()
            saves.append(ckpt.save(step))
            waits.append(time.perf_counter() - at)
        saves[-1].result()
        seconds = time.perf_counter() - begun
        ckpt.wait()
    durable = [one for one in saves if one.durable()]
    return {"seconds_per_save": seconds / len(durable), "waits": waits, "durable": len(durable), "saves": count}


# ---- the report ----------------------------------------------------------------------------------------------


def report(rows: Sequence[Row], options: Options) -> Report:
    sized = [row for row in rows if row["kind"] == "size"]
    names = list(dict.fromkeys(row["contender"] for row in sized))
    by_size = [
        [f"{mib:,} MiB", *(spread(_seconds(sized, mib, name), ".4f") for name in names)] for mib in options.sizes_mib
    ]
    tables = [Table("Seconds until a save is durable", ["state", *names], by_size)]
    figures = {"seconds": lambda: _draw_sizes(sized, names)}
    knobs = [row for row in rows if row["kind"] == "knob"]
    if knobs:
        lines = []
        for knob, value in dict.fromkeys((row["knob"], row["value"]) for row in knobs):
            mine = [row for row in knobs if (row["knob"], row["value"]) == (knob, value)]
            waits = [one for row in mine for one in row["waits"]]
            took = spread([row["seconds_per_save"] for row in mine])
            dropped = sum(row["saves"] - row["durable"] for row in mine)
            lines.append([knob, _value(knob, value), took, f"{1000 * statistics.median(waits):.1f}", str(dropped)])
        head = ["option", "value", "seconds for a durable save", "call, ms (median)", "overtaken"]
        title = (
            f"{options.burst} saves of {options.knob_mib} MiB one after the other, the other options at their defaults"
        )
        tables.append(Table(title, head, lines))
        figures["knobs"] = lambda: _draw_knobs(knobs)
    return Report(
        name="size" if options.device == "cpu" else "size-gpu",
        title="Time of a save by the size of the state",
        about=f"Medians of {options.rounds} rounds, (least-most).",
        tables=tables,
        rows=rows,
        notes=["torch.save is followed by fsync, rename and fsync of the directory"],
        figures=figures,
    )


def _seconds(rows: Sequence[Row], mib: int, name: str) -> list[float]:
    return [row["durable"] for row in rows if (row["mib"], row["contender"]) == (mib, name)]


def _value(knob: str, value: int) -> str:
    return f"{value / MIB:g} MiB" if knob in ("chunk", "memory") else str(value)


def _draw_sizes(rows: Sequence[Row], names: Sequence[str]) -> Figure:
    from .figures import legend_below, panels, style

    figure, (one,) = panels(1, wide=4.6, high=3.4)
    sizes = sorted({row["mib"] for row in rows})
    for at, name in enumerate(names):
        groups = [_seconds(rows, mib, name) for mib in sizes]
        middles = [statistics.median(group) for group in groups]
        around = [
            [m - min(g) for m, g in zip(middles, groups, strict=True)],
            [max(g) - m for m, g in zip(middles, groups, strict=True)],
        ]
        one.errorbar(sizes, middles, yerr=around, elinewidth=0.8, **style(name, at))
    one.set_xscale("log", base=2)
    one.set_yscale("log")
    one.set_xticks(sizes, [f"{mib:,}" for mib in sizes])
    one.set_xlabel("state, MiB")
    one.set_ylabel("seconds until durable")
    legend_below(figure, one)
    return figure


def _draw_knobs(rows: Sequence[Row]) -> Figure:
    from .figures import panels

    knobs = list(dict.fromkeys(row["knob"] for row in rows))
    figure, axes = panels(len(knobs), columns=4, wide=2.8, high=2.6)
    top = max(row["seconds_per_save"] for row in rows)
    for knob, one in zip(knobs, axes, strict=True):
        mine = [row for row in rows if row["knob"] == knob]
        values = sorted({row["value"] for row in mine})
        for value in values:
            dots = [row["seconds_per_save"] for row in mine if row["value"] == value]
            one.plot([values.index(value)] * len(dots), dots, "o", color="#BBBBBB", markersize=3)
        middles = [
            statistics.median(row["seconds_per_save"] for row in mine if row["value"] == value) for value in values
        ]
        one.plot(range(len(values)), middles, "o-", color="#000000")
        one.set_xticks(
            range(len(values)),
            [_value(knob, value) for value in values],
            rotation=30 if knob in ("chunk", "memory") else 0,
        )
        one.set_ylim(0, 1.05 * top)
        one.set_xlabel({"in_flight": "saves in flight", "chunk": "chunk", "memory": "arena"}.get(knob, knob))
        one.set_ylabel("seconds for a save")
    return figure

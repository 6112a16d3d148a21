"""`lastgood bench gpu`: the benchmarks `durable` and `interval` on CUDA, in a short form, with one table of both."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastgood.units import size

from . import durable, interval
from .contenders import CONTENDERS
from .interval_tables import select
from .policies import POLICIES
from .policy import Settings
from .report import Progress, Report, Table, percent, quantile, spread

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Options:
    """GPT-2 124M at full size in three rounds, which takes about eight minutes."""

    out: Path
    place: Path | None = None

    def durable(self) -> durable.Options:
        names = [name for name, one in CONTENDERS.items() if not one.needs]
        return durable.Options(self.out, self.place, names, rounds=3, device="cuda")

    def interval(self) -> interval.Options:
        return interval.Options(
            self.out,
            self.place,
            policies=tuple(POLICIES),
            intervals=(10, 50),
            work=4.0,
            rounds=3,
            least_steps=20,
            kills=0,
            device="cuda",
            settings=Settings(writers=4),
        )


def run(options: Options, progress: Progress) -> list[Row]:
    """Run both benchmarks and return their rows. Each has a journal of its own."""
    writes = durable.run(options.durable(), progress)
    steps = interval.run(options.interval(), progress)
    return [{"part": "durable", **row} for row in writes] + [{"part": "interval", **row} for row in steps]


def report(rows: Sequence[Row], options: Options) -> Report:
    writes = [row for row in rows if row["part"] == "durable"]
    steps = [row for row in rows if row["part"] == "interval"]
    whole = [durable.report(writes, options.durable()), interval.report(steps, options.interval())]
    names = ["no saves", *options.interval().policies]
    lines = []
    for name in names:
        mine = select(steps, policy=name, interval=10)
        waits = [1000 * one for row in mine for one in row["wait_seconds"]]
        lines.append(
            [
                name,
                percent([row["slowdown"] for row in mine]),
                f"{statistics.median(waits):.1f} / {quantile(waits, 0.99):.1f}",
                spread([row["save_seconds"] for row in mine]),
                size(max(row["memory_bytes"] for row in mine)),
            ]
        )
    head = ["policy", "slowdown", "call, ms: median / p99", "until durable, s", "memory"]
    return Report(
        name="gpu",
        title="GPT-2 124M on one GPU",
        about="Medians of 3 interleaved rounds, (least-most).",
        tables=[
            *(table for one in whole for table in one.tables),
            Table("In short: a save every 10 steps", head, lines),
        ],
        rows=rows,
        notes=[note for one in whole for note in one.notes],
        figures={f"{one.name}-{name}": draw for one in whole for name, draw in one.figures.items()},
    )

"""`lastgood bench durable`: a durable write of one large state by lastgood, raw direct I/O and other packages.

Each round measures every contender once, in an order that rotates, so that a drift of the machine's speed affects all
of them. Three times are taken of each save: until the loop may continue; until the contender reports it as done; and
until all bytes and names are durable, for which the benchmark adds the fsyncs that the contender leaves out.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lastgood.units import size

from .journal import Journal, rotated
from .models import Workload
from .report import Progress, Report, Table, hardware, spread
from .usage import working_place

if TYPE_CHECKING:
    from matplotlib.figure import Figure
from .contenders import CONTENDERS, IN_A_ROW, MAPPED, OURS, OVERWRITE, RAW, SLOTS, SLOTS_IN_A_ROW, Bench, Save, Timing

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Options:
    """`contenders` are names in `CONTENDERS`; empty means all that are installed.

    The state is GPT-2 124M with AdamW; `scale` is the share of its parameters.
    """

    out: Path
    place: Path | None = None
    contenders: Sequence[str] = ()
    scale: float = 1.0
    rounds: int = 5
    device: str = "cpu"

    def names(self) -> list[str]:
        """The chosen contenders, or all that can run on this machine."""
        return list(self.contenders) or [name for name, one in CONTENDERS.items() if one.available()]


def run(options: Options, progress: Progress) -> list[Row]:
    """Take the measurements that are missing in the journal in `out`; returns all rows, also those of earlier runs."""
    journal = Journal(options.out / "durable.journal.jsonl", {"hardware": hardware()})
    common = {"scale": options.scale, "device": options.device}
    names = options.names()
    rows: list[Row] = []
    saves: dict[str, Save] = {}
    bench: Bench | None = None
    with contextlib.ExitStack() as stack:
        for number in range(options.rounds):
            for name in rotated(names, number):
                key = {**common, "contender": name, "round": number}
                known = journal.get(**key)
                if known is None:
                    if bench is None:
                        place = stack.enter_context(working_place(options))
                        bench = Bench(Workload("gpt2-124m", options.scale, 0.03, options.device), place)
                    if name not in saves:
                        mine = Bench(bench.trained, bench.place / str(len(saves)))
                        mine.place.mkdir()
                        saves[name] = CONTENDERS[name].made(mine, stack)
                        saves[name]()  # not timed: the first save faults in its staging memory
                    bench.trained.step(lambda: None)  # changes the state, because some packages write differences
                    os.sync()
                    known = journal.put({**saves[name]()._asdict(), "bytes": bench.bytes}, **key)
                    progress(f"round {number + 1}/{options.rounds}  {name:22s} {_seconds_text(known)}")
                rows.append({**key, **known})
    return rows


def _seconds_text(found: Row) -> str:
    return f"waits {found['waits']:6.3f} s, done {found['done']:6.3f} s, durable {found['durable']:6.3f} s"


def report(rows: Sequence[Row], options: Options) -> Report:
    names = [name for name in CONTENDERS if any(row["contender"] == name for row in rows)]
    total = rows[0]["bytes"]
    lines = []
    for name in names:
        mine = of_contender(rows, name)
        lines.append(
            [
                name,
                *(spread([row[one] for row in mine]) for one in Timing._fields),
                f"{total / 1e9 / statistics.median(row['durable'] for row in mine):.2f}",
                spread(ratios(rows, RAW, name, "durable"), ".2f"),
            ]
        )
    notes = ["relative speeds are ratios of the times within one round: their median, (least-most) over the rounds"]
    if "torchsnapshot" in names:
        notes.append("torchsnapshot does not copy tensors of 128 MiB and more: training may change what it writes")
    if {OVERWRITE, SLOTS} <= set(names):
        notes.insert(
            0, f"{SLOTS} / {OVERWRITE}, round by round: {spread(ratios(rows, OVERWRITE, SLOTS, 'durable'), '.2f')}"
        )
    peers = [name for name in names if name not in (RAW, OVERWRITE, OURS, SLOTS, MAPPED, IN_A_ROW, SLOTS_IN_A_ROW)]
    if peers and OURS in names:
        best = min(peers, key=lambda name: statistics.median(row["durable"] for row in of_contender(rows, name)))
        times = spread(ratios(rows, best, OURS, "durable"), ".2f")
        notes.insert(0, f"lastgood / best durable peer ({best}), round by round: {times}")
    return Report(
        name="durable" if options.device == "cpu" else "durable-gpu",
        title=f"Durable write, {total / 1e9:.2f} GB GPT-2-size AdamW state",
        about=f"Medians of {options.rounds} interleaved rounds, (least-most).",
        tables=[
            Table(
                "",
                ["contender", "caller waits, s", "done as shipped, s", "durable, s", "durable GB/s", "speed / raw"],
                lines,
            )
        ],
        rows=rows,
        notes=notes,
        figures={"seconds": lambda: _draw(rows, names, total)},
    )


def of_contender(rows: Sequence[Row], name: str) -> list[Row]:
    return sorted((row for row in rows if row["contender"] == name), key=lambda row: row["round"])


def ratios(rows: Sequence[Row], theirs: str, mine: str, value: str) -> list[float]:
    """For each round, how many times as fast `mine` is as `theirs`."""
    pairs = zip(of_contender(rows, theirs), of_contender(rows, mine), strict=False)
    return [one[value] / two[value] for one, two in pairs]


def _draw(rows: Sequence[Row], names: Sequence[str], total: int) -> Figure:
    from .figures import legend_below, panels

    figure, (one,) = panels(1, wide=6.5, high=0.32 * len(names) + 1.0)
    places = range(len(names))
    middles = {
        part: [statistics.median(row[part] for row in of_contender(rows, name)) for name in names]
        for part in Timing._fields
    }
    one.barh(places, middles["durable"], color="#D9D9D9", label="+ missing fsyncs")
    one.barh(places, middles["done"], color="#56B4E9", label="done as shipped")
    one.barh(places, middles["waits"], color="#D55E00", label="caller waits")
    durable = [[row["durable"] for row in of_contender(rows, name)] for name in names]
    for place, values in zip(places, durable, strict=True):
        one.plot([min(values), max(values)], [place, place], color="#333333", linewidth=1)
    one.set_yticks(list(places), names)
    one.invert_yaxis()
    one.grid(axis="y", visible=False)
    one.set_xlabel(f"seconds for {size(total)} (line: least to most)")
    legend_below(figure, one)
    return figure

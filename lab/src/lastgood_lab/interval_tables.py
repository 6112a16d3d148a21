"""Tables and figures of `lastgood bench interval`."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lastgood.units import size

from .report import Table, percent, quantile, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .interval import Options


Row = Mapping[str, Any]


def select(rows: Sequence[Row], kind: str = "throughput", **wanted: Any) -> list[Row]:
    """The rows of a kind that have these values."""
    return [row for row in rows if row["kind"] == kind and all(row[name] == one for name, one in wanted.items())]


def throughput_tables(rows: Sequence[Row], options: Options, model: str) -> list[Table]:
    of_model = select(rows, model=model)
    plain = spread([row["plain_step_seconds"] for row in of_model])
    names = ["no saves", *options.policies]
    slow = [
        [
            name,
            *(
                percent([row["slowdown"] for row in select(rows, model=model, policy=name, interval=one)])
                for one in options.intervals
            ),
        ]
        for name in names
    ]
    head = ["policy", *(f"every {one}" for one in options.intervals)]
    costs = []
    for name in options.policies:
        mine = select(rows, model=model, policy=name)
        waits = [one for row in mine for one in row["wait_seconds"]]
        fences = [one for row in mine for one in row["fence_seconds"]]
        costs.append(
            [
                name,
                f"{1000 * statistics.median(waits):.1f} / {1000 * quantile(waits, 0.99):.1f}",
                f"{1000 * quantile(fences, 0.99):.1f}",
                spread([row["save_seconds"] for row in mine]),
                spread([sum(row["behind_seconds"].values()) for row in mine], ".2f"),
                size(max(row["memory_bytes"] for row in mine)),
                size(max(row["stored_bytes"] for row in mine)),
            ]
        )
    return [
        Table(f"{model}: slowdown (a step without saves: {plain} s)", head, slow),
        Table(
            f"{model}: costs of a save",
            [
                "policy",
                "call, ms: median / p99",
                "fence, ms: p99",
                "until durable, s",
                "processor, s",
                "memory",
                "storage",
            ],
            costs,
        ),
    ]


def processor_parts(rows: Sequence[Row], policy: str) -> str:
    """A text with the processor seconds per save of a policy's threads, by name; unnamed pools are added up."""
    found: dict[str, list[float]] = {}
    mine = select(rows, policy=policy)
    for row in mine:
        of_row = Counter[str]()
        for name, seconds in row["behind_seconds"].items():
            of_row[re.sub(r"^ThreadPoolExecutor-\d+$", "pools", name).removeprefix("lastgood-")] += seconds
        for name, total in of_row.items():
            found.setdefault(name, []).append(total)
    parts = [f"{name} {sum(seconds) / len(mine):.2f}" for name, seconds in sorted(found.items())]
    return f"{policy}: {', '.join(parts) or 'none in Python'}"


def recovery_table(rows: Sequence[Row], options: Options, model: str) -> Table:
    lines = []
    for name in options.policies:
        cells = [name]
        for one in options.intervals:
            found = select(rows, "recovery", model=model, policy=name, interval=one)
            seconds = spread([row["recovery_seconds"] for row in found], ".2f")
            cells.append(f"{seconds} of {max(row['bound_seconds'] for row in found):.2f}")
        found = select(rows, "recovery", model=model, policy=name)
        cells += [spread([row[value] for row in found], ".2f") for value in ("load_seconds", "restart_seconds")]
        lines.append(cells)
    head = ["policy", *(f"every {one}" for one in options.intervals), "loading, s", "restart, s"]
    return Table(f"{model}: recovery after a kill, in seconds, of the policy's bound", head, lines)


def draw_throughput(rows: Sequence[Row], options: Options) -> Figure:
    from .figures import legend_below, panels, steps_axis, style

    figure, axes = panels(len(options.models), wide=5.0 if len(options.models) == 1 else 3.6)
    for model, one in zip(options.models, axes, strict=True):
        for at, name in enumerate(options.policies):
            groups = [
                [1 / (1 + row["slowdown"]) for row in select(rows, model=model, policy=name, interval=interval)]
                for interval in options.intervals
            ]
            one.plot(options.intervals, [statistics.median(group) for group in groups], **style(name, at))
        noise = [1 / (1 + row["slowdown"]) for row in select(rows, model=model, policy="no saves")]
        one.axhspan(min(noise), max(noise), color="#eeeeee", zorder=0)
        one.axhline(1, color="#999999", linestyle="--", linewidth=1, label="no saves (grey: spread)")
        steps_axis(one, options.intervals)
        one.set_ylim(bottom=0)
        one.set_title(model)
        one.set_ylabel("throughput / without saves")
    legend_below(figure, axes[0])
    return figure


def draw_recovery(rows: Sequence[Row], options: Options, model: str) -> Figure:
    from .figures import legend_below, panels, steps_axis, style

    figure, axes = panels(len(options.policies), columns=4, wide=2.8, high=2.5)
    step = statistics.median(row["plain_step_seconds"] for row in select(rows, model=model))
    every = select(rows, "recovery", model=model)
    least = min(row["recovery_seconds"] for row in every)
    most = max(max(row["bound_seconds"], row["recovery_seconds"]) for row in every)
    for at, (name, one) in enumerate(zip(options.policies, axes, strict=True)):
        found = select(rows, "recovery", model=model, policy=name)
        by_interval = [[row for row in found if row["interval"] == interval] for interval in options.intervals]
        dots = {**style(name, at), "label": "measured"}
        one.plot([row["interval"] for row in found], [row["recovery_seconds"] for row in found], linestyle="", **dots)
        limits = [max(row["bound_seconds"] for row in group) for group in by_interval]
        one.plot(options.intervals, limits, color="#D55E00", label="bound")
        loads = [statistics.median(row["load_seconds"] for row in group) for group in by_interval]
        ideal = [load + interval * step / 2 for load, interval in zip(loads, options.intervals, strict=True)]
        one.plot(options.intervals, ideal, color="#999999", linestyle="--", label="ideal on average: l + f t / 2")
        steps_axis(one, options.intervals)
        one.set_yscale("log")
        one.set_ylim(least / 1.5, most * 1.5)
        one.set_title(name)
        one.set_ylabel("recovery, s")
    legend_below(figure, axes[0])
    return figure

"""`lastgood bench goodput`: goodput as a function of the interval when spot traces are replayed.

The costs of the policies are measured ones from a journal, or given as options. This module reads traces and journals
and makes tables and figures; replay.py computes.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lastgood.errors import Refused

from . import journal as journals
from .replay import COUNTS, Costs, Trace, artifact_count, ideal, parse, published, replay
from .report import Progress, Report, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Options:
    """`journal` is that of `lastgood bench interval`; `given` holds one policy's costs at each interval.

    `scale` and `work` select among the journal's measurements of the model if it holds more than one kind.
    """

    out: Path
    traces: Sequence[Path]
    journal: Path | None = None
    model: str = "gpt2-124m"
    given: Sequence[Costs] = ()
    scale: float | None = None
    work: float | None = None


def run(options: Options, progress: Progress) -> list[Row]:
    """Return one row for each trace, way of counting failures, policy and interval.

    Raises Refused without costs, for an unknown policy, and for two traces of the same name.
    """
    _require_distinct(options.traces)
    costs = [*options.given, *(measured(options) if options.journal else ())]
    if not costs:
        raise Refused("no costs to replay with", todo="Run `lastgood bench interval` first, or give --step-seconds.")
    costs += [ideal(one) for one in {one.interval: one for one in costs}.values()]
    rows: list[Row] = []
    for path in options.traces:
        trace = read(path)
        for count, failures in COUNTS.items():
            times = failures(trace)
            for one in costs:
                found = replay(times, trace.seconds, one)
                formula = published(len(times), trace.seconds, one)
                rows.append(
                    {
                        "trace": path.stem,
                        "count": count,
                        "failures": len(times),
                        "trace_seconds": trace.seconds,
                        "policy": one.policy,
                        "interval": one.interval,
                        "steps": found.steps,
                        "redone": found.redone,
                        "goodput": found.goodput,
                        "published": formula,
                    }
                )
        progress(f"{path.stem}: {trace_summary(path, trace)}")
    return rows


def _require_distinct(traces: Sequence[Path]) -> None:
    """Raises Refused for two traces of the same name, by which rows, tables and figures tell traces apart."""
    found: dict[str, Path] = {}
    for path in traces:
        if path.stem in found:
            raise Refused(
                f"{found[path.stem]} and {path} have the same name, {path.stem}, and the report names a trace by it",
                safe="Nothing was computed.",
                todo="Rename one of the files, and give each trace once.",
            )
        found[path.stem] = path


def read(path: Path) -> Trace:
    """Read a trace file. Raises Refused if it cannot be read or has another format."""
    try:
        return parse(path.read_text())
    except (OSError, ValueError) as error:
        raise Refused(f"{path} is no trace: {error}", todo="Give a CSV file in a format of docs/bench.md.") from error


def trace_summary(path: Path, trace: Trace) -> str:
    """The length of a trace and its failures by each way of counting; for a trace of samples also by the artifact's."""
    text = f"{trace.seconds:,.0f} s, {len(trace.drops())} drops, {len(trace.changes())} drops and rises"
    rows = [row for row in csv.reader(path.read_text().splitlines()) if row]
    if rows[0][1:] == ["Time", "GPUs"]:
        text += f"; sum(|change| // 4) from 0, with the tear-down: {artifact_count([int(row[2]) for row in rows[1:]])}"
    return text


def measured(options: Options) -> list[Costs]:
    """The costs in a journal of `lastgood bench interval`. A slowdown below 0 counts as 0.

    Raises Refused if it holds measurements of the model with more than one machine, scale, work, device or settings.
    """
    medians, flights = _medians(options)
    plain = statistics.median([one["plain_step_seconds"] for one in medians.values()] or [0.0])
    return [
        Costs(
            policy=policy,
            interval=interval,
            step_seconds=plain,
            stall_seconds=max(0.0, one["slowdown"]) * plain * interval,
            save_seconds=one["save_seconds"],
            load_seconds=one.get("load_seconds", 0.0),
            restart_seconds=one.get("restart_seconds", 0.0),
            in_flight=flights[policy],
        )
        for (policy, interval), one in medians.items()
    ]


def clamped(options: Options) -> list[str]:
    """Descriptions of the slowdowns in the journal that are below 0, which the replay takes as 0."""
    if options.journal is None:
        return []
    medians, _ = _medians(options)
    below = {at: one["slowdown"] for at, one in medians.items() if one["slowdown"] < 0}
    return [f"{policy} every {interval}: {100 * slowdown:.1f} %" for (policy, interval), slowdown in below.items()]


def _costs(options: Options) -> list[dict[str, Any]]:
    """The measurements of this model in the journal, of the commit that has the newest one; none without a journal."""
    found = []
    for entry in journals.entries(options.journal) if options.journal else ():
        key = entry["key"]
        wanted = options.scale in (None, key["scale"]) and options.work in (None, key["work"])
        if key["model"] == options.model and key["policy"] != "no saves" and wanted:
            found.append(entry)
    return [one for one in found if _commit(one) == _commit(found[-1])]


def _commit(entry: dict[str, Any]) -> str:
    return str(entry["key"].get("commit", "an unknown commit"))


def _measured_at(options: Options) -> list[str]:
    """Which commit was measured for the costs; empty where they were given as options."""
    costs = _costs(options)
    if options.journal is None or not costs:
        return []
    return [f"costs: {len(costs)} measurements of {options.journal.name}, made of {_commit(costs[-1])}"]


def _medians(options: Options) -> tuple[dict[tuple[str, int], dict[str, float]], dict[str, int]]:
    """(policy, interval) -> the median of each measured value over rounds and kills; policy -> saves in flight."""
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    flights: dict[str, int] = {}
    ways = set()
    for entry in _costs(options):
        key, values = entry["key"], entry["found"]
        ways.add(f"{key['hardware']}, scale {key['scale']}, work {key['work']}, {key['device']}, {key['settings']}")
        lists = found.setdefault((key["policy"], key["interval"]), {})
        flights[key["policy"]] = key["settings"][0]
        for name in ("plain_step_seconds", "slowdown", "save_seconds", "load_seconds", "restart_seconds"):
            if name in values:
                lists.setdefault(name, []).append(values[name])
    if len(ways) > 1:
        listed = "\n".join(sorted(ways))
        what = f"the journal holds more than one kind of measurement of {options.model}:\n{listed}"
        raise Refused(what, todo="\nChoose with --scale and --work.")
    medians = {at: {name: statistics.median(values) for name, values in lists.items()} for at, lists in found.items()}
    return medians, flights


# ---- the report ----------------------------------------------------------------------------------------------


def report(rows: Sequence[Row], options: Options) -> Report:
    below = clamped(options)
    intervals = sorted({row["interval"] for row in rows})
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    tables = []
    for trace in dict.fromkeys(row["trace"] for row in rows):
        for count in COUNTS:
            some = [row for row in rows if (row["trace"], row["count"]) == (trace, count)]
            lines = []
            for policy in policies:
                mine = {row["interval"]: row for row in some if row["policy"] == policy}
                cells = [
                    f"{100 * mine[one]['goodput']:.1f} ({100 * mine[one]['published']:.1f})" if one in mine else "-"
                    for one in intervals
                ]
                best = max(mine.values(), key=lambda row: row["goodput"])
                lines.append([policy, *cells, f"{100 * best['goodput']:.1f} at {best['interval']}"])
            title = f"{trace}: {count}, {some[0]['failures']} failures in {some[0]['trace_seconds']:,.0f} s"
            tables.append(Table(title, ["policy", *(f"every {one}" for one in intervals), "peak"], lines))
    return Report(
        name="goodput",
        title="Goodput at each interval when spot traces are replayed",
        about=(
            "Steps that count at the end, in per cent of those possible in the same time without failures and without "
            "saves: event by event, and in parentheses by the published formula."
        ),
        tables=tables,
        rows=rows,
        notes=[
            "event by event: each failure happens at its time in the trace; training returns to the newest step that "
            "is durable by then, after the restart and loading; failures at the same time are one",
            "published formula (PCcheck, ASPLOS'25, and its artifact): every failure costs the average: l + f t / 2 "
            "if saves stop the loop, l + f t for CheckFreq, Gemini and DCP async, l + f t / 2 + t min(Tw / t, N f) / 2 "
            "for PCcheck and lastgood; the time of the restart is added here",
            "Gemini's saves count as durable: the peer that holds them is assumed to survive",
            *(["slowdowns measured below 0 (noise) count as 0: " + "; ".join(below)] if below else []),
            *_measured_at(options),
            *(f"{path.stem}: {trace_summary(path, read(path))}" for path in options.traces),
        ],
        figures={
            f"replay-{trace}": lambda trace=trace: _draw([row for row in rows if row["trace"] == trace])  # type: ignore[misc]
            for trace in dict.fromkeys(row["trace"] for row in rows)
        },
    )


def _draw(rows: Sequence[Row]) -> Figure:
    from .figures import legend_below, panels, steps_axis, style

    intervals = sorted({row["interval"] for row in rows})
    figure, axes = panels(len(COUNTS), wide=4.2)
    for count, one in zip(COUNTS, axes, strict=True):
        some = [row for row in rows if row["count"] == count]
        for at, policy in enumerate(dict.fromkeys(row["policy"] for row in some)):
            mine = sorted((row for row in some if row["policy"] == policy), key=lambda row: row["interval"])
            where = [row["interval"] for row in mine]
            line = {**style(policy, at), "color": "#999999", "marker": ""} if policy == "ideal" else style(policy, at)
            one.plot(where, [100 * row["goodput"] for row in mine], **line)
            thin = {"color": line["color"], "linestyle": ":", "linewidth": 0.9}
            one.plot(where, [100 * row["published"] for row in mine], **thin)
        one.plot([], [], color="#777777", linestyle=":", linewidth=0.9, label="dotted: published formula")
        steps_axis(one, intervals)
        one.set_title(f"{count}: {some[0]['failures']} failures")
        one.set_ylabel("goodput, % of no failures, no saves")
    legend_below(figure, axes[0])
    return figure

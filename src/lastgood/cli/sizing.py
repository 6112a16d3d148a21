"""What `plan` asks and says. Holds no formula: policy/sizing.py has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from ..policy import sizing
from ..units import size
from .show import new_table
from .terminal import clean
from .tuning import bytes_of


def tier(text: str) -> tuple[str, int]:
    """NAME=SIZE, bytes a second. Raises BadParameter."""
    name, equals, rate = text.partition("=")
    if not name or not equals:
        raise typer.BadParameter(f"{text!r}: give NAME=SIZE, as in nvme=3GB.")
    return name, bytes_of(rate)


def sized(
    *,
    state_bytes: float | None,
    ranks: int,
    copy_rate: int | None,
    write_rate: int | None,
    tiers: Sequence[tuple[str, int]],
    mtbf_seconds: float | None,
    stall_seconds: float | None,
    write_seconds: float | None,
    in_flight: int,
    restart_seconds: float,
    intervals: Sequence[float],
    run_days: float | None,
) -> dict[str, Any]:
    """Whatever follows from what is given; None where something for it is not. Raises Refused."""
    shard = state_bytes / ranks if state_bytes else None
    stall = stall_seconds or (shard / copy_rate if shard and copy_rate else None)
    write = write_seconds or (state_bytes / write_rate if state_bytes and write_rate else 0.0)
    data: dict[str, Any] = {
        "state_bytes": state_bytes,
        "ranks": ranks,
        "shard_bytes": shard,
        "stall_seconds": stall,
        "write_seconds": write or None,
        "restore_seconds": {name: state_bytes / rate for name, rate in tiers} if state_bytes else {},
        "mtbf_seconds": mtbf_seconds,
        "failures": run_days * sizing.DAY_SECONDS / mtbf_seconds if run_days and mtbf_seconds else None,
        "intervals": [],
    }
    if stall is None or mtbf_seconds is None:
        return data
    job = sizing.Job(mtbf_seconds, stall, write, in_flight, restart_seconds)
    data |= {
        "young_seconds": job.young,
        "daly_seconds": job.daly,
        "shortest_seconds": job.shortest,
        "best_seconds": job.best,
    }
    chosen = sorted({*intervals, max(job.young, job.shortest), job.best})
    data["intervals"] = [
        {
            "interval_seconds": one,
            "stalled": stall / one,
            "lost": job.wasted_first_order(one) - stall / one,
            "wasted_first_order": job.wasted_first_order(one),
            "useful": job.useful(one),
            "breaks_down": job.breaks_down(one),
            "too_short": one < job.shortest,
        }
        for one in chosen
    ]
    return data


def sized_view(data: Mapping[str, Any]) -> RenderableType:
    facts = new_table("", "")
    facts.show_header = False
    for name, value in _facts(data):
        facts.add_row(name, value)
    parts: list[RenderableType] = [facts]
    if data["intervals"]:
        right = ("tau", "stalled", "lost", "wasted", "useful")
        rows = new_table(*right, "", right=right)
        for one in data["intervals"]:
            told = [f"{100 * one[name]:.1f} %" for name in ("stalled", "lost", "wasted_first_order", "useful")]
            words = ["~"] * one["breaks_down"] + ["!"] * one["too_short"]
            for word, name in (("Young", "young_seconds"), ("Daly", "daly_seconds"), ("best", "best_seconds")):
                words += [word] * (one["interval_seconds"] == data[name])
            rows.add_row(_time(one["interval_seconds"]), *told, " ".join(words))
        parts += [Text(), rows, Text(), Text("wasted: to first order; useful: by the exact expectation")]
        if any(one["breaks_down"] for one in data["intervals"]):
            parts.append(Text("~ here the first order breaks down", style="yellow"))
        if any(one["too_short"] for one in data["intervals"]):
            parts.append(Text("! below Tw / N: saves queue up", style="yellow"))
    return Group(*parts)


def _facts(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if data["state_bytes"]:
        found += [
            ("state", size(data["state_bytes"])),
            (f"of each of {data['ranks']:,} ranks", size(data["shard_bytes"])),
        ]
    times = [
        ("a save stalls the loop, C", "stall_seconds"),
        ("until it is durable, Tw", "write_seconds"),
        ("mean time between failures, M", "mtbf_seconds"),
        ("interval by Young, sqrt(2 C M)", "young_seconds"),
        ("interval by Daly, higher order", "daly_seconds"),
        ("no shorter than Tw / N", "shortest_seconds"),
        ("best by the exact expectation", "best_seconds"),
    ]
    found += [(told, _time(data[name])) for told, name in times if data.get(name)]
    found += [(f"to read it back from {clean(name)}", _time(one)) for name, one in data["restore_seconds"].items()]
    if data["failures"]:
        found.append(("failures to expect", f"{data['failures']:,.0f}"))
    return found


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return (
        f"{seconds:,.0f} s ({seconds / 60:.1f} min)" if seconds < 7200 else f"{seconds:,.0f} s ({seconds / 3600:.1f} h)"
    )

"""What `tune` asks and says: sizes as people write them, the figures of run/measure.py, and the line to paste.

Holds no formula: policy/tune.py has them.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections.abc import Mapping
from typing import Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from ..policy import tune
from ..policy.retention import KEEP
from ..run import access, measure
from ..units import size
from .show import new_table, plural
from .terminal import clean, progress

_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e\+?[0-9]+)?)\s*(?:([kmgt]?)b?|([kmgt])ib)\s*", re.IGNORECASE)
SCATTER = 1.5
"""slowest over quickest, from which on the figures are doubted"""
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def bytes_of(text: str) -> int:
    """1.5GB, 512MiB, 1e9: a power of 1000 or of 1024. Raises BadParameter."""
    found = _SIZE.fullmatch(text)
    count = 0.0
    if found:
        decimal, binary = (found[2] or "").lower(), (found[3] or "").lower()
        count = float(found[1]) * (1024 ** _POWERS[binary] if binary else 1000 ** _POWERS[decimal])
    if not 1 <= count < 2**63:
        raise typer.BadParameter(f"{text!r} is no size: give 1.5GB, 512MiB or 1e9.")
    return int(count)


def positive(text: str) -> float:
    """A number above zero. Raises BadParameter."""
    number = _number(text)
    if not 0 < number < math.inf:
        raise typer.BadParameter(f"{text!r} is no number above zero.")
    return number


def not_negative(text: str) -> float:
    """A number of at least zero. Raises BadParameter."""
    number = _number(text)
    if not 0 <= number < math.inf:
        raise typer.BadParameter(f"{text!r} is no number of at least zero.")
    return number


def _number(text: str) -> float:
    """The number that a text says; NaN where it says none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def share(text: str) -> float:
    """A number above zero and below one. Raises BadParameter."""
    number = positive(text)
    if number >= 1:
        raise typer.BadParameter(f"{text!r} is no share: give 0.03 for 3 %.")
    return number


def tuned(
    run: str,
    state_bytes: int,
    step_seconds: float,
    memory_bytes: int | None,
    disk_bytes: int | None,
    overhead: float,
    quick: bool,
) -> dict[str, Any]:
    """Measure beside `run` and choose. Raises Refused, NoSpace, what opening and writing raise."""
    run = access.directory(run)
    effort = measure.QUICK if quick else measure.FULL
    free = shutil.disk_usage(measure.beside(run)).free
    memory, disk = memory_bytes or state_bytes, disk_bytes or free
    allowed = tune.candidates(memory, disk, state_bytes)
    bounds = measure.bounds(allowed, state_bytes, effort)
    cleared = measure.clear(run)
    print(
        f"lastgood: measuring beside {clean(run)}: at most {size(bounds.written_bytes)} written, "
        f"{size(bounds.at_once_bytes)} of it at a time; about {bounds.limit_seconds:.0f} s at most",
        file=sys.stderr,
    )
    with progress("measuring", bounds.written_bytes) as seen:
        # Tw / N below a step, as it may be slowed, buys nothing.
        found = measure.figures(run, allowed, state_bytes, memory, effort, (1 + overhead) * step_seconds, seen)
    setting, tw, c = found.chosen.setting, found.write_seconds, found.contention_seconds
    steps = tune.interval_steps(tw, setting.in_flight, overhead, step_seconds, c)
    by_slots = tune.interval_steps(tw, setting.in_flight, overhead, step_seconds)
    keep = disk // state_bytes - setting.in_flight - tune.SLOTS_BESIDE
    return {
        "place": run,
        "state_bytes": state_bytes,
        "step_seconds": step_seconds,
        "memory_bytes": memory,
        "disk_bytes": disk,
        "overhead": overhead,
        "sample_bytes": found.sample_bytes,
        "copy_bytes_per_second": found.copy_bytes_per_second,
        "storage_bytes_per_second": found.storage_bytes_per_second,
        "fixed_seconds": found.fixed_seconds,
        "load_seconds": found.load_seconds,
        "measured": [
            {
                "in_flight": one.setting.in_flight,
                "writers": one.setting.writers,
                "chunk_bytes": one.setting.chunk_bytes,
                "write_seconds": one.write_seconds,
                "seconds_per_save": one.seconds_per_save,
                "chosen": one is found.chosen,
            }
            for one in found.measured
        ],
        "in_flight": setting.in_flight,
        "writers": setting.writers,
        "chunk_bytes": setting.chunk_bytes,
        "write_seconds": tw,
        "write_seconds_range": list(found.write_seconds_range),
        "contention_seconds": c,
        "interval_steps": steps,
        "interval_by": "copying" if steps > by_slots else "writing",
        "expected_overhead": tune.expected_overhead(steps, tw, setting.in_flight, step_seconds, c),
        "recovery_bound_seconds": tune.recovery_bound_seconds(
            found.load_seconds, steps, step_seconds, setting.in_flight, tw
        ),
        "line": _line(run, steps, setting, memory, keep),
        "notes": _notes(found, keep, disk, free, disk_bytes is not None),
        "cleared": cleared,
    }


def _line(run: str, steps: int, setting: tune.Setting, memory: int, keep: int) -> str:
    fewer = f", retention=lastgood.Keep(last={keep})" if 1 <= keep < KEEP.last else ""
    return (
        f"lastgood.Checkpointer({json.dumps(run, ensure_ascii=False)}, state, cadence=lastgood.Every(steps={steps}), "
        f"in_flight={setting.in_flight}, writers={setting.writers}, chunk={setting.chunk_bytes:_}, memory={memory:_}"
        f"{fewer})"
    )


def _notes(found: measure.Figures, keep: int, disk: int, free: int, disk_given: bool) -> list[str]:
    notes = []
    if not found.complete:
        notes.append("the time was up before every setting was tried; what was tried is in the table")
    quickest, slowest = found.write_seconds_range
    if slowest > SCATTER * quickest:
        notes.append(
            f"Tw was between {_seconds(quickest)} and {_seconds(slowest)}: something else is at work on this machine "
            "or disk; measure again when it is idle"
        )
    if keep < 1:
        notes.append("a run in a directory keeps one generation more than this disk holds; slots:// keeps no more")
    elif keep < KEEP.last:
        notes.append(f"retention is lowered to {plural(keep, 'generation')}, so that the run fits the disk")
    if disk_given and disk > free:
        notes.append(f"only {size(free)} are free now")
    return notes


def tuned_view(data: Mapping[str, Any]) -> RenderableType:
    state, t, n = data["state_bytes"], data["step_seconds"], data["in_flight"]
    facts = new_table("", "")
    facts.show_header = False
    for name, value in (
        ("copy, one thread", f"{size(int(data['copy_bytes_per_second']))}/s"),
        ("storage, one writer, flushed", f"{size(int(data['storage_bytes_per_second']))}/s"),
        ("read, verified", f"{size(int(state / data['load_seconds']))}/s"),
        ("a save of one page", _seconds(data["fixed_seconds"])),
    ):
        facts.add_row(name, value)
    rows = new_table("N", "p", "b", "Tw", "Tw / N", "", right=("N", "p", "b", "Tw", "Tw / N"))
    for one in data["measured"]:
        chunk = f"{one['chunk_bytes'] / 2**20:.3g} MiB"
        times = _seconds(one["write_seconds"]), _seconds(one["seconds_per_save"])
        chosen, style = ("chosen", "bold") if one["chosen"] else ("", "")
        rows.add_row(str(one["in_flight"]), str(one["writers"]), chunk, *times, chosen, style=style)
    steps, by = data["interval_steps"], data["interval_by"]
    why = f"{_seconds(data['contention_seconds'])} of it lost to copying and digesting each save"
    if by == "writing":
        why = f"Tw {_seconds(data['write_seconds'])} beside a load on every core, {n} in flight"
    lines = [
        f"save every {plural(steps, 'step')} ({_seconds(steps * t)}): {why}",
        f"expected overhead {data['expected_overhead']:.2%}, allowed {data['overhead']:.2%}",
        f"after a crash at most {_seconds(data['recovery_bound_seconds'])}: "
        f"{_seconds(data['load_seconds'])} to load, the rest to repeat lost steps",
    ]
    sample = f", from samples of {size(data['sample_bytes'])}" if data["sample_bytes"] < state else ""
    parts: list[RenderableType] = [facts, Text(), Text(f"a state of {size(state)}{sample}"), rows, Text()]
    parts += [Text(line) for line in lines]
    parts += [Text(f"note: {note}", style="yellow") for note in data["notes"]]
    parts += [Text(f"removed {clean(name)}, which a tune that was killed had left") for name in data["cleared"]]
    return Group(*parts, Text(), Text(clean(data["line"]), style="bold", overflow="ignore", no_wrap=True))


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"

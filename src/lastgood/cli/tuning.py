"""`lastgood tune`: measure the disk beside a run, choose settings for it, and print the line to paste.

The formulas are in policy/tune.py, and run/measure.py measures.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from ..limits import SLOTS_BESIDE
from ..policy import tune as settings
from ..policy.retention import KEEP
from ..run import access, measure, scratch
from ..units import size
from .answer import Answer
from .arguments import Json, Run, bytes_of, fraction, positive
from .terminal import clean, progress
from .texts import new_table, plural

SCATTER = 1.5
"""slowest divided by quickest measurement; above it a note says that the figures are doubtful"""


def tune(
    run: Run,
    *,
    state_bytes: Annotated[
        int,
        typer.Option(metavar="SIZE", parser=bytes_of, help="What one save holds: 1.5GB.", show_default=False),
    ],
    step_seconds: Annotated[
        float,
        typer.Option(metavar="SECONDS", parser=positive, help="One step, no save.", show_default=False),
    ],
    memory: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            parser=bytes_of,
            help="Bound of the staging memory; without it, one state.",
            show_default=False,
        ),
    ] = None,
    disk: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            parser=bytes_of,
            help="Bound of the run on the disk; without it, what is free.",
            show_default=False,
        ),
    ] = None,
    overhead: Annotated[
        float, typer.Option(metavar="PART", parser=fraction, help="By how much saving may slow training.")
    ] = 0.03,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller samples: some 20 s instead of 120 at most.")] = False,
    as_json: Json = False,
) -> Answer:
    """Measure this disk and memory beside RUN, and say how often to save and with which settings.

    RUN need not exist. Everything that is written is removed; run it while nothing else is at work here.
    """
    run = access.directory(run)
    free = shutil.disk_usage(scratch.parent_folder(run)).free
    job = Job(run, state_bytes, step_seconds, memory or state_bytes, disk or free, overhead)
    cleared, found = _measured(job, measure.QUICK if quick else measure.FULL)
    data = {**_answer(job, found), "notes": _notes(job, found, free if disk else None), "cleared": cleared}
    return Answer(data, tuned_view(data))


@dataclass(frozen=True)
class Job:
    """What settings are chosen for. `overhead`: the fraction by which saving may slow training."""

    run: str
    state_bytes: int
    step_seconds: float
    memory_bytes: int
    disk_bytes: int
    overhead: float

    def kept(self, in_flight: int) -> int:
        """How many generations the disk holds beside the slots for saves in flight; may be negative."""
        return self.disk_bytes // self.state_bytes - in_flight - SLOTS_BESIDE


def _measured(job: Job, effort: measure.Effort) -> tuple[list[str], measure.Figures]:
    """Names of earlier measurements' directories that were removed, and the figures.

    Raises Refused, NoSpace, and what opening and writing raise.
    """
    allowed = settings.candidates(job.memory_bytes, job.disk_bytes, job.state_bytes)
    bounds = measure.bounds(allowed, job.state_bytes, effort)
    cleared = scratch.clear(job.run)
    print(
        f"lastgood: measuring beside {clean(job.run)}: at most {size(bounds.written_bytes)} written, "
        f"{size(bounds.at_once_bytes)} of it at a time; about {bounds.limit_seconds:.0f} s at most",
        file=sys.stderr,
    )
    # Nobody saves more often than once in a step, as long as the step may become.
    enough_seconds = (1 + job.overhead) * job.step_seconds
    with progress("measuring", bounds.written_bytes) as count_bytes:
        return cleared, measure.figures(
            job.run, allowed, job.state_bytes, job.memory_bytes, effort, enough_seconds, count_bytes
        )


def _answer(job: Job, found: measure.Figures) -> dict[str, Any]:
    setting, tw, c = found.chosen.setting, found.write_seconds, found.contention_seconds
    steps = settings.interval_steps(tw, setting.in_flight, job.overhead, job.step_seconds, c)
    without_contention = settings.interval_steps(tw, setting.in_flight, job.overhead, job.step_seconds)
    return {
        "place": job.run,
        "state_bytes": job.state_bytes,
        "step_seconds": job.step_seconds,
        "memory_bytes": job.memory_bytes,
        "disk_bytes": job.disk_bytes,
        "overhead": job.overhead,
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
        "interval_by": "copying" if steps > without_contention else "writing",
        "expected_overhead": settings.expected_overhead(steps, tw, setting.in_flight, job.step_seconds, c),
        "recovery_bound_seconds": settings.recovery_bound_seconds(
            found.load_seconds, steps, job.step_seconds, setting.in_flight, tw
        ),
        "line": _line(job, steps, setting),
    }


def _line(job: Job, steps: int, setting: settings.Setting) -> str:
    """The line of Python that opens the run with these settings."""
    keep = job.kept(setting.in_flight)
    fewer = f", retention=lastgood.Keep(last={keep})" if 1 <= keep < KEEP.last else ""
    path = json.dumps(job.run, ensure_ascii=False)
    return (
        f"lastgood.Checkpointer({path}, state, cadence=lastgood.Every(steps={steps}), in_flight={setting.in_flight}, "
        f"writers={setting.writers}, chunk={setting.chunk_bytes:_}, memory={job.memory_bytes:_}{fewer})"
    )


def _notes(job: Job, found: measure.Figures, free_bytes: int | None) -> list[str]:
    """What to know about the figures. `free_bytes`: of the disk, None where that is `job.disk_bytes`."""
    notes, keep = [], job.kept(found.chosen.setting.in_flight)
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
    if free_bytes is not None and job.disk_bytes > free_bytes:
        notes.append(f"only {size(free_bytes)} are free now")
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

"""`lastgood bench interval`: training throughput at each interval between saves, and the time of recovery after kills.

One measurement consists of a few steps without saves, the timed steps with saves, and a few steps without saves again,
in one process on one workload; the result is the ratio of their times. Policies and intervals alternate in rounds, so
that a drift of the machine's speed affects all of them. The timed steps begin with a save and end just before the next
one is due, so that as many saves are under way at the end as at the beginning.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import recovery
from .journal import Journal, rotated
from .models import Workload
from .policies import POLICIES, bound_seconds
from .policy import Nothing, Policy, Settings
from .report import Progress, Report, hardware

if TYPE_CHECKING:
    pass
from .interval_tables import (
    Row,
    draw_recovery,
    draw_throughput,
    processor_parts,
    recovery_table,
    select,
    throughput_tables,
)
from .usage import resident_bytes, stored_bytes, working_place

PLAIN_STEPS = 4
"""The number of steps without saves before, and after, the timed steps."""


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    `scale` and `work` are shares of the networks' parameters and of their batches. At least `least_steps` steps are
    timed. `kills` is the number of kills for each policy and interval, with the first model.
    """

    out: Path
    place: Path | None = None
    models: Sequence[str] = ("gpt2-124m",)
    policies: Sequence[str] = tuple(POLICIES)
    intervals: Sequence[int] = (1, 10, 25, 50, 100)
    scale: float = 1.0
    work: float = 1.0
    rounds: int = 5
    least_steps: int = 10
    kills: int = 3
    device: str = "cpu"
    settings: Settings = field(default_factory=Settings)

    def key(self, model: str, policy: str, interval: int) -> dict[str, Any]:
        settings = list(self.settings)
        named = {"model": model, "policy": policy, "interval": interval, "scale": self.scale, "work": self.work}
        return {**named, "least_steps": self.least_steps, "device": self.device, "settings": settings}


def run(options: Options, progress: Progress) -> list[Row]:
    """Take the measurements that are missing in the journal in `out`; returns all rows, also those of earlier runs."""
    journal = Journal(options.out / "interval.journal.jsonl", {"hardware": hardware()})
    rows: list[Row] = []
    for model in options.models:
        rows += _throughput(options, model, journal, progress)
    if options.kills:
        rows += _recovery(options, options.models[0], journal, progress, rows)
    return rows


def _throughput(options: Options, model: str, journal: Journal, progress: Progress) -> list[Row]:
    rows: list[Row] = []
    names = ["no saves", *options.policies]
    workload: Workload | None = None
    total, done = options.rounds * len(names) * len(options.intervals), 0
    for number in range(options.rounds):
        for name in rotated(names, number):
            keys = [{**options.key(model, name, one), "round": number} for one in options.intervals]
            known = [journal.get(kind="throughput", **key) for key in keys]
            if None in known:
                if workload is None:
                    workload = Workload(model, options.scale, options.work, options.device)
                    for _ in range(PLAIN_STEPS):
                        _plain_step(workload)  # not measured: the first steps fault in their memory
                with working_place(options) as place:
                    before = resident_bytes()
                    policy = _opened(name, workload, place, options.settings)
                    step = 0
                    for at, key in enumerate(keys):
                        if known[at] is None:
                            found = _segment(
                                workload, policy, key["interval"], options.least_steps, step, place, before
                            )
                            step = found.pop("last_step")
                            known[at] = journal.put(found, kind="throughput", **key)
                            slow = 100 * found["slowdown"]
                            what = f"{model}, {name}, every {key['interval']}"
                            progress(
                                f"[{done + at + 1}/{total}] {what}: {slow:+.1f} %, save {found['save_seconds']:.2f} s"
                            )
                    policy.close()
            done += len(keys)
            rows += [{**key, "kind": "throughput", **one} for key, one in zip(keys, known, strict=True) if one]
    return rows


def _opened(name: str, workload: Workload, place: Path, settings: Settings) -> Policy:
    return Nothing() if name == "no saves" else POLICIES[name](workload, place, settings, None)


def _segment(
    workload: Workload, policy: Policy, interval: int, least: int, step: int, place: Path, memory_before: int
) -> dict[str, Any]:
    """Take one measurement; `step` is the last step that was saved."""
    policy.wait()
    before = [_plain_step(workload) for _ in range(PLAIN_STEPS)]
    begun, step = time.perf_counter(), step + 1
    policy.save(step)
    policy.fence()
    policy.wait()
    alone = time.perf_counter() - begun  # the time of a save, with its upkeep, while no step is computed

    filling = 0 if alone < interval * statistics.median(before) else policy.in_flight + 1
    for _ in range(filling):
        step = _period(workload, policy, interval, step, [], [], [], lambda: None)
    steps: list[float] = []
    waits: list[float] = []
    fences: list[float] = []
    spent = _behind_seconds()
    already, memory, stored = len(policy.saved), 0, 0

    def weigh() -> None:
        nonlocal memory, stored
        memory, stored = max(memory, resident_bytes(policy.processes())), max(stored, stored_bytes(place))

    for _ in range(max(1, math.ceil(least / interval))):
        step = _period(workload, policy, interval, step, steps, waits, fences, weigh)
    policy.wait()
    saves = [one.seconds for one in policy.saved[already:]]
    behind = {name: (now - spent.get(name, 0.0)) / len(waits) for name, now in _behind_seconds().items()}
    after = [_plain_step(workload) for _ in range(PLAIN_STEPS)]
    plain = statistics.mean(before + after)
    with_saves = sum(steps) / (len(waits) * interval)
    return {
        "plain_step_seconds": plain,
        "step_seconds": with_saves,
        "slowdown": with_saves / plain - 1,
        "stall_seconds": max(0.0, (with_saves - plain) * interval),
        "wait_seconds": waits,
        "fence_seconds": fences,
        "save_seconds": statistics.median(saves or [alone]),
        "saves": len(saves),
        "alone_seconds": alone,
        "behind_seconds": {name: one for name, one in behind.items() if one > 0.001},
        "memory_bytes": max(0, memory - memory_before),
        "stored_bytes": stored,
        "last_step": step,
    }


def _period(
    workload: Workload,
    policy: Policy,
    interval: int,
    step: int,
    steps: list[float],
    waits: list[float],
    fences: list[float],
    weigh: Callable[[], None],
) -> int:
    """Run a save and the steps until the next one, and append the seconds of each to the lists.

    `weigh` is called after each step and is not timed.
    """

    def fence() -> None:
        at = time.perf_counter()
        policy.fence()
        fences.append(time.perf_counter() - at)

    step += interval
    begun = time.perf_counter()
    policy.save(step)
    waits.append(time.perf_counter() - begun)
    for _ in range(interval):
        workload.step(fence)
        steps.append(time.perf_counter() - begun)
        weigh()
        begun = time.perf_counter()
    return step


def _behind_seconds() -> dict[str, float]:
    """Processor seconds of the other threads that Python has started in this process, by name."""
    found: dict[str, float] = {}
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.ident is not None:
            name = thread.name.partition("_")[0]
            seconds = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            found[name] = found.get(name, 0.0) + seconds
    return found


def _plain_step(workload: Workload) -> float:
    begun = time.perf_counter()
    workload.step(lambda: None)
    return time.perf_counter() - begun


def _recovery(options: Options, model: str, journal: Journal, progress: Progress, measured: Sequence[Row]) -> list[Row]:
    rows: list[Row] = []
    total, done = options.kills * len(options.policies) * len(options.intervals), 0
    for number in range(options.kills):
        for name in options.policies:
            for interval in options.intervals:
                done += 1
                key = {**options.key(model, name, interval), "kill": number}
                known = journal.get(kind="recovery", **key)
                if known is None:
                    with working_place(options) as place:
                        spec = recovery.Spec(
                            model,
                            options.scale,
                            options.work,
                            options.device,
                            name,
                            interval,
                            str(place),
                            options.settings,
                        )
                        save = _median(measured, model, name, interval, "save_seconds")
                        step = _median(measured, model, name, interval, "plain_step_seconds")
                        found = recovery.killed_and_restarted(spec, number, save / step)
                    limit = bound_seconds(name, interval, step, save, found["load_seconds"], options.settings.in_flight)
                    known = journal.put({**found, "bound_seconds": limit}, kind="recovery", **key)
                    took = f"{known['recovery_seconds']:.2f} s (at most {limit:.2f})"
                    progress(f"[{done}/{total}] {model}, {name}, every {interval}: recovered in {took}")
                rows.append({**key, "kind": "recovery", **known})
    return rows


def _median(rows: Sequence[Row], model: str, policy: str, interval: int, value: str) -> float:
    return statistics.median(row[value] for row in select(rows, model=model, policy=policy, interval=interval))


def report(rows: Sequence[Row], options: Options) -> Report:
    tables, notes, figures = [], [], {}
    for model in options.models:
        tables += throughput_tables(rows, options, model)
    figures["throughput"] = lambda: draw_throughput(rows, options)
    if options.kills:
        tables.append(recovery_table(rows, options, options.models[0]))
        figures["recovery"] = lambda: draw_recovery(rows, options, options.models[0])
    notes.append(
        "slowdown: seconds of a step with saves / without, minus 1, both measured in one process within a minute; "
        "`no saves` shows how much that ratio varies on this machine by itself"
    )
    notes.append(
        "processor: seconds of one core that the background threads take for a save, verification and deletion "
        "included: " + "; ".join(processor_parts(rows, name) for name in options.policies)
    )
    notes.append(
        "memory: anonymous and shared pages beyond those of the training loop, with those of the peer process and "
        "without the page cache"
    )
    if options.kills:
        notes.append(
            "recovery: loading, and repeating the steps up to that of the kill; the time of starting Python, torch and "
            "the network is in the column restart instead. The bound is computed from the medians of t and Tw here"
        )
    settings = options.settings
    return Report(
        name="interval" if options.device == "cpu" else "interval-gpu",
        title="Training throughput at each interval between saves",
        about=(
            f"Medians of {options.rounds} interleaved rounds, (least-most). Scale {options.scale:g} of the parameters, "
            f"{options.work:g} of the batch; {settings.in_flight} saves in flight, {settings.writers} writers each, "
            f"chunks of {settings.chunk_bytes >> 20} MiB."
        ),
        tables=tables,
        rows=rows,
        notes=notes,
        figures=figures,
    )

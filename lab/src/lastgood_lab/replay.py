"""Spot traces, replayed: what a policy gets done when its machines go and come. Pure: no clock, no files.

Two counts stand side by side. *Event by event*: each change of the trace is a failure at its own time; training goes
back to the newest state that was durable by then, and restarts. *The published formula* (PCcheck, ASPLOS'25, section
5.2.3 and its artifact): every failure costs the average of its recovery bound, wherever it falls.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Trace(NamedTuple):
    """Change points of a cluster: `times` (seconds, ascending, from 0) and `alive` from then on; `seconds` in all."""

    times: list[float]
    alive: list[int]
    seconds: float

    def drops(self) -> list[float]:
        """When machines went."""
        return [at for at, before, now in self._changes() if now < before]

    def changes(self) -> list[float]:
        """When machines went or came: where a job must roll back that cannot grow without a restart."""
        return [at for at, _, _ in self._changes()]

    def _changes(self) -> list[tuple[float, int, int]]:
        pairs = zip(self.times[1:], self.alive, self.alive[1:], strict=False)
        return [(at, before, now) for at, before, now in pairs if now != before]


def parse(text: str) -> Trace:
    """Read either kind of trace. Raises ValueError for anything else.

    `,Time,GPUs`: samples of how many were alive; the tear-down at its end is cut off. `time_ms,add|remove,node`:
    events; the first moment's additions are the start.
    """
    rows = [row for row in csv.reader(text.splitlines()) if row]
    if rows and rows[0][1:] == ["Time", "GPUs"]:
        return without_teardown([(float(row[1]), int(row[2])) for row in rows[1:]])
    if rows and len(rows[0]) == 3 and rows[0][1] in ("add", "remove"):
        return _from_events([(float(row[0]) / 1000, 1 if row[1] == "add" else -1) for row in rows])
    raise ValueError("neither `,Time,GPUs` samples nor `time_ms,add|remove,node` events")


def without_teardown(samples: Sequence[tuple[float, int]]) -> Trace:
    """A trace of samples without the fall to zero at its end, and without the rows on the way down to it."""
    end = len(samples)
    while end and samples[end - 1][1] == 0:
        end -= 1
    if end < len(samples):
        while end > 1 and samples[end - 1][1] < samples[end - 2][1]:
            end -= 1
    kept = samples[:end]
    start = kept[0][0]
    return Trace([at - start for at, _ in kept], [alive for _, alive in kept], kept[-1][0] - start)


def artifact_count(samples: Sequence[int]) -> int:
    """Failures as the paper's artifact counts them: sum(|change| // 4), from 0 before the start, tear-down included."""
    return sum(abs(now - before) // 4 for before, now in zip([0, *samples], samples, strict=False))


def _from_events(events: Sequence[tuple[float, int]]) -> Trace:
    moments: dict[float, int] = {}
    for at, change in events:
        moments[at] = moments.get(at, 0) + change
    times = sorted(moments)
    alive, now = [], 0
    for at in times:
        now += moments[at]
        alive.append(now)
    return Trace([at - times[0] for at in times], alive, times[-1] - times[0])


# ---- what a policy costs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """What one policy at one interval was measured to cost, in seconds.

    `stall_seconds`: what a save adds to the loop; `save_seconds` (Tw): from its call until it is durable;
    `restart_seconds`: from a failure until loading begins; `load_seconds` (l).
    """

    policy: str
    interval: int
    step_seconds: float
    stall_seconds: float
    save_seconds: float
    load_seconds: float
    restart_seconds: float = 0.0
    in_flight: int = 1

    @property
    def period_seconds(self) -> float:
        """One save and the steps until the next."""
        return self.interval * self.step_seconds + self.stall_seconds


def ideal(costs: Costs) -> Costs:
    """The same interval with saves that cost nothing and are durable at once."""
    return Costs("ideal", costs.interval, costs.step_seconds, 0.0, 0.0, costs.load_seconds, costs.restart_seconds)


class Outcome(NamedTuple):
    """`steps` that count at the end, steps `redone`, and the share of the ideal throughput without any failure."""

    steps: int
    redone: int
    failures: int
    goodput: float


def replay(failures: Iterable[float], seconds: float, costs: Costs) -> Outcome:
    """Event by event: what is done `seconds` after the start when training dies at each of `failures`.

    A save of step n begins when n is completed and is durable `save_seconds` later, unless training died before.
    After a failure the newest durable step is restored, `restart_seconds + load_seconds` later; one that comes in a
    restart restarts the restart.
    """
    base, begun, redone, count = 0, 0.0, 0, 0
    for failed in sorted(one for one in failures if 0 < one < seconds):
        count += 1
        done = _steps(failed - begun, costs)
        durable = _durable(failed - begun, costs, done)
        redone += done - durable
        base += durable
        begun = failed + costs.restart_seconds + costs.load_seconds
    steps = base + _steps(seconds - begun, costs)
    return Outcome(steps, redone, count, steps * costs.step_seconds / seconds)


def _steps(seconds: float, costs: Costs) -> int:
    """Steps completed so long after a start. The save of a period delays the steps after it."""
    if seconds < 0:
        return 0
    first = costs.interval * costs.step_seconds
    if seconds < first:
        return math.floor(seconds / costs.step_seconds + 1e-9)
    periods, rest = divmod(seconds - first, costs.period_seconds)
    within = max(0.0, rest - costs.stall_seconds) / costs.step_seconds
    return costs.interval * (1 + int(periods)) + min(costs.interval, math.floor(within + 1e-9))


def _durable(seconds: float, costs: Costs, done: int) -> int:
    """The newest step whose save was durable so long after a start; 0: where it started from."""
    first = costs.interval * costs.step_seconds + costs.save_seconds
    if seconds < first:
        return 0
    saves = 1 + math.floor((seconds - first) / costs.period_seconds + 1e-9)
    return min(saves * costs.interval, done)


def published(failures: int, seconds: float, costs: Costs) -> float:
    """The share of the ideal throughput by the published formula: the average redo for every failure, the rest useful.

    Average redo: f t for CheckFreq and Gemini, f t / 2 for those that stop, f t / 2 + t min(Tw / t, N f) / 2 for
    PCcheck and ours; loading, and here restarting, in each.
    """
    redo = costs.load_seconds + costs.restart_seconds + _average_redo(costs)
    useful = max(0.0, seconds - failures * redo)
    return useful / seconds * costs.interval * costs.step_seconds / costs.period_seconds


def _average_redo(costs: Costs) -> float:
    window = costs.interval * costs.step_seconds
    if costs.policy in ("CheckFreq", "Gemini", "DCP async"):
        return window
    if costs.policy in ("traditional", "GPM", "ideal"):
        return window / 2
    return window / 2 + min(costs.save_seconds, costs.in_flight * window) / 2


COUNTS: dict[str, Callable[[Trace], list[float]]] = {
    "drops only": Trace.drops,
    "drops and rises": Trace.changes,
}

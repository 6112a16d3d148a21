"""Replays spot traces: how many steps a policy completes while machines leave and join. Uses no clock and no files.

Goodput is computed in two ways. *Event by event*: each change of the trace is a failure at its own time, after which
training restarts from the newest state that was durable at that time. *The published formula* (PCcheck, ASPLOS'25,
section 5.2.3 and its artifact): every failure costs the average of the policy's recovery bound, whenever it happens.
"""

from __future__ import annotations

import csv
import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lastgood.errors import Refused


class Trace(NamedTuple):
    """Sizes of a cluster over time.

    `alive[i]` machines (or GPUs) are alive from `times[i]` on, in ascending seconds from 0; the trace lasts `seconds`.
    """

    times: list[float]
    alive: list[int]
    seconds: float

    def drops(self) -> list[float]:
        """The times at which the number of machines fell."""
        return [at for at, before, now in self._changes() if now < before]

    def changes(self) -> list[float]:
        """The times at which the number of machines fell or rose: a job that cannot grow in place restarts at each."""
        return [at for at, _, _ in self._changes()]

    def _changes(self) -> list[tuple[float, int, int]]:
        pairs = zip(self.times[1:], self.alive, self.alive[1:], strict=False)
        return [(at, before, now) for at, before, now in pairs if now != before]


CHANGES = {"add": 1, "remove": -1}
"""an event of a trace -> the change of the number of machines"""


def parse(text: str) -> Trace:
    """Parse a trace in one of two CSV formats. Raises ValueError for any other text, with the line that is wrong.

    `,Time,GPUs`: samples of the number of GPUs that are alive; the tear-down at the end is cut off.
    `time_ms,add|remove,node`: events; the additions at the first time are the initial size.
    """
    rows = _numbered(text)
    if not rows:
        raise ValueError("it has no lines")
    first, head = rows[0]
    if head[1:] == ["Time", "GPUs"]:
        samples = [_read(_sample, line, row) for line, row in rows[1:]]
        for (line, _), (before, _), (at, _) in zip(rows[2:], samples, samples[1:], strict=False):
            if at < before:
                raise ValueError(f"line {line}: {at:g} s come after {before:g} s")
        trace = without_teardown(samples)
    elif len(head) == 3 and head[1] in CHANGES:
        trace = _from_events([_read(_event, line, row) for line, row in rows])
    else:
        begin = ",".join(head)[:80]
        what = "neither `,Time,GPUs` samples nor `time_ms,add|remove,node` events"
        raise ValueError(f"line {first}: {begin!r} begins {what}")
    if trace.seconds <= 0:
        raise ValueError(f"it lasts {trace.seconds:g} s: its last time must be later than its first")
    return trace


def _numbered(text: str) -> list[tuple[int, list[str]]]:
    """The rows of a CSV text that are not blank, each with the number of its line."""
    reader = csv.reader(text.splitlines())
    try:
        return [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error}") from error


def _read(kind: Callable[[list[str]], tuple[float, int]], line: int, row: list[str]) -> tuple[float, int]:
    try:
        if len(row) != 3:
            raise ValueError(f"{len(row)} fields, where 3 are expected")
        return kind(row)
    except ValueError as error:
        raise ValueError(f"line {line}: {error}") from error


def _sample(row: list[str]) -> tuple[float, int]:
    """The seconds and the number of GPUs of a row of samples."""
    if not row[2].strip().isdecimal():
        raise ValueError(f"{row[2]!r} is no number of GPUs")
    return _time(row[1]), int(row[2])


def _event(row: list[str]) -> tuple[float, int]:
    """The seconds of an event and the change of the number of machines."""
    if row[1] not in CHANGES:
        raise ValueError(f"{row[1]!r} is neither add nor remove")
    return _time(row[0]) / 1000, CHANGES[row[1]]


def _time(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"{text!r} is no time")
    return found


def without_teardown(samples: Sequence[tuple[float, int]]) -> Trace:
    """Make a trace of samples, without the zeroes at the end and without the descending samples just before them.

    Raises ValueError if no sample has a GPU.
    """
    end = len(samples)
    while end and samples[end - 1][1] == 0:
        end -= 1
    if not end:
        raise ValueError("it has no samples in which a GPU is alive")
    if end < len(samples):
        while end > 1 and samples[end - 1][1] < samples[end - 2][1]:
            end -= 1
    kept = samples[:end]
    start = kept[0][0]
    return Trace([at - start for at, _ in kept], [alive for _, alive in kept], kept[-1][0] - start)


def artifact_count(samples: Sequence[int]) -> int:
    """Count failures as the paper's artifact does: sum(|change| // 4), starting from 0 and with the tear-down."""
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


# ---- costs of a policy ---------------------------------------------------------------------------------------


STOPPING = ("traditional", "GPM", "ideal")
ONE_IN_FLIGHT = ("CheckFreq", "Gemini", "DCP async")
SEVERAL_IN_FLIGHT = ("PCcheck", "lastgood", "lastgood-slots")
KNOWN = (*STOPPING, *ONE_IN_FLIGHT, *SEVERAL_IN_FLIGHT)
"""the policies, in groups that have one published formula each"""


@dataclass(frozen=True)
class Costs:
    """The measured costs of one policy at one interval (in steps).

    `stall_seconds` is the time by which one save delays the loop. `save_seconds` (Tw in the paper) is the time from
    the call of a save until it is durable. `restart_seconds` is the time from a failure until loading begins, and
    `load_seconds` (l in the paper) that of loading. `in_flight` is the number of saves that may be under way at once.
    Raises Refused for a policy for which no formula is known.
    """

    policy: str
    interval: int
    step_seconds: float
    stall_seconds: float
    save_seconds: float
    load_seconds: float
    restart_seconds: float = 0.0
    in_flight: int = 1

    def __post_init__(self) -> None:
        if self.policy not in KNOWN:
            names = {name.lower(): name for name in KNOWN}
            near = [f"Did you mean {names[one]}?" for one in difflib.get_close_matches(self.policy.lower(), names, 1)]
            raise Refused(
                f"there is no policy {self.policy!r}",
                safe="Nothing was computed.",
                todo=" ".join([*near, f"The policies are {', '.join(KNOWN)}."]),
            )

    @property
    def period_seconds(self) -> float:
        """Seconds of one save's stall and of the steps until the next save."""
        return self.interval * self.step_seconds + self.stall_seconds


def ideal(costs: Costs) -> Costs:
    """The costs of the same interval with saves that take no time and are durable at once."""
    return Costs("ideal", costs.interval, costs.step_seconds, 0.0, 0.0, costs.load_seconds, costs.restart_seconds)


class Outcome(NamedTuple):
    """The result of a replay.

    `steps` are the steps that count at the end, `redone` those that were lost and repeated, and `goodput` is the
    throughput as a share of that without failures and without saves.
    """

    steps: int
    redone: int
    failures: int
    goodput: float


def replay(failures: Iterable[float], seconds: float, costs: Costs) -> Outcome:
    """Return the outcome of `seconds` of training that dies at each time in `failures`, event by event.

    The save of step n begins when step n is completed and is durable `save_seconds` later, unless training dies before.
    After a failure, training continues from the newest durable step `restart_seconds + load_seconds` later; a failure
    during a restart begins the restart again.
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
    """The number of steps completed `seconds` after a start. A save delays the steps after it."""
    if seconds < 0:
        return 0
    first = costs.interval * costs.step_seconds
    if seconds < first:
        return math.floor(seconds / costs.step_seconds + 1e-9)
    periods, rest = divmod(seconds - first, costs.period_seconds)
    within = max(0.0, rest - costs.stall_seconds) / costs.step_seconds
    return costs.interval * (1 + int(periods)) + min(costs.interval, math.floor(within + 1e-9))


def _durable(seconds: float, costs: Costs, done: int) -> int:
    """The newest step whose save is durable `seconds` after a start; 0 means the step it started from."""
    first = costs.interval * costs.step_seconds + costs.save_seconds
    if seconds < first:
        return 0
    saves = 1 + math.floor((seconds - first) / costs.period_seconds + 1e-9)
    return min(saves * costs.interval, done)


def published(failures: int, seconds: float, costs: Costs) -> float:
    """The goodput by the published formula: every failure costs the average recovery time, and the rest is useful.

    With interval f and step time t, the average time of repeated steps is f t for CheckFreq, Gemini and DCP async,
    f t / 2 for policies that stop the loop, and f t / 2 + t min(Tw / t, N f) / 2 for PCcheck and lastgood (N saves in
    flight). Loading is added to each, and here the restart too, which the paper leaves out.
    """
    redo = costs.load_seconds + costs.restart_seconds + _average_redo(costs)
    useful = max(0.0, seconds - failures * redo)
    return useful / seconds * costs.interval * costs.step_seconds / costs.period_seconds


def _average_redo(costs: Costs) -> float:
    window = costs.interval * costs.step_seconds
    if costs.policy in ONE_IN_FLIGHT:
        return window
    if costs.policy in STOPPING:
        return window / 2
    return window / 2 + min(costs.save_seconds, costs.in_flight * window) / 2


COUNTS: dict[str, Callable[[Trace], list[float]]] = {
    "drops only": Trace.drops,
    "drops and rises": Trace.changes,
}

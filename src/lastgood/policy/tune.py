"""How many saves in flight, how many writers, which chunk size and how often to save, for a machine and a budget. Pure.

Symbols
    t   `step_seconds`: duration of one step without a save
    Tw  `write_seconds`: from the first copied byte of a save to its commit, while N saves are in flight
    N   `in_flight`; p writers of each save; b bytes of a chunk
    m, M, S  bytes of the state, of the staging memory, of the disk
    c   `contention_seconds`: how long one save delays the steps that run beside it
    q   1 + `overhead`, the fraction by which saving may slow training (0.03)
    f   steps between two saves
    l   `load_seconds`: how long a restore reads

Source of the formulas that name the paper: PCcheck (ASPLOS'25), sections 3.4 and 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from ..errors import Refused
from ..limits import CHUNK_BYTES, PAGE_BYTES, SLOTS_BESIDE, STAGING_CHUNKS
from .arguments import require_positive
from .interval import Interval, Rule

WRITERS = (1, 2, 3, 4)
CHUNK_CHOICES = (CHUNK_BYTES // 2, CHUNK_BYTES, 2 * CHUNK_BYTES)
MOST_IN_FLIGHT = 8
"""with more, the memory bound leaves each save too little memory, and no disk that was measured gained speed"""
TOLERANCE = 0.10
"""a setting that is slower by no more than this fraction counts as equal: noise justifies neither memory nor threads"""


def interval_steps(
    write_seconds: float, in_flight: int, overhead: float, step_seconds: float, contention_seconds: float = 0.0
) -> int:
    """The least number of steps between saves that keeps training within `overhead`; at least 1.

    Two conditions must hold. The first is the paper's, f >= Tw / (N q t): while one save is written, N intervals of f
    steps pass, each of which may take f q t. If their sum N f q t is at least Tw, a save finds a free place, or waits
    for it no longer than the budget allows. The second one is f >= c / (overhead t): copying and digesting delay the
    steps by c a save, and the budget of f steps is overhead f t.

    The result is the larger of the two, not their sum, because the disk goes on writing while the steps are delayed.
    With copying, f steps take f t + c, so the wait that remains is Tw / N - f t - c. The total loss is
    max(c, Tw / N - f t), and it is at most overhead f t exactly when both conditions hold. Raises Refused.
    """
    rule = Rule(overhead=overhead)
    return _wanted(rule, step_seconds, write_seconds, contention_seconds, in_flight).steps(step_seconds)


def expected_overhead(
    interval_steps: int, write_seconds: float, in_flight: int, step_seconds: float, contention_seconds: float = 0.0
) -> float:
    """The fraction by which saving every f steps slows training: max(c, Tw / N - f t) / (f t). Raises Refused."""
    require_positive(interval_steps=interval_steps, in_flight=in_flight)
    require_positive(write_seconds=write_seconds, step_seconds=step_seconds)
    _require_time(contention_seconds=contention_seconds)
    between = interval_steps * step_seconds
    return max(contention_seconds, write_seconds / in_flight - between) / between


# ---- the cost of a crash ----------------------------------------------------------------------------------------


def recovery_bound_seconds(
    load_seconds: float, interval_steps: int, step_seconds: float, in_flight: int, write_seconds: float
) -> float:
    """Longest recovery, loading and lost steps: l + f t + t min(N f, Tw / t) (PCcheck, section 4.2).

    A crash loses the steps since the last save began, and the steps that ran while the newest durable save was written.
    Raises Refused.
    """
    require_positive(write_seconds=write_seconds, in_flight=in_flight)
    lost = min(in_flight * interval_steps * step_seconds, write_seconds)
    return stop_and_write_bound_seconds(load_seconds, interval_steps, step_seconds) + lost


def stop_and_write_bound_seconds(load_seconds: float, interval_steps: int, step_seconds: float) -> float:
    """The same bound for systems that wait for every save (GPM, a plain torch.save): l + f t. Raises Refused."""
    require_positive(interval_steps=interval_steps, step_seconds=step_seconds)
    _require_time(load_seconds=load_seconds)
    return load_seconds + interval_steps * step_seconds


def one_in_flight_bound_seconds(load_seconds: float, interval_steps: int, step_seconds: float) -> float:
    """The same bound for one save in flight, which may take until the next is due (CheckFreq, Gemini): l + 2 f t."""
    return stop_and_write_bound_seconds(load_seconds, 2 * interval_steps, step_seconds)


# ---- the search for the best setting ----------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Setting:
    """One way to save: N saves in flight, p writers of each, chunks of b bytes."""

    in_flight: int
    writers: int
    chunk_bytes: int

    @property
    def least_bytes(self) -> int:
        """Memory with which no writer waits for a chunk: each save fills one chunk and writes p chunks at a time."""
        return self.in_flight * (self.writers + 1) * self.chunk_bytes


@dataclass(frozen=True)
class Measured:
    """A setting, and Tw of its saves."""

    setting: Setting
    write_seconds: float

    @property
    def seconds_per_save(self) -> float:
        """Tw / N: the average time from the end of one save to the end of the next."""
        return self.write_seconds / self.setting.in_flight


def candidates(memory_bytes: int, disk_bytes: int, state_bytes: int) -> list[Setting]:
    """All settings with N from 1 to S / m - 2 (at most MOST_IN_FLIGHT) that fit into the memory M. Raises Refused."""
    require_positive(memory_bytes=memory_bytes, disk_bytes=disk_bytes, state_bytes=state_bytes)
    slots = disk_bytes // state_bytes
    if slots <= SLOTS_BESIDE:
        raise Refused(
            f"{disk_bytes:,} bytes of disk hold a state of {state_bytes:,} bytes {slots} times",
            safe="Nothing was written.",
            todo=f"Give {(SLOTS_BESIDE + 1) * state_bytes:,} or more: room for one save in flight beside the newest "
            "verified and the newest committed generation.",
        )
    whole = -(-state_bytes // PAGE_BYTES) * PAGE_BYTES
    chunks = sorted({min(b, whole) for b in CHUNK_CHOICES if 2 * min(b, whole) <= memory_bytes})
    chunks = chunks or [memory_bytes // STAGING_CHUNKS // PAGE_BYTES * PAGE_BYTES]
    if chunks[0] == 0:
        raise Refused(
            f"{memory_bytes:,} bytes of memory are less than four pages",
            safe="Nothing was written.",
            todo="Give 1 MiB.",
        )
    most = min(slots - SLOTS_BESIDE, MOST_IN_FLIGHT)
    every = (Setting(n, p, b) for n in range(1, most + 1) for p in WRITERS for b in chunks)
    return [one for one in every if one.least_bytes <= memory_bytes]


def next_setting(
    allowed: Sequence[Setting], measured: Sequence[Measured], enough_seconds: float = 0.0
) -> Setting | None:
    """The setting to measure next, or None at the end of the search.

    One coordinate is searched after the other, not every combination: first the writers, then the chunks, then N with
    the best of both. N rises by one. It stops when Tw / N is at most `enough_seconds` (see `choose`), or when two
    further saves in flight, one after the other, gained nothing.
    """
    done = {one.setting for one in measured}
    alone = [one for one in allowed if one.in_flight == 1]
    chunks = sorted({one.chunk_bytes for one in alone})
    first = [one for one in alone if one.chunk_bytes == chunks[len(chunks) // 2]]
    if todo := [one for one in first if one not in done]:
        return todo[0]
    best = choose([one for one in measured if one.setting in first]).setting
    second = [one for one in alone if one.writers == best.writers]
    if todo := [one for one in second if one not in done]:
        return todo[0]
    best = choose([one for one in measured if one.setting in (*first, *second)]).setting
    tried, chosen = max(one.in_flight for one in done), choose(measured, enough_seconds)
    if tried - chosen.setting.in_flight >= 2 or chosen.seconds_per_save <= enough_seconds:
        return None
    more = [one for one in allowed if one.in_flight == tried + 1]
    fits = [one for one in more if one.writers <= best.writers and one.chunk_bytes <= best.chunk_bytes]
    return max(fits, key=lambda one: (one.chunk_bytes, one.writers), default=None)


def choose(measured: Sequence[Measured], enough_seconds: float = 0.0) -> Measured:
    """The setting with the N that minimises Tw / N; for this N the p and b with the least Tw.

    Among those that are equal within TOLERANCE: the smallest N, then the least memory. A Tw / N below `enough_seconds`
    counts as equal too. `enough_seconds` is q t, the longest that one step may take; a save begins at most once a step.
    """
    if not measured:
        raise Refused(
            "nothing was measured, so no setting can be chosen",
            safe="Nothing was changed.",
            todo="Measure a setting first.",
        )
    least = max(enough_seconds, min(one.seconds_per_save for one in measured) * (1 + TOLERANCE))
    in_flight = min(one.setting.in_flight for one in measured if one.seconds_per_save <= least)
    same = [one for one in measured if one.setting.in_flight == in_flight]
    least = min(one.write_seconds for one in same)
    near = [one for one in same if one.write_seconds <= least * (1 + TOLERANCE)]
    return min(near, key=lambda one: (one.setting.least_bytes, one.setting))


# ---- while training runs ----------------------------------------------------------------------------------------

FIRST_STEPS = 10
"""the interval before the first measurement; if it is too short it grows after the first save. Where saves must be
durable in time it is 1: how long ten steps take is not known"""
RISES_ABOVE = 1.1
"""the interval rises when the wanted one is longer than this many times the interval"""
FALLS_BELOW = 1.5
"""the interval falls when it is longer than this many times the wanted one, plus one step"""
REMEMBERED = 5
"""how many measurements of each kind are kept; their median counts, so two outliers change nothing"""


@dataclass(frozen=True)
class Auto:
    """An interval that follows the measured t and Tw. A frozen record: `adapt` returns its successor.

    How a checkpointer uses it:

        auto = Auto(Rule(overhead=0.03), in_flight=N)           # interval_steps=f* if `lastgood tune` gave one
        step(n):      if auto.due(n, last): save, last = n      # last: step of the last save begun, or restored
        durable save: new = adapt(auto, t, Tw, c, step=n)       # on the training thread, which is at step n
                      if new.interval_steps != auto.interval_steps: log new.reason
                      auto = new

    t: the median time between two calls of `step` since the last `adapt`, of those during which no save was in flight;
    None if there was none. Tw: seconds from the first copied byte until the save is durable. c: the duration of the
    steps from the beginning of that save to the first step after it was durable, less t for each of them and less the
    wait for a free place, divided among the saves that were in flight; at least what the loop waited for this save
    otherwise; None if t was never measured. A save that failed, was dropped or was skipped is not measured.
    """

    rule: Rule = field(default_factory=Rule)
    in_flight: int = 1
    interval_steps: int = FIRST_STEPS
    reason: str = ""
    """the reason of the last change, for the log"""
    recent_step_seconds: tuple[float, ...] = ()
    recent_write_seconds: tuple[float, ...] = ()
    recent_contention_seconds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require_positive(in_flight=self.in_flight, interval_steps=self.interval_steps)

    @classmethod
    def first(cls, rule: Rule, in_flight: int = 1) -> Auto:
        """The record before the first measurement."""
        bounded = math.isfinite(rule.longest_seconds)  # guard: first-save-in-time
        return cls(rule, in_flight, 1 if bounded else FIRST_STEPS)

    def due(self, step: int, last_saved_step: int) -> bool:
        """Whether a save is due after `step`."""
        return step - last_saved_step >= self.interval_steps


def adapt(
    auto: Auto,
    step_seconds: float | None,
    write_seconds: float,
    contention_seconds: float | None,
    *,
    step: int = 0,
    busy_seconds: float | None = None,
) -> Auto:
    """The record after one more durable save. A measurement that could not be made is None. Raises Refused.

    The interval changes only when the wanted interval leaves a band around it. It rises when the wanted one is longer
    by more than a tenth, because then saving costs too much. It falls when the wanted one is shorter by more than a
    third and a step, because until then a longer interval costs no more than some lost work. If every measurement is
    within a tenth of the truth, wanted intervals differ by a factor of at most (1.1 / 0.9)**2 = 1.49, which is below
    FALLS_BELOW, so an interval that has risen does not fall again and cannot oscillate. An interval that follows from
    failures moves less, because it grows with the root of the cost of a save. An interval that is longer than
    `rule.longest_seconds` falls at once.

    It at most doubles at a time, so that a disk that hung for a minute does not stop saving for an hour. It doubles if
    no step was ever free of a save, because then t is unknown; but not beyond `rule.longest_seconds`, by the time of a
    step with a save in flight, `busy_seconds`. `step`: at which it changes, for the reason.
    """
    require_positive(write_seconds=write_seconds)
    if step_seconds is not None:
        require_positive(step_seconds=step_seconds)
    if contention_seconds is not None:
        _require_time(contention_seconds=contention_seconds)
    measured = replace(
        auto,
        recent_step_seconds=_remember(auto.recent_step_seconds, step_seconds),
        recent_write_seconds=_remember(auto.recent_write_seconds, write_seconds),
        recent_contention_seconds=_remember(auto.recent_contention_seconds, contention_seconds),
    )
    now, interval = auto.interval_steps, 2 * auto.interval_steps
    why = "no step was ever free of a save"
    if measured.recent_step_seconds:
        t, tw = median(measured.recent_step_seconds), median(measured.recent_write_seconds)
        c = median(measured.recent_contention_seconds or (0.0,))
        found = _wanted(auto.rule, t, tw, c, auto.in_flight)
        wanted = found.seconds / t
        late = now * t > auto.rule.longest_seconds and found.steps(t) < now  # guard: interval-kept-within-its-bound
        if not late and now <= wanted * FALLS_BELOW + 1 and wanted <= now * RISES_ABOVE:
            return measured
        bounded = "" if wanted <= interval else "; no more than doubled at once"
        interval = min(found.steps(t), interval)
        cost = f"Tw {tw:.3g} s with {auto.in_flight} in flight, {t:.3g} s a step, {c:.3g} s lost to copying a save"
        why = "; ".join(part for part in (cost, str(auto.rule.failures), found.why + bounded) if part)
    elif busy_seconds is not None and interval * busy_seconds > auto.rule.longest_seconds:
        return measured  # guard: unknown-step-stays-within-its-bound
    reason = f"a save every {interval} steps instead of {now} from step {step}: {why}"
    return replace(measured, interval_steps=interval, reason=reason)


# ---- arithmetic and checks ---------------------------------------------------------------------------------


def _wanted(rule: Rule, t: float, tw: float, c: float, n: int) -> Interval:
    """The interval for steps of `t` seconds, and saves with these Tw and c, n in flight."""
    require_positive(write_seconds=tw, in_flight=n, step_seconds=t)
    _require_time(contention_seconds=c)
    found = rule.interval(c, tw, n)
    if not math.isfinite(found.seconds / t):
        raise Refused(
            f"no interval is long enough for Tw {tw} s, {t} s a step and {c} s of copying",
            safe="Nothing was changed.",
            todo="Allow a larger overhead.",
        )
    return found


def _remember(before: tuple[float, ...], one: float | None) -> tuple[float, ...]:
    if one is None:
        return before
    return (*before, one)[-REMEMBERED:]


def _require_time(**numbers: float) -> None:
    for name, one in numbers.items():
        if not 0 <= one < math.inf:
            raise Refused(f"{name} = {one}", safe="Nothing was changed.", todo="Give a number, zero or above.")

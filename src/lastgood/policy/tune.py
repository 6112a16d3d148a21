"""How many saves in flight, how many writers, which chunk, and how often: formulas for a machine and a budget. Pure.

Words: t `step_seconds`, one step without a save; Tw `write_seconds`, from the first copied byte of a save to its commit
with N `in_flight` at once; m the state, M the memory, S the disk, in bytes; `overhead` the slowdown that is allowed
(0.03), q = 1 + overhead. Source, where a paper is named: PCcheck (ASPLOS'25), sections 3.4 and 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from ..errors import Refused
from ..format.layout import PAGE_BYTES

WRITERS = (1, 2, 3, 4)
CHUNK_BYTES = (4 << 20, 8 << 20, 16 << 20)
MOST_IN_FLIGHT = 8
"""beyond it the memory bound leaves each save too little, and no disk measured here still gains"""
SLOTS_BESIDE = 2
"""the newest verified and the newest committed stay while N are in flight"""
TOLERANCE = 0.10
"""what is slower by no more than this counts as equal: noise buys neither memory nor threads"""


def interval_steps(
    write_seconds: float, in_flight: int, overhead: float, step_seconds: float, contention_seconds: float = 0.0
) -> int:
    """The least number of steps between saves that keeps training within `overhead`; at least 1.

    f* = ceil(Tw / (N q t)) is the paper's: with N in flight a save every f steps finds a free slot, or waits no longer
    than the budget allows, when N f q t >= Tw. It counts that wait only. Copying and digesting slow the steps
    themselves, by `contention_seconds` a save, so f >= contention / (overhead t) must hold as well.

    The larger of both, not their sum: f steps that lose c to copying take f t + c, and the disk writes on meanwhile, so
    the wait that is left is Tw / N - f t - c. Lost in all is max(c, Tw / N - f t), which stays within overhead f t just
    when both conditions hold. Raises Refused.
    """
    return _whole(_wanted(write_seconds, in_flight, overhead, step_seconds, contention_seconds))


def expected_overhead(
    interval_steps: int, write_seconds: float, in_flight: int, step_seconds: float, contention_seconds: float = 0.0
) -> float:
    """The part by which saving every so many steps slows training: max(c, Tw / N - f t) / (f t). Raises Refused."""
    _require_positive(interval_steps=interval_steps, in_flight=in_flight)
    _require_positive(write_seconds=write_seconds, step_seconds=step_seconds)
    _require_time(contention_seconds=contention_seconds)
    between = interval_steps * step_seconds
    return max(contention_seconds, write_seconds / in_flight - between) / between


# ---- what a crash costs ------------------------------------------------------------------------------------------


def recovery_bound_seconds(
    load_seconds: float, interval_steps: int, step_seconds: float, in_flight: int, write_seconds: float
) -> float:
    """Longest recovery, loading and lost steps: l + f t + t min(N f, Tw / t) (PCcheck, section 4.2).

    Lost are the steps since the last save began, and those that passed while the newest durable one was written.
    """
    _require_positive(write_seconds=write_seconds, in_flight=in_flight)
    lost = min(in_flight * interval_steps * step_seconds, write_seconds)
    return stop_and_write_bound_seconds(load_seconds, interval_steps, step_seconds) + lost


def stop_and_write_bound_seconds(load_seconds: float, interval_steps: int, step_seconds: float) -> float:
    """Of what waits for its save (GPM, a plain torch.save): l + f t."""
    _require_positive(interval_steps=interval_steps, step_seconds=step_seconds)
    _require_time(load_seconds=load_seconds)
    return load_seconds + interval_steps * step_seconds


def one_in_flight_bound_seconds(load_seconds: float, interval_steps: int, step_seconds: float) -> float:
    """Of a single save in flight that may take until the next one is due (CheckFreq, Gemini): l + 2 f t."""
    return stop_and_write_bound_seconds(load_seconds, 2 * interval_steps, step_seconds)


# ---- what is tried, and what is chosen ---------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Setting:
    """One way to save: N in flight, p writers for each, chunks of b bytes."""

    in_flight: int
    writers: int
    chunk_bytes: int

    @property
    def least_bytes(self) -> int:
        """Memory with which no writer waits for a chunk: every save has one being filled and p being written."""
        return self.in_flight * (self.writers + 1) * self.chunk_bytes


@dataclass(frozen=True)
class Measured:
    """A setting, and the seconds that each of its saves takes while all are in flight."""

    setting: Setting
    write_seconds: float

    @property
    def seconds_per_save(self) -> float:
        """Tw / N: how often a save can end."""
        return self.write_seconds / self.setting.in_flight


def candidates(memory_bytes: int, disk_bytes: int, state_bytes: int) -> list[Setting]:
    """Settings that fit: N from 1 to S/m - 2 (at most MOST_IN_FLIGHT), chunks and writers within M. Raises Refused."""
    _require_positive(memory_bytes=memory_bytes, disk_bytes=disk_bytes, state_bytes=state_bytes)
    slots = disk_bytes // state_bytes
    if slots <= SLOTS_BESIDE:
        raise Refused(
            f"{disk_bytes:,} bytes of disk hold a state of {state_bytes:,} bytes {slots} times",
            safe="Nothing was written.",
            todo=f"Give {(SLOTS_BESIDE + 1) * state_bytes:,} or more: one in flight beside the newest verified "
            "and the newest committed.",
        )
    whole = -(-state_bytes // PAGE_BYTES) * PAGE_BYTES
    chunks = sorted({min(b, whole) for b in CHUNK_BYTES if 2 * min(b, whole) <= memory_bytes})
    chunks = chunks or [memory_bytes // 4 // PAGE_BYTES * PAGE_BYTES]
    if chunks[0] == 0:
        raise Refused(
            f"{memory_bytes:,} bytes of memory are no four pages", safe="Nothing was written.", todo="Give 1 MiB."
        )
    most = min(slots - SLOTS_BESIDE, MOST_IN_FLIGHT)
    every = (Setting(n, p, b) for n in range(1, most + 1) for p in WRITERS for b in chunks)
    return [one for one in every if one.least_bytes <= memory_bytes]


def next_setting(
    allowed: Sequence[Setting], measured: Sequence[Measured], enough_seconds: float = 0.0
) -> Setting | None:
    """What to measure next: writers, then chunks, then N with the best of both; None when no more is worth it.

    Not every combination: one coordinate after the other. N comes last, rises by one, and stops at what is enough
    (see `choose`), or when two more in flight in a row bought nothing.
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
    """N that minimises Tw / N, then p and b; of what is equal within TOLERANCE the fewest, and the least memory.

    Tw / N below `enough_seconds` buys nothing: nobody saves more often than once in q t, a step as it may be slowed.
    """
    if not measured:
        raise Refused("nothing was measured, so nothing can be chosen")
    least = max(enough_seconds, min(one.seconds_per_save for one in measured) * (1 + TOLERANCE))
    in_flight = min(one.setting.in_flight for one in measured if one.seconds_per_save <= least)
    there = [one for one in measured if one.setting.in_flight == in_flight]
    least = min(one.write_seconds for one in there)
    near = [one for one in there if one.write_seconds <= least * (1 + TOLERANCE)]
    return min(near, key=lambda one: (one.setting.least_bytes, one.setting))


# ---- while training runs -----------------------------------------------------------------------------------------

FIRST_STEPS = 10
"""before anything is known; what is too short grows at the first save"""
RISES_ABOVE = 1.1
FALLS_BELOW = 1.5
REMEMBERED = 5
"""measurements of each kind, of which the median counts: two outliers move nothing"""


@dataclass(frozen=True)
class Auto:
    """An interval that follows the measured step time and Tw. One record, replaced and never changed.

    How a checkpointer holds it:

        auto = Auto(overhead=0.03, in_flight=N)                 # interval_steps=f* where `lastgood tune` gave one
        step(n):      if auto.due(n, last): save, last = n      # last: step of the last save begun, or restored
        durable save: new = adapt(auto, t, Tw, c, step=n)       # on the training thread; n: the step it is at
                      if new.interval_steps != auto.interval_steps: log new.reason
                      auto = new

    t: median seconds between calls of `step`, of those since the last `adapt` that no save was in flight in; None
    without any. Tw: seconds from the first copied byte to durable. c: what the steps took from that save's beginning to
    the first one after it was durable, less t for each and less the wait for a free slot, shared by the saves that were
    in flight; None where t was never measured. A save that failed, was dropped or was skipped is no measurement.

    With ranks, one rank adapts with `ahead_steps` > 0 and sends the record to the others: until `holds_from` everyone
    goes by `previous_steps`, so all must have heard of it by that step. `due` is the same everywhere: it asks for steps
    and nothing else.
    """

    overhead: float = 0.03
    in_flight: int = 1
    interval_steps: int = FIRST_STEPS
    ahead_steps: int = 0
    """how long before it holds a change is announced"""
    holds_from: int = 0
    """the step from which `interval_steps` holds"""
    previous_steps: int = 0
    """the interval until then"""
    reason: str = ""
    """of the last change, for the log"""
    recent_step_seconds: tuple[float, ...] = ()
    recent_write_seconds: tuple[float, ...] = ()
    recent_contention_seconds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _require_positive(overhead=self.overhead, in_flight=self.in_flight, interval_steps=self.interval_steps)
        _require_time(ahead_steps=self.ahead_steps)

    def due(self, step: int, last_saved_step: int) -> bool:
        """Whether a save is due after `step`."""
        return step - last_saved_step >= (self.interval_steps if step >= self.holds_from else self.previous_steps)


def adapt(
    auto: Auto,
    step_seconds: float | None,
    write_seconds: float,
    contention_seconds: float | None,
    *,
    step: int = 0,
) -> Auto:
    """What holds after one more durable save; None is what could not be measured. Raises Refused.

    The interval changes only when the one that is wanted leaves a band: it rises when wanted is more than a tenth
    longer, for then the budget is overrun, and falls when wanted is shorter by a third and a step, for that costs no
    more than lost work. While every measurement lies within a tenth of the truth, wanted moves by less than 1.1 / 0.9
    squared = 1.49 in all, so what has risen never falls again and the interval cannot flap. It rises to no more than
    its double at once: a disk that hung for a minute does not stop saving for an hour; and to that where no step was
    ever free of a save. A change that was announced ahead holds first; the next one waits for it.
    """
    _require_positive(write_seconds=write_seconds)
    if step_seconds is not None:
        _require_positive(step_seconds=step_seconds)
    seen = replace(
        auto,
        recent_step_seconds=_remember(auto.recent_step_seconds, step_seconds),
        recent_write_seconds=_remember(auto.recent_write_seconds, write_seconds),
        recent_contention_seconds=_remember(auto.recent_contention_seconds, contention_seconds),
    )
    if step < auto.holds_from:
        return seen
    now, interval = auto.interval_steps, 2 * auto.interval_steps
    why = "no step was ever free of a save"
    if seen.recent_step_seconds:
        t, tw = median(seen.recent_step_seconds), median(seen.recent_write_seconds)
        c = median(seen.recent_contention_seconds or (0.0,))
        wanted = _wanted(tw, auto.in_flight, auto.overhead, t, c)
        if now <= wanted * FALLS_BELOW + 1 and wanted <= now * RISES_ABOVE:
            return seen
        interval = min(_whole(wanted), interval)
        why = f"Tw {tw:.3g} s with {auto.in_flight} in flight, {t:.3g} s a step, {c:.3g} s lost to copying a save"
    holds_from = step + auto.ahead_steps
    reason = (
        f"a save every {interval} steps instead of {now} from step {holds_from}: {why}; {auto.overhead:.2%} allowed"
    )
    return replace(seen, interval_steps=interval, previous_steps=now, holds_from=holds_from, reason=reason)


# ---- steps -------------------------------------------------------------------------------------------------------


def _wanted(tw: float, n: int, overhead: float, t: float, c: float) -> float:
    _require_positive(write_seconds=tw, in_flight=n, overhead=overhead, step_seconds=t)
    _require_time(contention_seconds=c)
    budget = overhead * t
    found = max(tw / n / (t + budget), c / budget) if budget > 0 else math.inf
    if not math.isfinite(found):
        raise Refused(f"no interval is long enough for Tw {tw} s, {t} s a step and {c} s of copying")
    return found


def _whole(steps: float) -> int:
    """Up to a whole number; what a rounding error lifts above one is that one."""
    return max(1, math.ceil(steps * (1 - 1e-12)))


def _remember(before: tuple[float, ...], one: float | None) -> tuple[float, ...]:
    if one is None:
        return before
    _require_time(contention_seconds=one)
    return (*before, one)[-REMEMBERED:]


def _require_positive(**numbers: float) -> None:
    for name, one in numbers.items():
        if not 0 < one < math.inf:  # a NaN is neither
            raise Refused(f"{name} = {one}", safe="Nothing was changed.", todo="Give a number above zero.")


def _require_time(**numbers: float) -> None:
    for name, one in numbers.items():
        if not 0 <= one < math.inf:
            raise Refused(f"{name} = {one}", safe="Nothing was changed.", todo="Give a number, zero or above.")

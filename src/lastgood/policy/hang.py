"""When ranks that show no progress hang, and which of them is behind. Pure.

Every rank shows its steps and phases (io/heartbeat.py). While it trains, a rank may be silent for a multiple of the
longest time that it has needed for a step; before its first step, and in a phase, for a longer time. When one rank of a
job hangs, the others soon wait for it, so what matters is who is behind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .arguments import is_number, require

OWN = "lastgood: "
"""how the names below begin, unlike those of a user's phases"""
START, FIRST_STEP, STEP = f"{OWN}start", f"{OWN}first step", f"{OWN}step"
"""where a rank may hang outside of phases: before its state is restored, before its first step, in a step"""
ARRIVED = f"{OWN}arrived"
"""before its run is open, as far as is known in a call that waits for other ranks"""
END = f"{OWN}end"
"""after its run is closed: another rank has ended, and this one has not"""
RESTORE = f"{OWN}restore"
"""the phase in which a Checkpointer restores"""
SAVE = f"{OWN}save"
"""the phase in which a Checkpointer starts a save, or waits for saves: as long as the places need"""
_WAITS = re.compile(r"/torch/(distributed|autograd|cuda|nn/parallel)/|/lastgood/(coordination|ranks)/")
"""files in which a rank waits for others: collectives, the backward pass that runs those of DDP, and a common save"""
_ARRIVES = re.compile(r"/torch/distributed/|/lastgood/(coordination|ranks)/")
"""those in which it does so before its state is restored: the others may be slow to start, but not yet with a device"""
_SERVES = re.compile(r"/torch/distributed/(rpc|elastic)/")
"""files in which a rank waits for requests, or for processes that it has started: as long as it is used"""
_PYTHON = re.compile(r"/lib/python3\.\d+/(?!site-packages/|dist-packages/)|\"<")
"""files of Python itself"""
_STORE = "/lastgood/ranks/torch_store.py"
"""the file in which a rank waits for the store of torch's process group, which has a longer timeout than a step"""
_LIBRARY = re.compile(rf"/torch/|/lastgood/|{_PYTHON.pattern}")
"""files that are not the user's program"""
_COMPUTES = "/torch/nn/modules/"
"""A rank that is in such a file computes. Frames of DDP and FSDP that wait are inside of it, and are found first."""
STOPPED, TRACED = "T", "t"
LATE_READINGS = 2
"""Others may wait for a rank that so many readings in a row have found in none of the calls that wait."""
_ARRIVAL_POLLS, _LEAST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 100, 0.5, 30.0
"""how often ranks are looked at that have not opened their runs: so many times until the limit"""
_LEAST_USED_SECONDS, _USED_SHARE = 0.05, 0.01
"""The processor time between two looks up to which a rank has waited all the time, in seconds and of the time."""
STATES = {
    STOPPED: "is stopped by a signal",
    TRACED: "is stopped by a debugger",
    "D": "waits for a disk, or another device",
}
"""letter of /proc/PID/stat -> what it says of a rank that hangs"""


@dataclass(frozen=True)
class Limits:
    """How long ranks may show no progress.

    `least_seconds`: in a step at least (default 60.0; 0: ranks are never taken for hung). `times`: in a step, this
    multiple of the longest one so far (default 20.0). `long_seconds`: until the second step after a restore, while
    others wait for a rank that has not opened its run, while a save makes the loop wait, after the run is closed if
    another rank has ended, and in a phase of which none was completed before (default 3600.0). Later phases of the same
    name have `times` the longest one, at least `least_seconds`. `ends_late`: whether a rank that has not opened its run
    ends the attempt once others have waited for it for so long; otherwise it is only reported, because several shorter
    waits in a row look like a long one (default False). Raises Refused for values that cannot be meant.
    """

    least_seconds: float = 60.0
    times: float = 20.0
    long_seconds: float = 3600.0
    ends_late: bool = False

    def __post_init__(self) -> None:
        for name in ("least_seconds", "times", "long_seconds"):
            value = getattr(self, name)
            require(is_number(value) and value >= 0, f"{name}={value!r}", "Give a number of at least 0.")


@dataclass(frozen=True)
class Signs:
    """What one rank shows. Times: seconds of one clock; None: it has not happened.

    `since`: its newest sign of life. `where`: START, ARRIVED, FIRST_STEP, STEP, or the name of the phase that is open.
    `longest_seconds`: the longest time between two steps so far.
    """

    rank: int
    since: float | None
    where: str
    step: int = 0
    longest_seconds: float = 0.0
    stopped: bool = False
    """whether its process is stopped, since `since`"""


@dataclass(frozen=True)
class Silent:
    """A rank that has shown nothing for longer than it may. `limit_seconds`: how long it may. `where`: as in Signs."""

    rank: int
    seconds: float
    limit_seconds: float
    where: str


@dataclass(frozen=True)
class Wait:
    """How long a rank has waited for others before its run is open, as far as it was seen. Times: seconds of one clock.

    `since`: when it was seen first. `until`: when it was seen last. `used_seconds`: the processor time of its main
    thread then.
    """

    since: float
    until: float
    used_seconds: float


@dataclass(frozen=True)
class Stuck:
    """How a rank looked when its job hung.

    `state`: letter of /proc/PID/stat. `stack`: of its main thread, the innermost call first, as faulthandler writes it;
    empty if it could not be had. `threads`: the calls of its other threads.
    """

    signs: Signs
    state: str = "S"
    stack: Sequence[str] = field(default=())
    threads: Sequence[str] = field(default=())


def silent(
    ranks: Sequence[Signs], now: float, limits: Limits, completed: Mapping[str, float], all_known: bool = True
) -> Silent | None:
    """The rank that has been silent for the longest time beyond its limit; None if there is none.

    `completed`: name of a phase -> seconds of the longest one that has ended. `all_known`: whether `ranks` are all of
    the job (default: they are); otherwise one that is not among them may be the one that others wait for.
    """
    if not limits.least_seconds:
        return None
    late = not all_known or any(map(is_late, ranks))
    opened = any(_has_opened(one) and not _is_over(one, now, limits, completed) for one in ranks)
    found = []
    for one in ranks:
        if one.since is None or not _is_over(one, now, limits, completed):
            continue
        # A run is opened by all that train together; ranks that serve these never open one.
        if one.where == ARRIVED and not one.stopped and (opened or not late):  # guard: all-arrived-is-no-late-rank
            continue
        if not any(_may_wait_for(one, other, now, limits, completed) for other in ranks):
            limit = _limit_seconds(one, limits, completed)
            found.append(Silent(one.rank, now - one.since, limit, START if one.stopped else one.where))
    # What may only be reported comes last.
    return max(found, key=lambda one: (one.where != ARRIVED, one.seconds - one.limit_seconds, -one.rank), default=None)


def is_late(one: Signs) -> bool:
    """Whether a rank has not opened its run, and was not seen to wait."""
    return one.where == START and one.since is None


def _has_opened(one: Signs) -> bool:
    """Whether a rank has opened its run, as far as its signs show it."""
    return not one.stopped and one.where != ARRIVED and (one.where != START or one.since is not None)


def _is_over(one: Signs, now: float, limits: Limits, completed: Mapping[str, float]) -> bool:
    """Whether a rank has shown nothing for longer than it may."""
    if one.since is None:
        return False
    return now - one.since > _limit_seconds(one, limits, completed)  # guard: limit-follows-own-steps


def _may_wait_for(one: Signs, other: Signs, now: float, limits: Limits, completed: Mapping[str, float]) -> bool:
    """Whether a rank in a step may wait for another one, which is in a phase that may still last: an evaluation on one
    rank, or a save of which it alone waits for the end."""
    still = other.where in (STEP, ARRIVED)  # guard: hang-beside-unopened-rank-is-found
    if one.where != STEP or still or other.since is None or other.step > one.step:
        return False
    return not _is_over(other, now, limits, completed)  # guard: awaited-phase-may-last


def _limit_seconds(one: Signs, limits: Limits, completed: Mapping[str, float]) -> float:
    if one.stopped:
        return limits.least_seconds
    if one.where == STEP and one.longest_seconds:
        return max(limits.least_seconds, limits.times * one.longest_seconds)
    if one.where in (START, ARRIVED, FIRST_STEP, STEP, SAVE, RESTORE, END) or one.where not in completed:
        return max(limits.least_seconds, limits.long_seconds)
    return max(limits.least_seconds, limits.times * completed[one.where])


def arrival_poll_seconds(limits: Limits) -> float:
    """How often to look whether ranks wait for others before their runs are open."""
    return min(max(limits.long_seconds / _ARRIVAL_POLLS, _LEAST_POLL_SECONDS), _LONGEST_POLL_SECONDS)


def waited(before: Wait | None, one: Stuck, at: float, used_seconds: float) -> Wait | None:
    """How long a rank has waited whose run is not open; None: it does not wait.

    `before`: what was known of it. `one`: how it looked `at` this time, with an empty stack if that is not known.
    `used_seconds`: the processor time of its main thread so far. One that has computed in between waits anew.
    """
    if not one.stack:
        return before
    if not waits(one):
        return None
    if before is None:
        return Wait(at, at, used_seconds)
    if not is_idle(at - before.until, used_seconds - before.used_seconds):  # guard: rank-that-computes-waits-anew
        return Wait(at, at, used_seconds)
    return Wait(before.since, at, used_seconds)


def is_idle(seconds: float, used_seconds: float) -> bool:
    """Whether a rank has done nothing for some seconds. `used_seconds`: the processor time of its main thread then."""
    return used_seconds <= _LEAST_USED_SECONDS + _USED_SHARE * seconds


def behind(ranks: Sequence[Stuck]) -> Stuck:
    """The rank for which the others wait: one that is stopped, else one of an older step, else one that is not inside
    of torch's collectives, nor was seen to wait before its run is open, else the one that was silent for longest.
    """

    def order(one: Stuck) -> tuple[bool, int, bool, float, int]:
        waiting = one.signs.where == ARRIVED or waits(one)
        return one.state not in STATES, one.signs.step, waiting, one.signs.since or 0.0, one.signs.rank

    return min(ranks, key=order)


def awaited(ranks: Sequence[Stuck]) -> Stuck | None:
    """The rank for which others have waited until their timeout. `ranks`: those that have not failed.

    None if all of them wait themselves, so that nothing is known.
    """
    return behind(ranks) if any(one.state in STATES or not waits(one) for one in ranks) else None


def waits(one: Stuck) -> bool:
    """Whether a rank waits for others, as far as is known: whether the library call in which it is may wait."""
    waiting = _ARRIVES if one.signs.where in (START, ARRIVED) else _WAITS
    for call in one.stack:
        if _SERVES.search(call):  # guard: rpc-is-no-collective
            return False
        if waiting.search(call):
            return True
        if _COMPUTES in call or not is_library(call):
            return False
    return not one.stack


def is_library(call: str) -> bool:
    """Whether a call, as faulthandler writes it, is of torch, of this package, or of Python's own modules."""
    return _LIBRARY.search(call) is not None


def described(one: Stuck, silent: Silent | None, ends: bool = True) -> str:
    """What is reported of the rank that is behind: "hangs in ...". `silent`: None: another rank had waited for it.
    `ends`: whether the attempt ends by this (default True)."""
    where = {
        START: "before its state was restored",
        ARRIVED: "before its state was restored",
        FIRST_STEP: f"in the first step after step {one.signs.step}",
        STEP: f"in the step after step {one.signs.step}",
        END: f"after its run was closed, at step {one.signs.step}",
        RESTORE: "while it restores",
        SAVE: f"while it waits for a save, after step {one.signs.step}",
    }.get(one.signs.where, f'in the phase "{one.signs.where}" after step {one.signs.step}')
    unopened = one.signs.where == ARRIVED or is_late(one.signs)
    unopened = unopened and silent is not None and one.state not in STATES
    # Where it waits is in threading.py or selectors.py mostly, which says nothing: who has called that does.
    at = next((call for call in one.stack if not _PYTHON.search(call)), next(iter(one.stack), ""))
    call = f", at {at.strip().removeprefix('File ')}" if at else ""
    state = f": it {STATES[one.state]}" if one.state in STATES else ""
    if not state and _STORE in at:
        state = ": the store of the process group does not answer it"
    elif not state and "/lastgood/" in at and any(_STORE in call for call in one.threads):
        # The main thread waits for a save, and that for the store.
        state = ": a thread of it waits for the store of the process group"
    text = f"{'has not opened its run' if unopened else f'hangs {where}'}{call}{state}"
    if silent is None:
        return f"{text} (others have waited for it until their timeout)"
    times = f"for {silent.seconds:.1f} s; limit {silent.limit_seconds:.1f} s"
    if silent.where == ARRIVED:
        raised = "if it prepares what they need, raise --hang-long-timeout"
        return f"{text} (others have waited {times}; {raised if ends else 'to end such a job, give that limit'})"
    if silent.where != STEP or one.state in (STOPPED, TRACED):
        return f"{text} (no progress {times})"
    if one.signs.where == STEP:
        return f"{text} (no progress {times}; name what takes long with ckpt.phase(), or raise --hang-timeout)"
    return f"{text} (no progress of another rank {times}; if that may last so long, raise --hang-timeout)"

"""The attempts of a job, as records in its run: that each has begun, and, in one of their own, how each has ended.

`lastgood attempts` reads them. A record is never changed. cadence="auto" learns from them how often the job fails, and
a supervisor which failures the job has had that it continues.

A supervisor that is killed, or whose machine is lost, leaves a beginning without an end. The attempts of a run follow
each other, because only one job at a time has it open for writing, so

  1. a beginning is that of an attempt that has ended if a record of an end names it or a newer one (`Stored.begun`);
  2. of those that are left, one is lost if its supervisor lives no more. Where that is seen: on the same machine by
     its process; elsewhere because another process has opened the run for writing since.

The next supervisor records the end of a lost attempt (attempt_records.py). Until then readers find it here.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ..format import commit
from ..io import processes
from ..policy.failures import Known, Life, observed
from ..policy.health import Finding
from ..policy.membership import Spares
from ..policy.recovery import ASKED, HANG, NODE, REMEDIES, STORE, Act, Outcome
from ..ports import Tier
from ..records import Generation, Record
from ..run import side_records

FOLDER, BEGUN = "attempts", "begun"
SUPERVISOR = "supervisor"
"""The kind of the cause of an attempt whose supervisor was lost."""


class Cause(Record, frozen=True, kw_only=True):
    """Why an attempt has failed. `kind`: "signal", "exit", "exception", "hang", "node", STORE, or SUPERVISOR. `rank`:
    that failed first; of ranks that hang, the one for which the others wait; of nodes that were lost, the first one; 0
    where the supervisor was lost, or the store of the nodes."""

    kind: str
    rank: int
    code: int
    what: str
    """for people: the name of the signal, the exit code, type and message of the exception, or where the rank hangs"""
    stack: str = ""
    """the stack of the exception"""
    stacks: dict[str, str] = msgspec.field(default_factory=dict)
    """of a hang: rank -> the stacks of its threads"""

    @property
    def key(self) -> str:
        """A text that is equal for causes of one kind."""
        if self.kind in (HANG, NODE, STORE, SUPERVISOR):
            return self.kind
        end = {"exception": r"[^\w.]", "signal": r" \(", "exit": r" while "}.get(self.kind)
        what = self.what if end is None else re.split(end, self.what, maxsplit=1)[0]
        return f"{self.kind} {what}"


class SlowRank(Record, frozen=True, kw_only=True):
    """A rank for which the others waited. `samples`: in how many of those that were taken. `at`: mostly where."""

    rank: int
    samples: int
    at: str


class Slow(Record, frozen=True, kw_only=True):
    """A time in which steps took longer than usual, or longer on some ranks from the first step on. `ranks`: the slow
    ones; empty: no rank differed from the others, or where they were could not be seen."""

    step: int
    """the newest one when it was noticed"""
    step_seconds: float
    usual_step_seconds: float
    """0.0: all steps were as slow"""
    ranks: list[SlowRank]
    what: str
    """for people"""


class Attempt(Record, frozen=True, kw_only=True):
    """One life of all ranks of a job. Times of day: seconds since 1970. Steps: 0 where there was none."""

    format: int
    number: int
    """in the run; 0 until it is read"""
    job: str
    """an id of the supervisor that made the attempt"""
    host: str
    command: list[str]
    ranks: int
    began_at: float
    seconds: float
    restored_step: int | None
    """the step from which it went on; None: it failed before it had restored a state"""
    last_step: int
    replayed_steps: int
    """steps that an attempt before had completed, and that were trained again"""
    phases: dict[str, float]
    """phase -> seconds, of the rank that took longest (reported.py)"""
    cause: Cause | None
    """None: it did not fail"""
    answer: str
    """what followed, and why"""
    nodes: int = 1
    """those that have reported; `ranks` are those of all nodes, also of lost ones"""
    slow: list[Slow] = msgspec.field(default_factory=list)
    findings: list[Finding] = msgspec.field(default_factory=list)
    """signs that a host may fail, each once for each supervisor"""
    spares: Spares | None = None
    """the nodes in reserve when the attempt ended; None: none were expected"""
    incarnation: str = ""
    """of the generation of `restored_step`; empty: it began anew, or the record is older than this field"""
    saved_step: int = 0
    """the newest step that it has saved, newer than `restored_step`; 0: none, or the record is older than this field"""


class Stored(Attempt, frozen=True, kw_only=True):
    """An attempt as it is stored in its run. `begun`: number of the newest record of its beginning; 0: it has none."""

    begun: int = 0


class Begun(Record, frozen=True, kw_only=True):
    """That an attempt has begun. Written once its run is known, and again when the state is restored. The fields that
    an Attempt has too mean the same."""

    format: int
    job: str
    process: str
    """of the supervisor that writes the records of the attempt (io/processes.py)"""
    host: str
    command: list[str]
    ranks: int
    nodes: int
    began_at: float
    restored_step: int | None = None
    """None: the state is not restored yet"""
    incarnation: str = ""


class History(NamedTuple):
    """The attempts of a run, each list oldest first. `lost`: those whose end nobody has recorded, because the
    supervisor or its machine was lost. `running`: those that run; elsewhere perhaps, or they are lost as well."""

    ended: list[Stored]
    lost: list[Stored]
    running: list[Stored]


def append(tier: Tier, attempt: Attempt, begun: int = 0) -> None:
    """Create the record of an attempt in a run. `begun`: as in Stored. As `side_records.append`."""
    fields = msgspec.structs.asdict(attempt)
    side_records.append(tier, FOLDER, Stored(**{**fields, "number": 0, "begun": begun}))


def begin(tier: Tier, begun: Begun) -> int:
    """Create a record of the beginning of an attempt. Returns its number. As `side_records.append`."""
    return side_records.append(tier, BEGUN, begun)


def read(tier: Tier, opened: bool = False, run: str = "") -> list[Attempt]:
    """The attempts of a run that have ended or are lost, oldest first. `opened`, `run`: as for `history`."""
    found = history(tier, opened, run=run)
    return [*found.ended, *found.lost]


def history(tier: Tier, opened: bool = False, until: float = math.inf, run: str = "") -> History:
    """The attempts of a run. As `side_records.read`.

    `opened`: whether the run is open for writing in this process, or in a rank of this supervisor: then those of other
    machines have ended (default: that is not known). `until`: seconds since 1970; what was saved later is of another
    attempt (default: nothing is). `run`: the path of the run, where it may be in slots, whose generations are not in
    `tier` (default: they are).
    """
    recorded = side_records.read(tier, FOLDER, Stored)
    ended = _without_repeats([msgspec.structs.replace(one, number=number) for number, one in recorded.items()])
    after = max((one.begun for one in ended), default=0)
    begun = dict[tuple[str, float], tuple[int, Begun]]()
    for number, one in side_records.read(tier, BEGUN, Begun, after).items():
        begun[one.job, one.began_at] = number, one  # the newest record of an attempt has all of the one before
    lost, running = list[Stored](), list[Stored]()
    saved, left = list[Generation](), [*begun.values()]
    for place, (number, one) in enumerate(left):
        later = [other for _, other in left[place + 1 :]]
        if any(other.job == one.job for other in later):
            continue  # its supervisor went on; only the record of its end could not be written
        alive = processes.lives(one.process)
        if alive is False or (alive is None and (opened or later)):  # guard: only-lost-attempts-are-closed
            there = side_records.of_run(run) if run else tier  # guard: saves-in-slots-are-counted
            saved = saved or [*commit.survey(there).generations.values()]
            lost.append(_lost(number, one, saved, later[0].began_at if later else until))
        else:
            answer = "runs" if alive else f"runs, or its supervisor on {one.host} was lost"
            running.append(_without_end(number, one, answer))
    last = max((one.number for one in ended), default=0)
    found = [msgspec.structs.replace(one, number=last + 1 + place) for place, one in enumerate([*lost, *running])]
    return History(ended, found[: len(lost)], found[len(lost) :])


def failures(attempts: Sequence[Attempt], ranks: int, mtbf: float | None) -> Known:
    """What attempts, oldest first, tell about the failures of a job of so many ranks: `policy.failures.observed`."""

    def cause(one: Attempt, kinds: Sequence[str]) -> str:
        # Ranks that were asked to end, and do not know how to, are killed.
        if one.cause is None or one.answer.startswith(f"end: {ASKED}"):  # guard: asked-end-counts-as-none
            return ""
        return _cause(one) if one.cause.kind in (kinds or (one.cause.kind,)) else ""

    def lives(*kinds: str) -> list[Life]:
        """`kinds`: of the causes that count; none given: all of them."""
        return [
            Life(
                seconds=one.seconds,
                ranks=one.ranks,
                trained=one.restored_step is not None,
                last_step=one.last_step,
                cause=cause(one, kinds),
            )
            for one in attempts
        ]

    return Known(observed(lives(), ranks, mtbf), observed(lives(NODE, SUPERVISOR), ranks, mtbf))


def unfinished(attempts: Sequence[Attempt]) -> list[Outcome]:
    """The failures of the job that the next one continues, as policy/recovery.py takes them; of those that it has
    continued too. `attempts`: of a run, oldest first. Empty if the last job has ended: a new one begins anew.

    A lost attempt is none of them, nor one with a lost node, because they say nothing about the program; but what such
    attempts have saved is progress.
    """
    found, job, newest = list[Outcome](), "", 0
    for one in reversed(attempts):
        if _is_lost(one):  # guard: lost-attempt-blames-no-program
            job, newest = one.job, max(newest, one.last_step)
            continue
        if one.job != job:  # guard: job-that-ended-begins-anew
            break
        if one.cause is not None and one.cause.kind != NODE:
            found.insert(0, _outcome(one, one.cause, newest))
        newest = max(newest, one.restored_step or 0, one.saved_step)
    return found


def _outcome(one: Attempt, cause: Cause, newest: int) -> Outcome:
    """`newest`: the newest step that is known to be saved after the attempt."""
    followed: dict[str, Act] = {name: name for name in REMEDIES}
    saved_step = newest if newest > (one.restored_step or 0) else 0
    saved_step = max(one.saved_step, saved_step)  # guard: own-saves-count-for-next-job
    return Outcome(
        restored_step=one.restored_step,
        last_step=one.last_step,
        code=cause.code or 1,
        saved_step=saved_step,
        cause=cause.key,
        error=cause.what if cause.kind == "exception" else "",
        followed=followed.get(one.answer.partition(":")[0], "restart"),
    )


def _cause(one: Attempt) -> str:
    """A text that is equal for failures of one kind. Lost nodes, and lost attempts, are each of their own kind: two of
    them at the same step, which of an attempt is only the last that was saved, show nothing about the program."""
    key = "" if one.cause is None else one.cause.key
    return f"{key} {one.number}" if key in (NODE, SUPERVISOR) else key  # guard: lost-nodes-are-failures-each


def _lost(number: int, begun: Begun, saved: Sequence[Generation], until: float) -> Stored:
    """An attempt whose supervisor was lost. It lived at least until its last save. `until`: when the next one began."""
    mine = [one.commit for one in saved if begun.began_at <= one.commit.created < until]
    what = f"the supervisor on {begun.host}, or its machine, was lost"
    saved_step = max((one.step for one in mine), default=0)
    return msgspec.structs.replace(
        _without_end(number, begun, "end: its supervisor did not record its end"),
        seconds=max((one.created - begun.began_at for one in mine), default=0.0),
        last_step=max(begun.restored_step or 0, saved_step),
        saved_step=saved_step,
        cause=Cause(kind=SUPERVISOR, rank=0, code=-signal.SIGKILL, what=what),
    )


def _without_end(number: int, begun: Begun, answer: str) -> Stored:
    """What is known of an attempt from its beginning. `number`: of the record of that."""
    return Stored(
        format=begun.format,
        number=0,
        job=begun.job,
        host=begun.host,
        command=begun.command,
        ranks=begun.ranks,
        nodes=begun.nodes,
        began_at=begun.began_at,
        seconds=0.0,
        restored_step=begun.restored_step,
        incarnation=begun.incarnation,
        last_step=begun.restored_step or 0,
        replayed_steps=0,
        phases={},
        cause=None,
        answer=answer,
        begun=number,
    )


def _without_repeats(ended: Sequence[Stored]) -> list[Stored]:
    """Each attempt once. One that was taken for lost may have ended later, and then has a record of its own as well."""
    own = {(one.job, one.begun) for one in ended if not _is_lost(one)}
    return [one for one in ended if not _is_lost(one) or (one.job, one.begun) not in own]


def _is_lost(one: Attempt) -> bool:
    return one.cause is not None and one.cause.kind == SUPERVISOR

"""The attempts of a job, as records in its run: one for each attempt, created when it has ended.

`lastgood attempts` reads them. A record is never changed. No restart follows from them; cadence="auto" learns from
them how often the job fails.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from ..policy.failures import Known, Life, observed
from ..policy.health import Finding
from ..policy.membership import Spares
from ..ports import Tier
from ..records import Record
from ..run import side_records

FOLDER = "attempts"


class Cause(Record, frozen=True, kw_only=True):
    """Why an attempt has failed. `kind`: "signal", "exit", "exception", "hang" or "node". `rank`: that failed first; of
    ranks that hang, the one for which the others wait; of nodes that were lost, the first one."""

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
        if self.kind in ("hang", "node"):
            return self.kind
        end = {"exception": r"[^\w.]", "signal": r" \("}.get(self.kind)
        what = self.what if end is None else re.split(end, self.what, maxsplit=1)[0]
        return f"{self.kind} {what}"


class SlowRank(Record, frozen=True, kw_only=True):
    """A rank for which the others waited. `samples`: in how many of SAMPLES (policy/slow.py). `at`: mostly where."""

    rank: int
    samples: int
    at: str


class Slow(Record, frozen=True, kw_only=True):
    """A time in which steps took longer than usual. `ranks`: the slow ones; empty: no rank differed from the others."""

    step: int
    """the newest one when it was noticed"""
    step_seconds: float
    usual_step_seconds: float
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
    """steps that the attempt before had completed, and that were trained again"""
    phases: dict[str, float]
    """phase -> seconds, of the rank that took longest"""
    cause: Cause | None
    """None: it did not fail"""
    answer: str
    """what followed, and why"""
    nodes: int = 1
    """those that have reported; `ranks` are theirs"""
    slow: list[Slow] = msgspec.field(default_factory=list)
    findings: list[Finding] = msgspec.field(default_factory=list)
    """signs that a host may fail, each once for each supervisor"""
    spares: Spares | None = None
    """the nodes in reserve when the attempt ended; None: none were expected"""


def append(tier: Tier, attempt: Attempt) -> None:
    """Create the record of an attempt in a run. As `side_records.append`."""
    side_records.append(tier, FOLDER, attempt)


def read(tier: Tier) -> list[Attempt]:
    """The attempts of a run, oldest first. As `side_records.read`."""
    found = side_records.read(tier, FOLDER, Attempt)
    return [msgspec.structs.replace(one, number=number) for number, one in found.items()]


def failures(attempts: Sequence[Attempt], ranks: int, mtbf: float | None) -> Known:
    """What attempts, oldest first, tell about the failures of a job of so many ranks: `policy.failures.observed`."""

    def lives(*kinds: str) -> list[Life]:
        """`kinds`: of the causes that count; none given: all of them."""
        return [
            Life(
                seconds=one.seconds,
                ranks=one.ranks,
                trained=one.restored_step is not None,
                last_step=one.last_step,
                cause="" if one.cause is None or one.cause.kind not in (kinds or (one.cause.kind,)) else one.cause.key,
            )
            for one in attempts
        ]

    return Known(observed(lives(), ranks, mtbf), observed(lives("node"), ranks, mtbf))

"""The interval between saves that cadence="auto" keeps and `lastgood plan` prints. Pure.

Sources: PCcheck (ASPLOS'25), section 3.4, for what saving may cost and for the floor Tw / N; Young 1974 and Daly 2006
for the interval that loses the least time (sizing.py). failures.py says how often a job fails.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from operator import attrgetter

from .arguments import is_positive, require
from .failures import Failures
from .sizing import Job

OVERHEAD = 0.03
"""the fraction by which saving may slow training where neither it nor a mean time between failures is given"""


IN_FLIGHT = 2
"""so many saves may be in flight, where nothing else is given"""


def longest_interval(durable_within_seconds: float | None) -> float:
    """The longest interval, in seconds, between two saves that must be durable in time, of which the other half is for
    the save itself; None: no bound."""
    return math.inf if durable_within_seconds is None else durable_within_seconds / 2


@dataclass(frozen=True)
class Interval:
    """Training time between two saves. `why`: what it follows from, for people."""

    seconds: float
    why: str

    def steps(self, step_seconds: float) -> int:
        """As whole steps, at least 1: rounded up, though not for a rounding error above a whole number."""
        return max(1, math.ceil(self.seconds / step_seconds * (1 - 1e-12)))


@dataclass(frozen=True)
class Rule:
    """What the interval follows from beside the cost of a save.

    `failures`: of the job. `overhead`: the fraction by which saving may slow training; default None: OVERHEAD, or no
    bound if `failures.mtbf` is given. `longest_seconds`: a bound of the interval; default: none. Raises Refused.
    """

    failures: Failures = field(default_factory=Failures)
    overhead: float | None = None
    longest_seconds: float = math.inf

    def __post_init__(self) -> None:
        require(
            self.overhead is None or is_positive(self.overhead), f"overhead={self.overhead!r}", "Give a number above 0."
        )

    @property
    def allowed(self) -> float | None:
        """The fraction by which saving may slow training; None: it is not bounded."""
        return OVERHEAD if self.overhead is None and self.failures.mtbf is None else self.overhead

    def interval(self, stall_seconds: float, write_seconds: float, in_flight: int) -> Interval:
        """The interval for saves that each cost `stall_seconds` of training and take `write_seconds` until durable.

        With an expected `mtbf` it is the one that loses the least time, or a longer one if `overhead` demands that.
        Without it, it is the shortest that `allowed` permits. Failures that were observed all the same make it shorter
        where that loses less time, unless `overhead` was given; never longer, because few of them tell little.

        It is never below Tw / N, where saves would queue up. Where `allowed` permits the loop to wait for a place in
        flight, it may be so much shorter (PCcheck, q = 1 + overhead).
        """
        allowed = self.allowed
        found = self._wanted(stall_seconds)
        longest = Interval(self.longest_seconds, "durable_within_seconds allows no longer one")
        floor = Interval(write_seconds / in_flight / (1 + (allowed or 0.0)), "no shorter, or saves would queue up")
        if allowed is not None:
            floor = Interval(floor.seconds, f"{floor.why}; {allowed:.2%} allowed")
        return max(min(found, longest, key=_seconds), floor, key=_seconds)

    def _wanted(self, stall_seconds: float) -> Interval:
        """The interval that follows from failures and from the cost of a save to training, without other bounds."""
        failures, allowed, mean = self.failures, self.allowed, self.failures.mean_seconds
        if allowed is not None:
            by_cost = Interval(stall_seconds / allowed, f"{allowed:.2%} allowed")
            if mean is None or (failures.mtbf is None and self.overhead is not None):
                return by_cost
        assert mean is not None, "an expected mtbf gives a mean"
        best = Job(mean, stall_seconds).best if stall_seconds > 0 else 0.0
        by_failures = Interval(best, "the least time is lost so")
        if allowed is None:
            return by_failures
        return (min if self.overhead is None else max)(by_cost, by_failures, key=_seconds)


_seconds = attrgetter("seconds")

"""How often a job fails: what was expected, corrected by what was observed. Pure.

Failures that come independently of each other are a Poisson process with an unknown rate. Its conjugate prior is a
Gamma distribution (Gelman et al., Bayesian Data Analysis, section 2.6), which counts like failures that were observed
before: `weight` of them in `weight * mtbf` seconds. After k failures in T seconds the expected rate is
(weight + k) / (weight * mtbf + T). The weight is one failure, so the first one that is observed counts as much as the
expectation. Until then a wrong one costs little, because the interval grows with the root of the mean only: with a mean
that is four times too long or too short, saves and failures cost a quarter more than at best.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..units import span
from .arguments import is_number, is_positive, require

PRIOR_FAILURES = 1.0
"""how many observed failures the expectation counts for"""
DIVERGED = "TrainingDiverged"
"""the error of a Sentinel"""


@dataclass(frozen=True)
class Failures:
    """What is known of the failures of a job.

    `mtbf`: the mean time between failures of the whole job that is expected, in seconds; default None: not known.
    `seconds`: how long the job was observed; `count`: how often it failed in that time. Default: not observed. Raises
    Refused for values that cannot be meant.
    """

    mtbf: float | None = None
    seconds: float = 0.0
    count: int = 0

    def __post_init__(self) -> None:
        require(self.mtbf is None or is_positive(self.mtbf), f"mtbf={self.mtbf!r}", "Give seconds above 0.")
        for name in ("seconds", "count"):
            value = getattr(self, name)
            require(is_number(value) and 0 <= value < math.inf, f"{name}={value!r}", "Give a number of at least 0.")

    @property
    def mean_seconds(self) -> float | None:
        """The mean time between failures; None without an expectation and without an observed failure."""
        weight, expected = (0.0, 0.0) if self.mtbf is None else (PRIOR_FAILURES, self.mtbf)
        seconds, count = weight * expected + self.seconds, weight + self.count
        return seconds / count if seconds and count else None

    def __str__(self) -> str:
        """For people; empty if nothing is known."""
        mean = self.mean_seconds
        if mean is None:
            return ""
        expected = [] if self.mtbf is None else [f"{span(self.mtbf)} expected"]
        seen = [f"{self.count} seen in {span(self.seconds)}"] if self.seconds else []
        return f"a failure every {span(mean)} ({', '.join(expected + seen)})"


@dataclass(frozen=True)
class Known:
    """The failures of a job, and those of them that a place of its run did not survive. Default: nothing is known.

    `all`: however a rank ended. `of_nodes`: in which a machine was lost, with the memory and the disks that it has.
    """

    all: Failures = field(default_factory=Failures)
    of_nodes: Failures = field(default_factory=Failures)


@dataclass(frozen=True)
class Life:
    """One attempt of a job, from its start to its end."""

    seconds: float
    ranks: int
    trained: bool
    """whether it had restored a state, or begun with step 0"""
    last_step: int
    cause: str
    """why it failed, equal for failures of one kind; empty if it did not, such as after a preemption that has saved"""


def observed(lives: Sequence[Life], ranks: int, mtbf: float | None = None) -> Failures:
    """What the attempts of a job, oldest first, tell about the failures of one with so many ranks. `mtbf`: as expected.

    An attempt that has not begun to train tells nothing, and costs no trained step. Failures in a row at the same step
    with the same cause come from the program or its data, and so does a divergence: no interval helps against
    these, and they come at no random time. The seconds of such attempts count, as those in which nothing else failed.
    A job of twice as many ranks fails twice as often, so seconds with fewer ranks count for less.
    """
    trained = [one for one in lives if one.trained]
    count = 0
    for (_, cause), group in itertools.groupby(trained, key=lambda one: (one.last_step, one.cause)):
        count += bool(cause) and len(list(group)) == 1 and not cause.endswith(DIVERGED)
    return Failures(mtbf, sum(one.seconds * one.ranks / ranks for one in trained), count)

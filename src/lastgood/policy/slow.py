"""When the steps of a job have become slower than usual, and which of its ranks is slow. Pure.

With synchronous training all ranks need the same time for a step, because they wait for the slowest one. So times show
that a job is slow, and not which rank is: that is shown by where the ranks are within their steps. A rank for which the
others wait is outside of collectives much more often than they are.

A job that has become slower is compared with itself. A rank that was slow from its first step on leaves nothing to
compare with, so the ranks are compared with each other once, in the first steps of each attempt.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from . import hang
from .arguments import is_number, is_positive, require
from .hang import Stuck

WINDOWS = 3
"""How many windows in a row must be slow: one alone may be an evaluation, a compilation, or a disk that was busy."""
USUAL_WINDOWS = 10
"""of how many windows in a row the median is a usual pace"""
SAMPLES, MOST_TRIED = 20, 40
"""how many samples of where the ranks are are taken before one is named, and how many are begun for that at most: some
find nothing, because the ranks run on meanwhile"""
SAMPLES_IN_WINDOW = 4
"""in one window at most: one long stall of a rank, which is one window, must not make it a slow one"""
LEAST_SAMPLES = 16
"""With fewer, because not all could be had, none is named."""
_LEAST_SHARE, _LEAST_RATIO = 0.4, 3.0
"""A slow rank is apart in so many of the samples at least, and so many times as often as the others."""
assert _LEAST_SHARE * LEAST_SAMPLES > SAMPLES_IN_WINDOW
_LEAST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 60.0
_STEPS_BETWEEN_SAMPLES = 1.37
"""not a whole number, so that the samples are of different parts of a step"""
_FIRST_PAUSES = (0.31, 0.16, 0.37, 0.13, 0.28, 0.19)
"""the pauses between samples of the first windows, as parts of a window: uneven, for the same reason"""
_UNEQUAL = re.compile(r"pipelining/|pipeline_parallel|p2p|/distributed_c10d.* in (batch_isend_irecv|i?recv|i?send)$")
"""calls of jobs whose ranks have different work by design, such as the stages of a pipeline"""


@dataclass(frozen=True)
class Pace:
    """When a job counts as slow.

    `factor`: times the usual duration of a step (default 2.0; 0: nothing is measured). `window_seconds`: of training,
    over which the duration of a step is taken (default 10.0); a longer step is a window. Raises Refused for values that
    cannot be meant.
    """

    factor: float = 2.0
    window_seconds: float = 10.0

    def __post_init__(self) -> None:
        holds = is_number(self.factor) and (self.factor == 0 or self.factor > 1)
        require(holds, f"slow-factor={self.factor!r}", "Give a number above 1, or 0.")
        require(is_positive(self.window_seconds), f"slow-window={self.window_seconds!r}", "Give seconds above 0.")


@dataclass(frozen=True)
class Apart:
    """A rank that was at work while most others waited, in `samples` samples, most often at the line `at`."""

    rank: int
    samples: int
    at: str


def usual_seconds(known: float | None, windows: Sequence[float]) -> float | None:
    """The usual duration of a step: the lowest median of USUAL_WINDOWS windows in a row; None: it is not known yet.

    `known`: what it was before the last window. `windows`: seconds per step in each window, oldest first.
    """
    if len(windows) < USUAL_WINDOWS:
        return known
    median = statistics.median(windows[-USUAL_WINDOWS:])
    return median if known is None else min(known, median)


def is_slow(windows: Sequence[float], usual: float | None, pace: Pace) -> bool:
    """Whether the last windows are all slower than usual. `usual`: as `usual_seconds` returns it."""
    if not pace.factor or usual is None or len(windows) < WINDOWS:
        return False
    return min(windows[-WINDOWS:]) > pace.factor * usual


def is_over(windows: Sequence[float], usual: float, pace: Pace) -> bool:
    """Whether the last windows are all as fast as usual again."""
    return max(windows[-WINDOWS:]) <= pace.factor * usual


def pause_seconds(step_seconds: float) -> float:
    """How long to wait between two samples of ranks whose steps take so long."""
    return min(max(_STEPS_BETWEEN_SAMPLES * step_seconds, _LEAST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)


def first_pause_seconds(window_seconds: float, samples: int) -> float:
    """How long to wait between two samples in the first windows. `samples`: how many were taken."""
    return window_seconds * _FIRST_PAUSES[samples % len(_FIRST_PAUSES)]


def first_slow_ranks(samples: Sequence[Sequence[Stuck]], pace: Pace) -> list[Apart]:
    """The ranks that take `pace.factor` times as long for a step as the others, so that these wait for the rest of it.

    `samples`: all ranks, at different times of the first windows. Empty also where ranks send to each other one by one:
    each of them has work of its own then, and the one that has most of it is not slow.
    """
    calls = (call for sample in samples for one in sample for call in one.stack)
    if any(map(_UNEQUAL.search, calls)):  # guard: unequal-work-is-not-slow
        return []
    return slow_ranks(samples, max(_LEAST_SHARE, 1 - 1 / pace.factor))  # guard: first-slow-rank-by-factor


def slow_ranks(samples: Sequence[Sequence[Stuck]], least_share: float = _LEAST_SHARE) -> list[Apart]:
    """The slow ranks, the slowest first; empty if none differs from the others, or with fewer than LEAST_SAMPLES.

    `samples`: all ranks, at different times. `least_share`: of the samples, in which a slow rank is apart (default
    0.4).
    """
    if len(samples) < LEAST_SAMPLES:
        return []
    times, places = Counter[int](), dict[int, Counter[str]]()
    for sample in samples:
        for one in _apart(sample):
            times[one.signs.rank] += 1
            places.setdefault(one.signs.rank, Counter())[_call(one)] += 1
    found = []
    for rank, count in times.most_common():
        others = [times[one.signs.rank] for one in samples[0] if one.signs.rank != rank]
        bound = max(least_share * len(samples), _LEAST_RATIO * statistics.median(others or [0]))
        if count >= bound:  # guard: slow-rank-stands-out
            found.append(Apart(rank, count, places[rank].most_common(1)[0][0]))
    return found


def _apart(sample: Sequence[Stuck]) -> list[Stuck]:
    """The ranks for which the others seem to wait; none if it cannot be seen."""
    working = [one for one in sample if not hang.waits(one) or one.state in hang.STATES]
    if not working:
        # All are in a backward pass, say, which computes and waits for others: who waits there sleeps.
        working = [one for one in sample if one.state == "R"]
    if 2 * len(working) <= len(sample):
        return working
    call, ranks = Counter(_call(one) for one in sample).most_common(1)[0]
    if 2 * ranks > len(sample):  # most of them wait for their devices in the same line
        return [one for one in working if _call(one) != call]
    return []


def _call(one: Stuck) -> str:
    """The innermost call of the user's program, or of all calls if there is none."""
    own = next((call for call in one.stack if not hang.is_library(call)), None)
    found = own or next(iter(one.stack), "")
    return found.strip().removeprefix("File ")


def described(step: int, seconds: float, usual: float | None, ranks: Sequence[Apart], samples: int) -> str:
    """One line for people. `step`: where it was noticed. `seconds`: of a step then. `usual`: seconds before; None: all
    steps were so. `samples`: how many were taken."""
    than = ", and has from the first ones on: " if usual is None else f" and not {usual:.3g} s as before: "
    text = f"at step {step} a step takes {seconds:.3g} s{than}"
    if samples < LEAST_SAMPLES:
        return text + "where the ranks are could not be seen, so it is not known whether one of them is slow"
    if not ranks:
        return text + "no rank here differs from the others, so all are slower, or wait for the same thing"
    names = [
        f"rank {one.rank} is slow, the others wait for it in {one.samples} of {samples} samples"
        + (f" (mostly at {one.at})" if one.at else "")
        for one in ranks
    ]
    return text + "; ".join(names)

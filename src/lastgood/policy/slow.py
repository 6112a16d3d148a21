"""When the steps of a job have become slower than usual, and which of its ranks is slow. Pure.

With synchronous training all ranks need the same time for a step, because they wait for the slowest one. So times show
that a job is slow, and not which rank is: that is shown by where the ranks are within their steps. A rank for which the
others wait is outside of collectives much more often than they are.
"""

from __future__ import annotations

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
SAMPLES = 10
"""how many samples of where the ranks are are taken before one is named"""
_LEAST_SHARE, _LEAST_RATIO = 0.4, 3.0
"""A slow rank is apart in so many of the samples at least, and so many times as often as the others."""
_LEAST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.3, 60.0
_STEPS_BETWEEN_SAMPLES = 1.37
"""not a whole number, so that the samples are of different parts of a step"""


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
    """A rank that was where the others were not. `samples`: in how many samples. `at`: where it was most often."""

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


def slow_ranks(samples: Sequence[Sequence[Stuck]]) -> list[Apart]:
    """The slow ranks, the slowest first; empty if none differs from the others.

    `samples`: all ranks, at different times; at least one sample.
    """
    times, places = Counter[int](), dict[int, Counter[str]]()
    for sample in samples:
        for one in _apart(sample):
            times[one.signs.rank] += 1
            places.setdefault(one.signs.rank, Counter())[_call(one)] += 1
    found = []
    for rank, count in times.most_common():
        others = [times[one.signs.rank] for one in samples[0] if one.signs.rank != rank]
        bound = max(_LEAST_SHARE * len(samples), _LEAST_RATIO * statistics.median(others or [0]))
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


def described(step: int, seconds: float, usual: float, ranks: Sequence[Apart]) -> str:
    """One line for people. `step`: where it was noticed. `seconds`: of a step then. `usual`: seconds before."""
    text = f"at step {step} a step takes {seconds:.3g} s and not {usual:.3g} s as before: "
    if not ranks:
        return text + "no rank here differs from the others, so all are slower, or wait for the same thing"
    names = [
        f"rank {one.rank} is slow, the others wait for it in {one.samples} of {SAMPLES} samples"
        + (f" (mostly at {one.at})" if one.at else "")
        for one in ranks
    ]
    return text + "; ".join(names)

"""Probabilities that a part is lost when f of N nodes fail, whichever they are: exact counts and published formulas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from math import comb


def survived_by_formula(nodes: int, k: int, failed: int) -> float:
    """The bound of Gemini (SOSP'23, corollary 1) on the probability that groups of k nodes survive.

    `nodes`: a multiple of k. `failed`: the number of nodes that fail at the same time. The bound counts a set of
    failures once for each group that it contains, so that it is exact below 2 k failures.
    """
    if failed < k:
        return 1.0
    return max(0.0, 1 - nodes * comb(nodes - k, failed - k) / (k * comb(nodes, failed)))


def lost_in_rings(lengths: Sequence[int], window: int, spare: int, failed: int) -> float:
    """The exact probability that nodes in rings of these lengths lose a part.

    A part is lost if more than `spare` nodes of a run of `window` consecutive nodes of a ring fail. Groups of `window`
    nodes are rings of that length; for k copies `window` is k and `spare` is k - 1; for parity k + m and m.
    """
    found = [1]
    for length, count in Counter(lengths).items():
        found = _times(found, _power(_survived_sets(length, window, spare), count, failed), failed)
    ways = found[failed] if failed < len(found) else 0
    total = comb(sum(lengths), failed)
    return (total - ways) / total


def lost_in_one_ring(nodes: int, k: int, failed: int) -> float:
    """The exact probability that a ring of all nodes loses a part: that k consecutive nodes fail.

    The nodes that stay divide the failed ones into as many runs, each shorter than k.
    """
    left, total = nodes - failed, comb(nodes, failed)
    if not left:
        return 1.0
    runs = sum(
        (-1) ** one * comb(left, one) * comb(left + failed - k * one - 1, left - 1)
        for one in range(min(left, failed // k) + 1)
    )
    return (total - nodes * runs // left) / total


def _survived_sets(length: int, window: int, spare: int) -> list[int]:
    """For each number of failures, how many sets of so many nodes of one ring lose nothing."""
    runs = [{(first + step) % length for step in range(window)} for first in range(length)]
    return [
        sum(
            all(len(run.intersection(chosen)) <= spare for run in runs) for chosen in combinations(range(length), count)
        )
        for count in range(length + 1)
    ]


def _power(base: list[int], exponent: int, most: int) -> list[int]:
    found = [1]
    while exponent:
        if exponent % 2:
            found = _times(found, base, most)
        base, exponent = _times(base, base, most), exponent // 2
    return found


def _times(one: list[int], other: list[int], most: int) -> list[int]:
    """The product of two polynomials up to the power `most`."""
    found = [0] * min(len(one) + len(other) - 1, most + 1)
    for at, factor in enumerate(one):
        for beside, value in enumerate(other[: max(0, len(found) - at)]):
            found[at + beside] += factor * value
    return found

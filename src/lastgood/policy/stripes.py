"""Which chunks of the nodes of a group share parity, and on which nodes the parity lies. Pure.

    nodes of a ring        a      b      c      d          k = 2, m = 2
    stripes of set 0      data   data   parity parity      set i begins at node i of the ring: its k data cells are
    stripes of set 1             data   data   parity      chunks of k nodes, its m parity cells lie on the next m
    ...                                  (and in turn)

A node is a data node of k sets and a parity node of m. Its chunks are dealt to its k sets in turn, so that each set
gets a k-th of them, and the parity on each node is about m / k of its own part. A stripe has one cell on a node at
most, so that the loss of any m nodes leaves k cells of each stripe, which is enough. Where the nodes have few chunks,
those of the same number are put into the same stripe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeVar

from .placement import ParityGroups

T = TypeVar("T")


@dataclass(frozen=True)
class Member:
    """A data node of a set of stripes. `first`: the number of the first of its chunks there; the others follow k apart.

    Example: with k = 2, `Member("a", 1)` stands for the chunks 1, 3, 5 and so on of node a.
    """

    node: str
    first: int


@dataclass(frozen=True)
class StripeSet:
    """Stripes that lie on the same nodes. `data`: the k data nodes. `parity`: the m nodes of the parity cells."""

    data: tuple[Member, ...]
    parity: tuple[str, ...]


def stripe_sets(groups: ParityGroups) -> list[StripeSet]:
    """All sets of stripes of these groups. Each chunk of each node is in one stripe of one set.

    Example: `stripe_sets(placement.groups(nodes, 2, 2))[0].parity` names two nodes that are not in `.data` of it.
    """
    k, m, found = groups.k, groups.m, list[StripeSet]()
    for ring in groups.groups:
        for start in range(len(ring)):
            places = [(start + at) % len(ring) for at in range(k + m)]
            data = tuple(Member(ring[place], (at - place) % k) for at, place in enumerate(places[:k]))
            found.append(StripeSet(data, tuple(ring[place] for place in places[k:])))  # guard: parity-beside-its-data
    return found


def neighbours(sets: Sequence[StripeSet], node: str) -> set[str]:
    """The other nodes of the sets in which a node is a data node: what it has can be computed from what they have.

    Example: with `StripeSet((Member("a", 0),), ("b",))` alone, `neighbours(sets, "a")` is `{"b"}`, and that of b empty.
    """
    mine = [one for one in sets if any(member.node == node for member in one.data)]
    return {name for one in mine for name in (*(member.node for member in one.data), *one.parity)} - {node}


def stripes(one: StripeSet, chunks: Mapping[str, Sequence[T]]) -> list[tuple[T | None, ...]]:
    """The stripes of a set: for each data node its chunk in the stripe; None stands for zeros.

    `chunks`: node -> its chunks, the longest first.
    Example: `stripes(StripeSet((Member("a", 0),), ("b",)), {"a": "xy"})` is `[("x",), ("y",)]`.
    """
    columns = [chunks[member.node][member.first :: len(one.data)] for member in one.data]
    return list(zip_longest(*columns))

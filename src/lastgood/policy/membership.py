"""Which nodes a job of several nodes goes on with after an attempt, and which of them decides. Pure.

Nodes are numbered from 0 in each round of the rendezvous. The node with the lowest number that is not lost decides for
all: it collects the reports of the others, and publishes one verdict.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from ..records import Record
from .arguments import is_whole, require

WATCHED_NODES = 3
"""So many nodes, those with the lowest numbers, are watched by every node; all others by the node that decides."""


@dataclass(frozen=True)
class Bounds:
    """How many nodes a job has. `least`: fewer wait for others. `most`: further ones wait in reserve. `spares`: so many
    are expected there; the job does not wait for them.

    Raises Refused for values that cannot be meant. Example: `Bounds(3, 4, spares=1)`.
    """

    least: int = 1
    most: int = 1
    spares: int = 0

    def __post_init__(self) -> None:
        require(
            is_whole(self.least, 1) and is_whole(self.most, self.least),
            f"--nnodes {self.least}:{self.most}",
            "Give one whole number of at least 1, or the least and the most: 2:4.",
        )


class Spares(Record, frozen=True, kw_only=True):
    """Nodes in reserve. `waiting`: how many are there; None: not known. `expected`: how many are to be there."""

    waiting: int | None
    expected: int


@dataclass(frozen=True)
class Next:
    """What the nodes do after an attempt that is followed by another one.

    "stay": the same nodes start the ranks again. "join": the nodes join a new round, with others that wait, or without
    those that are lost. "end": too few nodes are left, because the others were asked to end. `why`: for people.
    """

    act: Literal["stay", "join", "end"]
    why: str = ""


def leader(nodes: int, lost: Collection[int]) -> int:
    """The node that decides. Example: of three nodes without node 0 it is node 1."""
    return min(one for one in range(nodes) if one not in lost)


def watched(node: int, nodes: int, lost: Collection[int]) -> list[int]:
    """The nodes whose signs of life this node reads."""
    others = [one for one in range(nodes) if one not in lost and one != node]
    return others if node == leader(nodes, lost) else [one for one in others if one < WATCHED_NODES + len(lost)]


def silent(seen: Mapping[int, float], now: float, timeout_seconds: float) -> list[int]:
    """The nodes whose newest sign of life is too old. `seen`: node -> when it came, by this node's clock."""
    return sorted(node for node, at in seen.items() if now - at > timeout_seconds)  # guard: slow-node-is-not-lost


def next_round(nodes: int, lost: Collection[int], leaving: Collection[int], waiting: int, bounds: Bounds) -> Next:
    """What the nodes do, if the job is to go on.

    `lost`: nodes that do not answer. `leaving`: nodes that were asked to end. `waiting`: nodes that wait to join.
    """
    left = nodes - len({*lost, *leaving})
    if leaving and (not left or left + waiting < bounds.least):
        return Next("end", "too few nodes are left without those that were asked to end")
    if lost or leaving:  # guard: lost-node-needs-new-round
        return Next("join", f"{nodes - left} of {nodes} nodes left the job")
    if waiting and nodes < bounds.most:
        return Next("join", f"{waiting} more nodes join" if waiting > 1 else "one more node joins")
    return Next("stay")


def spares_text(nodes: int, waiting: int, bounds: Bounds) -> str:
    """A line about the nodes in reserve, for people. `waiting`: nodes that wait, to join or in reserve.

    Example: with four of four nodes, none that waits and one spare node expected, one more node is to be started.
    """
    there, missing = spares_waiting(nodes, waiting, bounds), bounds.most + bounds.spares - nodes - waiting
    if missing > 0:
        more = "1 more node" if missing == 1 else f"{missing} more nodes"
        return f"spare nodes in reserve: {there} of {bounds.spares} expected; start {more} with the same command"
    further = there - bounds.spares
    also = f"; {further} more than expected, also kept in reserve" if further else ""
    return f"spare nodes in reserve: {there} of {bounds.spares} expected{also}"


def spares_waiting(nodes: int, waiting: int, bounds: Bounds) -> int:
    """How many of the nodes that wait are in reserve: those for which the job has no place."""
    return max(0, nodes + waiting - bounds.most)

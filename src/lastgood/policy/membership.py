"""Which nodes a job of several nodes goes on with after an attempt, and which of them decides. Pure.

Nodes are numbered from 0 in each round of the rendezvous. The node with the lowest number that is not lost decides for
all: it collects the reports of the others, and publishes one verdict.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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


class Round(Record, frozen=True, kw_only=True):
    """A round of a job whose store can move. `store`: number of its store in the list. `id`: of this store. `order`:
    grows from round to round of one store. `nodes`: how many it has."""

    store: int
    id: str
    order: int
    nodes: int


class Tried(Record, frozen=True, kw_only=True):
    """A round to which a node has agreed. `nodes`: the ids of all its nodes."""

    round: Round
    nodes: tuple[str, ...] = ()


class Past(Record, frozen=True, kw_only=True):
    """What a node brings to a round of a job whose store can move.

    `last`: the last round that it knows to have begun; None: none. `tried`: later ones to which it has agreed, and does
    not know whether all others have. `decided`: of how many attempts it knows the verdicts. `lived`: whether it has
    begun the attempt after these. `left`: numbers of the nodes of `last` that have ended, as they were asked to.
    `node`: an id of this node, as long as its supervisor lives. `holds`: number of the store that it holds; None: none.
    """

    node: str = ""
    last: Round | None = None
    left: tuple[int, ...] = ()
    tried: tuple[Tried, ...] = ()
    decided: int = 0
    lived: bool = False
    holds: int | None = None

    def agreed(self, one: Round) -> bool:
        """Whether this node has agreed to a round."""
        return self.last == one or any(tried.round == one for tried in self.tried)


class Seen(Record, frozen=True, kw_only=True):
    """A store that answers. `id`: chosen when it was made. `active`: store and order of the newest round of which more
    than half of the nodes have come there; None: there is none."""

    id: str
    active: tuple[int, int] | None = None


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


def last_round(pasts: Sequence[Past], newest: Round | None) -> Round | None:
    """The last round that has begun, as far as the nodes of a round know it, and their store: `newest`. None: none."""
    known = [*(one.last for one in pasts if one.last is not None), *([] if newest is None else [newest])]
    return max(known, key=_order, default=None)


def enough(pasts: Sequence[Past], store: int, newest: Round | None, left: Collection[int]) -> bool:
    """Whether the nodes of a round may begin: no others can then begin beside them, at any store.

    `pasts`: what they bring. `store`: that of the round. `newest`: the last round that has begun there. `left`: numbers
    of the nodes of the last round that have ended, as they were asked to, as far as this store shows it.

    They are more than half of the nodes of the last round that has begun, and of each later one that may have; in the
    store of that round, half of them. A job begins in the first store. A round has not begun, and never will, if one of
    its nodes has come to this round without having agreed to it.
    """
    last = last_round(pasts, newest)
    if last is None:
        return store == 0  # guard: new-job-begins-at-first-store
    ended = {
        *left,
        *(one for past in pasts if past.last == last for one in past.left),
    }  # guard: left-nodes-are-not-lost
    present = {past.node: past for past in pasts}
    tried = {one.round: one.nodes for past in pasts for one in past.tried if _order(one.round) > _order(last)}
    for one in (last, *tried):  # guard: round-that-may-have-begun-counts
        others = [present[node] for node in tried.get(one, ()) if node in present]
        if any(not past.agreed(one) for past in others):  # guard: round-that-was-left-never-began
            continue
        there = sum(past.agreed(one) for past in pasts)
        of = one.nodes - (len(ended) if one is last else 0)
        if not (2 * there >= of if one.store == store else 2 * there > of):  # guard: moved-round-needs-majority
            return False
    return True


def may_begin_job(pasts: Sequence[Past], stores: int, most: int) -> bool:
    """Whether nodes that know of no round may begin the first one: all nodes are there, or those that hold more than
    half of the stores. Else the job may be at another store, which a machine that has just started does not reach yet.

    `pasts`: what they bring. `stores`: how many are listed. `most`: how many nodes the job may have.
    """
    held = {one.holds for one in pasts} - {None}
    return len(pasts) >= most or 2 * len(held) > stores  # guard: new-job-needs-most-stores


def may_move(past: Past) -> bool:
    """Whether a node goes on to a store to which no others have gone yet. One of two nodes is no majority, unless the
    other one was asked to end; and before the first round no store but the first one can begin a job."""
    return past.last is not None and (past.last.nodes != 2 or bool(past.left))


def _order(one: Round) -> tuple[int, int]:
    return one.store, one.order


def store_to_join(seen: Sequence[Seen | None], past: Past, at: int, leaves: bool) -> int | None:
    """The number of the store that a node joins; None: none yet.

    `seen`: the stores of the list; None: it does not answer. `past`: what the node brings. `at`: the store that it has
    joined last; 0 if none. `leaves`: whether it may go on to a later one where no others are.

    The newest round to which the node has agreed bounds it: it joins that store, or a later one, and no other store at
    the same endpoint. So rounds have the order of their stores. Within this bound it goes where the others are, else
    to the first store that answers, so that nodes that have lost sight of each other come together again.
    """
    agreed = [one.round for one in past.tried]  # guard: agreed-round-bounds-node
    agreed += [] if past.last is None else [past.last]
    bound = max(agreed, key=_order, default=None)
    stores = dict[int, Seen]()
    for number, one in enumerate(seen):
        same = bound is None or one is None or one.id == bound.id  # guard: replaced-store-not-rejoined
        if one is not None and (bound is None or number > bound.store or (number == bound.store and same)):
            stores[number] = one
    oldest = (0, 0) if past.last is None else _order(past.last)
    known = {number: one.active for number, one in stores.items() if one.active is not None}
    active = {number: one for number, one in known.items() if one >= oldest}  # guard: older-round-is-not-followed
    if active:
        return max(active, key=lambda number: (active[number], number))
    return next((number for number in stores if number <= at or leaves), None)

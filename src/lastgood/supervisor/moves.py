"""What a node carries from the store of the nodes to the next one, if the store can move. Decides nothing.

The keys of a store are lost with it. So each node remembers the last verdict, the rounds to which it has agreed, and
the nodes with which it has lived the attempt that has no verdict yet. In the first round at the next store the nodes
decide about that attempt, as if they had not moved.

Invariant: of two groups of nodes that have lost sight of each other, one at most begins a round (policy/membership.py,
`enough`). A node agrees to a round before it waits for the others, and remembers that until all have.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec

from ..policy.membership import Past, Round, Tried, enough, last_round, may_begin_job
from ..records import Record
from .membership import ACTIVE, Joined, Membership, active_text
from .placement import NodeInfo

BEGUN = "begun"
"""the key of a job with the order of the last round that has begun at a store, and how many nodes it has"""


class Carried(Record, frozen=True, kw_only=True):
    """`infos`: of the nodes that have lived the attempt without a verdict; empty: there is none. `number`: of this
    attempt. `verdict`: the last one; None: there was none. `moved`: whether the store has moved since."""

    infos: list[NodeInfo]
    verdict: str | None
    number: int = 0
    moved: bool = True


class Moves:
    """What this node carries. `membership`: of this node; where its store cannot move, nothing is carried."""

    def __init__(self, membership: Membership) -> None:
        self._membership, self._past = membership, Past(node=secrets.token_hex(8))
        self._infos = list[NodeInfo]()
        """the nodes of the last attempt that was lived here"""
        self._verdict: str | None = None
        """the last one that this node knows"""
        self._begun = ""
        """the value of BEGUN when this node agreed to its newest round"""

    @property
    def past(self) -> Past:
        """What this node brings to a round."""
        return self._past

    def begun(self, number: int, infos: Sequence[NodeInfo] = ()) -> None:
        """This node begins an attempt. `infos`: of its nodes, if ranks are started here (default: they are not)."""
        self._past, self._infos = msgspec.structs.replace(self._past, decided=number, lived=bool(infos)), [*infos]

    def decided(self, number: int, verdict: str) -> None:
        """This node knows the verdict of the attempt before this number."""
        self._past = msgspec.structs.replace(self._past, decided=number)
        self.follows(verdict)

    def follows(self, verdict: str) -> None:
        """This node follows a verdict, and has lived no attempt since."""
        self._past, self._verdict = msgspec.structs.replace(self._past, lived=False), verdict

    def left(self, nodes: Sequence[int]) -> None:
        """The verdict says that these nodes of the round end, as they were asked to. The store may end with them."""
        self._past = msgspec.structs.replace(self._past, left=tuple(nodes))

    def joined(self, joined: Joined) -> Past:
        """What this node brings to a round. The round learns the rest where it does not have it. Raises TierDown."""
        self._past = past = msgspec.structs.replace(self._past, holds=joined.holds)
        if past.last is not None and (past.lived or past.last.store != joined.store):
            carried = Carried(infos=self._infos if past.lived else [], verdict=self._verdict)
            self._membership.claim(_key(past), msgspec.json.encode(carried).decode(), job=True)
        return past

    def enough(self, joined: Joined, infos: Sequence[NodeInfo], most: int) -> bool:
        """Whether the nodes of a round may begin. If so, this node agrees to it. Raises TierDown.

        `most`: how many nodes the job may have.
        """
        pasts, text = [one.past for one in infos], self._membership.read([BEGUN], job=True)[0]
        newest = None
        if text is not None:
            order, nodes = map(int, text.split())
            newest = Round(store=joined.store, id=joined.id, order=order, nodes=nodes)
        last, left = last_round(pasts, newest), list[int]()
        if last is not None:
            found = self._membership.read([_left(last, node) for node in range(last.nodes)], job=True)
            left = [node for node, text in enumerate(found) if text is not None]
        if last is None and not may_begin_job(pasts, self._membership.stores, most):
            return False
        if not enough(pasts, joined.store, newest, left):
            return False
        self._begun = text or ""
        tried = Tried(round=_round(joined), nodes=tuple(one.node for one in pasts))
        self._past = msgspec.structs.replace(self._past, tried=(*self._past.tried, tried))
        return True

    def agreed(self, joined: Joined) -> bool:
        """All nodes of the round have agreed to it. Returns whether it begins: else another one has begun here since.

        Raises TierDown.
        """
        begun = f"{joined.order:012d} {joined.nodes}"
        stands = self._membership.claim(BEGUN, begun, job=True, before=self._begun)
        if stands != begun:  # guard: one-round-follows-another
            return False
        self._past = msgspec.structs.replace(self._past, last=_round(joined), tried=(), left=())
        self._membership.raise_to(ACTIVE, active_text(_round(joined)))
        return True

    def carried(self, infos: Sequence[NodeInfo]) -> Carried | None:
        """What the nodes of a round have carried to it; None: nothing. From now on this node carries it too: the nodes
        that have lived the attempt may be lost before it has a verdict. Raises TierDown.
        """
        pasts = [one.past for one in infos if one.past.last is not None]
        if not pasts:
            return None
        newest = max(pasts, key=lambda one: (one.decided, one.lived))
        text = self._membership.read([_key(newest)], job=True)[0]
        if text is None:
            return None
        found, before, now = msgspec.json.decode(text, type=Carried), newest.last, self._past.last
        moved = before is None or now is None or (before.store, before.id) != (now.store, now.id)
        if found.infos:  # guard: carried-attempt-is-carried-on
            self._infos, self._verdict = found.infos, found.verdict
            self._past = msgspec.structs.replace(self._past, decided=newest.decided, lived=True)
        return msgspec.structs.replace(found, number=newest.decided, moved=moved)

    def leaves(self, node: int) -> None:
        """This node ends, as it was asked to, and the others go on. `node`: its number. Raises TierDown."""
        if self._past.last is not None:
            self._membership.put({_left(self._past.last, node): ""}, job=True)


def lost_text(carried: Carried, now: Sequence[NodeInfo], endpoint: str) -> tuple[int | None, str]:
    """The first rank of the nodes of a carried attempt that are not there any more, and a text about them; no rank: all
    are there.

    `now`: the nodes of the round. `endpoint`: where the store is now.
    """
    before, there = carried.infos, [one.past.node for one in now]
    missing = [node for node, one in enumerate(before) if one.past.node not in there]  # guard: equal-names-hide-no-node
    names = ", ".join(f"node {one} ({before[one].host})" for one in missing)
    if missing and carried.moved:
        text = f"{names}: lost with the store of the nodes, which is at {endpoint} now"
    elif missing:
        text = f"{names}: lost while the nodes did not reach each other; the others joined again at {endpoint}"
    elif carried.moved:
        text = f"the store of the nodes was lost, and none of the nodes; they go on at {endpoint}"
    else:
        text = f"the nodes did not reach each other, and none of them is lost; they joined again at {endpoint}"
    return sum(one.ranks for one in before[: missing[0]]) if missing else None, text


def _round(joined: Joined) -> Round:
    return Round(store=joined.store, id=joined.id, order=joined.order, nodes=joined.nodes)


def _key(past: Past) -> str:
    return f"carried/{past.decided}/{past.lived}"


def _left(last: Round, node: int) -> str:
    return f"left/{last.store}.{last.id}.{last.order}/{node}"

"""Parity among the memories of nodes, in place of copies: written behind the training loop, and rebuilt from.

    coordinator   after a commit: which files of parity are missing (policy/stripes.py) -> every leader: ParityRequest
    leader        its agent reads the chunks of other nodes, and writes the files of parity of its node
                  (agent/parity_files.py)

    coordinator   before a restore: the files of which ranks lie on no node, or are damaged -> every leader:
                  RebuildRequest
    leader        its agent copies or computes them from what the other nodes have, and writes them as the ordinary
                  files

Invariants
  1. A file of parity names the chunks and not the nodes, so that any later job can use it, whatever its nodes are.
  2. A generation is protected when every node has the files of parity that the placement of the present nodes gives it.
  3. Nodes whose agents do not listen have no part in it: their chunks get no parity, and what no node has any more is
     rebuilt on another node. What they have is not lost: what cannot be rebuilt without it is an outage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from ..coordination.rounds import RankGroup
from ..engine.stripes import Rebuilt
from ..errors import NODE_FAILED, BeyondRepair, PeerDown
from ..format import layout, stripe_layout
from ..io.checksum import digest
from ..io.reed_solomon import Code
from ..policy.parts import divided
from ..policy.placement import groups
from ..policy.stripes import StripeSet, neighbours, stripe_sets
from ..ports import Stop, Tier, never
from ..records import Generation, GenerationId, Record
from . import rebuilding
from .agent_link import SEND_SECONDS, AgentLink
from .agent_messages import Work
from .node_copies import left_out, lies_on, place_of, placed
from .node_disks import NodeDisks
from .peers import PeerDisk, PeerTable, StripeMember, StripeOrder
from .rank_requests import Requests, ask_all

SUBJECT, REBUILD_SUBJECT = "parity", "rebuild"


class MemberOrder(Record, frozen=True, kw_only=True):
    """As `StripeMember`, with the leader of the node."""

    leader: int
    first: int
    ranks: list[int]


class FileOrder(Record, frozen=True, kw_only=True):
    """A file of parity. `set`: the number of its set of stripes in `ParityRequest.sets`."""

    set: str
    name: str
    index: int


class ParityRequest(Record, frozen=True, kw_only=True):
    """What the coordinator asks of all leaders. `files`: leader -> the files that its node lacks.

    `sets`: the data nodes of each set of stripes of which a file is missing. `parity`: parity cells of a stripe.
    """

    at: GenerationId
    root: str
    sets: dict[str, list[MemberOrder]]
    files: dict[str, list[FileOrder]]
    parity: int


class RebuildRequest(Record, frozen=True, kw_only=True):
    """What the coordinator asks of all leaders. `ranks`: leader -> the ranks whose files its node is to make whole."""

    at: GenerationId
    root: str
    ranks: dict[str, list[int]]


def sets_among(table: PeerTable, code: tuple[int, int] | None) -> list[StripeSet]:
    """The sets of stripes of these nodes, by their leaders. `code`: data and parity cells of a stripe; None: none."""
    return [] if code is None else stripe_sets(groups(placed(table.nodes), *code))


class ParityBuilder:
    """One leader's part. At the other leaders it is a `rank_requests.Service` of both subjects.

    `sets`: of the nodes, as the coordinator has them. Empty: no parity is made, only used.
    """

    def __init__(self, agent: AgentLink, table: PeerTable, leader: int, sets: Sequence[StripeSet] = ()) -> None:
        self._agent, self._table, self._leader = agent, table, leader
        beside = neighbours(sets, str(leader))
        self._neighbours = [one for one in table.nodes if str(one.leader) in beside]

    def served(self, request: Any, stop: Stop) -> None:
        """Let the agent write the files of this node. Raises as `AgentLink.work`."""
        self._agent.check()  # guard: killed-agent-replaced-for-parity
        if "files" in request:
            self._write(msgspec.convert(request, ParityRequest), stop)
        else:
            self._rebuild(msgspec.convert(request, RebuildRequest), stop)

    def _write(self, asked: ParityRequest, stop: Stop) -> None:
        orders = [
            StripeOrder(
                name=one.name,
                index=one.index,
                parity=asked.parity,
                data=[
                    StripeMember(node=self._table.node_of(member.leader), first=member.first, ranks=member.ranks)
                    for member in asked.sets[one.set]
                ],
            )
            for one in asked.files.get(str(self._leader), [])
        ]
        if orders:
            nodes = self._neighbours
            work = Work(at=asked.at, root=asked.root, task="parity", place="", of=None, stripes=orders, nodes=nodes)
            self._agent.work(work, stop)

    def _rebuild(self, asked: RebuildRequest, stop: Stop) -> None:
        if ranks := asked.ranks.get(str(self._leader)):
            others = [one for one in self._table.nodes if one.leader != self._leader]
            work = Work(at=asked.at, root=asked.root, task="rebuild", place="", of=ranks, nodes=others)
            self._agent.work(work, stop)


class ParityMaker:
    """At the coordinator, a `node_copies.Maker`. `code`: data and parity cells of a stripe.

    `disks`: of all nodes. `table`: those whose agents listen, at least as many as a stripe has cells.
    """

    def __init__(
        self, disks: NodeDisks, table: PeerTable, code: tuple[int, int], ranks: RankGroup, stop: Stop = never
    ) -> None:
        assert disks.links.agent is not None, "a front whose nodes share parity has agents"
        Code(*code)  # raises Refused where no library for it is installed
        self._disks, self._table, self._parity = disks, table, code[1]
        divided_nodes = groups(placed(table.nodes), *code)
        self._sets = stripe_sets(divided_nodes)
        self._own = ParityBuilder(disks.links.agent, table, ranks.rank, self._sets)
        self._requests = Requests(ranks, SUBJECT, disks.nodes.others, stop)
        self.place = place_of(disks, table, divided_nodes.domains_survived)

    def make(self, generation: Generation, stop: Stop) -> None:
        request = self._missing(generation)
        if request.files:
            own = partial(self._own.served, msgspec.to_builtins(request), stop)
            ask_all(self._requests, request, own, SEND_SECONDS)

    def outlives(self, generation: Generation) -> bool:
        without = left_out(self._disks, self._table)
        listings = self._disks.listings(layout.folder(generation.id)) if without else {}
        # A node that has parity of it took part when that was written.
        shared = any(stripe_layout.is_record(name) for leader in without for name in listings[leader])
        return bool(without) and (shared or lies_on(self._disks, self._table, generation))

    def end(self) -> None:
        self._requests.end()

    def _missing(self, generation: Generation) -> ParityRequest:
        """The files of parity of a generation that do not lie where they are to lie."""
        parts = self._parts(generation)
        sets = {
            str(number): [
                MemberOrder(leader=int(member.node), first=member.first, ranks=parts.get(int(member.node), []))
                for member in one.data
            ]
            for number, one in enumerate(self._sets)
        }
        plan = digest("xxh3_128", msgspec.json.encode([self._parity, *sets.values()]))[:8]
        listings, files = self._disks.listings(layout.folder(generation.id)), dict[str, list[FileOrder]]()
        for number, one in enumerate(self._sets):
            if not any(member.ranks for member in sets[str(number)]):
                continue
            for index, node in enumerate(one.parity):
                name = stripe_layout.file_name(plan, number, index)
                if stripe_layout.record_name(name) not in listings[int(node)]:
                    files.setdefault(node, []).append(FileOrder(set=str(number), name=name, index=index))
        wanted = {order.set for orders in files.values() for order in orders}
        sets = {number: members for number, members in sets.items() if number in wanted}
        return ParityRequest(at=generation.id, root=generation.root, sets=sets, files=files, parity=self._parity)

    def _parts(self, generation: Generation) -> dict[int, list[int]]:
        """Leader -> the ranks whose files are the part of its node: each is the part of one node that has it."""
        leaders, parts = self._disks.nodes.leaders, dict[int, list[int]]()
        written = [one.rank for one in generation.commit.seals]
        for rank, of in enumerate(divided(written, leaders, self._disks.held(generation))):
            parts.setdefault(leaders[rank], []).extend(of)
        return {leader: sorted(of) for leader, of in parts.items()}


class NodeRebuild:
    """At the coordinator: makes files of ranks whole that lie on no node any more, or are damaged.

    `disks`: of all nodes. `table`: those whose agents listen.
    """

    def __init__(self, disks: NodeDisks, table: PeerTable, ranks: RankGroup) -> None:
        assert disks.links.agent is not None, "a front whose nodes serve each other has agents"
        self._disks, self._table = disks, table
        self._own = ParityBuilder(disks.links.agent, table, ranks.rank)
        self._requests = Requests(ranks, REBUILD_SUBJECT, disks.nodes.others)

    def rebuild(self, generation: Generation, stop: Stop) -> list[str]:
        """Rebuild what is missing or damaged of a generation. Returns the names of the files of these ranks.

        A missing file is rebuilt on the node of the rank of the same number, or on another one whose agent listens, a
        damaged one wherever it lies: from a copy on another node, or from parity. Raises BeyondRepair if there is
        neither, PeerDown if there may be with a node whose agent does not listen, and the errors of the agents.
        """
        listings = self._disks.listings(layout.folder(generation.id))
        possible = any(stripe_layout.is_record(name) for listing in listings.values() for name in listing)
        held, leaders = self._disks.held(generation), self._disks.nodes.leaders
        damaged = {one.blob.rpartition("/")[2].partition(".")[0] for one in generation.damaged}
        ranks, names, nowhere = dict[str, list[int]](), list[str](), list[int]()
        for seal in generation.commit.seals:
            holders = sorted(leader for leader, parts in held.items() if seal.rank in parts)
            if not holders:
                nowhere.append(seal.rank)
                holders = [rebuilder(seal.rank, leaders, self._table)]
            elif seal.manifest.partition(".")[0] not in damaged:
                continue
            possible |= len(holders) > 1
            for holder in holders:  # the findings do not say on which of them a copy is damaged
                ranks.setdefault(str(holder), []).append(seal.rank)
            names.append(layout.blob_name(seal.rank))
        if ranks and not possible:
            what = f"{generation.id} has neither parity nor another copy on other nodes"
            raise BeyondRepair(what, safe="Nothing was changed.")
        files = {name for listing in listings.values() for name in listing}
        nowhere = [one for one in nowhere if layout.blob_name(one) not in files]
        request = RebuildRequest(at=generation.id, root=generation.root, ranks=ranks)
        try:
            self._require(generation, nowhere)
            if ranks:
                own = partial(self._own.served, msgspec.to_builtins(request), stop)
                ask_all(self._requests, request, own, SEND_SECONDS)
        except BeyondRepair as error:
            wanted = {rank for of in ranks.values() for rank in of}
            left = sorted(left_out(self._disks, self._table))
            silent = [one for one in left if _has_part(listings[one], held[one] & wanted)]
            if not silent:  # guard: left-out-node-lost-nothing
                raise
            self._require(generation, nowhere, [cast(Tier, self._disks)])  # guard: lost-with-left-out-nodes-too
            what = f"{error.what}, and the agent of the node of rank {silent[0]} does not listen"
            raise PeerDown(what, safe="Nothing was changed.") from error
        return names

    def _require(self, generation: Generation, ranks: Sequence[int], places: Sequence[Tier] = ()) -> None:
        """As `rebuilding.require`, for all nodes together: one may be able to rebuild its part, and another one not.

        Where this node cannot reach another one, the nodes that rebuild find out by themselves. `places`: what the
        nodes have; by default what their agents serve, of those that listen.
        """
        if not ranks:
            return
        peers = self._disks.links.peers
        assert peers is not None, "the coordinator leads its node"
        others = [cast(Tier, PeerDisk(peers, one)) for one in self._table.nodes if one.leader != 0]
        rebuilt = Rebuilt(places or [self._disks.own, *others], generation)
        with contextlib.suppress(*NODE_FAILED):
            rebuilding.require(rebuilt, self._disks.own, generation, ranks)  # guard: feasible-on-all-nodes

    def end(self) -> None:
        """Tell the other leaders that nothing more is asked."""
        self._requests.end()


def _has_part(listing: Collection[str], copies: Collection[int]) -> bool:
    """Whether a node has what others may be rebuilt from. `listing`: of its folder. `copies`: the ranks that are to be
    rebuilt whose files it has. Who took part in parity has some of it."""
    return bool(copies) or any(map(stripe_layout.is_record, listing))


def rebuilder(rank: int, leaders: Sequence[int], table: PeerTable) -> int:
    """The leader of the node on which files are rebuilt that no node has. Pure.

    `rank`: the one that wrote them. `leaders`: that of the node of each present rank. `table`: the nodes whose agents
    listen: another agent cannot be asked for it.
    """
    own = leaders[rank % len(leaders)]
    if not table.among([own]):  # guard: rebuilt-where-agents-listen
        return table.nodes[rank % len(table.nodes)].leader
    return own

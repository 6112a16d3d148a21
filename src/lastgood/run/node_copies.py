"""Copies of each node's files in the memory of other nodes, made by the agents behind the training loop.

`NodeCopies` is the thread that does it, for copies (`CopyMaker`, here) and for parity (node_parity.py).

    coordinator   after a commit: which files are on fewer nodes than there are to be copies (policy/placement.py)
                  -> every leader, through rank_requests.py: CopyRequest
    leader        its agent sends the files of its node to the agents of others (agent/nodes.py), then it answers

Invariants
  1. A copy lies on the other node as the file itself does (node_disks.py), so every reader finds it, and retention
     deletes it with its generation.
  2. A generation that is being copied is not deleted.
  3. The newest generation is copied. One that waits while a newer one is committed is not: its copies would come late.
     Copies that are being made then are finished: on a slow network no generation would get any otherwise.
  4. A node that cannot be reached delays nothing but the copies: they are tried again, with pauses.
  5. The newest generation that is known to have its copies is not deleted before a newer one has them: a node that is
     lost meanwhile takes the newer one with it. Where no agent has answered that they are made, they do not count.
  6. A node whose agent does not listen (peer_opening.py) is left out: it sends and receives nothing, and the copies of
     the others make no save survive the loss of a node. A generation from before that does not need that node stays
     until a place below has a newer one; also where too few agents listen to make any copy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec

from ..coordination.rounds import RankGroup
from ..errors import Cancelled, LastgoodError, Overtaken
from ..format import layout, stripe_layout
from ..policy.placement import Node, copies, missing_copies
from ..ports import Stop, never
from ..records import Generation, GenerationId, Record
from . import paths
from .agent_link import SEND_SECONDS, AgentLink
from .agent_messages import Send
from .known import KnownRun
from .lower_place import pause_seconds
from .node_disks import NodeDisks
from .outage import Outage
from .outcomes import Outcomes
from .peers import PeerNode, PeerOrder, PeerTable
from .rank_requests import Requests, ask_all
from .thread_pools import EXIT_POLL_SECONDS, interpreter_is_ending

SUBJECT = "copies"


class CopyOrder(Record, frozen=True, kw_only=True):
    """The files of a rank go from one node to another. `sender`, `receiver`: the leaders of the nodes."""

    sender: int
    receiver: int
    rank: int


class CopyRequest(Record, frozen=True, kw_only=True):
    """What the coordinator asks of all leaders."""

    at: GenerationId
    orders: list[CopyOrder]


class CopySender:
    """One leader's part. At the other leaders it is a `rank_requests.Service`."""

    def __init__(self, agent: AgentLink, table: PeerTable, leader: int) -> None:
        self._agent, self._table, self._leader = agent, table, leader

    def served(self, request: Any, stop: Stop) -> None:
        """Let the agent send the files of this node. Raises as `AgentLink.send`."""
        self._agent.check()  # guard: killed-agent-replaced-for-copies
        asked = msgspec.convert(request, CopyRequest)
        mine = [one for one in asked.orders if one.sender == self._leader]
        if mine:
            orders = [PeerOrder(rank=one.rank, to=self._table.node_of(one.receiver)) for one in mine]
            self._agent.send(Send(at=asked.at, orders=orders), stop)


class Maker(Protocol):
    """What makes the redundancy of a generation in the memory of other nodes."""

    place: str
    """its name among the places of a save: as `place_of`; empty: it makes nothing"""

    def make(self, generation: Generation, stop: Stop) -> None:
        """Make what is missing of it. Raises Cancelled once `stop()` is true."""

    def outlives(self, generation: Generation) -> bool:
        """Whether nodes are left out whose loss this generation survives, as one for which `make` is called now does
        not: it has copies or parity from before."""

    def end(self) -> None:
        """Tell the other ranks that nothing more is asked."""


class CopyMaker:
    """Copies of each file on `count` nodes in all. `disks`: of all nodes. `table`: those whose agents listen."""

    def __init__(self, disks: NodeDisks, table: PeerTable, count: int, ranks: RankGroup, stop: Stop = never) -> None:
        assert disks.links.agent is not None, "a front whose nodes copy to each other has agents"
        self._disks, self._table, self._count = disks, table, min(count, len(table.nodes))
        self._own = CopySender(disks.links.agent, table, ranks.rank)
        self._requests = Requests(ranks, SUBJECT, disks.nodes.others, stop)
        self._placement = copies(placed(table.nodes), self._count)
        self.place = place_of(disks, table, self._placement.domains_survived)

    def make(self, generation: Generation, stop: Stop) -> None:
        held = {str(leader): parts for leader, parts in self._disks.held(generation).items()}
        orders = [
            CopyOrder(sender=int(sender), receiver=int(receiver), rank=rank)
            for sender, receiver, rank in missing_copies(held, self._placement, self._count)
        ]
        if orders:
            request = CopyRequest(at=generation.id, orders=orders)
            own = partial(self._own.served, msgspec.to_builtins(request), stop)
            ask_all(self._requests, request, own, SEND_SECONDS)

    def outlives(self, generation: Generation) -> bool:
        return bool(left_out(self._disks, self._table)) and lies_on(self._disks, self._table, generation)

    def end(self) -> None:
        self._requests.end()


class NothingMaker:
    """A `Maker` for nodes of which fewer than two have agents that listen. `disks`: of all nodes.

    It makes nothing. What has copies or parity from before survives the loss of a node, and newer saves do not.
    """

    place = ""

    def __init__(self, disks: NodeDisks) -> None:
        self._disks = disks

    def make(self, generation: Generation, stop: Stop) -> None:
        """Nothing can be made."""

    def outlives(self, generation: Generation) -> bool:
        held = self._disks.held(generation).values()
        if all(sum(one.rank in ranks for ranks in held) > 1 for one in generation.commit.seals):
            return True
        return any(map(stripe_layout.is_record, self._disks.list(layout.folder(generation.id))))

    def end(self) -> None:
        """Nobody was asked for anything."""


class Offered(NamedTuple):
    """A generation whose copies are to be made. `copied`: ends when they are made, or are given up."""

    generation: Generation
    copied: Future[None]


class NodeCopies:
    """At the coordinator: makes the redundancy of each newest generation. Begins at once; `close` ends it.

    `source`: what the process knows of the run in memory. `maker`: makes it; called with `stop`, which is true once
    the run is being closed. `outcomes`: receives errors.
    """

    def __init__(self, source: KnownRun, maker: Callable[[Stop], Maker], outcomes: Outcomes) -> None:
        self._source = source
        self._maker = maker(lambda: self._closing)
        self.place = self._maker.place
        self._outage = Outage(source, self.place, outcomes)
        self._changed = threading.Condition()
        self._waiting: Offered | None = None
        self._under_way: Offered | None = None
        """what the thread makes the copies of"""
        # Which of these have their copies is not known. One of them may be all that survives a lost node; one that
        # has lost a node already may be rebuilt, and survive another one.
        known = source.survey.generations.items()
        self._copied = {at for at, one in known if one.restorable or at in source.lost}  # guard: lost-generation-held
        """the newest generation that has its copies, and those that outlive it; before the first copy, those that were
        found"""
        for at in self._copied:
            source.held.add(at, self._maker)
        self._newest: Generation | None = None
        """the newest that was offered since the last restore"""
        self._newest_made: GenerationId | None = None
        """the newest whose copies this process has made, or found made"""
        self._closing = False
        self._failures = self._failed_attempts = 0
        """how many attempts have failed in a row, and in all"""
        self._hurried = False
        """whether somebody waits for the next attempt, so that no pause is made"""
        self._thread = threading.Thread(target=self._run, name="lastgood-copies")
        self._thread.start()

    def offer(self, generation: Generation, restored: bool = False) -> Future[None]:
        """Make the copies of a generation that was committed. The result ends when they are made, or are given up: with
        Overtaken if a newer one was offered before. `restored`: it was restored, and what came before is left."""
        copied = Future[None]()
        with self._changed:
            older = not restored and self._newest is not None and _age(generation) < _age(self._newest)
            if not older:
                self._newest = generation
            for one in (self._waiting, self._under_way):
                if one is not None and one.generation.id == generation.id:
                    return one.copied
            if older:  # guard: newer-copies-not-replaced
                copied.set_exception(self._overtaken())
                return copied
            self._give_up(self._waiting, self._overtaken())
            self._waiting = Offered(generation, copied)
            self._source.held.add(generation.id, self)
            self._changed.notify_all()
        return copied

    def wait(self, timeout_seconds: float | None) -> None:
        """Wait until the newest generation is copied, or an attempt has failed."""
        with self._changed:
            before, self._hurried = self._failed_attempts, True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: not (self._waiting or self._under_way) or self._failed_attempts > before or self._closing,
                timeout_seconds,
            )
            self._hurried = False

    def stop(self) -> None:
        """Interrupt the copies that are under way, and make no more."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread. Copies that are under way are not waited for: their agents go on."""
        self.stop()
        self._thread.join()
        self._maker.end()
        with self._changed:
            for one in (self._waiting, self._under_way):
                self._give_up(one, Cancelled("the run was closed"))
            self._waiting = self._under_way = None
            self._hold(set())

    def lacking(self) -> str:
        """What the newest save lacks, for the closing line; empty if it has its copies."""
        newest, made = self._newest, self._newest_made
        if newest is None or newest.id == made or not self.place:
            return ""
        has = f"step {made.step} is the newest that has" if made is not None else "nor any since the opening"
        return f"step {newest.step} is not known to have copies or parity on other nodes, {has}"

    def _keep(self, at: GenerationId) -> None:
        """Hold the newest generation that has its copies, in place of those before that do not outlive it."""
        others = {one for one in self._copied if self._outlives(one)}  # guard: whole-copies-outlive-partial
        self._source.held.add(at, self._maker)  # guard: copied-generation-held
        self._hold({at, *others})

    def _hold(self, generations: set[GenerationId]) -> None:
        before, self._copied = self._copied, generations
        for one in before - generations:
            self._source.held.discard(one, self._maker)

    def _outlives(self, at: GenerationId) -> bool:
        """Whether a lost node that is left out now would take the run back to this generation, if it is kept."""
        one = self._source.survey.generations.get(at)
        below = [dict(place.survey.generations) for place in self._source.below]
        if one is None or any(found >= at and other.good for of in below for found, other in of.items()):
            return False
        return self._maker.outlives(one)

    def _give_up(self, one: Offered | None, error: LastgoodError) -> None:
        """End the waiting for the copies of a generation, if there is one. The lock is held."""
        if one is not None:
            self._source.held.discard(one.generation.id, self)
            one.copied.set_exception(error)

    def _overtaken(self) -> Overtaken:
        return Overtaken(f"a newer generation than the copies of {self.place} was committed")

    # ---- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                pause = pause_seconds(self._failures) if self._failures else None
                until = None if pause is None else time.monotonic() + pause
                while not self._closing and not (self._waiting and not self._failures):
                    if self._waiting and (self._hurried or (until is not None and time.monotonic() >= until)):
                        break
                    self._changed.wait(EXIT_POLL_SECONDS)
                    self._closing |= interpreter_is_ending()
                if self._closing:
                    return
                # guard: copies-under-way-not-overtaken
                self._under_way, self._waiting = self._waiting, None
            if self._under_way is not None:
                self._copy(self._under_way)

    def _copy(self, one: Offered) -> None:
        """Make the copies of one generation. A failure is reported as `Outage` does, and tried again."""
        generation, failed = one.generation, None
        begun = time.monotonic()
        try:
            self._maker.make(generation, lambda: self._closing)
            self._keep(generation.id)
        except Exception as error:  # noqa: BLE001 - a caller of `wait` must not wait for ever
            if isinstance(error, Cancelled) and self._closing:  # guard: rank-that-left-stops-no-copies
                return
            failed = error  # Cancelled: another rank has left the job
        with self._changed:
            self._under_way = None
            if failed is not None:
                self._outage.failed(generation.id, failed)
                self._failures += 1
                self._failed_attempts += 1
                if self._waiting is None:
                    self._waiting = one
                else:
                    self._give_up(one, self._overtaken())
            else:
                self._failures = 0
                self._outage.ended()
                self._source.held.discard(generation.id, self)
                one.copied.set_result(None)
                if self.place:
                    self._newest_made = generation.id
                    seconds, size = time.monotonic() - begun, generation.bytes
                    self._source.emit("copied", generation.id, seconds=seconds, size=size, detail=self.place)
            self._changed.notify_all()


def _age(generation: Generation) -> tuple[int, int]:
    """Ascends with time: steps ascend in an incarnation, and orders from one to the next."""
    return generation.commit.order, generation.step


def placed(nodes: Sequence[PeerNode]) -> list[Node]:
    """The nodes as placement knows them, with their leaders as names."""
    return [Node(str(one.leader), one.domain) for one in nodes]


def left_out(disks: NodeDisks, table: PeerTable) -> set[int]:
    """The leaders of the nodes of the job whose agents do not listen."""
    return {*disks.nodes.leaders} - {one.leader for one in table.nodes}


def lies_on(disks: NodeDisks, table: PeerTable, generation: Generation) -> bool:
    """Whether the nodes whose agents listen have the files of all ranks."""
    held = disks.held(generation)
    here = set[int]().union(*(held[one.leader] for one in table.nodes))
    return all(one.rank in here for one in generation.commit.seals)


def place_of(disks: NodeDisks, table: PeerTable, domains_survived: int) -> str:
    """The name of the redundancy among the places of a save: paths.PEERS and what it survives, "node" or "domain".

    "process" where a node is left out: no other node has what that one writes.
    """
    if left_out(disks, table):  # guard: left-out-node-survives-nothing
        return f"{paths.PEERS}process"
    labelled = all(one.domain for one in table.nodes)  # a node without a label may share its rack with another one
    return paths.PEERS + ("domain" if labelled and domains_survived else "node")

"""A training job of a schedule: its ranks open a run on the memory of several nodes, save to it, and may die anywhere.

The calls are those of a Checkpointer without a training loop and without threads for the bytes: RunWriter and Follower,
NodeDisks and NodeView, NodeCopies with copies or parity, the copies to a place below with the part of each rank, and
the link to the agent. Where nodes share parity, what was lost is rebuilt before the restore, or copied from the home.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from lastgood.coordination.rounds import RankGroup
from lastgood.coordination.single_rank import AnyTopic, SingleRank
from lastgood.engine.inline_executor import Inline
from lastgood.errors import Damaged, LastgoodError
from lastgood.policy.retention import Keep
from lastgood.ports import Stop
from lastgood.records import Generation, GenerationId
from lastgood.run import node_copies, node_opening, node_parity
from lastgood.run.access import LOCK
from lastgood.run.agent_link import AgentLink
from lastgood.run.agent_messages import Serve
from lastgood.run.candidates import Candidates
from lastgood.run.copying import Copying, complete
from lastgood.run.follower import Follower
from lastgood.run.known import Environment
from lastgood.run.node_copies import CopyMaker, CopySender, Maker, NodeCopies
from lastgood.run.node_disks import SUBJECT, NodeDisks, NodeFiles, NodeLinks, Nodes, NodeView
from lastgood.run.node_parity import NodeRebuild, ParityBuilder, ParityMaker, sets_among
from lastgood.run.outcomes import Outcomes
from lastgood.run.part_copies import OtherRanks, PartServer
from lastgood.run.paths import MEMORY
from lastgood.run.peer_security import security
from lastgood.run.peers import PeerNode, Peers, PeerTable
from lastgood.run.places import unite
from lastgood.run.planned_save import RunOptions
from lastgood.run.rank_requests import Requests, RequestServer
from lastgood.run.writer import RunWriter

from .interleaving import Process, Threads
from .node_world import HOME, HOME_URL, LISTEN_PORT, Access, FileLock, JobStore, World, memory_of
from .plain import State, bytes_of, save

INLINE = Inline()
After = Callable[[Generation], object]
KEEP_MEMORY, KEEP_HOME = Keep(last=1), Keep(last=2)
RANK_SECONDS = 60.0


class Saves(NamedTuple):
    """What a job saves. `in_flight`: whether all saves are in flight at the same time, and may be committed in any
    order. `pinned`: of these the steps that are committed also if a newer one was."""

    steps: Sequence[int] = ()
    in_flight: bool = False
    pinned: Collection[int] = ()


class Workers(Inline):
    """Threads of a part server: none."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing was started."""


def given(at: GenerationId, rank: int) -> State:
    """What a rank saves."""
    return {f"w{rank}": f"{at} {rank} ".encode() * 150}


def saved(generation: Generation) -> State:
    """What all ranks have saved of a generation."""
    return {name: data for one in generation.commit.seals for name, data in given(generation.id, one.rank).items()}


def nodes_of(leaders: Sequence[int], machines: Sequence[int]) -> list[PeerNode]:
    """The nodes of a job, with the addresses of their agents. `leaders`, `machines`: as for `Job`."""
    return [
        PeerNode(leader=one, name=f"n{machines[one]}", domain="", host=f"n{machines[one]}", port=LISTEN_PORT)
        for one in sorted(set(leaders))
    ]


class Job:
    """One opening of a run.

    `leaders`: for each rank the lowest rank of its node. `machines`: for each rank the number of its machine.
    `options`: of which the copies and the parity among nodes count. `resumes`: the generation whose incarnation it
    continues; None: it restores what it finds in memory and in the home. `below`: whether it copies to the home itself.
    `saves`: what it saves.
    """

    def __init__(
        self,
        world: World,
        name: str,
        leaders: Sequence[int],
        machines: Sequence[int],
        saves: Saves,
        options: RunOptions,
        resumes: GenerationId | None = None,
        below: bool = False,
    ) -> None:
        self.world, self.name, self.saves, self.options, self.below = world, name, saves, options, below
        self._nodes, self._machines, self._resumes = Nodes(tuple(leaders)), machines, resumes
        self.processes = [Process(f"{name}{rank}", machine) for rank, machine in enumerate(machines)]
        nodes = nodes_of(leaders, machines)
        several = options.copies_among_nodes > 1 and len(nodes) > 1
        self._table = PeerTable(job=name, key="00" * 32, nodes=nodes) if several else None
        self._code = options.code_among(len(nodes)) if several else None
        self._rebuilds = several and options.node_parity is not None
        self._threads = Threads(world)
        self._upkeep = self._threads.Lock()
        """of the coordinator: what comes after a commit is done for one save after another"""
        self._environment = Environment(
            new_id=lambda: name * 8, wall_seconds=lambda: 0.0, monotonic_seconds=lambda: 0.0, pause=lambda _: None
        )
        self.restored: GenerationId | None = None
        self.offered: Generation | None = None
        """what is in memory at the beginning, and is to have copies or parity"""
        self.protected = False
        """whether these were reported as made"""
        self.errors = list[str]()
        """what has ended processes of the job, the first one first"""

    def start(self) -> None:
        for rank, process in enumerate(self.processes):
            body = self._coordinate if rank == 0 else self._follow
            self.world.scheduler.spawn(process, lambda rank=rank, body=body: self._live(rank, body))  # type: ignore[misc]

    @property
    def alive(self) -> bool:
        return any(one.alive for one in self.processes)

    # ---- one process ---------------------------------------------------------------------------------------

    def _live(self, rank: int, body: Callable[[int, RankGroup, contextlib.ExitStack], None]) -> None:
        group = RankGroup(
            rank, len(self.processes), JobStore(self.world, self.name), f"run/{self.name}", RANK_SECONDS, nodes=()
        )
        try:
            with contextlib.ExitStack() as held:
                body(rank, group, held)
        except (LastgoodError, OSError) as error:
            self.errors.append(f"{type(error).__name__}: {error}")
        self.world.kill(self.processes[rank])  # its threads and connections end with it

    def _opened(self, rank: int, held: contextlib.ExitStack) -> tuple[Any, NodeLinks]:
        """The disk of this rank's node, and at its leader the link to the agent."""
        leader, machine = self._nodes.leaders[rank], self._machines[rank]
        if leader != rank:
            return self.world.memory(machine, shared=True), NodeLinks()
        folder = memory_of(machine)
        agent = AgentLink(f"{MEMORY}{folder}")
        held.callback(agent.close)
        agent.attach()
        held.callback(FileLock(self.world, f"{folder}/{LOCK}").close)
        agent.check()
        if self._table is not None:
            host = f"n{machine}"
            agent.serve(Serve(job=self.name, key=self._table.key, node=host, host=host, port=LISTEN_PORT))
        if self._table is None:
            return self.world.memory(machine), NodeLinks(agent)
        peers = Peers(self.name, security(self._table.key, None), f"n{machine}")
        return self.world.memory(machine), NodeLinks(agent, self._table, peers)

    def _save(self, run: RunWriter | Follower, group: RankGroup, agent: AgentLink | None, after: After) -> None:
        """Make all saves of the job. `after`: what follows each commit."""
        flights = list[Any]()
        for step in self.saves.steps:
            topic = group.step_topic("save", step)
            with contextlib.suppress(LastgoodError):
                save_once = partial(self._save_once, run, group.rank, run.admit(step), topic, after)
                if self.saves.in_flight:
                    flights.append(self._threads.Thread(save_once))
                else:
                    save_once()
            if agent is not None and not self.saves.in_flight:
                agent.check()
        for flight in flights:
            flight.start()
        for flight in flights:
            flight.join()
        if agent is not None and flights:
            agent.check()

    def _save_once(self, run: RunWriter | Follower, rank: int, at: GenerationId, topic: AnyTopic, after: After) -> None:
        """Save once. If the save fails, the run goes on."""
        known, pinned = run.known, at.step in self.saves.pinned
        known.held.add(at, self)
        if pinned:
            known.pinned.add(at)
        try:
            one = save(run, at, given(at, rank), chunk_bytes=4096, topic=topic, pinned=pinned)
        except LastgoodError:
            pass
        else:
            self.world.ledger.report(one.id)
            after(one)
        finally:
            known.pinned.discard(at)
            known.held.discard(at, self)

    # ---- the coordinator -----------------------------------------------------------------------------------

    def _coordinate(self, rank: int, group: RankGroup, held: contextlib.ExitStack) -> None:
        world = self.world
        disk, links = self._opened(rank, held)
        home = held.enter_context(Access(world).for_writing(HOME_URL, "atomic_dirsync"))
        if self._resumes is None:
            group.topic("locked").agree(None, lambda _: None)
        others = self._nodes.others
        requests = Requests(group, SUBJECT, others) if others else None
        tier = NodeDisks(disk, self._nodes, requests, links)
        if self._resumes is None:
            unite([tier, home], self._environment)
        run = RunWriter(
            tier, INLINE, keep=KEEP_MEMORY, ranks=group, environment=self._environment, resumes=self._resumes
        )
        below = self._settled(run, home)
        group.topic("opened").agree(None, lambda _: run.shared_survey() if below is not None else None)
        copies = self._copies(run, group)
        if below is not None:
            self._restore(run, below, group)
        protected, died_before = self._offered(run, copies), world.ledger.died
        parts = OtherRanks(group, "0", tier) if self.below else None
        self._save(run, group, links.agent, lambda one: self._after(run, below, one, copies, parts))
        if copies is not None:
            copies.wait(30.0)
            if self.offered is not None and protected.done() and protected.exception() is None:
                self.protected = True
                world.ledger.report_copies(self.offered.id, died_before)
            copies.close()
        for asking in (parts, run.mender.others, run.mender.nodes, requests):
            if asking is not None:
                asking.end()

    def _settled(self, run: RunWriter, home: Any) -> RunWriter | None:
        """Settle both places. Returns the writer of the home; None in a job that goes on in its incarnation."""
        if self._resumes is not None:
            return None
        below = RunWriter(home, INLINE, keep=KEEP_HOME, ranks=SingleRank(), environment=self._environment)
        run.known.below = [below.known]
        assert isinstance(run.tier, NodeDisks)
        node_opening.complete_records(run.tier, run.known)
        node_opening.note_lost_parts(run.known)
        below.remove_unfinished_copies()
        return below

    def _copies(self, run: RunWriter, group: RankGroup) -> NodeCopies | None:
        """What makes copies or parity behind the saves. Where nodes share parity, what was lost can be rebuilt too."""
        tier, table, code = run.tier, self._table, self._code
        if table is None:
            return None
        assert isinstance(tier, NodeDisks)
        if self._rebuilds:
            run.mender.nodes = NodeRebuild(tier, table, group)
            run.mender.others = OtherRanks(group, "front", tier)

        def maker(stop: Stop) -> Maker:
            if code is not None:
                return ParityMaker(tier, table, code, group, stop)
            return CopyMaker(tier, table, self.options.copies_among_nodes, group, stop)

        self.world.ledger.begin_copies()
        return NodeCopies(run.known, maker, Outcomes(HOME))

    def _offered(self, run: RunWriter, copies: NodeCopies | None) -> Future[None]:
        """Let the copies or the parity of what is in memory be made. The result ends when they are."""
        self.offered = run.known.newest_restorable() if copies is not None else None
        return Future() if copies is None or self.offered is None else copies.offer(self.offered)

    def _restore(self, run: RunWriter, below: RunWriter, group: RankGroup) -> None:
        """Rebuild what was lost, choose what to continue, read it, and begin an incarnation."""
        ledger = self.world.ledger
        if self._rebuilds:
            for one, other in ((run, below), (below, run)):
                one.mender.sources = [other.tier]
                one.mender.mend_known(None, self.world.arenas(0, 0))
        found, state = restored([run, below])
        self.restored = found.id if found else None
        ledger.hold_restored(self.restored, found is None or state == saved(found))
        group.topic("restored").agree(None, lambda _: run.shared_survey())
        ledger.orders[self.name * 8], ledger.jobs[self.name * 8] = 1 + max(ledger.orders.values()), self.restored
        run.begin(self.restored)

    def _after(
        self,
        run: RunWriter,
        below: RunWriter | None,
        one: Generation,
        copies: NodeCopies | None,
        parts: OtherRanks | None,
    ) -> None:
        """What comes after a commit: copies to other nodes, the mark, a copy to the home, and deletions."""
        ledger, wait = self.world.ledger, self.world.scheduler.wait
        died_before = ledger.died
        future = copies.offer(one) if copies is not None else None
        if future is not None:
            future.add_done_callback(lambda ended: ended.exception() and ledger.given_up.add(one.id))
        if parts is None:
            run.known.held.discard(one.id, self)  # from now on only its copies hold it
        with self._upkeep:
            with contextlib.suppress(LastgoodError):
                run.conclude(one, [])
            if parts is not None:
                how = Copying(self.world.arenas(0, 0), INLINE, agent=run.known.agent)
                with contextlib.suppress(LastgoodError):
                    complete(self.world.home(), [run.tier], run.survey.generations[one.id], how, parts)
            if future is not None and self.world.scheduler.chance.random() < 0.5:
                wait(future.done, 20.0)
                if future.done() and future.exception() is None:
                    ledger.report_copies(one.id, died_before)
            run.clean()

    # ---- the others ----------------------------------------------------------------------------------------

    def _follow(self, rank: int, group: RankGroup, held: contextlib.ExitStack) -> None:
        leads = self._nodes.leaders[rank] == rank
        disk, links = self._opened(rank, held)
        if self._resumes is None:
            group.topic("locked").agree(None, lambda _: None)
        view, home = NodeView(disk, self._nodes, leads, links), self.world.home(shared=True)
        servers = list[Any]()
        if leads:
            view.server = RequestServer(group, SUBJECT, NodeFiles(disk))
            servers.append(view.server)
            servers += self._agent_servers(group, links)
        if self.below:
            servers.append(PartServer(home, "0", [view], group, Workers()))  # type: ignore[arg-type]
        if self._rebuilds:
            servers.append(PartServer(view, "front", [home], group, Workers()))  # type: ignore[arg-type]
        run = Follower(view, INLINE, group, environment=self._environment)
        if self._resumes is not None:
            group.topic("opened").agree(None, lambda _: None)
            run.known.begin(run.known.survey.incarnations[self._resumes.incarnation])
        else:
            run.adopt(group.topic("opened").agree(None, lambda _: None))
            run.adopt(group.topic("restored").agree(None, lambda _: None))
            run.begin(None)
        self._save(run, group, links.agent, lambda one: None)
        for one in servers:
            one.close()

    def _agent_servers(self, group: RankGroup, links: NodeLinks) -> list[RequestServer]:
        """What the leader of a node does for copies, or for parity."""
        agent, table = links.agent, self._table
        if agent is None or table is None:
            return []
        if self._code is None:
            servers = [RequestServer(group, node_copies.SUBJECT, CopySender(agent, table, group.rank))]
        else:
            builder = ParityBuilder(agent, table, group.rank, sets_among(table, self._code))
            servers = [RequestServer(group, node_parity.SUBJECT, builder)]
        if self._rebuilds:
            builder = ParityBuilder(agent, table, group.rank)
            servers.append(RequestServer(group, node_parity.REBUILD_SUBJECT, builder))
        return servers


def restored(runs: Sequence[Any]) -> tuple[Generation | None, State]:
    """What a restore loads from these places, the nearest first, by the deciders of lastgood. Nothing is mended."""
    candidates = Candidates(runs[0].known.view if hasattr(runs[0], "known") else runs[0].view)
    known = [getattr(one, "known", one) for one in runs]
    for generation in candidates:
        for one in sorted(known, key=lambda one: _unlike(one, generation.id)):
            if generation.id in one.survey.generations:
                with contextlib.suppress(Damaged):
                    return generation, bytes_of(one.tier, generation, INLINE)
        candidates.failed(Damaged(f"{generation.id} is damaged in every place"))
    return None, {}


def _unlike(known: Any, at: GenerationId) -> bool:
    one = known.survey.generations.get(at)
    return one is None or not one.restorable

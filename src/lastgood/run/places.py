"""All places of a run that is open for writing: the one that is written first, and those that receive copies.

Invariants
  1. All places hold the same run: one id, and the same content for the same generation.
  2. An incarnation has one order in all places, higher than every order in any of them (writer.py, claims.py).
  3. A generation is read from the nearest place whose copy may be restored (policy/places.py). What is found there is
     marked and mended there, and nowhere else.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from .. import reporting
from ..coordination.rounds import RankGroup
from ..coordination.single_rank import AnyRanks, AnyTopic, SingleRank
from ..engine import guard
from ..engine.arena import Arena
from ..errors import Refused, Unavailable, Unreadable
from ..events import Event
from ..format import commit, layout
from ..limits import WORKERS
from ..policy.places import holder
from ..ports import Stop, Tier, never
from ..records import Finding, Generation, GenerationId, RunHeader, intact, judged
from . import access, copying, node_copies, node_opening, node_parity, node_transfer, paths
from .follower import Follower
from .known import Environment
from .left_behind import abandoned
from .lower_place import LowerPlace
from .node_copies import CopyMaker, CopySender, Maker, NodeCopies, NothingMaker
from .node_disks import NodeDisks, NodeView
from .node_parity import NodeRebuild, ParityBuilder, ParityMaker, sets_among
from .node_transfer import Carried, Carrier, Chunks, NodeTransfers
from .outcomes import Outcomes
from .part_copies import OtherRanks, PartServer
from .place_list import note
from .place_scrub import Scrubbing
from .planned_save import RunOptions
from .rank_requests import RequestServer
from .settle import write_header
from .thread_pools import Workers, started
from .writer import RunWriter


class Places:
    """The places of an open run.

    `front`: the writer where each save is committed first. `below`: the other places, the nearest first; none by
    default. At a rank other than the coordinator there are `followed` instead, and `servers` that do this rank's part
    of copies and parity. `transfers`: at the coordinator of a job on several nodes whose front lies on their disks;
    None anywhere else. `copies`: at the coordinator, where copies are made on other nodes.
    """

    def __init__(
        self,
        front: RunWriter | Follower,
        below: Sequence[LowerPlace] = (),
        followed: Sequence[Follower] = (),
        servers: Sequence[PartServer | RequestServer] = (),
        transfers: NodeTransfers | None = None,
        copies: NodeCopies | None = None,
    ) -> None:
        self.front, self.below, self._servers, self.transfers, self.copies = front, below, servers, transfers, copies
        self._carried: GenerationId | None = None
        self._all = [front, *(one.writer for one in below), *followed]
        front.known.below = [one.known for one in self._all[1:]]
        for one in self._writers():
            one.mender.sources = [other.tier for other in self._writers() if other is not one]
        for place in below:
            place.catch_up()
        if isinstance(front, RunWriter):
            tiers = [front.tier, *(one.tier for one in below)]
            front.known.left_order = note(tiers)
            if paths.in_memory(front.tier.place):
                text = abandoned(front.tier.place, front.known.survey, front.known.everywhere)
                if text:
                    reporting.threat(text)

    # ---- reading -------------------------------------------------------------------------------------------

    def writer_of(self, at: GenerationId) -> RunWriter | Follower:
        """The writer of the place from which a generation is read."""
        return self._all[holder([dict(one.known.survey.generations) for one in self._all], at) or 0]

    def shared_surveys(self) -> list[Any]:
        """What the coordinator knows of the run in each place, as `adopt` receives it at the other ranks."""
        return [one.shared_survey() for one in self._writers()]

    def adopt(self, posted: list[Any]) -> None:
        """As `Follower.adopt`, for each place."""
        for one, shared in zip(self._all, posted, strict=True):
            if isinstance(one, Follower):
                one.adopt(shared)  # guard: followers-adopt-survey

    def mark(self, generation: Generation, findings: list[Finding]) -> None:
        """Record what was found where the generation was read. As `Marks.conclude`."""
        self.writer_of(generation.id).conclude(generation, findings)

    def note_compared(self, step: int) -> None:
        """A Sentinel has compared all steps until this one: a generation of these is kept until a newer one is."""
        for one in self._writers():
            one.known.compared_step = step

    def mark_suspect(self, at: GenerationId, finding: Finding, durably: bool = True) -> None:
        """Mark a generation in each place that has it. `durably` (default True): False: in this process only."""
        for one in self._writers():
            with one.known.lock:
                generation = one.known.survey.generations.get(at)
                if generation is not None and not durably:
                    one.known.record(judged(generation, [finding]))
            if generation is not None and durably:
                one.conclude(generation, [*generation.unfit, finding])

    def mend(self, generation: Generation, arena: Arena, stop: Stop = never) -> bool:
        """Mend a generation where it was read. Returns whether it is whole now, there or in another place.

        `generation`: with what was found. A copy that cannot be mended counts as bad in this process, so that the next
        place that has one is read.
        """
        tried = list[RunWriter]()
        while isinstance(writer := self.writer_of(generation.id), RunWriter) and writer not in tried:
            tried.append(writer)
            if len(tried) == 1 and generation.damaged:
                with writer.known.lock:
                    now = writer.known.survey.generations.get(generation.id, generation)
                    writer.known.record(judged(now, generation.damaged))  # guard: damage-noted-before-mending
            if writer.mender.try_to_mend(generation.id, arena, stop):
                return True
            if not self.below:
                break
            if isinstance(writer.tier, NodeDisks) and generation.damaged:
                writer.conclude(generation, generation.damaged)  # all nodes have read what they have
                continue
            try:
                findings = writer.all_findings(generation, arena)
            except Unreadable as error:  # it may be readable later, so no mark is written
                with writer.known.lock:
                    writer.known.record(judged(generation, [guard.finding(error)]))
                continue
            writer.conclude(generation, findings)
            if intact(findings):
                return True
        return False

    def mend_known(self, step: int | None, arena: Arena) -> None:
        """As `Mender.mend_known`, in each place."""
        for one in self._writers():
            one.mender.mended.clear()
            one.mender.mend_known(step, arena)

    def mended(self) -> list[tuple[int, str]]:
        """(step, files) of each generation that was mended since `mend_known`."""
        return [(at.step, ", ".join(names)) for one in self._writers() for at, names in one.mender.mended.items()]

    def protect_newest(self) -> None:
        """Make what is missing of the copies or the parity of the newest generation on other nodes: one may have been
        replaced."""
        newest = self.front.known.newest_restorable()
        if self.copies is not None and newest is not None:
            self.copies.offer(newest, restored=True)

    def _writers(self) -> list[RunWriter]:
        return [one for one in self._all if isinstance(one, RunWriter)]

    def carry(self, generation: Generation, wants: Sequence[Chunks]) -> Carried:
        """As `NodeTransfers.carry`: from the memory of other nodes where their agents serve, else from a lower place
        that has the generation, else from node to node.
        """
        assert self.transfers is not None, "the front lies on the disks of several nodes"
        below = [dict(one.writer.known.survey.generations) for one in self.below]
        place = holder(below, generation.id)
        whole = place is not None and below[place][generation.id].restorable
        again, self._carried = generation.id == self._carried, generation.id  # what came before may be damaged
        below_first = not isinstance(self.front.tier, NodeDisks) or self.front.tier.links.table is None
        first, second = (place, None) if below_first else (None, place)
        if not whole:
            first = second = None
        if again:
            return self.transfers.carry(generation, wants, second, read=False)
        try:
            return self.transfers.carry(generation, wants, first, read=not below_first)
        except Unavailable:
            if below_first or not whole:
                raise
            return self.transfers.carry(generation, wants, second, read=False)  # an agent cannot be reached

    def below_with(self, at: GenerationId) -> list[Tier]:
        """The places below whose copy of a generation may be restored."""
        known = [(one.tier, one.known.survey.generations.get(at)) for one in self._all[1:]]
        return [tier for tier, found in known if found is not None and found.restorable]

    # ---- copying -------------------------------------------------------------------------------------------

    def owe(self, place: int, step: int) -> None:
        """As `LowerPlace.owe`, for the place of this position among the lower ones. Other ranks decide nothing."""
        if self.below:
            self.below[place].owe(step)

    def forget_owed(self) -> None:
        """The state was restored: a copy that a failed save has left due is not owed any more, of whatever step."""
        for one in self.below:
            one.forget_owed()

    def offer(self, generation: Generation, pinned: bool) -> dict[str, Future[None]]:
        """Copy a generation that was committed to the places that are due. Returns place -> the end of the copy."""
        offered = {one.tier.place: one.offer(generation, pinned) for one in self.below}
        if self.copies is not None:
            offered[self.copies.place] = self.copies.offer(generation)
        return {place: copied for place, copied in offered.items() if place and copied is not None}

    def add(self, at: GenerationId) -> dict[str, Future[None]]:
        """Copy a generation, or labels that were added to it, to all places below. Returns as `offer`."""
        generation = self.front.known.survey.generations.get(at)
        return {one.tier.place: one.add(generation, True) for one in self.below} if generation else {}

    def wait(self, timeout_seconds: float | None, on_nodes: bool = True) -> None:
        """Wait for the copies, as `LowerPlace.wait`; with `on_nodes` for those on other nodes too.

        Raises TimedOut after `timeout_seconds` (None: no limit).
        """
        until = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        waits = [one.wait for one in self.below] + ([self.copies.wait] if self.copies and on_nodes else [])
        for wait in waits:
            wait(None if until is None else max(0.0, until - time.monotonic()))

    def stop(self) -> None:
        """Interrupt all copies: `close` then does not try to make them."""
        for one in (*self.below, *([self.copies] if self.copies else ())):
            one.stop()
        self.leave()

    def leave(self) -> None:
        """Called when an exception ends the loop of this rank: at a rank other than the coordinator nothing more is
        copied, because the others may wait for the end of this process."""
        for one in self._servers:
            one.leave()
        if isinstance(self.front.tier, NodeView) and self.front.tier.server is not None:
            self.front.tier.server.leave()

    def close(self) -> None:
        """As `LowerPlace.close`, for each place."""
        if self.copies is not None:
            self.copies.close()
        for one in self.below:
            one.close()
        if isinstance(self.front, RunWriter):
            self.front.verifier.others.end()
            if self.front.mender.nodes is not None:
                self.front.mender.nodes.end()
        if self.transfers is not None:
            self.transfers.end()
        for server in self._servers:
            server.close()


@contextlib.contextmanager
def opened_front(
    path: str | os.PathLike[str], options: RunOptions, ranks: AnyRanks, opening: AnyTopic
) -> Iterator[Any]:
    """Open the place that is written first; the coordinator also acquires its lock.

    The other ranks return once the coordinator has settled the run, which it reports in `opening`.
    """
    if not options.shared or (ranks.size > 1 and access.in_slots(path)):
        with node_opening.opened(path, options, ranks) as disks:
            if not ranks.is_coordinator:
                opening.agree(None, lambda _: None)
            yield disks
    elif ranks.is_coordinator:
        with access.for_writing(path, options.write_mode, in_flight=options.in_flight, persist=options.persist) as tier:
            yield tier
    else:
        opening.agree(None, lambda _: None)
        with access.for_sharing(path, options.write_mode) as tier:
            yield tier


class Below:
    """The places below, opened before the front is settled; the coordinator claims them. `saving`: of `Scrubbing`."""

    def __init__(
        self, options: RunOptions, storage: contextlib.ExitStack, ranks: AnyRanks, saving: Callable[[], bool]
    ) -> None:
        self._options, self._ranks = options, ranks
        self._scrubbing = Scrubbing(options.scrub, saving) if options.scrub else None
        self.tiers: list[Any] = [
            storage.enter_context(
                access.for_writing(one.path, "atomic_dirsync")
                if ranks.is_coordinator
                else access.for_sharing(one.path, "atomic_dirsync")
            )
            for one in options.below
        ]

    def opened(self, front: RunWriter | Follower, outcomes: Outcomes, pools: contextlib.ExitStack) -> Places:
        """Settle each place and start the thread that copies to it; `pools` ends it if the opening fails."""
        if isinstance(front, Follower):
            return self._followed(front, pools)
        on_nodes = isinstance(front.tier, NodeDisks)
        if (self._options.parity or on_nodes) and isinstance(self._ranks, RankGroup):
            front.verifier.others = OtherRanks(self._ranks, "front", front.tier)
        if on_nodes:
            front.mender.others = front.verifier.others
        places = list[LowerPlace]()
        for index, (tier, one) in enumerate(zip(self.tiers, self._options.below, strict=True)):
            workers = _readers(pools)
            writer = RunWriter(
                tier,
                workers,
                keep=one.keep,
                parity=one.parity,
                algorithm=self._options.algorithm,
                ranks=SingleRank(),
                environment=_environment_of(tier.place, front.known.environment),
            )
            place = LowerPlace(writer, front.known, workers, outcomes, self._ranks, index, self._scrubbing)
            places.append(place.start())
            pools.callback(place.close)
        transfers = None
        if isinstance(self._ranks, RankGroup) and isinstance(front.tier, NodeDisks) and front.tier.nodes.others:
            transfers = NodeTransfers(front.tier, self.tiers, self._ranks)
            pools.callback(transfers.end)
        return Places(front, places, transfers=transfers, copies=self._copies(front, outcomes, pools))

    def _copies(self, front: RunWriter, outcomes: Outcomes, pools: contextlib.ExitStack) -> NodeCopies | None:
        """What copies to other nodes, where their agents serve each other; else what keeps the copies that are left."""
        tier, ranks = front.tier, self._ranks
        if not isinstance(tier, NodeDisks) or not isinstance(ranks, RankGroup):
            return None
        table = tier.links.table
        if table is not None:
            front.mender.nodes = NodeRebuild(tier, table, ranks)
            pools.callback(front.mender.nodes.end)
        elif not tier.nodes.others or self._options.copies_among_nodes < 2:  # guard: copies-from-before-stay
            return None

        def maker(stop: Stop) -> Maker:
            if table is None:
                return NothingMaker(tier)
            if (code := self._options.code_among(len(table.nodes))) is not None:
                return ParityMaker(tier, table, code, ranks, stop)
            return CopyMaker(tier, table, self._options.copies_among_nodes, ranks, stop)

        copies = NodeCopies(front.known, maker, outcomes)
        pools.callback(copies.close)
        return copies

    def _followed(self, front: Follower, pools: contextlib.ExitStack) -> Places:
        """As `opened`, at a rank other than the coordinator."""
        view, group = front.tier, front.ranks
        servers, followed = list[PartServer | RequestServer](), list[Follower]()

        def serve(server: PartServer | RequestServer) -> None:
            servers.append(server)
            pools.callback(server.close)
            pools.callback(server.leave)

        for index, tier in enumerate(self.tiers):
            workers = _readers(pools)
            serve(PartServer(tier, str(index), [view], group, workers))
            followed.append(Follower(tier, workers, group, environment=front.known.environment))
        if isinstance(view, NodeView):
            serve(PartServer(view, "front", self.tiers, group, _readers(pools)))
            if view.server is not None:
                serve(RequestServer(group, node_transfer.SUBJECT, Carrier(view, self.tiers, group)))
                if view.links.table is not None and view.links.agent is not None:
                    agent, table = view.links.agent, view.links.table
                    code = self._options.code_among(len(table.nodes))
                    parity = ParityBuilder(agent, table, group.rank, sets_among(table, code))
                    # Only what the coordinator asks, and so ends: another server would wait for that at the close.
                    if code is None:  # guard: only-asked-subjects-served
                        serve(RequestServer(group, node_copies.SUBJECT, CopySender(agent, table, group.rank)))
                    else:
                        serve(RequestServer(group, node_parity.SUBJECT, parity))
                    serve(RequestServer(group, node_parity.REBUILD_SUBJECT, parity))
        elif self._options.parity:
            serve(PartServer(view, "front", [view], group, _readers(pools)))
        return Places(front, followed=followed, servers=servers)


def unite(tiers: Sequence[Tier], environment: Environment) -> None:
    """Make all places those of one run. Raises Refused if they hold different runs; nothing was changed then."""
    if len(tiers) == 1:
        return
    found = [_run_of(tier) for tier in tiers]
    runs = {run: tier.place for run, tier in zip(found, tiers, strict=True) if run is not None}
    if len(runs) > 1:  # guard: places-of-one-run
        named = " and ".join(f"{place} ({run})" for run, place in runs.items())
        raise Refused(
            f"these places hold different runs: {named}",
            safe="Nothing was touched.",
            todo="Give each run places of its own; an empty place joins a run.",
        )
    if runs and found[-1] is None and paths.in_memory(tiers[0].place):
        reporting.warning(
            f"{tiers[-1].place} is empty, and {tiers[0].place} holds a run that was saved to it: the run is continued "
            f"from there. To start anew, remove {tiers[0].place.removeprefix(paths.MEMORY)} too."
        )
    run = next(iter(runs), None) or environment.new_id()
    for tier, has in zip(tiers, found, strict=True):
        if has is None:
            write_header(tier, run)


def _readers(pools: contextlib.ExitStack) -> Workers:
    """Threads that read and digest for one place."""
    workers = Workers(WORKERS, "lastgood-drain-read")
    pools.callback(workers.shutdown)
    return started(workers, WORKERS)


def _run_of(tier: Tier) -> str | None:
    """The id of the run in a place; None if it is empty. Lists the generations only if the header cannot be read."""
    header = commit.read_hint(tier, layout.HEADER, tier.list("").get(layout.HEADER), RunHeader)
    return header.run if header else copying.run_of(commit.survey(tier))


def _environment_of(place: str, front: Environment) -> Environment:
    """The environment of a place below: its events name the place, and it makes room on its own disk."""

    def emit(event: Event) -> None:
        front.emit(replace(event, detail=f"{place}: {event.detail}" if event.detail else place))

    return replace(front, emit=emit, make_room=None)

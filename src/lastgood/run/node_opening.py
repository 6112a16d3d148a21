"""Opens a place that lies on the disks of several nodes (node_disks.py), or in the slots of several ranks.

every rank names its directory -> ranks with the same one form a node, led by the lowest of them; in slots, which one
process writes, each rank is a node of its own -> every leader locks its directory -> the coordinator settles all of
them as one place -> `complete_records`, `note_lost_parts`
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from .. import reporting
from ..coordination.rounds import RankGroup
from ..coordination.single_rank import AnyRanks
from ..errors import Damaged, LastgoodError, NameTaken, Refused
from ..format import commit, layout, sealed
from ..io.machine import NODE, machine
from ..policy.parts import divided
from ..ports import Tier
from ..records import Finding, Generation, RunHeader, Seal, judged
from ..storage.slots import Slots
from ..wire import nixl
from . import access, copying, drill_scratch, memory_place, paths, peer_opening
from .agent_link import AgentLink, read_spec
from .agent_messages import AgentSpec, CopyTo
from .known import KnownRun
from .node_disks import FETCHED, SUBJECT, NodeDisks, NodeFiles, NodeLinks, Nodes, NodeTier, NodeView, Own
from .outcomes import Outcomes
from .peer_security import own_certificates, security
from .peers import Peers
from .planned_save import RunOptions
from .rank_requests import Requests, RequestServer


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], options: RunOptions, ranks: AnyRanks) -> Iterator[NodeTier]:
    """Open the directory of this rank's node, or the slots of this rank. All ranks call it.

    The leader of each node holds the lock of its directory; each rank leads its own slots. Raises NotARun, NotWritable,
    RunLocked, NoSpace, TierDown, and Refused if two nodes hold different runs.
    """
    in_slots = access.in_slots(path)
    with contextlib.ExitStack() as storage:
        topic = ranks.topic("nodes")
        with topic.failing():
            place = paths.parsed(path)
            agent = AgentLink(place.url) if _has_agent(place, options) else None
            if agent is not None:
                storage.callback(agent.close)
                agent.attach()  # guard: agent-attached-before-opening
            here = [str(ranks.rank)] if in_slots else access.identity(path)
            nodes = Nodes(tuple(topic.agree(here, lambda posts: [posts.index(one) for one in posts])))
            leads = nodes.leaders[ranks.rank] == ranks.rank
            if agent is not None and not leads:
                agent.close()
                agent = None
            if leads:
                own = storage.enter_context(_opened_own(path, options, ranks, in_slots))
                own.delete(FETCHED)
                if agent is not None:  # only an agent makes copies for drills
                    drill_scratch.clear_copies(place.root)
            topic.agree(None, lambda _: None)  # every node is locked
            if not leads:
                own = storage.enter_context(access.for_sharing(path, options.write_mode, options.spill(path)))
            disk = cast(Own, own)
            where = f"{disk.place} on {os.environ.get(NODE) or platform.node()}"
            topic.agree((where, _run_of(disk)), _require_one_run)
            links = NodeLinks(agent)
            if options.copies_among_nodes > 1 and ranks.size == 1:
                asked = f"copies={options.copies}" if options.node_parity is None else f"parity={options.node_parity!r}"
                reporting.warning(f"{asked}, and this job has one node: nothing is kept on others.")
            if options.copies_among_nodes > 1 and isinstance(ranks, RankGroup):
                windows = nixl.chosen(peer_opening.own_wire()) if leads else None
                links.table = peer_opening.agreed(agent, nodes.leaders[ranks.rank], options, topic)
                if links.table is not None and leads:
                    secured = security(links.table.key, own_certificates())
                    links.peers = Peers(links.table.job, secured, machine(), windows)
                    storage.callback(links.peers.close)
        if not isinstance(ranks, RankGroup) or not nodes.others:
            yield NodeDisks(disk, nodes, None, links) if ranks.is_coordinator else NodeView(disk, nodes, leads, links)
        elif ranks.is_coordinator:
            requests = Requests(ranks, SUBJECT, nodes.others)
            storage.callback(requests.end)
            yield NodeDisks(disk, nodes, requests, links)
        else:
            view = NodeView(disk, nodes, leads, links)
            if leads:
                view.server = RequestServer(ranks, SUBJECT, NodeFiles(disk))
                storage.callback(view.server.close)
            yield view


def _has_agent(place: paths.Place, options: RunOptions) -> bool:
    """Whether the front has an agent on each node. A directory that had one keeps it: it must know of this process."""
    if place.kind != "directory":
        return place.kind == "memory"
    return options.copies_among_nodes > 1 or read_spec(place.root) is not None


def _opened_own(
    path: str | os.PathLike[str], options: RunOptions, ranks: AnyRanks, in_slots: bool
) -> contextlib.AbstractContextManager[Tier]:
    if not in_slots:
        return access.for_writing(path, options.write_mode, spill=options.spill(path))
    access.require_no_slots_of_one(path)
    return access.for_writing(
        access.slots_of_rank(path, ranks.rank),
        options.write_mode,
        in_flight=options.in_flight,
        persist=options.persist,
        several=True,
    )


def _run_of(disk: Own) -> str | None:
    header = commit.read_hint(disk, layout.HEADER, disk.list("").get(layout.HEADER), RunHeader)
    return header.run if header else copying.run_of(commit.survey(disk))


def _require_one_run(posts: Sequence[tuple[str, str | None]]) -> None:
    """`posts`: of each rank: where the directory of its node is, and the run in it."""
    runs = dict[str, list[str]]()
    for where, run in dict.fromkeys((where, run) for where, run in posts if run is not None):
        runs.setdefault(run, []).append(where)
    if len(runs) > 1:  # guard: nodes-of-one-run
        named = "; ".join(
            f"{run} in {', '.join(of[:3])}" + (f" and {len(of) - 3} more" if len(of) > 3 else "")
            for run, of in runs.items()
        )
        raise Refused(
            f"these nodes hold different runs: {named}",
            safe="Nothing was touched.",
            todo="Remove or move away what is not wanted, where it lies; or give this run another path.",
        )


def complete_records(tier: NodeDisks, known: KnownRun) -> None:
    """Put the COMMIT of each generation on the nodes that lack it: those that were replaced.

    Not in slots: the files of a generation whose COMMIT is not in the table of a rank are lost there.
    """
    if not tier.nodes.others:
        return
    with contextlib.suppress(NameTaken):  # one that is damaged on a node is a hint less
        tier.put_new(layout.HEADER, layout.encode(RunHeader(format=layout.FORMAT, run=known.run_id)))
        for one in known.survey.incarnations.values():
            tier.put_new(layout.incarnation_name(one), layout.encode(one))
    for at in () if tier.newest_only else known.survey.generations:
        commit.confirm(tier, at)  # guard: commit-put-on-every-node


def note_lost_parts(known: KnownRun) -> None:
    """Note which generations lack the files of a rank, because its node was replaced.

    Such a generation is mended from another place of the run, or passed over. No mark of it is written, because the
    node may come back.
    """
    if not isinstance(known.tier, NodeDisks):
        return
    known.lost.clear()
    for at, one in list(known.survey.generations.items()):
        listing = known.survey.listings[layout.folder(at).partition("/")[2]]
        missing = [seal for seal in one.commit.seals if _is_lost(known.tier, one, seal, listing)]
        if missing and not one.damaged:  # guard: lost-part-is-not-restorable
            ranks = ", ".join(str(seal.rank) for seal in missing)
            what = f"the files of rank {ranks} lie on no node of this job"
            lost = Finding(kind="MissingBlob", what=what, layer="structure", blob=missing[0].manifest)
            known.record(judged(one, [lost]))
            known.lost.add(at)


def _is_lost(tier: Tier, generation: Generation, seal: Seal, listing: Mapping[str, int | None]) -> bool:
    """Whether no node has the files of a rank. A rank without tensors has a manifest only."""
    if seal.manifest not in listing:
        return True
    if layout.blob_name(seal.rank) in listing:
        return False
    try:
        return bool(sealed.sealed_record(tier, generation, seal).blobs)
    except Damaged:
        return True


def parts(tier: Tier, ranks: AnyRanks, generation: Generation) -> list[list[int]]:
    """For each rank of the job, the ranks that wrote a generation whose files in `tier` are its part (policy/parts.py).

    Called at the coordinator, for a place on several nodes; anywhere else for a place that all ranks see.
    """
    written = [one.rank for one in generation.commit.seals]
    if isinstance(tier, NodeDisks):
        return divided(written, tier.nodes.leaders, tier.held(generation))
    return divided(written, [0] * ranks.size)


def every_copy(tier: Tier, ranks: AnyRanks, generation: Generation) -> list[list[int]]:
    """As `parts`, but a file that lies on several nodes is the part of a rank on each of them."""
    found = parts(tier, ranks, generation)
    if isinstance(tier, NodeDisks):
        held, leaders = tier.held(generation), tier.nodes.leaders
        somewhere = set[int]().union(*held.values())
        found = [[one for one in of if one not in somewhere] for of in found]
        for leader, there in held.items():
            members = [rank for rank, one in enumerate(leaders) if one == leader]
            for number, written in enumerate(sorted(there)):
                found[members[number % len(members)]].append(written)
    return found


def start_agent(tier: Tier, options: RunOptions, claims: Sequence[Tier], outcomes: Outcomes) -> None:
    """Start the agent of the node that this process leads, if the front has agents. Called once the run is open.

    `claims`: the places below, as they are opened. `outcomes`: receives what writing raises.
    """
    if not isinstance(tier, NodeTier) or tier.links.agent is None:
        return
    assert not isinstance(tier.own, Slots)
    order = max((getattr(one, "order", 0) for one in claims), default=0)
    places = [CopyTo(url=paths.parsed(one.path).url, keep=one.keep) for one in options.below]
    table = tier.links.table
    # An agent of an older version does not listen, and could not read them.
    nodes = table.nodes if table is not None and any(one.name == machine() for one in table.nodes) else []
    # The folder that this process uses, too: files may lie in one that an earlier opening has chosen.
    files = memory_place.files_of(paths.parsed(tier.place).root, options.spill(tier.place))
    # guard: agent-knows-earlier-spill
    spec = AgentSpec(format=layout.FORMAT, places=places, order=order, spill=files.spill_folder, nodes=nodes)
    try:
        tier.links.agent.start(tier.own, spec)
    except LastgoodError as error:
        outcomes.put(error)


def check_agent(tier: Tier) -> None:
    """As `AgentLink.check`, if the front has agents and this process leads its node."""
    if isinstance(tier, NodeTier) and tier.links.agent is not None:
        tier.links.agent.check()

"""Chunks of a generation on their way to nodes that need them, before a restore reads them from the disk of its node.

    all ranks     receive the manifests of all ranks from the coordinator       (`share_manifests`)
    each rank     which chunks it wants -> the coordinator, which makes a `Transfer` of what each node lacks
    each leader   copies what its node lacks into one file, FETCHED: from a place that all ranks see, or else from
                  the node that has it:
    sender        .../TRANSFER/FILE/OFFSET             a part of a chunk, at most PART_BYTES
    receiver      .../TRANSFER/FILE/OFFSET/RANK        acknowledges the part; the sender then deletes both
                  Where a node that has it has an agent that listens, the receiver reads from that agent instead; what
                  one rank alone of its node wants, that rank reads itself (peer_reads.py).

Invariants
  1. What was fetched is verified like any other chunk, when a rank reads it.
  2. At most WINDOW parts are in the store of the job at the same time.
  3. All leaders go through the chunks of a transfer in the same order, so no two of them wait for each other. A leader
     that fails sends empty parts, or acknowledges what it does not use, so that the others do not wait for it. What
     agents give comes last: no leader waits for one that reads from a slow agent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ..coordination.rounds import RankGroup
from ..coordination.single_rank import AnyTopic
from ..errors import Cancelled, LastgoodError, TierDown, TimedOut
from ..format import layout, sealed
from ..io.files import round_up
from ..ports import Stop, Tier, never
from ..records import Blob, Extent, Generation, GenerationId, Manifest, Record
from ..storage.slot_file import aligned
from .node_disks import FETCHED, NodeDisks, NodeTier
from .peer_reads import OTHER_NODES
from .peers import RANK_FILE, PeerNode
from .rank_requests import Requests, ask_all

SUBJECT = "transfers"
PART_BYTES = 4 << 20
"""A message of the store of a job may have a few MiB."""
WINDOW = 4

Chunks = Mapping[str, Sequence[int]]
"""File -> the indices of chunks of it."""


class Transfer(Record, frozen=True, kw_only=True):
    """What is copied to which nodes. A node is named by its leader."""

    number: int
    """unique in this opening of the run"""
    at: GenerationId
    place: int | None
    """the place to copy from, by its position among the lower ones; None: from node to node"""
    wanted: dict[str, dict[str, list[int]]]
    """leader -> the chunks that its node lacks"""
    holders: dict[str, list[int]]
    """file -> the leaders of the nodes that have it; the first one sends it through the store of the job"""


class _Chunk(NamedTuple):
    """One chunk of a tensor file."""

    manifest: Manifest
    blob: Blob
    number: int

    @property
    def extent(self) -> Extent:
        return layout.extent_of(self.blob, self.number)


class Carrier:
    """One leader's part in transfers. At the other leaders it is a `rank_requests.Service`.

    `tier`: the disks of the nodes as this rank sees them. `below`: the places that all ranks see.
    """

    def __init__(self, tier: NodeTier, below: Sequence[Tier], ranks: RankGroup) -> None:
        self._tier, self._below, self._ranks = tier, below, ranks
        self._silent = set[str]()
        """the nodes whose agents could not be read: they are asked last, because one that hangs costs a timeout"""

    def served(self, request: Any, stop: Stop) -> Any:
        return self.carry(msgspec.convert(request, Transfer), stop)

    def carry(self, one: Transfer, stop: Stop) -> dict[str, int]:
        """Send and receive what concerns this node. Returns place -> the bytes that were copied from it."""
        rank = self._ranks.rank
        generation = self._tier.shown.generation
        assert generation is not None and generation.id == one.at, "the manifests were not shown before"
        manifests = manifests_of(self._tier, generation)
        mine = list(_in_order(one.wanted.get(str(rank), {}), manifests))
        offsets, size = dict[tuple[str, int], int](), 0
        for chunk in mine:
            offsets[chunk.blob.name, chunk.number] = size
            size += round_up(chunk.extent.length)
        buffer = aligned(bytes(max((chunk.extent.length for chunk in mine), default=0)))
        received, failed, upload = Counter[str](), None, None
        try:
            if mine:
                self._tier.own.delete(FETCHED)
                upload = self._tier.own.create(FETCHED, size)
        except LastgoodError as error:
            failed = error
        chunks, givers = _in_order(_union(one.wanted.values()), manifests), self._givers(one)
        for chunk in sorted(chunks, key=lambda chunk: bool(givers[chunk.blob.name])):
            at, length = offsets.get((chunk.blob.name, chunk.number)), chunk.extent.length
            if failed is not None and givers[chunk.blob.name]:  # guard: failed-transfer-asks-no-agent
                break  # no leader waits for what agents give
            try:
                if stop():
                    raise Cancelled("the restore was interrupted")
                self._move(one, chunk, givers[chunk.blob.name], None if at is None else buffer)
                if at is not None and failed is None and upload is not None:
                    upload.write_at(buffer[: round_up(length)], at)
                    received[OTHER_NODES if one.place is None else self._below[one.place].place] += length
            except (TimedOut, Cancelled) as error:  # another leader has failed: each chunk would take a timeout
                failed = failed or error
                break
            except LastgoodError as error:
                failed = failed or error  # the chunks that follow are sent and acknowledged all the same
        if upload is not None and failed is None:
            try:
                upload.finish()
            except LastgoodError as error:
                failed = error
        if failed is not None:
            if upload is not None:
                upload.abort()
            raise failed
        return dict(received)

    def _givers(self, one: Transfer) -> dict[str, list[PeerNode]]:
        """File -> the nodes that have it and whose agents give it. Without one it goes through the store of the job."""
        table = self._tier.links.table
        return {name: [] if table is None else table.among(leaders) for name, leaders in one.holders.items()}

    def _move(self, one: Transfer, chunk: _Chunk, givers: Sequence[PeerNode], into: memoryview | None) -> None:
        """Fill `into` with a chunk, from wherever it comes. None: this node does not want it. The sender sends it."""
        extent = Extent(
            blob=f"{layout.folder(one.at)}/{chunk.blob.name}", offset=chunk.extent.offset, length=chunk.extent.length
        )
        if one.place is not None:
            if into is not None:
                self._below[one.place].read_into(extent, into)
        elif givers:  # all leaders have the same table, so none of them sends or awaits this chunk
            if into is not None:
                self._read_from_peers(one, extent, into, givers)
        elif one.holders[chunk.blob.name][0] == self._ranks.rank:
            receivers = [leader for leader, of in one.wanted.items() if chunk.number in of.get(chunk.blob.name, ())]
            self._send(one, extent, receivers)
        elif into is not None:
            self._receive(one, extent, into)

    def _read_from_peers(self, one: Transfer, extent: Extent, into: memoryview, givers: Sequence[PeerNode]) -> None:
        """A chunk from the agent of one of these nodes. Each transfer begins with another one of them."""
        first, peers = one.number % len(givers), self._tier.links.peers
        assert peers is not None, "each leader has connections where there is a table"
        problem: LastgoodError | None = None
        for node in sorted([*givers[first:], *givers[:first]], key=lambda node: node.name in self._silent):
            try:
                peers.read(node, extent, into)
            except LastgoodError as error:
                problem = error
                self._silent.add(node.name)  # guard: silent-giver-asked-last
            else:
                return
        assert problem is not None, "a file that is asked for has a holder"
        raise TierDown(f"{extent.blob} could not be read from any node: {problem.what}", safe="Nothing was loaded.")

    def _send(self, one: Transfer, extent: Extent, receivers: Sequence[str]) -> None:
        """Send a chunk of this node. If it cannot be read, empty parts are sent, and the error is raised."""
        failed: LastgoodError | None = None
        data = b""
        try:
            data = _read(self._tier.own, extent)
        except LastgoodError as error:
            failed = error
        sent: list[str] = []
        try:
            for key, start, length in self._parts(one, extent):
                self._ranks.post_bytes(key, data[start : start + length])
                sent.append(key)
                if len(sent) == WINDOW:
                    self._await_receivers(sent[0], receivers)
                    sent.pop(0)
            while sent:
                self._await_receivers(sent[0], receivers)
                sent.pop(0)
        finally:
            self._ranks.delete(sent)
        if failed is not None:
            raise failed

    def _receive(self, one: Transfer, extent: Extent, into: memoryview) -> None:
        whole = True
        for key, start, length in self._parts(one, extent):
            (part,) = self._ranks.receive_bytes([key], self._ranks.timeout_seconds)
            self._ranks.post_bytes(f"{key}/{self._ranks.rank}", b"received")
            whole &= len(part) == length
            if whole:
                into[start : start + length] = part
        if not whole:
            raise TierDown(f"the node that has {extent.blob} could not read it", safe="Nothing was loaded.")

    def _await_receivers(self, key: str, receivers: Sequence[str]) -> None:
        keys = [f"{key}/{rank}" for rank in receivers]
        self._ranks.receive_bytes(keys, self._ranks.timeout_seconds)
        self._ranks.delete([key, *keys])

    def _parts(self, one: Transfer, extent: Extent) -> Iterator[tuple[str, int, int]]:
        """Key, offset in the chunk and length of each part of a chunk."""
        name = extent.blob.rpartition("/")[2]
        for start in range(0, extent.length, PART_BYTES):
            key = f"{self._ranks.opening}/transfer/{one.number}/{name}/{extent.offset + start}"
            yield key, start, min(PART_BYTES, extent.length - start)


class Carried(Record, frozen=True, kw_only=True):
    """What a restore reads from elsewhere than the disks of the ranks' own nodes. A node is named by its leader."""

    fetched: dict[str, dict[str, list[int]]] = msgspec.field(default_factory=dict)
    """leader -> the chunks that its node has fetched"""
    copied: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)
    """leader -> place -> the bytes that were fetched from there"""
    direct: dict[str, list[int]] = msgspec.field(default_factory=dict)
    """file that ranks read from the agents of other nodes -> the leaders of the nodes that have it"""


class NodeTransfers:
    """Transfers of an open run, at the coordinator, which is a leader itself. The parameters are those of `Carrier`."""

    def __init__(self, disks: NodeDisks, below: Sequence[Tier], ranks: RankGroup) -> None:
        self._disks, self._carrier = disks, Carrier(disks, below, ranks)
        self._requests = Requests(ranks, SUBJECT, disks.nodes.others)
        self._number = 0

    def carry(
        self, generation: Generation, wants: Sequence[Chunks], place: int | None, read: bool, stop: Stop = never
    ) -> Carried:
        """Copy to each node what its ranks want and it lacks.

        `wants`: the chunks that each rank wants. `place`: the position, among the lower ones, of a place that has the
        generation whole; None: there is none. `read`: whether ranks read files from the agents of other nodes: those
        that one rank alone of a node wants are not copied then, if a node that has them has an agent that listens.
        """
        held = self._disks.held(generation)
        owners = {blob.name: one.rank for one in manifests_of(self._disks, generation) for blob in one.blobs}
        lacks = lacking(wants, self._disks.nodes.leaders, held, owners)
        if not lacks:
            return Carried()
        self._number += 1
        holders = {name: [leader for leader in sorted(held) if owners[name] in held[leader]] for name in owners}
        absent = [name for _, name in lacks if not holders[name]]
        if place is None and absent:
            raise TierDown(f"{absent[0]} of {generation.id} lies on no node", safe="Nothing was loaded.")
        table, direct = self._disks.links.table, dict[str, list[int]]()
        if read and table is not None:
            wanted_files = dict.fromkeys(name for _, name in lacks)
            # guard: unread-file-goes-through-store
            direct = {name: holders[name] for name in wanted_files if table.among(holders[name])}
        wanted = dict[str, dict[str, list[int]]]()
        for (leader, name), of in lacks.items():
            if len(of) > 1 or name not in direct:
                wanted.setdefault(str(leader), {})[name] = sorted(set().union(*of))
        if not wanted:
            return Carried(direct=direct)
        one = Transfer(number=self._number, at=generation.id, place=place, wanted=wanted, holders=holders)
        return Carried(fetched=wanted, copied=self._transferred(one, stop), direct=direct)

    def end(self) -> None:
        """Tell the other leaders that nothing more is carried."""
        self._requests.end()

    def _transferred(self, one: Transfer, stop: Stop) -> dict[str, dict[str, int]]:
        """Let all leaders do a transfer, this one too. Returns as `Carried.copied`."""
        own, others = ask_all(self._requests, one, lambda: self._carrier.carry(one, stop))
        return {"0": own} | dict(zip(map(str, self._disks.nodes.others), others, strict=True))


def lacking(
    wants: Sequence[Chunks], leaders: Sequence[int], held: Mapping[int, set[int]], owners: Mapping[str, int]
) -> dict[tuple[int, str], list[Sequence[int]]]:
    """(leader, file) -> the chunks that each rank wants of a file that its node lacks. Pure.

    `wants`: the chunks that each rank wants. `leaders`: that of each rank. `held`: leader -> the ranks whose files its
    node has. `owners`: file -> the rank that wrote it.
    """
    found = dict[tuple[int, str], list[Sequence[int]]]()
    for leader, wanted in zip(leaders, wants, strict=True):
        for name, chunks in wanted.items():
            if owners[name] not in held.get(leader, ()):
                found.setdefault((leader, name), []).append(chunks)
    return found


def note_fetched(tier: NodeTier, generation: Generation, fetched: Chunks) -> None:
    """Let a rank read the chunks that its node has fetched."""
    places, at = dict[str, list[tuple[int, int, int]]](), 0
    for chunk in _in_order(fetched, manifests_of(tier, generation)):
        extent = chunk.extent
        places.setdefault(chunk.blob.name, []).append((extent.offset, extent.length, at))
        at += round_up(extent.length)
    tier.shown.fetched = places


def share_manifests(tier: NodeTier, generation: Generation, ranks: RankGroup, topic: AnyTopic) -> None:
    """Show every rank what all nodes have of a generation, and the manifests of all ranks. All ranks call it."""
    if not tier.nodes.others:
        return
    folder, key = layout.folder(generation.id), f"{ranks.opening}/manifests/{ranks.restore_count}/{generation.id}"
    joined = bytearray()

    def collect(_: list[Any]) -> Any:
        listing, ends = dict(tier.list(folder)), dict[str, int]()
        for name in [*listing]:
            if not RANK_FILE.fullmatch(f"{folder}/{name}"):
                # Marks of one node cannot be read on the others.
                del listing[name]  # guard: only-readable-files-shown
        for seal in generation.commit.seals:
            joined.extend(_read(tier, Extent(blob=f"{folder}/{seal.manifest}", offset=0, length=seal.length)))
            ends[seal.manifest] = len(joined)
        for start in range(0, len(joined), PART_BYTES):
            ranks.post_bytes(f"{key}/{start}", bytes(joined[start : start + PART_BYTES]))
        return listing, ends

    listing, ends = topic.agree(None, collect)
    keys = [f"{key}/{start}" for start in range(0, max(ends.values()), PART_BYTES)]
    whole = bytes(joined) or b"".join(ranks.receive_bytes([one], ranks.timeout_seconds)[0] for one in keys)
    starts = [0, *ends.values()]
    records = {name: whole[begin:end] for (name, end), begin in zip(ends.items(), starts, strict=False)}
    tier.shown.show(generation, listing, records)
    topic.agree(None, lambda _: None)
    if ranks.is_coordinator:
        ranks.delete(keys)


def manifests_of(tier: Tier, generation: Generation) -> list[Manifest]:
    """The manifests of all ranks, whether or not their files are readable here."""
    return [sealed.sealed_record(tier, generation, seal) for seal in generation.commit.seals]


def _in_order(chunks: Chunks, manifests: Sequence[Manifest]) -> Iterator[_Chunk]:
    """The chunks in the order of the ranks that wrote them, their files and their indices."""
    for manifest in manifests:
        for blob in manifest.blobs:
            for index in sorted(chunks.get(blob.name, ())):
                yield _Chunk(manifest, blob, index)


def _union(wanted: Any) -> dict[str, list[int]]:
    """All chunks that occur in any of these."""
    found: dict[str, set[int]] = {}
    for one in wanted:
        for name, chunks in one.items():
            found.setdefault(name, set()).update(chunks)
    return {name: sorted(chunks) for name, chunks in found.items()}


def _read(tier: Tier, extent: Extent) -> bytes:
    buffer = bytearray(extent.length)
    tier.read_into(extent, memoryview(buffer))
    return bytes(buffer)

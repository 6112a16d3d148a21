"""A drill reads what other nodes hold of this node's files: copies of them, or parity from which they are computed.

Nothing is written, here or there, and a few chunks are in memory at a time. Parity is read as a rebuild reads it
(engine/stripes.py), as if this node was lost: a cell that a rebuild would not need is not read.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple, cast

from ..engine.stripes import Rebuilt, is_damage
from ..errors import BeyondRepair, LastgoodError, PeerDown
from ..format import commit, layout, sealed
from ..io.machine import machine
from ..limits import CHUNK_BYTES
from ..policy import restore
from ..ports import Tier
from ..records import Extent, Finding, Generation
from . import agent_link, copying
from .peer_security import security
from .peers import RANK_FILE, PeerDisk, PeerNode, Peers
from .reader import RunReader

Read = Callable[[Tier, Generation, list[int]], list[Finding]]
"""Reads the files of these ranks of a generation, with every digest, and returns the findings."""
Attempt = Callable[[Generation], "PeerRead | None"]
"""Reads what other nodes hold of a generation. None: nothing yet. Raises LastgoodError if that cannot be read now."""


LISTINGS = 3
"""So often the generations are listed, if training deletes one after another while they are read."""
UNKNOWN = "?"
"""In place of the name of a node: copies of this node's files may be on nodes that cannot be named."""
REASONS = 3
"""So many files and nodes that could not be used are named in a result."""


class PeerRead(NamedTuple):
    """What other nodes hold of this one, after it was read. `good`: None if nothing could be read.

    `what`: what they hold. `node`: the node with the copies, or the nodes from which the files are computed. `why`: the
    reason unless it is good; if it is, what could not be read and was not needed.
    """

    what: Literal["copies", "parity"]
    node: str
    good: bool | None
    why: str
    step: int | None = None
    bytes: int = 0
    seconds: float = 0.0


class CopyOnNode:
    """The part of `ports.Tier` that a reading of a generation calls: files of ranks come from another node.

    `own`: the tier of this node, from which the records come that every node has.
    """

    newest_only = False

    def __init__(self, own: Tier, peers: Peers, node: PeerNode) -> None:
        self._own, self._peers, self._node = own, peers, node
        self.place, self.reads_at_once = f"node {node.name}", own.reads_at_once

    def list(self, folder: str) -> Mapping[str, int | None]:
        own = {name: size for name, size in self._own.list(folder).items() if not _of_rank(folder, name)}
        return {**self._peers.list(self._node, folder), **own}

    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
        if not RANK_FILE.fullmatch(extent.blob):
            self._own.read_into(extent, mv, fresh=fresh)
            return
        for start in range(0, extent.length, CHUNK_BYTES):
            length = min(CHUNK_BYTES, extent.length - start)
            part = Extent(blob=extent.blob, offset=extent.offset + start, length=length)
            self._peers.read(self._node, part, mv[start : start + length])


class ComputedFiles:
    """The part of `ports.Tier` that a reading of a generation calls: this node's files are computed from other nodes.

    `own`: the tier of this node, from which the records come that every node has. `ranks`: those whose files it has.
    Raises as `Rebuilt` where too few cells are left to compute them.
    """

    newest_only, reads_at_once = False, Rebuilt.reads_at_once

    def __init__(self, own: Tier, rebuilt: Rebuilt, generation: Generation) -> None:
        self._own, self._rebuilt, self.place = own, rebuilt, rebuilt.place
        here = own.list(layout.folder(generation.id))
        seals = [one for one in generation.commit.seals if one.manifest in here]
        self.ranks = [one.rank for one in seals]
        self._files = {one.manifest: one.length for one in seals}
        self.bytes = 0
        """the length of the tensor files"""
        for one in seals:
            manifest = sealed.sealed_record(cast(Tier, rebuilt), generation, one)
            rebuilt.require(manifest)
            self._files |= {blob.name: blob.length for blob in manifest.blobs}
            self.bytes += sum(blob.length for blob in manifest.blobs)

    def list(self, folder: str) -> Mapping[str, int | None]:
        names = {name: size for name, size in self._own.list(folder).items() if not _of_rank(folder, name)}
        return {**names, **self._files}

    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
        if not RANK_FILE.fullmatch(extent.blob):
            self._own.read_into(extent, mv, fresh=fresh)
            return
        self._rebuilt.read_into(extent, mv)


def read_peers(memory: str, own: Tier, read: Read) -> list[PeerRead]:
    """Read this node's newest files on each node to which the agent of the folder `memory` was asked to send files, or
    compute them from what the nodes hold with which this one shares parity.

    `own`: the tier of that folder. Where the agent knows no node, or there is none: a row that says so, if the folder
    holds a generation of several nodes; else nothing. Raises nothing.
    """
    try:
        known = agent_link.peers_of(memory)
        if known is None:
            why = _why_unknown(memory) if _is_of_several_nodes(own) else ""
            return [PeerRead("copies", UNKNOWN, None, why)] if why else []  # guard: unknown-copies-are-shown
    except (OSError, ValueError, LastgoodError) as error:
        return [PeerRead("copies", UNKNOWN, None, f"the agent of {memory} does not name the nodes: {error}")]
    secured = security(known.key, known.certificates)
    with contextlib.closing(Peers(known.job, secured, machine())) as peers:
        found = [
            _newest(
                own,
                PeerRead("copies", one.name, None, "it has no file of this node yet"),
                partial(_copied, one.name, CopyOnNode(own, peers, one), own, read),
            )
            for one in known.copies
        ]
        if known.parity:
            names = ", ".join(one.name for one in known.parity)
            others = [cast(Tier, PeerDisk(peers, one)) for one in known.parity]
            nothing = PeerRead("parity", names, None, "this node's files have no parity there yet")
            found.append(_newest(own, nothing, partial(_computed, names, others, own, read)))
        return found


def _is_of_several_nodes(own: Tier) -> bool:
    return not all(copying.is_whole(own, one) for one in commit.survey(own).generations.values())


def _why_unknown(memory: str) -> str:
    try:
        agent_link.connected(memory).close()
    except OSError:
        return f"no agent of {memory} listens, and it alone knows where they are"
    return "the agent of this node has sent nothing to other nodes since it was started"


def _newest(own: Tier, nothing: PeerRead, attempt: Attempt) -> PeerRead:
    """The first attempt that finds something, from the newest generation on; else `nothing`. What training deletes
    meanwhile counts for nothing: the next one is read then."""
    found = nothing
    for generation in (one for _ in range(LISTINGS) for one in RunReader(own).lineage()):
        try:
            if (one := attempt(generation)) is None:
                continue
            found = one
        except LastgoodError as error:
            found = nothing._replace(why=f"{type(error).__name__}: {error}")
        if found.good or layout.COMMIT in own.list(layout.folder(generation.id)):
            return found
        found = nothing._replace(why=f"training deleted step {generation.step} while it was read")
    return found


# ---- copies ------------------------------------------------------------------------------------------------------


def _copied(name: str, copy: CopyOnNode, own: Tier, read: Read, generation: Generation) -> PeerRead | None:
    """Read the copies of this node's files on the node of this name. An `Attempt`, if the rest is given."""
    if not (ranks := _ranks_there(copy, own, generation)):
        return None
    size = sum(blob.length for rank in ranks for blob in commit.read_manifest(own, generation, rank).blobs)
    begun = time.monotonic()
    findings = read(cast(Tier, copy), generation, ranks)
    seconds = time.monotonic() - begun
    return PeerRead("copies", name, not findings, restore.summary(findings), generation.step, size, seconds)


def _ranks_there(copy: CopyOnNode, own: Tier, generation: Generation) -> list[int]:
    """The ranks whose files this node and the other one have."""
    folder = layout.folder(generation.id)
    here, there = own.list(folder), copy.list(folder)
    return [one.rank for one in generation.commit.seals if one.manifest in here and one.manifest in there]


# ---- parity ------------------------------------------------------------------------------------------------------


def _computed(names: str, others: Sequence[Tier], own: Tier, read: Read, generation: Generation) -> PeerRead | None:
    """Compute this node's files from `others`, the nodes of these names. An `Attempt`, if the rest is given."""
    begun = time.monotonic()
    rebuilt, size = Rebuilt(others, generation), 0
    good: bool | None
    try:
        files = ComputedFiles(own, rebuilt, generation)
        if not files.ranks:
            return None
        findings = read(cast(Tier, files), generation, files.ranks)
        good, why, size = not findings, restore.summary(findings), files.bytes
    except (BeyondRepair, PeerDown) as error:
        if not rebuilt.passed_over:
            return None
        good, why = None, error.what
    seconds = time.monotonic() - begun
    passed_over = [f"{place}: {error.what}" for (place, _), error in list(rebuilt.passed_over.items())][:REASONS]
    if any(map(is_damage, list(rebuilt.passed_over.values()))):  # guard: drill-shows-passed-over-damage
        why = "the files can be computed without what is damaged" if good else why
        good = False
    why = "; ".join([why, *passed_over] if why else passed_over)
    return PeerRead("parity", names, good, why, generation.step, size, seconds)


def _of_rank(folder: str, name: str) -> bool:
    return RANK_FILE.fullmatch(f"{folder}/{name}") is not None

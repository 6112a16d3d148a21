"""A drill reads the copies of this node's files in the memory of other nodes. Writes nothing, here or there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

from ..errors import LastgoodError
from ..format import commit, layout
from ..io.machine import machine
from ..limits import CHUNK_BYTES
from ..policy import restore
from ..ports import Tier
from ..records import Extent, Finding, Generation
from . import agent_link
from .peers import RANK_FILE, PeerNode, Peers
from .reader import RunReader

Read = Callable[[Tier, Generation, list[int]], list[Finding]]
"""Reads the files of these ranks of a generation, with every digest, and returns the findings."""


LISTINGS = 3
"""So often the generations are listed, if training deletes one after another while they are read."""


class PeerRead(NamedTuple):
    """One node, after its copies were read. `good`: None if nothing could be read; `why` says the reason."""

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
        own = {
            name: size for name, size in self._own.list(folder).items() if not RANK_FILE.fullmatch(f"{folder}/{name}")
        }
        return {**self._peers.list(self._node, folder), **own}

    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
        if not RANK_FILE.fullmatch(extent.blob):
            self._own.read_into(extent, mv, fresh=fresh)
            return
        for start in range(0, extent.length, CHUNK_BYTES):
            length = min(CHUNK_BYTES, extent.length - start)
            part = Extent(blob=extent.blob, offset=extent.offset + start, length=length)
            self._peers.read(self._node, part, mv[start : start + length])


def read_peers(memory: str, own: Tier, read: Read) -> list[PeerRead]:
    """Read this node's newest files on each node to which the agent of the folder `memory` was asked to send files.

    `own`: the tier of that folder. Empty if the agent knows no node, and if there is none. Raises nothing.
    """
    try:
        table = agent_link.peers_of(memory)
    except (OSError, ValueError) as error:
        return [PeerRead("?", None, f"the agent of {memory} does not name the nodes: {error}")]
    if table is None:
        return []
    with contextlib.closing(Peers(table.job, table.key, machine())) as peers:
        return [_read(one, CopyOnNode(own, peers, one), own, read) for one in table.nodes]


def _read(node: PeerNode, copy: CopyOnNode, own: Tier, read: Read) -> PeerRead:
    """Read the newest generation of which a node has files of this one. What training deletes meanwhile counts for
    nothing: the next one is read then."""
    found = PeerRead(node.name, None, "it has no file of this node yet")
    for generation in (one for _ in range(LISTINGS) for one in RunReader(own).lineage()):
        try:
            if not (ranks := _ranks_there(copy, own, generation)):
                continue
            size = sum(blob.length for rank in ranks for blob in commit.read_manifest(own, generation, rank).blobs)
            begun = time.monotonic()
            findings = read(cast(Tier, copy), generation, ranks)
            seconds = time.monotonic() - begun
            found = PeerRead(node.name, not findings, restore.summary(findings), generation.step, size, seconds)
        except LastgoodError as error:
            found = PeerRead(node.name, None, f"{type(error).__name__}: {error.what}")
        if found.good or layout.COMMIT in own.list(layout.folder(generation.id)):
            return found
        found = PeerRead(node.name, None, f"training deleted step {generation.step} while it was read")
    return found


def _ranks_there(copy: CopyOnNode, own: Tier, generation: Generation) -> list[int]:
    """The ranks whose files this node and the other one have."""
    folder = layout.folder(generation.id)
    here, there = own.list(folder), copy.list(folder)
    return [one.rank for one in generation.commit.seals if one.manifest in here and one.manifest in there]

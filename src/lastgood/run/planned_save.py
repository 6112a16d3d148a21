"""Records that the training thread passes to the pipeline: a planned save, and the options of a run. They read
and write nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..engine.arena import Arena, FileMemory, Lease
from ..format import parity_layout
from ..format.layout import Image
from ..limits import WORKERS
from ..policy.retention import KEEP, Keep
from ..policy.scrub import Scrub
from ..ports import Stop
from ..storage.directory import WriteMode
from . import access, memory_place, paths
from .save import Check


class Source(Protocol):
    """Copies a state, chunk by chunk."""

    def fill(self, stop: Stop, into: Arena | FileMemory) -> Iterator[Lease]:
        """Yield the filled chunks of `into` in file order. Raises Cancelled when `stop()` returns True."""
        ...


@dataclass(frozen=True, kw_only=True)
class PlannedSave:
    """One save of a state: what goes into which files, from where it is copied, and how the copy is checked."""

    images: Sequence[Image]
    arena: Arena
    source: Source
    check: Check
    overlapped: bool
    """whether the copy is made in the background, while the training loop continues"""
    page_locked: bool = False
    """whether `arena` is page-locked, because some of the tensors are on CUDA devices"""
    aliases: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """The length of all tensor files of this rank."""
        return sum(image.length for image in self.images)


@dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """A place that receives copies of generations. `keep`: its retention. `parity`: as "8+2"; None: no parity."""

    path: str | os.PathLike[str]
    keep: Keep
    parity: str | None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options with which a run is opened for writing. `Checkpointer` documents each of them."""

    write_mode: WriteMode = "atomic_dirsync"
    keep: Keep = KEEP
    algorithm: str = "xxh3_128"
    in_flight: int = 2
    writers: int = WORKERS
    persist: access.Persist = "direct"
    parity: str | None = None
    scrub: Scrub | None = None
    shared: bool = True
    """whether all nodes see the place that is written first; False: each has a disk of its own under this path"""
    copies: int = 1
    """on how many nodes each file of the first place lies"""
    node_parity: str | None = None
    """parity among the memories of nodes, as "4+2", in place of copies; None: copies"""
    spread: str | None = None
    """the failure domain over which the copies, or the cells of a stripe, are spread"""
    below: Sequence[PlaceOptions] = ()
    """the places that receive copies, the nearest first"""

    @property
    def copies_among_nodes(self) -> int:
        """On how many nodes each file of the first place lies where it has no parity; 1: only on that of its rank.

        Parity of m cells becomes m + 1 copies where there are too few nodes for it: they survive the same losses.
        """
        return self.copies if self.node_parity is None else parity_layout.parsed(self.node_parity)[1] + 1

    def code_among(self, nodes: int) -> tuple[int, int] | None:
        """The data and parity cells of a stripe among so many nodes; None: copies are made."""
        code = parity_layout.parsed(self.node_parity) if self.node_parity is not None else None
        return code if code is not None and sum(code) <= nodes else None  # guard: parity-needs-its-nodes

    def times_own_part(self, nodes: int) -> float:
        """How many times its own part each of so many nodes that listen to each other holds: with copies or parity."""
        code = self.code_among(nodes)
        return 1 + code[1] / code[0] if code else min(self.copies_among_nodes, nodes)

    def spill(self, path: str | os.PathLike[str]) -> str | None:
        """Where files go that do not fit into the place `path`, if it is in memory: into the first directory below."""
        if paths.parsed(path).kind != "memory":
            return None
        directories = [
            one.root for one in map(paths.parsed, (one.path for one in self.below)) if one.kind == "directory"
        ]
        return memory_place.spill_folder(directories[0]) if directories else None

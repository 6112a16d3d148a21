"""What the training side hands to the pipeline: a save that is planned, and how a run is opened. Holds no behaviour."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..engine.arena import Arena, Lease
from ..format.layout import Image
from ..policy.retention import KEEP, Keep
from ..policy.scrub import Scrub
from ..storage.directory import WriteMode
from . import access
from .reader import WORKERS
from .save import Check


class Source(Protocol):
    """The copy of a state into the arena."""

    def fill(self, stop: Callable[[], bool]) -> Iterator[Lease]:
        """The filled chunks, in order; ends with Cancelled when `stop()`."""
        ...


@dataclass(frozen=True, kw_only=True)
class PlannedSave:
    """A state at one instant, and how it gets into its files."""

    images: Sequence[Image]
    arena: Arena
    source: Source
    check: Check
    overlapped: bool
    """whether the copy is made behind the loop, while it goes on"""
    aliases: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Of all tensor files of this rank."""
        return sum(image.length for image in self.images)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run is opened for writing; see `Checkpointer` for each of them."""

    write_mode: WriteMode = "atomic_dirsync"
    keep: Keep = KEEP
    algorithm: str = "xxh3_128"
    in_flight: int = 2
    writers: int = WORKERS
    persist: access.Persist = "direct"
    parity: str | None = None
    scrub: Scrub | None = None

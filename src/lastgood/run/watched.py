"""Tiers that report how much is read from them, for progress bars and restores. They forward every call unchanged."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..engine.read_file import reads_in_place
from ..ports import Tier
from ..records import Extent

CountBytes = Callable[[int], object]
"""Called with the number of bytes of each read or write, in the thread that reads or writes."""


class Watched:
    """`tier`, with a call of `count_bytes` after each read."""

    def __init__(self, tier: Tier, count_bytes: CountBytes) -> None:
        self._tier, self._count_bytes = tier, count_bytes
        self.place, self.newest_only, self.reads_at_once = tier.place, tier.newest_only, tier.reads_at_once
        self.create, self.put_new, self.point = tier.create, tier.put_new, tier.point
        self.list, self.delete = tier.list, tier.delete
        self.replace = getattr(tier, "replace", None)  # only tiers with files that can be rebuilt have it
        if tree := getattr(tier, "tree", None):  # only places that list all files at once have it
            self.tree = tree
        self.next_order = getattr(tier, "next_order", None)  # only tiers that other machines may open have it

    def reads_in_place(self, name: str) -> bool:
        """As `ports.Tier`."""
        return reads_in_place(self._tier, name)

    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
        self._tier.read_into(extent, mv, fresh=fresh)
        self._count_bytes(extent.length)


@dataclass(frozen=True)
class Source:
    """What one place has contributed to a restore."""

    bytes: int
    """the number of bytes that were read from it"""
    seconds: float
    """the time from the first of these readings to the end of the last"""


class Sources:
    """Counts what is read from each place, from any thread. `monotonic_seconds`: the clock."""

    def __init__(self, monotonic_seconds: Callable[[], float] = time.monotonic) -> None:
        self._now, self._lock = monotonic_seconds, threading.Lock()
        self._read: dict[str, tuple[int, float, float]] = {}
        """place -> bytes, when the first reading began, when the last one ended"""

    def counted(self, tier: Tier) -> Tier:
        """The tier, with everything that is read from it counted."""
        begun = self._now()
        return Watched(tier, lambda size: self.add(tier.place, size, begun))

    def add(self, place: str, size: int, begun: float) -> None:
        """Count bytes that were read from a place. `begun`: when that reading began, in seconds of the clock."""
        with self._lock:
            total, first, _ = self._read.get(place, (0, begun, begun))
            self._read[place] = total + size, first, self._now()

    def now(self) -> float:
        """The time, in seconds of the clock."""
        return self._now()

    def found(self) -> dict[str, Source]:
        """Place -> what was read from it so far."""
        with self._lock:
            return {place: Source(size, last - first) for place, (size, first, last) in self._read.items()}

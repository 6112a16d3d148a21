"""A tier that reports how many bytes are read from it, for progress bars. It forwards every call unchanged."""

from __future__ import annotations

from collections.abc import Callable

from ..ports import Tier
from ..records import Extent

CountBytes = Callable[[int], object]
"""Called with the number of bytes of each read or write, in the thread that reads or writes."""


class Watched:
    """`tier`, with a call of `count_bytes` after each read."""

    def __init__(self, tier: Tier, count_bytes: CountBytes) -> None:
        self._tier, self._count_bytes = tier, count_bytes
        self.place, self.newest_only = tier.place, tier.newest_only
        self.create, self.put_new, self.point = tier.create, tier.put_new, tier.point
        self.list, self.delete = tier.list, tier.delete
        self.replace = getattr(tier, "replace", None)  # only tiers with files that can be rebuilt have it
        self.next_order = getattr(tier, "next_order", None)  # only tiers that other machines may open have it

    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
        self._tier.read_into(extent, mv, fresh=fresh)
        self._count_bytes(extent.length)

"""A tier that reports how many bytes are read from it, for progress bars. Changes no byte and no order of calls."""

from __future__ import annotations

from collections.abc import Callable

from ..ports import Tier
from ..records import Extent

Seen = Callable[[int], None]
"""is called with a number of bytes as they are read or written, from any thread"""


class Watched:
    """A tier that calls `seen` with the number of bytes of each read, in the thread that reads."""

    def __init__(self, tier: Tier, seen: Seen) -> None:
        self._tier, self._seen = tier, seen
        self.place, self.newest_only = tier.place, tier.newest_only
        self.create, self.put_new, self.point = tier.create, tier.put_new, tier.point
        self.list, self.delete = tier.list, tier.delete
        self.replace = getattr(tier, "replace", None)  # of a tier whose files can be put back

    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
        self._tier.read_into(extent, mv, fresh=fresh)
        self._seen(extent.length)

"""Files of a generation that one rank alone of its node wants: read from the agents of the nodes that have them.

Files that several ranks of a node want are fetched once for the node instead (node_transfer.py). Writes nothing.

Invariants
  1. What is read is verified like what a disk gives.
  2. A node that fails is passed over: another one that has the file is read, and at last a place below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import Cancelled, LastgoodError, TierDown
from ..ports import Tier
from ..records import Extent
from .peers import PeerDisk
from .watched import Sources, Watched

OTHER_NODES = "other nodes"
"""their name among the sources of a restore"""


class PeerReads(Watched):
    """`tier`, of which some files are read elsewhere (`note`). `sources`: counts what is read there."""

    def __init__(self, tier: Tier, sources: Sources) -> None:
        super().__init__(tier, lambda size: None)
        self.reads_at_once = max(tier.reads_at_once, PeerDisk.reads_at_once)
        self._sources, self._begun = sources, sources.now()
        self._files: Mapping[str, Sequence[Tier]] = {}
        self._failed = set[str]()
        """nodes and places that could not be read"""

    def note(self, files: Mapping[str, Sequence[Tier]]) -> None:
        """Read these files from one of their tiers from now on, the first one first."""
        self._files = files

    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
        tiers = self._files.get(extent.blob)
        if tiers is None:
            self._tier.read_into(extent, mv, fresh=fresh)
            return
        problems = list[str]()
        for one in sorted(tiers, key=lambda tier: tier.place in self._failed):
            try:
                one.read_into(extent, mv, fresh=fresh)
            except Cancelled:
                raise
            except LastgoodError as error:
                self._failed.add(one.place)  # guard: failed-node-read-last
                problems.append(f"{one.place}: {error.what}")
            else:
                place = OTHER_NODES if isinstance(one, PeerDisk) else one.place
                self._sources.add(place, extent.length, self._begun)
                return
        raise TierDown(f"{extent.blob} could not be read: {'; '.join(problems)}", safe="It is where it was.")

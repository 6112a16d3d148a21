"""Files of a generation that one rank alone of its node wants: read from the agents of the nodes that have them.

Files that several ranks of a node want are fetched once for the node instead (node_transfer.py). Writes nothing.

Invariants
  1. What is read is verified like what a disk gives, so it comes without a digest of the wire, unless that has failed.
  2. A node that fails is passed over: another one that has the file is read, and at last a place below. All of them are
     tried twice, because a connection may break.
  3. The connections are made when they are needed, and end with the restore.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from ..errors import Cancelled, LastgoodError, TierDown
from ..io.machine import machine
from ..ports import Tier
from ..records import Extent
from ..wire import nixl
from . import peer_opening
from .peer_security import own_certificates, security
from .peers import VERIFIED_BY_CALLER, PeerDisk, Peers, PeerTable, Reading
from .watched import Sources, Watched

OTHER_NODES = "other nodes"
"""their name among the sources of a restore"""


class PeerReads(Watched):
    """`tier`, of which some files are read elsewhere (`note`). `sources`: counts that. `table`: the nodes whose
    agents listen. `how`: files are read from them; with digests of the wire, a node is passed over too whose bytes are
    changed on their way."""

    def __init__(self, tier: Tier, sources: Sources, table: PeerTable, how: Reading = VERIFIED_BY_CALLER) -> None:
        super().__init__(tier, lambda size: None)
        self.reads_at_once = max(tier.reads_at_once, PeerDisk.reads_at_once)
        self._sources, self._begun, self._table, self._how = sources, sources.now(), table, how
        self._peers: Peers | None = None
        self._files: Mapping[str, Sequence[Tier]] = {}
        self._failed = set[str]()
        """nodes and places that could not be read"""

    def note(self, files: Mapping[str, Sequence[int]], below: Sequence[Tier]) -> None:
        """Read these files elsewhere from now on. Raises as `nixl.chosen` and `security`.

        `files`: each file -> the leaders of the nodes that have it, in the order in which they are asked; those whose
        agents do not listen are not. `below`: the places that are read if none of them answers.
        """
        if files and self._peers is None:
            windows = nixl.chosen(peer_opening.own_wire())
            secured = security(self._table.key, own_certificates())
            self._peers = Peers(self._table.job, secured, machine(), windows)
        self._files = {name: [*self._nodes(leaders), *below] for name, leaders in files.items()}

    def close(self) -> None:
        """Close the connections to other nodes."""
        if self._peers is not None:
            self._peers.close()

    def _nodes(self, leaders: Sequence[int]) -> list[Tier]:
        assert self._peers is not None
        return [cast(Tier, PeerDisk(self._peers, one, self._how)) for one in self._table.among(leaders)]

    def reads_in_place(self, name: str) -> bool:
        """As `ports.Tier`: what comes over the wire may be received anywhere."""
        return name in self._files or super().reads_in_place(name)

    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
        tiers = self._files.get(extent.blob)
        if tiers is None:
            self._tier.read_into(extent, mv, fresh=fresh)
            return
        problems = list[str]()
        for one in sorted(tiers, key=lambda tier: tier.place in self._failed) * 2:
            try:
                one.read_into(extent, mv, fresh=fresh)
            except Cancelled:
                raise
            except LastgoodError as error:
                self._failed.add(one.place)  # guard: failed-node-read-last
                problems.append(f"{one.place}: {error}")
            else:
                place = OTHER_NODES if isinstance(one, PeerDisk) else one.place
                self._sources.add(place, extent.length, self._begun)
                return
        what = f"{extent.blob} could not be read: {'; '.join(dict.fromkeys(problems))}"
        raise TierDown(what, safe="Every committed generation is untouched.")

"""The record INTENT of a save in memory: its COMMIT without the seals, written before rank 0 seals.

If every rank has sealed, and the coordinator was lost before it committed, another process that finds INTENT and all
manifests can commit the save, with the bytes that the coordinator would have written. Commits nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ..errors import Damaged
from ..io.checksum import digest
from ..ports import Tier
from ..records import Commit, GenerationId, Manifest, Seal
from . import commit, layout
from .catalog import Listing
from .sealed import read


class Intent(NamedTuple):
    """`record`: of the COMMIT, without seals. `algorithm`: of its digest."""

    record: Commit
    algorithm: str

    def sealed(self, seals: Sequence[Seal]) -> Commit | None:
        """The COMMIT of this save; None unless every rank has sealed. `seals`: all that were found."""
        found = {one.rank: one for one in seals}
        if sorted(found) != [*range(self.record.world.ranks)]:
            return None  # guard: save-of-some-ranks-not-committed
        return msgspec.structs.replace(self.record, seals=[found[rank] for rank in sorted(found)])


def write(tier: Tier, intent: Intent) -> None:
    """Store the intent of a save. Raises as `Tier.put_new`."""
    record, algorithm = intent
    tier.put_new(f"{layout.folder(record.id)}/{layout.INTENT}", layout.encode(record, algorithm))


def withdraw(tier: Tier, at: GenerationId) -> None:
    """Delete the intent of a save that has failed, so that nobody commits it. Raises as `Tier.delete`."""
    tier.delete(f"{layout.folder(at)}/{layout.INTENT}")


def find(tier: Tier, at: GenerationId, run: str, listing: Listing) -> Intent | None:
    """The intent in the folder of a generation; None if there is none that can be read and belongs to this run.

    `listing`: of the folder. Raises Unavailable.
    """
    name = f"{layout.folder(at)}/{layout.INTENT}"
    try:
        data = read(tier, name, listing.get(layout.INTENT))
        record = layout.decode(data, Commit, name)
    except Damaged:
        return None
    if (record.id, record.run) != (at, run):
        return None  # guard: intent-belongs-to-folder
    return Intent(record, layout.root_of(data).partition(":")[0])


def seals_of(tier: Tier, at: GenerationId) -> list[Seal]:
    """The seals in a folder: of each manifest that can be read, and whose files have their lengths. Raises Unavailable.

    Of a place on several nodes each node is asked once.
    """
    if (of_all := getattr(tier, "seals", None)) is not None:
        found: list[Seal] = of_all(at)
        return found
    seals, folder = list[Seal](), layout.folder(at)
    listing = tier.list(folder)
    for name, length in listing.items():
        if layout.is_manifest(name):
            try:
                data = read(tier, f"{folder}/{name}", length)
                manifest = layout.decode(data, Manifest, name)
                one = Seal(rank=manifest.rank, manifest=name, length=len(data), digest=digest(manifest.digest, data))
                # Checked as that of one rank among others: how many there are, the intent says.
                commit.sealed_manifest(tier, at, one, manifest.rank + 2, listing)
            except Damaged:
                continue
            seals.append(one)
    return seals

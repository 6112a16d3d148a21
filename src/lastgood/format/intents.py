"""The record INTENT of a save in memory: its COMMIT without the seals, written before any rank seals.

If every rank has sealed, and the process that commits was lost before it did, whoever finds INTENT and all manifests
can commit the save. Commits nothing itself.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from ..errors import Damaged
from ..io.checksum import digest
from ..ports import Tier
from ..records import Commit, GenerationId, Manifest, Seal
from . import commit, layout
from .catalog import Listing
from .sealed import read


def write(tier: Tier, intent: Commit, algorithm: str) -> None:
    """Store the intent of a save. `intent`: its commit record, without seals. `algorithm`: of the record's digest.

    Raises as `Tier.put_new`.
    """
    tier.put_new(f"{layout.folder(intent.id)}/{layout.INTENT}", layout.encode(intent, algorithm))


def withdraw(tier: Tier, at: GenerationId) -> None:
    """Delete the intent of a save that has failed, so that nobody commits it. Raises as `Tier.delete`."""
    tier.delete(f"{layout.folder(at)}/{layout.INTENT}")


def found(tier: Tier, at: GenerationId, run: str, listing: Listing) -> Commit | None:
    """The intent in the folder of a generation; None if there is none that can be read and belongs to this run."""
    name = f"{layout.folder(at)}/{layout.INTENT}"
    intent = commit.read_hint(tier, name, listing.get(layout.INTENT), Commit)
    return intent if intent and (intent.id, intent.run) == (at, run) else None  # guard: intent-belongs-to-folder


def sealed_by_all(
    tier: Tier, intent: Commit, listing: Listing, committed: Collection[GenerationId]
) -> tuple[Commit, str] | None:
    """The commit record of a save that every rank has sealed, and the name of its digest; None of any other save.

    `listing`: of its folder. `committed`: all generations that are committed; the save follows one of them. Raises
    Unavailable.
    """
    seals, algorithm = list[Seal](), ""
    for rank in range(intent.world.ranks):
        name = layout.manifest_name(rank)
        try:
            data = read(tier, f"{layout.folder(intent.id)}/{name}", listing.get(name))
            algorithm = layout.decode(data, Manifest, name).digest
            seals.append(Seal(rank=rank, manifest=name, length=len(data), digest=digest(algorithm, data)))
            commit.sealed_manifest(tier, intent.id, seals[rank], intent.world.ranks, listing)
        except Damaged:
            return None  # guard: save-of-some-ranks-not-committed
    before = (one for one in committed if one.incarnation == intent.incarnation and one.step < intent.step)
    return msgspec.structs.replace(intent, seals=seals, parent=max(before, default=intent.continues)), algorithm

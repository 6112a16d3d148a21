"""Records as they were committed: read from a tier, and compared with the seal or the root of their generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ..errors import NODE_FAILED, Damaged, LastgoodError, ManifestInvalid, MissingBlob, SumMismatch
from ..io.checksum import digest
from ..limits import RECORD_LIMIT_BYTES
from ..ports import Tier
from ..records import Commit, Extent, Generation, Manifest, Seal
from . import layout, validation

T = TypeVar("T")


def read(tier: Tier, name: str, length: int | None, limit: int = RECORD_LIMIT_BYTES) -> bytes:
    """The bytes of a record, past the page cache. `length`: from a listing. Raises Damaged, Unavailable."""
    if length is None:
        raise MissingBlob(f"{name} is missing", blob=name)
    if not 0 <= length <= limit:  # guard: record-length-limit
        raise ManifestInvalid(f"{name} is not a file of a record's length", blob=name)
    buffer = bytearray(length)
    # guard: record-read-bypasses-cache
    tier.read_into(Extent(blob=name, offset=0, length=length), memoryview(buffer), fresh=True)
    return bytes(buffer)


def sealed_record(tier: Tier, generation: Generation, one: Seal) -> Manifest:
    """A rank's manifest, checked against its seal alone: its files may be missing. Raises Damaged, Unavailable."""
    name = f"{layout.folder(generation.id)}/{one.manifest}"
    manifest = layout.decode(_committed_bytes(tier, generation, one), Manifest, name)
    validation.validate_manifest(manifest, generation.id, one.rank, generation.commit.world.ranks)
    return manifest


def first_sealed(places: Sequence[Tier], generation: Generation, one: Seal) -> Manifest:
    """As `sealed_record`, from the first of `places` that has it as sealed. Its files may be damaged there."""
    return _first(places, lambda tier: sealed_record(tier, generation, one))


def _committed_bytes(tier: Tier, generation: Generation, one: Seal | None) -> bytes:
    """The bytes of a manifest as it was sealed, or with None of the commit record. Raises Damaged, Unavailable."""
    folder = layout.folder(generation.id)
    if one is None:
        name = f"{folder}/{layout.COMMIT}"
        data = read(tier, name, tier.list(folder).get(layout.COMMIT))
        layout.decode(data, Commit, name)
        if layout.root_of(data) != generation.root:  # guard: copied-commit-has-root
            raise SumMismatch(f"{name} is the record of another generation", blob=layout.COMMIT)
        return data
    name = f"{folder}/{one.manifest}"
    data = read(tier, name, one.length, limit=one.length)
    if digest(layout.decode(data, Manifest, name).digest, data) != one.digest:  # guard: copied-manifest-matches-seal
        raise SumMismatch(f"{name} differs from the manifest that was sealed", blob=one.manifest)
    return data


def record_bytes(sources: Sequence[Tier], generation: Generation, one: Seal | None) -> bytes:
    """The bytes of a manifest as it was sealed, or with None of the commit record, from the first of `sources` that has
    them. Raises Damaged, Unavailable."""
    return _first(sources, lambda tier: _committed_bytes(tier, generation, one))


def _first(places: Sequence[Tier], read: Callable[[Tier], T]) -> T:
    """The record from the first of `places` that has it. One that a node may have, which cannot be used now, is not
    missing: then the error of this node is raised."""
    outage: LastgoodError | None = None
    for tier in places[:-1]:
        try:
            return read(tier)
        except Damaged:
            continue
        except NODE_FAILED as error:
            outage = error
    try:
        return read(places[-1])
    except Damaged as error:
        if outage is not None:
            raise outage from error  # guard: unreachable-record-not-missing
        raise

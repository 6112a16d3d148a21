"""The catalog: a copy of the small records of all generations in one object, so that a run with many opens quickly.

Only object stores have one, where all files of a run are listed at once. It is a cache, never the truth: a generation
exists if its COMMIT is listed, and an entry counts only if the folder lists exactly the records that the entry was made
of. These never change under their names, so such an entry holds what they hold. Reads and writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ..records import Generation, GenerationId, Record
from . import layout

NAME = "CATALOG.json"
MARKS = {layout.VERIFIED, layout.DAMAGED, layout.UNFIT}
RECORDS = {layout.COMMIT, *MARKS}

Listing = Mapping[str, int | None]


class Entry(Record, frozen=True, kw_only=True):
    """One generation as it was when the catalog was written. `records`: name -> length of what it was read from."""

    records: dict[str, int]
    generation: Generation


class Catalog(Record, frozen=True, kw_only=True):
    """`CATALOG.json`."""

    format: int
    entries: list[Entry]


def records_in(listing: Listing) -> dict[str, int]:
    """Name -> length of the records that a `Generation` is read from: COMMIT, marks and labels."""
    named = {name for name in listing if name in RECORDS or layout.label_number(name) is not None}
    return {name: length for name, length in listing.items() if name in named and length is not None}


def found(catalog: Catalog | None, tree: Mapping[str, Listing]) -> dict[GenerationId, Generation]:
    """The generations of the catalog whose folders list exactly the records that they were read from."""
    generations = dict[GenerationId, Generation]()
    for one in catalog.entries if catalog else ():
        at = one.generation.id
        listing = tree.get(layout.folder(at).partition("/")[2], {})
        if layout.COMMIT in listing and records_in(listing) == one.records:  # guard: stale-catalog-entry-ignored
            size = sum(length for length in listing.values() if length is not None and length > 0)
            generations[at] = msgspec.structs.replace(one.generation, bytes=size)
    return generations


def made(generations: Mapping[GenerationId, Generation], tree: Mapping[str, Listing]) -> Catalog:
    """The catalog of these generations. `tree`: listed while none of them changed."""
    entries = []
    for at in sorted(generations):
        listing = tree.get(layout.folder(at).partition("/")[2], {})
        if layout.COMMIT in listing and not generations[at].label_unread:
            entries.append(Entry(records=records_in(listing), generation=generations[at]))
    return Catalog(format=layout.FORMAT, entries=entries)

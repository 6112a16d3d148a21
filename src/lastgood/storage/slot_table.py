"""The table of a slot tier: which files of which folder are stored where. Pure: converts bytes, reads and writes
nothing.

A record of the table is an envelope of 48 bytes and a body in msgpack:

    offset 0   8   magic
           8   4   version, little-endian as all that follows; a newer one is refused
          12   4   zero
          16   8   sequence: of two records the higher one counts
          24   8   length of the body
          32  16   xxh3-128 over bytes 0 to 31 and the body
          48       the body

What `decode` returns has been checked: memory is allocated and files are opened only by values that were validated.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import NamedTuple

import msgspec

from ..errors import ManifestInvalid, UnknownFormat
from ..io.checksum import digest
from ..io.files import round_up
from ..limits import PAGE_BYTES, RECORD_LIMIT_BYTES, SLOT_LIMIT, SLOT_LIMIT_BYTES

MAGIC = b"LGSLOTS\n"
VERSION = 1
ENVELOPE = struct.Struct("<8sIIQQ16s")
NO_SLOT = -1
"""in place of a slot's number: the folder has small records only"""

_CHECKED = struct.calcsize("<8sIIQQ")


class Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A committed folder."""

    folder: str
    slot: int
    extents: dict[str, tuple[int, int]]
    """file -> offset in the slot and length, in bytes"""
    records: dict[str, bytes]
    """small files, stored in the table itself"""

    def without(self, file: str) -> Kept:
        """A copy that lacks this file."""
        extents = {name: extent for name, extent in self.extents.items() if name != file}
        records = {name: data for name, data in self.records.items() if name != file}
        return Kept(self.folder, self.slot, extents, records)

    def with_record(self, file: str, data: bytes) -> Kept:
        """A copy with a further small file."""
        return Kept(self.folder, self.slot, self.extents, {**self.records, file: data})


def beside_new_commit(
    kept: tuple[Kept, ...], verified: str, bad: Collection[str], agreed: str | None = None
) -> tuple[Kept, ...]:
    """The folders that stay beside a new commit: the newest verified one, else the newest without a bad mark.

    `kept`: in the order of their commits. `verified`, `bad`: names of marks. `agreed`: where several ranks commit, the
    folder that all of them have committed last ("": none is known): it stays; None: one rank.
    """
    good = [one for one in kept if not set(bad) & one.records.keys()]  # guard: undamaged-slot-kept
    with_mark = [one for one in good if verified in one.records]
    stay = (with_mark or good)[-1:]  # guard: newest-verified-slot-kept
    if agreed is not None:  # a generation is marked as verified after all ranks have committed it
        of_all = [one for one in good if one.folder == agreed or one in with_mark]
        stay += of_all[-1:] or good  # guard: agreed-slot-kept
    return tuple(one for one in kept if one in stay)


class Pointer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The pointer record: a hint, and the folder that it names."""

    data: bytes
    to: str


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All committed folders, in the order of their commits."""

    kept: tuple[Kept, ...] = ()
    pointers: dict[str, Pointer] = {}

    def find(self, folder: str) -> Kept | None:
        """The committed folder of this name; None if there is none."""
        return next((one for one in self.kept if one.folder == folder), None)

    def slots(self) -> set[int]:
        return {one.slot for one in self.kept}


class Record(NamedTuple):
    """A whole record whose body has not been decoded yet."""

    sequence: int
    version: int
    body: bytes


def encode(table: Table, sequence: int) -> bytes:
    """A record of the table with this sequence number."""
    body = msgspec.msgpack.encode(table)
    head = ENVELOPE.pack(MAGIC, VERSION, 0, sequence, len(body), bytes(16))[:_CHECKED]
    return head + bytes.fromhex(digest("xxh3_128", head, body)) + body


def body_bytes(head: bytes, room: int) -> int | None:
    """The length of the body after this envelope; None if this is no envelope, or the body does not fit in `room`
    bytes.
    """
    magic, _, _, _, length, _ = ENVELOPE.unpack_from(head)
    fits = magic == MAGIC and length <= min(room - ENVELOPE.size, RECORD_LIMIT_BYTES)  # guard: table-record-length
    return length if fits else None


def whole(data: bytes) -> Record | None:
    """The record in these bytes; None if they are torn, garbage or zero."""
    _, version, _, sequence, _, stored_digest = ENVELOPE.unpack_from(data)
    body = data[ENVELOPE.size :]
    if bytes.fromhex(digest("xxh3_128", data[:_CHECKED], body)) != stored_digest:  # guard: table-record-digest
        return None
    return Record(sequence, version, body)


def decode(record: Record, where: str) -> Table:
    """The table in a whole record. Raises UnknownFormat, ManifestInvalid."""
    if record.version > VERSION:  # guard: newer-table-version-refused
        raise UnknownFormat(
            f"{where} has version {record.version}; this version reads up to {VERSION}",
            safe="Nothing was changed.",
            todo="Install a newer lastgood.",
        )
    try:
        table = msgspec.msgpack.decode(record.body, type=Table)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ManifestInvalid(f"{where}: {error}", blob=where) from error

    def need(holds: bool, what: str) -> None:
        if not holds:
            raise ManifestInvalid(f"{where}: {what}", blob=where)

    folders, slots = set[str](), set[int]()
    for one in table.kept:
        need(one.folder not in folders, f"{one.folder!r} is listed twice")  # guard: table-folder-unique
        need(one.slot not in slots, f"slot {one.slot} is given twice")  # guard: table-slot-unique
        need(
            NO_SLOT < one.slot < SLOT_LIMIT or (not one.extents and one.slot == NO_SLOT), f"there is no slot {one.slot}"
        )
        # guard: table-file-unique
        need(not one.extents.keys() & one.records.keys(), f"{one.folder!r} holds a file twice")
        for file, (offset, length) in one.extents.items():
            fits = offset >= 0 <= length and offset + length <= SLOT_LIMIT_BYTES and not offset % PAGE_BYTES
            need(fits, f"{file!r} at {offset:,}, {length:,} bytes long")  # guard: table-extents-in-range
        folders.add(one.folder)
        slots |= {one.slot} - {NO_SLOT}
    return table


def area_bytes(record_length: int, least: int) -> int:
    """The length of each of the two areas for a record of this length; at least `least`. All in bytes."""
    area = least
    while area < round_up(record_length):
        area *= 2
    return area

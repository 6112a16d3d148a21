"""The table of a slot tier, bytes <-> what rests where. Pure: reads and writes nothing, knows no place and no meaning.

A record of it is 48 bytes of envelope and a body in msgpack:

    offset 0   8   magic
           8   4   version, little-endian as all that follows; a newer one is refused
          12   4   zero
          16   8   sequence: of two records the higher one counts
          24   8   length of the body
          32  16   xxh3-128 over bytes 0 to 31 and the body
          48       the body

Whatever comes out of `decode` has been checked: nothing is allocated, opened or believed on the word of other bytes.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgspec

from ..errors import ManifestInvalid, UnknownFormat
from ..io.checksum import digest
from ..io.files import BLOCK_BYTES, round_up

MAGIC = b"LGSLOTS\n"
VERSION = 1
ENVELOPE = struct.Struct("<8sIIQQ16s")
RECORD_LIMIT_BYTES = 64 << 20
SLOT_LIMIT = 100
"""two digits in a name"""
SLOT_LIMIT_BYTES = 1 << 60
NO_SLOT = -1

_CHECKED = struct.calcsize("<8sIIQQ")


class Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A committed folder."""

    folder: str
    slot: int
    """NO_SLOT: it has small records only"""
    extents: dict[str, tuple[int, int]]
    """file -> offset in the slot and length"""
    records: dict[str, bytes]
    """small files, here in full"""

    def without(self, file: str) -> Kept:
        extents = {name: extent for name, extent in self.extents.items() if name != file}
        records = {name: data for name, data in self.records.items() if name != file}
        return Kept(self.folder, self.slot, extents, records)

    def with_record(self, file: str, data: bytes) -> Kept:
        return Kept(self.folder, self.slot, self.extents, {**self.records, file: data})


class Pointer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A hint that was pointed at a folder."""

    data: bytes
    to: str


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that is committed, in the order in which it was."""

    kept: tuple[Kept, ...] = ()
    pointers: dict[str, Pointer] = {}

    def find(self, folder: str) -> Kept | None:
        return next((one for one in self.kept if one.folder == folder), None)

    def slots(self) -> set[int]:
        return {one.slot for one in self.kept}


class Record(NamedTuple):
    """One whole record as found."""

    sequence: int
    version: int
    body: bytes


def encode(table: Table, sequence: int) -> bytes:
    body = msgspec.msgpack.encode(table)
    head = ENVELOPE.pack(MAGIC, VERSION, 0, sequence, len(body), bytes(16))[:_CHECKED]
    return head + bytes.fromhex(digest("xxh3_128", head, body)) + body


def body_bytes(head: bytes, room: int) -> int | None:
    """How long the body behind this envelope is; None where it is no envelope, or does not fit into `room`."""
    magic, _, _, _, length, _ = ENVELOPE.unpack_from(head)
    fits = magic == MAGIC and length <= min(room - ENVELOPE.size, RECORD_LIMIT_BYTES)  # guard: table-record-length
    return length if fits else None


def whole(data: bytes) -> Record | None:
    """The record in these bytes; None where they are torn, garbage or zero."""
    _, version, _, sequence, _, told = ENVELOPE.unpack_from(data)
    body = data[ENVELOPE.size :]
    if bytes.fromhex(digest("xxh3_128", data[:_CHECKED], body)) != told:  # guard: table-record-digest
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
        need(one.folder not in folders, f"{one.folder!r} stands twice")  # guard: table-folder-unique
        need(one.slot not in slots, f"slot {one.slot} is given twice")  # guard: table-slot-unique
        need(
            NO_SLOT < one.slot < SLOT_LIMIT or (not one.extents and one.slot == NO_SLOT), f"there is no slot {one.slot}"
        )
        # guard: table-file-unique
        need(not one.extents.keys() & one.records.keys(), f"{one.folder!r} holds a file twice")
        for file, (offset, length) in one.extents.items():
            fits = offset >= 0 <= length and offset + length <= SLOT_LIMIT_BYTES and not offset % BLOCK_BYTES
            need(fits, f"{file!r} at {offset:,}, {length:,} bytes long")  # guard: table-extents-in-range
        folders.add(one.folder)
        slots |= {one.slot} - {NO_SLOT}
    return table


def area_bytes(record_length: int, least: int) -> int:
    """How long each of the two areas must be for such a record."""
    area = least
    while area < round_up(record_length):
        area *= 2
    return area

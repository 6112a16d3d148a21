"""A pack: one object or file that holds several files of a generation. Names and offsets, bytes <-> its index (pure).

    offset 0       the files, each from a multiple of 4096 on, zeros between them: tensor files, then manifests
    `index`        the index, a record in its envelope (layout.py), then zeros
    length - 32    the footer: 8 bytes "LGPACK1\\n", then 8 bytes each, little-endian: `records`, where the manifests
                   begin, or the index if there are none; `index`; the length of the index

The footer is not covered by a digest: it only says where to look for the index, within bounds that are checked.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..errors import ManifestInvalid
from ..io.files import round_up
from ..limits import PACK_END_LIMIT_BYTES, PAGE_BYTES
from ..records import Record
from . import layout

MAGIC = b"LGPACK1\n"
_FOOTER = struct.Struct("<8sQQQ")
FOOTER_BYTES = _FOOTER.size
_PACK = re.compile(r"pack-[0-9]{5,8}")
_MANIFEST = re.compile(r"r[0-9]{5,8}\.manifest\.json")
_TENSORS = re.compile(r"r[0-9]{5,8}(\.[0-9]+)?\.safetensors")

Places = dict[str, tuple[int, int]]
"""file -> offset in the pack and length, in bytes"""


class PackFiles(Record, frozen=True, kw_only=True):
    """What another pack of the generation holds, so that a reader need not read the index of that one."""

    length: int
    """of that pack; one of another length has been written anew"""
    files: Places


class PackIndex(Record, frozen=True, kw_only=True):
    """The index of a pack."""

    format: int
    files: Places
    others: dict[str, PackFiles]
    """the other packs of the generation, in the index of a pack of manifests, which is written last"""


class Footer(NamedTuple):
    """Offsets in a pack, and the length of its index."""

    records: int
    start: int
    """of the index"""
    length: int


def pack_name(rank: int) -> str:
    """The name of a pack. `rank`: the lowest one of those that wrote a file in it."""
    return f"pack-{rank:05d}"


def is_pack(name: str) -> bool:
    """Whether a file in the folder of a generation is a pack."""
    return _PACK.fullmatch(name) is not None


def is_manifest(name: str) -> bool:
    """Whether a file is the manifest of a rank."""
    return _MANIFEST.fullmatch(name) is not None


def may_be_packed(name: str) -> bool:
    """Whether a file may rest in a pack: manifests and tensor files. COMMIT, marks, labels and parity never do."""
    return is_manifest(name) or _TENSORS.fullmatch(name) is not None


def placed(files: Iterable[tuple[str, int]]) -> tuple[Places, int]:
    """Where each of these files (name and length) lies in a pack, and where the last one ends, in whole pages."""
    places, end = Places(), 0
    for name, length in files:
        places[name] = end, length
        end += round_up(length)
    return places, end


def encode_end(files: Places, others: Mapping[str, PackFiles], start: int) -> bytes:
    """The end of a pack, which begins at `start`: the index, zeros up to a whole page, and the footer.

    `others`: packs that are complete. They are left out if the end were longer than readers accept: then these read the
    index of each pack.
    """
    data = b""
    for named in (dict(others), {}):
        data = layout.encode(PackIndex(format=layout.FORMAT, files=files, others=named))
        if len(data) + FOOTER_BYTES <= PACK_END_LIMIT_BYTES:
            break
    records = min((offset for name, (offset, _) in files.items() if is_manifest(name)), default=start)
    filled = data.ljust(round_up(len(data) + FOOTER_BYTES) - FOOTER_BYTES, b"\0")
    return filled + _FOOTER.pack(MAGIC, records, start, len(data))


def decode_footer(data: bytes | bytearray | memoryview, length: int, where: str) -> Footer:
    """The footer of a pack. `data`: its last bytes. `length`: of the pack. `where`: its name, for messages.

    Raises ManifestInvalid if it is no footer, or points outside of the pack.
    """
    if min(length, len(data)) < FOOTER_BYTES:
        raise ManifestInvalid(f"{where} is too short for a pack", blob=where)
    magic, *numbers = _FOOTER.unpack(bytes(data[-FOOTER_BYTES:]))
    found = Footer(*numbers)
    room = length - FOOTER_BYTES
    if magic != MAGIC or not found.records <= found.start <= found.start + found.length <= room:
        raise ManifestInvalid(f"{where} does not end as a pack does: it was cut or damaged", blob=where)
    if length - found.start > PACK_END_LIMIT_BYTES:  # guard: pack-index-length-limit
        raise ManifestInvalid(f"{where} has an index of {length - found.start:,} bytes", blob=where)
    return found


def decode_index(data: bytes | bytearray | memoryview, at: Footer, where: str) -> PackIndex:
    """The index of a pack, checked. `data`: its bytes. `at`: the footer. `where`: the name of the pack, for messages.

    Raises SumMismatch or ManifestInvalid; UnknownFormat for one of a newer version.
    """
    found = layout.decode(bytes(data), PackIndex, where)
    _require(found.files, at.start, where)
    for name, other in found.others.items():
        if not is_pack(name):
            raise ManifestInvalid(f"{where} names {name[:100]!r} as a pack", blob=where)
        _require(other.files, other.length, where)
    return found


def _require(files: Places, room: int, where: str) -> None:
    """Raise ManifestInvalid unless these are files of a generation that lie within `room` bytes."""
    for name, (offset, length) in files.items():
        # guard: packed-files-within-pack
        if min(offset, length) < 0 or offset % PAGE_BYTES or offset + length > room or not may_be_packed(name):
            what = f"{where}: its index puts {name[:100]!r} at byte {offset:,}, where {room:,} bytes are"
            raise ManifestInvalid(what, blob=where)

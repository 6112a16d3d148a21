"""Bytes <-> records, file names, and the layout of a tensor file. Pure: reads and writes nothing.

A record that `decode` returns agrees with its own digest, unless the caller has asked not to check it; validation.py
checks its fields. See docs/format.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from json.encoder import encode_basestring_ascii as _quoted
from typing import NamedTuple, TypeVar

import msgspec

from ..errors import ManifestInvalid, SumMismatch, UnknownFormat, Unstorable
from ..io.checksum import ALGORITHMS, Hasher, digest
from ..limits import HEADER_LIMIT_BYTES, PAGE_BYTES, STEP_DIGITS, TINY_BYTES
from ..records import Blob, Extent, GenerationId, Incarnation, Piece, Record

FORMAT = 1

METADATA = "__metadata__"

# Name of a dtype in torch and numpy -> bits of an element, and the name in safetensors ("" if it has none).
DTYPES: dict[str, tuple[int, str]] = {
    "bool": (8, "BOOL"),
    "uint8": (8, "U8"),
    "int8": (8, "I8"),
    "uint16": (16, "U16"),
    "int16": (16, "I16"),
    "uint32": (32, "U32"),
    "int32": (32, "I32"),
    "uint64": (64, "U64"),
    "int64": (64, "I64"),
    "float16": (16, "F16"),
    "bfloat16": (16, "BF16"),
    "float32": (32, "F32"),
    "float64": (64, "F64"),
    "complex64": (64, "C64"),
    "float8_e4m3fn": (8, "F8_E4M3"),
    "float8_e5m2": (8, "F8_E5M2"),
    # Everything below is stored as U8 bytes; the manifest holds the dtype.
    "float8_e4m3fnuz": (8, ""),
    "float8_e5m2fnuz": (8, ""),
    "float8_e8m0fnu": (8, ""),
    "float4_e2m1fn_x2": (8, ""),
    "complex32": (32, ""),
    "bcomplex32": (32, ""),
    "complex128": (128, ""),
    **{f"{sign}int{bits}": (8, "") for sign in ("", "u") for bits in range(1, 8)},
    **{name: (8, "") for name in ("bits1x8", "bits2x4", "bits4x2", "bits8")},
    "bits16": (16, ""),
}

SAFETENSORS_BITS = {name: bits for bits, name in DTYPES.values() if name}

# ---- names ---------------------------------------------------------------------------------------------------

HEADER = "lastgood.json"
POINTER = "POINTER.json"
OLD_POINTER = "LASTGOOD.json"
"""name of the pointer in runs written before 2026-11-22, which is still read. It was replaced because a file system
that ignores case cannot distinguish it from HEADER."""
PLACES = "PLACES.json"
LINK = "latest_ok"
"""symbolic link to the folder of the generation that POINTER names, for people and scripts"""
COMMIT = "COMMIT.json"
INTENT = "INTENT.json"
"""in memory, of a save that is under way: what its COMMIT will say, without the seals"""
VERIFIED = "VERIFIED.json"
DAMAGED = "DAMAGED.json"
UNFIT = "UNFIT.json"
GOING = "GOING.json"
"""marks a generation that is being deleted: its COMMIT may be missing from then on"""
_LABEL = re.compile(r"LABEL-([1-9][0-9]{0,5})\.json")

_ID = r"[0-9a-f]{8}"
_GENERATION = re.compile(rf"([0-9]{{{STEP_DIGITS}}})-({_ID})")
_INCARNATION = re.compile(rf"([0-9]{{6}})-({_ID})(?:-after-([0-9]{{{STEP_DIGITS}}})-({_ID}))?\.json")


def folder(at: GenerationId) -> str:
    """The folder of a generation, as a name inside the run."""
    return f"gen/{at.step:0{STEP_DIGITS}d}-{at.incarnation}"


def parse_folder(name: str) -> GenerationId | None:
    """The generation of a folder in `gen/`; None for any other name."""
    found = _GENERATION.fullmatch(name)
    return GenerationId(step=int(found[1]), incarnation=found[2]) if found else None


def incarnation_name(one: Incarnation) -> str:
    """The name of the record of an incarnation, inside the run."""
    after = f"-after-{one.parent.step:0{STEP_DIGITS}d}-{one.parent.incarnation}" if one.parent else ""
    return f"incarnations/{one.order:06d}-{one.id}{after}.json"


def parse_incarnation(name: str) -> Incarnation | None:
    """The incarnation that a file name in `incarnations/` states, which suffices if the content is damaged."""
    found = _INCARNATION.fullmatch(name)
    if not found:
        return None
    parent = GenerationId(step=int(found[3]), incarnation=found[4]) if found[3] else None
    return Incarnation(format=FORMAT, order=int(found[1]), id=found[2], parent=parent)


def manifest_name(rank: int) -> str:
    """The file name of a rank's manifest."""
    return f"r{rank:05d}.manifest.json"


def is_manifest(name: str) -> bool:
    """Whether a file name is that of a manifest."""
    return name.endswith(".manifest.json")


def rank_folder(rank: int) -> str:
    """The folder in which one of several ranks has its slots."""
    return f"r{rank:05d}"


def is_rank_folder(name: str) -> bool:
    """Whether the name of a folder is that of a rank's slots."""
    return re.fullmatch(r"r\d{5,}", name) is not None


def blob_name(rank: int, part: int = 0) -> str:
    """The file name of the tensor file `part` of a rank, counted from 0."""
    return f"r{rank:05d}.safetensors" if part == 0 else f"r{rank:05d}.{part}.safetensors"


def label_name(number: int) -> str:
    """The file name of the `number`-th label of a generation, counted from 1."""
    return f"LABEL-{number}.json"


def label_number(name: str) -> int | None:
    """The number of a label, from its file name; None for any other file."""
    found = _LABEL.fullmatch(name)
    return int(found[1]) if found else None


def is_litter(folder: str, name: str) -> bool:
    """Whether a file was left by a crash.

    `folder`: inside the run; "" is the run's own, which may hold foreign files.
    """
    if folder:
        return name.endswith(".tmp")
    ours = name.startswith((HEADER, POINTER, OLD_POINTER, LINK)) and name.endswith(".tmp")
    return ours or name.startswith(".probe-")


# ---- records -------------------------------------------------------------------------------------------------
# {"digest":"<algorithm>:<hex>","record":<the record>}\n     the digest covers the bytes of <the record>

T = TypeVar("T", bound=Record)
_encoder = msgspec.json.Encoder(order="deterministic")
_ENVELOPE = re.compile(rb'\{"digest":"([0-9a-z_]+):([0-9a-f]+)","record":')


def encode(record: Record, algorithm: str = "xxh3_128") -> bytes:
    """A record in its envelope, with its own digest."""
    body = _encoder.encode(record)
    return b'{"digest":"%s:%s","record":%s}\n' % (algorithm.encode(), digest(algorithm, body).encode(), body)


def decode(data: bytes, kind: type[T], where: str, *, check_digest: bool = True) -> T:
    """The record in an envelope whose digest agrees. `where`: the name of the file, for messages.

    With `check_digest=False` the digest is not compared, so that the guard can examine a damaged record. Raises
    SumMismatch, ManifestInvalid, or UnknownFormat if a newer version wrote the record.
    """
    found = _ENVELOPE.match(data)
    if not found or not data.endswith(b"}\n") or found[1].decode() not in ALGORITHMS:  # guard: record-envelope-form
        raise SumMismatch(f"{where} is not a record of this package", blob=where)
    body = data[found.end() : -2]
    if check_digest and digest(found[1].decode(), body) != found[2].decode():  # guard: record-digest-checked
        raise SumMismatch(f"{where} differs from its own digest", blob=where)
    try:
        version = msgspec.json.decode(body, type=_Version).format
        if version > FORMAT:  # guard: newer-format-refused
            raise UnknownFormat(
                f"{where} has format {version}; this version reads up to {FORMAT}",
                safe="Nothing was changed.",
                todo="Install a newer lastgood.",
            )
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ManifestInvalid(f"{where}: {error}", blob=where) from error


class _Version(msgspec.Struct):
    format: int


def root_of(commit_bytes: bytes) -> str:
    """The root of a generation: the digest in the envelope of its commit record, which covers the whole state."""
    found = _ENVELOPE.match(commit_bytes)
    return f"{found[1].decode()}:{found[2].decode()}" if found else ""


# ---- the image of a tensor file --------------------------------------------------------------------------------


class Tensor(NamedTuple):
    """A tensor, or a part of one, that a file is to hold. `dtype` is a key of DTYPES."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    finite: bool = False
    """whether NaN or infinity in it makes a state unfit"""
    offsets: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    """of a part of a tensor: where it begins, and the shape of the whole tensor; both empty for a whole tensor"""
    own: bool = False
    """only this rank holds these bytes (records.Piece)"""

    @property
    def length(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype][0] // 8

    @property
    def key(self) -> str:
        """Its name in a tensor file, which for a part ends with the place where the part begins."""
        return f"{self.name}@{','.join(map(str, self.offsets))}" if self.offsets else self.name


def tensor_of(piece: Piece) -> Tensor:
    """The tensor that a piece was stored from."""
    whole = tuple(piece.offsets), tuple(piece.whole), piece.own
    return Tensor(piece.name, piece.dtype, tuple(piece.shape), piece.finite, *whole)


class Image(NamedTuple):
    """The layout of a safetensors file: its header, and the offset of each tensor."""

    blob: str
    header: bytes
    tensors: list[tuple[Tensor, int]]
    """tensor, offset in the file; ascending, without holes"""
    length: int


def images(
    tensors: Iterable[Tensor], rank: int = 0, header_limit: int = HEADER_LIMIT_BYTES, first: int = 0
) -> list[Image]:
    """Lay tensors out in safetensors files, a new one where the header of a file might exceed its limit.

    `first` (default 0): the number of files that the rank has already. Within a file the tensors with wide elements
    come first, so that every tensor is aligned to its element; of these the tiny ones, so that who wants them reads few
    chunks; then they are sorted by name. Raises Unstorable for the one name that safetensors reserves.
    """
    tensors = list(tensors)
    if any(one.key == METADATA for one in tensors):
        raise Unstorable(
            f"a tensor cannot be named {METADATA}", safe="Nothing was saved.", todo="Rename this entry of the state."
        )
    ordered = sorted(tensors, key=lambda one: (-DTYPES[one.dtype][0], one.length > TINY_BYTES, one.name, one.offsets))
    groups: list[list[Tensor]] = [[]]
    room = header_limit - 2 * PAGE_BYTES
    for one in ordered:
        entry = len(_quoted(one.key)) + 120 + 21 * len(one.shape)  # an upper bound of the length of the entry
        if room < entry and groups[-1]:
            groups.append([])
            room = header_limit - 2 * PAGE_BYTES
        room -= entry
        groups[-1].append(one)
    return [image(group, blob_name(rank, part)) for part, group in enumerate(groups, first)]


class Entry(msgspec.Struct, gc=False):
    """The entry of one tensor in a header. `gc=False`: there are many, and none is part of a reference cycle."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def image(tensors: Sequence[Tensor], blob: str) -> Image:
    """The layout of one file that holds these tensors in this order."""
    entries: dict[str, object] = {METADATA: {"format": "pt"}}
    lengths = [one.length for one in tensors]
    places = list(accumulate(lengths, initial=0))
    for one, length, place in zip(tensors, lengths, places, strict=False):
        native = DTYPES[one.dtype][1]
        entries[one.key] = Entry(native or "U8", one.shape if native else (length,), (place, place + length))
    text = msgspec.json.encode(entries)
    text += b" " * (-(len(text) + 8) % PAGE_BYTES)
    header = len(text).to_bytes(8, "little") + text
    placed = [(one, len(header) + place) for one, place in zip(tensors, places, strict=False)]
    return Image(blob, header, placed, len(header) + places[-1])


class Segment(NamedTuple):
    """The part of one tensor that is in one chunk. `tensor` is the index in Image.tensors; -1 is the header."""

    tensor: int
    start: int
    """first byte within the tensor"""
    at: int
    """first byte within the chunk"""
    length: int


def segments(image: Image, chunk_bytes: int) -> Iterator[list[Segment]]:
    """The segments of each chunk, in order.

    An empty tensor is listed in the chunk of its offset, or in the last one.
    """
    offsets = [0, *(offset for _, offset in image.tensors)]
    ends = [*offsets[1:], image.length]
    found: list[Segment] = []
    low, high = 0, chunk_bytes  # the range of the chunk in the file
    for index, (offset, end) in enumerate(zip(offsets, ends, strict=True), -1):
        at = offset
        while True:
            while high <= at < image.length:
                yield found
                found, low, high = [], high, high + chunk_bytes
            upto = min(end, high)
            found.append(Segment(index, at - offset, at - low, upto - at))
            at = upto
            if at == end:
                break
    yield found


def content_preamble(dtype: str, shape: Sequence[int]) -> bytes:
    """The text that a content digest covers before the bytes of the tensor."""
    return f"{dtype}{list(shape)}\n".encode()  # guard: digest-covers-dtype-and-shape


def content_hasher(algorithm: str, dtype: str, shape: Sequence[int]) -> Hasher:
    """A new hasher that has processed dtype and shape, and next takes the bytes of the tensor in row-major order."""
    hasher = ALGORITHMS[algorithm]()
    hasher.update(content_preamble(dtype, shape))
    return hasher


def extent_of(blob: Blob, chunk: int) -> Extent:
    """The bytes of one chunk of a blob."""
    start = chunk * blob.chunk_bytes
    return Extent(blob=blob.name, offset=start, length=min(blob.chunk_bytes, blob.length - start))

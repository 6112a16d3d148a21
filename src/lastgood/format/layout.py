"""Bytes <-> records, names, and the image of a tensor file. Pure: reads and writes nothing, knows no place.

Whatever comes out of `decode` and `validate_*` has been checked: nothing is allocated, opened or believed on the word
of bytes that were not. See docs/format.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any, NamedTuple, TypeVar

import msgspec

from ..errors import ManifestInvalid, SumMismatch, UnknownFormat, Unstorable
from ..io.checksum import ALGORITHMS, HEX_LENGTH, Hasher, digest
from ..records import Blob, Commit, Extent, GenerationId, Incarnation, Manifest, Piece, Record

FORMAT = 1
CHUNK_BYTES = 8 << 20
PAGE_BYTES = 4096
HEADER_LIMIT_BYTES = 100_000_000
"""safetensors readers refuse a longer header; a longer one is split over several blobs"""
RECORD_LIMIT_BYTES = 64 << 20
"""longest record (commit, pointer, mark) that is read without a length from a seal"""
MANIFEST_LIMIT_BYTES = 1 << 30
CHUNK_LIMIT_BYTES = 256 << 20
"""what a reader must hold of a file at once"""
DIMENSION_LIMIT = 64
"""torch and numpy have no tensor of more"""

METADATA = "__metadata__"

# dtype name as torch and numpy say it -> bits of one element, and its safetensors name where that format has it.
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
    # Everything below travels as U8 bytes; the manifest holds the true dtype.
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
"""name of the pointer in runs written before 2026-11-22. It is still read. It was given up because a file system that
ignores case takes it for HEADER."""
LINK = "latest_ok"
"""symbolic link to the folder of the generation that POINTER names, for people and scripts"""
COMMIT = "COMMIT.json"
VERIFIED = "VERIFIED.json"
DAMAGED = "DAMAGED.json"
UNFIT = "UNFIT.json"
GOING = "GOING.json"
_LABEL = re.compile(r"LABEL-([1-9][0-9]{0,5})\.json")
"""says that the generation beside it is being deleted: from here its COMMIT may go"""

_ID = r"[0-9a-f]{8}"
_GENERATION = re.compile(rf"([0-9]{{12}})-({_ID})")
_INCARNATION = re.compile(rf"([0-9]{{6}})-({_ID})(?:-after-([0-9]{{12}})-({_ID}))?\.json")
STEP_LIMIT = 10**12


def folder(at: GenerationId) -> str:
    return f"gen/{at.step:012d}-{at.incarnation}"


def parse_folder(name: str) -> GenerationId | None:
    found = _GENERATION.fullmatch(name)
    return GenerationId(step=int(found[1]), incarnation=found[2]) if found else None


def incarnation_name(one: Incarnation) -> str:
    after = f"-after-{one.parent.step:012d}-{one.parent.incarnation}" if one.parent else ""
    return f"incarnations/{one.order:06d}-{one.id}{after}.json"


def parse_incarnation(name: str) -> Incarnation | None:
    """All that the record says, from its name alone: it still holds when the content is damaged."""
    found = _INCARNATION.fullmatch(name)
    if not found:
        return None
    parent = GenerationId(step=int(found[3]), incarnation=found[4]) if found[3] else None
    return Incarnation(format=FORMAT, order=int(found[1]), id=found[2], parent=parent)


def manifest_name(rank: int) -> str:
    return f"r{rank:05d}.manifest.json"


def blob_name(rank: int, part: int = 0) -> str:
    return f"r{rank:05d}.safetensors" if part == 0 else f"r{rank:05d}.{part}.safetensors"


def label_name(number: int) -> str:
    """Of the `number`-th label of a generation, counted from 1."""
    return f"LABEL-{number}.json"


def label_number(name: str) -> int | None:
    """Which label a file is; None for any other file."""
    found = _LABEL.fullmatch(name)
    return int(found[1]) if found else None


def is_litter(home: str, name: str) -> bool:
    """Whether a file is one that somebody died over. In the run's own folder other people's files lie too."""
    if home:
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


def decode(data: bytes, kind: type[T], where: str, *, believe: bool = False) -> T:
    """The record in an envelope, its digest checked; unless `believe`, for a guard that wants to know what else shows.

    Raises SumMismatch, ManifestInvalid, or UnknownFormat when it was written by a newer version.
    """
    found = _ENVELOPE.match(data)
    if not found or not data.endswith(b"}\n") or found[1].decode() not in ALGORITHMS:  # guard: record-envelope-form
        raise SumMismatch(f"{where} is not a record of this package", blob=where)
    body = data[found.end() : -2]
    if not believe and digest(found[1].decode(), body) != found[2].decode():  # guard: record-digest-checked
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
    """The short name of a whole state: the digest in its commit's envelope."""
    found = _ENVELOPE.match(commit_bytes)
    return f"{found[1].decode()}:{found[2].decode()}" if found else ""


# ---- the image of a tensor file --------------------------------------------------------------------------------


class Tensor(NamedTuple):
    """What the image needs to know of a tensor. `shape` as stored, `dtype` a key of DTYPES."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    finite: bool = False
    """whether NaN or infinity in it makes a state unfit"""
    offsets: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    """where it is a part of a tensor: where it begins, and the shape of the tensor"""
    own: bool = False
    """one rank's own"""

    @property
    def length(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][0] // 8

    @property
    def key(self) -> str:
        """Its name in a tensor file: a part says where it begins."""
        return f"{self.name}@{','.join(map(str, self.offsets))}" if self.offsets else self.name


def tensor_of(piece: Piece) -> Tensor:
    """What the image was made of."""
    whole = tuple(piece.offsets), tuple(piece.whole), piece.own
    return Tensor(piece.name, piece.dtype, tuple(piece.shape), piece.finite, *whole)


class Image(NamedTuple):
    """A safetensors file before it exists: its header and where each tensor's bytes go."""

    blob: str
    header: bytes
    tensors: list[tuple[Tensor, int]]
    """tensor, offset in the file; ascending, without holes"""
    length: int


def images(
    tensors: Iterable[Tensor], rank: int = 0, header_limit: int = HEADER_LIMIT_BYTES, first: int = 0
) -> list[Image]:
    """Lay tensors out in as few safetensors files as their headers allow; `first`: how many the rank has already.

    Within a file: wide types first, so that every tensor is aligned to its element; then by name. Raises Unstorable for
    the one name that safetensors keeps to itself.
    """
    tensors = list(tensors)
    if any(one.key == METADATA for one in tensors):
        raise Unstorable(
            f"a tensor cannot be named {METADATA}", safe="Nothing was saved.", todo="Rename this entry of the state."
        )
    ordered = sorted(tensors, key=lambda one: (-DTYPES[one.dtype][0], one.name, one.offsets))
    groups: list[list[Tensor]] = [[]]
    room = header_limit - 2 * PAGE_BYTES
    for one in ordered:
        entry = len(_quoted(one.key)) + 120 + 21 * len(one.shape)  # above the longest entry of this name
        if room < entry and groups[-1]:
            groups.append([])
            room = header_limit - 2 * PAGE_BYTES
        room -= entry
        groups[-1].append(one)
    return [_image(group, blob_name(rank, part)) for part, group in enumerate(groups, first)]


class _Entry(msgspec.Struct, gc=False):
    """Of one tensor in a header. Not seen by the collector: there are many at once."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _image(tensors: Sequence[Tensor], blob: str) -> Image:
    entries: dict[str, object] = {METADATA: {"format": "pt"}}
    lengths = [one.length for one in tensors]
    places = list(accumulate(lengths, initial=0))
    for one, length, place in zip(tensors, lengths, places, strict=False):
        native = DTYPES[one.dtype][1]
        entries[one.key] = _Entry(native or "U8", one.shape if native else (length,), (place, place + length))
    text = msgspec.json.encode(entries)
    text += b" " * (-(len(text) + 8) % PAGE_BYTES)
    header = len(text).to_bytes(8, "little") + text
    placed = [(one, len(header) + place) for one, place in zip(tensors, places, strict=False)]
    return Image(blob, header, placed, len(header) + places[-1])


class Segment(NamedTuple):
    """The part of one tensor that lies in one chunk. `tensor` is its place in Image.tensors; -1 is the header."""

    tensor: int
    start: int
    """first byte within the tensor"""
    at: int
    """first byte within the chunk"""
    length: int


def segments(image: Image, chunk_bytes: int) -> Iterator[list[Segment]]:
    """Chunk by chunk, what lies where. Empty tensors appear in the chunk that their offset falls in, or the last."""
    offsets = [0, *(offset for _, offset in image.tensors)]
    ends = [*offsets[1:], image.length]
    found: list[Segment] = []
    low, high = 0, chunk_bytes  # of the chunk, in the file
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
    """What a content digest covers before the bytes."""
    return f"{dtype}{list(shape)}\n".encode()  # guard: digest-covers-dtype-and-shape


def content_hasher(algorithm: str, dtype: str, shape: Sequence[int]) -> Hasher:
    """A fresh hasher that has seen dtype and shape; feed it the bytes in row-major order."""
    hasher = ALGORITHMS[algorithm]()
    hasher.update(content_preamble(dtype, shape))
    return hasher


# ---- validation ----------------------------------------------------------------------------------------------


def validate_commit(commit: Commit, at: GenerationId, run: str | None) -> None:
    """A commit must speak of the folder it lies in, of this run, and of every rank once. Raises ManifestInvalid."""
    where = f"{folder(at)}/{COMMIT}"
    if commit.id != at:  # guard: commit-matches-folder
        raise ManifestInvalid(f"{where} speaks of {commit.id}", blob=where)
    if run is not None and commit.run != run:  # guard: commit-matches-run
        raise ManifestInvalid(f"{where} belongs to run {commit.run}, not to {run}", blob=where)
    if not 0 < commit.world.ranks == len(commit.seals) or any(  # guard: one-seal-per-rank
        seal.rank != rank for rank, seal in enumerate(commit.seals)
    ):
        raise ManifestInvalid(f"{where} has {len(commit.seals)} seals for {commit.world.ranks} ranks", blob=where)
    for seal in commit.seals:
        # guard: seal-names-rank-manifest
        if seal.manifest != manifest_name(seal.rank) or not 0 <= seal.length <= MANIFEST_LIMIT_BYTES:
            raise ManifestInvalid(
                f"{where} seals {seal.manifest!r} with {seal.length:,} bytes as manifest of rank {seal.rank}",
                blob=where,
            )


def validate_manifest(manifest: Manifest, at: GenerationId, rank: int, ranks: int = 1) -> None:
    """Names, counts, shapes, lengths and places must fit together. Raises ManifestInvalid.

    With several `ranks`, one may refer to what another holds: policy/reshard.py checks that over all of them.
    """
    where = f"{folder(at)}/{manifest_name(rank)}"

    def need(holds: bool, what: str) -> None:
        if not holds:
            raise ManifestInvalid(f"{where}: {what}", blob=where)

    # guard: manifest-matches-folder
    need((manifest.step, manifest.incarnation, manifest.rank) == (at.step, at.incarnation, rank), "is of another place")
    need(manifest.digest in ALGORITHMS, f"unknown digest {manifest.digest!r}")
    hex_length = HEX_LENGTH[manifest.digest]
    blobs: dict[str, Blob] = {}
    for part, blob in enumerate(manifest.blobs):
        need(blob.name == blob_name(rank, part), f"{blob.name!r} is no name of a blob here")  # guard: blob-name-checked
        need(blob.chunk_bytes % PAGE_BYTES == 0, f"chunks of {blob.chunk_bytes:,} bytes")
        # guard: chunk-bytes-in-range
        need(PAGE_BYTES <= blob.chunk_bytes <= CHUNK_LIMIT_BYTES, f"chunks of {blob.chunk_bytes:,} bytes")
        # guard: chunk-count-matches-length
        need(len(blob.chunks) == -(-blob.length // blob.chunk_bytes) > 0, f"{blob.name} has a wrong count of chunks")
        need(all(len(one) == hex_length for one in blob.chunks), f"{blob.name} has a malformed digest")
        blobs[blob.name] = blob
    names, ends = set(manifest.aliases), dict.fromkeys(blobs, -1)
    for piece in manifest.pieces:
        need(piece.key not in names, f"{piece.key!r} stands twice")  # guard: tensor-name-unique
        names.add(piece.key)
        need(piece.dtype in DTYPES, f"{piece.name} has unknown dtype {piece.dtype!r}")
        need(len(piece.shape) <= DIMENSION_LIMIT, f"{piece.name} has {len(piece.shape):,} dimensions")
        need(all(size >= 0 for size in piece.shape), f"{piece.name} has a negative size")
        need(_is_part(piece) or not (piece.offsets or piece.whole), f"{piece.name} is no part of {piece.whole}")
        extent, length = piece.extent, Tensor(piece.name, piece.dtype, tuple(piece.shape)).length
        need(extent.offset % (DTYPES[piece.dtype][0] // 8) == 0, f"{piece.name} is not aligned to its elements")
        # guard: extent-length-matches-shape
        need(extent.length == length, f"{piece.name} has {extent.length} bytes, its shape says {length}")
        # guard: extent-in-own-blob
        need(extent.blob in blobs, f"{piece.name} rests in {extent.blob!r}, which is not of this manifest")
        if ends[extent.blob] < 0:  # the first of its blob stands right after the header
            need(0 < extent.offset <= HEADER_LIMIT_BYTES and extent.offset % PAGE_BYTES == 0, f"{piece.name}: offset")
        else:
            # guard: no-hole-or-overlap
            need(extent.offset == ends[extent.blob], f"{piece.name} leaves a hole, or overlaps")
        ends[extent.blob] = extent.offset + length
    for blob in manifest.blobs:
        end = ends[blob.name] if ends[blob.name] >= 0 else min(blob.length, HEADER_LIMIT_BYTES)  # a header alone
        # guard: blob-ends-with-last-piece
        need(end == blob.length, f"{blob.name} has {blob.length:,} bytes, its pieces end elsewhere")
    stored = names - manifest.aliases.keys()
    # guard: alias-target-exists
    need(ranks > 1 or all(name in stored for name in manifest.aliases.values()), "an alias of nothing")
    need(ranks > 1 or not any(piece.offsets or piece.own for piece in manifest.pieces), "a part, in a world of one")


def _is_part(piece: Piece) -> bool:
    """Whether it lies within its tensor, and is less than all of it."""
    if not len(piece.offsets) == len(piece.whole) == len(piece.shape) <= DIMENSION_LIMIT or piece.shape == piece.whole:
        return False
    sides = zip(piece.offsets, piece.shape, piece.whole, strict=True)
    return all(offset >= 0 and size > 0 and offset + size <= whole for offset, size, whole in sides)


def validate_file(header: bytes, length: int, blob: str) -> None:
    """A tensor file must be one by itself, whatever its manifest says: safetensors, without holes, to its last byte.

    Raises ManifestInvalid.
    """

    def need(holds: bool, what: str) -> None:
        if not holds:
            raise ManifestInvalid(f"{blob}: {what}", blob=blob)

    text = int.from_bytes(header[:8], "little")
    need(len(header) >= 8 and 0 < text <= HEADER_LIMIT_BYTES and 8 + text == len(header), "no length of a header")
    try:
        entries = msgspec.json.decode(header[8:], type=dict[str, dict[str, Any]])
        entries.pop(METADATA, None)
        stored = sorted(msgspec.convert(list(entries.values()), list[_Entry]), key=lambda one: one.data_offsets)
    except (msgspec.ValidationError, msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ManifestInvalid(f"{blob}: {error}", blob=blob) from error
    end = 0
    for one in stored:
        bits = SAFETENSORS_BITS.get(one.dtype, 0)
        need(bits > 0 and all(size >= 0 for size in one.shape), f"a tensor of {one.dtype} {one.shape}")
        begin, end_now = one.data_offsets
        need(
            begin == end and (end_now - begin) * 8 == math.prod(one.shape) * bits, "a hole, an overlap or a wrong size"
        )
        end = end_now
    need(len(header) + end == length, f"{length:,} bytes, its header speaks of {len(header) + end:,}")


def validate_header(header: bytes, blob: Blob, pieces: Sequence[Piece]) -> None:
    """The safetensors header must be the one that this manifest makes. `pieces`: those of this blob."""
    if header != _image([tensor_of(piece) for piece in pieces], blob.name).header:
        raise ManifestInvalid(f"{blob.name}: its header does not agree with the manifest", blob=blob.name)


def extent_of(blob: Blob, chunk: int) -> Extent:
    start = chunk * blob.chunk_bytes
    return Extent(blob=blob.name, offset=start, length=min(blob.chunk_bytes, blob.length - start))

"""Validation: whether records, headers and files fit together. Pure.

Nothing is allocated, opened or believed because of a record before the functions here have accepted it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from ..errors import ManifestInvalid
from ..io.checksum import ALGORITHMS, HEX_LENGTH
from ..limits import (
    CHUNK_LIMIT_BYTES,
    DIMENSION_LIMIT,
    HEADER_LIMIT_BYTES,
    MANIFEST_LIMIT_BYTES,
    PAGE_BYTES,
)
from ..records import Blob, Commit, GenerationId, Manifest, Piece
from .layout import (
    COMMIT,
    DTYPES,
    METADATA,
    SAFETENSORS_BITS,
    Entry,
    Tensor,
    blob_name,
    folder,
    image,
    manifest_name,
    tensor_of,
)


def validate_commit(commit: Commit, at: GenerationId, run: str | None) -> None:
    """Check that a commit names the folder that it is in, this run, and every rank once. Raises ManifestInvalid.

    `run`: the id of the run; None if it is not known.
    """
    where = f"{folder(at)}/{COMMIT}"
    if commit.id != at:  # guard: commit-matches-folder
        raise ManifestInvalid(f"{where} is the commit of {commit.id}", blob=where)
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
    """Check that names, counts, shapes, lengths and offsets fit together. Raises ManifestInvalid.

    `ranks` (default 1): the number of ranks of the generation. With several, the manifest of one rank may refer to
    tensors of another one; policy/reshard.py checks these references over all manifests.
    """
    where = f"{folder(at)}/{manifest_name(rank)}"

    def need(holds: bool, what: str) -> None:
        if not holds:
            raise ManifestInvalid(f"{where}: {what}", blob=where)

    # guard: manifest-matches-folder
    need((manifest.step, manifest.incarnation, manifest.rank) == (at.step, at.incarnation, rank), "belongs elsewhere")
    need(manifest.digest in ALGORITHMS, f"unknown digest {manifest.digest!r}")
    hex_length = HEX_LENGTH[manifest.digest]
    blobs: dict[str, Blob] = {}
    for part, blob in enumerate(manifest.blobs):
        # guard: blob-name-checked
        need(blob.name == blob_name(rank, part), f"{blob.name!r} is not the name of a blob here")
        need(blob.chunk_bytes % PAGE_BYTES == 0, f"chunks of {blob.chunk_bytes:,} bytes")
        # guard: chunk-bytes-in-range
        need(PAGE_BYTES <= blob.chunk_bytes <= CHUNK_LIMIT_BYTES, f"chunks of {blob.chunk_bytes:,} bytes")
        # guard: chunk-count-matches-length
        need(len(blob.chunks) == -(-blob.length // blob.chunk_bytes) > 0, f"{blob.name} has a wrong count of chunks")
        need(all(len(one) == hex_length for one in blob.chunks), f"{blob.name} has a malformed digest")
        blobs[blob.name] = blob
    names, ends = set(manifest.aliases), dict.fromkeys(blobs, -1)
    for piece in manifest.pieces:
        need(piece.key not in names, f"{piece.key!r} is listed twice")  # guard: tensor-name-unique
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
        if ends[extent.blob] < 0:  # the first piece of a blob begins right after the header
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
    """Whether the piece lies within its tensor and is not all of it."""
    if not len(piece.offsets) == len(piece.whole) == len(piece.shape) <= DIMENSION_LIMIT or piece.shape == piece.whole:
        return False
    sides = zip(piece.offsets, piece.shape, piece.whole, strict=True)
    return all(offset >= 0 and size > 0 and offset + size <= whole for offset, size, whole in sides)


def validate_file(header: bytes, length: int, blob: str) -> None:
    """Check that a file is a safetensors file without holes, to its last byte, whatever its manifest says.

    `header`: the bytes before the first tensor, the length of the header included. `length`: of the file, in bytes.
    Raises ManifestInvalid.
    """

    def need(holds: bool, what: str) -> None:
        if not holds:
            raise ManifestInvalid(f"{blob}: {what}", blob=blob)

    text = int.from_bytes(header[:8], "little")
    need(len(header) >= 8 and 0 < text <= HEADER_LIMIT_BYTES and 8 + text == len(header), "not the length of a header")
    try:
        entries = msgspec.json.decode(header[8:], type=dict[str, dict[str, Any]])
        entries.pop(METADATA, None)
        stored = sorted(msgspec.convert(list(entries.values()), list[Entry]), key=lambda one: one.data_offsets)
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
    need(len(header) + end == length, f"{length:,} bytes, its header describes {len(header) + end:,}")


def validate_header(header: bytes, blob: Blob, pieces: Sequence[Piece]) -> None:
    """Check that a safetensors header is the one that the manifest implies. `pieces`: those of this blob.

    Raises ManifestInvalid.
    """
    if header != image([tensor_of(piece) for piece in pieces], blob.name).header:
        raise ManifestInvalid(f"{blob.name}: its header does not agree with the manifest", blob=blob.name)

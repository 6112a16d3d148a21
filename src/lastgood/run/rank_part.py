"""One rank's share of a save: its tensor files, its manifest, its seal. Commits nothing, and decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

from ..engine import write_file
from ..format import commit, layout
from ..format.layout import Image
from ..ports import Tier
from ..records import Blob, GenerationId, Manifest, Piece, Record, Seal

Files = Iterable[tuple[Image, Iterator[write_file.Chunk]]]
"""tensor files, each with the chunks that it is made of"""
Approve = Callable[[Sequence[Piece]], Files]


class Share(Record, frozen=True, kw_only=True):
    """What a rank has made durable of a save."""

    seal: Seal
    bytes: int


def nothing_more(_: Sequence[Piece]) -> Files:
    """Published as it is."""
    return ()


def share(
    tier: Tier,
    at: GenerationId,
    rank: int,
    images: Sequence[Image],
    chunks: Iterator[write_file.Chunk],
    *,
    chunk_bytes: int,
    algorithm: str,
    aliases: Mapping[str, str],
    values: Mapping[str, Any],
    approve: Approve = nothing_more,
    writers: Executor,
) -> Share:
    """A rank's files and its manifest, durable and sealed, from chunks that arrive in order.

    `approve` sees the pieces once all are written; it raises where they must not be published, and may give further
    files. On an error what is half written of a file is removed; what was finished stays, and is reached from nowhere.
    """
    home = layout.folder(at)
    blobs: list[Blob] = []
    pieces: list[Piece] = []

    def write(image: Image, chunks: Iterator[write_file.Chunk]) -> None:
        blob, its_pieces = write_file.write(
            tier, home, image, chunks, chunk_bytes=chunk_bytes, algorithm=algorithm, writers=writers
        )
        blobs.append(blob)
        pieces.extend(its_pieces)

    for image in images:
        write(image, chunks)
    for image, more in approve(pieces):
        write(image, more)
    seal = commit.seal(
        tier,
        Manifest(
            format=layout.FORMAT,
            step=at.step,
            incarnation=at.incarnation,
            rank=rank,
            digest=algorithm,
            blobs=blobs,
            pieces=pieces,
            aliases=dict(aliases),
            values=dict(values),
        ),
    )
    return Share(seal=seal, bytes=seal.length + sum(blob.length for blob in blobs))

"""Writes one tensor file from chunks that arrive in order. The first error cancels the file.

For every chunk the digest of its bytes and the digests of its tensors are computed, and it is written; the GIL is
released meanwhile. Threads do that at the same time, or the calling thread does it piece by piece: a piece then comes
from memory once, and from the caches afterwards, which costs the least where writing is a copy in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future
from typing import Protocol

from ..format import layout
from ..format.layout import Image
from ..io.checksum import ALGORITHMS, Buffer
from ..io.files import round_up
from ..ports import Tier, Upload
from ..records import Blob, Piece
from .arena import Arena, Lease
from .content_digest import Contents
from .inline_executor import Inline

INLINE = Inline()
PIECE_BYTES = 256 << 10
"""so much stays in the caches of a processor while it is digested twice and copied"""


class Chunk(Protocol):
    """A filled buffer. `write` owns it from the moment the iterator yields it, and releases it once."""

    @property
    def buffer(self) -> memoryview: ...
    def release(self) -> None: ...


def write(
    tier: Tier,
    folder: str,
    image: Image,
    chunks: Iterator[Chunk],
    *,
    chunk_bytes: int,
    algorithm: str,
    writers: Executor | None,
) -> tuple[Blob, list[Piece]]:
    """Write a blob from its chunks; returns its record and its pieces, with their digests.

    `folder`: of the generation, as a name inside the run. `chunks`: the bytes of the image in order, `chunk_bytes` each
    (the last one may be shorter), in page-aligned buffers; the iterator may block. `algorithm`: of all digests.
    `writers`: threads that digest and write; the last chunk is written in the calling thread, and with None every one,
    piece by piece. Space is reserved before the first chunk is taken from the iterator.

    On an error of a writer, of the tier or of the iterator, the blob is removed, every chunk that was taken is
    released, and the error is raised.
    """
    upload = tier.create(f"{folder}/{image.blob}", image.length)
    jobs: list[Future[str]] = []
    seen = 0
    try:
        contents = Contents(image, algorithm)
        for offset in range(0, image.length, chunk_bytes):
            chunk = next(chunks)
            job = None
            try:
                length = min(chunk_bytes, image.length - offset)
                if writers is None:
                    job = INLINE.submit(_put, upload, chunk, offset, length, algorithm, contents)
                else:
                    contents.see(chunk.buffer[:length])
                    # The last chunk is written by this thread, so that a small state wakes no other thread.
                    last = offset + chunk_bytes >= image.length
                    job = (INLINE if last else writers).submit(_put, upload, chunk, offset, length, algorithm)
                jobs.append(job)
            finally:
                if job is None:
                    chunk.release()  # guard: unsubmitted-chunk-released
            while seen < len(jobs) and jobs[seen].done():
                jobs[seen].result()
                seen += 1
        sums = [job.result() for job in jobs]  # guard: all-writes-before-finish
        upload.finish()  # guard: fsync-blob-before-seal
    except BaseException:
        for job in jobs:
            # guard: writers-done-before-abort
            job.exception()  # waits: every writer releases its chunk before the file is removed
        upload.abort()  # guard: failed-blob-aborted
        raise
    blob = Blob(name=image.blob, length=image.length, chunk_bytes=chunk_bytes, chunks=sums)
    return blob, contents.pieces()


def _put(
    upload: Upload, chunk: Chunk, offset: int, length: int, algorithm: str, contents: Contents | None = None
) -> str:
    """Digest and write one chunk; piece by piece, and with the digests of its tensors, where `contents` is given."""
    try:
        padded = round_up(length)
        chunk.buffer[length:padded] = bytes(padded - length)  # guard: tail-padding-zeroed
        hasher = ALGORITHMS[algorithm]()
        step = padded if contents is None else PIECE_BYTES
        for start in range(0, padded, step):
            piece = chunk.buffer[start : min(start + step, padded)]
            data = piece[: max(0, length - start)]
            if contents is not None:
                contents.see(data)
            hasher.update(data)
            upload.write_at(piece, offset + start)
        return hasher.hexdigest()
    finally:
        chunk.release()  # guard: written-chunk-released


def filled(image: Image, data: Mapping[str, Buffer], arena: Arena) -> Iterator[Lease]:
    """Yield the filled chunks of a file in order, from tensors that are whole in memory. The consumer owns each lease,
    and must release it. `data`: name of a tensor -> its bytes."""
    for parts in layout.segments(image, arena.chunk_bytes):
        lease = arena.take()
        assert lease is not None
        for place, start, at, length in parts:
            source = image.header if place < 0 else data[image.tensors[place][0].name]
            lease.buffer[at : at + length] = source[start : start + length]
        yield lease

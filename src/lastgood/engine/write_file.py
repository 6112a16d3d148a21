"""Writes one tensor file from chunks that arrive in order. Decides nothing; the first error cancels that file.

Every chunk costs one digest of its bytes, one digest per tensor in it, and one write, all outside the GIL.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, Future
from typing import Protocol

from ..format.layout import Image
from ..io.checksum import digest
from ..io.files import round_up
from ..ports import Tier, Upload
from ..records import Blob, Piece
from .content_digest import Contents
from .inline_executor import Inline

INLINE = Inline()


class Chunk(Protocol):
    """A filled buffer that is this module's from when it is handed over until it is released."""

    @property
    def buffer(self) -> memoryview: ...
    def release(self) -> None: ...


def write(
    tier: Tier,
    home: str,
    image: Image,
    chunks: Iterator[Chunk],
    *,
    chunk_bytes: int,
    algorithm: str,
    writers: Executor,
) -> tuple[Blob, list[Piece]]:
    """Make a blob durable from its chunks; returns its record and its pieces, with their digests.

    Space is reserved before the first chunk is asked for. On an error (a writer's, the tier's, the source's) nothing of
    the blob is left, every chunk that was handed over is released, and the error is raised.
    """
    upload = tier.create(f"{home}/{image.blob}", image.length)
    jobs: list[Future[str]] = []
    seen = 0
    try:
        contents = Contents(image, algorithm)
        for offset in range(0, image.length, chunk_bytes):
            chunk = next(chunks)
            job = None
            try:
                length = min(chunk_bytes, image.length - offset)
                contents.see(chunk.buffer[:length])
                # The last chunk is written here: a small state needs nobody else.
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
            job.exception()  # every writer has let go of its chunk before the file is removed
        upload.abort()  # guard: failed-blob-aborted
        raise
    blob = Blob(name=image.blob, length=image.length, chunk_bytes=chunk_bytes, chunks=sums)
    return blob, contents.pieces()


def _put(upload: Upload, chunk: Chunk, offset: int, length: int, algorithm: str) -> str:
    try:
        padded = round_up(length)
        chunk.buffer[length:padded] = bytes(padded - length)  # guard: tail-padding-zeroed
        found = digest(algorithm, chunk.buffer[:length])
        upload.write_at(chunk.buffer[:padded], offset)
        return found
    finally:
        chunk.release()  # guard: written-chunk-released

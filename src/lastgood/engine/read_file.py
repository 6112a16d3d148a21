"""Verified reads: hands out only bytes that agree with their digests; what to do otherwise is not decided here.

reader threads:    read a chunk -> its digest -> Sink.put, part by part
caller's thread:   chunk by chunk in order: content digests -> Sink.done, tensor by tensor
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Protocol

from ..errors import Damaged, ManifestInvalid, SumMismatch
from ..format import layout
from ..format.layout import Image
from ..io.checksum import digest
from ..io.files import round_up
from ..ports import Tier
from ..records import Blob, Extent, Manifest, Piece
from .content_digest import Contents
from .finite import not_finite

READS = max(1, min(3, (os.cpu_count() or 2) // 2))
"""reads in flight; digests and copies go on beside them. On two cores one read of a whole chunk at a time is fastest:
there several at once only make each other wait (docs/decisions/0006)"""


class Sink(Protocol):
    """Where the bytes of tensors go; `name` is the key of a piece.

    ======================  =====================================================================================
    put(name, start, data)  a verified part of a tensor, never empty, each byte once; from any reader thread, several
                            at once; `data` is valid until it returns
    done(name)              every part of it was put, and its content digest agrees; in the caller's thread
    ======================  =====================================================================================
    """

    def put(self, name: str, start: int, data: memoryview) -> None: ...
    def done(self, name: str) -> None: ...


def stream(
    tier: Tier,
    home: str,
    manifest: Manifest,
    buffers: list[memoryview],
    readers: Executor,
    sink: Sink,
    *,
    unfit: Callable[[str], None] | None,
    wanted: Collection[str] | None = None,
    fresh: bool = True,
) -> None:
    """Every tensor of a rank, in one reading past the page cache. Raises Damaged or Unavailable at the first fault.

    Without `fresh` through it: of several processes that read the same, the first reads from the medium.

    `unfit` hears the name of each tensor that must be finite and is not, from any reader thread; what it raises is
    raised. Nobody writes into the sink after it has returned or raised. `wanted`: keys of pieces; chunks in which none
    of them lies are not read, and what the rest of them vouches for is their own digests, not those of whole tensors.
    """
    for blob in manifest.blobs:
        check = Check(manifest, blob, unfit)
        needed = None if wanted is None else check.needed(wanted)
        if needed is not None and not needed:
            continue
        if needed is not None and len(needed) == len(blob.chunks):
            needed = None
        if needed is not None:
            check.validate(bytes(some(tier, f"{home}/{blob.name}", check.header_bytes)))
        put = partial(check.hand_out, sink)
        found = chunks(tier, home, manifest, blob, buffers, readers, put=put, only=needed, fresh=fresh)
        with contextlib.closing(found) as verified:
            for data in verified:
                if needed is None:
                    for name in check.see(data):  # guard: restore-checks-contents
                        sink.done(name)
        if needed is not None and wanted is not None:
            for piece in check.pieces:
                if piece.key in wanted:
                    sink.done(piece.key)


def headers_agree(tier: Tier, home: str, manifest: Manifest, buffer: memoryview) -> bool:
    """Whether each tensor file begins as its manifest says; little else is read. Raises Damaged or Unavailable."""
    for blob in manifest.blobs:
        check, header = Check(manifest, blob), bytearray()
        for start in range(0, check.header_bytes, blob.chunk_bytes):
            length = min(blob.chunk_bytes, check.header_bytes - start)
            tier.read_into(Extent(blob=f"{home}/{blob.name}", offset=start, length=length), buffer, fresh=True)
            header += buffer[:length]
        try:
            check.validate(bytes(header))
        except ManifestInvalid:
            return False
    return True


def chunks(
    tier: Tier,
    home: str,
    manifest: Manifest,
    blob: Blob,
    buffers: list[memoryview],
    readers: Executor,
    *,
    put: Callable[[int, memoryview], None] = lambda *_: None,
    only: Sequence[int] | None = None,
    fresh: bool = True,
) -> Generator[memoryview, None, None]:
    """Every chunk of a blob, in order, verified; its bytes are valid until their buffer comes round again.

    `only`: these chunks.

    `put(index, data)` has each verified chunk before it comes out here, in the reader's thread, in any order. Raises
    SumMismatch, Truncated, MissingBlob. Buffers as in `unverified`.
    """

    def verify(index: int, data: memoryview) -> None:
        if digest(manifest.digest, data) != blob.chunks[index]:  # guard: chunk-digest-on-read
            raise chunk_error(home, manifest, blob, index, data)
        put(index, data)

    with contextlib.closing(unverified(tier, home, blob, buffers, readers, verify, only, fresh)) as found:
        for data, error in found:
            if error is not None:
                raise error
            yield data


def unverified(
    tier: Tier,
    home: str,
    blob: Blob,
    buffers: list[memoryview],
    readers: Executor,
    then: Callable[[int, memoryview], None] = lambda *_: None,
    only: Sequence[int] | None = None,
    fresh: bool = True,
) -> Generator[tuple[memoryview, Damaged | None], None, None]:
    """Every chunk of a blob, in order, as it was read; or what is wrong with it: then its bytes mean nothing.

    `buffers` are page-aligned, each of a whole chunk (rounded up), and used in turn; READS are read into at once.
    `then(index, data)` follows in the reader's thread. Raises what is no damage: Unavailable.
    """
    flying: deque[tuple[int, memoryview, Future[None]]] = deque()
    turn = threading.Semaphore(READS)
    order = range(len(blob.chunks)) if only is None else only

    def read(index: int, view: memoryview) -> None:
        extent = layout.extent_of(blob, index)
        at = Extent(blob=f"{home}/{blob.name}", offset=extent.offset, length=extent.length)
        with turn:
            tier.read_into(at, view, fresh=fresh)  # guard: chunk-read-bypasses-cache
        then(index, view[: extent.length])

    try:
        for number in range(len(order) + len(buffers)):
            if number >= len(buffers) and flying:
                chunk, view, job = flying.popleft()
                error: Damaged | None = None
                try:
                    job.result()
                except Damaged as damage:
                    error = damage
                yield view[: layout.extent_of(blob, chunk).length], error
            if number < len(order):
                index, view = order[number], buffers[number % len(buffers)]
                flying.append((index, view, readers.submit(read, index, view)))
    finally:
        for _, _, job in flying:
            job.exception()  # nobody writes into the buffers after this


def chunk_error(home: str, manifest: Manifest, blob: Blob, index: int, data: memoryview) -> SumMismatch:
    """Of a chunk that differs from its digest: the tensor in it that does too, where that can be told."""
    tensor, offset = _differing(manifest, blob, index, data), index * blob.chunk_bytes
    return SumMismatch(
        f"{home}/{blob.name} differs from its digest in chunk {index} "
        f"(offset {offset:,}, {'tensor ' + tensor if tensor else 'header'})",
        blob=blob.name,
        offset=offset,
        chunk=index,
        tensor=tensor,
    )


def _differing(manifest: Manifest, blob: Blob, index: int, view: memoryview) -> str:
    """The tensor in a damaged chunk whose own digest fails too; else those that reach out of it; else none."""
    low, high = index * blob.chunk_bytes, layout.extent_of(blob, index).length + index * blob.chunk_bytes
    reaching_out = []
    for piece in manifest.pieces:
        start, end = piece.extent.offset, piece.extent.offset + piece.extent.length
        if piece.extent.blob != blob.name or end <= low or high <= start:
            continue
        if start < low or high < end:
            reaching_out.append(piece.name)
            continue
        hasher = layout.content_hasher(manifest.digest, piece.dtype, piece.shape)
        hasher.update(view[start - low : end - low])
        if hasher.hexdigest() != piece.digest:
            return piece.name
    return " or ".join(reaching_out)


class Check:
    """What the chunks of one blob must also show: a header that agrees, and each tensor's own digest."""

    def __init__(self, manifest: Manifest, blob: Blob, unfit: Callable[[str], None] | None = None) -> None:
        self.blob, self._unfit = blob, unfit
        self.pieces = [one for one in manifest.pieces if one.extent.blob == blob.name]
        tensors = [(layout.tensor_of(one), one.extent.offset) for one in self.pieces]
        self.header_bytes = min((offset for _, offset in tensors), default=blob.length)
        self._header = bytearray()
        image = Image(blob.name, bytes(self.header_bytes), tensors, blob.length)
        self.parts = list(layout.segments(image, blob.chunk_bytes))
        """chunk by chunk, what lies where"""
        self._contents = Contents(image, manifest.digest)

    def hand_out(self, sink: Sink, index: int, data: memoryview) -> None:
        """The parts of tensors that lie in a chunk; from any thread."""
        for tensor, start, at, length in self.parts[index]:
            if tensor >= 0 and length:
                piece, part = self.pieces[tensor], data[at : at + length]
                if self._unfit is not None and piece.finite and not_finite(piece.dtype, part):
                    self._unfit(piece.name)  # guard: non-finite-found-on-load
                sink.put(piece.key, start, part)

    def needed(self, wanted: Collection[str]) -> list[int]:
        """The chunks in which these pieces lie."""
        places = {at for at, piece in enumerate(self.pieces) if piece.key in wanted}
        return [
            chunk for chunk, parts in enumerate(self.parts) if any(one.tensor in places and one.length for one in parts)
        ]

    def see(self, data: memoryview) -> list[str]:
        """The next chunk, in order, none left out: keys of the pieces that end in it.

        Raises ManifestInvalid, SumMismatch.
        """
        self.see_header(data)
        return [piece.key for piece in self.see_contents(data)]

    def see_header(self, data: memoryview) -> None:
        """The next chunk, in order: the header is validated where it ends."""
        if len(self._header) < self.header_bytes:
            self._header += data[: self.header_bytes - len(self._header)]
            if len(self._header) == self.header_bytes:
                self.validate(bytes(self._header))

    def see_contents(self, data: memoryview) -> list[Piece]:
        """The next chunk, in order: the tensors that end in it, each held against its digest."""
        digests = self._contents.digests
        before = len(digests)
        self._contents.see(data)
        ended = self.pieces[before : len(digests)]
        for piece, found in zip(ended, digests[before:], strict=True):
            if piece.digest != found:  # guard: tensor-digest-on-read
                self.differs(piece)
        return ended

    def validate(self, header: bytes) -> None:
        """Raises ManifestInvalid when it is another header than the one that the manifest makes."""
        layout.validate_header(header, self.blob, self.pieces)  # guard: header-validated-on-read

    def differs(self, piece: Piece) -> None:
        """A tensor is not what was staged, although its chunks agree with their digests. Raises SumMismatch."""
        raise self.content_error(piece, as_written=True)

    def content_error(self, piece: Piece, as_written: bool) -> SumMismatch:
        what = f"{self.blob.name}: the content of tensor {piece.name} differs from the digest taken at staging"
        if as_written:
            what += ", although the file is as it was written: memory changed it in between"
        return SumMismatch(what, blob=self.blob.name, offset=piece.extent.offset, tensor=piece.name)


def some(tier: Tier, name: str, length: int, offset: int = 0, fresh: bool = True) -> bytearray:
    """So many bytes of a blob, unchecked. Raises Damaged or Unavailable."""
    data = bytearray(length)
    tier.read_into(Extent(blob=name, offset=offset, length=length), memoryview(data), fresh=fresh)
    return data


def tensor(tier: Tier, home: str, manifest: Manifest, piece: Piece, fresh: bool = False) -> bytearray:
    """The bytes of one tensor, checked against its own digest. Raises Damaged or Unavailable."""
    extent = piece.extent
    out = some(tier, f"{home}/{extent.blob}", extent.length, extent.offset, fresh)
    hasher = layout.content_hasher(manifest.digest, piece.dtype, piece.shape)
    hasher.update(out)
    if hasher.hexdigest() != piece.digest:  # guard: single-tensor-digest
        raise tensor_error(home, piece)
    return out


def parts(tier: Tier, home: str, manifest: Manifest, piece: Piece, part_bytes: int) -> Iterator[memoryview]:
    """The bytes of one tensor in order, some at a time; each is valid until the next. Raises SumMismatch at the end."""
    extent, buffer = piece.extent, memoryview(bytearray(min(part_bytes, piece.extent.length)))
    hasher = layout.content_hasher(manifest.digest, piece.dtype, piece.shape)
    for start in range(0, extent.length, part_bytes):
        part = buffer[: min(part_bytes, extent.length - start)]
        tier.read_into(Extent(blob=f"{home}/{extent.blob}", offset=extent.offset + start, length=len(part)), part)
        hasher.update(part)
        yield part
    if hasher.hexdigest() != piece.digest:
        raise tensor_error(home, piece)


def tensor_error(home: str, piece: Piece) -> SumMismatch:
    return SumMismatch(
        f"{home}/{piece.extent.blob}: tensor {piece.name} differs from its digest",
        blob=piece.extent.blob,
        offset=piece.extent.offset,
        tensor=piece.name,
    )


def buffer_bytes(blobs: list[Blob]) -> int:
    """What one read buffer must hold for these blobs."""
    return max((round_up(min(blob.chunk_bytes, blob.length)) for blob in blobs), default=0)

"""Verified reads of tensor files. `stream` and `tensor` hand out only bytes that agree with their digests, but
`stream` fills a window of its sink before it knows that they do.

`RawChunks` and `some` do not verify, and `parts` knows the digest only after the last part; their docstrings say so.

reader threads:    read a chunk -> compare its digest -> Sink.put, part by part; or read it where the sink wants it
caller's thread:   chunk by chunk in order: digests of whole tensors -> Sink.done, tensor by tensor
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Collection, Generator, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import NamedTuple, Protocol

from ..errors import Damaged, ManifestInvalid, SumMismatch
from ..format import layout, validation
from ..format.layout import Image
from ..io.checksum import digest
from ..io.files import DISK_READS, round_up
from ..ports import Tier
from ..records import Blob, Extent, Manifest, Piece
from .arena import Arena
from .content_digest import Contents
from .delivered_chunks import DeliveredChunks
from .finite import not_finite_error

SPARE_BUFFERS = 2
"""Chunks in memory beside those that are being read: they are digested and copied meanwhile. The number is small, so
that a chunk stays in the processor's cache from the digest to the copy."""
BUFFERS = DISK_READS + SPARE_BUFFERS
"""Chunks in memory while a file is read from a disk."""


class Sink(Protocol):
    """Receives the bytes of tensors; `name` is the key of a piece.

    ======================  =====================================================================================
    put(name, start, data)  a verified part of a tensor, never empty, each byte once; called from any reader thread,
                            by several at once; `data` is valid until it returns
    window(name, start,     the memory in which that part of a tensor is to be, if it may be read there and verified
    length)                 afterwards, in place of `put`; else None
    done(name)              every part of the tensor was put; if all of its file was read, its content digest agrees.
                            Called from the caller's thread
    ======================  =====================================================================================
    """

    def put(self, name: str, start: int, data: memoryview) -> None: ...
    def window(self, name: str, start: int, length: int) -> memoryview | None: ...
    def done(self, name: str) -> None: ...


class RankFiles(NamedTuple):
    """The tensor files that one rank wrote of a generation, and the manifest that describes them."""

    tier: Tier
    folder: str
    manifest: Manifest


class UnfitTensors:
    """The tensors that must be finite and hold NaN or infinity, as they are found while files are read.

    With `refused`, the first one raises NotFinite; otherwise their names are collected.
    """

    def __init__(self, refused: bool) -> None:
        self._refused = refused
        self.names: set[str] = set()

    def add(self, name: str) -> None:
        """Record one tensor. May be called from any thread. Raises NotFinite if such tensors are refused."""
        if self._refused:
            raise not_finite_error(name)
        self.names.add(name)


def stream(
    files: RankFiles,
    buffers: list[memoryview],
    readers: Executor,
    sink: Sink,
    *,
    unfit: UnfitTensors | None = None,
    wanted: Collection[str] | None = None,
    fresh: bool = True,
) -> None:
    """Hand every tensor of a rank to `sink`, verified, in one reading.

    `buffers`: as in `in_order`. `unfit`: records tensors that must be finite and are not; None checks nothing.
    `wanted`: keys of pieces, or None for all. Chunks without a wanted piece are not read. If a file has such chunks,
    only the digests of the chunks that are read are checked, and not those of its tensors. `fresh`: read past
    the page cache (the default); without it, the first of several processes that read the same file fills the cache.
    Raises Damaged or Unavailable at the first fault. The windows of the sink may hold damaged bytes then. Nothing is
    written into the sink once this has ended.
    """
    for blob in files.manifest.blobs:
        check = Check(files.manifest, blob)
        needed = check.needed(wanted)
        if not needed:
            continue
        reads_all = len(needed) == len(blob.chunks)
        if not reads_all:
            check.validate(bytes(some(files.tier, f"{files.folder}/{blob.name}", check.header_bytes)))
        in_place = reads_in_place(files.tier, f"{files.folder}/{blob.name}")
        chunks = DeliveredChunks(VerifiedChunks(files, blob, fresh), check, sink, unfit, in_place)
        with contextlib.closing(in_order(chunks, buffers, readers, needed)) as found:
            for index, (data, error) in zip(needed, found, strict=True):
                if error is not None:
                    raise error
                for part in chunks.taken(index, data):
                    for name in check.see(part) if reads_all else ():  # guard: restore-checks-contents
                        sink.done(name)
        if not reads_all and wanted is not None:
            for piece in check.pieces:
                if piece.key in wanted:
                    sink.done(piece.key)


def reads_in_place(tier: Tier, name: str) -> bool:
    """Whether this tier reads this blob into any memory as well as into page-aligned buffers (`ports.Tier`)."""
    asked = getattr(tier, "reads_in_place", None)  # only tiers that do have it
    return asked is not None and bool(asked(name))


def headers_agree(files: RankFiles, buffer: memoryview) -> bool:
    """Whether each tensor file begins as its manifest says. Reads little more than the headers.

    Raises Damaged or Unavailable.
    """
    for blob in files.manifest.blobs:
        check, header = Check(files.manifest, blob), bytearray()
        for start in range(0, check.header_bytes, blob.chunk_bytes):
            length = min(blob.chunk_bytes, check.header_bytes - start)
            extent = Extent(blob=f"{files.folder}/{blob.name}", offset=start, length=length)
            files.tier.read_into(extent, buffer, fresh=True)
            header += buffer[:length]
        try:
            check.validate(bytes(header))
        except ManifestInvalid:
            return False
    return True


# ---- chunks of one file ----------------------------------------------------------------------------------------


class Chunks(Protocol):
    """The chunks of one tensor file, and what a reader thread does with each of them."""

    @property
    def blob(self) -> Blob: ...
    def read(self, index: int, buffer: memoryview) -> memoryview:
        """Read one chunk into `buffer`; returns its bytes. Raises Damaged or Unavailable."""


class RawChunks:
    """Chunks as they are in the file; nothing is verified. `tier.reads_at_once` of them are read at the same time."""

    def __init__(self, tier: Tier, folder: str, blob: Blob, fresh: bool = True) -> None:
        self.blob = blob
        self._tier, self._folder, self._fresh = tier, folder, fresh
        self._turn = threading.Semaphore(tier.reads_at_once)

    def read(self, index: int, buffer: memoryview) -> memoryview:
        extent = layout.extent_of(self.blob, index)
        at = Extent(blob=f"{self._folder}/{self.blob.name}", offset=extent.offset, length=extent.length)
        with self._turn:
            self._tier.read_into(at, buffer, fresh=self._fresh)  # guard: chunk-read-bypasses-cache
        return buffer[: extent.length]

    def read_into(self, index: int, parts: Sequence[memoryview]) -> None:
        """Read one chunk into memory of the caller: the first bytes into the first of these, and so on."""
        offset = layout.extent_of(self.blob, index).offset
        with self._turn:
            for part in parts:
                at = Extent(blob=f"{self._folder}/{self.blob.name}", offset=offset, length=len(part))
                self._tier.read_into(at, part, fresh=self._fresh)
                offset += len(part)


class VerifiedChunks:
    """Chunks that agree with their digests; `read` raises SumMismatch, Truncated, MissingBlob for any other."""

    def __init__(self, files: RankFiles, blob: Blob, fresh: bool = True) -> None:
        self.blob = blob
        self._files, self._raw = files, RawChunks(files.tier, files.folder, blob, fresh)

    def read(self, index: int, buffer: memoryview) -> memoryview:
        data = self._raw.read(index, buffer)
        self._compare(index, [data])
        return data

    def read_into(self, index: int, parts: Sequence[memoryview]) -> None:
        """As `RawChunks.read_into`; the bytes are in their places too if they do not agree with their digest."""
        self._raw.read_into(index, parts)
        self._compare(index, parts)

    def _compare(self, index: int, parts: Sequence[memoryview]) -> None:
        manifest, blob = self._files.manifest, self.blob
        if digest(manifest.digest, *parts) != blob.chunks[index]:  # guard: chunk-digest-on-read
            raise chunk_error(self._files.folder, manifest, blob, index, memoryview(b"".join(parts)))


def in_order(
    chunks: Chunks,
    buffers: list[memoryview],
    readers: Executor,
    only: Sequence[int] | None = None,
) -> Generator[tuple[memoryview, Damaged | None], None, None]:
    """Every chunk of a file, in order: the buffer `chunks.read` had, cut to its length, and an error or None.
    With an error the bytes mean nothing.

    The bytes are valid until their buffer is used again. `buffers` are page-aligned, each as large as a chunk (rounded
    up to pages), and used in turn. `only`: the chunks to read, by index; None for all. Raises what is no damage:
    Unavailable.
    """
    flying: deque[tuple[int, memoryview, Future[memoryview]]] = deque()
    order = range(len(chunks.blob.chunks)) if only is None else only
    try:
        # In turn `number` the chunk that was begun len(buffers) turns ago is handed out, and its buffer is used again.
        # The last len(buffers) turns begin no chunk.
        for number in range(len(order) + len(buffers)):
            if number >= len(buffers) and flying:
                index, buffer, job = flying.popleft()
                error: Damaged | None = None
                try:
                    job.result()
                except Damaged as damage:
                    error = damage
                yield buffer[: layout.extent_of(chunks.blob, index).length], error
            if number < len(order):
                index, buffer = order[number], buffers[number % len(buffers)]
                flying.append((index, buffer, readers.submit(chunks.read, index, buffer)))
    finally:
        for _, _, job in flying:
            job.exception()  # no thread writes into the buffers after this


def chunk_error(folder: str, manifest: Manifest, blob: Blob, index: int, data: memoryview) -> SumMismatch:
    """The error for a chunk that differs from its digest; it names the damaged tensor where that is known."""
    tensor, offset = _differing(manifest, blob, index, data), index * blob.chunk_bytes
    return SumMismatch(
        f"{folder}/{blob.name} differs from its digest in chunk {index} "
        f"(offset {offset:,}, {'tensor ' + tensor if tensor else 'header'})",
        blob=blob.name,
        offset=offset,
        chunk=index,
        tensor=tensor,
    )


def _differing(manifest: Manifest, blob: Blob, index: int, view: memoryview) -> str:
    """The tensor in a damaged chunk whose own digest fails too.

    Else those that begin or end outside of the chunk, which cannot be checked here; else an empty string.
    """
    low, high = index * blob.chunk_bytes, layout.extent_of(blob, index).length + index * blob.chunk_bytes
    partly_inside = []
    for piece in manifest.pieces:
        start, end = piece.extent.offset, piece.extent.offset + piece.extent.length
        if piece.extent.blob != blob.name or end <= low or high <= start:
            continue
        if start < low or high < end:
            partly_inside.append(piece.name)
            continue
        hasher = layout.content_hasher(manifest.digest, piece.dtype, piece.shape)
        hasher.update(view[start - low : end - low])
        if hasher.hexdigest() != piece.digest:
            return piece.name
    return " or ".join(partly_inside)


class Check:
    """What the chunks of one blob must also show: a header that agrees, and the digest of each whole tensor."""

    def __init__(self, manifest: Manifest, blob: Blob) -> None:
        self.blob = blob
        self.pieces = [one for one in manifest.pieces if one.extent.blob == blob.name]
        tensors = [(layout.tensor_of(one), one.extent.offset) for one in self.pieces]
        self.header_bytes = min((offset for _, offset in tensors), default=blob.length)
        self._header = bytearray()
        image = Image(blob.name, bytes(self.header_bytes), tensors, blob.length)
        self.parts = list(layout.segments(image, blob.chunk_bytes))
        """For each chunk, which part of which tensor lies where."""
        self._contents = Contents(image, manifest.digest)

    def needed(self, wanted: Collection[str] | None) -> Sequence[int]:
        """The indices of the chunks in which the wanted pieces lie; all of them if `wanted` is None."""
        if wanted is None:
            return range(len(self.blob.chunks))
        places = {at for at, piece in enumerate(self.pieces) if piece.key in wanted}
        return [
            chunk for chunk, parts in enumerate(self.parts) if any(one.tensor in places and one.length for one in parts)
        ]

    def see(self, data: memoryview) -> list[str]:
        """Check the next chunk. Chunks come in order, and none is left out.

        Returns the keys of the pieces that end in it. Raises ManifestInvalid, SumMismatch.
        """
        self.see_header(data)
        return [piece.key for piece in self.see_contents(data)]

    def see_header(self, data: memoryview) -> None:
        """Collect the header from the next chunk, and validate it once it is complete."""
        if len(self._header) < self.header_bytes:
            self._header += data[: self.header_bytes - len(self._header)]
            if len(self._header) == self.header_bytes:
                self.validate(bytes(self._header))

    def see_contents(self, data: memoryview) -> list[Piece]:
        """Digest the next chunk. Returns the pieces that end in it, each compared with its digest."""
        digests = self._contents.digests
        before = len(digests)
        self._contents.see(data)
        ended = self.pieces[before : len(digests)]
        for piece, found in zip(ended, digests[before:], strict=True):
            if piece.digest != found:  # guard: tensor-digest-on-read
                self.differs(piece)
        return ended

    def validate(self, header: bytes) -> None:
        """Raises ManifestInvalid if this is not the header that the manifest describes."""
        validation.validate_header(header, self.blob, self.pieces)  # guard: header-validated-on-read

    def differs(self, piece: Piece) -> None:
        """Raise SumMismatch for a tensor whose content digest differs, although its chunks agree with their digests."""
        raise self.content_error(piece, as_written=True)

    def content_error(self, piece: Piece, as_written: bool) -> SumMismatch:
        """The error for such a tensor. `as_written`: whether the file is known to hold the bytes that were written."""
        what = (
            f"{self.blob.name}: the content of tensor {piece.name} differs from the digest taken before it was written"
        )
        if as_written:
            what += ", although the file is as it was written: memory changed it in between"
        return SumMismatch(what, blob=self.blob.name, offset=piece.extent.offset, tensor=piece.name)


# ---- single reads ----------------------------------------------------------------------------------------------


def some(tier: Tier, name: str, length: int, offset: int = 0, fresh: bool = True) -> bytearray:
    """`length` bytes of a blob, unverified. Raises Damaged or Unavailable."""
    data = bytearray(length)
    tier.read_into(Extent(blob=name, offset=offset, length=length), memoryview(data), fresh=fresh)
    return data


def tensor(files: RankFiles, piece: Piece) -> bytearray:
    """The bytes of one piece, read through the page cache and verified. Raises Damaged or Unavailable."""
    extent = piece.extent
    out = some(files.tier, f"{files.folder}/{extent.blob}", extent.length, extent.offset, fresh=False)
    hasher = layout.content_hasher(files.manifest.digest, piece.dtype, piece.shape)
    hasher.update(out)
    if hasher.hexdigest() != piece.digest:  # guard: single-tensor-digest
        raise _tensor_error(files.folder, piece)
    return out


def parts(files: RankFiles, piece: Piece, part_bytes: int) -> Iterator[memoryview]:
    """The bytes of one piece in order, `part_bytes` at a time; each part is valid until the next.

    Raises SumMismatch after the last part if the digest of the whole piece differs.
    """
    extent, buffer = piece.extent, memoryview(bytearray(min(part_bytes, piece.extent.length)))
    hasher = layout.content_hasher(files.manifest.digest, piece.dtype, piece.shape)
    for start in range(0, extent.length, part_bytes):
        part = buffer[: min(part_bytes, extent.length - start)]
        at = Extent(blob=f"{files.folder}/{extent.blob}", offset=extent.offset + start, length=len(part))
        files.tier.read_into(at, part)
        hasher.update(part)
        yield part
    if hasher.hexdigest() != piece.digest:
        raise _tensor_error(files.folder, piece)


def _tensor_error(folder: str, piece: Piece) -> SumMismatch:
    return SumMismatch(
        f"{folder}/{piece.extent.blob}: tensor {piece.name} differs from its digest",
        blob=piece.extent.blob,
        offset=piece.extent.offset,
        tensor=piece.name,
    )


# ---- memory ----------------------------------------------------------------------------------------------------


def buffer_bytes(blobs: Sequence[Blob]) -> int:
    """How many bytes one read buffer must hold for these blobs."""
    return max((round_up(min(blob.chunk_bytes, blob.length)) for blob in blobs), default=0)


def buffers_for(tier: Tier) -> int:
    """How many buffers a file of this tier is read with. Fewer are enough, and slower."""
    return tier.reads_at_once + SPARE_BUFFERS


@contextlib.contextmanager
def borrowed(arena: Arena, need_bytes: int, count: int = BUFFERS) -> Iterator[list[memoryview]]:
    """Up to `count` read buffers of at least `need_bytes` each: leased from `arena`, or new ones if its chunks are too
    small.

    Nothing else may hold a lease of the arena.
    """
    own = Arena(need_bytes * count, need_bytes) if need_bytes > arena.chunk_bytes else arena
    count = min(count, own.arena_bytes // own.chunk_bytes)
    leases = [lease for lease in (own.take() for _ in range(count)) if lease]
    try:
        yield [lease.buffer for lease in leases]
    finally:
        for lease in leases:
            lease.release()

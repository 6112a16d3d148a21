"""The guard: what is wrong with a generation, which layer says so, and where. Reads past the page cache; mends nothing.

The layers catch different things, so each looks by itself, whatever the others have found:

    structure   it opens, and is by itself what it says it is     a lost file, a header that was hit
    agreement   names, shapes and dtypes are the manifest's       an older version of the file, a foreign one
    contents    the digest of each tensor, taken while staging    what memory did, and what storage did to tensors
    digests     of each chunk and record, up to the commit        what storage did, to any byte at all
    finite      numbers, where there must be numbers              what training did: intact, and not good
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator
from concurrent.futures import Executor
from contextlib import AbstractContextManager

from ..errors import (
    Damaged,
    LastgoodError,
    ManifestInvalid,
    MissingBlob,
    NotFinite,
    Truncated,
    Unreadable,
)
from ..format import commit, layout
from ..io.checksum import ALGORITHMS
from ..ports import Tier
from ..records import Blob, Finding, Generation, Manifest, Piece, Seal
from . import read_file
from .finite import not_finite, not_finite_error

BLOCK_BYTES = 1 << 20
"""seen at once, by one layer after the other: whoever comes last still finds it in the processor's cache"""

Tell = Callable[[str, LastgoodError], None]
"""layer, and what it says"""
Lend = Callable[[int], AbstractContextManager[list[memoryview]]]
"""buffers of at least so many bytes"""


class Examination:
    """One reading of a generation, or of the files `of` some ranks. `also` sees every byte of the tensor files."""

    def __init__(
        self,
        tier: Tier,
        generation: Generation,
        layers: Collection[str],
        also: Callable[[memoryview], None],
        of: Collection[int] | None = None,
    ) -> None:
        self._tier, self._generation, self._layers, self._also, self._of = tier, generation, layers, also, of
        self._home = layout.folder(generation.id)
        self.findings: list[Finding] = []
        self._there: commit.Listing = {}

    def _tell(self, layer: str, error: LastgoodError) -> None:
        if isinstance(error, Unreadable):  # guard: unreadable-is-no-evidence
            raise error  # it may be read again later: no evidence of what the bytes are
        if layer in self._layers:  # guard: only-requested-layers-reported
            self.findings.append(finding(error, layer))

    # ---- records -------------------------------------------------------------------------------------------

    def open(self) -> list[Manifest]:
        """The records, but for manifests that cannot be read at all. One that is damaged shows more all the same."""
        try:
            # guard: verify-rereads-commit
            self._generation = commit.read_generation(self._tier, self._generation.id, self._generation.commit.run)
        except Damaged as error:
            self._tell(layer_of(error), error)
            return []
        self._there = self._tier.list(self._home)
        seals = [one for one in self._generation.commit.seals if self._of is None or one.rank in self._of]
        found = map(self._manifest, seals)
        return [manifest for manifest in found if manifest is not None]

    def _manifest(self, seal: Seal) -> Manifest | None:
        try:
            return commit.read_manifest(self._tier, self._generation, seal.rank, self._there)
        except Damaged as error:
            first = error
        if first.blob.rpartition("/")[2] == seal.manifest:  # else it is of a tensor file, and `read` tells it
            self._tell(layer_of(first), first)
        name = f"{self._home}/{seal.manifest}"
        length = self._there.get(seal.manifest)
        if length is None or not 0 <= length <= layout.MANIFEST_LIMIT_BYTES:
            return None
        try:
            data = read_file.some(self._tier, name, length)
            manifest = layout.decode(bytes(data), Manifest, name, believe=True)
            ranks = self._generation.commit.world.ranks
            layout.validate_manifest(manifest, self._generation.id, seal.rank, ranks)
        except Damaged as error:
            if str(error) != str(first):
                self._tell("structure", error)
            return None
        return manifest

    # ---- tensor files --------------------------------------------------------------------------------------

    def read(self, manifest: Manifest, blob: Blob, lend: Lend, readers: Executor) -> Generator[None, None, None]:
        """All of one tensor file, a chunk at a time. Memory is lent for what is there, whatever the manifest says."""
        name = f"{self._home}/{blob.name}"
        length = self._there.get(blob.name)
        if length is None or length < 0:
            # guard: missing-blob-reported
            self._tell("structure", MissingBlob(f"{name} is gone, or no file", blob=blob.name))
            return
        look = _Look(manifest, blob, length, self._layers, self._tell)
        if length != blob.length:  # guard: longer-blob-reported
            what = f"{name} has {length:,} bytes, committed were {blob.length:,}"
            self._tell("digests", Truncated(what, blob=blob.name, offset=min(length, blob.length)))
        if length < blob.length:
            look.shorter(self._tier, name)  # guard: shorter-blob-reported
            return
        with lend(read_file.buffer_bytes([blob])) as buffers:
            chunks = read_file.in_order(read_file.RawChunks(self._tier, self._home, blob), buffers, readers)
            with contextlib.closing(chunks):
                for index, (data, error) in enumerate(chunks):
                    yield
                    if error is not None:
                        self._tell("digests", error)  # guard: unreadable-chunk-reported
                        data[:] = bytes(len(data))
                    found = look.look(data, self._also)
                    if error is None and found and found != blob.chunks[index]:  # guard: chunk-digest-on-verify
                        self._tell("digests", read_file.chunk_error(self._home, manifest, blob, index, data))
                    look.tell(data, damaged=any(one.layer == "digests" for one in self.findings))


class _Look(read_file.Check):
    """What the chunks of one tensor file show beside their own digests: told, layer by layer, and never raised."""

    def __init__(self, manifest: Manifest, blob: Blob, length: int, layers: Collection[str], tell: Tell) -> None:
        super().__init__(manifest, blob)
        self._length, self._layers, self._tell, self._algorithm = length, layers, tell, manifest.digest
        self._left = iter(self.parts)
        self._finite = {at for at, one in enumerate(self.pieces) if one.finite and "finite" in layers}
        self._as_written = "digests" in layers
        """whether the file is known to be as committed, as far as it was read"""
        self._not_finite: list[Piece] = []
        self._differing: list[Piece] = []

    def shorter(self, tier: Tier, name: str) -> None:
        """The file ends before its time: its header, and the first tensor that is not all there."""
        self.validate(bytes(read_file.some(tier, name, min(self.header_bytes, self._length))))
        cut = next((one for one in self.pieces if one.extent.offset + one.extent.length > self._length), None)
        if cut is not None:
            what = f"{name} ends within tensor {cut.name}, or before it"
            self._tell("contents", Truncated(what, blob=self.blob.name, offset=self._length, tensor=cut.name))

    def look(self, data: memoryview, also: Callable[[memoryview], None]) -> str:
        """The next chunk, in order; its digest, if that is wanted. What else it shows is kept for `tell`."""
        parts, place, hasher = next(self._left), 0, ALGORITHMS[self._algorithm]()
        for low in range(0, len(data), BLOCK_BYTES):
            block, high = data[low : low + BLOCK_BYTES], low + BLOCK_BYTES
            also(block)
            if "digests" in self._layers:
                hasher.update(block)
            if "contents" in self._layers:
                self.see_contents(block)
            while place < len(parts):
                tensor, _, at, length = parts[place]
                part = data[max(at, low) : min(at + length, high)]  # guard: finite-check-covers-blocks
                # guard: finite-check-on-verify
                if tensor in self._finite and not_finite(self.pieces[tensor].dtype, part):
                    self._finite.discard(tensor)
                    self._not_finite.append(self.pieces[tensor])
                if at + length > high:
                    break
                place += 1
        return hasher.hexdigest() if "digests" in self._layers else ""

    def tell(self, data: memoryview, damaged: bool) -> None:
        """What was found in this chunk. `damaged`: whether some of the file is not as committed."""
        self._as_written &= not damaged
        self.see_header(data)
        for piece in self._not_finite:
            self._tell("finite", not_finite_error(piece.name))
        for piece in self._differing:
            self._tell("contents", self.content_error(piece, self._as_written))  # guard: contents-checked-on-verify
        self._not_finite, self._differing = [], []

    def differs(self, piece: Piece) -> None:
        self._differing.append(piece)

    def validate(self, header: bytes) -> None:
        try:
            layout.validate_file(header, self._length, self.blob.name)  # guard: header-valid-by-itself
        except ManifestInvalid as error:
            self._tell("structure", error)
        try:
            super().validate(header)
        except ManifestInvalid as error:
            self._tell("agreement", error)  # guard: header-agrees-with-manifest


def layer_of(error: LastgoodError) -> str:
    """The layer that an error of a record or a file belongs to."""
    if isinstance(error, NotFinite):
        return "finite"
    return "structure" if isinstance(error, (ManifestInvalid, MissingBlob)) else "digests"


def finding(error: LastgoodError, layer: str = "") -> Finding:
    """An error as a record."""
    where = error if isinstance(error, Damaged) else Damaged("", tensor=getattr(error, "tensor", ""))
    return Finding(
        kind=type(error).__name__,
        what=error.what,
        layer=layer or layer_of(error),
        blob=where.blob,
        offset=where.offset,
        chunk=where.chunk,
        tensor=where.tensor,
    )

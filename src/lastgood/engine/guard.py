"""The guard: finds what is wrong with a generation, and where. It reads past the page cache and changes nothing.

It has five layers. They detect different faults, so each one checks everything, whatever the others have found. Of a
file that is too short, only the header and the first tensor that is cut off are checked:

    layer       what is checked                                     what it detects
    structure   each file exists and is valid by itself             a lost file, a damaged header
    agreement   names, shapes and dtypes are the manifest's         an older version of the file, a foreign file
    contents    the digest of each tensor, taken before writing     changes in memory, and of tensors in storage
    digests     the digests of chunks and records, up to COMMIT     changes of any byte in storage
    finite      no NaN or infinity in parameters and optimizers     diverged training: intact bytes, an unfit state
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
from ..format import catalog, commit, layout, validation
from ..io.checksum import ALGORITHMS
from ..limits import MANIFEST_LIMIT_BYTES, VERIFY_BLOCK_BYTES
from ..ports import Tier
from ..records import Blob, Finding, Generation, Manifest, Piece, Seal
from . import read_file
from .finite import not_finite, not_finite_error

Report = Callable[[str, LastgoodError], None]
"""takes a layer, and the error that it found"""
Lend = Callable[[int], AbstractContextManager[list[memoryview]]]
"""lends buffers, each of at least this many bytes"""


class Examination:
    """One complete reading of a generation. `open` is called first, then `read` for each tensor file.

    `layers`: those of records.LAYERS whose findings are reported. `also` is called with all bytes of the tensor files,
    in order. `of`: the ranks whose files are read; None for all. `findings` lists what was found so far.
    """

    def __init__(
        self,
        tier: Tier,
        generation: Generation,
        layers: Collection[str],
        also: Callable[[memoryview], None],
        of: Collection[int] | None = None,
    ) -> None:
        self._tier, self._generation, self._layers, self._also, self._of = tier, generation, layers, also, of
        self._folder = layout.folder(generation.id)
        self.findings: list[Finding] = []
        self._listing: catalog.Listing = {}

    def _report(self, layer: str, error: LastgoodError) -> None:
        if isinstance(error, Unreadable):  # guard: unreadable-is-no-evidence
            raise error  # a read error says nothing about the bytes: a later reading may succeed
        if layer in self._layers:  # guard: only-requested-layers-reported
            self.findings.append(finding(error, layer))

    # ---- records -------------------------------------------------------------------------------------------

    def open(self) -> list[Manifest]:
        """Read and check the records; returns the manifests, without those that are unreadable.

        A damaged manifest that still decodes is returned too, so that its files are checked as well. Raises Unreadable
        and Unavailable.
        """
        try:
            # guard: verify-rereads-commit
            self._generation = commit.read_generation(self._tier, self._generation.id, self._generation.commit.run)
        except Damaged as error:
            self._report(layer_of(error), error)
            return []
        self._listing = self._tier.list(self._folder)
        seals = [one for one in self._generation.commit.seals if self._of is None or one.rank in self._of]
        found = map(self._manifest, seals)
        return [manifest for manifest in found if manifest is not None]

    def _manifest(self, seal: Seal) -> Manifest | None:
        try:
            return commit.read_manifest(self._tier, self._generation, seal.rank, self._listing)
        except Damaged as error:
            first = error
        # `read_manifest` also checks the lengths of the tensor files; `read` reports a wrong one.
        if first.blob.rpartition("/")[2] == seal.manifest:
            self._report(layer_of(first), first)
        name = f"{self._folder}/{seal.manifest}"
        length = self._listing.get(seal.manifest)
        if length is None or not 0 <= length <= MANIFEST_LIMIT_BYTES:
            return None
        try:
            data = read_file.some(self._tier, name, length)
            manifest = layout.decode(bytes(data), Manifest, name, check_digest=False)
            ranks = self._generation.commit.world.ranks
            validation.validate_manifest(manifest, self._generation.id, seal.rank, ranks)
        except Damaged as error:
            if str(error) != str(first):
                self._report("structure", error)
            return None
        return manifest

    # ---- tensor files --------------------------------------------------------------------------------------

    def read(self, manifest: Manifest, blob: Blob, lend: Lend, readers: Executor) -> Generator[None, None, None]:
        """Read and check one tensor file; yields before each chunk, so that the caller can pause or stop.

        Memory is borrowed only if the file is at least as long as the manifest states. Raises Unreadable, Unavailable.
        """
        name = f"{self._folder}/{blob.name}"
        length = self._listing.get(blob.name)
        if length is None or length < 0:
            # guard: missing-blob-reported
            self._report("structure", MissingBlob(f"{name} is missing, or is not a file", blob=blob.name))
            return
        check = _BlobCheck(manifest, blob, length, self._layers, self._report)
        if length != blob.length:  # guard: longer-blob-reported
            what = f"{name} has {length:,} bytes, committed were {blob.length:,}"
            self._report("digests", Truncated(what, blob=blob.name, offset=min(length, blob.length)))
        if length < blob.length:
            check.report_shorter(self._tier, name)  # guard: shorter-blob-reported
            return
        with lend(read_file.buffer_bytes([blob])) as buffers:
            chunks = read_file.in_order(read_file.RawChunks(self._tier, self._folder, blob), buffers, readers)
            with contextlib.closing(chunks):
                for index, (data, error) in enumerate(chunks):
                    yield
                    if error is not None:
                        self._report("digests", error)  # guard: unreadable-chunk-reported
                        data[:] = bytes(len(data))
                    found = check.examine(data, self._also)
                    if error is None and found and found != blob.chunks[index]:  # guard: chunk-digest-on-verify
                        self._report("digests", read_file.chunk_error(self._folder, manifest, blob, index, data))
                    check.report(data, damaged=any(one.layer == "digests" for one in self.findings))


class _BlobCheck(read_file.Check):
    """Checks the chunks of one tensor file by all layers; reports what is wrong and raises nothing."""

    def __init__(self, manifest: Manifest, blob: Blob, length: int, layers: Collection[str], report: Report) -> None:
        super().__init__(manifest, blob)
        self._length, self._layers, self._report, self._algorithm = length, layers, report, manifest.digest
        self._left = iter(self.parts)
        self._finite = {at for at, one in enumerate(self.pieces) if one.finite and "finite" in layers}
        self._as_written = "digests" in layers
        """whether no byte of the generation was found to differ from its digest so far"""
        self._not_finite: list[Piece] = []
        self._differing: list[Piece] = []

    def report_shorter(self, tier: Tier, name: str) -> None:
        """The file is too short: check its header, and report the first tensor that is incomplete."""
        self.validate(bytes(read_file.some(tier, name, min(self.header_bytes, self._length))))
        cut = next((one for one in self.pieces if one.extent.offset + one.extent.length > self._length), None)
        if cut is not None:
            what = f"{name} ends within tensor {cut.name}, or before it"
            self._report("contents", Truncated(what, blob=self.blob.name, offset=self._length, tensor=cut.name))

    def examine(self, data: memoryview, also: Callable[[memoryview], None]) -> str:
        """Process the next chunk; returns its digest ("" without the layer `digests`). call `report` for the rest."""
        parts, place, hasher = next(self._left), 0, ALGORITHMS[self._algorithm]()
        for low in range(0, len(data), VERIFY_BLOCK_BYTES):
            block, high = data[low : low + VERIFY_BLOCK_BYTES], low + VERIFY_BLOCK_BYTES
            also(block)
            if "digests" in self._layers:
                hasher.update(block)
            if "contents" in self._layers:
                self.see_contents(block)
            while place < len(parts):
                tensor, _, at, length = parts[place]  # `tensor` is -1 for the header (layout.Segment)
                part = data[max(at, low) : min(at + length, high)]  # guard: finite-check-covers-blocks
                # guard: finite-check-on-verify
                if tensor in self._finite and not_finite(self.pieces[tensor].dtype, part):
                    self._finite.discard(tensor)
                    self._not_finite.append(self.pieces[tensor])
                if at + length > high:
                    break
                place += 1
        return hasher.hexdigest() if "digests" in self._layers else ""

    def report(self, data: memoryview, damaged: bool) -> None:
        """Report what was found in this chunk.

        `damaged`: whether any file or record of the generation was found to differ from its digest.
        """
        self._as_written &= not damaged
        self.see_header(data)
        for piece in self._not_finite:
            self._report("finite", not_finite_error(piece.name))
        for piece in self._differing:
            self._report("contents", self.content_error(piece, self._as_written))  # guard: contents-checked-on-verify
        self._not_finite, self._differing = [], []

    def differs(self, piece: Piece) -> None:
        self._differing.append(piece)

    def validate(self, header: bytes) -> None:
        try:
            validation.validate_file(header, self._length, self.blob.name)  # guard: header-valid-by-itself
        except ManifestInvalid as error:
            self._report("structure", error)
        try:
            super().validate(header)
        except ManifestInvalid as error:
            self._report("agreement", error)  # guard: header-agrees-with-manifest


def layer_of(error: LastgoodError) -> str:
    """The layer that detects this kind of error in a record or a file."""
    if isinstance(error, NotFinite):
        return "finite"
    return "structure" if isinstance(error, (ManifestInvalid, MissingBlob)) else "digests"


def finding(error: LastgoodError, layer: str = "") -> Finding:
    """The record of an error. `layer` (default: from the kind of the error): the layer that found it."""
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

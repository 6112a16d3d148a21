"""Files that a rank reads from other nodes and keeps: they are copies on its node then, and are not sent there again.

Invariants
  1. A file has its name, and after it its manifest, once the rank has loaded: each of its chunks was verified then.
  2. A file that cannot be kept delays nothing and loses nothing: its copy is made after the restore (node_copies.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Sequence
from typing import cast

from ..errors import LastgoodError
from ..format import layout, sealed
from ..io.files import round_up
from ..ports import Mendable
from ..records import Blob, Extent, Generation, Manifest
from .node_disks import NodeTier

READING = ".read.tmp"
"""After the name of a file that is being read."""


class KeptReads:
    """Files of one generation. `tier`: the disks of the nodes. `manifests`: of all ranks. `names`: of the files."""

    def __init__(
        self, tier: NodeTier, generation: Generation, manifests: Sequence[Manifest], names: Collection[str]
    ) -> None:
        self._tier, self._own, self._generation = tier, cast(Mendable, tier.own), generation
        folder = layout.folder(generation.id)
        self._files: dict[str, _KeptFile] = {}
        for manifest in manifests:
            for blob in manifest.blobs:
                if blob.name in names:
                    with contextlib.suppress(LastgoodError):  # invariant 2
                        self._files[f"{folder}/{blob.name}"] = _KeptFile(self._own, f"{folder}/{blob.name}", blob)
        self._manifests = [one for one in manifests if any(blob.name in names for blob in one.blobs)]

    def write(self, extent: Extent, mv: memoryview) -> None:
        """Keep what was read of a file into `mv`, which may be longer. Called from several threads at once."""
        if extent.blob in self._files:
            self._files[extent.blob].write(extent, mv)

    def finish(self) -> None:
        """Make copies of the files that were read whole. Called once all that was read was verified."""
        folder, finished = layout.folder(self._generation.id), set[str]()
        with contextlib.suppress(LastgoodError):  # invariant 2
            finished = {name for name, file in self._files.items() if file.finish()}
            seals = {one.rank: one for one in self._generation.commit.seals}
            for one in self._manifests:
                if all(f"{folder}/{blob.name}" in finished for blob in one.blobs):  # guard: kept-file-before-manifest
                    seal = seals[one.rank]
                    data = sealed.record_bytes([self._tier], self._generation, seal)
                    self._own.put_new(f"{folder}/{seal.manifest}", data)

    def close(self) -> None:
        """Remove what was not finished."""
        for file in self._files.values():
            file.abort()


class _KeptFile:
    """One file. `own`: the disk of this node. `name`: with its folder."""

    def __init__(self, own: Mendable, name: str, blob: Blob) -> None:
        self._own, self._name, self._blob = own, name, blob
        self._lock, self._missing, self._failed = threading.Lock(), set(range(len(blob.chunks))), False
        own.delete(name + READING)  # of a process that was killed
        self._upload = own.create(name + READING, blob.length)
        self._open = True

    def write(self, extent: Extent, mv: memoryview) -> None:
        number, within = divmod(extent.offset, self._blob.chunk_bytes)
        padded = mv[: round_up(extent.length)]
        whole = not within and extent.length == layout.extent_of(self._blob, number).length
        with self._lock:
            # Of a chunk that is read twice, it is not known which reading was good.
            self._failed |= not whole or number not in self._missing or len(padded) < round_up(extent.length)
            if self._failed:  # guard: chunk-read-twice-not-kept
                return
            self._missing.discard(number)
        padded[extent.length :] = bytes(len(padded) - extent.length)
        try:
            self._upload.write_at(padded, extent.offset)
        except LastgoodError:
            self._failed = True

    def finish(self) -> bool:
        """Give the file its name if all of it was written. Returns whether it has it."""
        if self._failed or self._missing:  # guard: only-whole-files-kept
            return False
        self._upload.finish()
        self._own.replace(self._name, self._name + READING)
        self._open = False
        return True

    def abort(self) -> None:
        if self._open:
            self._open = False
            self._upload.abort()

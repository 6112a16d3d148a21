"""Content: one generation as one state. Pieces of tensors are assembled, whichever ranks wrote them.

Reads only the requested bytes and verifies them. Changes nothing. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..engine import read_file
from ..engine.arena import Arena
from ..engine.read_file import RankFiles, UnfitTensors
from ..engine.scatter import Scatter, Target, Targets
from ..errors import NoSuchTensor
from ..format import commit, layout
from ..format.boxes import StoredPiece, everything
from ..io.checksum import digest
from ..policy import reshard
from ..policy.reshard import Tensor
from ..ports import Tier
from ..records import Blob, Generation


class Content:
    """The tensors and values of a generation. The constructor reads all manifests; raises Damaged or Unavailable."""

    def __init__(self, tier: Tier, generation: Generation) -> None:
        self.generation = generation
        self.manifests = commit.read_manifests(tier, generation)
        """one for each rank that wrote the generation, in the order of the ranks"""
        self._tensors = reshard.tensors(self.manifests)
        self.aliases = reshard.aliases(self.manifests)
        """each further name of a tensor -> the name under which it is stored"""
        self._files = [RankFiles(tier, layout.folder(generation.id), one) for one in self.manifests]
        self._buffers = read_file.buffers_for(tier)

    def values(self, rank: int = 0) -> dict[str, Any]:
        """The values that `rank` stored: all leaves of its state that are no tensors."""
        return self.manifests[rank].values

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by the name under which it is stored."""
        return self._tensors

    def not_demanded(self) -> frozenset[str]:
        """The names of tensors that were allowed to hold NaN or infinity when they were saved."""
        return frozenset(piece.name for one in self.manifests for piece in one.pieces if not piece.finite)

    def names(self) -> dict[str, Tensor]:
        """Every tensor by each of its names, aliases included."""
        return self._tensors | {alias: self._tensors[name] for alias, name in self.aliases.items()}

    @property
    def algorithm(self) -> str:
        """The name of the digest algorithm."""
        return self.manifests[0].digest

    def digest(self, name: str) -> str:
        """The digest of a tensor's content, from the manifests alone. Raises NoSuchTensor.

        For a tensor in several pieces it is a digest over the boxes and the digests of the pieces. Equal digests of the
        same algorithm mean equal tensors; the same tensor in other pieces has another digest.
        """
        stored = sorted(self._named(name).stored, key=lambda one: one.box)
        if len(stored) == 1:
            return stored[0].piece.digest
        digests = "".join(f"{one.box.offsets}{one.box.shape}{one.piece.digest}" for one in stored)
        return digest(self.algorithm, digests.encode())

    def tensor(self, name: str) -> tuple[Tensor, bytearray]:
        """Read one tensor and verify its bytes. Raises NoSuchTensor, Damaged, Unavailable."""
        tensor = self._named(name)
        return tensor, self._read(tensor)

    def piece(self, one: StoredPiece) -> bytearray:
        """Read and verify the bytes of one piece. Raises Damaged or Unavailable."""
        return read_file.tensor(self._files[one.rank], one.piece)

    def parts(self, name: str, part_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes of one tensor in order, `part_bytes` at a time.

        Damaged is raised only after the last part of a damaged piece, so the caller must not use any part before the
        end. A tensor whose pieces are not consecutive rows is assembled in memory first.
        """
        tensor = self._named(name)
        stored = sorted(tensor.stored, key=lambda one: one.box)
        if any(one.box.shape[1:] != tensor.shape[1:] for one in stored):
            yield from _in_parts(memoryview(self._read(tensor)), part_bytes)
            return
        for one in stored:
            yield from read_file.parts(self._files[one.rank], one.piece, part_bytes)

    # ---- the whole generation ------------------------------------------------------------------------------

    def reading_bytes(self) -> tuple[int, int]:
        """The memory that reading all tensors needs: the bytes of all buffers together, and of one buffer."""
        blobs = self._blobs()
        buffer = max(read_file.buffer_bytes(blobs), 1)
        return buffer * min(self._buffers, sum(len(blob.chunks) for blob in blobs)), buffer

    def headers_agree(self, arena: Arena) -> bool:
        """Whether each tensor file begins with the header that its manifest implies; little more than that is read.

        Raises Damaged or Unavailable.
        """
        with read_file.borrowed(arena, read_file.buffer_bytes(self._blobs())) as buffers:
            return all(read_file.headers_agree(one, buffers[0]) for one in self._files)

    def read_into(self, sink: WantedTensors, settings: ReadSettings) -> None:
        """Read the boxes that `sink` wants, verified, into `sink`.

        Raises Damaged, Unavailable, and NotFinite if `settings.unfit` refuses tensors that hold NaN or infinity.
        Only chunks with wanted bytes are read. A generation of one rank is read from start to end if this process alone
        wants most of it, or if it has not been verified: its other tensors decide too whether it is good.
        """
        fresh, workers, unfit = not settings.shared, settings.workers, settings.unfit
        with read_file.borrowed(settings.arena, read_file.buffer_bytes(self._blobs()), self._buffers) as buffers:
            total = sum(piece.extent.length for one in self.manifests for piece in one.pieces)
            all_of_it = unfit is not None or 2 * sink.bytes >= total  # guard: unverified-content-read-whole
            if len(self._files) == 1 and fresh and not sink.boxed and all_of_it:
                read_file.stream(self._files[0], buffers, workers, sink, unfit=unfit)
                return
            parts = [(one, reshard.parts(self._tensors[name], one.box, settings.rank)) for name, one in sink.targets()]
            scatter = Scatter(parts, sink)
            for files in self._files:
                if wanted := scatter.wanted(files.manifest.rank):
                    rank_sink = scatter.sink(files.manifest.rank)
                    read_file.stream(files, buffers, workers, rank_sink, unfit=unfit, wanted=wanted, fresh=fresh)
        scatter.end()

    def chunks_wanted(self, sink: WantedTensors, rank: int) -> dict[str, list[int]]:
        """File -> the indices of its chunks in which the wanted boxes and its header lie. `rank`: as in `ReadSettings`.

        All chunks of a generation of one rank, whose other tensors may decide too whether it is good.
        """
        keys: set[tuple[int, str]] = set()
        for name, one in sink.targets():
            parts = reshard.parts(self._tensors[name], one.box, rank)
            keys |= {(part.stored.rank, part.stored.piece.key) for part in parts}
        found = dict[str, list[int]]()
        for manifest in self.manifests:
            of_rank = {key for written, key in keys if written == manifest.rank}
            for blob in manifest.blobs:
                check = read_file.Check(manifest, blob)
                chunks = set(check.needed(of_rank if len(self.manifests) > 1 else None))
                if chunks:
                    found[blob.name] = sorted(chunks | set(range(-(-check.header_bytes // blob.chunk_bytes))))
        return found

    # ---- helpers -------------------------------------------------------------------------------------------

    def _blobs(self) -> list[Blob]:
        return [blob for manifest in self.manifests for blob in manifest.blobs]

    def _read(self, tensor: Tensor) -> bytearray:
        if len(tensor.stored) == 1:
            (one,) = tensor.stored
            return self.piece(one)
        target = Target("", tensor.dtype, everything(tensor.shape))
        whole = bytearray(target.box.elements * layout.DTYPES[tensor.dtype][0] // 8)
        scatter = Scatter([(target, reshard.parts(tensor, target.box, -1))], _Memory(np.frombuffer(whole, np.uint8)))
        for one in tensor.stored:
            data = self.piece(one)
            if data:
                scatter.put(one.rank, one.piece.key, 0, memoryview(data))
            scatter.done(one.rank, one.piece.key)
        return whole

    def _named(self, name: str) -> Tensor:
        found = self._tensors.get(self.aliases.get(name, name))
        if found is None:
            raise NoSuchTensor(
                f"step {self.generation.step} holds no tensor {name!r}",
                todo="`lastgood show RUN` lists the names that it has.",
            )
        return found


class WantedTensors(Targets, Protocol):
    """A sink that names the boxes of tensors that it wants to receive."""

    boxed: Any
    """the names of wanted boxes that are smaller than their tensors; empty if only whole tensors are wanted"""

    @property
    def bytes(self) -> int:
        """The bytes of all wanted boxes."""

    def targets(self) -> Iterator[tuple[str, Target]]:
        """Yield the stored name of each wanted tensor, and the box of it that is wanted."""


@dataclass(frozen=True)
class ReadSettings:
    """How one process reads a generation."""

    arena: Arena
    workers: Executor
    rank: int = 0
    """This process takes the place of this rank of the world that saved. Where that rank stored content of its own for
    a box, that content is read."""
    unfit: UnfitTensors | None = None
    """collects or refuses the tensors that hold NaN or infinity although they must not; None: this is not checked"""
    shared: bool = False
    """Whether several processes of this machine read the same bytes: they then read through the page cache."""


def _in_parts(data: memoryview, part_bytes: int) -> Iterator[memoryview]:
    for start in range(0, len(data), part_bytes):
        yield data[start : start + part_bytes]


class _Memory:
    """`scatter.Targets` for one box, in one contiguous array of bytes."""

    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory

    def put(self, name: str, start: int, data: memoryview) -> None:
        self._memory[start : start + len(data)] = np.frombuffer(data, np.uint8)

    def window(self, name: str, start: int, length: int) -> memoryview | None:
        return self._memory.data[start : start + length]

    def windows(self, name: str) -> list[np.ndarray] | None:
        return [self._memory]

    def done(self, name: str) -> None:
        """The memory is used only once everything has been put."""

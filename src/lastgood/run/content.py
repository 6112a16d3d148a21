"""Content: a generation as one state. Its tensors are whole, however many ranks wrote them in how many pieces.

Reads what is asked for, and verifies it; changes nothing. Torch-free.
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
from ..format.boxes import Stored, everything
from ..io.checksum import digest
from ..policy import reshard
from ..policy.reshard import Tensor
from ..ports import Tier
from ..records import Blob, Generation, Manifest


class Content:
    """What a generation holds. Raises Damaged or Unavailable when it is made."""

    def __init__(self, tier: Tier, generation: Generation) -> None:
        self.generation = generation
        self.manifests = commit.read_manifests(tier, generation)
        """by rank of those that saved"""
        self._tensors = reshard.tensors(self.manifests)
        self.aliases = reshard.aliases(self.manifests)
        """further name of a tensor -> the name under which it is stored"""
        self._files = [RankFiles(tier, layout.folder(generation.id), one) for one in self.manifests]

    def values(self, rank: int = 0) -> dict[str, Any]:
        """What `rank` stored beside tensors."""
        return self.manifests[rank].values

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by the name under which it is stored."""
        return self._tensors

    def not_demanded(self) -> frozenset[str]:
        """The tensors that were saved as allowed to hold NaN or infinity."""
        return frozenset(piece.name for one in self.manifests for piece in one.pieces if not piece.finite)

    def names(self) -> dict[str, Tensor]:
        """Every tensor by each of its names, aliases included."""
        return self._tensors | {alias: self._tensors[name] for alias, name in self.aliases.items()}

    @property
    def algorithm(self) -> str:
        """The name of the digest algorithm."""
        return self.manifests[0].digest

    def digest(self, name: str) -> str:
        """The digest of a tensor's content. Equal digests of one algorithm mean equal tensors.

        For a tensor in several pieces it is made of the digests of the pieces.
        """
        stored = sorted(self._named(name).stored, key=lambda one: one.box)
        if len(stored) == 1:
            return stored[0].piece.digest
        digests = "".join(f"{one.box.offsets}{one.box.shape}{one.piece.digest}" for one in stored)
        return digest(self.algorithm, digests.encode())

    def tensor(self, name: str) -> tuple[Tensor, bytearray]:
        """One tensor and its verified bytes; nothing else is read. Raises NoSuchTensor, Damaged, Unavailable."""
        tensor = self._named(name)
        return tensor, self._read(tensor)

    def piece(self, one: Stored) -> bytearray:
        """The verified bytes of one piece. Raises Damaged or Unavailable."""
        return read_file.tensor(self._files[one.rank], one.piece)

    def parts(self, name: str, part_bytes: int) -> Iterator[memoryview]:
        """The bytes of one tensor in order, `part_bytes` at a time. Raises Damaged after the last part of a bad piece.

        A tensor whose pieces are not runs of its rows is assembled in memory first.
        """
        tensor = self._named(name)
        stored = sorted(tensor.stored, key=lambda one: one.box)
        if any(one.box.shape[1:] != tensor.shape[1:] for one in stored):
            yield from _in_parts(memoryview(self._read(tensor)), part_bytes)
            return
        for one in stored:
            yield from read_file.parts(self._files[one.rank], one.piece, part_bytes)

    # ---- all of it -----------------------------------------------------------------------------------------

    def reading_bytes(self) -> tuple[int, int]:
        """The memory in which all tensors are read: how many bytes in all, and how many for one buffer."""
        blobs = self._blobs()
        buffer = max(read_file.buffer_bytes(blobs), 1)
        return buffer * min(read_file.BUFFERS, sum(len(blob.chunks) for blob in blobs)), buffer

    def headers_agree(self, arena: Arena) -> bool:
        """Whether each tensor file begins as its manifest says. Reads little else. Raises Damaged or Unavailable."""
        with read_file.borrowed(arena, read_file.buffer_bytes(self._blobs())) as buffers:
            return all(read_file.headers_agree(one, buffers[0]) for one in self._files)

    def read_into(self, sink: WantedTensors, settings: ReadSettings) -> None:
        """Read what `sink` wants, and hand it over, verified. Raises Damaged or Unavailable, NotFinite.

        Chunks of which nothing is wanted are not read, unless one rank has stored exactly what is wanted.
        """
        fresh, workers, unfit = not settings.shared, settings.workers, settings.unfit
        with read_file.borrowed(settings.arena, read_file.buffer_bytes(self._blobs())) as buffers:
            if len(self._files) == 1 and fresh and not sink.boxed:
                read_file.stream(self._files[0], buffers, workers, sink, unfit=unfit)
                return
            parts = [(one, reshard.parts(self._tensors[name], one.box, settings.rank)) for name, one in sink.targets()]
            scatter = Scatter(parts, sink)
            for files in self._files:
                if wanted := scatter.wanted(files.manifest.rank):
                    rank_sink = scatter.sink(files.manifest.rank)
                    read_file.stream(files, buffers, workers, rank_sink, unfit=unfit, wanted=wanted, fresh=fresh)
        scatter.end()

    # ---- within --------------------------------------------------------------------------------------------

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
    """A sink that knows what it wants."""

    boxed: Any
    """the names of wanted boxes that are smaller than their tensors; empty where only whole tensors are wanted"""

    def targets(self) -> Iterator[tuple[str, Target]]:
        """The stored name of each wanted tensor, and which box of it is wanted."""


@dataclass(frozen=True)
class ReadSettings:
    """How one process reads a generation."""

    arena: Arena
    workers: Executor
    rank: int = 0
    """the rank of those that saved whose place this process takes: it reads what that rank stored for itself"""
    unfit: UnfitTensors | None = None
    """records tensors that must be finite and are not; None checks nothing"""
    shared: bool = False
    """several processes of this machine read the same bytes, through its page cache"""


def read_rank(
    tier: Tier, generation: Generation, manifest: Manifest, arena: Arena, workers: Executor
) -> dict[str, memoryview]:
    """All tensors of one rank in new memory, verified, by the keys of their pieces. Raises Damaged or Unavailable."""
    whole = _NewMemory(manifest)
    with read_file.borrowed(arena, read_file.buffer_bytes(manifest.blobs)) as buffers:
        read_file.stream(RankFiles(tier, layout.folder(generation.id), manifest), buffers, workers, whole)
    return whole.tensors


def _in_parts(data: memoryview, part_bytes: int) -> Iterator[memoryview]:
    for start in range(0, len(data), part_bytes):
        yield data[start : start + part_bytes]


class _Memory:
    """`scatter.Targets`: one box in one run of memory."""

    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory

    def put(self, name: str, start: int, data: memoryview) -> None:
        self._memory[start : start + len(data)] = np.frombuffer(data, np.uint8)

    def windows(self, name: str) -> list[np.ndarray] | None:
        return [self._memory]

    def done(self, name: str) -> None:
        """The memory is used only once everything has been put."""


class _NewMemory:
    """`read_file.Sink`: each piece in memory of its own."""

    def __init__(self, manifest: Manifest) -> None:
        self.tensors = {piece.key: memoryview(bytearray(piece.extent.length)) for piece in manifest.pieces}

    def put(self, name: str, start: int, data: memoryview) -> None:
        self.tensors[name][start : start + len(data)] = data

    def done(self, name: str) -> None:
        """The memory is used only once everything has been put."""

"""A generation as one state: its tensors by name, whole, however many ranks wrote them in how many parts. Torch-free.

Reads what is asked for, and verifies it; changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..engine import read_file
from ..engine.scatter import Scatter, Target
from ..errors import NoSuchTensor
from ..format import commit, layout
from ..format.boxes import Stored, everything
from ..io.checksum import digest
from ..policy import reshard
from ..policy.reshard import Tensor
from ..ports import Tier
from ..records import Generation


class Content:
    """What a generation holds. Raises Damaged or Unavailable when it is made."""

    def __init__(self, tier: Tier, generation: Generation) -> None:
        self.generation = generation
        self._tier, self._home = tier, layout.folder(generation.id)
        self._manifests = commit.read_manifests(tier, generation)
        self._stored = reshard.tensors(self._manifests)
        self.aliases = reshard.aliases(self._manifests)
        """further name of a tensor -> the name under which it is stored"""

    def values(self, rank: int = 0) -> dict[str, Any]:
        """What is no tensor, as this rank had it."""
        return self._manifests[rank].values

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by the name under which it is stored."""
        return self._stored

    def names(self) -> dict[str, Tensor]:
        """Every tensor by every name that it has, its aliases too."""
        return self._stored | {alias: self._stored[name] for alias, name in self.aliases.items()}

    @property
    def algorithm(self) -> str:
        """Of the digests."""
        return self._manifests[0].digest

    def digest(self, name: str) -> str:
        """Of the content: equal ones, of one algorithm, mean equal tensors. Of several pieces, of their digests."""
        stored = sorted(self._named(name).stored, key=lambda one: one.box)
        if len(stored) == 1:
            return stored[0].piece.digest
        told = "".join(f"{one.box.offsets}{one.box.shape}{one.piece.digest}" for one in stored)
        return digest(self.algorithm, told.encode())

    def tensor(self, name: str) -> tuple[Tensor, bytearray]:
        """One tensor and its bytes, checked; nothing else is read. Raises NoSuchTensor, Damaged."""
        tensor = self._named(name)
        return tensor, self._read(tensor)

    def piece(self, one: Stored) -> bytearray:
        """The bytes of one piece, checked. Raises Damaged."""
        return read_file.tensor(self._tier, self._home, self._manifests[one.rank], one.piece)

    def parts(self, name: str, part_bytes: int) -> Iterator[memoryview]:
        """The bytes of one tensor in order, some at a time, checked when they have all come out; then Damaged.

        One that is stored in rectangles that are no runs of it is put together in memory first.
        """
        tensor = self._named(name)
        stored = sorted(tensor.stored, key=lambda one: one.box)
        if any(one.box.shape[1:] != tensor.shape[1:] for one in stored):
            yield from _in_parts(memoryview(self._read(tensor)), part_bytes)
            return
        for one in stored:
            yield from read_file.parts(self._tier, self._home, self._manifests[one.rank], one.piece, part_bytes)

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
        found = self._stored.get(self.aliases.get(name, name))
        if found is None:
            raise NoSuchTensor(
                f"step {self.generation.step} holds no tensor {name!r}",
                todo="`lastgood show RUN` lists the names that it has.",
            )
        return found


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
        """Nobody asks before it is all there."""

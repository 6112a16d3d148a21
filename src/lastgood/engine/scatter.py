"""Scattering: the bytes of stored pieces, part by part as they are read -> the boxes of tensors that a reader wants.

Where a part is one run of bytes on both sides it goes straight through. Where the source is not, its piece is gathered
first; where the target is not, its memory is written row by row, or a box is gathered where nobody hands that out.
Decides nothing: which piece goes where is a plan (policy/reshard.py). Torch-free.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np

from ..format.boxes import Box, Part, run_of
from ..format.layout import DTYPES


class Targets(Protocol):
    """Where the boxes go.

    ======================  =====================================================================================
    put(name, start, data)  as `fetch.Sink`; `start` counts in the box, row by row
    windows(name)           all places of it in the host's memory, uint8 [bytes]; None where there are others
    done(name)              every byte of the box was put
    ======================  =====================================================================================
    """

    def put(self, name: str, start: int, data: memoryview) -> None: ...
    def windows(self, name: str) -> list[np.ndarray] | None: ...
    def done(self, name: str) -> None: ...


class Target(NamedTuple):
    """A box that a reader wants, under the name by which it knows it."""

    name: str
    dtype: str
    box: Box


class _Way(NamedTuple):
    """From a piece to a target. `source`, `to`: first element and number of elements, where it is one run there."""

    target: Target
    piece: Box
    part: Box
    source: tuple[int, int] | None
    to: tuple[int, int] | None
    element_bytes: int


class Scatter:
    """A plan being carried out, over the files of all ranks."""

    def __init__(self, plan: Iterable[tuple[Target, list[Part]]], into: Targets) -> None:
        self._into = into
        self._ways: dict[tuple[int, str], list[_Way]] = defaultdict(list)
        self._left: Counter[str] = Counter()
        self._gathered: dict[tuple[int, str], np.ndarray] = {}
        self._scattered: dict[str, Target] = {}
        self._assembled: dict[str, np.ndarray] = {}
        self._empty: list[str] = []
        self._lock = threading.Lock()
        for target, parts in plan:
            size = DTYPES[target.dtype][0] // 8
            for part in parts:
                box = part.stored.box
                way = _Way(target, box, part.box, run_of(box, part.box), run_of(target.box, part.box), size)
                self._ways[part.stored.rank, part.stored.piece.key].append(way)
                if way.to is None:
                    self._scattered[target.name] = target
            self._left[target.name] = len(parts)
            if not parts:
                self._empty.append(target.name)

    def wanted(self, rank: int) -> set[str]:
        """Keys of the pieces of a rank that are wanted at all."""
        return {key for of, key in self._ways if of == rank}

    def sink(self, rank: int) -> _OfRank:
        """`fetch.Sink` for the files of a rank."""
        return _OfRank(self, rank)

    def end(self) -> None:
        """Every file was read: what has no bytes is done too."""
        for name in self._empty:
            self._into.done(name)

    def put(self, rank: int, key: str, start: int, data: memoryview) -> None:
        for way in self._ways.get((rank, key), ()):
            if way.source is None or way.to is None:
                self._gather((rank, key), way.piece.elements * way.element_bytes, start, data)
                continue
            first, count = way.source[0] * way.element_bytes, way.source[1] * way.element_bytes
            low, high = max(start, first), min(start + len(data), first + count)
            if low < high:
                self._put(way.target, way.to[0] * way.element_bytes + low - first, data[low - start : high - start])

    def done(self, rank: int, key: str) -> None:
        whole = self._gathered.pop((rank, key), None)
        for way in self._ways.get((rank, key), ()):
            target = way.target
            if way.source is None or way.to is None:
                assert whole is not None
                part = _cut(whole, way.piece, way.part, way.element_bytes)
                if way.to is not None:
                    self._put(target, way.to[0] * way.element_bytes, np.ascontiguousarray(part).reshape(-1).data)
                else:
                    for place in self._into.windows(target.name) or [self._assembly(target)]:
                        np.copyto(_cut(place, target.box, way.part, way.element_bytes), part)
            self._left[target.name] -= 1
            if not self._left[target.name]:
                assembled = self._assembled.pop(target.name, None)
                if assembled is not None:
                    self._into.put(target.name, 0, assembled.data)
                self._into.done(target.name)

    def _put(self, target: Target, start: int, data: memoryview) -> None:
        """A run of a target: to where it belongs, or beside what else of it is put together first."""
        if target.name in self._scattered and self._into.windows(target.name) is None:
            self._assembly(target)[start : start + len(data)] = np.frombuffer(data, np.uint8)
        else:
            self._into.put(target.name, start, data)

    def _assembly(self, target: Target) -> np.ndarray:
        with self._lock:
            if target.name not in self._assembled:
                length = target.box.elements * DTYPES[target.dtype][0] // 8
                self._assembled[target.name] = np.empty(length, np.uint8)
            return self._assembled[target.name]

    def _gather(self, at: tuple[int, str], length: int, start: int, data: memoryview) -> None:
        with self._lock:
            whole = self._gathered.get(at)
            if whole is None:
                whole = self._gathered[at] = np.empty(length, np.uint8)
        np.copyto(whole[start : start + len(data)], np.frombuffer(data, np.uint8))


class _OfRank:
    def __init__(self, scatter: Scatter, rank: int) -> None:
        self._scatter, self._rank = scatter, rank

    def put(self, name: str, start: int, data: memoryview) -> None:
        self._scatter.put(self._rank, name, start, data)

    def done(self, name: str) -> None:
        self._scatter.done(self._rank, name)


def _cut(memory: np.ndarray, outer: Box, part: Box, element_bytes: int) -> np.ndarray:
    """The bytes of `part` in the memory of `outer`: a view, uint8 [*shape, bytes of an element]."""
    spots = zip(part.offsets, part.shape, outer.offsets, strict=True)
    view = memory.reshape(*outer.shape, element_bytes)
    return view[tuple(slice(start - begin, start - begin + size) for start, size, begin in spots)]

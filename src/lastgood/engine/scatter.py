"""Scattering: the bytes of stored pieces, part by part as they are read -> the boxes of tensors that a reader wants.

A part that is one run of bytes both in its piece and in its target is passed on directly. If it is not one run in the
piece, the whole piece is gathered first. If it is not one run in the target, the memory of the target is written row by
row; where the target has no such memory, the whole box is assembled first. Decides nothing: which piece goes where is
planned by policy/reshard.py. Torch-free.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np

from ..format.boxes import Box, PiecePart, contiguous_range
from ..format.layout import DTYPES


class Targets(Protocol):
    """Receives the wanted boxes.

    ======================  =====================================================================================
    put(name, start, data)  as `read_file.Sink`; `start` is an offset into the box, row by row
    window(name, start,     as `read_file.Sink`; `start` is an offset into the box
    length)
    windows(name)           the memory of the box, uint8 [bytes], once for each destination; None if a destination has
                            no memory that the host can write
    done(name)              every byte of the box was put
    ======================  =====================================================================================
    """

    def put(self, name: str, start: int, data: memoryview) -> None: ...
    def window(self, name: str, start: int, length: int) -> memoryview | None: ...
    def windows(self, name: str) -> list[np.ndarray] | None: ...
    def done(self, name: str) -> None: ...


class Target(NamedTuple):
    """A box that a reader wants, and the reader's name for it."""

    name: str
    dtype: str
    box: Box


class _Route(NamedTuple):
    """A part of a piece, and the target that it goes to.

    `source`, `to`: its first element and number of elements in the piece and in the target; None if it is not one run.
    """

    target: Target
    piece: Box
    part: Box
    source: tuple[int, int] | None
    to: tuple[int, int] | None
    element_bytes: int


class Scatter:
    """Carries out one plan over the files of all ranks. `plan`: each target, and the parts of pieces that fill it."""

    def __init__(self, plan: Iterable[tuple[Target, list[PiecePart]]], into: Targets) -> None:
        self._into = into
        self._routes: dict[tuple[int, str], list[_Route]] = defaultdict(list)
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
                route = _Route(
                    target, box, part.box, contiguous_range(box, part.box), contiguous_range(target.box, part.box), size
                )
                self._routes[part.stored.rank, part.stored.piece.key].append(route)
                if route.to is None:
                    self._scattered[target.name] = target
            self._left[target.name] = len(parts)
            if not parts:
                self._empty.append(target.name)

    def wanted(self, rank: int) -> set[str]:
        """The keys of the pieces of a rank from which something is wanted."""
        return {key for of, key in self._routes if of == rank}

    def sink(self, rank: int) -> _RankSink:
        """`read_file.Sink` for the files of one rank."""
        return _RankSink(self, rank)

    def end(self) -> None:
        """Finish the targets without bytes, once every file has been read."""
        for name in self._empty:
            self._into.done(name)

    def put(self, rank: int, key: str, start: int, data: memoryview) -> None:
        """Take a verified part of a piece; called from any thread."""
        for route in self._routes.get((rank, key), ()):
            if route.source is None or route.to is None:
                self._gather((rank, key), route.piece.elements * route.element_bytes, start, data)
                continue
            first, count = route.source[0] * route.element_bytes, route.source[1] * route.element_bytes
            low, high = max(start, first), min(start + len(data), first + count)
            if low < high:
                at = route.to[0] * route.element_bytes + low - first
                self._put(route.target, at, data[low - start : high - start])

    def window(self, rank: int, key: str, start: int, length: int) -> memoryview | None:
        """The memory of a target that a part of a piece fills, if it goes there only and as one run."""
        routes = self._routes.get((rank, key), ())
        if len(routes) != 1 or routes[0].source is None or routes[0].to is None:
            return None
        target, size = routes[0].target, routes[0].element_bytes
        first, end = routes[0].source[0] * size, sum(routes[0].source) * size
        if start < first or start + length > end or target.name in self._scattered:
            return None
        return self._into.window(target.name, routes[0].to[0] * size + start - first, length)

    def done(self, rank: int, key: str) -> None:
        """Finish a piece, all of which was put, and every target that it completes."""
        gathered = self._gathered.pop((rank, key), None)
        for route in self._routes.get((rank, key), ()):
            target = route.target
            if route.source is None or route.to is None:
                assert gathered is not None
                part = _cut(gathered, route.piece, route.part, route.element_bytes)
                if route.to is not None:
                    self._put(target, route.to[0] * route.element_bytes, np.ascontiguousarray(part).reshape(-1).data)
                else:
                    for place in self._into.windows(target.name) or [self._assembled_box(target)]:
                        np.copyto(_cut(place, target.box, route.part, route.element_bytes), part)
            self._left[target.name] -= 1
            if not self._left[target.name]:
                assembled = self._assembled.pop(target.name, None)
                if assembled is not None:
                    self._into.put(target.name, 0, assembled.data)
                self._into.done(target.name)

    def _put(self, target: Target, start: int, data: memoryview) -> None:
        """Pass on a run of bytes of a target, or add it to the box that is assembled first."""
        if target.name in self._scattered and self._into.windows(target.name) is None:
            self._assembled_box(target)[start : start + len(data)] = np.frombuffer(data, np.uint8)
        else:
            self._into.put(target.name, start, data)

    def _assembled_box(self, target: Target) -> np.ndarray:
        with self._lock:
            if target.name not in self._assembled:
                length = target.box.elements * DTYPES[target.dtype][0] // 8
                self._assembled[target.name] = np.empty(length, np.uint8)
            return self._assembled[target.name]

    def _gather(self, at: tuple[int, str], length: int, start: int, data: memoryview) -> None:
        with self._lock:
            gathered = self._gathered.get(at)
            if gathered is None:
                gathered = self._gathered[at] = np.empty(length, np.uint8)
        np.copyto(gathered[start : start + len(data)], np.frombuffer(data, np.uint8))


class _RankSink:
    """`read_file.Sink`: the pieces of one rank."""

    def __init__(self, scatter: Scatter, rank: int) -> None:
        self._scatter, self._rank = scatter, rank

    def put(self, name: str, start: int, data: memoryview) -> None:
        self._scatter.put(self._rank, name, start, data)

    def window(self, name: str, start: int, length: int) -> memoryview | None:
        return self._scatter.window(self._rank, name, start, length)

    def done(self, name: str) -> None:
        self._scatter.done(self._rank, name)


def _cut(memory: np.ndarray, outer: Box, part: Box, element_bytes: int) -> np.ndarray:
    """The bytes of `part` in the memory of `outer`: a view, uint8 [*shape, bytes of an element]."""
    spots = zip(part.offsets, part.shape, outer.offsets, strict=True)
    view = memory.reshape(*outer.shape, element_bytes)
    return view[tuple(slice(start - begin, start - begin + size) for start, size, begin in spots)]

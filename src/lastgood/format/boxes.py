"""Boxes: rectangles of tensors, and their intersections. Pure.

A whole tensor is a box, a stored piece is a box within it, and what a reader wants is a box too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..records import Piece


class Box(NamedTuple):
    """A rectangle of a tensor: its first index, and its length, in each dimension."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The number of elements in the box."""
        return math.prod(self.shape)


def everything(shape: Sequence[int]) -> Box:
    """The box that is the whole tensor of this shape."""
    return Box((0,) * len(shape), tuple(shape))


def overlap(one: Box, other: Box) -> Box | None:
    """The intersection of two boxes of a tensor; None if they share no element."""
    low = tuple(map(max, one.offsets, other.offsets))
    ends = (min(a + b, c + d) for a, b, c, d in zip(*one, *other, strict=True))
    shape = tuple(end - start for start, end in zip(low, ends, strict=True))
    return Box(low, shape) if all(size > 0 for size in shape) else None


def contiguous_range(outer: Box, part: Box) -> tuple[int, int] | None:
    """The first element and the number of elements of `part` in the row-major order of `outer`.

    None if the elements of `part` are not contiguous there.
    """
    offset, inside = 0, 1  # elements of `outer` in one index of the dimension at hand
    partial = False  # whether `part` covers a later dimension in part; then it must have one index in the others
    for start, size, begin, all_of in zip(
        reversed(part.offsets), reversed(part.shape), reversed(outer.offsets), reversed(outer.shape), strict=True
    ):
        if partial and size != 1:
            return None
        offset += (start - begin) * inside
        inside *= all_of
        partial |= size != all_of
    return offset, part.elements


class StoredPiece(NamedTuple):
    """A stored piece, the rank whose file holds it, and its box in the tensor."""

    rank: int
    piece: Piece
    box: Box


class PiecePart(NamedTuple):
    """The part of a stored piece that goes to a target; `box` is a box of the tensor."""

    stored: StoredPiece
    box: Box

"""Boxes: rectangles of tensors, and how they meet. Pure; holds no bytes.

A tensor is a box; a piece is a box within it; what a reader wants is a box too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..records import Piece


class Box(NamedTuple):
    """A rectangle: where it begins in its tensor, and how far it reaches in each dimension."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """In it."""
        return math.prod(self.shape)


def everything(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes of a tensor share; None where they share no element."""
    low = tuple(map(max, one.offsets, other.offsets))
    ends = (min(a + b, c + d) for a, b, c, d in zip(*one, *other, strict=True))
    shape = tuple(end - start for start, end in zip(low, ends, strict=True))
    return Box(low, shape) if all(size > 0 for size in shape) else None


def run_of(outer: Box, part: Box) -> tuple[int, int] | None:
    """First element and number of elements of `part` in `outer`, row by row; None where it is no single run."""
    offset, inside = 0, 1
    broken = False
    for start, size, begin, all_of in zip(
        reversed(part.offsets), reversed(part.shape), reversed(outer.offsets), reversed(outer.shape), strict=True
    ):
        if broken and size != 1:
            return None
        offset += (start - begin) * inside
        inside *= all_of
        broken |= size != all_of
    return offset, part.elements


class Stored(NamedTuple):
    """A piece, and the rank whose file it is in."""

    rank: int
    piece: Piece
    box: Box


class Part(NamedTuple):
    """What of a stored piece goes to a target: a box of the tensor."""

    stored: Stored
    box: Box

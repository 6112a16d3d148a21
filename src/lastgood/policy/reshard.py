"""Resharding: which stored pieces fill which tensors, and which of several holders writes what. Pure: moves no byte.

A tensor may be saved on one mesh and wanted on another: each wanted box is filled by its intersections with the pieces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import ManifestInvalid
from ..format.boxes import Box, PiecePart, StoredPiece, everything, overlap
from ..limits import TINY_BYTES
from ..records import Manifest

LEAST_SPLIT_BYTES = 16 << 10
"""Smaller tensors are not split among several holders: splitting costs more than it balances."""


# ---- what was stored -----------------------------------------------------------------------------------------


class Tensor(NamedTuple):
    """A tensor of a generation: its dtype and shape, and where its pieces are."""

    dtype: str
    shape: tuple[int, ...]
    stored: list[StoredPiece]
    """pieces that cover the tensor without overlaps"""
    own: dict[tuple[int, Box], StoredPiece]
    """(rank, box) -> the piece of a rank whose content differed from that of the rank that wrote the box, as that of
    buffers and random number generators may; that rank loads its own piece again"""

    @property
    def bytes(self) -> int:
        return sum(one.piece.extent.length for one in self.stored)


def tensors(manifests: Sequence[Manifest]) -> dict[str, Tensor]:
    """Every tensor of a generation, from the manifests of its ranks.

    Raises ManifestInvalid if pieces disagree about dtype or shape, overlap, or do not cover their tensor, and if an
    alias names no tensor.
    """
    found: dict[str, Tensor] = {}
    for manifest in manifests:
        for piece in manifest.pieces:
            shape = tuple(piece.whole or piece.shape)
            tensor = found.setdefault(piece.name, Tensor(piece.dtype, shape, [], {}))
            _need((piece.dtype, shape) == tensor[:2], f"{piece.name} has two dtypes or shapes")
            box = Box(tuple(piece.offsets), tuple(piece.shape)) if piece.offsets else everything(shape)
            one = StoredPiece(manifest.rank, piece, box)
            if piece.own:
                tensor.own[manifest.rank, box] = one
            else:
                tensor.stored.append(one)
    for name, tensor in found.items():
        if len(tensor.stored) == 1 and not (tensor.own or tensor.stored[0].piece.offsets):
            continue  # all of it in one piece, as every tensor is in a world of one
        boxes = [one.box for one in tensor.stored]
        _need(not overlapping(boxes), f"{name} is stored twice in part")  # guard: pieces-do-not-overlap
        whole = boxes and sum(box.elements for box in boxes) == math.prod(tensor.shape)
        _need(bool(whole), f"the pieces of {name} leave a hole")  # guard: pieces-leave-no-hole
        _need({box for _, box in tensor.own} <= set(boxes), f"{name}: a rank's own content has a box that is no piece")
    for manifest in manifests:
        for alias, name in manifest.aliases.items():
            _need(name in found and alias not in found, f"{alias!r} is an alias of {name!r}")
    return found


def aliases(manifests: Sequence[Manifest]) -> dict[str, str]:
    """Alias -> the name under which the tensor is stored, of all ranks."""
    return {alias: name for one in manifests for alias, name in one.aliases.items()}


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise ManifestInvalid(f"the manifests do not fit together: {what}")


def overlapping(boxes: Sequence[Box]) -> bool:
    """Whether any two boxes share an element. Sweeps along the dimension with the most cuts."""
    if len(boxes) < 2 or not boxes[0].shape:
        return len(boxes) > 1
    along = max(range(len(boxes[0].shape)), key=lambda dim: len({box.offsets[dim] for box in boxes}))
    open_now: list[Box] = []
    for box in sorted(boxes, key=lambda one: one.offsets[along]):
        start = box.offsets[along]
        open_now = [one for one in open_now if one.offsets[along] + one.shape[along] > start]
        if any(overlap(one, box) for one in open_now):
            return True
        open_now.append(box)
    return False


def parts(tensor: Tensor, target: Box, rank: int) -> list[PiecePart]:
    """The parts of pieces that fill `target`, each element once, for the process that takes the place of `rank`.

    Where that rank had stored its own content, that is used.
    """
    shared = ((one, overlap(one.box, target)) for one in tensor.stored)
    # guard: own-piece-preferred
    return [PiecePart(tensor.own.get((rank, one.box), one), box) for one, box in shared if box is not None]


# ---- division among holders ----------------------------------------------------------------------------------


class Held(NamedTuple):
    """A box of a tensor that several ranks hold with equal content."""

    name: str
    box: Box
    element_bytes: int

    @property
    def bytes(self) -> int:
        return self.box.elements * self.element_bytes


def shares(held: Sequence[Held], ways: int) -> list[list[Held]]:
    """Which boxes, or rows of them, each of `ways` holders writes: about the same number of bytes, in the order given.

    Every holder computes the same answer. A tensor is split between rows; a small one is not split. The first holder
    writes all tiny ones: who restores its own shards wants all of these, and reads a whole chunk for each.
    """
    found: list[list[Held]] = [[one for one in held if one.bytes <= TINY_BYTES], *([] for _ in range(ways - 1))]
    held = [one for one in held if one.bytes > TINY_BYTES]
    # Holder n writes the bytes from n / ways to (n + 1) / ways of all of them. To compare without rounding, positions
    # are multiplied by `ways` instead.
    total = sum(one.bytes for one in held)
    begin = 0  # position of the first byte of `one`
    for one in held:
        turn = min(begin * ways // total, ways - 1)
        height = one.box.shape[0] if one.box.shape and one.bytes >= LEAST_SPLIT_BYTES else 1
        row = 0
        while row < height:
            rest = total * (turn + 1) - begin * ways  # from the first byte of `one` to the end of this turn
            upto = height if rest >= one.bytes * ways else rest * height // (one.bytes * ways)
            if upto > row:
                found[turn].append(one if upto - row == height else _rows(one, row, upto))
            row, turn = upto, turn + 1
        begin += one.bytes
    return found


def _rows(one: Held, first: int, last: int) -> Held:
    box = one.box
    offsets = box.offsets[0] + first, *box.offsets[1:]
    return one._replace(box=Box(offsets, (last - first, *box.shape[1:])))

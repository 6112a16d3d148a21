"""How a window is divided among the ranks, and the part of a rank among its batches. Pure; knows no order, no cursor.

Invariants
  1. Every rank has the same number of batches in a window, none of them empty: each batch may need all ranks.
  2. Each sample of a window is in exactly one batch of one rank.
  3. With `weight`, the mean over the ranks of their summed gradients is the mean over the samples of the window.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import Refused


class Division(NamedTuple):
    """The batches of one rank in a window of `global_batch` samples."""

    global_batch: int
    rank: int
    world_size: int
    largest_batch: int | None
    """how many samples a batch may have; None: all that a rank has, as many as every other rank"""
    batches: int
    """how many batches each rank has in a window"""

    @property
    def part(self) -> slice:
        """Where the samples of this rank lie in the window."""
        first, size = _part(self.global_batch, self.world_size, self.rank)
        return slice(first, first + size)

    @property
    def slices(self) -> list[slice]:
        """Where each batch of this rank lies in the window."""
        first, size = _part(self.global_batch, self.world_size, self.rank)
        parts = [_part(size, self.batches, batch) for batch in range(self.batches)]
        return [slice(first + start, first + start + length) for start, length in parts]

    def weight(self, batch: int) -> float:
        """The weight of the mean loss of this rank's batch number `batch`, where the ranks average their gradients."""
        size = _part(self.global_batch, self.world_size, self.rank)[1]
        return _part(size, self.batches, batch)[1] * self.world_size / self.global_batch


def divided(global_batch: int, rank: int, world_size: int, largest_batch: int | None) -> Division:
    """The division for one rank; with `largest_batch=None` into one batch for each rank, all of one size.

    Raises Refused if that is impossible, or if a rank would have fewer batches than another.
    """
    if largest_batch is None:
        if global_batch % world_size:
            raise Refused(
                f"global_batch {global_batch} cannot be divided equally by world_size {world_size}",
                todo="Use a global batch that the world size divides, or give largest_batch, with which the batches "
                "have weights and may differ in size. The global batch stays the same on every world.",
            )
        return Division(global_batch, rank, world_size, None, 1)
    if world_size > global_batch:
        raise Refused(
            f"global_batch {global_batch} has fewer samples than there are ranks ({world_size})",
            todo="Use fewer ranks. The global batch stays the same on every world.",
        )
    largest = -(-global_batch // world_size)
    batches = -(-largest // largest_batch)
    if global_batch // world_size < batches:  # guard: equal-number-of-batches
        raise Refused(
            f"with largest_batch {largest_batch}, {world_size} ranks cannot have equally many batches of a "
            f"global_batch of {global_batch}: some ranks have {largest} samples, and others {largest - 1}",
            todo="Use a world size that divides the global batch, or a largest_batch of 2 or more.",
        )
    return Division(global_batch, rank, world_size, largest_batch, batches)


def _part(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of part number `index`; the first `size % parts` parts have one more than the others."""
    length, longer = divmod(size, parts)
    return index * length + min(index, longer), length + (index < longer)

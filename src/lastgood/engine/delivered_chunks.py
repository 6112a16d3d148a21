"""The chunks of one tensor file on their way into a sink: through a buffer, or read where the sink wants them.

Invariants
  1. A part is put into the sink once its chunk agrees with its digest.
  2. What is read in place is in the tensor before it is verified. So a chunk that is damaged, or cannot be read, leaves
     the tensor undefined, as a part of the state is after any load that has failed (run/candidates.py).
  3. Nothing is read in place until a chunk of the file was verified and put into the sink: a file that cannot be read,
     or has one chunk, changes nothing unless it is good.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..format.layout import Segment
from ..records import Piece
from .finite import not_finite

if TYPE_CHECKING:
    from .read_file import Check, Sink, UnfitTensors, VerifiedChunks

IN_PLACE_PARTS = 8
"""A chunk of more parts of tensors is read whole."""


class DeliveredChunks:
    """`read_file.Chunks`, verified. The thread that reads a chunk puts the parts of tensors in it into `sink`.

    `in_place`: it reads them where the sink wants them, if it can, which saves a pass over memory.
    """

    def __init__(
        self, verified: VerifiedChunks, check: Check, sink: Sink, unfit: UnfitTensors | None, in_place: bool
    ) -> None:
        self.blob = verified.blob
        self._verified, self._check, self._sink, self._unfit = verified, check, sink, unfit
        self._in_place, self._delivered = in_place, False
        self._elsewhere: dict[int, list[memoryview]] = {}
        """index -> where a chunk lies that was not read into its buffer"""

    def read(self, index: int, buffer: memoryview) -> memoryview:
        """As `read_file.Chunks.read`, but a chunk that is read in place is not in `buffer`: `taken` has its bytes."""
        parts = [one for one in self._check.parts[index] if one.length]
        # guard: first-chunk-through-buffer
        windows = self._windows(parts) if self._in_place and self._delivered else None
        if windows is not None:
            self._verified.read_into(index, windows)
            self._elsewhere[index] = windows
            for (tensor, *_), data in zip(parts, windows, strict=True):
                self._require_finite(self._check.pieces[tensor], data)
            return buffer
        chunk = self._verified.read(index, buffer)
        for tensor, start, at, length in parts:
            if tensor >= 0:  # -1 is the header
                piece, data = self._check.pieces[tensor], chunk[at : at + length]
                self._require_finite(piece, data)
                self._sink.put(piece.key, start, data)
                self._delivered = True
        return chunk

    def taken(self, index: int, data: memoryview) -> list[memoryview]:
        """The bytes of a chunk that was read, in order; called once for each. `data`: its buffer."""
        return self._elsewhere.pop(index, [data])

    def _windows(self, parts: Sequence[Segment]) -> list[memoryview] | None:
        """Where the sink wants the parts of one chunk; None where it does not want all, or they are many."""
        if len(parts) > IN_PLACE_PARTS or any(one.tensor < 0 for one in parts):
            return None
        found = [self._sink.window(self._check.pieces[tensor].key, start, length) for tensor, start, _, length in parts]
        windows = [one for one in found if one is not None]
        return windows if len(windows) == len(parts) else None

    def _require_finite(self, piece: Piece, data: memoryview) -> None:
        if self._unfit is not None and piece.finite and not_finite(piece.dtype, data):
            self._unfit.add(piece.name)  # guard: non-finite-found-on-load

"""Content digests of the tensors in an image, fed chunk by chunk. Moves nothing, decides nothing."""

from __future__ import annotations

from ..format.layout import Image, content_preamble
from ..io.checksum import ALGORITHMS, Hasher
from ..records import Extent, Piece


class Contents:
    """Digests of the tensors, fed from the chunks in order."""

    def __init__(self, image: Image, algorithm: str) -> None:
        self._image, self._new = image, ALGORITHMS[algorithm]
        self._seen = 0
        self._open: Hasher | None = None
        """of a tensor that began in an earlier chunk"""
        self.digests: list[str] = []
        """of the tensors that have ended, in the order of the image"""

    def see(self, chunk: memoryview) -> None:
        """The next bytes of the image, whatever their number. None may be left out."""
        low, high = self._seen, self._seen + len(chunk)
        tensors, new, preambles = self._image.tensors, self._new, dict[tuple[str, tuple[int, ...]], bytes]()
        for place in range(len(self.digests), len(tensors)):
            tensor, offset = tensors[place]
            end = tensors[place + 1][1] if place + 1 < len(tensors) else self._image.length
            if offset >= high and end > offset:
                break
            hasher, kind = self._open, tensor[1:3]
            if hasher is None:
                hasher = new()
                hasher.update(preambles.get(kind) or preambles.setdefault(kind, content_preamble(*kind)))
            hasher.update(chunk[max(offset, low) - low : end - low])
            if end > high:
                self._open = hasher
                break
            self.digests.append(hasher.hexdigest())
            self._open = None
        self._seen = high

    def pieces(self) -> list[Piece]:
        blob = self._image.blob
        ends = [*(offset for _, offset in self._image.tensors), self._image.length][1:]
        shapes: dict[tuple[int, ...], list[int]] = {}  # equal ones are kept once: they are never changed
        return [
            Piece(
                name=tensor.name,
                dtype=tensor.dtype,
                shape=shapes.get(tensor.shape) or shapes.setdefault(tensor.shape, list(tensor.shape)),
                extent=Extent(blob=blob, offset=offset, length=end - offset),
                digest=found,
                finite=tensor.finite,
                offsets=list(tensor.offsets),
                whole=list(tensor.whole),
                own=tensor.own,
            )
            for (tensor, offset), end, found in zip(self._image.tensors, ends, self.digests, strict=True)
        ]

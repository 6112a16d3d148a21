"""Content digests of the tensors in an image, fed chunk by chunk. Moves nothing, decides nothing."""

from __future__ import annotations

from ..format.layout import Image, Segment, content_hasher
from ..rawio.checksum import Hasher
from ..records import Extent, Piece


class Contents:
    """Digests of the tensors, fed from the chunks in order."""

    def __init__(self, image: Image, algorithm: str) -> None:
        self._image, self._algorithm = image, algorithm
        self._open: Hasher | None = None
        self.digests: list[str] = []
        """of the tensors that have ended, in the order of the image"""

    def see(self, buffer: memoryview, parts: list[Segment]) -> None:
        for place, start, at, length in parts:
            if place < 0:
                continue
            tensor = self._image.tensors[place][0]
            if start == 0:
                self._open = content_hasher(self._algorithm, tensor.dtype, tensor.shape)
            assert self._open is not None
            self._open.update(buffer[at : at + length])
            if start + length == tensor.length:
                self.digests.append(self._open.hexdigest())

    def pieces(self) -> list[Piece]:
        return [
            Piece(
                name=tensor.name,
                dtype=tensor.dtype,
                shape=list(tensor.shape),
                extent=Extent(blob=self._image.blob, offset=offset, length=tensor.length),
                digest=found,
            )
            for (tensor, offset), found in zip(self._image.tensors, self.digests, strict=True)
        ]

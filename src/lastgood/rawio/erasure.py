"""Reed-Solomon over equal cells: any `data` of `data + parity` cells give back the rest. Field arithmetic is zfec's.

Holds no layout; the first `data` cells of a code word are the data itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import Refused

CELLS_LIMIT = 256
"""of a code word: the field has so many elements"""


def _zfec() -> Any:
    try:
        import zfec  # type: ignore[import-untyped]
    except ImportError:
        raise Refused(
            "parity needs zfec, which is not installed",
            safe="Nothing was touched.",
            todo='pip install "lastgood[parity]"',
        ) from None
    return zfec


class Code:
    """`data` cells and `parity` more. Raises Refused where zfec is not installed."""

    def __init__(self, data: int, parity: int) -> None:
        self.data, self.parity = data, parity
        zfec = _zfec()
        self._encoder, self._decoder = zfec.Encoder(data, data + parity), zfec.Decoder(data, data + parity)
        self._spare = tuple(range(data, data + parity))

    def encode(self, cells: Sequence[memoryview]) -> list[bytes]:
        """The parity cells of `data` cells of one length. From any thread; the interpreter is free meanwhile."""
        return list(self._encoder.encode(tuple(cells), self._spare))

    def decode(self, there: Mapping[int, memoryview]) -> list[memoryview]:
        """All data cells, from at least `data` that are there, by number; parity cells follow the data's."""
        # zfec wants each data cell that is there at its own place, and parity cells in the gaps.
        spare = iter(number for number in sorted(there) if number >= self.data)
        numbers = [number if number in there else next(spare) for number in range(self.data)]
        cells: list[bytes] = self._decoder.decode(tuple(there[one] for one in numbers), tuple(numbers))
        return [memoryview(cell) for cell in cells]

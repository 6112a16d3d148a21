"""Reed-Solomon over equal cells: any `data` of `data + parity` cells give back the rest. Holds no layout.

The first `data` cells of a code word are the data itself. The field arithmetic is a library's: ISA-L where it is found
(io/isal.py), else zfec. Both make the same bytes, so either reads what the other wrote.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import Refused
from . import isal

CELLS_LIMIT = 256
"""of a code word: the field has so many elements"""


class Code:
    """`data` cells and `parity` more. Raises Refused where neither ISA-L nor zfec is installed."""

    def __init__(self, data: int, parity: int) -> None:
        self.data, self.parity = data, parity
        library = isal.library()
        self._engine = _Zfec(data, parity) if library is None else _Isal(library, data, parity)

    def encode(self, cells: Sequence[memoryview]) -> list[memoryview]:
        """The parity cells of `data` cells of one length. From any thread; the interpreter is free meanwhile."""
        return self._engine.encode(cells)

    def decode(self, there: Mapping[int, memoryview]) -> list[memoryview]:
        """All data cells, from at least `data` that are there, by number; parity cells follow the data's."""
        # Both engines want each data cell that is there at its own place, and parity cells in the gaps.
        spare = iter(number for number in sorted(there) if number >= self.data)
        numbers = [number if number in there else next(spare) for number in range(self.data)]
        return self._engine.decode(numbers, [there[one] for one in numbers])


class _Isal:
    """Matrices of the code, multiplied by ISA-L."""

    def __init__(self, library: ctypes.CDLL, data: int, parity: int) -> None:
        self._library = library
        spare = isal.systematic(library, data, parity)
        self._generator = np.concatenate([np.eye(data, dtype=np.uint8), spare])
        self._encoder = isal.Product(library, spare)

    def encode(self, cells: Sequence[memoryview]) -> list[memoryview]:
        return self._encoder.of(cells)

    def decode(self, numbers: Sequence[int], cells: Sequence[memoryview]) -> list[memoryview]:
        """The data cells, from the cells of these numbers: those that are missing are computed, and no others."""
        missing = [at for at, number in enumerate(numbers) if number != at]
        whole = list(cells)
        if missing:
            inverse = isal.invert(self._library, self._generator[list(numbers)])
            for at, cell in zip(missing, isal.Product(self._library, inverse[missing]).of(cells), strict=True):
                whole[at] = cell
        return whole


class _Zfec:
    """The same by zfec: no vector instructions, about a tenth of the speed."""

    def __init__(self, data: int, parity: int) -> None:
        zfec = _zfec()
        self._encoder, self._decoder = zfec.Encoder(data, data + parity), zfec.Decoder(data, data + parity)
        self._spare = tuple(range(data, data + parity))

    def encode(self, cells: Sequence[memoryview]) -> list[memoryview]:
        return [memoryview(cell) for cell in self._encoder.encode(tuple(cells), self._spare)]

    def decode(self, numbers: Sequence[int], cells: Sequence[memoryview]) -> list[memoryview]:
        return [memoryview(cell) for cell in self._decoder.decode(tuple(cells), tuple(numbers))]


def _zfec() -> Any:
    try:
        import zfec  # type: ignore[import-untyped]
    except ImportError:
        raise Refused(
            "parity needs ISA-L (which the package pyeclib brings) or zfec, and neither is installed",
            safe="Nothing was touched.",
            todo='pip install "lastgood[parity]"',
        ) from None
    return zfec

"""Reed-Solomon codes over cells of equal length: any `data` of the `data + parity` cells determine the others.

The first `data` cells of a code word are the data itself. A library does the field arithmetic: ISA-L if it is installed
(io/isal.py), otherwise zfec. Both compute the same bytes, so each decodes what the other one encoded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import BeyondRepair, Refused
from . import isal


class Code:
    """A code with `data` data cells and `parity` parity cells, at most limits.CODE_WORD_LIMIT together.

    Raises Refused if neither ISA-L nor zfec is installed. May be used from several threads.
    """

    def __init__(self, data: int, parity: int) -> None:
        self.data, self.parity = data, parity
        library = isal.library()
        self._engine = _Zfec(data, parity) if library is None else _Isal(library, data, parity)

    def encode(self, cells: Sequence[memoryview]) -> list[memoryview]:
        """The parity cells of `data` cells, which have the same length. Releases the interpreter's lock."""
        return self._engine.encode(cells)

    def decode(self, cells: Mapping[int, memoryview]) -> list[memoryview]:
        """All data cells, computed from at least `data` cells.

        `cells`: number -> cell. Data cells have the numbers below `data`, parity cells those from `data` on. Raises
        BeyondRepair for fewer than `data` cells.
        """
        if len(cells) < self.data:
            raise BeyondRepair(
                f"{len(cells)} cells of a code word are left, and {self.data} are needed", safe="Nothing was changed."
            )
        # Both libraries take each existing data cell at its own place, and a parity cell in place of a missing one.
        parity = iter(number for number in sorted(cells) if number >= self.data)
        numbers = [number if number in cells else next(parity) for number in range(self.data)]
        return self._engine.decode(numbers, [cells[one] for one in numbers])


class _Isal:
    """The code by matrix products of ISA-L."""

    def __init__(self, library: ctypes.CDLL, data: int, parity: int) -> None:
        self._library = library
        parity_rows = isal.systematic(library, data, parity)
        self._generator = np.concatenate([np.eye(data, dtype=np.uint8), parity_rows])
        self._encoder = isal.Product(library, parity_rows)

    def encode(self, cells: Sequence[memoryview]) -> list[memoryview]:
        return self._encoder.of(cells)

    def decode(self, numbers: Sequence[int], cells: Sequence[memoryview]) -> list[memoryview]:
        """All data cells, from the cells with these numbers. Only missing ones are computed."""
        missing = [at for at, number in enumerate(numbers) if number != at]
        whole = list(cells)
        if missing:
            inverse = isal.invert(self._library, self._generator[list(numbers)])
            for at, cell in zip(missing, isal.Product(self._library, inverse[missing]).of(cells), strict=True):
                whole[at] = cell
        return whole


class _Zfec:
    """The same code by zfec, which uses no vector instructions and has about a tenth of the speed."""

    def __init__(self, data: int, parity: int) -> None:
        zfec = _zfec()
        self._encoder, self._decoder = zfec.Encoder(data, data + parity), zfec.Decoder(data, data + parity)
        self._parity_numbers = tuple(range(data, data + parity))

    def encode(self, cells: Sequence[memoryview]) -> list[memoryview]:
        return [memoryview(cell) for cell in self._encoder.encode(tuple(cells), self._parity_numbers)]

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

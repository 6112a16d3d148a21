"""Intel's ISA-L, called through ctypes: products of a matrix over GF(2^8) with cells of bytes.

The library comes with the PyEClib wheel (`pip install lastgood[parity]`) or with Debian's package `libisal2`. Calls
release the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Sequence
from functools import cache
from importlib import metadata

import numpy as np

from ..limits import ISAL_CELL_LIMIT_BYTES

POLYNOMIAL = 0x11D
"""the polynomial of the field GF(2^8), the same as in zfec"""
TABLE_BYTES = 32
"""length of the multiplication table that ISA-L needs for each element of a matrix"""
_INT, _POINTER = ctypes.c_int, ctypes.c_void_p
_ARGUMENTS = {
    "ec_init_tables": (_INT, _INT, _POINTER, _POINTER),
    "ec_encode_data": (_INT, _INT, _INT, _POINTER, _POINTER, _POINTER),
    "gf_invert_matrix": (_POINTER, _POINTER, _INT),
}


@cache
def library() -> ctypes.CDLL | None:
    """The loaded library; None if neither PyEClib nor the system has it. The search runs once in a process."""
    try:
        files = metadata.files("pyeclib") or []
    except metadata.PackageNotFoundError:
        files = []
    bundled = [str(file.locate()) for file in files if file.name.startswith("libisal")]
    system = ctypes.util.find_library("isal")
    for path in (*bundled, *([system] if system else [])):
        try:
            loaded = ctypes.CDLL(path)
        except OSError:
            continue  # built for another machine: the next one is tried, and zfec if there is none
        if all(hasattr(loaded, name) for name in _ARGUMENTS):
            for name, types in _ARGUMENTS.items():
                getattr(loaded, name).argtypes = types
            return loaded
    return None


class Product:
    """Multiplies cells by one matrix, a uint8 array [outputs, inputs]. `of` may be called from several threads."""

    def __init__(self, isal: ctypes.CDLL, matrix: np.ndarray) -> None:
        self._isal, (self._outputs, self._inputs) = isal, matrix.shape
        self._tables = np.empty(TABLE_BYTES * matrix.size, np.uint8)
        plain = np.ascontiguousarray(matrix)
        isal.ec_init_tables(self._inputs, self._outputs, plain.ctypes.data, self._tables.ctypes.data)

    def of(self, cells: Sequence[memoryview]) -> list[memoryview]:
        """The product: one new cell for each row of the matrix.

        `cells`: one for each column, all of the same length, which is below 2 GiB. Raises ValueError otherwise, because
        ISA-L does not check it.
        """
        lengths = {cell.nbytes for cell in cells}
        if len(cells) != self._inputs or len(lengths) != 1 or max(lengths) >= ISAL_CELL_LIMIT_BYTES:
            raise ValueError(
                f"ISA-L needs {self._inputs} cells of one length below {ISAL_CELL_LIMIT_BYTES} bytes, and was "
                f"given {len(cells)} cells of {sorted(lengths)} bytes"
            )
        inputs = [np.frombuffer(cell, np.uint8) for cell in cells]
        made = np.empty((self._outputs, *lengths), np.uint8)
        outputs = list(made)
        self._isal.ec_encode_data(
            *lengths,
            self._inputs,
            self._outputs,
            self._tables.ctypes.data,
            _pointers(inputs),
            _pointers(outputs),
        )
        return [memoryview(row.data) for row in outputs]


def invert(isal: ctypes.CDLL, matrix: np.ndarray) -> np.ndarray:
    """The inverse of a square matrix. Raises ArithmeticError if there is none."""
    source, inverse = matrix.copy(), np.empty_like(matrix)  # ISA-L overwrites the source
    if isal.gf_invert_matrix(source.ctypes.data, inverse.ctypes.data, len(matrix)):
        raise ArithmeticError("a matrix of a Reed-Solomon code has no inverse")
    return inverse


def systematic(isal: ctypes.CDLL, data: int, parity: int) -> np.ndarray:
    """The parity rows of zfec's generator matrix: uint8 [parity, data].

    Sums and products are those of the field GF(2^8), whose elements are the bytes: a sum is an exclusive or, and a
    product is one of polynomials modulo POLYNOMIAL. Row 0 of zfec's Vandermonde matrix is (1, 0, 0, ...), row i + 1
    holds the powers of 2^i. The matrix is multiplied by the inverse of its first `data` rows. This makes its first
    rows the unit matrix, so that the data cells are part of the code word (zfec 1.x, fec.c, `fec_new`).
    """
    powers = [1]  # powers[n] is 2^n in the field; 2^255 is 1 again
    while len(powers) < 255:
        double = powers[-1] << 1
        powers.append(double ^ POLYNOMIAL if double & 0x100 else double)
    rows = [[1] + [0] * (data - 1)]
    rows += [[powers[row * column % 255] for column in range(data)] for row in range(data + parity - 1)]
    vandermonde = np.array(rows, np.uint8)
    inverse = invert(isal, np.ascontiguousarray(vandermonde[:data]))
    columns = Product(isal, vandermonde[data:]).of([memoryview(row.data) for row in inverse])
    return np.array([np.frombuffer(row, np.uint8) for row in columns])


def _pointers(arrays: Sequence[np.ndarray]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))

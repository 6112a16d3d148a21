"""Stripes: how the tensor files of a generation are cut in cells, and which of them share parity. Pure.

    the files, end to end:   | column 0 | column 1 | ... | column k-1 |      each of `rows` cells
    row r of parity:           cell r of every column -> m parity cells, one in each parity file

Neighbours stand in different rows, so that damage in one place (a bad region, a cut tail, zeros) takes at most one cell
of a row for each column that it reaches into: up to m / k of the whole state in one run, or as much of it scattered so
that no row loses more than m. A file's last cell is padded with zeros; cells that do not exist are zeros.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ..errors import ManifestInvalid, Refused
from ..io.checksum import HEX_LENGTH
from ..io.reed_solomon import CELLS_LIMIT
from ..records import Blob, Extent, Parity
from .layout import MANIFEST_LIMIT_BYTES, PAGE_BYTES

CELL_BYTES = 256 << 10
"""of a cell, at most: what is read, digested and encoded at once"""
CELL_LIMIT_BYTES = 256 << 20
CELLS_MOST = 1 << 20
"""of a generation, so that the digests of all fit into a record: larger states have larger cells"""
ROWS = 64
"""at least, where cells of a page allow it: so that damage in several places of a small state is in several rows"""


def parsed(text: str) -> tuple[int, int]:
    """Data and parity cells of a row, as "10+2" says them. Raises Refused."""
    found = re.fullmatch(r"(\d{1,3})\+(\d{1,3})", text)
    data, parity = (int(found[1]), int(found[2])) if found else (0, 0)
    if data < 1 or parity < 1 or data + parity > CELLS_LIMIT:  # guard: code-cell-limit
        raise Refused(
            f"parity={text!r}",
            safe="Nothing was touched.",
            todo=f'Give "10+2": data and parity cells of a row, {CELLS_LIMIT} at most together.',
        )
    return data, parity


def share(text: str) -> float:
    """What parity takes, as a share of what it protects."""
    data, parity = parsed(text)
    return parity / data


class Stripes(NamedTuple):
    """The cells of some files, in order, and their rows."""

    data: int
    parity: int
    cell_bytes: int
    cells: list[Extent]

    @property
    def rows(self) -> int:
        return -(-len(self.cells) // self.data)

    def row(self, row: int) -> list[int]:
        """Numbers of the data cells of a row; those past the last cell are zeros."""
        return [column * self.rows + row for column in range(self.data)]  # guard: adjacent-cells-in-different-rows

    @property
    def file_bytes(self) -> int:
        """Cells of one parity file."""
        return self.rows * self.cell_bytes


def stripes(blobs: Sequence[Blob], data: int, parity: int) -> Stripes:
    """How these files are cut."""
    cell_bytes = _cell_bytes(blobs, data)
    cells = [
        Extent(blob=blob.name, offset=start, length=min(cell_bytes, blob.length - start))
        for blob in blobs
        for start in range(0, blob.length, cell_bytes)
    ]
    return Stripes(data, parity, cell_bytes, cells)


def _pages(length: int) -> int:
    return -(-length // PAGE_BYTES) * PAGE_BYTES


def _cell_bytes(blobs: Sequence[Blob], data: int) -> int:
    total = sum(blob.length for blob in blobs)
    wished = min(CELL_BYTES, _pages(-(-total // (data * ROWS))))
    return max(wished, _pages(-(-total // CELLS_MOST)))


def parity_name(rank: int, index: int) -> str:
    """The file of one parity cell of every row; its record is beside it."""
    return f"r{rank:05d}.parity-{index}"


def record_name(rank: int, index: int) -> str:
    return parity_name(rank, index) + ".json"


_NAME = re.compile(r"r\d{5}\.parity-\d{1,3}(\.json)?")


def is_parity(name: str) -> bool:
    """Whether a file in a generation's folder is parity, or a record of it."""
    return _NAME.fullmatch(name) is not None


def is_record(name: str) -> bool:
    """Whether a file is a record of parity."""
    return is_parity(name) and name.endswith(".json")


def unfinished(names: Collection[str]) -> list[str]:
    """Parity files in a folder that never got their record."""
    return [name for name in names if is_parity(name) and not name.endswith(".json") and f"{name}.json" not in names]


def validate(record: Parity, name: str) -> None:
    """A record must make sense by itself, before anything is reserved or read on its word. Raises ManifestInvalid."""
    fits = record.data > 0 and record.parity > 0 and record.data + record.parity <= CELLS_LIMIT
    if (  # guard: parity-record-plausible
        not fits
        or not 0 <= record.index < record.parity
        or name != record_name(0, record.index)
        or record.digest not in HEX_LENGTH
        or record.cell_bytes % PAGE_BYTES
        or not PAGE_BYTES <= record.cell_bytes <= CELL_LIMIT_BYTES
        or not 0 <= record.manifest_bytes <= MANIFEST_LIMIT_BYTES
        or len(record.sums) != -(-len(record.cells) // record.data)
        or any(len(one) != HEX_LENGTH[record.digest] for one in (*record.cells, *record.sums))
    ):
        raise ManifestInvalid(f"{name} is no record of parity", blob=name)


def fitting(record: Parity, blobs: Sequence[Blob], where: str) -> Stripes:
    """The stripes that a validated record speaks of, which must be those of these files. Raises ManifestInvalid."""
    count = sum(-(-blob.length // record.cell_bytes) for blob in blobs)
    # guard: parity-record-fits-files
    if count != len(record.cells) or record.cell_bytes != _cell_bytes(blobs, record.data):
        raise ManifestInvalid(f"the parity of {where} does not fit the files beside it", blob=where)
    return stripes(blobs, record.data, record.parity)

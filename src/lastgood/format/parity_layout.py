"""How the tensor files of a generation are divided into cells, and which cells share parity. Pure.

    the files, end to end:   | column 0 | column 1 | ... | column k-1 |      each has `rows` cells
    row r of parity:           cell r of every column -> m parity cells, one in each parity file

Adjacent cells are in different rows. So damage in one place (a bad region, a cut tail, zeros) affects at most one cell
of a row for each column that it reaches into: up to m / k of the whole state in one place can be rebuilt, or as much of
it in many places as long as no row loses more than m cells. The last cell of a file is padded with zeros; cells past
the last one count as zeros.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ..errors import ManifestInvalid, Refused
from ..io.checksum import HEX_LENGTH
from ..limits import (
    CELL_BYTES,
    CELL_COUNT_LIMIT,
    CELL_LIMIT_BYTES,
    CODE_WORD_LIMIT,
    MANIFEST_LIMIT_BYTES,
    PAGE_BYTES,
)
from ..records import Blob, Extent, Parity

ROWS = 64
"""a small state has about this many rows, so that damage in several places affects different rows; fewer where
cells are rounded up to whole pages"""


def parsed(text: str) -> tuple[int, int]:
    """The data and parity cells of a row, from a text such as "10+2". Raises Refused."""
    found = re.fullmatch(r"(\d{1,3})\+(\d{1,3})", text)
    data, parity = (int(found[1]), int(found[2])) if found else (0, 0)
    if data < 1 or parity < 1 or data + parity > CODE_WORD_LIMIT:  # guard: code-cell-limit
        raise Refused(
            f"parity={text!r}",
            safe="Nothing was touched.",
            todo=f'Give "10+2": data and parity cells of a row, {CODE_WORD_LIMIT} together at most.',
        )
    return data, parity


def is_code(data: int, parity: int) -> bool:
    """Whether there is a code with so many data and parity cells."""
    return data > 0 and parity > 0 and data + parity <= CODE_WORD_LIMIT


def share(text: str) -> float:
    """The size of the parity as a share of what it protects: 0.2 for "10+2"."""
    data, parity = parsed(text)
    return parity / data


class Grid(NamedTuple):
    """The cells of some files, in columns and rows."""

    data: int
    """data cells of a row, which is also the number of columns"""
    parity: int
    """parity cells of a row"""
    cell_bytes: int
    cells: list[Extent]
    """all data cells, file by file, column by column"""

    @property
    def rows(self) -> int:
        """The number of rows."""
        return -(-len(self.cells) // self.data)

    def row(self, row: int) -> list[int]:
        """The numbers of the data cells of a row. Numbers past the last cell stand for zeros."""
        return [column * self.rows + row for column in range(self.data)]  # guard: adjacent-cells-in-different-rows

    @property
    def file_bytes(self) -> int:
        """The length of the cells of one parity file."""
        return self.rows * self.cell_bytes


def grid(blobs: Sequence[Blob], data: int, parity: int) -> Grid:
    """The cells of these files, for a code of `data` + `parity` cells."""
    cell_bytes = _cell_bytes(blobs, data)
    cells = [
        Extent(blob=blob.name, offset=start, length=min(cell_bytes, blob.length - start))
        for blob in blobs
        for start in range(0, blob.length, cell_bytes)
    ]
    return Grid(data, parity, cell_bytes, cells)


def _pages(length: int) -> int:
    return -(-length // PAGE_BYTES) * PAGE_BYTES


def _cell_bytes(blobs: Sequence[Blob], data: int) -> int:
    total = sum(blob.length for blob in blobs)
    usual = min(CELL_BYTES, _pages(-(-total // (data * ROWS))))
    return max(usual, _pages(-(-total // CELL_COUNT_LIMIT)))


def parity_name(rank: int, index: int) -> str:
    """The name of the parity file `index` of the files of one rank. It holds one parity cell of every row."""
    return f"r{rank:05d}.parity-{index}"


def record_name(rank: int, index: int) -> str:
    """The name of the record of a parity file."""
    return parity_name(rank, index) + ".json"


_NAME = re.compile(r"r(\d{5})\.parity-\d{1,3}(\.json)?")


def is_parity(name: str) -> bool:
    """Whether a file in a generation's folder is a parity file or the record of one."""
    return rank_of(name) is not None


def rank_of(name: str) -> int | None:
    """The rank whose files a parity file or its record protects; None for another file."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def is_record(name: str) -> bool:
    """Whether a file is the record of a parity file."""
    return is_parity(name) and name.endswith(".json")


def unfinished(names: Collection[str]) -> list[str]:
    """The parity files in a folder that have no record, because their writer crashed."""
    return [name for name in names if is_parity(name) and not name.endswith(".json") and f"{name}.json" not in names]


def validate(record: Parity, name: str, rank: int) -> None:
    """Check a record of a rank's parity by itself, before memory is reserved or anything is read because of it.

    Raises ManifestInvalid.
    """
    if (  # guard: parity-record-plausible
        not is_code(record.data, record.parity)
        or not 0 <= record.index < record.parity
        or name != record_name(rank, record.index)
        or record.digest not in HEX_LENGTH
        or record.cell_bytes % PAGE_BYTES
        or not PAGE_BYTES <= record.cell_bytes <= CELL_LIMIT_BYTES
        or not 0 <= record.manifest_bytes <= MANIFEST_LIMIT_BYTES
        or len(record.sums) != -(-len(record.cells) // record.data)
        or any(len(one) != HEX_LENGTH[record.digest] for one in (*record.cells, *record.sums))
    ):
        raise ManifestInvalid(f"{name} is not a record of parity", blob=name)


def grid_of(record: Parity, blobs: Sequence[Blob], where: str) -> Grid:
    """The cells that a validated record describes, which must be those of these files. Raises ManifestInvalid."""
    count = sum(-(-blob.length // record.cell_bytes) for blob in blobs)
    # guard: parity-record-fits-files
    if count != len(record.cells) or record.cell_bytes != _cell_bytes(blobs, record.data):
        raise ManifestInvalid(f"the parity of {where} does not fit the files beside it", blob=where)
    return grid(blobs, record.data, record.parity)

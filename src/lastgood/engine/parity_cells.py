"""Reads the data cells of a generation row by row, each checked against its digest."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import Executor, Future

from ..errors import Damaged
from ..format.parity_layout import Grid
from ..io.checksum import digest
from ..ports import Tier
from ..records import Extent
from .arena import Arena

Rows = Generator[tuple[int, list[memoryview | None]], None, None]
"""row by row: its number, and its data cells, with None for a damaged one; valid until the next row is taken"""


def read_rows(
    tier: Tier,
    folder: str,
    grid: Grid,
    algorithm: str,
    digests: Sequence[str],
    readers: Executor,
) -> Rows:
    """The data cells of each row, in order. The next row is read while the caller processes one."""
    size = grid.cell_bytes
    memory = Arena(2 * grid.data * size, size).memory()

    def begin(row: int) -> list[Future[memoryview | None]]:
        first = row % 2 * grid.data
        return [
            readers.submit(_cell, tier, folder, grid, algorithm, digests, number, memory[at * size : (at + 1) * size])
            for at, number in enumerate(grid.row(row), first)
        ]

    flying = begin(0)
    ahead: list[Future[memoryview | None]] = []
    try:
        for row in range(grid.rows):
            ahead = begin(row + 1) if row + 1 < grid.rows else []
            yield row, [job.result() for job in flying]
            flying, ahead = ahead, []
    finally:
        for job in (*flying, *ahead):
            job.exception()  # waits: no reader may write into the memory after the return


def _cell(
    tier: Tier, folder: str, grid: Grid, algorithm: str, digests: Sequence[str], number: int, view: memoryview
) -> memoryview | None:
    """A data cell, read into `view` and padded with zeros; None if it is damaged."""
    if number >= len(grid.cells):
        view[:] = bytes(len(view))  # guard: absent-cells-are-zero
        return view
    extent = grid.cells[number]
    place = Extent(blob=f"{folder}/{extent.blob}", offset=extent.offset, length=extent.length)
    try:
        tier.read_into(place, view, fresh=True)
    except Damaged:
        return None
    view[extent.length :] = bytes(len(view) - extent.length)  # guard: cell-padding-is-zero
    # guard: only-verified-cells-used
    return view if digest(algorithm, view[: extent.length]) == digests[number] else None

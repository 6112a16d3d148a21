"""The file that holds the table of a slot tier: two areas of equal length, which are written in turn.

Invariants
  1. `possible` holds every table that may be found after a crash at this moment: `newest`, which is durable, and each
     table written after it whose outcome is not known.
  2. A record overwrites the area that does not hold the newest durable record, and only while that table is the only
     one in `possible`. So after a torn write the newest durable record is the whole one with the highest sequence.
  3. A new file is written, and renamed over the old one, for the first record of an opening, for a record that is
     longer than its area, and for the first record after a failed write or sync. So a file whose sync failed is never
     synced again, and the table that an opening found is durable from then on, even if its writer crashed before its
     sync.
  4. The file has held a durable record ever since it got its name: a file without one is damaged, not new.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable
from typing import Any

from ..errors import CommitUnknown, SumMismatch, Truncated
from ..io.files import round_up, write_all
from ..io.os_errors import FULL
from ..limits import DIRECT_IO_BYTES, TABLE_AREA_BYTES
from ..ports import Files
from ..records import Extent
from .directory import Disk
from .slot_table import ENVELOPE, Record, Table, area_bytes, body_bytes, decode, encode, whole

READ_ATTEMPTS = 3
"""of a reader, while a writer overwrites one area after the other, until one area is whole"""

TABLE_LOST: Any = {
    "safe": "Nothing was changed: the slots may hold a step that no other place has.",
    "todo": "If another place of the run has what you need, move the folder `slots` away; it is made anew. Else give "
    "the run another path, or continue it from a copy.",
}


class TableFile:
    """The table's file, `name` on `disk`: for one writer, whose calls are serialized, or for readers.

    Each method raises OSError as well as what its docstring says.
    """

    def __init__(self, files: Files, disk: Disk, name: str, *, direct: bool) -> None:
        self._files, self._disk, self._name, self._direct = files, disk, name, direct
        self._path = f"{disk.place}/{name}"
        self.newest = Table()
        self.possible: list[Table] = []
        self._sequence = 0
        self._area_bytes = 0  # 0: the next record begins a new file
        self._area = 0

    def read(self) -> Table | None:
        """The table on the medium; None if there is no file. Raises Damaged, UnknownFormat."""
        found = self._newest_record()
        return decode(found, self._path) if found else None

    def take_over(self) -> None:
        """Make the table that is found durable, before anything relies on it. Raises as `read` and `write` do."""
        found = self._newest_record()
        if found:
            self._sequence, self.newest = found.sequence, decode(found, self._path)  # guard: table-sequence-continues
        self.possible = [self.newest]
        self.write(self.newest)  # guard: found-table-made-durable

    def write(self, table: Table) -> None:
        """Make `table` the newest durable one. Raises OSError if it is not durable, CommitUnknown if it may be."""
        self._sequence += 1  # guard: table-sequence-ascends
        data = encode(table, self._sequence)
        area_is_safe = len(self.possible) == 1 and len(data) <= self._area_bytes  # guard: table-area-is-safe
        try:
            if area_is_safe:
                self._overwrite(table, data)
            else:
                self._replace(table, data)
        except OSError as error:
            if self.possible[-1] is table and error.errno not in FULL:  # guard: table-outcome-unknown
                raise CommitUnknown(
                    f"{self._path}: {error.strerror or error}; the record may or may not be durable",
                    safe="Nothing was deleted, and no slot that the record names is overwritten.",
                    todo="The next opening of the run reads the record and decides by it.",
                ) from error
            raise
        self.newest, self.possible = table, [table]

    # ---- steps ---------------------------------------------------------------------------------------------

    def _overwrite(self, table: Table, data: bytes) -> None:
        file = self._files.open(self._path, "write", direct=self._direct)
        try:
            self.possible.append(table)  # guard: overwritten-table-possible
            page, at = aligned(data), self._area * self._area_bytes
            # A short write may have written the whole record, and lack only its padding. So the table may be found
            # after a crash, and a failure of the rest of the write has an unknown outcome.
            if file.write_at(page, at) < len(page):
                _unknown_if_failed(lambda: write_all(file, page, at))  # guard: partial-table-write-unknown
            _unknown_if_failed(file.sync)  # guard: table-content-synced
        finally:
            file.close()
        self._area = 1 - self._area  # guard: table-areas-alternate

    def _replace(self, table: Table, data: bytes) -> None:
        area = area_bytes(len(data), TABLE_AREA_BYTES)
        staged = f"{self._path}.tmp"
        self._disk._write_staged(staged, data + bytes(2 * area - len(data)))
        self.possible.append(table)  # guard: replaced-table-possible
        self._files.rename(staged, self._path)
        _unknown_if_failed(lambda: self._files.sync_dir(self._path.rpartition("/")[0]))  # guard: table-name-synced
        self._area_bytes, self._area = area, 1  # guard: new-table-file-next-area

    def _newest_record(self) -> Record | None:
        folder, _, name = self._path.rpartition("/")
        for _ in range(READ_ATTEMPTS):
            try:
                names = self._files.list(folder)
            except FileNotFoundError:
                return None
            if name not in names:
                return None
            area = (names[name] or 0) // 2 // DIRECT_IO_BYTES * DIRECT_IO_BYTES
            found = [one for at in (0, area) if (one := self._record_at(at, area))]
            if found:
                return max(found, key=lambda one: one.sequence)  # guard: newest-table-record-wins
        raise SumMismatch(  # guard: damaged-table-refused
            f"both records of {self._path} are damaged, so the contents of the slots are unknown",
            blob=self._path,
            **TABLE_LOST,
        )

    def _record_at(self, at: int, room: int) -> Record | None:
        if room < DIRECT_IO_BYTES:
            return None
        try:
            page = self._read(at, DIRECT_IO_BYTES)
            length = body_bytes(page, room)
            if length is None:
                return None
            end = ENVELOPE.size + length
            return whole(page[:end] if end <= len(page) else self._read(at, end))
        except Truncated:  # the file was replaced by a shorter one meanwhile
            return None

    def _read(self, at: int, length: int) -> bytes:
        page = aligned(bytes(length))
        self._disk.read_into(Extent(blob=self._name, offset=at, length=length), page, fresh=True)
        return bytes(page[:length])


def _unknown_if_failed(call: Callable[[], None]) -> None:
    """Run a sync, or the second part of a write; raise every error as EIO.

    After such a failure, even for lack of space, nothing is known about what is durable.
    """
    try:
        call()
    except OSError as error:
        raise OSError(errno.EIO, error.strerror) from error  # guard: sync-without-space-is-unknown


def aligned(data: bytes) -> memoryview:
    """A copy of `data` for direct I/O: page-aligned, and padded with zeros to whole pages."""
    memory = mmap.mmap(-1, max(round_up(len(data)), DIRECT_IO_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[: len(data)] = data
    return memoryview(memory)

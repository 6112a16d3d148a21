"""The file that holds the table of a slot tier: two areas of one length, written in turn. Knows no slot, no meaning.

Invariants
  1. `possible` holds every table that a crash right now may bring up: `newest`, which is durable, and each one written
     after it whose outcome is not known.
  2. A record goes over the area that does not hold the newest durable one, and only while that one is alone in
     `possible`. So a torn record leaves the newest durable one as the highest that is whole.
  3. The first opening for writing, a record that is too long, and the first one after a write or a sync failed begin a
     new file, which is renamed over the old one. So a file whose sync failed is never synced again; and what an opening
     found is durable from then on, although whoever wrote it may have died, or failed, before it was.
  4. A file under this name has held a durable record from its first instant: one without any is damaged, not new.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable

from ..errors import CommitUnknown, SumMismatch, Truncated
from ..io.files import BLOCK_BYTES, round_up
from ..ports import Files
from ..records import Extent
from .directory import _FULL, Disk, _write_all
from .slot_table import ENVELOPE, Record, Table, area_bytes, body_bytes, decode, encode, whole

AREA_BYTES = 64 << 10
"""the least; a longer record makes longer areas"""
LOOKS = 3
"""at a file that is being written, one area after the other, until one of them is whole"""


class TableFile:
    """The table, a file of that name on a disk. One writer, or any number of readers."""

    def __init__(self, files: Files, disk: Disk, name: str, *, direct: bool) -> None:
        self._files, self._disk, self._name, self._direct = files, disk, name, direct
        self._path = f"{disk.place}/{name}"
        self.newest = Table()
        self.possible: list[Table] = []
        self._sequence = 0
        self._area_bytes = 0  # 0: the next record begins a new file
        self._area = 0

    def look(self) -> Table | None:
        """The table as the medium has it; None where there is no file. Raises OSError, Damaged, UnknownFormat."""
        found = self._newest_record()
        return decode(found, self._path) if found else None

    def own(self) -> None:
        """Make durable what is found, before anything may rest on it."""
        found = self._newest_record()
        if found:
            self._sequence, self.newest = found.sequence, decode(found, self._path)  # guard: table-sequence-continues
        self.possible = [self.newest]
        self.write(self.newest)  # guard: found-table-made-durable

    def write(self, table: Table) -> None:
        """Make `table` the newest durable one. Raises OSError where it surely is not, CommitUnknown where it may be."""
        self._sequence += 1  # guard: table-sequence-ascends
        data = encode(table, self._sequence)
        area_is_safe = len(self.possible) == 1 and len(data) <= self._area_bytes  # guard: table-area-is-safe
        try:
            if area_is_safe:
                self._overwrite(table, data)
            else:
                self._replace(table, data)
        except OSError as error:
            if self.possible[-1] is table and error.errno not in _FULL:  # guard: table-outcome-unknown
                raise CommitUnknown(
                    f"{self._path}: {error.strerror or error}; it may or may not have become durable",
                    safe="Nothing was deleted, and nothing of it is overwritten.",
                    todo="The next opening of the run reads it and knows.",
                ) from error
            raise
        self.newest, self.possible = table, [table]

    # ---- steps ---------------------------------------------------------------------------------------------

    def _overwrite(self, table: Table, data: bytes) -> None:
        file = self._files.open(self._path, "write", direct=self._direct)
        try:
            self.possible.append(table)  # guard: overwritten-table-possible
            page, at = aligned(data), self._area * self._area_bytes
            if file.write_at(page, at) < len(page):  # what was taken may be the whole record: the rest is padding
                _settled(lambda: _write_all(file, page, at))  # guard: partial-table-write-unknown
            _settled(file.sync)  # guard: table-content-synced
        finally:
            file.close()
        self._area = 1 - self._area  # guard: table-areas-alternate

    def _replace(self, table: Table, data: bytes) -> None:
        area = area_bytes(len(data), AREA_BYTES)
        staged = f"{self._path}.tmp"
        self._disk._write_staged(staged, data + bytes(2 * area - len(data)))
        self.possible.append(table)  # guard: replaced-table-possible
        self._files.rename(staged, self._path)
        _settled(lambda: self._files.sync_dir(self._path.rpartition("/")[0]))  # guard: table-name-synced
        self._area_bytes, self._area = area, 1  # guard: new-table-file-next-area

    def _newest_record(self) -> Record | None:
        folder, _, name = self._path.rpartition("/")
        for _ in range(LOOKS):
            try:
                names = self._files.list(folder)
            except FileNotFoundError:
                return None
            if name not in names:
                return None
            area = (names[name] or 0) // 2 // BLOCK_BYTES * BLOCK_BYTES
            found = [one for at in (0, area) if (one := self._record_at(at, area))]
            if found:
                return max(found, key=lambda one: one.sequence)  # guard: newest-table-record-wins
        raise SumMismatch(  # guard: damaged-table-refused
            f"both records of {self._path} are damaged: what the slots beside it hold is not known any more",
            blob=self._path,
            safe="Nothing was changed.",
            todo="Give the run another path, or take it up again from a copy.",
        )

    def _record_at(self, at: int, room: int) -> Record | None:
        if room < BLOCK_BYTES:
            return None
        try:
            page = self._read(at, BLOCK_BYTES)
            length = body_bytes(page, room)
            if length is None:
                return None
            end = ENVELOPE.size + length
            return whole(page[:end] if end <= len(page) else self._read(at, end))
        except Truncated:  # it was replaced by a shorter one
            return None

    def _read(self, at: int, length: int) -> bytes:
        page = aligned(bytes(length))
        self._disk.read_into(Extent(blob=self._name, offset=at, length=length), page, fresh=True)
        return bytes(page[:length])


def _settled(call: Callable[[], None]) -> None:
    """A sync that failed, for want of space too, says nothing about what is durable; nor the second half of a write."""
    try:
        call()
    except OSError as error:
        raise OSError(errno.EIO, error.strerror) from error  # guard: sync-without-space-is-unknown


def aligned(data: bytes) -> memoryview:
    """A copy that direct I/O takes: page-aligned, and filled up with zeros to whole pages."""
    memory = mmap.mmap(-1, max(round_up(len(data)), BLOCK_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[: len(data)] = data
    return memoryview(memory)

"""The files of the slots: numbered, preallocated, overwritten in place.

Invariants
  1. Before a save writes to a slot, the slot has its full length and was written once from end to end.
  2. After a failed write, sync or creation a slot is spoiled: its file is neither written nor synced again, and the
     slot gets a new file before its next use. The name of the new file is durable before a record names the slot.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator, Sequence

from ..io.files import write_all
from ..limits import DIRECT_IO_BYTES
from ..ports import File, Files
from .slot_file import aligned

ZERO_BYTES = 4 << 20
"""length of one write while a new slot is filled with zeros"""

_SLOT = re.compile(r"[0-9]{2}")


class Pool:
    """The slots in `folder`, an absolute path. Every method may raise OSError."""

    def __init__(self, files: Files, folder: str, *, direct: bool) -> None:
        self._files, self._folder, self._direct = files, folder, direct
        self._spoiled: dict[int, int] = {}  # slot -> errno of the failure

    def lengths(self) -> dict[int, int]:
        """The existing slots and their lengths in bytes."""
        try:
            found = self._files.list(self._folder)
        except FileNotFoundError:
            return {}
        return {int(name): size for name, size in found.items() if _SLOT.fullmatch(name) and size is not None}

    def open(self, slot: int) -> File:
        return self._files.open(self._path(slot), "write", direct=self._direct)

    def write(self, slot: int, file: File, mv: memoryview, offset: int) -> None:
        """Write all of `mv`. A failure spoils the slot, because through a mapping a write is also a sync."""
        self.need_sound(slot)  # guard: spoiled-slot-not-written
        with self._spoiling(slot):  # guard: failed-write-spoils-slot
            write_all(file, mv, offset)

    def sync(self, slot: int, file: File) -> None:
        """Make the content of the slot durable."""
        with self._spoiling(slot):  # guard: failed-sync-spoils-slot
            file.sync()

    def need_sound(self, slot: int) -> None:
        """Raise OSError, with the errno of the failure, if an earlier write or sync of this slot failed."""
        if slot in self._spoiled:
            raise OSError(self._spoiled[slot], "an earlier write or sync of this slot failed", self._path(slot))

    def prepare(self, slots: Sequence[int], need_bytes: int) -> int:
        """Make all of `slots` at least `need_bytes` long, unless the first one is; returns the length of the first.

        `slots` are those that are free. They grow together, so that the next saves allocate nothing; a slot that is in
        use grows when it is free and a save needs it. Space is reserved in all of them before a byte is
        written to any; if that fails, the slots keep their old lengths. Then the new space is filled with zeros,
        because the first write to a block that is only reserved costs a journal transaction.
        """
        if slots[0] not in self._spoiled:
            with contextlib.suppress(FileNotFoundError), contextlib.closing(self.open(slots[0])) as file:
                if (had_bytes := file.size()) >= need_bytes:
                    return had_bytes
        existing = self.lengths()
        grown: list[tuple[int, File, int | None]] = []
        try:
            for slot in slots:
                had = existing.get(slot)
                if slot in self._spoiled and had is not None:  # guard: spoiled-slot-replaced
                    self._files.remove(self._path(slot))
                    had = None
                self._spoiled.pop(slot, None)
                if had is None:
                    grown.append((slot, self._files.open(self._path(slot), "new", direct=self._direct), None))
                elif had < need_bytes:
                    grown.append((slot, self.open(slot), had))
                else:
                    continue
                grown[-1][1].reserve(need_bytes)  # guard: slot-space-reserved
            for _, file, had in grown:
                self._fill(file, had or 0, need_bytes)  # guard: slot-zeroed-before-use
                file.sync()  # guard: new-slot-synced
            self._files.sync_dir(self._folder)  # guard: slot-names-synced
        except OSError as error:
            for slot, file, had in grown:
                with contextlib.suppress(OSError):  # as far as possible: nothing is lost with it
                    # guard: failed-growth-undone
                    self._files.remove(self._path(slot)) if had is None else file.resize(had)
                # guard: failed-growth-spoils-slot
                self._spoiled[slot] = error.errno or errno.EIO  # a file that remains may have no durable name
            raise
        finally:
            for _, file, _ in grown:
                file.close()
        return need_bytes

    @contextlib.contextmanager
    def _spoiling(self, slot: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._spoiled[slot] = error.errno or errno.EIO
            raise

    def _fill(self, file: File, start: int, end: int) -> None:
        zeros = aligned(bytes(min(ZERO_BYTES, end)))
        for at in range(start // DIRECT_IO_BYTES * DIRECT_IO_BYTES, end, len(zeros)):
            write_all(file, zeros[: end - at], at)

    def _path(self, slot: int) -> str:
        return f"{self._folder}/{slot:02d}"

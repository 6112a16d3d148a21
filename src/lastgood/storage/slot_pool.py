"""The files of the slots: numbered, preallocated, overwritten in place. Knows which are there, never what they hold.

Invariants
  1. A slot is as long as it was asked to be, and written once from end to end, before a save writes to it.
  2. A slot with a write or sync that failed, or that could not be made, is a new file before it is written again: its
     old one is never synced anew, and its name is durable before a record tells of it.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator, Sequence

from ..io.files import BLOCK_BYTES
from ..ports import File, Files
from .directory import _write_all
from .slot_file import aligned

ZERO_BYTES = 4 << 20

_SLOT = re.compile(r"[0-9]{2}")


class Pool:
    """The slots in a folder. Raises OSError."""

    def __init__(self, files: Files, home: str, *, direct: bool) -> None:
        self._files, self._home, self._direct = files, home, direct
        self._spoiled: set[int] = set()

    def lengths(self) -> dict[int, int]:
        """Slots that are there, and their lengths."""
        try:
            found = self._files.list(self._home)
        except FileNotFoundError:
            return {}
        return {int(name): size for name, size in found.items() if _SLOT.fullmatch(name) and size is not None}

    def open(self, slot: int) -> File:
        return self._files.open(self._path(slot), "write", direct=self._direct)

    def write(self, slot: int, file: File, mv: memoryview, offset: int) -> None:
        """All of `mv`. A slot where that failed is made anew before it is used: through a mapping a write is a sync."""
        with self._spoiling(slot):  # guard: failed-write-spoils-slot
            _write_all(file, mv, offset)

    def sync(self, slot: int, file: File) -> None:
        with self._spoiling(slot):  # guard: failed-sync-spoils-slot
            file.sync()

    def need_sound(self, slot: int) -> None:
        if slot in self._spoiled:
            raise OSError(errno.EIO, "an earlier write or sync of this slot failed", self._path(slot))

    def prepare(self, slots: Sequence[int], need_bytes: int) -> int:
        """Make the first of `slots` at least so long, and with it the others, so that no later save allocates.

        Space is reserved in all of them before a byte is written to any; where it cannot be, nothing is kept of it.
        Then they are filled with zeros: to write a block first that is only reserved takes a transaction of the
        journal. Returns the length of the first.
        """
        if slots[0] not in self._spoiled:
            with contextlib.suppress(FileNotFoundError), contextlib.closing(self.open(slots[0])) as file:
                if (had_bytes := file.size()) >= need_bytes:
                    return had_bytes
        there = self.lengths()
        grown: list[tuple[int, File, int | None]] = []
        try:
            for slot in slots:
                had = there.get(slot)
                if slot in self._spoiled and had is not None:  # guard: spoiled-slot-replaced
                    self._files.remove(self._path(slot))
                    had = None
                self._spoiled.discard(slot)
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
            self._files.sync_dir(self._home)  # guard: slot-names-synced
        except OSError:
            for slot, file, had in grown:
                with contextlib.suppress(OSError):  # as far as possible: it holds nothing
                    # guard: failed-growth-undone
                    self._files.remove(self._path(slot)) if had is None else file.resize(had)
                # guard: failed-growth-spoils-slot
                self._spoiled.add(slot)  # what stays of it may have no durable name
            raise
        finally:
            for _, file, _ in grown:
                file.close()
        return need_bytes

    @contextlib.contextmanager
    def _spoiling(self, slot: int) -> Iterator[None]:
        try:
            yield
        except OSError:
            self._spoiled.add(slot)
            raise

    def _fill(self, file: File, start: int, end: int) -> None:
        zeros = aligned(bytes(min(ZERO_BYTES, end)))
        for at in range(start // BLOCK_BYTES * BLOCK_BYTES, end, len(zeros)):
            _write_all(file, zeros[: end - at], at)

    def _path(self, slot: int) -> str:
        return f"{self._home}/{slot:02d}"

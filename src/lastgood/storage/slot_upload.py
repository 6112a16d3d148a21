"""The upload of one file into a slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..io.files import round_up
from ..ports import File
from .slot_draft import Draft

if TYPE_CHECKING:
    from .slots import Slots


class SlotUpload:
    """`ports.Upload`: a range of a slot that no record names yet."""

    def __init__(self, slots: Slots, folder: str, draft: Draft, file: str, slot: File, start: int) -> None:
        self._slots, self._folder, self._draft, self._file = slots, folder, draft, file
        self._slot, self._start = slot, start
        self._extent = draft.extents[file]

    def write_at(self, mv: memoryview, offset: int) -> None:
        assert offset + len(mv) <= round_up(self._extent[1]), "past the end of the blob"
        with self._slots._disk._translated(f"gen/{self._folder}/{self._file}"):
            self._slots._pool.write(self._draft.slot, self._slot, mv, self._start + offset)

    def finish(self) -> None:
        """Do nothing: the folder's next record makes the slot durable."""

    def abort(self) -> None:
        with self._slots._lock:
            if self._draft.extents.get(self._file) == self._extent:
                self._slots._forget(self._folder, self._draft, self._file)  # guard: aborted-file-forgotten

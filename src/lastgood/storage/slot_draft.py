"""A folder of a slot tier that is being written: its slot, and where its files are in it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from ..io.files import round_up
from ..ports import File


@dataclass
class Draft:
    """A folder that is not committed yet, and its slot."""

    slot: int
    slot_bytes: int
    files: list[File]
    """open files of the slot; it is opened again when it grows, because a mapping of a file keeps its length"""
    extents: dict[str, tuple[int, int]] = field(default_factory=dict)
    """file -> offset in the slot and length, in bytes"""
    dirty: bool = True
    """whether a file was added since the last sync of the slot; then a commit syncs it first"""
    doubtful: bool = False
    """whether the slot is free once no commit of the folder can exist: its commit failed or has an unknown outcome,
    or the folder is being deleted"""
    turn: threading.Lock = field(default_factory=threading.Lock)
    """held while a record is written into the slot, so that records are written one after the other"""

    @property
    def end(self) -> int:
        """The first free offset in the slot."""
        return max((start + round_up(length) for start, length in self.extents.values()), default=0)

"""Reads a generation that training may delete meanwhile. That it is gone then is no damage.

In memory its files stay open while it is read. An open file is locked, so no later save uses its memory again
(io/reused_files.py): the generation can be read to its end after it was deleted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

from ..errors import Cancelled, Damaged
from ..format import folders, layout
from ..io.files import PosixFile
from ..io.memory_files import MemoryFile, MemoryFiles
from ..ports import OpenMode, Tier
from ..records import GenerationId
from ..storage.directory import Disk
from . import memory_place, paths


@contextlib.contextmanager
def kept(tier: Tier, at: GenerationId) -> Iterator[Tier]:
    """Yield the place `tier` for reading a generation, whose files stay open until the end of the block if they are in
    memory. Raises Cancelled where the block raises Damaged and the generation is gone."""
    with contextlib.ExitStack() as block:
        block.enter_context(_deletion_is_no_damage(tier, at))
        if paths.in_memory(tier.place):
            root = paths.parsed(tier.place).root
            files = _KeptFiles(root, memory_place.files_of(root).spill_folder)
            block.enter_context(files.kept(os.path.join(root, layout.folder(at))))
            yield Disk(files, root, place=tier.place)
        else:
            yield tier


def require_not_deleted(tier: Tier, at: GenerationId) -> None:
    """Raise Cancelled if a generation was deleted since the run was listed: what is found in it is no damage."""
    if folders.is_deleted(tier, at):  # guard: deletion-is-no-damage
        raise Cancelled(
            f"step {at.step} was deleted while it was read",
            safe="That is no damage: training deletes what its retention does not keep.",
            todo="Try again, with a newer step.",
        )


@contextlib.contextmanager
def _deletion_is_no_damage(tier: Tier, at: GenerationId) -> Iterator[None]:
    try:
        yield
    except Damaged:
        require_not_deleted(tier, at)
        raise


class _KeptFiles(MemoryFiles):
    """`MemoryFiles` for reading. In the block of `kept` one folder is as it was at its beginning."""

    def __init__(self, root: str, spill: str | None) -> None:
        super().__init__(root, spill)
        self._open: Mapping[str, PosixFile] = {}
        self._listings: Mapping[str, dict[str, int | None]] = {}

    @contextlib.contextmanager
    def kept(self, folder: str) -> Iterator[None]:
        """Keep the files of a folder open. What has moved to the disk is not kept."""
        listing, found = dict[str, int | None](), dict[str, PosixFile]()
        with contextlib.ExitStack() as files:
            with contextlib.suppress(FileNotFoundError):
                listing = super().list(folder)
            for path in (os.path.join(folder, name) for name in listing):
                with contextlib.suppress(OSError):  # a read of it raises the same error
                    found[path] = self.opened(path, "read")
                    files.callback(found[path].close)
            self._open, self._listings = found, {folder: listing}  # guard: deleted-generation-read-to-its-end
            try:
                yield
            finally:
                self._open, self._listings = {}, {}

    def open(self, path: str, mode: OpenMode, *, direct: bool = False, fresh: bool = False) -> PosixFile | MemoryFile:
        file = self._open.get(path)
        return super().open(path, mode, direct=direct, fresh=fresh) if file is None else file.again()

    def list(self, path: str) -> dict[str, int | None]:
        return self._listings.get(path) or super().list(path)

"""The upload of one file into a directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..io.files import write_all
from ..ports import File

if TYPE_CHECKING:
    from .directory import Disk


class DiskUpload:
    """`ports.Upload`: a file that no record names yet."""

    def __init__(self, disk: Disk, file: File, name: str, length: int) -> None:
        self._disk, self._file, self._name, self._length = disk, file, name, length
        self._open = True

    def write_at(self, mv: memoryview, offset: int) -> None:
        with self._disk._translated(self._name):
            write_all(self._file, mv, offset)

    def finish(self) -> None:
        """Cut the padding and make content and length durable. The folder's next record makes the name durable."""
        with self._disk._translated(self._name):
            self._file.resize(self._length)  # guard: padded-tail-cut
            if self._disk._syncs_files:  # guard: blob-content-synced
                self._file.sync()
            self._close()

    def abort(self) -> None:
        self._close()
        self._disk._drop(self._disk._path(self._name))  # guard: abort-removes-blob
        folder = self._name.rpartition("/")[0]
        if "/" in folder and not self._disk._shared:  # removed too if it is empty now
            self._disk._drop(self._disk._path(folder))  # guard: abort-removes-folder
            self._disk._durable_folders.discard(folder)  # guard: aborted-folder-forgotten

    def leave(self) -> None:
        """Close the file, and leave what has its name: that may be a file of another process by now."""
        self._close()

    def _close(self) -> None:
        if self._open:
            self._open = False
            self._file.close()

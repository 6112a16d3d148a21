"""Calls of the real file system that a subclass observes and may prevent."""

from __future__ import annotations

from typing import Any

from lastgood.io.files import PosixFiles
from lastgood.ports import File, OpenMode


class NotingFiles(PosixFiles):
    """The real file system, which calls `note` before each call that changes something, and not before reads."""

    def note(self, call: str, path: str) -> None:
        """Observe a call that is about to be made. A subclass overrides this; if it raises, the call is not made."""

    def write(self, file: File, path: str, mv: memoryview, offset: int) -> int:
        """Make one write; returns how many bytes of `mv` were written."""
        self.note("write", path)
        return file.write_at(mv, offset)

    def open(self, path: str, mode: OpenMode, *, direct: bool = False, fresh: bool = False) -> Any:
        if mode != "read":
            self.note(f"open {mode}", path)
        return NotingFile(self, super().open(path, mode, direct=direct, fresh=fresh), path)

    def make_dir(self, path: str) -> None:
        self.note("make_dir", path)
        super().make_dir(path)

    def link(self, old: str, new: str) -> None:
        self.note("link", new)
        super().link(old, new)

    def rename(self, old: str, new: str) -> None:
        self.note("rename", new)
        super().rename(old, new)

    def symlink(self, target: str, path: str) -> None:
        self.note("symlink", path)
        super().symlink(target, path)

    def remove(self, path: str) -> None:
        self.note("remove", path)
        super().remove(path)

    def sync_dir(self, path: str) -> None:
        self.note("sync_dir", path)
        super().sync_dir(path)


class NotingFile:
    """An open file of a `NotingFiles`, which calls its `note`."""

    def __init__(self, files: NotingFiles, file: File, path: str) -> None:
        self._files, self._file, self._path = files, file, path
        self.size, self.read_into, self.close = file.size, file.read_into, file.close

    def write_at(self, mv: memoryview, offset: int) -> int:
        return self._files.write(self._file, self._path, mv, offset)

    def reserve(self, length: int) -> None:
        self._files.note("reserve", self._path)
        self._file.reserve(length)

    def resize(self, length: int) -> None:
        self._files.note("resize", self._path)
        self._file.resize(length)

    def sync(self) -> None:
        self._files.note("sync", self._path)
        self._file.sync()

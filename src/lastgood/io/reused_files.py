"""The memory of deleted files in a tmpfs, used again for new files: the kernel need not free it, find it and clear it.

A deleted file becomes `.reused/GENERATION.INODE`. A new file of as many pages takes it over and overwrites all of it,
through a mapping that this process keeps. It saves two thirds of the processor time of a write, and all of a deletion.
Where libpmem is installed, the bytes are stored past the caches (uncached.py), in a third of the time.

Invariants
  1. Who still reads a deleted file never sees it change: a reader holds a shared lock, and only a file whose exclusive
     lock was free is taken.
  2. The files of at most GENERATIONS deleted generations are kept, and none once memory is short.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import stat
from dataclasses import dataclass

from .files import PosixFile, round_up
from .uncached import Copy, uncached_copy

FOLDER = ".reused"
GENERATIONS = 2
LEAST_BYTES = 1 << 20
"""Smaller files are deleted: they are records, and cost little."""


@dataclass(frozen=True)
class _Mapping:
    """A file that this process has mapped, the address of its first byte, and where it lay when it was taken."""

    memory: mmap.mmap
    address: int
    path: str


class ReusedFiles:
    """The deleted files of the folder `root`. Several processes may use the same folder."""

    def __init__(self, root: str) -> None:
        self._folder = os.path.join(root, FOLDER)
        self._mappings: dict[int, _Mapping] = {}
        """inode -> its mapping"""
        self._copy: Copy | None = None

    def put(self, path: str) -> bool:
        """Delete a file so that its memory may be used again. Returns False if it is to be removed as any other."""
        try:
            found = os.lstat(path)
            if not stat.S_ISREG(found.st_mode) or found.st_size < LEAST_BYTES or found.st_nlink > 1:
                return False
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._folder, 0o700)
            generation = os.path.basename(os.path.dirname(path))
            os.rename(path, os.path.join(self._folder, f"{generation}.{found.st_ino}"))
        except OSError:
            return False
        older = sorted({name.rpartition(".")[0] for name in self._names()} - {generation})
        self.drop(older[: 1 - GENERATIONS])  # guard: reused-memory-bounded
        return True

    def take(self, path: str, length: int) -> ReusedFile | None:
        """Replace the new, empty file at `path` by a deleted one of as many pages; None if there is none."""
        names = self.release()
        for inode in sorted(names, key=lambda one: one not in self._mappings):
            with contextlib.suppress(OSError):
                if (taken := self._taken(os.path.join(self._folder, names[inode]), inode, path, length)) is not None:
                    return taken
        return None

    def release(self) -> dict[int, str]:
        """Release the mappings of files that were removed, by whatever process: they hold the memory of such a file.

        Returns the inodes of the deleted files that are kept, each with its name.
        """
        names = {int(name.rpartition(".")[2]): name for name in self._names()}
        for inode, known in [*self._mappings.items()]:
            if inode not in names and not is_at(known.path, inode):
                self._mappings.pop(inode, None)  # guard: mapping-of-removed-file-released
        return names

    def drop(self, generations: list[str] | None = None) -> None:
        """Free the memory of these deleted generations; None: of all."""
        for name in self._names():
            if generations is None or name.rpartition(".")[0] in generations:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self._folder, name))

    def _taken(self, deleted: str, inode: int, path: str, length: int) -> ReusedFile | None:
        """As `take`, with this file; None if it does not fit. Raises OSError if another process reads or takes it."""
        size = round_up(length)
        fd = os.open(deleted, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = os.fstat(fd)
            if found.st_ino != inode or round_up(found.st_size) != size:
                os.close(fd)
                return None
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # guard: read-file-not-reused
            os.rename(deleted, path)
            os.ftruncate(fd, size)  # its last page exists already
            known = self._mappings.get(inode)
            memory = known.memory if known is not None and len(known.memory) == size else mmap.mmap(fd, size)
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            self._mappings[inode] = _Mapping(memory, address, path)
        except BaseException:
            os.close(fd)
            raise
        self._copy = self._copy or uncached_copy()
        return ReusedFile(fd, path, memory, address, self._copy)

    def _names(self) -> list[str]:
        try:
            return [name for name in os.listdir(self._folder) if name.rpartition(".")[2].isdecimal()]
        except FileNotFoundError:
            return []


class ReusedFile(PosixFile):
    """`ports.File` over a file whose memory is used again. Holds its exclusive lock until it is closed.

    `memory`: the mapping of the file, at `address`. `copy`: writes to it.
    """

    def __init__(self, fd: int, path: str, memory: mmap.mmap, address: int, copy: Copy) -> None:
        super().__init__(fd, path)
        self._memory, self._address, self._copy = memory, address, copy

    def write_at(self, mv: memoryview, offset: int) -> int:
        if mv.readonly or offset + len(mv) > len(self._memory):
            return super().write_at(mv, offset)
        self._copy(self._address + offset, ctypes.addressof(ctypes.c_char.from_buffer(mv)), len(mv))
        return len(mv)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.unlock()  # the mapping has a descriptor of its own, which keeps the lock
        super().close()


def hold(file: PosixFile, path: str) -> None:
    """Keep a file that was opened for reading from being used again until it is closed.

    Raises FileNotFoundError if it was deleted since it was opened, or is being written. Small files are never used
    again.
    """
    if file.size() < LEAST_BYTES:
        return
    try:
        file.lock_shared()
    except BlockingIOError as error:  # it is being written, perhaps as another file
        raise FileNotFoundError(error.errno, "deleted meanwhile", path) from error
    if not is_at(path, file.inode()):  # guard: reused-file-not-read
        raise FileNotFoundError(2, "deleted meanwhile", path)


def is_at(path: str, inode: int) -> bool:
    """Whether the file at `path` has this inode."""
    try:
        return os.lstat(path).st_ino == inode
    except OSError:
        return False

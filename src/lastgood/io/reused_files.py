"""The memory of deleted files in a tmpfs, used again for new files: the kernel need not free it, find it and clear it.

A deleted file becomes `.reused/GENERATION.INODE`. A new file of as many pages takes it over and overwrites all of it,
through a mapping that this process keeps. It saves two thirds of the processor time of a write, and all of a deletion.
Where libpmem is installed, the bytes are stored past the caches (uncached.py), in a third of the time.

Invariants
  1. Who still reads a deleted file never sees it change: a reader holds a shared lock, and only a file whose exclusive
     lock was free is taken.
  2. The files of at most GENERATIONS deleted generations are kept, and none once memory is short.
  3. A deleted file may be filled before it is taken (`lend`). It stays locked as long as somebody may write to it:
     until the new file is whole, or else until `LentFile.close`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import stat
from dataclasses import dataclass

from .files import PosixFile, close_unlocked, round_up
from .uncached import Copy, uncached_copy

FOLDER = ".reused"
GENERATIONS = 2
LEAST_BYTES = 1 << 20
"""Smaller files are deleted: they are records, and cost little."""


@dataclass(frozen=True)
class _Mapping:
    """A file that this process has mapped, and where it lay when it was taken."""

    memory: mmap.mmap
    path: str


@dataclass(frozen=True)
class _Deleted:
    """A deleted file, with its exclusive lock and mapped. `path`: where it lies among the deleted ones."""

    fd: int
    inode: int
    path: str
    memory: mmap.mmap

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def close(self) -> None:
        close_unlocked(self.fd)


class LentFile:
    """The memory of a deleted file, of which the file that is made next at a path will consist.

    `memory`: its mapping, which the caller may fill until `close`.
    """

    def __init__(self, found: _Deleted, path: str, waiting: dict[str, LentFile]) -> None:
        self.found, self.memory, self._path, self._waiting = found, found.memory, path, waiting
        waiting[path] = self

    def close(self) -> None:
        """Release it: nobody fills it any more. Called once."""
        if self._waiting.get(self._path) is self:  # the file was never made
            del self._waiting[self._path]
        self.found.close()


class ReusedFiles:
    """The deleted files of the folder `root`. Several processes may use the same folder."""

    def __init__(self, root: str) -> None:
        self._folder = os.path.join(root, FOLDER)
        self._mappings: dict[int, _Mapping] = {}
        """inode -> its mapping"""
        self._copy: Copy | None = None
        self._lent: dict[str, LentFile] = {}
        """path of a file that is still to be made -> what it will consist of"""

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

    def lend(self, path: str, length: int) -> LentFile | None:
        """A deleted file of as many pages, to be filled before the file at `path` is made; None if there is none.

        The caller closes it once it fills no more of it.
        """
        with contextlib.suppress(OSError):  # who makes the file meets the same error, and reports it
            if (found := self._locked(length)) is not None:
                return LentFile(found, path, self._lent)
        return None

    def is_lent(self, path: str) -> bool:
        """Whether memory was lent for the file that is made next at `path`: then no buffers are filled for it."""
        return path in self._lent

    def take(self, path: str, length: int) -> ReusedFile | None:
        """Replace the new, empty file at `path` by a deleted one of as many pages; None if there is none.

        It is the one that was lent for this path, unless that was dropped since, because memory is short.
        """
        if (lent := self._lent.pop(path, None)) is not None:
            with contextlib.suppress(OSError):
                return self._named(lent.found, path, lent=True)
        if (found := self._locked(length)) is None:
            return None
        with contextlib.suppress(OSError):  # it was dropped since
            return self._named(found, path)
        found.close()
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
        """Free the memory of these deleted generations; None: of all. A file that is read or filled stays: to remove it
        gives nothing back, and what fills it would need as much memory once more."""
        for name in self._names():
            if generations is None or name.rpartition(".")[0] in generations:
                with contextlib.suppress(OSError):
                    self._remove(os.path.join(self._folder, name))

    def _remove(self, path: str) -> None:
        """Raises OSError if another process reads, fills, takes or removes the file."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # guard: used-file-not-freed
            os.unlink(path)
        finally:
            close_unlocked(fd)

    def _locked(self, length: int) -> _Deleted | None:
        """A deleted file of as many pages that nobody reads or takes, a mapped one if possible; None: there is none."""
        names, size = self.release(), round_up(length)
        for inode in sorted(names, key=lambda one: one not in self._mappings):
            with contextlib.suppress(OSError):
                found = self._opened(os.path.join(self._folder, names[inode]), inode, size)
                if found is not None:
                    return found
        return None

    def _opened(self, path: str, inode: int, size: int) -> _Deleted | None:
        """As `_locked`, this file; None if it has another length, or was taken since it was listed.

        Raises OSError if another process reads or takes it.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # guard: read-file-not-reused
            # Another process may have taken it before this lock, written it and released it.
            if not is_at(path, inode) or round_up(os.fstat(fd).st_size) != size:  # guard: taken-file-not-lent
                close_unlocked(fd)
                return None
            os.ftruncate(fd, size)  # its last page exists already
            known = self._mappings.get(inode)
            memory = known.memory if known is not None and len(known.memory) == size else mmap.mmap(fd, size)
        except BaseException:
            close_unlocked(fd)
            raise
        return _Deleted(fd, inode, path, memory)

    def _named(self, found: _Deleted, path: str, *, lent: bool = False) -> ReusedFile:
        """Give a deleted file its new name. `lent`: its lender closes it too. Raises OSError if it was dropped."""
        self._copy = self._copy or uncached_copy()
        fd = os.dup(found.fd) if lent else found.fd  # before the name: nothing may fail after it
        try:
            os.rename(found.path, path)
        except OSError:
            if lent:
                os.close(fd)
            raise
        self._mappings[found.inode] = _Mapping(found.memory, path)
        return ReusedFile(fd, path, found, self._copy, lent=lent)

    def _names(self) -> list[str]:
        try:
            return [name for name in os.listdir(self._folder) if name.rpartition(".")[2].isdecimal()]
        except FileNotFoundError:
            return []


class ReusedFile(PosixFile):
    """`ports.File` over a file whose memory is used again. Holds its exclusive lock until it is closed.

    `found`: the file, with its mapping. `copy`: writes to it. `lent`: whether it is filled through the mapping, too; a
    file that is given up before it is whole then stays locked.
    """

    def __init__(self, fd: int, path: str, found: _Deleted, copy: Copy, *, lent: bool) -> None:
        super().__init__(fd, path)
        self._memory, self._address, self._copy = found.memory, found.address, copy
        self._is_being_filled = lent

    def write_at(self, mv: memoryview, offset: int) -> int:
        if mv.readonly or offset + len(mv) > len(self._memory):
            return super().write_at(mv, offset)
        source = ctypes.addressof(ctypes.c_char.from_buffer(mv))
        if source != self._address + offset:  # otherwise it was filled in place
            self._copy(self._address + offset, source, len(mv))
        return len(mv)

    def resize(self, length: int) -> None:
        super().resize(length)
        self._is_being_filled = False  # it is whole

    def unlock(self) -> None:
        if not self._is_being_filled:  # guard: given-up-file-stays-locked
            super().unlock()

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

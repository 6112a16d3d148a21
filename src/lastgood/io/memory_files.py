"""Files in memory: a folder of a tmpfs, with a folder on a disk for files that do not fit.

The kernel keeps a tmpfs as long as the machine runs, so these files outlive every process. They are lost when the
machine stops.

Invariants
  1. A name is in memory or in the spill folder, or for an instant in both; then the one in memory counts.
  2. A file moves from memory to the spill folder only while it is empty, before its first byte is written.
  3. Memory is taken only within the limits of the tmpfs, the machine and the control groups: a process that goes past
     the limit of its control group would be killed.
The memory of deleted files is used again (reused_files.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator

from .. import reporting
from ..ports import OpenMode
from . import files
from .files import PosixFile, PosixFiles
from .memory_limits import available_bytes
from .os_errors import FULL, NoMemory
from .reused_files import ReusedFiles, hold

RECORDS_BYTES = 8 << 20
"""What files of tensors leave of a tmpfs for the records beside them."""
SMALLER = (
    "Save smaller states, keep fewer in memory (Tier(retention=Keep(last=1))), or give the job more memory; in a "
    "container also a larger /dev/shm."
)
_RESERVING = ".reserving.lock"


def free_bytes(folder: str) -> int:
    """Bytes that may still be taken for files in `folder`, which is in a tmpfs. Raises OSError."""
    free, available = max(0, files.free_bytes(folder) - RECORDS_BYTES), available_bytes()
    return free if available is None else min(free, available)


class MemoryFiles:
    """`ports.Files` over the folder `root` in a tmpfs. All paths lie in it.

    `spill`: the absolute folder, on a disk, for files that do not fit. It and its parent are made when they are needed,
    not the directory above. None: such files fail with ENOSPC. `free` (default `free_bytes`): how many bytes may still
    be taken for files in a folder.
    """

    def __init__(self, root: str, spill: str | None = None, free: Callable[[str], int] = free_bytes) -> None:
        self._root, self._spill, self._free, self._files = root, spill, free, PosixFiles()
        self.reused = ReusedFiles(root)
        self.spilled = 0
        """the number of files that did not fit since this object was made"""

    def open(self, path: str, mode: OpenMode, *, direct: bool = False, fresh: bool = False) -> PosixFile | MemoryFile:
        """As `ports.Files.open`. Files in memory need no direct I/O, and no other medium shows their bytes."""
        if mode == "new":
            self._require_free(path)
            return MemoryFile(self, path, self._files.open(path, "new"))
        try:
            return self._opened(path, mode)
        except FileNotFoundError:
            if (elsewhere := self._spilled(path)) is None:
                raise
            return self._files.open(elsewhere, mode, direct=direct, fresh=fresh)

    def _opened(self, path: str, mode: OpenMode) -> PosixFile:
        file = self._files.open(path, mode)
        if mode == "read":
            try:
                hold(file, path)
            except BaseException:
                file.close()
                raise
        return file

    def list(self, path: str) -> dict[str, int | None]:
        found = dict[str, int | None]()
        if elsewhere := self._spilled(path):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                # Folders are made in memory first. What lies below one that only the disk has is of an earlier start
                # of the machine, and is listed so that it is removed.
                found = self._files.list(elsewhere)
        try:
            return found | self._files.list(path)
        except FileNotFoundError:
            if not found:
                raise
            return found

    def make_dir(self, path: str) -> None:
        """As `ports.Files.make_dir`. The folder of the run is made anew if somebody has removed it.

        systemd removes what a user has in /dev/shm when he logs out. A directory on a disk may have been moved instead,
        and is not made anew; memory holds nothing that the places below should not have too.
        """
        try:
            self._files.make_dir(path)
        except FileNotFoundError:
            if os.path.isdir(self._root):
                raise
            self._make_root()  # guard: removed-memory-made-anew
            reporting.threat(
                f"{self._root} was removed while the run was open, with what was only there: it is made anew. If "
                "logging out removes it, set RemoveIPC=no in logind.conf, or name another tmpfs in LASTGOOD_MEMORY."
            )
            os.makedirs(path, mode=0o700, exist_ok=True)

    def _make_root(self) -> None:
        """Make the folder of the run, and that of the user above it. Raises PermissionError if others could read it."""
        parent = os.path.dirname(self._root)
        with contextlib.suppress(FileExistsError):
            os.mkdir(parent, 0o700)
        found = os.lstat(parent)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(errno.EPERM, "it is not of this user alone", parent)
        os.mkdir(self._root, 0o700)

    def link(self, old: str, new: str) -> None:
        self._require_free(new)
        self._files.link(old, new)  # records, which are never spilled

    def rename(self, old: str, new: str) -> None:
        """As `ports.Files.rename`: the last removal shows the new file, if the two lie in different folders."""
        elsewhere = self._spilled(new)
        try:
            self._files.rename(old, new)
        except FileNotFoundError:
            before = self._spilled(old)
            if before is None or elsewhere is None:
                raise
            self._files.rename(before, elsewhere)
            with contextlib.suppress(FileNotFoundError):
                self._files.remove(new)
            return
        if elsewhere is not None:
            with contextlib.suppress(FileNotFoundError):
                self._files.remove(elsewhere)

    def symlink(self, target: str, path: str) -> None:
        self._files.symlink(target, path)

    def remove(self, path: str) -> None:
        elsewhere, missing = self._spilled(path), False
        if elsewhere is not None:
            try:
                self._files.remove(elsewhere)  # first: a folder that is not empty there stays in memory too
            except FileNotFoundError:
                missing = True
        if self.reused.put(path):
            return
        try:
            self._files.remove(path)
        except FileNotFoundError:
            if elsewhere is None or missing:
                raise

    def sync_dir(self, path: str) -> None:
        """Nothing is to be done: a tmpfs has no medium. What is spilled promises no more than memory does."""
        elsewhere = self._spilled(path)
        if not os.path.isdir(path) and not (elsewhere and os.path.isdir(elsewhere)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    @contextlib.contextmanager
    def room_for(self, length: int) -> Iterator[None]:
        """Inside, no other process of this user takes memory for files. Raises ENOSPC if `length` bytes do not fit."""
        path = os.path.join(os.path.dirname(self._root), _RESERVING)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # guard: memory-reserved-one-by-one
            if length > self._free(self._root):
                self.reused.drop()  # guard: reused-memory-freed-first
            if length > self._free(self._root):  # guard: memory-limit-before-reserve
                raise OSError(errno.ENOSPC, "not enough memory", self._root)
            yield
        finally:
            os.close(fd)

    def spill(self, path: str, length: int) -> PosixFile:
        """Make a file of this path in the spill folder, with room for `length` bytes.

        Raises NoMemory if there is none, or if its disk is full too, and its other errors.
        """
        elsewhere = self._spilled(path)
        if elsewhere is None or self._spill is None or not os.path.isdir(os.path.dirname(os.path.dirname(self._spill))):
            raise NoMemory("not enough memory, and no disk of this machine below it", path, SMALLER)
        try:
            os.makedirs(os.path.dirname(elsewhere), mode=0o700, exist_ok=True)
            file = self._files.open(elsewhere, "new")
            try:
                file.reserve(length)
            except BaseException:
                file.close()
                self._files.remove(elsewhere)
                raise
        except OSError as error:
            if error.errno not in FULL:
                raise
            what = f"not enough memory, and {self._spill}, where it would be written instead, is full too"
            raise NoMemory(what, path, f"Free space on the disk of {self._spill}. {SMALLER}") from error
        self.spilled += 1
        if reporting.is_reported(self.spilled):
            reporting.warning(
                f"memory is short: {os.path.relpath(path, self._root)} was written to {self._spill} instead (spilled "
                f"file {self.spilled}). {SMALLER}"
            )
        return file

    def _spilled(self, path: str) -> str | None:
        return None if self._spill is None else os.path.join(self._spill, os.path.relpath(path, self._root))

    def _require_free(self, path: str) -> None:
        if (elsewhere := self._spilled(path)) and os.path.lexists(elsewhere):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)


class MemoryFile:
    """`ports.File` over a new file in memory. `reserve` moves it to the spill folder if it does not fit."""

    def __init__(self, files: MemoryFiles, path: str, file: PosixFile) -> None:
        self._files, self._path, self._file = files, path, file

    def size(self) -> int:
        return self._file.size()

    def read_into(self, mv: memoryview, offset: int) -> int:
        return self._file.read_into(mv, offset)

    def write_at(self, mv: memoryview, offset: int) -> int:
        return self._file.write_at(mv, offset)

    def reserve(self, length: int) -> None:
        """As `ports.File.reserve`. It may take over the memory of a deleted file."""
        if (taken := self._files.reused.take(self._path, length)) is not None:
            self._file.close()
            self._file = taken
            return
        try:
            with self._files.room_for(length):
                self._file.reserve(length)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            spilled = self._files.spill(self._path, length)
            with contextlib.suppress(OSError):
                os.unlink(self._path)  # not through `self._files`, which would remove the spilled one too
            self._file.close()
            self._file = spilled

    def resize(self, length: int) -> None:
        self._file.resize(length)

    def sync(self) -> None:
        """Nothing is to be done, as for `MemoryFiles.sync_dir`."""

    def close(self) -> None:
        self._file.close()

"""Files in memory: a folder of a tmpfs, with a folder on a disk for files that do not fit.

The kernel keeps a tmpfs as long as the machine runs, so these files outlive every process. They are lost when the
machine stops.

Invariants
  1. A name is in memory or in the spill folder, or for an instant in both; then the one in memory counts.
  2. A file moves from memory to the spill folder while it is empty, before its first byte is written; or whole, once it
     can change no more and memory is short (memory_moves.py). Folders and records go there too where memory has no
     room for them, or no more names (inodes). What lies in the folder of the run itself does not: it is found without
     knowing the spill folder, or is a hint.
  3. Memory is taken only within the limits of the tmpfs, the machine and the control groups: a process that goes past
     the limit of its control group would be killed.
  4. Names change in both folders while none is moved (`still`).
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
from .files import PosixFile, PosixFiles, close_unlocked
from .memory_limits import available_bytes, most_lacking
from .memory_limits import lacking_bytes as lacking_in_all
from .os_errors import USED_UP, NoMemory
from .reused_files import LEAST_BYTES, ReusedFiles, hold

RECORDS_BYTES = 8 << 20
"""What files of tensors leave of a tmpfs for the records beside them."""
SMALLER = (
    "Save smaller states, keep fewer in memory (Tier(retention=Keep(last=1))), or give the job more memory; in a "
    "container also a larger /dev/shm."
)
NAMES = "Remove what fills the tmpfs with small files (df -i shows it), or mount it with more nr_inodes."
_RESERVING = ".reserving.lock"


def free_bytes(folder: str, buffers: int = 0) -> int:
    """Bytes that may still be taken for files in `folder`, which is in a tmpfs. Raises OSError.

    `buffers` (default 0): so many bytes of memory are taken beside them, outside of that tmpfs.
    """
    free, available = max(0, files.free_bytes(folder) - RECORDS_BYTES), available_bytes()
    return free if available is None else min(free, available - buffers)


def lacking_bytes(folder: str) -> int:
    """Bytes that the files in `folder`, which is in a tmpfs, are to give back; 0 unless memory is short.

    Raises OSError.
    """
    return max(most_lacking([(files.free_bytes(folder), RECORDS_BYTES)]), lacking_in_all())


@contextlib.contextmanager
def still(root: str, operation: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Inside, no other thread or process changes a name in memory or in its spill folder.

    `operation` (default LOCK_EX): with LOCK_SH names are not moved between the two, and may change otherwise. Raises
    FileNotFoundError if the folder `root` of the run in memory does not exist.
    """
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, operation)
        yield
    finally:
        close_unlocked(fd)


class MemoryFiles:
    """`ports.Files` over the folder `root` in a tmpfs. All paths lie in it.

    `spill`: the absolute folder, on a disk, for files that do not fit. It and its parent are made when they are needed,
    not the directory above. None: such files fail with ENOSPC. `free` (default `free_bytes`): how many bytes may still
    be taken for files in a folder, beside buffers. `buffered` (default True): the files come from buffers that are as
    long as they are.
    """

    def __init__(
        self, root: str, spill: str | None = None, free: Callable[[str, int], int] = free_bytes, buffered: bool = True
    ) -> None:
        self.root, self.spill_folder, self._free, self._files = root, spill, free, PosixFiles()
        self._buffered = buffered
        self.reused = ReusedFiles(root)
        self.spilled = 0
        """the number of files that did not fit since this object was made"""
        self._longest = 0
        """the longest file that was written: buffers of this length take their memory already"""

    def open(self, path: str, mode: OpenMode, *, direct: bool = False, fresh: bool = False) -> PosixFile | MemoryFile:
        """As `ports.Files.open`. Files in memory need no direct I/O, and no other medium shows their bytes."""
        if mode == "new":
            with self._unmoved():
                self._require_free(path)
                try:
                    return MemoryFile(self, path, self._files.open(path, "new"))
                except OSError as error:
                    if not self._goes_to_disk(path, error):
                        raise
                    return self.spill(path, 0)
        with contextlib.suppress(FileNotFoundError):
            return self.opened(path, mode)
        if (elsewhere := self._spilled(path)) is not None:
            with contextlib.suppress(FileNotFoundError):
                return self._files.open(elsewhere, mode, direct=direct, fresh=fresh)
        # Again: another file may have taken the name in memory, in place of the one on the disk or of one in memory.
        return self.opened(path, mode)  # guard: replaced-file-is-found

    def opened(self, path: str, mode: OpenMode) -> PosixFile:
        """An existing file in memory. Raises FileNotFoundError, also for one that is being written, or deleted."""
        file = self._files.open(path, mode)
        if mode == "read":
            try:
                hold(file, path)
            except BaseException:
                file.close()
                raise
        return file

    def list(self, path: str) -> dict[str, int | None]:
        found, missing = self._listed_on_disk(path), False
        try:
            found = found | self._files.list(path)
        except FileNotFoundError:
            missing = True
        # A file may have moved there before memory was listed, and one there may be replaced by one in memory.
        found = self._listed_on_disk(path) | found  # guard: moved-file-is-listed
        if missing and not found:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return found

    def _listed_on_disk(self, path: str) -> dict[str, int | None]:
        """What the spill folder has. Folders are made in memory first: what lies below one that only the disk has is of
        an earlier start of the machine, and is listed so that it is removed."""
        if elsewhere := self._spilled(path):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                return self._files.list(elsewhere)
        return {}

    def make_dir(self, path: str) -> None:
        """As `ports.Files.make_dir`. The folder of the run is made anew if somebody has removed it.

        systemd removes what a user has in /dev/shm when he logs out. A directory on a disk may have been moved instead,
        and is not made anew; memory holds nothing that the places below should not have too.
        """
        try:
            self._files.make_dir(path)
        except OSError as error:
            if self._goes_to_disk(path, error):
                os.makedirs(self.place_on_disk(path), mode=0o700)
                return
            if error.errno != errno.ENOENT or os.path.isdir(self.root):
                raise
            self._make_root()  # guard: removed-memory-made-anew
            reporting.threat(
                f"{self.root} was removed while the run was open, with what was only there: it is made anew. If "
                "logging out removes it, set RemoveIPC=no in logind.conf, or name another tmpfs in LASTGOOD_MEMORY."
            )
            os.makedirs(path, mode=0o700, exist_ok=True)

    def _make_root(self) -> None:
        """Make the folder of the run, and that of the user above it. Raises PermissionError if others could read it."""
        parent = os.path.dirname(self.root)
        with contextlib.suppress(FileExistsError):
            os.mkdir(parent, 0o700)
        found = os.lstat(parent)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(errno.EPERM, "it is not of this user alone", parent)
        os.mkdir(self.root, 0o700)

    def link(self, old: str, new: str) -> None:
        with self._unmoved():
            self._require_free(new)
            try:
                self._files.link(old, new)
            except OSError as error:
                elsewhere = self._spilled(old)
                if error.errno not in (errno.ENOENT, errno.ENOSPC) or elsewhere is None:
                    raise
                if os.path.lexists(new):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new) from error
                if os.path.lexists(old):  # a tmpfs counts a further name like a further file
                    self._files.rename(old, new)
                else:
                    self._files.link(elsewhere, self.place_on_disk(new))

    def rename(self, old: str, new: str) -> None:
        """As `ports.Files.rename`: the last removal shows the new file, if the two lie in different folders."""
        elsewhere = self._spilled(new)
        with self._unmoved():
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
        with self._unmoved():
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
    def room_for(self, length: int, has_buffers: bool = True) -> Iterator[None]:
        """Inside, no other process of this user takes memory for files. Raises ENOSPC if `length` bytes do not fit.

        While the first file of this length is written, the buffers that it comes from take as much memory once more;
        those of a copy are short. `has_buffers` (default True): whether it comes from buffers.
        """
        path = os.path.join(os.path.dirname(self.root), _RESERVING)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # guard: memory-reserved-one-by-one
            first = has_buffers and self._buffered and length > self._longest  # guard: lent-file-needs-no-buffers
            buffers = length if first else 0  # guard: buffers-of-first-file-counted
            if length > self._free(self.root, buffers):
                self.reused.drop()  # guard: reused-memory-freed-first
            if length > self._free(self.root, buffers):  # guard: memory-limit-before-reserve
                raise OSError(errno.ENOSPC, "not enough memory", self.root)
            yield
        finally:
            close_unlocked(fd)

    def spill(self, path: str, length: int) -> PosixFile:
        """Make a file of this path in the spill folder, with room for `length` bytes.

        Raises NoMemory if there is none, or if its disk is full too, and its other errors.
        """
        elsewhere = self.place_on_disk(path)
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
            if error.errno not in USED_UP:
                raise
            what = f"not enough memory, and {self.spill_folder}, where it would be written instead, is full too"
            raise NoMemory(what, path, f"Free space on the disk of {self.spill_folder}. {SMALLER}") from error
        self.spilled += 1
        if reporting.is_reported(self.spilled):
            short, remedy = ("has no inodes left", NAMES) if self._has_no_names() else ("is short", SMALLER)
            reporting.warning(
                f"memory {short}: {os.path.relpath(path, self.root)} was written to {self.spill_folder} instead "
                f"(spilled file {self.spilled}). {remedy}"
            )
        return file

    def note_written(self, length: int) -> None:
        """Note that a file of this length was written."""
        self._longest = max(self._longest, length)

    def _has_no_names(self) -> bool:
        """Whether no further file can be made in memory, however short."""
        found = os.statvfs(self.root)
        return bool(found.f_files) and not found.f_favail

    def _goes_to_disk(self, path: str, error: OSError) -> bool:
        """Whether a name goes to the spill folder: memory has no room for it, or only that folder has its parent."""
        parent = os.path.dirname(path)
        if parent == self.root:
            return False
        if error.errno == errno.ENOENT:
            elsewhere = self._spilled(parent)
            return elsewhere is not None and os.path.isdir(elsewhere) and os.path.isdir(self.root)
        return error.errno == errno.ENOSPC  # guard: names-spilled-without-inodes

    def place_on_disk(self, path: str) -> str:
        """Where a name lies in the spill folder. Raises NoMemory if there is no disk for it."""
        elsewhere, folder = self._spilled(path), self.spill_folder
        if elsewhere is None or folder is None or not os.path.isdir(os.path.dirname(os.path.dirname(folder))):
            remedy = NAMES if self._has_no_names() else SMALLER
            raise NoMemory("not enough memory, and no disk of this machine below it", path, remedy)
        return elsewhere

    def _unmoved(self) -> contextlib.AbstractContextManager[None]:
        """Inside, no file moves to the spill folder. Without one, or without the folder of the run, none ever does."""
        if self.spill_folder is None or not os.path.isdir(self.root):
            return contextlib.nullcontext()
        return still(self.root, fcntl.LOCK_SH)

    def _spilled(self, path: str) -> str | None:
        return None if self.spill_folder is None else os.path.join(self.spill_folder, os.path.relpath(path, self.root))

    def _require_free(self, path: str) -> None:
        if (elsewhere := self._spilled(path)) and os.path.lexists(elsewhere):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)


class MemoryFile:
    """`ports.File` over a new file in memory, which moves to the spill folder if it does not fit.

    That is found out by `reserve`; where that is not called, as for a record, by the first write.
    """

    def __init__(self, files: MemoryFiles, path: str, file: PosixFile) -> None:
        self._files, self._path, self._file = files, path, file
        self._reserved = 0
        self._has_buffers = True
        """whether the file comes from buffers that are as long"""

    def size(self) -> int:
        return self._file.size()

    def read_into(self, mv: memoryview, offset: int) -> int:
        return self._file.read_into(mv, offset)

    def write_at(self, mv: memoryview, offset: int) -> int:
        if offset == 0 and not self._file.size():
            try:
                self._file.reserve(len(mv))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                if os.path.dirname(self._path) == self._files.root:
                    remedy = "Free space in this tmpfs (df shows it), or name another one in LASTGOOD_MEMORY."
                    raise NoMemory("not enough memory for the records of the run", self._path, remedy) from error
                self._spill(0)
        return self._file.write_at(mv, offset)

    def reserve(self, length: int) -> None:
        """As `ports.File.reserve`. It may take over the memory of a deleted file."""
        self._reserved = length
        self._has_buffers = not self._files.reused.is_lent(self._path)  # guard: file-without-buffers-not-counted
        if (taken := self._files.reused.take(self._path, length)) is not None:
            self._file.close()
            self._file = taken
            return
        try:
            if length >= LEAST_BYTES:
                self._file.lock_exclusive()  # guard: file-being-written-not-moved
            with self._files.room_for(length, self._has_buffers):
                self._file.reserve(length)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self._spill(length)

    def _spill(self, length: int) -> None:
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
        with contextlib.suppress(OSError):
            if self._has_buffers:
                # The next file of as many bytes reserves as many pages.
                self._files.note_written(max(self._reserved, self._file.size()))  # guard: buffers-counted-once
            self._file.unlock()
        self._file.close()

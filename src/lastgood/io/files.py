"""The file system. Only this module calls fsync, rename, link and F_FULLFSYNC, and opens files with O_DIRECT.

Every method is one system call, or a few that belong together. Nothing is retried. An open file whose fsync failed is
not synced again: on ext4, xfs and btrfs the second call reports success although the data is lost. A file that is
opened again has no memory of the failure, so callers give up such a file and write a new one (mapped.py adds msync, to
which the same applies).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import weakref

from ..limits import DIRECT_IO_BYTES, READ_LIMIT
from ..ports import File, OpenMode
from . import quota

_FULLFSYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync leaves data in the drive's cache
_DIRECT = getattr(os, "O_DIRECT", 0)
_CLOSED = 2**31 - 1
"""In place of the number of a closed descriptor, which another file may have by then. No file has this one, so that
every call fails with EBADF (-1 is a ValueError to some, and no file at all to mmap)."""


DISK_READS = max(1, min(READ_LIMIT, (os.cpu_count() or 2) // 2))
"""Chunks of a file that are read at once. On two cores one read of a whole chunk at a time is fastest, because several
at once only delay each other (docs/decisions/0006)."""


def round_up(length: int, unit: int = DIRECT_IO_BYTES) -> int:
    """The smallest multiple of `unit` that is >= length."""
    return -(-length // unit) * unit


class PosixFile:
    """`ports.File` over a file descriptor, which it closes.

    `in_place`: the file is overwritten within its allocated blocks, so that `fdatasync` is enough.
    """

    def __init__(self, fd: int, path: str, in_place: bool = False) -> None:
        self._fd, self._path, self._in_place = fd, path, in_place
        self._sync_failed = False

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def fileno(self) -> int:
        """The descriptor. The wire sends the file from it."""
        return self._fd

    def inode(self) -> int:
        """The number of the file in its file system."""
        return os.fstat(self._fd).st_ino

    def lock_shared(self) -> None:
        """Acquire a shared lock, which is held until the file is closed. Raises BlockingIOError."""
        fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def lock_exclusive(self) -> None:
        """Acquire an exclusive lock, which is held until `unlock`. Raises BlockingIOError."""
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def unlock(self) -> None:
        """Release the lock, also that of copies of the descriptor, which a fork or a mapping has made."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def again(self) -> PosixFile:
        """The same open file, with its lock, by a descriptor of its own."""
        return PosixFile(os.dup(self._fd), self._path)

    def read_into(self, mv: memoryview, offset: int) -> int:
        return os.preadv(self._fd, [mv], offset)

    def write_at(self, mv: memoryview, offset: int) -> int:
        return os.pwrite(self._fd, mv, offset)

    def reserve(self, length: int) -> None:
        if length and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._fd, 0, length)

    def resize(self, length: int) -> None:
        os.ftruncate(self._fd, length)

    def sync(self) -> None:
        if self._sync_failed:  # guard: no-sync-after-failed-sync
            raise OSError(errno.EIO, "an earlier fsync of this file failed", self._path)
        try:
            _flush(self._fd, self._in_place)
        except OSError:
            self._sync_failed = True  # guard: failed-sync-is-final
            raise

    def close(self) -> None:
        fd, self._fd = self._fd, _CLOSED  # guard: late-call-reaches-no-other-file
        _close(fd)


class PosixFiles:
    """`ports.Files` over the operating system."""

    def open(self, path: str, mode: OpenMode, *, direct: bool = False, fresh: bool = False) -> PosixFile:
        flags = os.O_CLOEXEC | os.O_NOFOLLOW | (_DIRECT if direct else 0)  # guard: open-refuses-symlinks
        # O_NONBLOCK has no effect on a regular file, and opening a pipe that stands in its place does not block.
        existing = os.O_NONBLOCK | (os.O_RDWR if mode == "write" else os.O_RDONLY)
        flags |= os.O_RDWR | os.O_CREAT | os.O_EXCL if mode == "new" else existing  # guard: new-blob-is-exclusive
        fd = os.open(path, flags, 0o666)
        if fresh and not direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # drops clean pages from the cache
        return PosixFile(fd, path, in_place=mode == "write")

    def list(self, path: str) -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    found[entry.name] = None
                elif entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                        found[entry.name] = entry.stat(follow_symlinks=False).st_size
                else:
                    found[entry.name] = -1
        return found

    def make_dir(self, path: str) -> None:
        os.mkdir(path)

    def link(self, old: str, new: str) -> None:
        os.link(old, new)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def symlink(self, target: str, path: str) -> None:
        os.symlink(target, path)

    def remove(self, path: str) -> None:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            os.rmdir(path)
        else:
            os.unlink(path)

    def sync_dir(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _flush(fd)  # guard: fsync-directory
        finally:
            _close(fd)


def _close(fd: int) -> None:
    # The descriptor is closed even if close fails. No error of written data is lost: data that must be durable was
    # synced before, and the sync reported it.
    with contextlib.suppress(OSError):
        os.close(fd)


def _flush(fd: int, in_place: bool = False) -> None:
    if _FULLFSYNC is not None:
        fcntl.fcntl(fd, _FULLFSYNC)
    elif in_place:  # unlike fsync, fdatasync needs no journal transaction where only the modification time changed
        os.fdatasync(fd)
    else:
        os.fsync(fd)  # guard: fsync-descriptor


def write_all(file: File, mv: memoryview, offset: int) -> None:
    """Write every byte of `mv`: one call of `write_at` may write fewer."""
    done = 0
    while done < len(mv):  # guard: short-write-loop
        count = file.write_at(mv[done:], offset + done)
        # Direct I/O continues at a block boundary, so the partial block at the end of a short write is written again.
        # guard: short-write-keeps-alignment
        whole = count if count == len(mv) - done else count - count % DIRECT_IO_BYTES or count
        if whole <= 0:  # guard: zero-write-is-error
            raise OSError(errno.EIO, "the file accepts no more bytes")
        done += whole  # guard: short-write-counted


def close_unlocked(fd: int) -> None:
    """Release the lock of a descriptor, and close it. A mapping of it has a copy, and so has a process that was forked
    meanwhile: these would keep the lock."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)  # guard: fork-keeps-no-lock-of-memory
    os.close(fd)


def is_aligned(mv: memoryview, length: int) -> bool:
    """Whether direct I/O can read `length` bytes into `mv`: it is page-aligned, and holds them rounded up to pages."""
    # guard: direct-io-needs-alignment
    return len(mv) >= round_up(length) > 0 and ctypes.addressof(ctypes.c_char.from_buffer(mv)) % DIRECT_IO_BYTES == 0


def takes_direct(folder: str) -> bool:
    """Whether the file system of `folder` supports direct I/O: writes a page, cuts it to an unaligned length, reads it.

    Some file systems accept O_DIRECT at open and refuse it at write, so it is tried in the way that it will be used.
    Raises OSError if the folder cannot be written at all. The probe file is removed.
    """
    if not _DIRECT:
        return False
    path = os.path.join(folder, f".probe-{os.getpid()}")
    page = mmap.mmap(-1, DIRECT_IO_BYTES)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        page[:4] = b"tail"
        direct = os.open(path, os.O_RDWR | os.O_CLOEXEC | _DIRECT)
        try:
            wrote = os.pwrite(direct, page, 0)
            os.ftruncate(direct, 4)
            return wrote == DIRECT_IO_BYTES and os.preadv(direct, [page], 0) == 4 and page[:4] == b"tail"
        finally:
            os.close(direct)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP):
            return False
        raise
    finally:
        os.close(fd)
        os.unlink(path)
        page.close()


def lock_holder(path: str) -> int | None:
    """The id of the process that holds the lock at `path`.

    None if the system does not list locks, or if the process is in another namespace.
    """
    try:
        of = os.stat(path)
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the descriptor that listed this directory is closed by now
                if os.path.samestat(os.stat(f"/proc/self/fd/{fd}"), of):
                    return os.getpid()
        place = f"{os.major(of.st_dev):02x}:{os.minor(of.st_dev):02x}:{of.st_ino}"
        with open("/proc/locks") as file:
            found = [line.split() for line in file]
    except OSError:
        return None
    for one in found:  # 1: FLOCK ADVISORY WRITE 4321 08:02:131 0 EOF
        if len(one) > 5 and one[1] == "FLOCK" and one[5] == place and one[4].isdigit() and one[4] != "0":
            return int(one[4])
    return None


class Lock:
    """An exclusive lock on a run. It is held until `close`, or until the process ends.

    A lock by flock belongs to the open file, which a forked data-loader worker inherits: a worker that outlives its
    trainer would hold the run for ever. So the copy in the child is closed at every fork.
    """

    def __init__(self, path: str, content: bytes = b"") -> None:
        """`content` (default empty): of the file at `path`, while the lock is held.

        Raises BlockingIOError if another process, or another object of this process, holds the lock.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # guard: exclusive-run-lock
            if content or os.fstat(fd).st_size:
                os.ftruncate(fd, 0)
                os.pwrite(fd, content, 0)
        except OSError:
            _close(fd)  # guard: failed-lock-is-released
            raise
        self._fd: int | None = fd
        leave = weakref.WeakMethod(self._leave)  # what is registered there stays until the process ends
        os.register_at_fork(after_in_child=lambda: (left := leave()) and left())  # guard: lock-not-inherited-by-fork

    def is_at(self, path: str) -> bool:
        """Whether the file of the lock is still that at `path`. True where that cannot be seen now."""
        try:
            return self._fd is not None and os.path.samestat(os.fstat(self._fd), os.lstat(path))
        except OSError as error:
            return error.errno not in (errno.ENOENT, errno.ENOTDIR)  # guard: unseen-folder-is-not-removed

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            # A child that subprocess has forked without running the hooks of os.fork holds a copy of the descriptor
            # until its exec. Closing ours would leave that copy locked; LOCK_UN releases the lock of all copies.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
            _close(fd)

    def _leave(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            _close(fd)


def regular_file(path: str, flags: int) -> int:
    """An `opener` for `open` that raises OSError for what is no file, such as a pipe, for which `open` would wait."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)  # guard: agents-pipe-not-waited-for
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        _close(fd)
        raise OSError(errno.EINVAL, "it is no regular file", path)
    return fd


def free_bytes(path: str) -> int:
    """Bytes that this user may still write on the file system of `path`, with quotas considered. Raises OSError."""
    found = os.statvfs(path)
    return min([found.f_bavail * found.f_frsize, *quota.free_bytes(path)])

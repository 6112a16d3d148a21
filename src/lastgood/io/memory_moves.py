"""Moves a file from memory to its spill folder, while other threads and processes read, replace or delete it.

copy to a staged file on the disk, synced -> in one step for all others (`still`): the staged file gets its name in the
spill folder, and the name in memory is removed

Invariants
  1. At every instant the file can be read whole under its name: until the last step from memory, then from the disk. A
     process that is killed between any two steps leaves it so.
  2. Only a file that changes no more is moved: who writes one holds its exclusive lock. The shared lock that is held
     here keeps its memory from being used again.
  3. The copy takes no memory but its buffer: it goes past the page cache, or is dropped from it as it is written.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable

from ..ports import Stop, never
from .files import PosixFile, PosixFiles, round_up, takes_direct
from .memory_files import SMALLER, MemoryFiles, still
from .os_errors import USED_UP, NoMemory
from .reused_files import LEAST_BYTES, is_at

STAGED = ".moving"
"""After the name of the spill folder: the file that is being copied. A killed process leaves one, which the next copy
replaces."""
BUFFER_BYTES = 8 << 20
CACHED_BYTES = 64 << 20
"""Without direct I/O, so many bytes of the copy are in the page cache, at most."""
_DISK = PosixFiles()


def moved(
    files: MemoryFiles,
    path: str,
    stop: Stop = never,
    is_of_run: Callable[[], bool] = lambda: True,
) -> int:
    """Move the file at `path` from memory to the spill folder. One process at a time may do it for a spill folder.

    Returns its length; 0 if there is nothing to move: it was deleted or replaced meanwhile, is being written, is
    shorter than LEAST_BYTES, or `stop()`, which is polled between pieces of the copy, became true; or `is_of_run()` is
    false, which is asked in the last step: the run has another spill folder by now. Raises NoMemory if there is no disk
    for it or that is full, and the OSErrors of reading and writing; the file is in memory then.
    """
    elsewhere, staged = files.place_on_disk(path), staged_in(files)
    try:
        file = files.opened(path, "read")
    except FileNotFoundError:
        return 0
    try:
        length = file.size()
        if length < LEAST_BYTES:
            return 0
        try:
            file.lock_shared()  # it may have been empty when it was opened, and be written since
        except BlockingIOError:
            return 0
        os.makedirs(os.path.dirname(staged), mode=0o700, exist_ok=True)
        try:
            if not _copied(file, staged, length, stop):
                return 0
            with still(files.root):  # guard: names-still-while-one-moves
                if not is_at(path, file.inode()):  # guard: replaced-file-not-moved
                    return 0
                if not is_of_run():  # guard: nothing-moves-to-earlier-spill
                    return 0
                os.makedirs(os.path.dirname(elsewhere), mode=0o700, exist_ok=True)
                _DISK.rename(staged, elsewhere)
                _DISK.remove(path)
        except FileNotFoundError:
            if os.path.lexists(path):
                raise
            return 0  # the memory of the run was removed
        except OSError as error:
            if error.errno not in USED_UP:
                raise
            what = f"not enough memory, and {files.spill_folder}, to which it would be moved, is full too"
            raise NoMemory(what, path, f"Free space on the disk of {files.spill_folder}. {SMALLER}") from error
        finally:
            with contextlib.suppress(FileNotFoundError):
                _DISK.remove(staged)
        return length
    finally:
        file.close()


def staged_in(files: MemoryFiles) -> str:
    """The path of the file that is being copied. Raises NoMemory if there is no disk for it."""
    if files.spill_folder is None:
        raise NoMemory("not enough memory, and no disk of this machine below it", files.root, SMALLER)
    return f"{files.spill_folder}{STAGED}"


def _copied(file: PosixFile, staged: str, length: int, stop: Stop) -> bool:
    """Write the bytes of a file to `staged`, synced. Returns False if `stop()` became true. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        _DISK.remove(staged)  # of a process that was killed
    direct, unsynced = takes_direct(os.path.dirname(staged)), 0
    copy = _DISK.open(staged, "new", direct=direct)
    try:
        copy.reserve(round_up(length))  # raises ENOSPC before anything is written
        with mmap.mmap(-1, BUFFER_BYTES) as memory, memoryview(memory) as buffer:
            for start in range(0, length, BUFFER_BYTES):
                if stop():
                    return False
                count = min(BUFFER_BYTES, length - start)
                with buffer[: round_up(count)] as piece:
                    _all(file.read_into(piece, start), count)
                    _all(copy.write_at(piece, start), len(piece))
                unsynced += count
                if not direct and unsynced >= CACHED_BYTES:
                    copy.sync()
                    _DISK.open(staged, "read", fresh=True).close()  # drops it from the page cache
                    unsynced = 0
        copy.resize(length)
        copy.sync()  # guard: moved-file-synced
    finally:
        copy.close()
    _DISK.open(staged, "read", fresh=True).close()  # guard: moved-file-leaves-the-cache
    return True


def _all(count: int, wanted: int) -> None:
    """Raises OSError if a call has read or written another number of bytes than all of a piece."""
    if count != wanted:  # guard: moved-file-is-whole
        raise OSError(errno.EIO, f"{count} of {wanted} bytes were read or written")

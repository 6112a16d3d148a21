"""Files that are overwritten through a shared mapping: a copy and an msync a chunk; on persistent memory stores that go
past the caches, and a fence. Only files opened with "write" are mapped; all else is as in files.py.

A medium that fails under a mapping ends the process with SIGBUS, where a write would have returned an error; and the
kernel reads each page before it is overwritten. `persist="direct"` has neither.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
import threading

from ..errors import Refused
from ..ports import OpenMode
from .files import BLOCK_BYTES, PosixFile, PosixFiles, _close

_MS_SYNC = 0x10 if sys.platform == "darwin" else 4
_MAP_SYNC = 0x03 | 0x80000  # with MAP_SHARED_VALIDATE: refused where stores alone would not be durable

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Pmem:
    """Stores past the CPU's caches, by libpmem (PMDK). Raises Refused where the library is not installed."""

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL("libpmem.so.1")
        except OSError as error:
            raise Refused(
                f"this directory is on persistent memory, and libpmem is not there: {error}",
                safe="Nothing was touched.",
                todo='Install it (Debian, Ubuntu: apt-get install libpmem1), or take persist="direct".',
            ) from error
        self.copy = library.pmem_memcpy_nodrain
        self.copy.argtypes, self.copy.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], ctypes.c_void_p
        self.drain = library.pmem_drain
        self.drain.argtypes, self.drain.restype = [], None


class MappedFiles(PosixFiles):
    """`ports.Files`. Whether `root`, which must be there, is on persistent memory is found out; `pmem=True` takes its
    stores elsewhere too, as tests do on tmpfs, where nothing is durable anyway.
    """

    def __init__(self, root: str, pmem: bool = False) -> None:
        self._durable_stores = on_pmem(root)
        self._pmem = Pmem() if pmem or self._durable_stores else None

    def open(self, path: str, mode: OpenMode, *, direct: bool = False, fresh: bool = False) -> PosixFile:
        if mode != "write":
            return super().open(path, mode, direct=direct, fresh=fresh)
        return MappedFile(super().open(path, mode), self._pmem, self._durable_stores)


class MappedFile(PosixFile):
    """`ports.File` over a mapping of a whole file, which it takes over. Its buffers must be writable memory."""

    def __init__(self, file: PosixFile, pmem: Pmem | None, durable_stores: bool) -> None:
        super().__init__(file._fd, file._path, in_place=True)
        self._pmem, self._durable_stores = pmem, durable_stores
        self._memory: mmap.mmap | None = None
        self._address = self._length = 0
        self._grown = False
        self._mapping = threading.Lock()

    def write_at(self, mv: memoryview, offset: int) -> int:
        self._map()
        if offset + len(mv) > self._length:
            raise OSError(errno.EFBIG, "a mapping does not grow", self._path)
        source, target = ctypes.addressof(ctypes.c_char.from_buffer(mv)), self._address + offset
        if self._pmem:
            self._pmem.copy(target, source, len(mv))
            self._pmem.drain()  # it fences the stores of this thread only
        else:
            ctypes.memmove(target, source, len(mv))  # as all calls here, without the GIL
            before = target % mmap.PAGESIZE
            if _LIBC.msync(target - before, len(mv) + before, _MS_SYNC):
                self._sync_failed = True
                raise OSError(ctypes.get_errno(), "msync failed", self._path)
        return len(mv)

    def reserve(self, length: int) -> None:
        self._unmap()
        super().reserve(length)

    def resize(self, length: int) -> None:
        self._unmap()
        super().resize(length)

    def sync(self) -> None:
        if self._grown or not self._durable_stores:
            super().sync()

    def close(self) -> None:
        self._unmap()
        super().close()

    def _map(self) -> None:
        with self._mapping:
            if self._memory is None:
                flags = _MAP_SYNC if self._durable_stores else mmap.MAP_SHARED
                self._memory, self._length = mmap.mmap(self._fd, 0, flags=flags), self.size()
                self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def _unmap(self) -> None:
        """For a new length, or for good; no write is under way."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        self._grown = True


def on_pmem(folder: str) -> bool:
    """Whether stores to a mapped file are durable without a flush of the file: DAX, tried as it will be used."""
    path = os.path.join(folder, f".probe-{os.getpid()}-map")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    except OSError:
        return False  # whoever writes next is told why
    try:
        os.truncate(fd, BLOCK_BYTES)
        mmap.mmap(fd, BLOCK_BYTES, flags=_MAP_SYNC).close()
        return True
    except OSError:
        return False
    finally:
        _close(fd)
        with contextlib.suppress(OSError):  # what stays is litter that the next opening takes
            os.unlink(path)

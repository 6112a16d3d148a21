"""Files that are overwritten through a shared memory mapping (`persist="mmap"`).

Each write is a copy into the mapping and an msync. On persistent memory it is a copy by stores that bypass the caches
of the processor, and a fence. Only files that are opened with "write" are mapped; all others are as in files.py.

Two disadvantages against `persist="direct"`: a medium that fails under a mapping ends the process with SIGBUS, where a
write would have returned an error, and the kernel reads each page before it is overwritten.
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
from ..limits import DIRECT_IO_BYTES
from ..ports import OpenMode
from .files import PosixFile, PosixFiles, _close

_MS_SYNC = 0x10 if sys.platform == "darwin" else 4
_MAP_SYNC = 0x03 | 0x80000  # MAP_SHARED_VALIDATE | MAP_SYNC
"""mmap fails unless a store is durable, without fsync, once it is flushed from the processor's caches"""

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Pmem:
    """Stores that bypass the processor's caches, by libpmem (PMDK). Raises Refused if it is not installed."""

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL("libpmem.so.1")
        except OSError as error:
            raise Refused(
                f"writes to persistent memory need libpmem, which cannot be loaded: {error}",
                safe="Nothing was touched.",
                todo='Install it (Debian, Ubuntu: apt-get install libpmem1), or use persist="direct".',
            ) from error
        self.copy = library.pmem_memcpy_nodrain
        self.copy.argtypes, self.copy.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], ctypes.c_void_p
        self.drain = library.pmem_drain
        self.drain.argtypes, self.drain.restype = [], None


class MappedFiles(PosixFiles):
    """`ports.Files` that maps the files which are overwritten.

    `root`: an existing directory; it is tested for persistent memory. `pmem=True` uses the stores of persistent memory
    in any case, as tests do on tmpfs, where nothing is durable. Raises Refused if these stores are to be used and
    libpmem is not installed.
    """

    def __init__(self, root: str, pmem: bool = False) -> None:
        self._durable_stores = on_pmem(root)
        self._pmem = Pmem() if pmem or self._durable_stores else None

    def open(self, path: str, mode: OpenMode, *, direct: bool = False, fresh: bool = False) -> PosixFile:
        if mode != "write":
            return super().open(path, mode, direct=direct, fresh=fresh)
        return MappedFile(super().open(path, mode), self._pmem, self._durable_stores)


class MappedFile(PosixFile):
    """`ports.File` over a mapping of a whole file. It closes `file`. The buffers to write must be writable memory.

    `pmem`: the stores to write with; None writes by copies and msync. `durable_stores`: whether the medium makes these
    stores durable, so that only a change of the length needs an fsync.
    """

    def __init__(self, file: PosixFile, pmem: Pmem | None, durable_stores: bool) -> None:
        super().__init__(file._fd, file._path, in_place=True)
        self._pmem, self._durable_stores = pmem, durable_stores
        self._memory: mmap.mmap | None = None
        self._address = self._length = 0
        self._resized = False
        self._mapping = threading.Lock()

    def write_at(self, mv: memoryview, offset: int) -> int:
        self._map()
        if offset + len(mv) > self._length:
            raise OSError(errno.EFBIG, "a mapping does not grow", self._path)
        source, target = ctypes.addressof(ctypes.c_char.from_buffer(mv)), self._address + offset
        if self._pmem:
            self._pmem.copy(target, source, len(mv))
            self._pmem.drain()  # a fence orders only the stores of the thread that calls it
        else:
            ctypes.memmove(target, source, len(mv))  # like every call through ctypes, it releases the GIL
            before = target % mmap.PAGESIZE
            if _LIBC.msync(target - before, len(mv) + before, _MS_SYNC):
                self._sync_failed = True
                raise OSError(ctypes.get_errno(), "msync failed", self._path)
        return len(mv)

    def reserve(self, length: int) -> None:
        self._unmap()
        self._resized = True
        super().reserve(length)

    def resize(self, length: int) -> None:
        self._unmap()
        self._resized = True
        super().resize(length)

    def sync(self) -> None:
        if self._resized or not self._durable_stores:
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
        """Before the length changes, and at the end. No write may be under way."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def on_pmem(folder: str) -> bool:
    """Whether stores to a mapped file in `folder` are durable without fsync (DAX). It is tried with a probe file."""
    path = os.path.join(folder, f".probe-{os.getpid()}-map")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    except OSError:
        return False  # the first write to the run reports the reason
    try:
        os.truncate(fd, DIRECT_IO_BYTES)
        mmap.mmap(fd, DIRECT_IO_BYTES, flags=_MAP_SYNC).close()
        return True
    except OSError:
        return False
    finally:
        _close(fd)
        with contextlib.suppress(OSError):  # the next opening of the run removes a probe file that remains
            os.unlink(path)

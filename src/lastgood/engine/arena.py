"""The arena: a bounded buffer pool of page-aligned host memory, lent in chunks.

A lease has one owner at a time: the caller of `take`, until it passes the lease on or releases it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading

from ..io.files import round_up
from ..limits import HUGE_PAGE_BYTES
from ..ports import Stop, never

MADV_WIPEONFORK = 18
"""madvise(2), Linux 4.14 and later; Python's mmap module does not define it"""


class Lease:
    """One chunk of the arena. `buffer` is page-aligned and as long as a chunk; `address` is that of its first byte."""

    __slots__ = ("_arena", "_start", "address", "buffer")

    def __init__(self, arena: Arena | FileMemory, start: int, buffer: memoryview, address: int) -> None:
        self._arena, self._start, self.buffer, self.address = arena, start, buffer, address

    def release(self) -> None:
        """Return the chunk to the arena. Called once; the buffer must not be used afterwards. From any thread."""
        self._arena.give_back(self._start)


class FileMemory:
    """Used as an arena: the mapped memory of a file, whose chunks are lent in file order, each once.

    The last chunk is shorter than the others if the file is not a multiple of them. For one thread that takes.
    """

    def __init__(self, memory: mmap.mmap, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._view = memoryview(memory)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._next = 0

    def take(self, stop: Stop = never) -> Lease | None:
        """As `take_now`: waiting would not help."""
        return self.take_now()

    def take_now(self) -> Lease | None:
        """The next chunk of the file; None after its last one."""
        start, self._next = self._next, self._next + self.chunk_bytes
        piece = self._view[start : self._next]
        return Lease(self, start, piece, self._address + start) if piece else None

    def wake(self) -> None:
        """Does nothing: no thread waits."""

    def give_back(self, start: int) -> None:
        """Does nothing: the chunk stays a part of the file."""


class Arena:
    """`arena_bytes` of memory, rounded up to whole chunks of `chunk_bytes`. May be used from any thread.

    The first write to a page costs several times a copy, so chunks that were used before are lent before new ones, and
    no more pages are touched than are needed at once. Data-loader workers that are forked get zeroed pages in place of
    these: shared pages would make every later write copy a page, and would keep the old pages allocated. The memory
    returns to the system with the last reference to the arena.
    """

    def __init__(self, arena_bytes: int, chunk_bytes: int) -> None:
        self.chunk_bytes = round_up(max(chunk_bytes, 1))
        self.arena_bytes = round_up(max(arena_bytes, 1), self.chunk_bytes)
        # Private, because the first write to a shared page is two to four times as slow.
        memory = mmap.mmap(-1, round_up(self.arena_bytes, HUGE_PAGE_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if sys.platform == "linux":
            # Not DONTFORK: a child that drops its copy of this object would unmap whatever it has at these addresses.
            with contextlib.suppress(OSError):  # on an older kernel, forks share the pages
                memory.madvise(MADV_WIPEONFORK)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages uses small ones
                memory.madvise(mmap.MADV_HUGEPAGE)  # direct I/O of 8 MiB is a quarter faster on 4 pages than on 2,048
        self._view = memoryview(memory)[: self.arena_bytes]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._free: list[int] = []
        self._untouched = 0
        self._changed = threading.Condition()

    def take(self, stop: Stop = never) -> Lease | None:
        """A free chunk; waits until there is one. None once `stop()` is true: call `wake` after it has become true."""
        with self._changed:
            while not self._any_free():
                if stop():
                    return None
                self._changed.wait()
            return self._lend()

    def take_now(self) -> Lease | None:
        """A free chunk, or None. Does not wait."""
        with self._changed:
            return self._lend() if self._any_free() else None

    def wake(self) -> None:
        """Make every thread that waits in `take` evaluate its `stop` again."""
        with self._changed:
            self._changed.notify_all()

    def memory(self) -> memoryview:
        """All of the memory, for a caller that uses the arena alone. No chunk may be on loan."""
        assert self.idle, "a lease is out"
        return self._view

    @property
    def idle(self) -> bool:
        """Whether no chunk is on loan."""
        with self._changed:
            return len(self._free) * self.chunk_bytes == self._untouched

    def give_back(self, start: int) -> None:
        """Called by `Lease.release` only."""
        with self._changed:
            self._free.append(start)
            self._changed.notify()

    def _any_free(self) -> bool:
        return bool(self._free) or self._untouched < self.arena_bytes

    def _lend(self) -> Lease:
        if self._free:
            start = self._free.pop()
        else:
            start = self._untouched
            self._untouched += self.chunk_bytes
        return Lease(self, start, self._view[start : start + self.chunk_bytes], self.address + start)

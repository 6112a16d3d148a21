"""The arena: one bounded, page-aligned run of host memory, lent in chunks. Knows no tensor.

A lease has one owner at a time: whoever took it, until it is handed on or released.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
from collections.abc import Callable

from ..io.files import round_up

MADV_WIPEONFORK = 18
"""of Linux since 4.14; Python's mmap has no name for it"""
HUGE_BYTES = 2 << 20
"""memory is mapped in steps of it: a small state then lies in one page, and is written faster than from 512"""


class Lease:
    """One chunk of the arena: `buffer` is page-aligned and as long as a chunk, `address` is that of its first byte."""

    __slots__ = ("_arena", "_start", "address", "buffer")

    def __init__(self, arena: Arena, start: int, buffer: memoryview, address: int) -> None:
        self._arena, self._start, self.buffer, self.address = arena, start, buffer, address

    def release(self) -> None:
        """Give the chunk back; its owner must not touch it any more."""
        self._arena.give_back(self._start)


class Arena:
    """`arena_bytes` (rounded up to whole chunks) of memory. What was written before is lent before what never was.

    The first touch of memory costs several times a copy, so no more of it is touched than is needed at once. Workers of
    data loaders that are forked meanwhile get the addresses, and none of the pages: they would turn every write into a
    page copy, and keep them alive. It goes back to the system with the last reference to it.
    """

    def __init__(self, arena_bytes: int, chunk_bytes: int) -> None:
        self.chunk_bytes = round_up(max(chunk_bytes, 1))
        self.arena_bytes = round_up(max(arena_bytes, 1), self.chunk_bytes)
        # Private: the first touch of shared memory is two to four times as slow.
        memory = mmap.mmap(-1, round_up(self.arena_bytes, HUGE_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if sys.platform == "linux":
            # Not DONTFORK: a fork that drops its copy of this object unmaps these addresses, whatever it has there.
            with contextlib.suppress(OSError):  # an older kernel: forks share the pages then
                memory.madvise(MADV_WIPEONFORK)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without: it is small pages then
                memory.madvise(mmap.MADV_HUGEPAGE)  # direct I/O of 8 MiB is a quarter faster on 4 pages than on 2,048
        self._view = memoryview(memory)[: self.arena_bytes]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._free: list[int] = []
        self._untouched = 0
        self._changed = threading.Condition()

    def take(self, stop: Callable[[], bool] = lambda: False) -> Lease | None:
        """A free chunk, waiting for one; None once `stop()` says so (call `wake` after it changed)."""
        with self._changed:
            while not self._any_free():
                if stop():
                    return None
                self._changed.wait()
            return self._lend()

    def take_now(self) -> Lease | None:
        """A free chunk, if there is one."""
        with self._changed:
            return self._lend() if self._any_free() else None

    def wake(self) -> None:
        """Let everyone who waits in `take` ask its `stop` again."""
        with self._changed:
            self._changed.notify_all()

    def whole(self) -> memoryview:
        """All of the memory, for a reader that has the arena to itself (no lease is out)."""
        assert self.idle, "a lease is out"
        return self._view

    @property
    def idle(self) -> bool:
        with self._changed:
            return len(self._free) * self.chunk_bytes == self._untouched

    def give_back(self, start: int) -> None:
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

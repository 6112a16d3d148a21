"""The arena: one bounded, page-aligned, prefaulted run of host memory, lent in chunks. Knows no tensor.

A lease has one owner at a time: whoever took it, until it is handed on or released.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable

from ..rawio.files import BLOCK_BYTES, round_up

_POPULATE_WRITE = 23
"""madvise on Linux, since 5.14; has no name in Python"""


class Lease:
    """One chunk of the arena. `buffer` is page-aligned and as long as the arena's chunk."""

    __slots__ = ("_arena", "_start", "buffer")

    def __init__(self, arena: Arena, start: int, buffer: memoryview) -> None:
        self._arena, self._start, self.buffer = arena, start, buffer

    def release(self) -> None:
        """Give the chunk back; its owner must not touch it any more."""
        self._arena.give_back(self._start)


class Arena:
    """`arena_bytes` (rounded up to whole chunks) of memory, touched once, here: a first touch costs ten times a copy.

    Data-loader workers that are forked meanwhile do not get it: they would turn every write into a page copy, and keep
    it alive. It goes back to the system with the last reference to it.
    """

    def __init__(self, arena_bytes: int, chunk_bytes: int) -> None:
        self.chunk_bytes = round_up(max(chunk_bytes, 1))
        self.arena_bytes = round_up(max(arena_bytes, 1), self.chunk_bytes)
        memory = mmap.mmap(-1, self.arena_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(memory)
        if hasattr(mmap, "MADV_DONTFORK"):
            memory.madvise(mmap.MADV_DONTFORK)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without: it is small pages then
                memory.madvise(mmap.MADV_HUGEPAGE)  # a direct read of 8 MiB is a quarter faster into 4 than into 2,048
        try:
            memory.madvise(_POPULATE_WRITE)
        except OSError:
            for start in range(0, self.arena_bytes, BLOCK_BYTES):
                self._view[start] = 0
        self._free = list(range(self.arena_bytes - self.chunk_bytes, -1, -self.chunk_bytes))
        self._changed = threading.Condition()

    def take(self, stop: Callable[[], bool] = lambda: False) -> Lease | None:
        """A free chunk, waiting for one; None once `stop()` says so (call `wake` after it changed)."""
        with self._changed:
            while not self._free:
                if stop():
                    return None
                self._changed.wait()
            start = self._free.pop()
        return Lease(self, start, self._view[start : start + self.chunk_bytes])

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
            return len(self._free) * self.chunk_bytes == self.arena_bytes

    def give_back(self, start: int) -> None:
        with self._changed:
            self._free.append(start)
            self._changed.notify()

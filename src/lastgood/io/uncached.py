"""Copies of memory whose stores bypass the caches of the processor, by libpmem where that is installed.

For bytes that nobody reads soon: a store through the caches would first read each line that it overwrites.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable

from ..errors import Refused
from .mapped import Pmem

Copy = Callable[[int, int, int], object]
"""copy(target, source, length): addresses, and bytes. Releases the GIL. Other threads and processes see all of the copy
before anything that this thread writes later."""


def uncached_copy() -> Copy:
    """A copy past the caches; where libpmem is not installed, or has no such stores, an ordinary one."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ctypes.memmove
    try:
        pmem = Pmem()
    except Refused:
        return ctypes.memmove

    def copy(target: int, source: int, length: int) -> None:
        pmem.copy(target, source, length)
        pmem.drain()

    return copy

"""The identity of this machine."""

from __future__ import annotations

import platform


def machine() -> str:
    """An id of this machine, the same for all processes that share its page cache."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return platform.node()

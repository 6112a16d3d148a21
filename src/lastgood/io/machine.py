"""The identity of this machine. Reads the environment and one file of the kernel; changes nothing."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

NODE = "LASTGOOD_NODE"
"""The environment variable that names the node, where containers on one machine are to count as several."""


def machine(environ: Mapping[str, str] = os.environ) -> str:
    """An id of this machine, the same for all processes that share its disks and its page cache.

    It is the value of LASTGOOD_NODE; if that is not set or empty, the boot id of the kernel, else the host name.
    """
    return environ.get(NODE, "") or boot_id()


def boot_id() -> str:
    """An id of this start of this kernel; the host name where the kernel shows none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return platform.node()

"""The name of this node, which is the same for all processes that share its disks and its page cache.

Reads the environment and one file of the kernel; changes nothing.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

VARIABLE = "LASTGOOD_NODE"
"""The environment variable that names the node, where containers on one machine count as several nodes."""


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """The value of LASTGOOD_NODE; if it is not set or empty, the id of this boot of the kernel, else the host name."""
    if named := environ.get(VARIABLE, ""):
        return named
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return platform.node()

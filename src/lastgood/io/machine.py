"""The identity of this machine. Reads the environment, a file of the kernel and one of the system; changes nothing."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

MACHINE_ID = "/etc/machine-id"
NODE = "LASTGOOD_NODE"
"""The environment variable that names the node, where containers on one machine are to count as several."""


def machine(environ: Mapping[str, str] = os.environ) -> str:
    """An id of this machine, the same for all processes that share its disks and its page cache.

    It is the value of LASTGOOD_NODE; if that is not set or empty, the boot id of the kernel, else the host name.
    """
    return given_name(environ) or boot_id()


def given_name(environ: Mapping[str, str] = os.environ) -> str:
    """The value of LASTGOOD_NODE as text, with bytes that are none written out; empty if it is not set."""
    return os.fsencode(environ.get(NODE, "")).decode(errors="backslashreplace")


def host() -> str:
    """A name of this machine that stays the same when it is started again: that of the host, and its machine-id where
    the system has one that stays, because hosts of two clusters may have one name."""
    if os.path.ismount(MACHINE_ID):  # a system without a disk of its own gets another one at each start
        return platform.node()
    try:
        with open(MACHINE_ID) as file:
            return f"{platform.node()}\0{file.read().strip()}"  # guard: hosts-of-one-name-differ
    except OSError:
        return platform.node()


def boot_id() -> str:
    """An id of this start of this kernel; the host name where the kernel shows none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return platform.node()

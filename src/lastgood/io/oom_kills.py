"""How many processes the kernel has killed for memory: in the control group of this process, else on this machine.

Reads /proc and /sys/fs/cgroup; changes nothing. The kernel counts before it sends the signal.
"""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple


class OomKills(NamedTuple):
    """`kills`: so far. `where`: the control group, or the machine, for people."""

    kills: int
    where: str


def oom_kills(root: str = "/") -> OomKills | None:
    """The processes that were killed so far; None where no kernel counts them.

    `root` (default "/"): the directory that holds `proc` and `sys`.
    """
    for mount, path, name in _groups(root):
        parts = [one for one in path.split("/") if one and one != ".."]
        for depth in range(len(parts), -1, -1):  # a container sees only the groups below its own
            folder = os.path.join(root, mount, *parts[:depth])
            if (count := _count(os.path.join(folder, name))) is not None:
                return OomKills(count, f"control group /{'/'.join(parts[:depth])}")
    count = _count(os.path.join(root, "proc/vmstat"))
    return None if count is None else OomKills(count, "somewhere on this machine")


def _groups(root: str) -> list[tuple[str, str, str]]:
    """Where a group of this process may be: mount, path below it, and the file with the count."""
    found = list[tuple[str, str, str]]()
    with contextlib.suppress(OSError), open(os.path.join(root, "proc/self/cgroup")) as file:
        for line in file:
            number, controllers, path = line.rstrip("\n").split(":", 2)
            if "memory" in controllers.split(","):
                found.insert(0, ("sys/fs/cgroup/memory", path, "memory.oom_control"))
            elif number == "0":
                found.append(("sys/fs/cgroup", path, "memory.events"))
    return found


def _count(path: str) -> int | None:
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        for line in file:
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    return None

"""How much memory this process may still take: from the kernel's own count, and from the limits of control groups.

Reads /proc and /sys/fs/cgroup; changes nothing. Memory of files in a tmpfs counts like any other memory of the process
that wrote them first, and a process that goes past the limit of its control group is killed. So the limit is compared
before memory is taken, and what files have taken is given back when the processes of the job need it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

MARGIN_BYTES = 1 << 30
"""What is left for the processes of the job, at most."""
MARGIN_SHARE = 16
"""Of a smaller limit, one part of so many is left."""
MARGIN_LEAST_BYTES = 192 << 20
"""What is left of any limit: for the agent, and for the buffers in which saves are verified and copied."""
SHORT_SHARE = 3, 4
"""Memory is short where less than this part of a margin is left. New files leave the whole margin, so they alone never
make memory short: only what the processes of the job take besides does."""
_LIMITS = "memory.max", "memory.high"
"""In version 2 of control groups: past the first a process is killed; past the second each one is slowed down until the
group has given memory back, which files in a tmpfs without swap cannot."""
_STATISTICS = "inactive_file", "file_dirty", "file_writeback"
_STATISTICS_1 = "total_inactive_file", "total_dirty", "total_writeback"
"""In version 1 of control groups: pages of the page cache, those not yet written, and those being written."""
_NO_LIMIT = 1 << 60
"""Version 1 of control groups reports a number near 2**63 where there is no limit."""

Limit = tuple[int, int]
"""the bytes that are left until a limit, and how many of them are to be left"""


def available_bytes(root: str = "/") -> int | None:
    """Bytes of memory that this process may still take, with a margin left. 0 if nothing is left; None if unknown.

    `root` (default "/"): the directory that holds `proc` and `sys`.
    """
    found = [left - margin for left, margin in _all(root)]
    return max(0, min(found)) if found else None


def lacking_bytes(root: str = "/") -> int:
    """Bytes that files in memory are to give back, so that the whole margin is left again. 0 unless memory is short.

    `root` (default "/"): as for `available_bytes`.
    """
    return most_lacking(_all(root))


def most_lacking(limits: Iterable[Limit]) -> int:
    """As `lacking_bytes`, of these limits."""
    part, of = SHORT_SHARE
    # guard: short-below-what-new-files-leave
    return max((margin - left for left, margin in limits if left * of < margin * part), default=0)


def _all(root: str) -> Iterator[Limit]:
    yield from _of_machine(root)
    yield from _of_groups(root)


def _of_machine(root: str) -> Iterator[Limit]:
    try:
        with open(os.path.join(root, "proc/meminfo")) as file:
            fields = {line.split(":")[0]: int(line.split()[1]) << 10 for line in file if line.endswith("kB\n")}
    except (OSError, ValueError, IndexError):
        return
    if "MemAvailable" in fields and "MemTotal" in fields:
        yield fields["MemAvailable"], _margin(fields["MemTotal"])


def _of_groups(root: str) -> Iterator[Limit]:
    """For each control group of this process that has a limit, and for its parents: what is left of the limit."""
    try:
        with open(os.path.join(root, "proc/self/cgroup")) as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return
    for number, controllers, path in (one for one in lines if len(one) == 3):
        if number == "0":
            for mount in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                for limit in _LIMITS:
                    yield from _of_group_and_parents(root, mount, path, limit, "memory.current", _STATISTICS)
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes"
            yield from _of_group_and_parents(root, "sys/fs/cgroup/memory", path, *names, _STATISTICS_1)


def _of_group_and_parents(
    root: str, mount: str, path: str, limit: str, usage: str, names: tuple[str, str, str]
) -> Iterator[Limit]:
    parts = [one for one in path.split("/") if one and one != ".."]
    for depth in range(len(parts), -1, -1):
        folder = os.path.join(root, mount, *parts[:depth])
        with contextlib.suppress(OSError, ValueError):  # a container sees only the groups below its own
            most = int(_text(folder, limit))  # "max" is no number: there is no limit
            if most < _NO_LIMIT:
                # Clean pages of the page cache are given back under pressure. Others wait for a disk, perhaps too long.
                cached, dirty, written = (_statistic(folder, one) for one in names)
                yield most - int(_text(folder, usage)) + max(0, cached - dirty - written), _margin(most)


def _statistic(folder: str, name: str) -> int:
    for line in _text(folder, "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _text(folder: str, name: str) -> str:
    with open(os.path.join(folder, name)) as file:
        return file.read()


def _margin(total: int) -> int:
    return min(MARGIN_BYTES, max(total // MARGIN_SHARE, MARGIN_LEAST_BYTES))

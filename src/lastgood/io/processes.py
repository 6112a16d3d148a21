"""The identity of a process, by which another process finds out later whether it still lives. Reads /proc only.

A number alone does not do: after its process has ended, another process may receive it, also after the next start of
the machine or in another container.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from .machine import boot_id


def identity() -> str:
    """A text that names this process, and no other one of any machine or time; where /proc shows less, one of which
    `lives` does not know."""
    started = _started(os.getpid())
    return " ".join([*_machine(), str(os.getpid()), started or ""])


def lives(process: str) -> bool | None:
    """Whether a process lives. `process`: its `identity`. None: it was on another machine or in another container, or
    before the last start of this machine, so that nothing here shows it."""
    *machine, pid, started = process.split(" ")
    if machine != _machine() or not all(machine) or not started:
        return None
    return _started(int(pid)) == started  # guard: number-of-ended-process-reused


def _machine() -> Sequence[str]:
    """What all processes have in common that see each other's numbers: one start of a machine, and a namespace."""
    try:
        return [boot_id(), os.readlink("/proc/self/ns/pid")]
    except OSError:  # some sandboxes do not show it
        return [boot_id(), ""]


def _started(pid: int) -> str | None:
    """When a process was started, in ticks since the machine was; None if it has ended, also if nobody has noted it."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]

"""The identity of a process, by which another process finds out later whether it still lives, and what binds the
lives of processes to each other; the command of one that runs this package; the end of one that this process started.

A number alone is no identity: after its process has ended, another process may receive it, also after the next start of
the machine or in another container.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence

from .machine import boot_id

_DIES_WITH_PARENT, _ADOPTS_ORPHANS, _READABLE_BY = 1, 36, 0x59616D61
"""PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_PTRACER"""

JOB_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""The signals that ask for the end of a job: a machine that shuts down, or systemd, sends them to all processes."""
SAFE_PATH = ["-P"] if sys.version_info >= (3, 11) else []
"""the option with which Python imports nothing from the current folder"""


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


def namespace() -> int:
    """A number for those processes that see each other's; 0 where it is not shown."""
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def started_ticks(pid: int) -> int:
    """When a process of this namespace was started, in ticks since the machine was; 0 if it has ended, also if its
    parent has not noted that, or where it is not shown."""
    return int(_started(pid) or 0)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends. Ends it if that has ended already.

    `parent`: its process id.
    """
    _prctl(_DIES_WITH_PARENT, signal.SIGKILL)  # guard: child-dies-with-parent
    if os.getppid() != parent:
        os._exit(1)


def outlive_signals() -> None:
    """Ignore the signals of JOB_ENDS. For a process that its parent needs until the ranks have ended, and that dies
    with it."""
    for one in JOB_ENDS:
        signal.signal(one, signal.SIG_IGN)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a group of its own, and all of the group, and wait for it. Does nothing if it ended."""
    if process.poll() is None:  # guard: number-of-ended-group-reused
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def end_group_gently(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Ask the group that a process leads to end, and kill after `seconds` what is left of it, also where the process
    itself has ended. Nobody may have waited for it (`wait_unreaped`): until then no other group has its number.

    What a launcher has put into groups of its own it ends itself, if it is asked.
    """
    try:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # guard: launcher-ends-its-ranks
        _wait_unreaped(process, seconds)
    finally:  # also where somebody presses Ctrl-C again
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_unreaped(process: subprocess.Popen[bytes]) -> None:
    """Wait until a process has ended, and leave its status to `wait`."""
    _wait_unreaped(process, None)


def _wait_unreaped(process: subprocess.Popen[bytes], seconds: float | None) -> None:
    pidfd = os.pidfd_open(process.pid)
    try:
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        ended.poll(None if seconds is None else seconds * 1000)
    finally:
        os.close(pidfd)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends."""
    _prctl(_ADOPTS_ORPHANS, 1)


def readable_by(other: int) -> None:
    """Let a process of the same user, and those that it starts, read the memory of this one, where the kernel permits
    that to its ancestors only (Yama). `other`: its process id."""
    with contextlib.suppress(OSError):  # a kernel without Yama permits it
        _prctl(_READABLE_BY, other)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


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


def command_of(module: str, *arguments: str) -> list[str]:
    """The command of a process that runs a module of this package. It is started in "/", with `python_path`: not in the
    current folder, where modules of anybody may lie, and which it would keep from being unmounted."""
    return [sys.executable, *SAFE_PATH, "-m", module, *arguments]


def python_path() -> str:
    """Where such a process finds the package that this process runs, and the modules that it needs."""
    own = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([own, *(one for one in named if os.path.isabs(one))])

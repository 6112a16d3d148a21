"""The faults of the campaign recovery.py, and how a rank makes them happen to itself in a chosen phase of its run.

Knows nothing of training: the job (recovery_job.py) says which phase it has reached. Decides nothing about what a fault
should lead to (recovery_judge.py).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lastgood.io.machine import NODE
from lastgood.records import Record

PHASES = ("start", "rendezvous", "restore", "step", "save", "commit", "teardown")
BEFORE_PROGRESS = ("start", "rendezvous", "restore")
"""phases in which an attempt has saved nothing newer yet"""
ENDING = ("kill", "stop", "exception", "exit", "oom", "nan", "store", "node")
"""kinds that end an attempt"""
PASSING = ("slow", "full")
"""kinds that an attempt may survive: another fault ends it later"""
GROUPS = next(filter(Path.is_dir, [Path("/sys/fs/cgroup/memory")]), Path("/sys/fs/cgroup"))
"""of control groups of version 1; where there are none, of version 2"""
GROUP = "lastgood-campaign-"
GROUP_BYTES = 16 << 20
FILLER = "filler-"
"""before the number of the attempt that has filled the disk"""
RESTORE_CALLS = 24
"""about the number of system calls on the run that a rank makes in a restore"""
SLOW_SECONDS = 0.2
"""how much longer each step of a slow rank takes"""
SLOW_STEPS = 30
"""In an attempt with a slow rank there are so many steps more: it is named after ten windows of training."""
SURVIVED = 90
"""exit code of ranks whose attempt no fault has ended"""
MESSAGE = "a fault of the campaign"


class Fault(Record, frozen=True, kw_only=True):
    """One fault. `moment`: when within its phase, from 0.0 to 1.0. `step`, `window`: where it is not 0, or not None, it
    happens in that step of the training, or with that window of the first epoch, in each attempt."""

    kind: str
    phase: str
    rank: int
    moment: float = 0.0
    step: int = 0
    window: int | None = None


class Attempt(Record, frozen=True, kw_only=True):
    """What happens in one attempt: faults that it survives, then at most one that ends it."""

    faults: list[Fault] = msgspec.field(default_factory=list)
    ends: bool = True
    """whether it stops a few steps after its last save, and not at the end of the training"""


class Plan(Record, frozen=True, kw_only=True):
    """What happens to one job. `attempts`: those after the last one are left in peace. `total`: steps of the training.
    `skipped`: windows (epoch, window) that are left out from the beginning; `room`: folder of the run."""

    attempts: list[Attempt]
    total: int
    room: str
    skipped: list[tuple[int, int]] = msgspec.field(default_factory=list)


class Notes:
    """What a rank notes while it runs, one line of JSON at a time, which survives its death. `path`: of the file."""

    def __init__(self, path: Path, attempt: int, rank: int) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.attempt, self._common = attempt, {"attempt": attempt, "rank": rank}

    def note(self, what: str, **more: object) -> None:
        line = {**self._common, "what": what, "at": time.monotonic(), **more}
        os.write(self._descriptor, json.dumps(line).encode() + b"\n")


class Injector:
    """The faults of one rank in one attempt. `port`: of the store. `room`: the file system of the run."""

    def __init__(self, faults: Sequence[Fault], notes: Notes, port: int, room: Path) -> None:
        self._left, self._notes, self._port, self._room = list(faults), notes, port, room
        self._lock, self._struck = threading.Lock(), threading.Event()
        self._thread, self._held = threading.get_ident(), list[socket.socket]()
        self.step, self.poisoned, self._slow, self._full = 0, False, False, False

    # ---- phases --------------------------------------------------------------------------------------------

    def reach(self, phase: str, moment: tuple[float, float] = (0.0, 1.0)) -> None:
        """The main thread is in a phase, in this part of it: make what is due there happen."""
        for one in [one for one in self._left if one.phase == phase and moment[0] <= one.moment < moment[1]]:
            self._happen(one)

    def in_step(self) -> None:
        """The main thread computes a step: a slow rank takes longer for it."""
        if self._slow:
            time.sleep(SLOW_SECONDS)

    def refill(self) -> None:
        """Before a save: a disk that was filled is full again, also where deletions have made room since."""
        if self._full:
            fill(self._room, self._notes.attempt)

    @contextlib.contextmanager
    def rendezvous(self) -> Iterator[None]:
        """In the block the process group is made: faults happen before or after the ranks connect to each other."""
        from torch.distributed import distributed_c10d as c10d

        make = c10d._new_process_group_helper

        def made(*arguments: Any, **settings: Any) -> Any:
            self.reach("rendezvous", (0.0, 0.5))
            group = make(*arguments, **settings)
            self.reach("rendezvous", (0.5, 1.0))
            return group

        vars(c10d)["_new_process_group_helper"] = made
        try:
            yield
        finally:
            vars(c10d)["_new_process_group_helper"] = make

    def due(self, phase: str) -> Fault | None:
        """The fault that is left for a phase."""
        return next((one for one in self._left if one.phase == phase), None)

    def strike(self, fault: Fault) -> None:
        """Make a fault happen that a call on the run has reached, in whatever thread."""
        if fault.kind == "exception" and threading.get_ident() != self._thread:
            self._struck.set()  # the main thread raises it, while the save is under way
            return
        self._happen(fault)

    def await_strike(self, phase: str) -> None:
        """Raise in the main thread what a call on the run has reached in another one."""
        fault = self.due(phase)
        if fault is not None and fault.kind == "exception":
            self._struck.wait(30.0)
            self._happen(fault)

    # ---- faults --------------------------------------------------------------------------------------------

    def _happen(self, fault: Fault) -> None:
        with self._lock:
            if fault not in self._left:
                return
            if not fault.step and fault.window is None:
                self._left.remove(fault)
        node = os.environ.get(NODE, "")
        self._notes.note("fault", kind=fault.kind, phase=fault.phase, step=self.step, node=node)
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "exception":
                raise ValueError(MESSAGE)
            case "import":
                raise ModuleNotFoundError(MESSAGE)
            case "exit":
                os._exit(137)
            case "oom":
                exceed_memory()
            case "node":
                os.kill(os.getppid(), signal.SIGKILL)
                signal.pause()
            case "store" if fault.phase == "start":
                self._held.append(held_port(self._port))
            case "store":
                close_connections(self._port)
            case "full":
                self._full = True
                self.refill()
            case "slow":
                self._slow = True
            case "nan":
                self.poisoned = True


class Calls:
    """Replaces `os` in lastgood.io.files: a fault happens at one of the calls on the run that it watches."""

    WATCHED = frozenset(
        ["open", "scandir", "mkdir", "link", "unlink", "preadv", "pwrite", "fsync", "posix_fallocate", "ftruncate"]
    )

    def __init__(self, injector: Injector) -> None:
        self._injector, self._lock = injector, threading.Lock()
        self._fault: Fault | None = None
        self.count, self._at = 0, 0

    def arm(self, phase: str, calls: int) -> None:
        """From now on, the fault of a phase happens at a call. `calls`: about how many there will be."""
        self._fault = self._injector.due(phase)
        self.count, self._at = 0, int(calls * self._fault.moment) if self._fault else 0

    def disarm(self) -> int:
        """No fault happens from now on. Returns the number of calls since `arm`."""
        self._fault = None
        return self.count

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in self.WATCHED:
            return real

        def call(*arguments: Any) -> Any:
            with self._lock:
                self.count, at, fault = self.count + 1, self.count, self._fault
            if fault is None:
                return real(*arguments)
            if fault.phase != "commit":
                if at == self._at:
                    self._injector.strike(fault)
                return real(*arguments)
            # The coordinator commits by this link. Any other rank waits for that once it has linked its manifest.
            names = ("COMMIT",) if fault.rank == 0 else ("manifest.json",)
            commits = name == "link" and str(arguments[1]).endswith(names)
            if commits and fault.rank == 0 and fault.moment < 0.5:
                self._injector.strike(fault)
            found = real(*arguments)
            if commits:
                self._injector.strike(fault)
            return found

        return call


def exceed_memory() -> None:
    """Put this process into a control group of its own, and take more memory than it permits: the kernel ends it."""
    group = GROUPS / f"{GROUP}{os.getpid()}"
    group.mkdir()
    _limited(group)
    (group / "cgroup.procs").write_text(str(os.getpid()))
    memory = bytearray(4 * GROUP_BYTES)
    for at in range(0, len(memory), 4096):
        memory[at] = 1
    raise AssertionError("the control group has set no limit")


def _limited(group: Path) -> None:
    """Set the limit of a control group, of either version."""
    old = group / "memory.limit_in_bytes"
    if not old.exists():
        (GROUPS / "cgroup.subtree_control").write_text("+memory")
    (old if old.exists() else group / "memory.max").write_text(str(GROUP_BYTES))


def fill(room: Path, attempt: int) -> None:
    """Fill a file system."""
    descriptor = os.open(room / f"{FILLER}{attempt}", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        for size in (1 << 20, 1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    os.write(descriptor, bytes(size))
    finally:
        os.close(descriptor)


def empty(room: Path, last: int) -> None:
    """Remove what `fill` has written in the attempts up to this one."""
    for one in room.glob(f"{FILLER}*"):
        if int(one.name.removeprefix(FILLER)) <= last:
            one.unlink()


def held_port(port: int) -> socket.socket:
    """A socket that listens at the port of the store, so that the store cannot."""
    holder = socket.socket(socket.AF_INET6)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("::", port))
    holder.listen()
    return holder


def close_connections(port: int) -> None:
    """Shut down every socket of this process at a port: the store that it serves is gone."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            one = socket.socket(fileno=os.dup(int(name)))
            with one:
                if one.getsockname()[1] == port:
                    one.shutdown(socket.SHUT_RDWR)


def remove_groups() -> None:
    """Remove the control groups of processes that have ended; one that lives may be about to enter its own."""
    for group in GROUPS.glob(f"{GROUP}*"):
        if not Path("/proc", group.name.removeprefix(GROUP)).exists():
            with contextlib.suppress(OSError):
                group.rmdir()


def can_limit_memory() -> bool:
    """Whether this user may make control groups of memory."""
    trial = GROUPS / f"{GROUP}trial"
    try:
        trial.mkdir()
    except OSError as error:
        return error.errno == errno.EEXIST
    try:
        _limited(trial)
    except OSError:
        return False
    finally:
        trial.rmdir()
    return True

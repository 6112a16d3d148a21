"""The clusters of `lastgood bench trace`: real processes that are killed and started again. Measures nothing.

`Alone` is one training process of a paper's policy, on a machine that is replaced: it is started again, once the loss
is noticed, and its disk is attached to the new machine. `Nodes` are three `lastgood run`, each with an agent and a
memory of its own: one serves the store, one more trains, and one waits in reserve. A node is lost with everything on
it, and replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol

from lastgood.run import memory_place
from lastgood.supervisor.placement import free_port

from .chunked_copy import Snapshot
from .models import Workload
from .policy import Settings
from .stores import end_peer, start_peer
from .trace_job import NOTES, PEER, Spec

ATTACH_SECONDS = 5.5
"""until the disk of a lost machine is attached to another one (PCcheck, section 5.2.3)"""
STORE = "node0"
DETECT_SECONDS = 5.0
"""A machine that shows no sign of life for so long counts as lost, under `lastgood run` and for the other policies."""
CONF = f"last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt={DETECT_SECONDS:.0f}"
LOSS_SECONDS = 10.0
"""in which the processes of a lost node must be gone"""


class Cluster(Protocol):
    """What trains, and can lose a machine."""

    def start(self) -> None: ...

    def lose(self) -> None:
        """Kill a machine, and begin to replace it."""

    def poll(self) -> None:
        """Do what has become due since the last call. Raises OSError if something has ended that was not killed."""

    def end(self) -> None:
        """Kill what is left."""


class Alone:
    """A policy of a paper in one process. Gemini's peer is another machine, which stays."""

    def __init__(self, spec: Spec) -> None:
        self._spec, self._on_disk = spec, spec.policy != "Gemini"
        self._process: subprocess.Popen[bytes] | None = None
        self._due = 0.0
        self._peer: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if not self._on_disk:
            workload = Workload(self._spec.model, self._spec.scale, self._spec.work)
            length = Snapshot(workload, Settings().chunk_bytes).slot_bytes
            self._peer = start_peer(Path(self._spec.folder) / PEER, length)
        self._spawn()

    def lose(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._due = time.monotonic() + DETECT_SECONDS + (ATTACH_SECONDS if self._on_disk else 0.0)

    def poll(self) -> None:
        if self._process is None and time.monotonic() >= self._due:
            self._spawn()
        if self._process is not None and self._process.poll() is not None:
            raise OSError(f"{self._spec.policy}: the training ended with {self._process.returncode}")

    def end(self) -> None:
        self._due = float("inf")
        self.lose()
        if self._peer is not None:
            end_peer(self._peer)

    def _spawn(self) -> None:
        command = [sys.executable, "-m", "lastgood_lab.trace_job", json.dumps(self._spec)]
        self._process = subprocess.Popen(command, env={**os.environ, "PYTHONWARNINGS": "ignore"})


class Nodes:
    """lastgood on nodes. `memory`: folder in memory, in which each node has one of its own."""

    def __init__(self, spec: Spec, memory: Path) -> None:
        self._spec, self._memory, self._port, self._count = spec, memory, free_port("127.0.0.1"), 0
        self._nodes = dict[str, subprocess.Popen[bytes]]()

    def start(self) -> None:
        for _ in range(3):
            self._spawn()

    def lose(self) -> None:
        name = self._training()
        kill_all(str(self._memory / name))
        self._nodes.pop(name).wait()
        self._spawn()

    def poll(self) -> None:
        for name, process in self._nodes.items():
            if process.poll() is not None:
                log = (Path(self._spec.folder) / f"{name}.log").read_text()
                raise OSError(f"{name} has ended with {process.returncode}: {log[-2000:]}")

    def end(self) -> None:
        for name, process in self._nodes.items():
            kill_all(str(self._memory / name))
            process.wait()

    def _training(self) -> str:
        """The node that trains beside that of the store; one that waits if none has trained a step."""
        seen = [json.loads(line)["node"] for line in (Path(self._spec.folder) / NOTES).read_text().splitlines()]
        return next((one for one in reversed(seen) if one != STORE and one in self._nodes), [*self._nodes][1])

    def _spawn(self) -> None:
        name = f"node{self._count}"
        self._count += 1
        home = self._memory / name
        home.mkdir(parents=True)
        conf = f"is_host={str(name == STORE).lower()},{CONF}"
        command = [
            sys.executable,
            "-m",
            "lastgood",
            "run",
            "--nnodes",
            "2",
            "--nproc-per-node",
            "1",
            "--rdzv-conf",
            conf,
        ]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", "trace"]
        command += ["--preload", "lastgood_lab.trace_job", "-m", "lastgood_lab.trace_job", json.dumps(self._spec)]
        environment = {**os.environ, "LASTGOOD_NODE": name, memory_place.VARIABLE: str(home)}
        environment |= {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        with open(Path(self._spec.folder) / f"{name}.log", "wb") as log:
            self._nodes[name] = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )


def kill_all(home: str) -> None:
    """Kill every process of a node: those with its memory in their environment, its agent among them."""
    mark = f"{memory_place.VARIABLE}={home}\0".encode()
    until = time.monotonic() + LOSS_SECONDS
    while found := [pid for pid in _processes() if mark in _environment(pid)]:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:
            raise OSError(f"the processes {found} of {home} do not end")
        time.sleep(0.01)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]


def _environment(pid: int) -> bytes:
    """Empty for one that has ended, also if nobody has waited for it yet."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes() + b"\0"
    except OSError:
        return b""

"""The supervisors of one unit: one `lastgood run`, or one for each node of a job of several. Judges nothing.

All nodes are processes of this machine, each with a name and a memory of its own. A rank asks by a file in the folder
of the logs for the loss of its node or for the start of another one (faults.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from lastgood.io import processes
from lastgood.io.machine import NODE
from lastgood.run import memory_place
from lastgood.supervisor.placement import free_port

from ..trace_cluster import kill_all
from .conditions import ASKED, LOST
from .unit import STORE_NODE, Unit

HANG_SECONDS = 5
PRELOAD = "lastgood_lab.study.networks,lastgood.loop.checkpointer,torch.nn.parallel,torch._dynamo"
POLL_SECONDS = 0.05
RESERVE_SECONDS = 60.0
"""the longest wait for a node in reserve, before a node is lost"""
CONF = "last_call_timeout=15,keep_alive_interval=1,keep_alive_max_attempt=5"


def lived(unit: Unit, logs: Path, script: Sequence[str], memory: Path, environment: Mapping[str, str]) -> int:
    """Run a unit to its end; returns the exit code. `script`: what follows `-m`, with its arguments. `memory`: folder
    in which each node has its memory. `environment`: of the nodes, beside that of this process."""
    with Nodes(unit, logs, script, memory, environment) as nodes:
        for _ in range(2 if unit.nodes else 1):
            nodes.start()
        while (code := nodes.code) is None:
            nodes.poll()
            time.sleep(POLL_SECONDS)
        return code


class Nodes:
    """The nodes of one job. All have ended at the end of the block."""

    def __init__(
        self, unit: Unit, logs: Path, script: Sequence[str], memory: Path, environment: Mapping[str, str]
    ) -> None:
        self._unit, self._logs, self._script, self._memory = unit, logs, script, memory
        self._environment, self._port, self._count = environment, free_port("127.0.0.1"), 0
        self._nodes = dict[str, subprocess.Popen[bytes]]()

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for name in [*self._nodes]:
            self._lose(name)

    @property
    def code(self) -> int | None:
        """The exit code of the node of the store, once all have ended; None before."""
        codes = [one.poll() for one in self._nodes.values()]
        return None if None in codes else self._nodes[STORE_NODE].returncode

    def poll(self) -> None:
        """Do what the ranks have asked for since the last call."""
        for path in self._logs.glob(f"{ASKED}-?"):
            path.unlink()
            self.start()
        for path in self._logs.glob(f"{LOST}-?"):
            name = path.read_text()
            path.unlink()
            self._await_reserve()
            self._lose(name)

    def start(self) -> None:
        """Start one more node."""
        name, unit = f"node-{self._count}", self._unit
        self._count += 1
        options = ["--nproc-per-node", str(unit.ranks_of_node), "--records", str(self._logs)]
        if unit.condition == "hang":
            options += ["--hang-timeout", str(HANG_SECONDS)]
        if unit.nodes:
            options += ["--nnodes", unit.nodes, "--rdzv-backend", "c10d", "--rdzv-id", unit.name]
            options += ["--rdzv-endpoint", f"127.0.0.1:{self._port}"]
            options += ["--rdzv-conf", f"is_host={str(name == STORE_NODE).lower()},{CONF}"]
        if unit.rules.spares:
            options += ["--spares", str(unit.rules.spares)]
        home = self._memory / name
        home.mkdir()
        own = {NODE: name} if unit.nodes else {}
        environment = {**os.environ, **self._environment, **own, memory_place.VARIABLE: str(home)}
        command = [sys.executable, "-m", "lastgood", "run", *options, "--preload", PRELOAD, "-m", *self._script]
        with open(self._log(name), "wb") as log:
            # However this process ends: a job that trained on would write into the folder of the next start.
            bound = partial(processes.die_with, os.getpid())
            self._nodes[name] = subprocess.Popen(
                command, env=environment, stderr=log, start_new_session=True, preexec_fn=bound
            )

    def _lose(self, name: str) -> None:
        """Kill every process of a node, and remove its memory."""
        process, home = self._nodes.pop(name), self._memory / name
        kill_all(str(home))
        process.wait()
        shutil.rmtree(home, ignore_errors=True)

    def _await_reserve(self) -> None:
        """Wait until the last line about nodes in reserve says that there is one, if one is expected."""
        until = time.monotonic() + RESERVE_SECONDS
        while self._unit.rules.spares and time.monotonic() < until:
            with contextlib.suppress(IndexError):
                if re.findall(r"spare nodes in reserve: (\d+)", self._log(STORE_NODE).read_text())[-1] != "0":
                    return
            time.sleep(POLL_SECONDS)

    def _log(self, name: str) -> Path:
        return self._logs / ("stderr.log" if name == STORE_NODE else f"{name}.log")

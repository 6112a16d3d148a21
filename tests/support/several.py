"""The nodes of one job of `lastgood run`, each a process of this machine. Their ranks need no torch."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from agents import until
from lastgood.policy.recovery import PREEMPTED
from lastgood.supervisor.placement import free_port
from lastgood_lab.namespaces import Network, enter

COMMAND = [str(Path(sys.executable).with_name("lastgood")), "run", "--spawn"]
_WITHOUT_TORCH = """
import sys
from lastgood.cli import app
from lastgood.supervisor import zygote
zygote.PRELOAD = ()
sys.exit(app.main())
"""
FORKED = [sys.executable, "-c", _WITHOUT_TORCH, "run", "--preload=json"]
"""forks the ranks from a process that has not imported torch, which takes seconds"""
NAMES = ["RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"]
NAMES += ["MASTER_ADDR", "MASTER_PORT"]
RANK = f"""
import json, os, signal, sys, time
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
code = int(open("unsaved").read() or 1) if os.path.exists("unsaved") else {PREEMPTED}
def over(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the supervisor may pass on what all processes have received
    open(f"over-{{attempt}}", "w")
    sys.exit(code)
signal.signal(signal.SIGTERM, over)
seen = {{name: os.environ[name] for name in {NAMES!r}}} | {{"node": os.environ["LASTGOOD_NODE"]}}
with open(f"attempt-{{attempt}}-{{rank}}.new", "w") as file:
    json.dump(seen, file)
os.rename(file.name, file.name.removesuffix(".new"))
failing = [one for one in (rank, seen["node"]) if os.path.exists(f"fail-{{attempt}}-{{one}}")]
if failing:
    while not all(os.path.exists(f"attempt-{{attempt}}-{{one}}") for one in range(int(seen["WORLD_SIZE"]))):
        time.sleep(0.02)
    os.kill(os.getpid(), int(open(f"fail-{{attempt}}-{{failing[0]}}").read() or 0))
    sys.exit(7)
while not os.path.exists("done"):
    time.sleep(0.02)
    if os.path.exists(f"over-{{attempt}}"):  # a signal of one node reaches the ranks of all, as a Checkpointer does it
        over()
"""


class Nodes:
    """The nodes of one job in a folder. `stores`: how many of them can hold the store (default: the first one).
    `script`: of the ranks (default: RANK), and `command`, by which it is run. `network`: whose nodes they are, in the
    order in which they start (default: none, all have the address of this machine)."""

    def __init__(
        self,
        folder: Path,
        nnodes: str,
        stores: int = 1,
        script: str = RANK,
        command: Sequence[str] = COMMAND,
        network: Network | None = None,
    ) -> None:
        self.folder, self._nnodes, self._command = folder, nnodes, command
        self.last_call_seconds = 1
        self.silent_seconds = 5
        """after which a node is lost; more where none is lost and none leaves, for a machine that is busy"""
        self.endpoints = [f"127.0.0.1:{free_port('127.0.0.1')}" for _ in range(stores)]
        self._network = network
        if network is not None:
            self.endpoints = [f"{network.address(one)}:29400" for one in range(stores)]
        self._started = dict[str, subprocess.Popen[bytes]]()
        (folder / "rank.py").write_text(textwrap.dedent(script))

    def start(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        conf = f"last_call_timeout={self.last_call_seconds},join_timeout=60"
        conf += f",keep_alive_interval=1,keep_alive_max_attempt={self.silent_seconds}"
        if len(self.endpoints) == 1:
            conf += f",is_host={'false' if self._started else 'true'}"
        place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", ",".join(self.endpoints), "--rdzv-conf", conf]
        with open(self.folder / f"{name}.log", "wb") as log:
            self._started[name] = subprocess.Popen(
                [*self._command, "--nnodes", self._nnodes, *place, *options, "rank.py"],
                cwd=self.folder,
                env={**os.environ, "LASTGOOD_NODE": name},
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=self._entered(len(self._started)),
            )
        if self._network is None and 1 < len(self.endpoints) >= len(
            self._started
        ):  # on one machine, who comes first holds the first store
            until(lambda: _listens(self.endpoints[len(self._started) - 1]))
        return self._started[name]

    def _entered(self, node: int) -> Callable[[], None] | None:
        """What a process of a node does first."""
        return None if self._network is None else partial(enter, self._network.name(node))

    def seen(self, attempt: int, ranks: int) -> list[dict[str, str]]:
        """What the ranks of an attempt have seen, once all are there."""
        paths = [self.folder / f"attempt-{attempt}-{rank}" for rank in range(ranks)]
        until(lambda: all(path.exists() for path in paths))
        return [json.loads(path.read_text()) for path in paths]

    def newest(self, ranks: int) -> int:
        """The newest attempt, once it has so many ranks, which all have begun."""
        found = dict[int, int]()

        def whole() -> bool:
            found.clear()
            for path in self.folder.glob("attempt-*-*[0-9]"):
                attempt = int(path.name.split("-")[1])
                found[attempt] = found.get(attempt, 0) + 1
            return bool(found) and found[max(found)] == ranks == int(self.seen(max(found), 1)[0]["WORLD_SIZE"])

        until(whole)
        return max(found)

    def lose(self, name: str) -> None:
        """Kill the supervisor of a node. Its ranks, its membership and its store end with it: raises if they do not."""
        processes = self._processes(name)
        self._started[name].kill()
        self._started[name].wait()
        until(lambda: not processes & _parents().keys())

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to all processes of a node."""
        for one in self._processes(name):
            os.kill(one, number)

    def _processes(self, name: str) -> set[int]:
        found, parents = {self._started[name].pid}, _parents()
        while new := {one for one, parent in parents.items() if parent in found} - found:
            found |= new
        return found

    def touch(self, name: str, text: str = "") -> None:
        (self.folder / name).write_text(text)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def reported(self) -> list[str]:
        """What all nodes have reported about spare nodes."""
        return re.findall(r"spare nodes in reserve: (.*)", "".join(map(self.log, self._started)))

    def end(self) -> None:
        for one in self._started.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()


def _listens(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port))):
        return True
    return False


def _parents() -> dict[int, int]:
    """Process -> its parent, of all processes."""
    found = dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            found[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    return found

"""The supervisors of a job on several nodes, for the campaign recovery.py: each is a process of this machine.

A supervisor that a fault has killed is started again, as a cluster starts a node again. Without the node of the store
the others end by themselves, and then the whole job is started again. Judges nothing.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from lastgood.io.machine import NODE
from lastgood.supervisor.placement import free_port
from lastgood_lab.campaigns.recovery_judge import Reported, reported

NAMES = "ab"
"""of the nodes; the first one holds the store"""
POLL_SECONDS = 0.05
CONF = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5,join_timeout=120"
RESTARTABLE = 5
"""exit code of the nodes that have lost their store"""


class Life:
    """One start of a job on all nodes. `folder`: for what the supervisors print. `first`: number of the first attempt.

    `command`: of a node, without what says which one it is; the program and its arguments are `program`.
    """

    def __init__(self, folder: Path, first: int, command: Sequence[str], program: Sequence[str]) -> None:
        self._folder, self._first, self._program = folder, first, program
        self._endpoint = f"127.0.0.1:{free_port('127.0.0.1')}"
        self._command = [*command, "--nnodes", str(len(NAMES)), "--rdzv-backend", "c10d"]
        self._logs = list[Path]()
        self.restarts = 0
        """supervisors that were started again beside others that went on"""

    def lived(self, until: float) -> int:
        """Run the job to its end. Returns the exit code of the node that has ended last, or a negative one if the node
        of the store was killed. `until`: by the monotonic clock; raises TimeoutError then."""
        running = {name: self._started(name) for name in NAMES}
        code, store_lost = 0, False
        try:
            while running:
                ended = {name: one.returncode for name, one in running.items() if one.poll() is not None}
                for name, its_code in ended.items():
                    del running[name]
                    if its_code < 0 and name != NAMES[0] and not store_lost:
                        running[name] = self._started(name)
                        self.restarts += 1
                        continue
                    store_lost = store_lost or its_code < 0
                    code = its_code if its_code >= 0 and not store_lost else -1
                if time.monotonic() > until:
                    raise TimeoutError(f"nodes {', '.join(running)} have not ended")
                time.sleep(POLL_SECONDS)
        finally:
            for one in running.values():
                one.kill()
                one.wait()
        return -1 if store_lost or code == RESTARTABLE else code

    def reports(self) -> dict[int, Reported]:
        """What the nodes have reported, by the number of the attempt."""
        found = dict[int, Reported]()
        for log in self._logs:
            found |= reported(log.read_text(), self._first)
        return found

    def _started(self, name: str) -> subprocess.Popen[bytes]:
        self._logs.append(self._folder / f"{name}-{len(self._logs)}-{self._first}.log")
        conf = f"is_host={'true' if name == NAMES[0] else 'false'},{CONF}"
        place = ["--rdzv-endpoint", self._endpoint, "--rdzv-conf", conf]
        with self._logs[-1].open("wb") as log:
            command = [*self._command, *place, *self._program, str(self._first)]
            return subprocess.Popen(command, stderr=log, env={**os.environ, NODE: name})

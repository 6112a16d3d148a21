"""Starts the ranks of one attempt, each with a folder, a heartbeat page, an environment, and places for its output."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from .. import reporting
from ..errors import TierDown
from ..io import heartbeat, os_errors
from ..run import job_logs
from . import devices
from .arguments import Job
from .outputs import NAMES
from .placement import Placement
from .program import ERROR_FILE, PYTHON, Program
from .watch import RankProcess
from .zygote import Fork, Zygote

LOCAL_RANK = "${local_rank}"
"""what an argument may have in the place of the local rank, as under torchrun; other dollars are those of a shell"""


def defaults(ranks: int) -> dict[str, str]:
    """Variables that ranks have unless the user has set them: those of torchrun."""
    threads = {"OMP_NUM_THREADS": "1"} if ranks > 1 else {}
    return {**threads, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


class RankStart:
    """Starts ranks of attempt `number`. `folder`: of the attempt. `zygote`: forks the ranks; None: each is a new
    process. `place`: of this node among the nodes of the job."""

    def __init__(self, job: Job, number: int, folder: Path, zygote: Zygote | None, place: Placement) -> None:
        self._job, self._number, self._folder, self._zygote, self._place = job, number, folder, zygote, place
        self._forks_ahead = job.warm_ranks

    def start(self, local: int, pages: Path) -> RankProcess:
        """Start the rank of this number on this node. `pages`: the folder of the heartbeat pages.

        Raises NoSpace or TierDown if that cannot be, and what `Zygote.fork` raises; no process is left then.
        """
        rank, folder, page = self._place.first_rank + local, self._folder / str(local), pages / str(local)
        todo = "Free space there; --log-dir or TMPDIR gives another place for the folder of the attempt."
        with os_errors.needed(f"rank {rank} cannot be started, with its files in {folder}", todo):
            folder.mkdir()
            heartbeat.create(str(page))
            environment = self._environment(local)
            environment |= {ERROR_FILE: str(folder / "error.json"), heartbeat.VARIABLE: str(page)}
            with contextlib.ExitStack() as files:
                outputs = self._outputs(local, folder, files)
                pid = self._started(local, environment, *outputs)
            try:
                descriptor, page_descriptor = os.pidfd_open(pid), os.open(page, os.O_RDONLY)
            except OSError:
                os.kill(pid, signal.SIGKILL)  # nobody has waited for it yet, so the number is still its own
                raise
        one = RankProcess(rank, pid, descriptor, folder, page, heartbeat.read(str(page)))
        one.page_descriptor = page_descriptor  # guard: removed-page-is-read
        return one

    def fork_ahead(self) -> None:
        """Fork the processes that become ranks of the next attempt, once, if the job wants that (--warm-ranks)."""
        if self._zygote is None or not self._forks_ahead:
            return
        self._forks_ahead = False
        try:
            for local in range(self._job.ranks):
                self._zygote.fork_ahead(self._fork(local, self._environment(local), waits=True), local)
        except (OSError, TierDown) as error:
            reporting.warning(
                f"no process waits for the next attempt (--warm-ranks), which is started as usual: {error}"
            )

    def _environment(self, local: int) -> dict[str, str]:
        place, attempt, records = self._place, str(self._number), self._job.records
        rank, world = str(place.first_rank + local), str(place.world)
        return {
            **defaults(self._job.ranks),
            **os.environ,
            **({} if records is None else {job_logs.VARIABLE: str(records)}),
            "RANK": rank,
            "LOCAL_RANK": str(local),
            "ROLE_RANK": rank,
            "GROUP_RANK": str(place.node),
            "ROLE_NAME": self._job.role,
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": str(self._job.ranks),
            "ROLE_WORLD_SIZE": world,
            "GROUP_WORLD_SIZE": str(place.nodes),
            "MASTER_ADDR": place.address,
            "MASTER_PORT": str(place.port),
            "TORCHELASTIC_RESTART_COUNT": attempt,
            "TORCHELASTIC_MAX_RESTARTS": str(self._job.budget.restarts or 0),
            "TORCHELASTIC_RUN_ID": self._job.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(signal.Signals(one).name for one in self._job.signals),
            **devices.of_rank(local, self._job.bindings, self._job.virtual_local_rank, os.environ),
        }

    def _outputs(self, local: int, folder: Path, files: contextlib.ExitStack) -> tuple[int, int]:
        """The descriptors of stdout and stderr of a rank: those of this process, or files."""
        found, outputs = list[int](), self._job.outputs
        for stream, name in NAMES.items():
            path = str(folder / f"{name}.log") if outputs.to_file(local, stream) else os.devnull
            if path == os.devnull and outputs.to_console(local):
                found.append(stream)
            else:
                found.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
                files.callback(os.close, found[-1])
        return found[0], found[1]

    def _program(self, local: int) -> Program:
        """What a rank runs: with its local rank for ${local_rank} in its arguments, as under torchrun."""
        program = self._job.program
        arguments = [one.replace(LOCAL_RANK, str(local)) for one in program.arguments]
        return replace(program, arguments=arguments)

    def _fork(self, local: int, environment: Mapping[str, str], waits: bool = False) -> Fork:
        program = self._program(local)
        return Fork(program=program, environment=dict(environment), supervisor=os.getpid(), waits=waits)

    def _started(self, local: int, environment: Mapping[str, str], stdout: int, stderr: int) -> int:
        if self._zygote is not None:
            return self._zygote.fork(self._fork(local, environment), local, stdout, stderr)
        text = json.dumps(msgspec.to_builtins(self._program(local)))
        command = [*PYTHON, "lastgood.supervisor.program", str(os.getpid()), text]
        started = subprocess.Popen(command, env=environment, stdout=stdout, stderr=stderr, start_new_session=True)
        started.returncode = 0  # its end is learned from the pidfd
        return started.pid

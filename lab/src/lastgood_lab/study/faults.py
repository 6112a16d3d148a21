"""The faults of the study, as a rank makes them happen to itself. Knows neither model nor data; judges nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from lastgood.io.machine import NODE
from lastgood.run import job_logs
from lastgood.testing.faulty_files import Call, Fault, FaultyFiles

from .conditions import ASKED, KILLED, LOST
from .unit import STORE_NODE, Unit

DELAY_SECONDS = 1.0


def attempt() -> int:
    """The number of this attempt, from 0."""
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


@contextlib.contextmanager
def files(unit: Unit) -> Iterator[None]:
    """The file system of a rank, under the condition of the unit."""
    with contextlib.ExitStack() as held:
        if unit.condition == "errors" and int(os.environ["RANK"]) == unit.size.ranks - 1:
            held.enter_context(FaultyFiles(Fault("write", "*.safetensors", nth=3)).installed())
        if unit.condition == "delayed":
            held.enter_context(FaultyFiles(before=_delay).installed())
        yield


def _delay(call: Call) -> None:
    if call.operation == "open new" and call.name.endswith(".safetensors"):
        time.sleep(DELAY_SECONDS)


def due(unit: Unit, step: int) -> bool:
    """Whether the fault of this attempt comes after this step."""
    return unit.failures[attempt() : attempt() + 1] == (step,)


def poisons(unit: Unit, step: int) -> bool:
    """Whether the loss of this rank is NaN in the step that follows `step`."""
    return unit.rules.poisons and due(unit, step) and dist.get_rank() == unit.size.ranks - 1


def begin(unit: Unit) -> None:
    """The state is restored: have a node started in reserve, where this attempt loses one."""
    if unit.rules.spares and attempt() < len(unit.failures) and dist.get_rank() == 0:
        _ask(ASKED, "")


def happen(unit: Unit) -> None:
    """Make the fault of the unit happen, once all ranks have completed the step."""
    dist.barrier()
    rank = dist.get_rank()
    if unit.condition == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif unit.condition == "hang":
        if rank == 1:
            threading.Event().wait()  # a signal that asks for stacks does not end it
    elif unit.condition == "node" or (unit.condition == "elastic" and attempt() == 0):
        _lose_node()
    elif unit.condition == "elastic":
        _exit_for_a_node()
    elif unit.condition != "nan" and rank == 0:
        os._exit(KILLED)


def _lose_node() -> None:
    """Wait for the end on the node that is lost. The ranks of the other one go on, until they miss it."""
    name = os.environ[NODE]
    if name != STORE_NODE:
        if os.environ["LOCAL_RANK"] == "0":
            _ask(LOST, name)
        threading.Event().wait()


def _exit_for_a_node() -> None:
    """Have a node started. Rank 0 exits once the supervisor has seen it, and asks the ranks to end by SIGTERM.

    The other ranks lose their connection then. None saves.
    """
    if dist.get_rank() == 0:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(KILLED))
        _ask(ASKED, "")
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        dist.barrier()
    while True:
        time.sleep(0.1)  # a wait without a timeout would run no handler of a signal


def _ask(what: str, name: str) -> None:
    """Leave a file for the process that starts the nodes (nodes.py). `name`: of a node."""
    path = Path(os.environ[job_logs.VARIABLE]) / f"{what}-{attempt()}"
    draft = path.with_suffix(".tmp")
    draft.write_text(name)
    draft.rename(path)

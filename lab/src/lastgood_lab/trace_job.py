"""The training that `lastgood bench trace` drives: a loop that restores, trains and notes each step until it is killed.

    python -m lastgood_lab.trace_job SPEC                       a policy of a paper, in one process
    lastgood run ... -m lastgood_lab.trace_job SPEC             lastgood, on each rank

Knows nothing of failures. The notes are lines of JSON in a file, which survive the process.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import lastgood

from .models import Workload
from .policies import POLICIES
from .policy import Settings

OURS, NONE = "lastgood run, memory", "no saves"
NOTES, PEER, RUN = "notes.jsonl", "peer", "run"
GROUP_SECONDS = 20.0


class Spec(NamedTuple):
    """What is trained, where, and how it is saved. `interval`: steps between two saves. `below`: the same for the
    directory below the memory. `device_seconds`: in each step, for which a device would compute."""

    folder: str
    policy: str
    interval: int
    model: str
    scale: float
    work: float
    below: int
    device_seconds: float


class Notes:
    """The notes of one process. Times are of the system-wide monotonic clock, in seconds."""

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder / NOTES, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._node = os.environ.get("LASTGOOD_NODE", "")

    def note(self, what: str, step: int, seconds: float = 0.0) -> None:
        """`what`: "restored", "step" or "saved". `seconds`: that the load, the step or the save took."""
        line = {"what": what, "at": time.monotonic(), "step": step, "seconds": seconds, "node": self._node}
        os.write(self._descriptor, json.dumps(line).encode() + b"\n")


def trained(workload: Workload, spec: Spec, fence: Callable[[], None]) -> None:
    """One step. The processor is free while a device would compute the gradients: then a save may run beside it."""

    def fenced() -> None:
        time.sleep(spec.device_seconds)
        fence()

    workload.step(fenced)


def with_policy(spec: Spec, notes: Notes) -> None:
    """Train in one process, with the policy of a paper or with none."""
    workload, folder = Workload(spec.model, spec.scale, spec.work), Path(spec.folder)
    policy = None
    if spec.policy != NONE:
        policy = POLICIES[spec.policy](workload, folder, Settings(), folder / PEER)
    begun = time.monotonic()
    step = policy.load() if policy else 0
    notes.note("restored", step, time.monotonic() - begun)
    known = 0
    while True:
        begun = time.monotonic()
        trained(workload, spec, policy.fence if policy else lambda: None)
        step += 1
        if policy and step % spec.interval == 0:
            policy.save(step)
        notes.note("step", step, time.monotonic() - begun)
        for save in policy.saved[known:] if policy else ():
            notes.note("saved", save.step, save.seconds)
            known += 1


def supervised(spec: Spec, notes: Notes) -> None:
    """Train on each rank under `lastgood run`: the ranks are replicas, and wait for each other in each step."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=GROUP_SECONDS))
    first, folder = dist.get_rank() == 0, Path(spec.folder)
    workload = Workload(spec.model, spec.scale, spec.work)
    state: dict[str, Any] = {"model": workload.module, "optimizer": workload.optimizer}

    def noted(event: lastgood.Event) -> None:
        if first and event.kind == "durable":
            notes.note("saved", event.step, event.seconds)

    memory = lastgood.Tier("memory://", cadence=lastgood.Every(steps=spec.interval), copies=2)
    below = lastgood.Every(steps=spec.below)
    with lastgood.Checkpointer(folder / RUN, state, cadence=below, tiers=[memory], on_event=noted) as ckpt:
        begun = time.monotonic()
        step = ckpt.restore().step
        if first:
            notes.note("restored", step, time.monotonic() - begun)
        while True:
            begun = time.monotonic()
            trained(workload, spec, dist.barrier)
            step += 1
            ckpt.step(step)
            notes.note("step" if first else "beside", step, time.monotonic() - begun)


def main() -> None:
    torch.set_num_threads(1)
    spec = Spec(*json.loads(sys.argv[1]))
    notes = Notes(Path(spec.folder))
    if spec.policy == OURS:
        supervised(spec, notes)
    else:
        with_policy(spec, notes)


if __name__ == "__main__":
    main()

"""The training of `lastgood bench restart`: data parallel, a network of 4 MB, and a fault on one rank.

The step before the fault is saved before the fault comes, so that the first step after it is a new one in each case.
Measures nothing itself.
"""

from __future__ import annotations

import datetime
import os
import signal
import threading
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

import lastgood

from .restart_notes import FAULT, FAULT_RANK, FAULT_STEP, GROUP_SECONDS, LAST_STEP, RUN, attempt, write

MEMORY, DIRECTORY, PLAIN = "memory", "directory", "torch.save"
CRASH, HANG = "crash", "hang"
WIDTH, LAYERS, BATCH = 512, 4, 16
LONG_GROUP_SECONDS = 1800.0
"""torch's default for gloo"""


class Saves(Protocol):
    """How a contender saves and restores."""

    def restored(self) -> int:
        """Restore. Returns the step; 0: nothing was saved."""

    def step(self, n: int) -> None:
        """Step `n` is completed. Saves it, if the contender saves each."""

    def wait(self, n: int) -> None:
        """Returns when step `n`, the newest one, is saved."""

    def close(self) -> None: ...


class Checkpointed:
    """A Checkpointer that saves each step: to the memory of the machine, or to a directory."""

    def __init__(self, folder: Path, contender: str, state: dict[str, Any]) -> None:
        each, seldom = lastgood.Every(steps=1), lastgood.Every(steps=10**6)
        if contender == MEMORY:
            tiers = [lastgood.Tier("memory://", cadence=each)]
            self._ckpt = lastgood.Checkpointer(folder / RUN, state, cadence=seldom, tiers=tiers)
        else:
            self._ckpt = lastgood.Checkpointer(folder / RUN, state, cadence=each)

    def restored(self) -> int:
        return self._ckpt.restore().step

    def step(self, n: int) -> None:
        self._ckpt.step(n)

    def wait(self, n: int) -> None:
        self._ckpt.wait()

    def close(self) -> None:
        self._ckpt.close()


class Plain:
    """torch.save of rank 0, of the one step that is waited for."""

    def __init__(self, folder: Path, state: dict[str, Any]) -> None:
        self._path, self._state = folder / "state.pt", state

    def restored(self) -> int:
        if not self._path.exists():
            return 0
        found = torch.load(self._path)
        for name, one in self._state.items():
            one.load_state_dict(found[name])
        return int(found["step"])

    def step(self, n: int) -> None:
        pass

    def wait(self, n: int) -> None:
        if dist.get_rank() == 0:
            torch.save({"step": n, **{name: one.state_dict() for name, one in self._state.items()}}, self._path)

    def close(self) -> None:
        pass


def train(folder: Path, contender: str, fault: str) -> None:
    """Train from the newest saved step to the last one. The first attempt does not come so far."""
    # Under `lastgood run` --hang-timeout notices a hang. With the same timeout of the group the ranks that wait would
    # fail at the same moment, and the supervisor would wait for a first cause.
    seconds = GROUP_SECONDS if contender == PLAIN else LONG_GROUP_SECONDS
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds))
    rank = dist.get_rank()
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))
    model = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    write(folder, "joined")
    state = {"model": model, "optimizer": optimizer}
    saves: Saves = Plain(folder, state) if contender == PLAIN else Checkpointed(folder, contender, state)
    restored = saves.restored()
    write(folder, "restored")
    for step in range(restored + 1, LAST_STEP + 1):
        if (step, rank, attempt()) == (FAULT_STEP, FAULT_RANK, 0):
            _fail(folder, fault)
        inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(4 * step + rank))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        saves.step(step)
        write(folder, "step", step)
        if step == FAULT_STEP - 1:
            saves.wait(step)
            dist.barrier()
    saves.close()
    dist.destroy_process_group()


def _fail(folder: Path, fault: str) -> None:
    write(folder, FAULT)
    if fault == CRASH:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()

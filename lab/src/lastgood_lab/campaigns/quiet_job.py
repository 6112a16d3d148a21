"""The training of the campaign false_alarms.py, on each rank: nothing is wrong with it, and it is irregular.

    lastgood run ... -m lastgood_lab.campaigns.quiet_job FOLDER STEPS SEED

Steps of a few milliseconds, data parallel, of a model that torch.compile compiles in the first step, and again in the
middle, where the batches become smaller, which is named as a phase; stalls of the data on one rank, below the limit of
a step; evaluations on rank 0 alone, named as a phase, many of them longer than that limit; for a third of the steps
other work on the machine. FOLDER receives the run and, at the end, COUNTS. Judges nothing.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import nn

import lastgood

COUNTS, RUN = "counts.json", "run"
STALL_SHARE, STALL_SECONDS = 0.002, (0.05, 2.0)
"""the share of the steps in which one rank waits for data, and how long"""
EVALUATION_STEPS, EVALUATION_SECONDS = 500, (0.5, 20.0)
BATCH, SMALLER_BATCH = 8, 5
STEP_SECONDS = 0.003
"""of the data of each step; the rest is training"""
SPIN = "while True: pass"


class Counts(msgspec.Struct):
    """What has happened, as rank 0 has counted it. `loads`: load averages (1 minute), one for each evaluation."""

    steps: int = 0
    stalls: int = 0
    stall_seconds: float = 0.0
    longest_stall_seconds: float = 0.0
    evaluations: int = 0
    evaluation_seconds: float = 0.0
    longest_evaluation_seconds: float = 0.0
    compile_seconds: list[float] = []
    busy_steps: int = 0
    seconds: float = 0.0
    loads: list[float] = []


@contextlib.contextmanager
def other_work() -> Iterator[None]:
    """In the block, a process computes."""
    other = subprocess.Popen([sys.executable, "-c", SPIN])
    try:
        yield
    finally:
        other.kill()
        other.wait()


def train(folder: Path, steps: int, seed: int) -> None:
    """Train all steps. All ranks draw the same stalls."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = nn.parallel.DistributedDataParallel(torch.compile(nn.Linear(64, 64)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state, chance = {"model": model, "optimizer": optimizer}, random.Random(seed)
    counts, begun = Counts(), time.monotonic()
    with lastgood.Checkpointer(folder / RUN, state, cadence=lastgood.Every(steps=1000)) as ckpt:
        first = ckpt.restore().step
        counts.steps = first
        with contextlib.ExitStack() as stack:
            for step in range(first + 1, steps + 1):
                if step == steps // 3 and rank == 0:
                    stack.enter_context(other_work())
                if step == 2 * steps // 3:
                    stack.close()
                counts.busy_steps += steps // 3 <= step < 2 * steps // 3
                time.sleep(_data_seconds(rank, ranks, chance, counts))
                optimizer.zero_grad()
                size, before = BATCH if step < steps // 2 else SMALLER_BATCH, time.monotonic()
                with ckpt.phase("compile") if step == steps // 2 else contextlib.nullcontext():
                    model(torch.randn(size, 64)).square().mean().backward()
                if step in (first + 1, steps // 2):
                    counts.compile_seconds.append(time.monotonic() - before)
                optimizer.step()
                ckpt.step(step)
                counts.steps += 1
                if step % EVALUATION_STEPS == 0 and rank == 0:
                    with ckpt.phase("evaluation"):
                        _evaluate(random.Random(step), counts)
        counts.seconds = time.monotonic() - begun
        if rank == 0:
            (folder / COUNTS).write_bytes(msgspec.json.encode(counts))
    dist.destroy_process_group()


def _data_seconds(rank: int, ranks: int, chance: random.Random, counts: Counts) -> float:
    """How long this rank waits for the data of a step."""
    stalls, who, seconds = chance.random() < STALL_SHARE, chance.randrange(ranks), chance.uniform(*STALL_SECONDS)
    if not stalls:
        return STEP_SECONDS
    counts.stalls += 1
    counts.stall_seconds += seconds
    counts.longest_stall_seconds = max(counts.longest_stall_seconds, seconds)
    return seconds if rank == who else STEP_SECONDS


def _evaluate(chance: random.Random, counts: Counts) -> None:
    seconds = chance.uniform(*EVALUATION_SECONDS)
    time.sleep(seconds)
    counts.evaluations += 1
    counts.evaluation_seconds += seconds
    counts.longest_evaluation_seconds = max(counts.longest_evaluation_seconds, seconds)
    counts.loads.append(os.getloadavg()[0])


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

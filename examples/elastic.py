"""Data parallel training on as many ranks as there are: 4, then 3, then 2, then 4, with the same global batch.

    python examples/elastic.py [RANKS ...]

`train` is the training script, which does not change with the number of ranks:

    lastgood run --nproc-per-node 3 examples/elastic.py RUN STEPS

The rest starts it for ten steps on each number of ranks, then once more from the beginning on one rank, and compares.

Needs scikit-learn for its images: pip install 'lastgood[examples]'.
"""

import os
import re
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import lastgood

GLOBAL_BATCH, LARGEST_BATCH, STEPS_EACH = 64, 16, 10


def train(run: str, steps: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    data = torch.utils.data.TensorDataset(images, labels, torch.arange(len(images)))
    sampler = lastgood.ResumableSampler(
        len(images), GLOBAL_BATCH, seed=0, rank=rank, world_size=world, largest_batch=LARGEST_BATCH
    )
    loader = sampler.loader(data)
    state = {"model": model, "optimizer": optimizer, "sampler": sampler, "audit": lastgood.Audit()}
    with lastgood.Checkpointer(run, state, cadence=lastgood.Every(steps=5)) as ckpt:
        step = ckpt.restore().step
        loss_of_step, sizes = torch.zeros(()), []
        while step < steps:
            for inputs, targets, ids in loader:
                state["audit"].observe(*sampler.position, ids)
                with nullcontext() if loader.completes_step else model.no_sync():
                    loss = nn.functional.cross_entropy(model(inputs), targets) * loader.weight
                    loss.backward()
                loss_of_step += loss.detach()
                sizes.append(len(ids))
                if not loader.completes_step:
                    continue
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                ckpt.step(step)
                dist.all_reduce(loss_of_step)
                if rank == 0:
                    print(f"step {step} loss {loss_of_step.item() / world!r} batches {sizes}", flush=True)
                loss_of_step, sizes = torch.zeros(()), []
                if step == steps:
                    break
    audits = [None] * world
    dist.all_gather_object(audits, state["audit"])
    report = lastgood.Audit.merge(audits).report(sampler)
    if rank == 0:
        print(f"samples {report.scheduled}, each trained exactly once: {report.exact}", flush=True)
    dist.barrier()


# ---- from here on: the script is started on several numbers of ranks ---------------------------------------------

STEP = re.compile(r"step (\d+) loss (\S+) batches (.*)")


def trained(run: Path, ranks: int, steps: int) -> dict[int, float]:
    """Train on so many ranks until a step. Returns the loss of each step that was made."""
    options = ["--preload", "sklearn.datasets", "--nproc-per-node", str(ranks)]
    command = [sys.executable, "-m", "lastgood", "run", *options, __file__, str(run), str(steps)]
    job = subprocess.run(command, capture_output=True, text=True)
    found = [one for one in map(STEP.match, job.stdout.splitlines()) if one]
    if job.returncode or not found:
        raise SystemExit(f"the job ended with status {job.returncode}:\n{job.stderr[-3000:]}")
    print(f"{ranks} ranks: steps {found[0][1]} to {found[-1][1]}, on rank 0 in batches of {found[-1][3]}; ", end="")
    print(job.stdout.splitlines()[-1])
    return {int(one[1]): float(one[2]) for one in found}


def play(folder: Path, worlds: list[int]) -> bool:
    """Train on each number of ranks in turn, then on one. Returns whether the losses are those of one rank."""
    elastic: dict[int, float] = {}
    for number, ranks in enumerate(worlds, 1):
        elastic |= trained(folder / "elastic", ranks, number * STEPS_EACH)
    alone = trained(folder / "alone", 1, len(worlds) * STEPS_EACH)
    difference = max(abs(elastic[step] / loss - 1) for step, loss in alone.items())
    print(f"the losses differ from those of one rank by at most {difference:.1e} of their values")
    return elastic.keys() == alone.keys() and difference < 1e-4  # float32, and sums in another order


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        train(sys.argv[1], int(sys.argv[2]))
        dist.destroy_process_group()
    else:
        with tempfile.TemporaryDirectory() as temporary:
            raise SystemExit(0 if play(Path(temporary), [int(one) for one in sys.argv[1:]] or [4, 3, 2, 4]) else 1)

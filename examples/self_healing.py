"""Data parallel training that heals itself: a rank that dies, one that hangs, and a loss that is no number.

    python examples/self_healing.py

`train` is the training script; `lastgood run` in place of torchrun is what puts it back on its feet:

    lastgood run --nproc-per-node 4 examples/self_healing.py RUN

The rest plays the failures. It trains once with a damaged image only, and then again with a rank that is killed and one
that hangs as well. Both runs leave the batches with the damaged image out, and both end with the same losses.

Needs scikit-learn for its images: pip install 'lastgood[examples]'.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import lastgood

STEPS, DAMAGED_IMAGE = 40, 1000


def train(run: str, troubles: list[str]) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    # find_unused_parameters keeps the buckets of gradients as they are: without it DDP adds up the gradients of its
    # first step in another order than those of the others, so that a resumed run ends with other bits (docs/ranks.md).
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)), find_unused_parameters=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    images[DAMAGED_IMAGE] = float("nan")
    data = torch.utils.data.TensorDataset(images, labels, torch.arange(len(images)))
    sampler = lastgood.ResumableSampler(len(images), global_batch=64, seed=0, rank=rank, world_size=world)
    state = {"model": model, "optimizer": optimizer, "sampler": sampler, "audit": lastgood.Audit()}

    sentinel = lastgood.Sentinel(every=2, grad_norm="grad_norm")
    with lastgood.Checkpointer(run, state, cadence=lastgood.Every(steps=5), sentinel=sentinel) as ckpt:
        step = ckpt.restore().step
        while step < STEPS:
            for inputs, targets, ids in sampler.loader(data):
                play_trouble(troubles, rank, step + 1)
                state["audit"].observe(*sampler.position, ids)
                loss = nn.functional.cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                norm = nn.utils.clip_grad_norm_(model.parameters(), 10.0)
                optimizer.step()
                step += 1
                save = ckpt.step(step, metrics={"loss": loss.detach(), "grad_norm": norm})
                if save is not None:
                    save.committed()  # so that the failures below always find the same newest save
                if rank == 0:
                    print(f"step {step} loss {loss.item()!r}", flush=True)
                if step == STEPS:
                    break
    audits = [None] * world
    dist.all_gather_object(audits, state["audit"])
    report = lastgood.Audit.merge(audits).report(sampler)
    if rank == 0:
        damaged = "the damaged one is among them" if DAMAGED_IMAGE in report.skipped else "NOT the damaged one"
        exactly = f"{report.scheduled} scheduled, exactly once: {report.exact}"
        print(f"samples: {exactly}; {len(report.skipped)} left out, {damaged}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


# ---- from here on: the failures, and what is played around them --------------------------------------------------

RANKS, HANG_SECONDS = 4, 2
TROUBLES = ["kill 0 2 7", "hang 2 1 27"]
STEP = re.compile(r"step (\d+) loss (\S+)")


def play_trouble(troubles: list[str], rank: int, step: int) -> None:
    """Fail, if that is the plan: each trouble has the number of the attempt, the rank and the step."""
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if f"kill {attempt} {rank} {step}" in troubles:
        os.kill(os.getpid(), signal.SIGKILL)
    if f"hang {attempt} {rank} {step}" in troubles:
        time.sleep(3600)


def supervised(run: Path, troubles: list[str]) -> tuple[dict[int, str], str]:
    """Train under `lastgood run`. Returns the last loss of each step, and the line about the samples."""
    options = ["--nproc-per-node", str(RANKS), "--hang-timeout", str(HANG_SECONDS), "--preload", "sklearn.datasets"]
    command = [sys.executable, "-m", "lastgood", "run", *options, __file__, str(run), *troubles]
    losses, samples = {}, ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        output, errors = job.communicate()
    for line in output.splitlines():
        if found := STEP.match(line):
            losses[int(found[1])] = found[2]
        elif line.startswith("samples"):
            samples = line
    for line in errors.splitlines():
        if line.startswith("lastgood: attempt"):
            print(f"  {line.removeprefix('lastgood: ')}")
    if job.returncode:
        raise SystemExit(f"the job ended with status {job.returncode}:\n{errors[-3000:]}")
    print(f"  finished at step {max(losses)}; {samples}")
    return losses, samples


def play(folder: Path) -> bool:
    """Train twice, the second time with more failures. Returns whether the losses are the same."""
    print("with a damaged image:")
    calm = supervised(folder / "calm", [])
    print("with a damaged image, a killed rank and one that hangs:")
    healed = supervised(folder / "healed", TROUBLES)
    print(f"the losses and samples are {'the same, bit for bit' if healed == calm else 'NOT the same'}")
    return healed == calm


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(sys.argv[1], sys.argv[2:])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            raise SystemExit(0 if play(Path(temporary)) else 1)

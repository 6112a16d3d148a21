"""Data parallel training that goes on when a machine is lost: its saves are also in the memory of the other machines.

python examples/survive_a_node.py

`train` is what runs on every machine; the line with `copies=2` is all that it needs. The rest plays the failure, with
three processes of this machine that stand for nodes: it trains once without a disturbance, then again until the
processes of one node are killed and its memory is removed, and starts all three anew. Nothing that was saved is on a disk.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
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


def train(run: str, steps: int, pause_seconds: float = 0.05) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 10))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    sampler = lastgood.ResumableSampler(len(images), global_batch=48, seed=0, rank=rank, world_size=world)
    loader = sampler.loader(torch.utils.data.TensorDataset(images, labels))
    state = {"model": model, "optimizer": optimizer, "sampler": sampler}

    memory = lastgood.Tier("memory://", cadence=lastgood.Every(steps=10), copies=2)
    with lastgood.Checkpointer(run, state, cadence=lastgood.Every(steps=1000), tiers=[memory]) as ckpt:
        restored = ckpt.restore()
        step, save = restored.step, None
        for place, source in restored.sources.items():
            print(f"rank {rank} restores step {step}: {source.bytes:,} bytes from {place}\n", end="", flush=True)
        while step < steps:
            for inputs, targets in loader:
                loss = nn.functional.cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                save = ckpt.step(step) or save
                if rank == 0:  # only rank 0 knows whether the copies are made
                    copied = save.step if save and save.durable("node") else 0
                    print(f"step {step} loss {loss.item()!r} copied {copied}\n", end="", flush=True)
                if step == steps:
                    break
                time.sleep(pause_seconds)  # so that there is time to kill it
    dist.destroy_process_group()


# ---- from here on: the failure, and what is played around it ----------------------------------------------------

NODES, STEPS, COPIED_BEFORE_THE_KILL = ("a", "b", "c"), 60, 30
STEP = re.compile(r"step (\d+) loss (\S+) copied (\d+)")


def job(run: Path, memory: Path, upto: int = STEPS) -> dict[int, str]:
    """Start the training on every node and return the losses, once step `upto` is on two nodes, or at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    output, theirs = os.pipe()
    for rank, node in enumerate(NODES):
        group = {"RANK": rank, "WORLD_SIZE": len(NODES), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        own = {"LASTGOOD_NODE": node, "LASTGOOD_MEMORY": memory / node, "OMP_NUM_THREADS": 1}
        environment = os.environ | {name: str(value) for name, value in (group | own).items()}
        command = [sys.executable, __file__, "train", run, str(STEPS)]
        with open(f"{run}.log", "ab") as log:
            subprocess.Popen(command, env=environment, stdout=theirs, stderr=log)
    os.close(theirs)
    losses = {}
    with open(output) as lines:  # it ends when all three have ended
        for line in lines:
            if found := STEP.match(line):
                losses[int(found[1])] = found[2]
                if upto < STEPS and int(found[3]) >= upto:
                    break
            else:
                print(f"  {line}", end="")
    return losses


def kill(node: str, memory: Path) -> None:
    """Kill every process of a node: its ranks, and its agent."""
    mine = f"LASTGOOD_MEMORY={memory / node}".encode()
    for one in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mine in (one / "environ").read_bytes().split(b"\0"):
                os.kill(int(one.name), signal.SIGKILL)


def play(folder: Path, memory: Path) -> bool:
    """Train twice, the second time with a lost node. Returns whether the losses are the same."""
    calm = job(folder / "undisturbed", memory)
    print(f"undisturbed run: {len(calm)} steps, last loss {calm[STEPS]}")
    before = job(folder / "run", memory, COPIED_BEFORE_THE_KILL)
    for node in NODES:
        kill(node, memory)
    shutil.rmtree(memory / "b")
    print(f"killed after step {max(before)}; node b and all that was in its memory is lost; the job is started again:")
    after = job(folder / "run", memory)
    same = before | after == calm and before.items() <= calm.items()
    print(
        f"{len(after)} steps to the end; {'all' if same else 'NOT all'} {len(calm)} losses are those of the undisturbed run"
    )
    return same


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2], int(sys.argv[3]))
    else:
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
            try:
                good = play(Path(folder), Path(memory))
            finally:
                for node in NODES:
                    kill(node, Path(memory))
        sys.exit(0 if good else 1)

"""Data parallel training that goes on when a machine is lost: its saves are also in the memory of the other machines.

python examples/survive_a_node.py

`train` is what runs on every machine; the line with `copies=2` is all that it needs. The rest plays the failure. Two
processes of this machine stand for nodes. They train once without a disturbance, and then again until the processes of
one node are killed and its memory is removed; then both are started anew. No save has reached a disk by then.

Needs scikit-learn for its images: pip install 'lastgood[examples]'.
"""

import contextlib
import multiprocessing
import os
import re
import shutil
import signal
import socket
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
    sampler = lastgood.ResumableSampler(len(images), global_batch=64, seed=0, rank=rank, world_size=world)
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
                if rank == 0:  # one line for all ranks
                    copied = save.step if save and save.durable("node") else 0
                    print(f"step {step} loss {loss.item()!r} copied {copied}\n", end="", flush=True)
                if step == steps:
                    break
                time.sleep(pause_seconds)  # so that there is time to kill it
    dist.destroy_process_group()


# ---- from here on: the failure, and what is played around it ----------------------------------------------------

NODES, STEPS, COPIED_BEFORE_THE_KILL = ("a", "b"), 60, 30
STEP = re.compile(r"step (\d+) loss (\S+) copied (\d+)")


def rank_on_node(rank: int, run: Path, memory: Path, port: int, output: int) -> None:
    """A training process on the node of the same number, as a launcher starts it there."""
    group = {"RANK": rank, "WORLD_SIZE": len(NODES), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    own = {"LASTGOOD_NODE": NODES[rank], "LASTGOOD_MEMORY": memory / NODES[rank]}
    os.environ |= {name: str(value) for name, value in (group | own).items()}
    os.dup2(output, 1)
    with open(f"{run}.log", "ab") as log:
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    train(str(run), STEPS)


def job(run: Path, memory: Path, upto: int = STEPS) -> dict[int, str]:
    """Train on all nodes. Returns the loss of each step, at the end, or once step `upto` is on two nodes: then all
    processes are killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    output, theirs = os.pipe()
    fork = multiprocessing.get_context("fork")  # torch is imported once for all
    ranks = [fork.Process(target=rank_on_node, args=(rank, run, memory, port, theirs)) for rank in range(len(NODES))]
    for one in ranks:
        one.start()
    os.close(theirs)
    losses = {}
    with open(output) as lines:  # it ends when all processes have ended
        for line in lines:
            if found := STEP.match(line):
                losses[int(found[1])] = found[2]
                if upto < STEPS and int(found[3]) >= upto:
                    break
            else:
                print(f"  {line}", end="")
    for one in ranks:
        if upto < STEPS:
            one.kill()
        one.join()
    return losses


def kill_agent(memory: Path) -> None:
    """Kill the agent of a node. The ranks started it, and it has outlived them."""
    for one in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"LASTGOOD_MEMORY={memory}".encode() in (one / "environ").read_bytes().split(b"\0"):
                os.kill(int(one.name), signal.SIGKILL)


def play(folder: Path, memory: Path) -> bool:
    """Train twice, the second time with a lost node. Returns whether the losses are the same."""
    torch.optim.AdamW([torch.zeros(1)])  # it imports much; here once for all ranks, which are forked
    calm = job(folder / "undisturbed", memory)
    print(f"undisturbed: {len(calm)} steps, last loss {calm[STEPS]}")
    before = job(folder / "run", memory, COPIED_BEFORE_THE_KILL)
    kill_agent(memory / "b")
    shutil.rmtree(memory / "b")
    print(f"killed after step {max(before)}; node b is lost, with its memory; all are started again:")
    after = job(folder / "run", memory)
    same = before.items() <= calm.items() and after.items() <= calm.items() and STEPS in after
    print(f"{len(after)} steps to the end; the losses are {'' if same else 'NOT '}those of the undisturbed run")
    return same


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        try:
            good = play(Path(folder), Path(memory))
        finally:
            for node in NODES:
                kill_agent(Path(memory) / node)
    raise SystemExit(0 if good else 1)

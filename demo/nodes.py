"""The demo with nodes: a training on four nodes that lose their machines one after the other, with all that is on them.

    python demo/nodes.py [--out demo-out/nodes] [--steps 60] [--kills 4]

The nodes are network namespaces of this machine, each with its own address and its own memory; without root or `ip`
they are plain processes on loopback. It trains once without a disturbance. Then it trains again, and kills the nodes
one by one: all processes of a node, its agent, and its memory. The saves are nowhere but in the memory of the nodes.
Each restart is the same command, with an empty machine in place of the lost one. It ends with status 1 if the two runs
differ in one bit, or if anything else that it claims does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from proof import Check
from rich.console import Console
from run import Failed, concluded, say
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lastgood
from lastgood.run import memory_place
from lastgood_lab import namespaces
from lastgood_lab.campaigns.memory_kills import kill_agent

NODES = 4
STEP = re.compile(r"step (\d+) loss (\S+) copied (\d+)")
RESTORED = re.compile(r"restored (\d+): (\d+) bytes from (.*)")


def train(rank: int, home: str, steps: int) -> None:
    """The training process of a node, as a user would write it but for what it prints."""
    dist.init_process_group("gloo", rank=rank, world_size=NODES)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.LayerNorm(512), nn.ReLU(), nn.Linear(512, 10))
    mesh = init_device_mesh("cpu", (NODES,))
    for part in (model[0], model[3], model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    sampler = lastgood.ResumableSampler(len(images), global_batch=64, seed=0, rank=rank, world_size=NODES)
    loader = sampler.loader(torch.utils.data.TensorDataset(images, labels))
    state = {"model": model, "optimizer": optimizer, "sampler": sampler}

    memory = lastgood.Tier("memory://", cadence=lastgood.Every(steps=5), copies=2)
    with lastgood.Checkpointer(home, state, cadence=lastgood.Every(steps=10**6), tiers=[memory]) as ckpt:
        found = ckpt.restore()
        for place, source in found.sources.items():
            print(f"restored {found.step}: {source.bytes} bytes from {place}\n", end="", flush=True)
        step, save = found.step, None
        while step < steps:
            for inputs, targets in loader:
                loss = nn.functional.cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                save = ckpt.step(step) or save
                copied = save.step if save and save.durable("node") else 0
                if rank == 0:
                    print(f"step {step} loss {loss.item()!r} copied {copied}\n", end="", flush=True)
                if step == steps:
                    break
                time.sleep(0.02)
    dist.destroy_process_group()


@dataclass
class Life:
    """One life of the job, from the output of its ranks. `sources`: place -> bytes that were restored from it."""

    resumed: int = 0
    copied: int = 0
    sources: dict[str, int] = field(default_factory=dict)
    losses: dict[int, str] = field(default_factory=dict)

    @property
    def reached(self) -> int:
        return max(self.losses, default=self.resumed)


class Cluster:
    """The nodes. `network`: their namespaces; None: they are processes on loopback."""

    def __init__(self, network: namespaces.Network | None, memory: Path, out: Path) -> None:
        self._network, self._memory, self._out = network, memory, out

    def live(self, home: Path, steps: int, kill: int | None = None, once_copied: int = 0) -> Life:
        """Train to the end, or until step `once_copied` has its copies: then node `kill` is lost, and the job ends."""
        life, (output, theirs), port = Life(), os.pipe(), free_port()
        fork = multiprocessing.get_context("fork")  # torch is imported once for all
        ranks = [fork.Process(target=self._rank, args=(node, home, steps, port, theirs)) for node in range(NODES)]
        for one in ranks:
            one.start()
        os.close(theirs)
        with open(output) as lines:  # it ends when all processes have ended
            for line in lines:
                if found := RESTORED.match(line):
                    life.resumed = int(found[1])
                    life.sources[found[3]] = life.sources.get(found[3], 0) + int(found[2])
                elif found := STEP.match(line):
                    life.losses[int(found[1])], life.copied = found[2], max(life.copied, int(found[3]))
                    if kill is not None and life.copied >= once_copied:
                        ranks[kill].kill()
                        self.lose(kill, home)
                        break
        for one in ranks:
            if kill is not None:
                one.kill()
            one.join()
        if kill is None and any(one.exitcode for one in ranks):
            raise Failed(f"the job ended at step {life.reached}. It said:\n{self._log(home).read_text()[-3000:]}")
        return life

    def lose(self, node: int, home: Path) -> None:
        """Kill what runs on a node, its agent too, and remove its memory."""
        if self._network is not None:
            self._network.kill(node)
        else:
            kill_agent(memory_place.folder_of(home, self._environment(node)))
        shutil.rmtree(self._memory / f"node{node}", ignore_errors=True)

    def _rank(self, node: int, home: Path, steps: int, port: int, output: int) -> None:
        os.dup2(output, 1)
        with open(self._log(home), "ab") as log:
            os.dup2(log.fileno(), 2)
        if self._network is not None:
            namespaces.enter(self._network.name(node))
        os.environ |= self._environment(node) | {"MASTER_PORT": str(port)}
        torch.set_num_threads(1)
        train(node, str(home), steps)

    def _environment(self, node: int) -> dict[str, str]:
        master = self._network.address(0) if self._network is not None else "127.0.0.1"
        interface = namespaces.INTERFACE if self._network is not None else "lo"
        return {
            "LASTGOOD_NODE": f"node{node}",
            memory_place.VARIABLE: str(self._memory / f"node{node}"),
            "MASTER_ADDR": master,
            "GLOO_SOCKET_IFNAME": interface,
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }

    def _log(self, home: Path) -> Path:
        return self._out / f"{home.name}.log"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def cluster(out: Path, console: Console) -> Iterator[Cluster]:
    """The nodes, with nothing in their memory; at the end all of them are lost."""
    lacks = namespaces.missing()
    say(
        console,
        f"{NODES} nodes: "
        + (f"processes on loopback (network namespaces: {lacks})" if lacks else "network namespaces"),
    )
    with contextlib.ExitStack() as made:
        network = None if lacks else made.enter_context(namespaces.Network(NODES))
        memory = Path(made.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        found = Cluster(network, memory, out)
        try:
            yield found
        finally:
            for node in range(NODES):
                for home in (out / "undisturbed", out / "killed"):
                    found.lose(node, home)


def tensors(home: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest generation, but for NumPy's generator, which is neither seeded nor used."""
    run = lastgood.open(home)
    names = sorted(piece.name for piece in run.manifest(run.generation()).pieces)
    return {name: run.tensor(name) for name in names if not name.startswith("rng.numpy")}


def demo(out: Path, steps: int, kills: int, console: Console) -> list[Check]:
    """Both runs and the comparison. Raises Failed."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    torch.optim.AdamW([torch.zeros(1)])  # it imports much; here once for all ranks, which are forked
    calm_home, home, lives = out / "undisturbed", out / "killed", list[Life]()
    with cluster(out, console) as nodes:
        begun = time.monotonic()
        calm = nodes.live(calm_home, steps)
        say(console, f"undisturbed run: {calm.reached} steps in {time.monotonic() - begun:.0f} s")
        for number in range(kills):
            lost = (NODES - 1 - number) % NODES  # the last one of four is node 0, which leads the job
            lives.append(life := nodes.live(home, steps, lost, (number + 1) * steps // (kills + 1)))
            say(console, f"life {number + 1}: {described(life)}; node {lost} is lost after step {life.reached}")
        lives.append(life := nodes.live(home, steps))
        say(console, f"life {len(lives)}: {described(life)}; finished at step {life.reached}")
        return checks(calm, lives, calm_home, home, steps)


def described(life: Life) -> str:
    if not life.resumed:
        return "started"
    own = sum(size for place, size in life.sources.items() if place.startswith("memory://"))
    others = life.sources.get("other nodes", 0)
    return f"resumed from step {life.resumed}, {own:,} bytes from the memory of the nodes, {others:,} from other nodes"


def checks(calm: Life, lives: list[Life], calm_home: Path, home: Path, steps: int) -> list[Check]:
    pairs = list(pairwise(lives))
    newest = all(after.resumed >= before.copied for before, after in pairs)
    again = sum(before.reached - after.resumed for before, after in pairs)
    disk = [place for one in lives for place in one.sources if place == str(home)]
    logged = [(step, loss) for one in lives for step, loss in one.losses.items()]
    same = sum(calm.losses[step] == loss for step, loss in logged)
    reference, victim = tensors(calm_home), tensors(home)
    equal = reference.keys() == victim.keys() and all(map(torch.equal, reference.values(), victim.values()))
    numbers = sum(one.numel() for one in victim.values())
    return [
        Check("nodes lost, each with its memory", f"{len(pairs)} of {NODES}, one after the other", bool(pairs)),
        Check("newest copied save resumed", f"{len(pairs)} restarts; {again} steps done again", newest),
        Check("from memory alone", "nothing read from the disk" if not disk else f"{disk}", not disk),
        Check("loss curve equal", f"{same} of {len(logged)} logged on the way", same == len(logged)),
        Check("finished", f"step {lives[-1].reached} of {steps}", lives[-1].reached == steps == calm.reached),
        Check("same tensors, bit for bit", f"{len(victim)} tensors, {numbers:,} numbers", equal),
    ]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", type=Path, default=Path("demo-out/nodes"))
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--kills", type=int, default=4, help="how many nodes are lost")
    args = options.parse_args()
    console, begun = Console(width=None if sys.stdout.isatty() else 120), time.monotonic()
    try:
        found = demo(args.out.absolute(), args.steps, args.kills, console)
    except Failed as error:
        say(console, f"The demo failed: {error}")
        return 1
    return concluded(found, console, begun)


if __name__ == "__main__":
    sys.exit(main())

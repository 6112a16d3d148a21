"""What the ranks of the campaign run in their processes: a small model on one or several ranks, saves that fail."""

from __future__ import annotations

import errno
import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lastgood import errors
from lastgood_lab.worlds import LIMIT_SECONDS

PATIENCE = 6.0
"""more than the five seconds in which torch's server answers nobody, where the name of a client cannot be looked up"""


class Net(nn.Module):
    """Rows that no number of ranks divides, tied weights, a buffer that each rank counts for itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 10)
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, 10)
        self.again = self.head
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.norm(self.head(self.down(torch.relu(self.up(x))))))


def spread(kind: str, size: int) -> nn.Module:
    """The net over the ranks, as `kind` says; bit for bit the same net everywhere."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    net = Net()
    if kind == "plain":
        return net
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    if kind == "fsdp1":
        return in_flat_parameters(net, size)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (size,))
    elif kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicas", "shards"))
    else:
        data, model = (1, size) if kind == "tp" else (size // 2, 2)
        mesh = init_device_mesh("cpu", (data, model), mesh_dim_names=("data", "model"))
        parallelize_module(net, mesh["model"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if kind == "tp":
            return net
        mesh = mesh["data"]
    for part in (net.up, net.down):
        fully_shard(part, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def in_flat_parameters(net: Net, size: int) -> nn.Module:
    """FSDP1."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel

    options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True}
    options["device_mesh"] = init_device_mesh("cpu", (size,))
    net.register_module("up", FullyShardedDataParallel(net.up, **options))
    return FullyShardedDataParallel(net, **options)


class App:
    """Model and optimizer as torch's helpers hand them out and take them back, in shards."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.net, self.optimizer = net, optimizer

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(self.net, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class Loop:
    """A training loop on one rank, the same data on all. A kind that begins with "app": its state is handed out."""

    def __init__(self, kind: str, size: int) -> None:
        kind, handed = kind.removeprefix("app "), kind.startswith("app ")
        self.net = spread(kind, size)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.state: dict[str, Any] = {"net": self.net, "optimizer": self.optimizer}
        if handed:
            self.state = {"app": App(self.net, self.optimizer)}

    def step(self, n: int) -> float:
        data = torch.randn(8, 16, generator=torch.Generator().manual_seed(n))
        self.optimizer.zero_grad()
        loss = self.net(data).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()


class Pipeline:
    """A pipeline of two stages, each with its optimizer and its own names in the state.

    "stages": both in one process. "pipeline": each on one rank. "pipeline of meshes": each on four ranks, two by two of
    FSDP2 and tensor parallelism.
    """

    def __init__(self, kind: str, size: int) -> None:
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        net = Net()
        parts = nn.Sequential(net.up, nn.ReLU()), nn.Sequential(net.down, net.norm, net.head)
        self.last, self.schedule = True, None
        stages: dict[int, nn.Module] = dict(enumerate(parts))
        if size > 1:
            at, group = _staged(kind, size, parts)
            self.last, stages = at == 1, {at: parts[at]}
            stage = PipelineStage(parts[at], at, 2, torch.device("cpu"), group=group)
            self.schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=_loss)
        self.optimizers = {n: torch.optim.AdamW(one.parameters(), lr=0.01) for n, one in stages.items()}
        self.state: dict[str, Any] = {f"stage{n}": one for n, one in stages.items()}
        self.state |= {f"optimizer{n}": one for n, one in self.optimizers.items()}

    def step(self, n: int) -> float:
        data = torch.randn(8, 16, generator=torch.Generator().manual_seed(n))
        for one in self.optimizers.values():
            one.zero_grad()
        losses: list[torch.Tensor] = []
        if self.schedule is None:
            losses = [_loss(self.state["stage1"](self.state["stage0"](data)))]
            losses[0].backward()
        elif self.last:
            self.schedule.step(target=data, losses=losses)
        else:
            self.schedule.step(data)
        for one in self.optimizers.values():
            one.step()
        return sum(one.item() for one in losses)


def _loss(found: torch.Tensor, _: torch.Tensor | None = None) -> torch.Tensor:
    return found.pow(2).mean()


def _staged(kind: str, size: int, parts: tuple[nn.Module, ...]) -> tuple[int, dist.ProcessGroup]:
    """Which stage this rank has, spread as `kind` says, and the group of those with whom it makes a pipeline."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, size // 4 or 1, size // 4 or 1), mesh_dim_names=("stage", "data", "model"))
    at = mesh.get_local_rank("stage")
    if kind == "pipeline of meshes":
        parallelize_module(parts[at], mesh["model"], {"0": ColwiseParallel(output_layouts=Replicate())})
        fully_shard(parts[at], mesh=mesh["data"])
    return at, mesh.get_group("stage")


def made(kind: str, size: int) -> Loop | Pipeline:
    """The loop of a kind."""
    return Pipeline(kind, size) if kind in ("stages", "pipeline", "pipeline of meshes") else Loop(kind, size)


def whole(root: Path, step: int) -> dict[str, bytes]:
    """Every tensor of a generation, as one process would read it; what is each rank's own, as rank 0 has it."""
    import lastgood
    from lastgood.run.content import Content

    run = lastgood.open(root)
    content = Content(run.tier, run.generation(step))
    return {name: bytes(content.tensor(name)[1]) for name in content.names() if not name.startswith("rng.")}


def resaved(rank: int, size: int, kind: str, roots: list[Path]) -> list[int]:
    """Of each run, the newest generation loaded, and saved again as it is, one step later."""
    import lastgood

    steps = []
    for root in roots:
        loop = made(kind, size)
        loop.step(1)  # what a restore must overwrite, moments included
        with lastgood.Checkpointer(root, loop.state, cadence=lastgood.Every(steps=1000)) as ckpt:
            step = ckpt.restore().step
            ckpt.save(step + 1).result(60)
        steps.append(step)
    return steps


def attempted(ckpt: Any, n: int) -> dict[str, Any]:
    """A save of step `n`: what became of it, and how long that took."""
    begun = time.monotonic()
    try:
        ckpt.save(n).result(LIMIT_SECONDS)
        told = "durable"
    except errors.LastgoodError as error:
        told = f"{type(error).__name__}: {error}"
    return {str(n): told, f"{n} seconds": time.monotonic() - begun}


def faulted(rank: int, size: int, kind: str, root: Path, who: int, at: int, what: str) -> dict[str, Any]:
    """Three saves; from the second one on, system call number `at` of `who` fails with the errno `what`, or the process
    ends there ("KILL"). What became of each save, how long that took, how many calls there were and which was hit."""
    import lastgood
    from lastgood.io import files

    loop, calls = Loop(kind, size), Calls(at if rank == who else -1, what)
    vars(files)["os"] = calls
    told: dict[str, Any] = {}
    with (
        warnings.catch_warnings(),
        lastgood.Checkpointer(root, loop.state, cadence=lastgood.Every(steps=1000), patience=PATIENCE) as ckpt,
    ):
        warnings.simplefilter("ignore")
        ckpt.restore()
        for n in (1, 2, 3):
            loop.step(n)
            calls.armed = n == 2
            told |= attempted(ckpt, n)
            ckpt.wait()
            calls.armed = False
            if what == "KILL" and n == 2:
                break
    return {**told, "calls": calls.count, "hit": calls.hit}


class Calls:
    """Stands for `os` where the system is called: counts while `armed`; one call goes wrong."""

    WATCHED = frozenset(
        [
            "open",
            "scandir",
            "mkdir",
            "link",
            "rename",
            "symlink",
            "unlink",
            "rmdir",
            "preadv",
            "pwrite",
            "fsync",
            "fdatasync",
            "posix_fallocate",
            "ftruncate",
        ]
    )

    def __init__(self, at: int, what: str) -> None:
        self.armed, self.count, self.hit = False, 0, ""
        self._at, self._what, self._lock = at, what, threading.Lock()

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in self.WATCHED or not self.armed:
            return real

        def call(*arguments: Any) -> Any:
            with self._lock:
                hit = self.count == self._at
                self.count += 1
            if hit:
                self.hit = f"{name} {os.path.basename(arguments[0]) if isinstance(arguments[0], str) else ''}"
                if self._what == "KILL":
                    os._exit(9)
                raise OSError(getattr(errno, self._what), os.strerror(getattr(errno, self._what)))
            return real(*arguments)

        return call


def outcome_of(act: Callable[[], Any]) -> str:
    """What became of it: the step that it returns, if any, or its error."""
    try:
        found = act()
        return f"step {getattr(found, 'step', '')}"
    except errors.LastgoodError as error:
        return f"{type(error).__name__}: {error}"

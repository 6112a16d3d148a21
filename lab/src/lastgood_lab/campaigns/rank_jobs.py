"""The code that each rank of a world runs: training a small model on one or several ranks, and saves with faults."""

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
"""longer than the five seconds for which torch's store server blocks when it cannot resolve the name of a client"""


class Net(nn.Module):
    """A net with row counts that no number of ranks divides, tied weights, and a buffer that differs between ranks."""

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
    """The net, distributed over the ranks as `kind` says. Its full values are the same bit for bit for every kind."""
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
    """The net under FSDP1, which flattens parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel

    options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True}
    options["device_mesh"] = init_device_mesh("cpu", (size,))
    net.register_module("up", FullyShardedDataParallel(net.up, **options))
    return FullyShardedDataParallel(net, **options)


class App:
    """Model and optimizer behind torch's get_state_dict and set_state_dict, which exchange sharded state."""

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
    """A training loop on one rank, with the same data on all. Kinds that begin with "app " save an App."""

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
    """A pipeline of two stages, each with its own optimizer and its own names in the state.

    Kind "stages" has both stages in one process, "pipeline" each on one rank, and "pipeline of meshes" each on four
    ranks: two by two of FSDP2 and tensor parallelism.
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
    """The stage of this rank, distributed as `kind` says, and the process group of the ranks of its pipeline."""
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
    """The training loop of this kind."""
    return Pipeline(kind, size) if kind in ("stages", "pipeline", "pipeline of meshes") else Loop(kind, size)


def whole(root: Path, step: int) -> dict[str, bytes]:
    """Every tensor of a generation as a single process reads it. Of tensors that differ between ranks: rank 0's."""
    import lastgood
    from lastgood.run.content import Content

    run = lastgood.open(root)
    content = Content(run.tier, run.generation(step))
    return {name: bytes(content.tensor(name)[1]) for name in content.names() if not name.startswith("rng.")}


def resaved(rank: int, size: int, kind: str, roots: list[Path]) -> list[int]:
    """Restore the newest generation of each run and save it unchanged as the next step; returns the old steps."""
    import lastgood

    steps = []
    for root in roots:
        loop = made(kind, size)
        loop.step(1)  # so that the restore must overwrite weights and moments
        with lastgood.Checkpointer(root, loop.state, cadence=lastgood.Every(steps=1000)) as ckpt:
            step = ckpt.restore().step
            ckpt.save(step + 1).result(60)
        steps.append(step)
    return steps


def attempted(ckpt: Any, n: int) -> dict[str, Any]:
    """Save step `n`: its outcome under the key "n", and how long that took under "n seconds"."""
    begun = time.monotonic()
    try:
        ckpt.save(n).result(LIMIT_SECONDS)
        outcome = "durable"
    except errors.LastgoodError as error:
        outcome = f"{type(error).__name__}: {error}"
    return {str(n): outcome, f"{n} seconds": time.monotonic() - begun}


def faulted(rank: int, size: int, kind: str, root: Path, failing_rank: int, at: int, what: str) -> dict[str, Any]:
    """Three saves; in the second, system call number `at` of `failing_rank` fails with the errno `what`.

    With `what` "KILL" the process ends at that call, and the world stops after the second save. Returns the outcome and
    the seconds of each save, the number of calls in the second, and the call that was hit.
    """
    import lastgood
    from lastgood.io import files

    loop, calls = Loop(kind, size), Calls(at if rank == failing_rank else -1, what)
    vars(files)["os"] = calls
    outcomes: dict[str, Any] = {}
    with (
        warnings.catch_warnings(),
        lastgood.Checkpointer(root, loop.state, cadence=lastgood.Every(steps=1000), patience=PATIENCE) as ckpt,
    ):
        warnings.simplefilter("ignore")
        ckpt.restore()
        for n in (1, 2, 3):
            loop.step(n)
            calls.armed = n == 2
            outcomes |= attempted(ckpt, n)
            ckpt.wait()
            calls.armed = False
            if what == "KILL" and n == 2:
                break
    return {**outcomes, "calls": calls.count, "hit": calls.hit}


class Calls:
    """Replaces `os` in lastgood.io.files: counts the watched calls while `armed`, and makes call number `at` fail."""

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
    """The outcome of `act` as text: the step of the result, if it has one, or the error."""
    try:
        found = act()
        return f"step {getattr(found, 'step', '')}"
    except errors.LastgoodError as error:
        return f"{type(error).__name__}: {error}"

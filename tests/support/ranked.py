"""What the ranks of the tests run, in worlds of real processes."""

from __future__ import annotations

import contextlib
import errno
import importlib
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
    """The net, distributed over the ranks according to `kind`; its weights are the same on every rank."""
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
    return fully_shard(net, mesh=mesh)


def in_flat_parameters(net: Net, size: int) -> nn.Module:
    """FSDP1."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel

    options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True}
    options["device_mesh"] = init_device_mesh("cpu", (size,))
    net.up = FullyShardedDataParallel(net.up, **options)
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
        loss.backward()  # type: ignore[no-untyped-call]
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
            losses[0].backward()  # type: ignore[no-untyped-call]
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
    """The stage of this rank, distributed according to `kind`, and the group of the ranks of its pipeline."""
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


def trained(rank: int, size: int, kind: str, root: Path, upto: int, **options: Any) -> list[float]:
    """Restore, train on, save every second step; the losses."""
    import lastgood

    loop = made(kind, size)
    with lastgood.Checkpointer(root, loop.state, cadence=lastgood.Every(steps=2), **options) as ckpt:
        losses = []
        for n in range(ckpt.restore().step + 1, upto + 1):
            losses.append(loop.step(n))
            ckpt.step(n)
        ckpt.wait()
        dist.barrier() if size > 1 else None  # rank 0 has verified
        assert not losses or ckpt.latest() == upto - upto % 2
    return losses


def trained_in_parts(rank: int, size: int, root: Path, upto: int) -> None:
    """Small tensors are cut between the ranks, too; everything is digested at the cut."""
    from lastgood.policy import reshard

    reshard.LEAST_SPLIT_BYTES = 64
    trained(rank, size, "ddp", root, upto, torn_check="full", staging="overlap")


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


def failing(rank: int, size: int, root: Path, who: int, where: str, how: str) -> dict[str, Any]:
    """Three saves; in the second, rank `who` fails or dies at one of its stages. Returns outcomes and durations."""
    import lastgood

    loop = Loop("ddp", size)
    told: dict[str, Any] = {}
    options = {"cadence": lastgood.Every(steps=1000), "patience": PATIENCE, "save_on_exit": how != "dies"}
    with lastgood.Checkpointer(root, loop.state, **options) as ckpt:  # the living would wait for the dead once more
        ckpt.restore()
        for n in (1, 2, 3):
            if n == 2 and rank == who:
                fail_at(where, how, loop)
            told |= attempted(ckpt, n)
            loop.state.pop("odd", None)
            if how == "dies" and n == 2:
                break
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ckpt.wait()
    return told


PATIENCE = 6.0
"""more than the five seconds in which torch's server answers nobody, where the name of a client cannot be looked up"""
STEPS_OF_A_SAVE = {
    "staging": "lastgood.snapshot.staging.Snapshot.fill",
    "write": "lastgood.storage.directory.Disk.create",
    "digests": "lastgood.ranks.replica_check._sums",
    "seal": "lastgood.format.commit.seal",
    "commit": "lastgood.format.commit.publish",
    "after the commit": "lastgood.run.known.KnownRun.record",
}


def fail_at(where: str, how: str, loop: Loop) -> None:
    """The next call of what makes this step raises, or ends the process."""
    if where == "state":
        loop.state["odd"] = object()
        if how == "dies":
            os._exit(9)
        return
    module, _, name = STEPS_OF_A_SAVE[where].rpartition(".")
    try:
        owner = importlib.import_module(module)
    except ModuleNotFoundError:
        module, _, kind = module.rpartition(".")
        owner = getattr(importlib.import_module(module), kind)
    real = getattr(owner, name)

    def once(*args: Any, **options: Any) -> Any:
        setattr(owner, name, real)
        if how == "dies":
            os._exit(9)
        kind = errors.CommitUnknown if how == "cannot tell" else errors.TierDown
        raise kind(f"{where} failed on purpose")

    setattr(owner, name, once)


def faulted(rank: int, size: int, kind: str, root: Path, who: int, at: int, what: str) -> dict[str, Any]:
    """Three saves; from the second one on, system call number `at` of `who` fails with the errno `what`, or the process
    ends there ("KILL"). What became of each save, how long that took, how many calls there were and which was hit."""
    import lastgood
    from lastgood.io import files

    loop, calls = Loop(kind, size), Calls(at if rank == who else -1, what)
    files.os = calls  # type: ignore[assignment]
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

    WATCHED = ("open", "scandir", "mkdir", "link", "rename", "symlink", "unlink", "rmdir", "preadv", "pwrite")
    WATCHED += ("fsync", "fdatasync", "posix_fallocate", "ftruncate")

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


def unwrapped(net: nn.Module) -> nn.Module:
    """torch's helpers lose a tied weight of what DDP has wrapped."""
    return net.module if isinstance(net, nn.parallel.DistributedDataParallel) else net


def dcp_saved(rank: int, size: int, kind: str, root: Path, steps: list[int]) -> None:
    """A state as torch's helpers give it, saved at these steps through the drop-in."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    import lastgood

    loop = Loop(kind, size)
    for step in steps:
        loop.step(step)
        model, optimizer = get_state_dict(unwrapped(loop.net), loop.optimizer)
        state = {"model": model, "optimizer": optimizer, "step": step, "name": "gpt"}
        dcp.save(state, checkpoint_id=str(step), storage_writer=lastgood.dcp.Writer(root))


def dcp_of_torch(rank: int, size: int, kind: str, folder: Path) -> dict[str, Any]:
    """The weights of a model, saved by torch's own writer; whole tensors."""
    import torch.distributed.checkpoint as dcp

    state = Loop(kind, size).net.state_dict()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))
    return {name: getattr(one, "full_tensor", lambda one=one: one)().tolist() for name, one in state.items()}


def dcp_loaded(rank: int, size: int, kind: str, root: Path) -> dict[str, Any]:
    """The newest, loaded through the drop-in over another state; whole tensors."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    import lastgood

    loop = Loop(kind, size)
    loop.step(99)
    net = unwrapped(loop.net)
    model, optimizer = get_state_dict(net, loop.optimizer)
    state = {"model": model, "optimizer": optimizer, "step": 0, "name": ""}
    dcp.load(state, storage_reader=lastgood.dcp.Reader(root))
    set_state_dict(net, loop.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    whole = {
        name: getattr(one, "full_tensor", lambda one=one: one)().tolist() for name, one in net.state_dict().items()
    }
    return {"step": state["step"], "name": state["name"], "whole": whole}


def differing(rank: int, size: int, root: Path, what: str) -> dict[str, Any]:
    """Four saves, before the second of which something differs between the ranks; then a new loop that is restored."""
    import lastgood

    loop = Loop("ddp", size)
    net = unwrapped(loop.net)
    told: dict[str, Any] = {}
    with lastgood.Checkpointer(root, loop.state, cadence=lastgood.Every(steps=1000)) as ckpt:
        ckpt.restore()
        for n in (1, 2, 3, 4):
            if n in (2, 3) and what == "a weight":
                with torch.no_grad():
                    net.up.weight[3] = rank if n == 2 else 0
            if n == 2 and what == "a buffer":
                net.seen += rank
            if n == 2 and what == "what it is made of" and rank == 1:
                loop.state["more"] = torch.ones(5)
            told |= attempted(ckpt, n)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ckpt.wait()
    fresh = Loop("ddp", size)
    if "more" in loop.state:
        fresh.state["more"] = torch.zeros(5)
    with lastgood.Checkpointer(root, fresh.state, exclude=[] if "more" in fresh.state else ["more"]) as ckpt:
        told["restored"] = ckpt.restore(strict="more" not in told).step
    told["seen"] = unwrapped(fresh.net).seen.tolist()
    told["more"] = fresh.state["more"].tolist() if "more" in fresh.state else []
    return told


def thawing(rank: int, size: int, root: Path) -> dict[str, Any]:
    """Five saves of a stage on each rank; that of rank 1 is frozen at first, and is trained from the third save on."""
    import lastgood

    stage = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(stage.parameters())
    state = {f"stage{rank}": stage, f"optimizer{rank}": optimizer}
    told: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with lastgood.Checkpointer(root, state, patience=PATIENCE) as ckpt:
            ckpt.restore()
            for n in (1, 2, 3, 4, 5):
                if rank != 1 or n >= 3:
                    stage(torch.ones(2, 4)).sum().backward()
                    optimizer.step()
                told |= attempted(ckpt, n)
    return told


def leaving_out(rank: int, size: int, root: Path, who: int) -> dict[str, Any]:
    """Four saves, of which rank `who` skips the second."""
    import lastgood

    loop = Loop("ddp", size)
    told: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with lastgood.Checkpointer(root, loop.state, patience=PATIENCE) as ckpt:
            ckpt.restore()
            for n in (1, 2, 3, 4):
                if n != 2 or rank != who:
                    told |= attempted(ckpt, n)
    return told


def outcome_of(act: Callable[[], Any]) -> str:
    """The outcome of a call: the step of its result, if any, or its error."""
    try:
        found = act()
        return f"step {getattr(found, 'step', '')}"
    except errors.LastgoodError as error:
        return f"{type(error).__name__}: {error}"


def once(owner: Any, name: str, error: Exception, after: bool = False) -> None:
    """The next call of this fails; `after` what it does."""
    real = getattr(owner, name)

    def failing(*arguments: Any, **options: Any) -> Any:
        setattr(owner, name, real)
        if after:
            real(*arguments, **options)
        raise error

    setattr(owner, name, failing)


def opened(root: Path, state: dict[str, Any]) -> Any:
    import lastgood

    warnings.simplefilter("ignore")
    options = {"cadence": lastgood.Every(steps=1000), "patience": PATIENCE}
    return lastgood.Checkpointer(root, state, save_on_exit=False, **options)  # only the saves that a test makes


def retried(rank: int, size: int, root: Path, where: str) -> list[str]:
    """A save fails on rank 1 and is repeated at once; rank 0 receives the failure late and then writes slowly."""
    from lastgood.format import commit
    from lastgood.run.writer import RunWriter
    from lastgood.storage.directory import Disk

    turn, create = root.with_name(f"{root.name}-turn"), Disk.create
    with contextlib.suppress(FileExistsError):
        os.mkfifo(turn)

    def rank_1_first(*arguments: Any) -> Any:
        Disk.create = create  # type: ignore[method-assign]
        if rank == 0:
            turn.read_bytes()
        try:
            return create(*arguments)
        finally:
            if rank == 1:
                turn.write_bytes(b"made")

    state: dict[str, Any] = {"w": torch.arange(4000.0), f"mine{rank}": torch.full((5000,), float(rank))}
    with opened(root, state) as ckpt:
        ckpt.restore()
        ckpt.save(1).result(LIMIT_SECONDS)
        if rank == 1 and where == "cut":
            state["odd"] = object()
        if rank == 1 and where == "seal":
            once(commit, "seal", errors.TierDown("on purpose"))
        cleared, clear = threading.Event(), RunWriter.clear
        if rank == 0:
            RunWriter.clear = lambda *arguments: (cleared.wait(0.3), clear(*arguments))[1]  # type: ignore[method-assign]
        first = outcome_of(lambda: ckpt.save(2).result(LIMIT_SECONDS))
        state.pop("odd", None)
        Disk.create = rank_1_first  # type: ignore[method-assign]
        return [first, outcome_of(lambda: ckpt.save(2).result(LIMIT_SECONDS)), outcome_of(ckpt.wait)]


def listing_less(rank: int, size: int, root: Path) -> list[str]:
    """Rank 1's machine does not list the newest generation yet, as a file system of several machines may not."""
    from lastgood.format import commit

    state, survey = {"w": torch.arange(400.0)}, commit.survey

    def less(tier: Any) -> Any:
        found = survey(tier)
        found.generations.pop(max(found.generations))
        return found

    with opened(root, state) as ckpt:
        ckpt.restore()
        for n in (1, 2):
            ckpt.save(n).result(LIMIT_SECONDS)
            ckpt.wait()
    if rank == 1:
        commit.survey = less
    with opened(root, state) as ckpt:
        return [outcome_of(ckpt.restore)]


def asking_for(rank: int, size: int, root: Path) -> tuple[str, float]:
    """Each rank asks for another step; and what is in its state then."""
    state = {"w": torch.ones(400)}
    with opened(root, state) as ckpt:
        ckpt.restore()
        for n in (1, 2):
            ckpt.save(n).result(LIMIT_SECONDS)
            ckpt.wait()
    state["w"].fill_(7.0)
    with opened(root, state) as ckpt:
        return outcome_of(lambda: ckpt.restore(step=1 + rank)), float(state["w"].sum())


def reading(rank: int, size: int, root: Path, placement: str) -> list[bool]:
    """Whether a restore of what has been verified reads tensors past the page cache."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from lastgood.storage.directory import Disk

    placements = [Shard(0) if placement == "shard" else Replicate()]

    past, real = set[bool](), Disk.read_into

    def read_into(disk: Disk, extent: Any, mv: memoryview, *, fresh: bool = False) -> None:
        if extent.length > 100_000:
            past.add(fresh)
        real(disk, extent, mv, fresh=fresh)

    state = {"w": distribute_tensor(torch.ones(100_000), init_device_mesh("cpu", (size,)), placements)}
    with opened(root, state) as ckpt:
        ckpt.restore()
        ckpt.save(1).result(LIMIT_SECONDS)
        ckpt.wait()
        ckpt.restore()
        Disk.read_into = read_into  # type: ignore[method-assign]
        ckpt.restore()
    return sorted(past)


def unfit(rank: int, size: int, root: Path) -> list[str]:
    """NaN in rank 1's rows of step 2, which is restored by request; then the default restore."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    net = nn.Module()
    net.w = nn.Parameter(distribute_tensor(torch.zeros(8, 8), init_device_mesh("cpu", (size,)), [Shard(0)]))
    told = []
    with opened(root, {"net": net}) as ckpt:
        ckpt.restore()
        ckpt.save(1).result(LIMIT_SECONDS)
        ckpt.wait()
        if rank == 1:
            with torch.no_grad():
                net.w._local_tensor[-1, -1] = float("nan")
        ckpt.save(2).result(LIMIT_SECONDS)
        outcome_of(ckpt.wait)
    for step in (2, None):
        with opened(root, {"net": net}) as ckpt:
            told.append(outcome_of(lambda: ckpt.restore(step=step)))  # noqa: B023 - called at once
    return told


def losing_messages(rank: int, size: int, root: Path) -> list[str]:
    """Rank 1 loses a message when a restore begins; then it restores and saves again."""
    from lastgood.coordination.rounds import Topic

    state = {"w": torch.arange(400.0)}
    with opened(root, state) as ckpt:
        ckpt.restore()
        ckpt.save(1).result(LIMIT_SECONDS)
        ckpt.wait()
        if rank == 1:
            once(Topic, "agree", errors.TierDown("the verdict was lost"), after=True)
        told = [outcome_of(ckpt.restore) for _ in range(3)]
        return [*told, outcome_of(lambda: ckpt.save(5).result(LIMIT_SECONDS))]


def losing_homes(rank: int, size: int, root: Path) -> list[str]:
    """Ranks 1 and 2 get the same new tensor, and do not learn that the other holds it."""
    from lastgood.ranks.replica_check import Replicas

    state = {"w": torch.arange(400.0)} | ({"only0": torch.ones(3)} if rank == 0 else {})
    with opened(root, state) as ckpt:
        ckpt.restore()
        ckpt.save(1).result(LIMIT_SECONDS)
        if rank:
            state["x"] = torch.arange(50.0)
            once(Replicas, "_exchange", errors.TierDown("the verdict was lost"), after=True)
        return [outcome_of(lambda n=n: ckpt.save(n).result(LIMIT_SECONDS)) for n in (2, 3, 4)]


def tied(rank: int, size: int, root: Path, to: str) -> list[str]:
    """Two names for one tensor on rank 0; on the others two tensors, or the second name is that of a third."""
    one, other = torch.arange(400.0), torch.ones(400)
    state = {"a": one, "b": one, "c": other}
    if rank:
        state = {"a": one, "c": other, "b": other if to == "another" else one.clone()}
    with opened(root, state) as ckpt:
        ckpt.restore()
        return [outcome_of(lambda: ckpt.save(1).result(LIMIT_SECONDS))]


def half_way(rank: int, size: int, root: Path) -> tuple[str, list[float]]:
    """A restore with strict=False of step 2, damaged in rank 1's part; step 1 has less than the state."""
    state = {f"s{rank}": torch.ones(3000)}
    with opened(root, state) as ckpt:
        ckpt.restore()
        ckpt.save(1).result(LIMIT_SECONDS)
        state |= {f"new{rank}": torch.full((10,), 3.0), f"s{rank}": torch.full((3000,), 3.0)}
        for n in (2, 3):  # the first of them finds out that there is more
            outcome_of(lambda n=n: ckpt.save(n).result(LIMIT_SECONDS))
        ckpt.wait()
    dist.barrier()
    if rank == 0:
        (blob,) = root.rglob("*3-*/r00001.safetensors")
        data = bytearray(blob.read_bytes())
        data[-5000] ^= 1
        blob.write_bytes(data)
    dist.barrier()
    state = {f"s{rank}": torch.zeros(3000), f"new{rank}": torch.zeros(10)}
    with opened(root, state) as ckpt:
        return outcome_of(lambda: ckpt.restore(strict=False)), [one[0].item() for one in state.values()]


def paced(rank: int, size: int, root: Path, options: dict[str, Any]) -> list[tuple[str, int]]:
    """Six hundred steps in lockstep; what became of which step."""
    import lastgood
    from lastgood.coordination import announcements

    announcements.ANNOUNCEMENT_POLL_SECONDS = 0.05
    loop = Loop("ddp", size)
    heard: list[tuple[str, int]] = []

    def note(event: lastgood.Event) -> None:
        if event.kind in ("durable", "failed", "skipped"):
            heard.append((event.kind, event.step))

    with lastgood.Checkpointer(root, loop.state, on_event=note, **options) as ckpt:
        ckpt.restore()
        for n in range(1, 601):
            loop.step(n)
            ckpt.step(n)
        ckpt.wait()
    return heard


def timed(rank: int, size: int, root: Path, late: bool) -> list[tuple[str, int]]:
    """Steps in lockstep with saves due by time; returns their outcomes. `late`: a rank polls too rarely at first."""
    import lastgood
    from lastgood.coordination import announcements

    announcements.ANNOUNCEMENT_POLL_SECONDS = 0.05
    loop = Loop("ddp", size)
    heard: list[tuple[str, int]] = []

    def note(event: lastgood.Event) -> None:
        if event.kind in ("durable", "failed"):
            heard.append((event.kind, event.step))
            if event.kind == "failed":
                announcements.ANNOUNCEMENT_POLL_SECONDS = 0.05

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with lastgood.Checkpointer(root, loop.state, cadence=lastgood.Every(seconds=0.3), on_event=note) as ckpt:
            n = ckpt.restore().step
            if late and rank == 1:
                announcements.ANNOUNCEMENT_POLL_SECONDS = 0.8  # the first save is due, and told, after 0.3 and a little
            while n < 1000:
                n += 1
                loop.step(n)
                ckpt.step(n)
            ckpt.wait()
    return heard


def preempted(rank: int, size: int, kind: str, root: Path, who: int, late: bool) -> dict[str, Any]:
    """Steps until a signal to rank `who` at step 5 ends them; returns the final reports. `late`: rank 1 polls too
    rarely, and does not wait for the others."""
    import signal

    import lastgood
    from lastgood.coordination import announcements

    announcements.ANNOUNCEMENT_POLL_SECONDS = 5.0 if late and rank == 1 else 0.05
    loop = Loop(kind, size)
    options = {"cadence": lastgood.Every(steps=10_000 if late else 4), "preemption": lastgood.Preemption()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with lastgood.Checkpointer(root, loop.state, **options) as ckpt:
                n = ckpt.restore().step
                ckpt.save(n).result(60)
                while n < 100_000:
                    n += 1
                    loop.step(n)
                    if n == 5 and rank == who:
                        os.kill(os.getpid(), signal.SIGTERM)
                    if late and rank == 1 and n > 200:
                        announcements.ANNOUNCEMENT_POLL_SECONDS = 0.0
                    ckpt.step(n)
        except lastgood.Preempted as end:
            return {"step": n, "code": end.code, "durable": end.durable}
    return {}

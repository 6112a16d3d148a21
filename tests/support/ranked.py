"""The functions that the ranks of the tests run, in worlds of real processes."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness import reports
from lastgood import errors
from lastgood_lab.campaigns.rank_jobs import PATIENCE, Loop, attempted, made, outcome_of
from lastgood_lab.worlds import LIMIT_SECONDS


def trained(rank: int, size: int, kind: str, root: Path, upto: int, unsaved: int = 0, **options: Any) -> list[float]:
    """Restore, train and save every second step; returns the losses. After that, `unsaved` steps are trained with the
    run closed."""
    import lastgood

    loop = made(kind, size)
    settings = {"cadence": lastgood.Every(steps=2), "in_flight": 1}  # with two, step 4 may be committed before step 2
    with lastgood.Checkpointer(root, loop.state, **settings, **options) as ckpt:
        losses = []
        for n in range(ckpt.restore().step + 1, upto + 1):
            losses.append(loop.step(n))
            ckpt.step(n)
        ckpt.wait()
        dist.barrier() if size > 1 else None  # wait until rank 0 has verified
        assert not losses or ckpt.latest() == upto - upto % 2
    return losses + [loop.step(n) for n in range(upto + 1, upto + unsaved + 1)]


def saved_from_own_folder(rank: int, size: int, root: Path) -> int:
    """Save and restore a run that is given as a URL, in a working directory of this rank's own."""
    import lastgood

    folder = root.with_name(f"folder{rank}")
    folder.mkdir()
    os.chdir(folder)
    with lastgood.Checkpointer(f"file://{root}", {"w": torch.ones(2)}, patience=PATIENCE) as ckpt:
        ckpt.save(1).result()
        return ckpt.restore().step


def reports_of_a_restore(rank: int, size: int, kind: str, root: Path) -> list[str]:
    """Restore. Returns what this rank reports that is no mere information."""
    import lastgood

    with reports(logging.WARNING) as texts, lastgood.Checkpointer(root, made(kind, size).state) as ckpt:
        ckpt.restore()
    return texts


def reports_of_saves(rank: int, size: int, kind: str, root: Path) -> list[str]:
    """Train and save three steps. Returns what this rank reports that is no mere information."""
    import lastgood

    loop, every = made(kind, size), lastgood.Every(steps=1)
    with reports(logging.WARNING) as texts, lastgood.Checkpointer(root, loop.state, cadence=every) as ckpt:
        ckpt.restore()
        for n in (1, 2, 3):
            loop.step(n)
            ckpt.step(n)
    return texts


def trained_in_parts(rank: int, size: int, root: Path, upto: int) -> None:
    """Train so that small tensors are partitioned between the ranks too, with digests of everything at the start of
    a save."""
    from lastgood.policy import reshard

    reshard.LEAST_SPLIT_BYTES = 64
    trained(rank, size, "ddp", root, upto, torn_check="full", staging="overlap")


def failing(rank: int, size: int, root: Path, faulty_rank: int, stages: Sequence[str], how: str) -> dict[str, Any]:
    """Three saves for each of the stages; in the second of them, rank `faulty_rank` fails or dies at this stage of the
    save. Returns outcomes and durations."""
    import lastgood

    loop = Loop("ddp", size)
    outcomes: dict[str, Any] = {}
    options = {"cadence": lastgood.Every(steps=1000), "retention": lastgood.Keep(last=99), "patience": PATIENCE}
    # With a save at the end, the surviving ranks would wait for the dead rank once more.
    with lastgood.Checkpointer(root, loop.state, save_on_exit=how != "dies", **options) as ckpt:
        ckpt.restore()
        for n in range(1, 3 * len(stages) + 1):
            faulty = n % 3 == 2
            if faulty and rank == faulty_rank:
                fail_at(stages[n // 3], how, loop)
            outcomes |= attempted(ckpt, n)
            loop.state.pop("odd", None)
            if faulty and how == "dies":
                break
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ckpt.wait()
    return outcomes


STEPS_OF_A_SAVE = {
    "staging": "lastgood.snapshot.staging.Snapshot.fill",
    "write": "lastgood.storage.directory.Disk.create",
    "digests": "lastgood.ranks.replica_check._sums",
    "seal": "lastgood.format.commit.seal",
    "commit": "lastgood.format.commit.publish",
    "after the commit": "lastgood.run.known.KnownRun.record",
}


def fail_at(where: str, how: str, loop: Loop) -> None:
    """Make the next call of the function of this stage raise an error or end the process."""
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


def unwrapped(net: nn.Module) -> nn.Module:
    """The module itself: torch's helpers lose a tied weight of a module that DDP wraps."""
    return net.module if isinstance(net, nn.parallel.DistributedDataParallel) else net


def dcp_saved(rank: int, size: int, kind: str, root: Path, steps: list[int]) -> None:
    """Save a state as torch's helpers return it, at these steps, through the DCP storage writer."""
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
    """Save a model with torch's own writer; returns its weights as whole tensors."""
    import torch.distributed.checkpoint as dcp

    state = Loop(kind, size).net.state_dict()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))
    return {name: getattr(one, "full_tensor", lambda one=one: one)().tolist() for name, one in state.items()}


def dcp_loaded(rank: int, size: int, kind: str, root: Path) -> dict[str, Any]:
    """Load the newest generation through the DCP storage reader over another state; returns whole tensors."""
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


def differing(rank: int, size: int, root: Path, difference: str) -> dict[str, Any]:
    """Four saves, with a difference between the ranks from the second one on; then a restore into a new loop."""
    import lastgood

    loop = Loop("ddp", size)
    net = unwrapped(loop.net)
    results: dict[str, Any] = {}
    with lastgood.Checkpointer(root, loop.state, cadence=lastgood.Every(steps=1000)) as ckpt:
        ckpt.restore()
        for n in (1, 2, 3, 4):
            if n in (2, 3) and difference == "a weight":
                with torch.no_grad():
                    net.up.weight[3] = rank if n == 2 else 0
            if n == 2 and difference == "a buffer":
                net.seen += rank
            if n == 2 and difference == "its structure" and rank == 1:
                loop.state["more"] = torch.ones(5)
            results |= attempted(ckpt, n)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ckpt.wait()
    fresh = Loop("ddp", size)
    if "more" in loop.state:
        fresh.state["more"] = torch.zeros(5)
    with lastgood.Checkpointer(root, fresh.state, exclude=[] if "more" in fresh.state else ["more"]) as ckpt:
        results["restored"] = ckpt.restore(strict="more" not in results).step
    results["seen"] = unwrapped(fresh.net).seen.tolist()
    results["more"] = fresh.state["more"].tolist() if "more" in fresh.state else []
    return results


def thawing(rank: int, size: int, root: Path) -> dict[str, Any]:
    """Five saves of one stage on each rank; the stage of rank 1 is frozen, and is trained from the third save on."""
    import lastgood

    stage = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(stage.parameters())
    state = {f"stage{rank}": stage, f"optimizer{rank}": optimizer}
    outcomes: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with lastgood.Checkpointer(root, state, patience=PATIENCE) as ckpt:
            ckpt.restore()
            for n in (1, 2, 3, 4, 5):
                if rank != 1 or n >= 3:
                    stage(torch.ones(2, 4)).sum().backward()
                    optimizer.step()
                outcomes |= attempted(ckpt, n)
    return outcomes


def leaving_out(rank: int, size: int, root: Path, faulty_rank: int) -> dict[str, Any]:
    """Four saves, of which rank `faulty_rank` skips the second."""
    import lastgood

    loop = Loop("ddp", size)
    outcomes: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with lastgood.Checkpointer(root, loop.state, patience=PATIENCE) as ckpt:
            ckpt.restore()
            for n in (1, 2, 3, 4):
                if n != 2 or rank != faulty_rank:
                    outcomes |= attempted(ckpt, n)
    return outcomes


def once(owner: Any, name: str, error: Exception, after: bool = False) -> None:
    """Make the next call of this function raise the error; with `after`, once the real call has returned."""
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
    """Rank 1's machine does not list the newest generation yet, as can happen on a shared file system."""
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
    """Each rank requests a different step; returns the outcome and the sum of the state's tensor afterwards."""
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
    """Whether a restore of a verified generation reads tensors past the page cache."""
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
    """Rank 1's rows of step 2 contain NaN. Restores step 2 by request, and then the default; returns both outcomes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    net = nn.Module()
    net.w = nn.Parameter(distribute_tensor(torch.zeros(8, 8), init_device_mesh("cpu", (size,)), [Shard(0)]))
    outcomes = []
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
            outcomes.append(outcome_of(lambda: ckpt.restore(step=step)))  # noqa: B023 - called at once
    return outcomes


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
        outcomes = [outcome_of(ckpt.restore) for _ in range(3)]
        return [*outcomes, outcome_of(lambda: ckpt.save(5).result(LIMIT_SECONDS))]


def losing_holders(rank: int, size: int, root: Path) -> list[str]:
    """Ranks 1 and 2 get the same new tensor, and neither learns that the other one holds it."""
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
    """Two names refer to one tensor on rank 0; on the other ranks, to two tensors, or the second name refers to a
    third tensor."""
    one, other = torch.arange(400.0), torch.ones(400)
    state = {"a": one, "b": one, "c": other}
    if rank:
        state = {"a": one, "c": other, "b": other if to == "another" else one.clone()}
    with opened(root, state) as ckpt:
        ckpt.restore()
        return [outcome_of(lambda: ckpt.save(1).result(LIMIT_SECONDS))]


def half_way(rank: int, size: int, root: Path) -> tuple[str, list[float]]:
    """Restore step 2, damaged in rank 1's part, with strict=False; step 1 has fewer entries than the state."""
    state = {f"s{rank}": torch.ones(3000)}
    with opened(root, state) as ckpt:
        ckpt.restore()
        ckpt.save(1).result(LIMIT_SECONDS)
        state |= {f"new{rank}": torch.full((10,), 3.0), f"s{rank}": torch.full((3000,), 3.0)}
        for n in (2, 3):  # the first of these saves discovers that the state has grown
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
    """Steps in lockstep: six hundred, so that intervals are measured, or two hundred; returns the kind and step of each
    event about a save."""
    import lastgood
    from lastgood.coordination import announcements

    # Each rank polls at each step, so none learns too late of a step, also when the loop becomes fast after its first
    # steps: rank 0 announces in one step, and no other rank comes to its next poll before rank 0 is in the next step.
    announcements.ANNOUNCEMENT_POLL_SECONDS = 0.0
    loop = Loop("ddp", size)
    events: list[tuple[str, int]] = []

    def note(event: lastgood.Event) -> None:
        if event.kind in ("durable", "failed", "skipped"):
            events.append((event.kind, event.step))

    with lastgood.Checkpointer(root, loop.state, on_event=note, **options) as ckpt:
        ckpt.restore()
        for n in range(1, 601 if options.get("cadence") == "auto" else 201):
            loop.step(n)
            ckpt.step(n)
        ckpt.wait()
    return events


def timed(rank: int, size: int, root: Path, late: bool) -> list[tuple[str, int]]:
    """Steps in lockstep with saves due by time; returns their outcomes. `late`: a rank polls too rarely at first."""
    import lastgood
    from lastgood.coordination import announcements

    announcements.ANNOUNCEMENT_POLL_SECONDS = 0.05
    loop = Loop("ddp", size)
    events: list[tuple[str, int]] = []

    def note(event: lastgood.Event) -> None:
        if event.kind in ("durable", "failed"):
            events.append((event.kind, event.step))
            if event.kind == "failed":
                announcements.ANNOUNCEMENT_POLL_SECONDS = 0.05

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with lastgood.Checkpointer(root, loop.state, cadence=lastgood.Every(seconds=0.3), on_event=note) as ckpt:
            n = ckpt.restore().step
            if late and rank == 1:
                # The first save is due, and announced, after a little more than 0.3 s.
                announcements.ANNOUNCEMENT_POLL_SECONDS = 0.8
            while n < 1000:
                n += 1
                loop.step(n)
                ckpt.step(n)
            ckpt.wait()
    return events


def preempted(rank: int, size: int, kind: str, root: Path, signalled_rank: int, late: bool) -> dict[str, Any]:
    """Step until a signal to rank `signalled_rank` at step 5 ends the ranks; returns the final reports. `late`: rank
    1 polls too rarely until step 200."""
    import signal

    import lastgood
    from lastgood.coordination import announcements

    announcements.ANNOUNCEMENT_POLL_SECONDS = 5.0 if late and rank == 1 else 0.05
    loop = Loop(kind, size)
    options = {"cadence": lastgood.Every(steps=1_000_000 if late else 4), "preemption": lastgood.Preemption()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with lastgood.Checkpointer(root, loop.state, **options) as ckpt:
                n = ckpt.restore().step
                ckpt.save(n).result(60)
                while n < 100_000:
                    n += 1
                    loop.step(n)
                    if n == 5 and rank == signalled_rank:
                        signal.raise_signal(signal.SIGTERM)
                    if late and rank == 1 and n > 200:
                        announcements.ANNOUNCEMENT_POLL_SECONDS = 0.0
                    ckpt.step(n)
        except lastgood.Preempted as end:
            return {"step": n, "code": end.code, "durable": end.durable}
    return {}


def ending(rank: int, size: int, root: Path, jobs: int) -> int:
    """End `jobs` jobs one after another: each destroys its group, and then lets go of the DDP model that owned it."""

    def one_job(number: int) -> None:
        import lastgood

        loop, gathered = Loop("ddp", size), [None] * size
        with lastgood.Checkpointer(root / str(number), loop.state):
            for n in range(4):
                loop.step(n)
                dist.all_gather_object(gathered, n)
        dist.destroy_process_group()

    store: Any = dist.distributed_c10d._get_default_store()
    for number in range(jobs):
        one_job(number)
        again = dist.PrefixStore(f"again{number}", store)
        dist.init_process_group("gloo", store=again, rank=rank, world_size=size)
        dist.barrier()  # a rank that ended here would fail those that are still being connected
    return jobs

"""`lastgood bench ranks`: saves and loads by several ranks beside torch.distributed.checkpoint, in the same run.

Real processes under gloo on this machine, sharded by FSDP2. The contenders take turns; both are durable: DCP with its
default sync_files=True, the fsyncs of its metadata and directory added. Loads are of what the page cache has dropped.
Beside it what is written of replicas, how it is balanced, and what agreeing and planning take.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from lastgood.format import commit
from lastgood.io.files import PosixFiles
from lastgood.loop.checkpointer import Checkpointer
from lastgood.policy.cadence import Every
from lastgood.policy.retention import Keep
from lastgood.ranks.torch_store import join_group
from lastgood.run import access
from lastgood.storage.directory import Disk

from .durable import sync_tree
from .journal import Journal
from .report import Report, Say, Table, hardware, spread
from .restore import drop_from_cache
from .worlds import world

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
OURS, THEIRS = "lastgood", "DCP, durable"
WIDTH = 1024
LAYER_BYTES = 3 * 4 * WIDTH * WIDTH
"""of a weight and its two moments"""
AGREEING = 8
"""ranks for what agreeing takes"""
AGREEMENTS = 50
SMALL = 1000
"""tensors for what planning takes"""


@dataclass(frozen=True)
class Options:
    """What to measure. `mib`: of the state, all ranks together."""

    out: Path
    mib: int = 768
    ranks: tuple[int, ...] = (2, 4)
    rounds: int = 5
    place: Path | None = None


def run(options: Options, say: Say) -> list[Row]:
    """Every measurement, those of an earlier run included; the journal in `out` keeps them."""
    journal = Journal(options.out / "ranks.journal.jsonl", {"hardware": hardware(), "mib": options.mib})
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="lastgood-ranks-", dir=options.place or options.out) as folder:

        def measured(what: str, job: Callable[..., Any], size: int, *arguments: Any) -> None:
            found = journal.get(what=what, ranks=size, rounds=options.rounds)
            if found is None:
                told = world(size, job, Path(folder) / f"{what}-{size}", *arguments, limit_seconds=1800)[0]
                found = journal.put(told, what=what, ranks=size, rounds=options.rounds)
                say(f"{what}, {size} ranks")
            rows.append({"what": what, "ranks": size, **found})

        for size in options.ranks:
            measured("speed", speeds, size, options.mib, options.rounds)
            measured("replicas", replicas, size, options.mib)
        measured("agreeing", agreeing, AGREEING)
        measured("plans", planning, 2)
    return rows


# ---- on each rank ------------------------------------------------------------------------------------------------


def speeds(rank: int, size: int, folder: Path, mib: int, rounds: int) -> Row:
    """Seconds of each save and load, from when all begin until all have ended; the bytes of the state."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = layers(mib)
    mesh = init_device_mesh("cpu", (size,))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = stepped(net)
    told: dict[str, list[float]] = {f"{who} {verb}": [] for who in (OURS, THEIRS) for verb in ("save", "load")}
    model, moments = get_state_dict(net, optimizer)
    state = {"model": model, "optimizer": moments}
    theirs = folder / "dcp"
    with Checkpointer(
        folder / "ours", {"net": net, "optimizer": optimizer}, cadence=Every(steps=10**9), retention=Keep(last=1)
    ) as ckpt:

        def save_theirs() -> None:
            dcp.save(state, storage_writer=dcp.FileSystemWriter(str(theirs), thread_count=4))
            if rank == 0:
                sync_tree(theirs)

        step = 0
        for number in range(rounds + 1):
            for who in (OURS, THEIRS) if number % 2 else (THEIRS, OURS):
                step += 1
                if who == OURS:
                    seconds = together(lambda: ckpt.save(step).result())  # noqa: B023 - called at once
                    ckpt.wait()
                else:
                    if rank == 0 and theirs.exists():
                        shutil.rmtree(theirs)
                    seconds = together(save_theirs)
                if number:  # the first touches memory and makes folders
                    told[f"{who} save"].append(seconds)
        for number in range(rounds):
            for who in (OURS, THEIRS) if number % 2 else (THEIRS, OURS):
                if rank == 0:
                    drop_from_cache(folder)
                reader = dcp.FileSystemReader(str(theirs))
                load = ckpt.restore if who == OURS else lambda: dcp.load(state, storage_reader=reader)  # noqa: B023
                told[f"{who} load"].append(together(load))
    return {"bytes": len(net) * LAYER_BYTES, **told}


def replicas(rank: int, size: int, folder: Path, mib: int) -> Row:
    """Of one save under DDP: bytes that were written, bytes that there are, the share of each rank; and of a restore,
    what all ranks of this machine have read from its disk."""
    net = layers(mib)
    optimizer = stepped(nn.parallel.DistributedDataParallel(net))
    with Checkpointer(folder, {"net": net, "optimizer": optimizer}) as ckpt:
        ckpt.restore()
        ckpt.save(1).result()
        ckpt.wait()
        if rank == 0:
            drop_from_cache(folder)
        dist.barrier()
        before = read_bytes()
        ckpt.restore()
        read = torch.tensor(read_bytes() - before)
        dist.all_reduce(read)
    tier = access.for_reading(folder)
    (generation,) = commit.survey(tier).generations.values()
    pieces = [[one for one in each.pieces if not one.own] for each in commit.read_manifests(tier, generation)]
    by_rank = [sum(one.extent.length for one in mine if not one.name.startswith("rng.")) for mine in pieces]
    unique = {(one.name, tuple(one.offsets)): one.extent.length for mine in pieces for one in mine}
    there = sum(length for (name, _), length in unique.items() if not name.startswith("rng."))
    return {"written": sum(by_rank), "unique": there, "by_rank": by_rank, "read": int(read)}


def read_bytes() -> int:
    """What this process has read from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes:")).split()[1])


def agreeing(rank: int, size: int, folder: Path) -> Row:
    """Seconds of what a save agrees on, and of its commit, when all ranks come to it together."""
    folder.mkdir(parents=True, exist_ok=True)
    ranks, tier = join_group(folder), Disk(PosixFiles(), str(folder))
    share = {"seal": {"rank": rank, "manifest": f"r{rank:05d}.json", "length": 1000, "digest": "0" * 32}, "bytes": 1000}
    found = []

    def agree(step: int) -> None:
        topic, name = ranks.step_topic("save", step), f"gen/{step:012d}-5ca1ab1e/COMMIT.json"
        topic.agree({"structure": "0" * 64, "sums": {"0": ["0" * 64, "0" * 64]}}, lambda told: "same")
        topic.agree(share, lambda told: tier.put_new(name, repr(told).encode()))

    for step in range(AGREEMENTS):
        found.append(together(partial(agree, step)))
    return {"seconds": found}


def planning(rank: int, size: int, folder: Path) -> Row:
    """Seconds in which a save captures small tensors, and in which it checks that its known plan still holds."""
    state = {"w": {f"{n:04d}": torch.zeros(4) for n in range(SMALL)}}
    with Checkpointer(folder, state, cadence=Every(steps=10**9)) as ckpt:
        ckpt.restore()
        ckpt.save(1).result()
        planner, topic, took, planned = ckpt._planner, ckpt._ranks.topic("plan"), list[float](), list[float]()
        for _ in range(AGREEMENTS):
            begun = time.perf_counter()
            captured = planner._capture.take(state)
            took.append(time.perf_counter() - begun)
            planner._layout(state, captured, topic)
            planned.append(time.perf_counter() - begun - took[-1])
    return {"capture": took, "seconds": planned}


def together(act: Callable[[], object]) -> float:
    """Seconds from when all ranks begin until all have ended."""
    dist.barrier()
    begun = time.perf_counter()
    act()
    dist.barrier()
    return time.perf_counter() - begun


def layers(mib: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, (mib << 20) // LAYER_BYTES))))


def stepped(net: nn.Module) -> torch.optim.Optimizer:
    """Its optimizer, which has moments."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    for one in net.parameters():
        one.grad = torch.zeros_like(one)
    optimizer.step()
    return optimizer


# ---- what is told ------------------------------------------------------------------------------------------------


def report(rows: Sequence[Row], options: Options) -> Report:
    lines, notes = [], []
    for row in of(rows, "speed"):
        for verb in ("save", "load"):
            ours, theirs = row[f"{OURS} {verb}"], row[f"{THEIRS} {verb}"]
            ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
            rates = [
                f"{spread(found)}, {row['bytes'] / statistics.median(found) / 1e9:.2f} GB/s" for found in (ours, theirs)
            ]
            lines.append([str(row["ranks"]), verb, *rates, spread(ratios, ".2f")])
    for row in of(rows, "replicas"):
        most = max(row["by_rank"]) / statistics.mean(row["by_rank"])
        notes.append(
            f"{row['ranks']} ranks of DDP: {row['written'] / row['unique']:.4f} bytes written for each of the state; "
            f"the rank that writes most writes {most:.3f} times the mean; a restore of all reads "
            f"{row['read'] / row['unique']:.3f} bytes from the disk for each of the state."
        )
    for row in of(rows, "agreeing"):
        milliseconds = [1000 * one for one in row["seconds"]]
        notes.append(
            f"{row['ranks']} ranks agree and a record is durable: {spread(milliseconds, '.1f')} ms in "
            f"{len(milliseconds)} rounds, all processes on these cores."
        )
    for row in of(rows, "plans"):
        took, planned = ([1000 * one for one in row[part]] for part in ("capture", "seconds"))
        notes.append(
            f"A plan of {SMALL:,} tensors, one being known: {spread(planned, '.3f')} ms; taking them: "
            f"{spread(took, '.2f')} ms."
        )
    return Report(
        name="ranks",
        title="Saves and loads by several ranks",
        about=f"FSDP2 over gloo, a state of {options.mib:,} MiB in all; medians of {options.rounds} rounds, "
        "(least-most), from when all ranks begin until all have ended. Loads: page cache dropped; ours verified.",
        tables=[Table("", ["ranks", "", f"{OURS}, s", f"{THEIRS}, s", "theirs / ours, round by round"], lines)],
        rows=rows,
        notes=notes,
        figures={"seconds": lambda: _figure(of(rows, "speed"))},
    )


def of(rows: Sequence[Row], what: str) -> list[Row]:
    return [row for row in rows if row["what"] == what]


def _figure(rows: Sequence[Row]) -> Figure:
    from .figures import panels

    figure, all_axes = panels(2, columns=2, wide=3.6, high=3.2)
    for axes, verb in zip(all_axes, ("save", "load"), strict=True):
        for shift, who in ((-0.2, OURS), (0.2, THEIRS)):
            middles = [statistics.median(row[f"{who} {verb}"]) for row in rows]
            axes.bar([at + shift for at in range(len(rows))], middles, width=0.4, label=who)
        axes.set_xticks(range(len(rows)), [f"{row['ranks']} ranks" for row in rows])
        axes.set_ylabel(f"s to {verb}")
    all_axes[0].legend()
    return figure

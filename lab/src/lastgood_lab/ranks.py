"""`lastgood bench ranks`: saves and loads by several ranks, compared with torch.distributed.checkpoint (DCP).

The ranks are processes on this machine with gloo and FSDP2. The contenders alternate, and both saves are durable: DCP's
by its default sync_files=True and added fsyncs of its metadata and directory. Files are dropped from the page cache
before each load. Also measured: how many bytes of replicated tensors are written, how evenly the ranks share them, and
the cost of agreement and planning.
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

from .contenders import sync_tree
from .journal import Journal
from .report import Progress, Report, Table, hardware, spread
from .restore import drop_from_cache
from .worlds import world

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
OURS, THEIRS = "lastgood", "DCP, durable"
WIDTH = 1024
LAYER_BYTES = 3 * 4 * WIDTH * WIDTH
"""Bytes of a layer's weight and of its two moments."""
AGREEING = 8
"""The number of ranks with which agreement is measured."""
AGREEMENTS = 50
SMALL = 1000
"""The number of small tensors with which planning is measured."""


@dataclass(frozen=True)
class Options:
    """`mib` is the size of the state of all ranks, in MiB."""

    out: Path
    mib: int = 768
    ranks: tuple[int, ...] = (2, 4)
    rounds: int = 5
    place: Path | None = None


def run(options: Options, progress: Progress) -> list[Row]:
    """Take the measurements that are missing in the journal in `out`; returns all rows, also those of earlier runs."""
    journal = Journal(options.out / "ranks.journal.jsonl", {"hardware": hardware(), "mib": options.mib})
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="lastgood-ranks-", dir=options.place or options.out) as folder:

        def measured(what: str, job: Callable[..., Any], size: int, *arguments: Any) -> None:
            found = journal.get(what=what, ranks=size, rounds=options.rounds)
            if found is None:
                result = world(size, job, Path(folder) / f"{what}-{size}", *arguments, limit_seconds=1800)[0]
                found = journal.put(result, what=what, ranks=size, rounds=options.rounds)
                progress(f"{what}, {size} ranks")
            rows.append({"what": what, "ranks": size, **found})

        for size in options.ranks:
            measured("speed", speeds, size, options.mib, options.rounds)
            measured("replicas", replicas, size, options.mib)
        measured("agreeing", agreeing, AGREEING)
        measured("plans", planning, 2)
    return rows


# ---- on each rank --------------------------------------------------------------------------------------------


def speeds(rank: int, size: int, folder: Path, mib: int, rounds: int) -> Row:
    """Measure the seconds of each save and load, from a barrier of all ranks to the next; also the state's bytes."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = layers(mib)
    mesh = init_device_mesh("cpu", (size,))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = stepped(net)
    result: dict[str, list[float]] = {f"{name} {verb}": [] for name in (OURS, THEIRS) for verb in ("save", "load")}
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
            for name in (OURS, THEIRS) if number % 2 else (THEIRS, OURS):
                step += 1
                if name == OURS:
                    seconds = timed_on_all_ranks(lambda: ckpt.save(step).result())  # noqa: B023 - called at once
                    ckpt.wait()
                else:
                    if rank == 0 and theirs.exists():
                        shutil.rmtree(theirs)
                    seconds = timed_on_all_ranks(save_theirs)
                if number:  # the first saves are not measured: they fault in memory and create folders
                    result[f"{name} save"].append(seconds)
        for number in range(rounds):
            for name in (OURS, THEIRS) if number % 2 else (THEIRS, OURS):
                if rank == 0:
                    drop_from_cache(folder)
                reader = dcp.FileSystemReader(str(theirs))
                load = ckpt.restore if name == OURS else lambda: dcp.load(state, storage_reader=reader)  # noqa: B023
                result[f"{name} load"].append(timed_on_all_ranks(load))
    return {"bytes": len(net) * LAYER_BYTES, **result}


def replicas(rank: int, size: int, folder: Path, mib: int) -> Row:
    """Save once under DDP, and restore; returns numbers of bytes.

    These are the bytes written, the bytes of the state, those that each rank wrote, and those that all ranks together
    read from the disk in the restore.
    """
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
    of_state = sum(length for (name, _), length in unique.items() if not name.startswith("rng."))
    return {"written": sum(by_rank), "unique": of_state, "by_rank": by_rank, "read": int(read)}


def read_bytes() -> int:
    """Bytes that this process has read from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes:")).split()[1])


def agreeing(rank: int, size: int, folder: Path) -> Row:
    """Measure the seconds of a save's agreements and its commit, when all ranks begin at once."""
    folder.mkdir(parents=True, exist_ok=True)
    ranks, tier = join_group(str(folder)), Disk(PosixFiles(), str(folder))
    part = {"seal": {"rank": rank, "manifest": f"r{rank:05d}.json", "length": 1000, "digest": "0" * 32}, "bytes": 1000}
    found = []

    def agree(step: int) -> None:
        topic, name = ranks.step_topic("save", step), f"gen/{step:012d}-5ca1ab1e/COMMIT.json"
        topic.agree({"structure": "0" * 64, "sums": {"0": ["0" * 64, "0" * 64]}}, lambda answers: "same")
        topic.agree(part, lambda answers: tier.put_new(name, repr(answers).encode()))

    for step in range(AGREEMENTS):
        found.append(timed_on_all_ranks(partial(agree, step)))
    return {"seconds": found}


def planning(rank: int, size: int, folder: Path) -> Row:
    """Measure the seconds to capture many small tensors and to plan, with a cached plan, which rank writes them."""
    state = {"w": {f"{n:04d}": torch.zeros(4) for n in range(SMALL)}}
    with Checkpointer(folder, state, cadence=Every(steps=10**9)) as ckpt:
        ckpt.restore()
        ckpt.save(1).result()
        planner, topic, took, planned = ckpt._planner, ckpt._ranks.step_topic("plan", 2), list[float](), list[float]()
        for _ in range(AGREEMENTS):
            begun = time.perf_counter()
            captured = planner._capture.take(state)
            took.append(time.perf_counter() - begun)
            planner._layout(state, captured, topic)
            planned.append(time.perf_counter() - begun - took[-1])
    return {"capture": took, "seconds": planned}


def timed_on_all_ranks(act: Callable[[], object]) -> float:
    """The seconds from a barrier before `act` to a barrier after it."""
    dist.barrier()
    begun = time.perf_counter()
    act()
    dist.barrier()
    return time.perf_counter() - begun


def layers(mib: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, (mib << 20) // LAYER_BYTES))))


def stepped(net: nn.Module) -> torch.optim.Optimizer:
    """The network's optimizer after one step, so that it has moments."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    for one in net.parameters():
        one.grad = torch.zeros_like(one)
    optimizer.step()
    return optimizer


# ---- the report ----------------------------------------------------------------------------------------------


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
            f"{row['ranks']} ranks of DDP: {row['written'] / row['unique']:.4f} bytes written for each byte of the "
            f"state; the rank that writes the most writes {most:.3f} times the mean; a restore by all ranks reads "
            f"{row['read'] / row['unique']:.3f} bytes from the disk for each byte of the state."
        )
    for row in of(rows, "agreeing"):
        milliseconds = [1000 * one for one in row["seconds"]]
        notes.append(
            f"{row['ranks']} ranks agree and a record becomes durable: {spread(milliseconds, '.1f')} ms in "
            f"{len(milliseconds)} rounds, with all processes on this machine's cores."
        )
    for row in of(rows, "plans"):
        took, planned = ([1000 * one for one in row[part]] for part in ("capture", "seconds"))
        notes.append(
            f"Planning {SMALL:,} tensors with a cached plan: {spread(planned, '.3f')} ms; capturing them: "
            f"{spread(took, '.2f')} ms."
        )
    return Report(
        name="ranks",
        title="Saves and loads by several ranks",
        about=f"FSDP2 over gloo with a state of {options.mib:,} MiB in all; medians of {options.rounds} rounds, "
        "(least-most), from the start on all ranks to the end on all. The page cache is dropped before each load; "
        "lastgood's loads are verified.",
        tables=[Table("", ["ranks", "", f"{OURS}, s", f"{THEIRS}, s", "DCP / lastgood, round by round"], lines)],
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
        for shift, name in ((-0.2, OURS), (0.2, THEIRS)):
            middles = [statistics.median(row[f"{name} {verb}"]) for row in rows]
            axes.bar([at + shift for at in range(len(rows))], middles, width=0.4, label=name)
        axes.set_xticks(range(len(rows)), [f"{row['ranks']} ranks" for row in rows])
        axes.set_ylabel(f"s to {verb}")
    all_axes[0].legend()
    return figure

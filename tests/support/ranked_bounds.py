"""The function that the ranks of tests of bounds run, in worlds of real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import lastgood
from agents import until
from lastgood.io.files import round_up
from lastgood.limits import PAGE_BYTES
from lastgood.loop import bounds
from lastgood_lab.campaigns.rank_jobs import PATIENCE, made
from ranked_memory import opened as opened_on_node


def noted(reported: list[tuple[str, int]]) -> None:
    """From now on this process reports no bound, and notes place and size of a generation instead."""

    def note(tier: Any, keep: Any, in_flight: Any, state_bytes: int, *_: int, **__: int) -> None:
        reported.append((tier.place, state_bytes))

    bounds.disk_space.report_bound = note  # type: ignore[assignment]


def taken(place: Path) -> int:
    """The bytes of blocks that the newest generation of a place takes."""
    folder = max((place / "gen").iterdir())
    return round_up(sum(round_up(one.stat().st_size) for one in folder.iterdir()) + PAGE_BYTES)


def known(rank: int, size: int, kind: str, root: Path) -> list[dict[str, tuple[int, int]]]:
    """Open a run with two places, fresh and once more. Returns for both, at rank 0, what was reported of each place
    before anything was saved, and what a generation takes there."""
    reported, found = list[tuple[str, int]](), list[dict[str, tuple[int, int]]]()
    noted(reported)
    tiers, every = [lastgood.Tier(root / "front")], lastgood.Every(steps=100)
    for step in (1, 2):
        loop = made(kind, size)
        with lastgood.Checkpointer(root / "home", loop.state, tiers=tiers, cadence=every, patience=PATIENCE) as ckpt:
            assert ckpt.restore().step == step - 1
            if step == 1:
                loop.step(1)
                ckpt.step(1)
            if rank == 0:
                until(lambda: len(reported) == 2)
            assert (root / "front" / "gen").exists() == (step == 2), "nothing was saved before"
            dist.barrier()
            if step == 1:
                ckpt.save(1).result()
                ckpt.wait()
                dist.barrier()
        found.append({place: (size_of, taken(Path(place))) for place, size_of in reported})
        reported.clear()
    return found


def on_nodes(rank: int, size: int, nodes: list[str], memory: Path, home: Path) -> list[int]:
    """What rank 0 reports of a generation in memory, with two copies, and at home."""
    reported = list[tuple[str, int]]()
    noted(reported)
    loop = made("ddp", size)
    with opened_on_node(loop, nodes[rank], memory, home, copies=2) as ckpt:
        ckpt.restore()
        loop.step(1)
        ckpt.step(1)
        if rank == 0:
            until(lambda: len(reported) == 2)
    return [size_of for _, size_of in reported]


def outside_of_a_mesh(rank: int, size: int, home: Path) -> int:
    """Save a state with a tensor that is sharded over rank 0 alone. Returns the step of the save."""
    sharded = distribute_tensor(torch.arange(8.0), DeviceMesh("cpu", [0]), [Shard(0)])
    with lastgood.Checkpointer(home, {"w": {"x": sharded}}, cadence=lastgood.Every(steps=1), patience=PATIENCE) as ckpt:
        ckpt.restore()
        save = ckpt.step(1)
        assert save is not None
        return save.result().step

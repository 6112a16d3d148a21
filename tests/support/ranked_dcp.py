"""The functions that the ranks of tests/convert/test_dcp_faults.py run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import lastgood


def uneven(size: int, factor: float) -> dict[str, Any]:
    """A state with two rows over three ranks, so that the last rank has no row; `none` has no elements at all."""
    mesh = init_device_mesh("cpu", (size,))
    return {
        "rows": distribute_tensor(torch.arange(1.0, 5.0).reshape(2, 2) * factor, mesh, [Shard(0)]),
        "none": distribute_tensor(torch.zeros(0, 6), mesh, [Shard(1)]),
        "no rows": distribute_tensor(torch.zeros(0, 6), mesh, [Shard(0)]),
        "no copies": distribute_tensor(torch.zeros(3, 0), mesh, [Replicate()]),
        "n": int(factor),
    }


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """The state as whole tensors: lists, or the shapes of those without elements."""
    full = {name: one.full_tensor() for name, one in state.items() if isinstance(one, torch.Tensor)}
    return {name: one.tolist() if one.numel() else tuple(one.shape) for name, one in full.items()} | {"n": state["n"]}


def uneven_through_dcp(rank: int, size: int, root: Path) -> dict[str, Any]:
    dcp.save(uneven(size, 1), storage_writer=lastgood.dcp.Writer(root))
    state = uneven(size, 0)
    dcp.load(state, storage_reader=lastgood.dcp.Reader(root))
    return whole(state)


def uneven_through_a_checkpointer(rank: int, size: int, root: Path) -> dict[str, Any]:
    with lastgood.Checkpointer(root, uneven(size, 1)) as ckpt:
        ckpt.restore()
        ckpt.save(1).result(60)
    state = uneven(size, 0)
    with lastgood.Checkpointer(root, state) as ckpt:
        ckpt.restore()
    return whole(state)


def little(rank: int, size: int, root: Path) -> list[Any]:
    """Save and load states of fewer tensors than ranks, of one tensor and of none, through DCP and through a
    checkpointer."""
    found: list[Any] = []
    for name, state in {"values": {"n": 1}, "one tensor": {"w": torch.ones(3), "n": 1}}.items():
        dcp.save(state, storage_writer=lastgood.dcp.Writer(root / f"{name} of dcp"))
        with lastgood.Checkpointer(root / name, state, exclude=["rng"]) as ckpt:
            ckpt.restore()
            ckpt.save(1).result(60)
        empty = {key: one * 0 for key, one in state.items()}
        dcp.load(empty, storage_reader=lastgood.dcp.Reader(root / f"{name} of dcp"))
        with lastgood.Checkpointer(root / name, state, exclude=["rng"]) as ckpt:
            ckpt.restore()
        found += [str(empty), str(state)]
    return found


def with_kept_plans(rank: int, size: int, root: Path) -> dict[str, Any]:
    """Save three times to each of two runs, in turn, with a planner that caches plans; returns what each step of
    each run contains.

    Then each rank names a different step for one save; the result holds the kinds of its errors.
    """
    for step in range(3):
        for run in ("a", "b"):
            state = {"w": torch.full((4,), 10.0 * step), "own": torch.full((2,), float(step)), "run": run}
            planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
            # Run "a" is saved without an id, and run "b" at explicit steps.
            at = {"checkpoint_id": f"step-{5 * step}"} if run == "b" else {}
            dcp.save(state, storage_writer=lastgood.dcp.Writer(root / run), planner=planner, **at)
    found: dict[str, Any] = {}
    try:
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, checkpoint_id=str(20 + rank), storage_writer=lastgood.dcp.Writer(root / "b"), planner=planner)
    except CheckpointException as error:
        found["differs"] = sorted({type(one).__name__ for one, _ in error.failures.values()})
    for run in ("a", "b"):
        for one in lastgood.open(root / run).lineage():
            state = {"w": torch.zeros(4), "own": torch.zeros(2), "run": ""}
            dcp.load(state, storage_reader=lastgood.dcp.Reader(root / run), checkpoint_id=str(one.step))
            found.setdefault(run, []).append([one.step, state["w"][0].item(), state["own"][0].item(), state["run"]])
    return found

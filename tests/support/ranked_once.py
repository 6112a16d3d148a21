"""Functions that the ranks of tests/ranks/test_ranks_saved_once.py run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

import lastgood
from harness import reports
from lastgood.errors import TrainingDiverged
from lastgood.io import heartbeat
from lastgood.run import access, job_logs
from lastgood_lab.campaigns.rank_jobs import made, outcome_of


def saved_by_one_call(rank: int, size: int, kind: str, root: Path, callers: tuple[int, ...]) -> str:
    """The outcome of `lastgood.save` of a model on these ranks, at one path; empty on the others."""
    loop = made(kind, size)
    outcome = ""
    if rank in callers:
        outcome = outcome_of(lambda: lastgood.save(root, {"net": loop.net, "optimizer": loop.optimizer}, 3))
    dist.barrier()
    return outcome


def saved_whole(rank: int, size: int, kind: str, root: Path) -> bool:
    """Gather the model, and save it on rank 0. Whether what is stored is the whole of it."""
    net = made(kind, size).net
    gathered = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        lastgood.save(root, {"net": gathered}, 3)
    dist.barrier()
    found, whole = lastgood.load(root)["net"], made("plain", 1).net.state_dict()
    return "up.weight" in found and all(torch.equal(one, whole[name]) for name, one in found.items())


def saved_beside_another(rank: int, size: int, root: Path) -> list[str]:
    """The outcomes of `lastgood.save` on rank 1: while rank 0 has the run open, and at a path of its own."""
    state, outcomes = {"w": torch.full((2,), float(rank))}, list[str]()
    if rank == 0:
        with access.for_writing(root, "atomic_dirsync"):
            dist.barrier()
            dist.barrier()
    else:
        dist.barrier()
        outcomes.append(outcome_of(lambda: lastgood.save(root, state, 1)))
        dist.barrier()
        outcomes.append(outcome_of(lambda: lastgood.save(root.with_name("own"), state, 1)))
    return outcomes


def compared_in_slots(rank: int, size: int, root: Path) -> list[bool]:
    """Whether an opening of slots warns of its Sentinel: with saves between the comparisons, and with saves at them."""
    found = []
    between, at = lastgood.Every(steps=30), lastgood.Every(steps=40)
    for cadence, every in ((between, 20), (at, 20), ("auto", 1)):
        options: dict[str, Any] = {"cadence": cadence, "sentinel": lastgood.Sentinel(every=every)}
        with reports() as texts, lastgood.Checkpointer(f"slots://{root}", {"w": torch.ones(2)}, **options):
            pass
        found.append(any("the last good state" in one for one in texts))
    return found


def with_sharded_metrics(rank: int, size: int, root: Path) -> tuple[list[float], str, float | None]:
    """Save with a norm of which each rank has a part; then that of rank 1 is infinite. Returns the stored norms, how
    the training has diverged, and the loss of the first step in the log that rank 1 alone has."""
    if rank == 1:
        heartbeat.create(f"{root}.page")
        os.environ |= {heartbeat.VARIABLE: f"{root}.page", job_logs.VARIABLE: f"{root}.logs"}
        Path(f"{root}.logs").mkdir()
    mesh = init_device_mesh("cpu", (size,))

    def norm(part: float) -> DTensor:
        return DTensor.from_local(torch.tensor(part), mesh, [Partial()])

    sentinel = lastgood.Sentinel(every=1, loss="norm")
    options: dict[str, Any] = {"cadence": lastgood.Every(steps=1), "retention": lastgood.Keep(best=("norm", "min", 1))}
    with lastgood.Checkpointer(root, {"w": torch.ones(2)}, sentinel=sentinel, **options) as ckpt:
        ckpt.restore()
        ckpt.step(1, metrics={"norm": norm(1.0 + rank), "loss": norm(1.0)}).result()
        logged = job_logs.steps(f"{root}.logs", 1)[0].loss if rank == 1 else None
        ckpt.save(2, metrics={"norm": norm(2.0 + rank)}).result()
        stored = [one.commit.metrics["norm"] for one in lastgood.open(root).generations()]
        try:
            ckpt.step(3, metrics={"norm": norm(float("inf") if rank else 1.0)})
        except TrainingDiverged as error:
            return stored, error.what, logged
    return stored, "", logged

"""What the ranks of the campaign nodes.py run, each in the network namespace of its node.

The state is one tensor in shards, one a rank, whose numbers follow from the step, the life of the job and the rank. The
process group is torch's fake one: it has the store through which the ranks agree, and no collectives, so that a rank is
cheap. The rank restores, and then takes commands from its pipe until it is killed.
"""

from __future__ import annotations

import os
import select
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch._dynamo  # which DTensor imports at its first use; here once, for all ranks that are forked
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import lastgood
from lastgood import errors
from lastgood.format import layout
from lastgood_lab import namespaces

lastgood.Checkpointer  # noqa: B018 - imported here, once for all ranks that are forked
NUMBERS = 300_000
"""of a shard: 1.2 MB, so that the memory of its deleted files is used again"""
TIMEOUT_SECONDS = 20.0
PLACED_SECONDS = 30.0
"""how long the copies of a save may take"""


@dataclass(frozen=True)
class RankJob:
    """One rank. `namespace`: of its node. `environment`: that of the node. `store`: host and port of the store.

    `log`: a file for what it reports. `life`: the number of this start of the job. `copies`, `spread`, `parity`: as for
    `Tier`.
    """

    rank: int
    size: int
    namespace: str
    environment: Mapping[str, str]
    store: tuple[str, int]
    home: str
    log: str
    life: int
    copies: int
    spread: str | None
    parity: str | None


def serve_stores(namespace: str, address: str, pipe: Connection) -> None:
    """Be the host of the stores of jobs, in the hub. For each message a new store replaces the one before.

    Posts its port. Outside of the namespace, torch's server would ask a name server for each client.
    """
    namespaces.enter(namespace)
    while True:
        pipe.recv()
        store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        pipe.send(store.port)


def content(step: int, life: int, rank: int) -> torch.Tensor:
    """The shard of a rank after a step of a life."""
    seed = (life * 100_003 + step) * 101 + rank
    return torch.rand(NUMBERS, generator=torch.Generator().manual_seed(seed))


def joined(rank: int, size: int, namespace: str, environment: Mapping[str, str], store: tuple[str, int]) -> None:
    """Make this process a rank of a job on the node of a namespace, with the fake process group. As for `RankJob`."""
    namespaces.enter(namespace)
    os.environ |= environment
    torch.set_num_threads(1)
    client = dist.TCPStore(*store, is_master=False)
    dist.init_process_group("fake", store=client, rank=rank, world_size=size)


def sharded(shard: torch.Tensor, size: int) -> DTensor:
    """The tensor of which each rank has one shard."""
    return DTensor.from_local(shard, init_device_mesh("cpu", (size,)), [Shard(0)], run_check=False)


def run(job: RankJob, pipe: Connection) -> None:
    """Restore, then serve the commands ("save", step), ("placed",) and ("settled",). Posts one answer to each."""
    with open(job.log, "ab") as log:
        os.dup2(log.fileno(), 2)
    warnings.simplefilter("ignore")
    joined(job.rank, job.size, job.namespace, job.environment, job.store)
    shard = torch.zeros(NUMBERS)
    state: dict[str, Any] = {"w": sharded(shard, job.size), "life": 0}
    protection = {"parity": job.parity} if job.parity else {"copies": job.copies}
    tier = lastgood.Tier("memory://", cadence=lastgood.Every(steps=1), spread=job.spread, **protection)
    ckpt = lastgood.Checkpointer(
        job.home, state, cadence=lastgood.Every(steps=10**9), tiers=[tier], patience=TIMEOUT_SECONDS
    )
    found = ckpt.restore()
    expected = content(found.step, int(state["life"]), job.rank) if found.step else shard
    sources = {place: one.bytes for place, one in found.sources.items()}
    folder = layout.folder(found.generation.id).removeprefix("gen/") if found.generation else ""
    pipe.send({"step": found.step, "folder": folder, "equal": torch.equal(shard, expected), "sources": sources})
    state["life"], save = job.life, None
    while True:
        command, *arguments = pipe.recv()
        try:
            if command == "save":
                (step,) = arguments
                shard.copy_(content(step, job.life, job.rank))
                save = ckpt.step(step)
                assert save is not None
                save.committed(4 * TIMEOUT_SECONDS)
                pipe.send("")
            elif command == "placed":
                assert save is not None
                late = "" if placed(save) else f"step {save.step} has no copies after {PLACED_SECONDS:.0f} s"
                if late:
                    ckpt.wait()  # reports why
                    late += f", and after one more attempt {'some' if save.durable('node') else 'none'}"
                pipe.send(late)
            else:
                ckpt.wait()
                pipe.send("")
        except errors.LastgoodError as error:
            pipe.send(f"{type(error).__name__}: {error}")


def placed(save: lastgood.Save, seconds: float = PLACED_SECONDS) -> bool:
    """Wait until the copies of a save are made, at most so long. Returns whether they are."""
    until = time.monotonic() + seconds
    while not save.durable("node"):
        if time.monotonic() > until:
            return False
        select.select([], [], [], 0.005)
    return True

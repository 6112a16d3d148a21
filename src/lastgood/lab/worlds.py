"""Worlds: real processes on this machine that make a group under gloo, met through a TCPStore on loopback."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed.tensor.parallel", "torch.distributed.fsdp"])
LIMIT_SECONDS = 120.0
Job = Callable[..., Any]


def world(
    size: int, job: Job, *arguments: Any, dies: tuple[int, ...] = (), limit_seconds: float = LIMIT_SECONDS
) -> list[Any]:
    """What `job(rank, size, *arguments)` returns on each rank. `dies`: these end with status 9.

    Raises RuntimeError with what was raised on any, and where one has not ended in `limit_seconds`.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results: Any = CONTEXT.SimpleQueue()
    ranks = [
        CONTEXT.Process(target=_rank, args=(results, rank, size, store.port, job, arguments)) for rank in range(size)
    ]
    for one in ranks:
        one.start()
    try:
        for one in ranks:
            one.join(limit_seconds)
            if one.exitcode is None:
                raise RuntimeError(f"a rank hangs: {one.name} has not ended in {limit_seconds:.0f} s")
    finally:
        for one in ranks:
            one.kill()
    found: dict[int, Any] = {}
    while not results.empty():
        rank, told, failed = results.get()
        if failed:
            raise RuntimeError(f"rank {rank}:\n{told}")
        found[rank] = told
    ends = {rank: one.exitcode for rank, one in enumerate(ranks) if (9 if rank in dies else 0) != one.exitcode}
    if ends:
        raise RuntimeError(f"ranks ended with {ends}")
    return [found.get(rank) for rank in range(size)]


def _rank(results: Any, rank: int, size: int, port: int, job: Job, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        if size > 1:
            store = dist.TCPStore("127.0.0.1", port, is_master=False)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        told = job(rank, size, *arguments)
    except BaseException:
        results.put((rank, traceback.format_exc(), True))
        raise
    results.put((rank, told, False))
    if size > 1:
        dist.destroy_process_group()

"""Runs a function on real processes that form a gloo process group through a TCPStore on loopback."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

PRELOAD = [
    "torch",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch._dynamo",  # which FSDP and DTensor import at their first use: a second and a half in each rank
    "lastgood.loop.checkpointer",  # which lastgood imports at its first use
    "lastgood_lab.campaigns.rank_jobs",
]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(PRELOAD)
LIMIT_SECONDS = 120.0
Job = Callable[..., Any]


def world(
    size: int, job: Job, *arguments: Any, dies: tuple[int, ...] = (), limit_seconds: float = LIMIT_SECONDS
) -> list[Any]:
    """Run `job(rank, size, *arguments)` on each rank; returns the results. Ranks in `dies` must end with status 9.

    Raises RuntimeError with the traceback of a rank that failed, and if a rank has not ended within `limit_seconds`.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(size)]
    ranks = [
        CONTEXT.Process(target=_rank, args=(pipes[rank][1], rank, size, store.port, job, arguments))
        for rank in range(size)
    ]
    until = time.monotonic() + limit_seconds
    try:
        for one, (_, sender) in zip(ranks, pipes, strict=True):
            one.start()
            sender.close()  # only the process holds it now, so that the receiver ends when the process does
        found = _results([receiver for receiver, _ in pipes], until)
        for one in ranks:
            one.join(max(0.0, until - time.monotonic()))
    finally:
        for one in ranks:
            one.kill()
    ends = {rank: one.exitcode for rank, one in enumerate(ranks) if (9 if rank in dies else 0) != one.exitcode}
    if ends:
        raise RuntimeError(f"ranks ended with the statuses {ends} (None: still running)")
    return [found.get(rank) for rank in range(size)]


def _results(pipes: list[Connection], until: float) -> dict[int, Any]:
    """The result of each rank; a rank that dies without one has none."""
    found: dict[int, Any] = {}
    waiting = list(range(len(pipes)))
    while waiting:
        ready = wait([pipes[rank] for rank in waiting], max(0.0, until - time.monotonic()))
        if not ready:
            raise RuntimeError(f"timed out: ranks {waiting} have sent no result")
        for rank in [rank for rank in waiting if pipes[rank] in ready]:
            waiting.remove(rank)
            try:
                result, failed = pipes[rank].recv()
            except EOFError:
                continue
            if failed:
                raise RuntimeError(f"rank {rank}:\n{result}")
            found[rank] = result
    return found


def _rank(results: Connection, rank: int, size: int, port: int, job: Job, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        if size > 1:
            store = dist.TCPStore("127.0.0.1", port, is_master=False)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        result = job(rank, size, *arguments)
    except BaseException:
        results.send((traceback.format_exc(), True))
        raise
    results.send((result, False))
    if size > 1:
        dist.destroy_process_group()

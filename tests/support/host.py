"""A rank on a host of its own: it executes commands from its standard input and prints their results.

The commands are `save N`, `restore` and `end`. With `held` as its last argument, a command stops at the next step of
the protocol until another line is read.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import lastgood
from lastgood import errors
from lastgood.format import commit

SIZE = 300_000


def held(name: str) -> None:
    """Make the next call of this step of the protocol report that it is held and wait for a line on standard input."""
    real = getattr(commit, name)

    def once(*arguments: Any, **options: Any) -> Any:
        setattr(commit, name, real)
        send("held")
        sys.stdin.readline()
        return real(*arguments, **options)

    setattr(commit, name, once)


def send(result: str, **more: Any) -> None:
    print(json.dumps({"result": result, **more}), flush=True)


def tried(act: Callable[[], object]) -> None:
    begun = time.monotonic()
    try:
        act()
        outcome = "done"
    except errors.LastgoodError as error:
        outcome = f"{type(error).__name__}: {error}"
    send(outcome, seconds=time.monotonic() - begun)


def main(rank: int, address: str, port: int, root: str, timeout_seconds: float) -> None:
    store = dist.TCPStore(address, port, 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    state = {"w": torch.zeros(SIZE)}
    with (
        warnings.catch_warnings(),
        lastgood.Checkpointer(root, state, cadence=lastgood.Every(steps=10**9), patience=timeout_seconds) as ckpt,
    ):
        warnings.simplefilter("ignore")
        ckpt.restore()
        send("ready")
        for line in sys.stdin:
            command, *more = line.split()
            if command == "end":
                break
            if more[-1:] == ["held"]:
                held("seal" if command == "save" else "read_manifests")
            if command == "save":
                state["w"].fill_(float(more[0]))
                tried(lambda: ckpt.save(int(more[0])).result(60))  # noqa: B023 - called at once
            else:
                state["w"].fill_(-1.0)
                tried(ckpt.restore)
                send("state", first=state["w"][0].item(), alike=bool((state["w"] == state["w"][0]).all()))
    send("closed")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], float(sys.argv[5]))

"""The functions that ranks run whose first tier is memory, or a disk of each node. Names stand for machines."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lastgood
from agents import ended, state, until
from harness import flip, one_place, reports
from lastgood.ports import Tier, never
from lastgood.records import Generation
from lastgood.run import lower_place, memory_place, peer_opening, reader, writer
from lastgood_lab.campaigns.rank_jobs import PATIENCE, Loop


def folder(home: Path, node: str, memory: Path) -> Path:
    """The memory of a run on the node of this name."""
    environ = {"LASTGOOD_NODE": node, memory_place.VARIABLE: str(memory)}
    return Path(memory_place.folder_of(home, environ))


def opened(
    loop: Loop,
    node: str,
    memory: Path,
    home: Path,
    copies: int = 1,
    parity: str | None = None,
    on_disk: bool = False,
    **options: Any,
) -> lastgood.Checkpointer:
    """A run on the node of this name, which saves every step to memory and every fourth at home.

    `on_disk`: `memory` is a folder on a disk, and the folder of this name in it stands for a disk of the node, to which
    it saves instead.
    """
    os.environ |= {"LASTGOOD_NODE": node, memory_place.VARIABLE: str(memory)}
    url = memory / node if on_disk else "memory://"
    tiers = [
        lastgood.Tier(url, cadence=lastgood.Every(steps=1), copies=copies, parity=parity, shared=not on_disk),
    ]
    settings = {"cadence": lastgood.Every(steps=4), "patience": PATIENCE, "tiers": tiers, **options}
    return lastgood.Checkpointer(home, loop.state, **settings)


def uninterrupted(rank: int, size: int, upto: int) -> list[float]:
    """The losses of a training that saves nothing."""
    loop = Loop("fsdp", size)
    return [loop.step(n) for n in range(1, upto + 1)]


def trained(
    rank: int,
    size: int,
    nodes: Sequence[str],
    memory: Path,
    home: Path,
    upto: int,
    killed: bool = False,
    with_agents: bool = True,
    copies: int = 1,
    parity: str | None = None,
    on_disk: bool = False,
) -> dict[str, Any]:
    """Restore and train; returns the restored step, the losses, and what the last save survives on this rank.

    `nodes`: the node of each rank. `killed`: the process is killed after the last save is committed. `with_agents`:
    otherwise the agent of the node is killed before. `on_disk`: as for `opened`.
    """
    own = memory / nodes[rank] if on_disk else folder(home, nodes[rank], memory)
    loop = Loop("fsdp" if size > 1 else "plain", size)
    with opened(loop, nodes[rank], memory, home, copies, parity, on_disk) as ckpt:
        found = ckpt.restore()
        losses = []
        for n in range(found.step + 1, upto + 1):
            losses.append(loop.step(n))
            save = ckpt.step(n)
            assert save is not None
            save.committed()
        if copies > 1 or parity is not None:
            ckpt.wait()  # the copies of the last save are made
            dist.barrier()
        if killed:
            if with_agents:
                until(lambda: (found := state(own)) and found.attached)
            else:
                ckpt.wait()
            if size > 1:
                dist.barrier()  # none is killed while another one still waits for what it serves
            if not with_agents:
                ended(str(own))
            os._exit(9)
        survives = [save.durable("process"), save.durable(), save.durable("node")] if losses else []
        labelled = ckpt.save(upto, metrics={"loss": 1.0}) if losses else None
        if labelled is not None:
            labelled.committed()
            survives.append(labelled.durable("process"))
        begun = time.monotonic()
    closing = {"closing_seconds": time.monotonic() - begun}
    return {"step": found.step, "sources": [*found.sources], "losses": losses, "survives": survives, **closing}


def trained_into_nan(rank: int, size: int, nodes: Sequence[str], memory: Path, home: Path, upto: int) -> None:
    """As `trained`, and killed without its agents. In the step `upto` the part of the last rank holds NaN."""
    step = Loop.step

    def last(self: Loop, n: int) -> float:
        loss = step(self, n)
        if n == upto and rank == size - 1:
            with torch.no_grad():
                self.net.up.weight.to_local().fill_(float("nan"))
        return loss

    Loop.step = last
    trained(rank, size, nodes, memory, home, upto, True, False)


def read_in_process(rank: int, size: int, nodes: Sequence[str], memory: Path, home: Path, on_disk: bool) -> list[int]:
    """Save once in all places, and wait for that. Returns the ranks whose files this process has read again."""
    read, reading = list[int](), reader.reading

    def noted(tier: Tier, generation: Generation, *others: Any) -> Any:
        read.extend(range(size) if others[-1] is None else others[-1])
        return reading(tier, generation, *others)

    reader.reading = noted
    loop = Loop("fsdp", size)
    with opened(loop, nodes[rank], memory, home, 2, None, on_disk) as ckpt:
        ckpt.restore()
        loop.step(4)
        ckpt.save(4).result()
        ckpt.wait()
        dist.barrier()
    return read


def died_before_commit(
    rank: int, size: int, nodes: Sequence[str], memory: Path, home: Path, upto: int, with_agents: bool, copies: int = 1
) -> None:
    """Train; all ranks die when every one has sealed step `upto`, and before its COMMIT. `with_agents`: as above."""
    own, sealed = folder(home, nodes[rank], memory), home.with_name("sealed")
    loop = Loop("fsdp" if size > 1 else "plain", size)

    def die(*record: object) -> Any:
        sealed.touch()
        if not with_agents:
            ended(str(own))
        os._exit(9)

    ckpt = opened(loop, nodes[rank], memory, home, copies)
    found = ckpt.restore()
    for n in range(found.step + 1, upto):
        loop.step(n)
        save = ckpt.step(n)
        assert save is not None
        save.committed()
    ckpt.wait()
    until(lambda: (found := state(own)) and found.attached)
    dist.barrier()
    if rank == 0:
        writer.commit.publish = die  # the next one makes the generation
    loop.step(upto)
    ckpt.step(upto)
    until(sealed.exists)
    die()


def scrubbed(rank: int, size: int, nodes: Sequence[str], memory: Path, home: Path) -> tuple[list[int], list[str]]:
    """Train, and damage the pack of each node in the two copies at home, which rank 0 then reads again.

    Returns, at rank 0, the steps that are marked as damaged afterwards, and the events.
    """
    loop, events = Loop("fsdp", size), list[str]()
    options = {"scrub": lastgood.Scrub(seconds=1e9), "retention": lastgood.Keep(last=9)}
    with opened(
        loop, nodes[rank], memory, home, on_event=lambda one: events.append(f"{one.kind} {one.step}"), **options
    ) as ckpt:
        ckpt.restore()
        for n in range(1, 9):
            loop.step(n)
            save = ckpt.step(n)
            assert save is not None
            save.result()
        ckpt.wait()
        dist.barrier()
        if rank == 0:
            scrub = ckpt._pipeline.places.below[0]._scrub
            assert scrub is not None
            for pack in home.glob("gen/*/pack-0000[01]"):
                flip(pack, pack.stat().st_size // 2)
            assert not any(one_place(home).verify(step).good for step in (4, 8))
            for _ in range(2):
                scrub.scrub_one(never, never)
        dist.barrier()
        with reports():  # the damage that was found
            ckpt.step(8)
    return [one.step for one in one_place(home).generations() if one.damaged], events


NOT_HERE = "192.0.2.1"
"""an address for documentation, which no machine has"""


def died_beside_left_out(
    rank: int, size: int, nodes: Sequence[str], memory: Path, home: Path, upto: int, left_out: Sequence[str] = ()
) -> None:
    """Restore and train with two copies, and die with the agent of the node.

    `left_out`: nodes whose agents cannot listen. Writes what it has found into a file beside `home`, which
    `found_beside_left_out` reads. The opening copies nothing at home that an earlier one has left.
    """
    lower_place.LowerPlace.catch_up = lambda self: None
    if nodes[rank] in left_out:
        os.environ[peer_opening.ADDRESS] = NOT_HERE
    loop, losses = Loop("fsdp", size), []
    with reports(logging.WARNING) as texts:
        ckpt = opened(loop, nodes[rank], memory, home, copies=2)
        found = ckpt.restore()
        for n in range(found.step + 1, upto + 1):
            losses.append(loop.step(n))
            save = ckpt.step(n)
            assert save is not None
            save.committed()
            ckpt.wait()  # each save has its copies
    dist.barrier()  # rank 0 has waited for the copies
    survives = [one for one in ("process", "node", "domain") if save.durable(one)]
    result = {"step": found.step, "losses": losses, "sources": [*found.sources], "survives": survives, "texts": texts}
    (home.parent / f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()  # none is killed while another one still waits for what it serves
    ended(str(folder(home, nodes[rank], memory)))
    os._exit(9)


def found_beside_left_out(home: Path, size: int) -> list[dict[str, Any]]:
    """What each rank of `died_beside_left_out` has found."""
    return [json.loads((home.parent / f"{rank}.json").read_text()) for rank in range(size)]


def preempted(rank: int, size: int, nodes: Sequence[str], memory: Path, home: Path) -> tuple[int, list[str]]:
    """All ranks are asked to end. Rank 0 asks for the files of the other nodes once rank 1 is leaving.

    Returns the exit code, and the warnings that this rank has reported.
    """
    loop, end = Loop("fsdp", size), 0
    with reports(logging.WARNING) as texts:
        try:
            with opened(loop, nodes[rank], memory, home, preemption=lastgood.Preemption(grace_seconds=60)) as ckpt:
                ckpt.restore()
                _note_close(ckpt._pipeline, home.with_name("left"), asks=rank == 0)
                if rank == 0:
                    signal.raise_signal(signal.SIGTERM)
                for n in range(1, 10_000):
                    loop.step(n)
                    ckpt.step(n)
        except SystemExit as ended_with:
            end = int(ended_with.code or 0)
    return end, texts


def _note_close(pipeline: Any, left: Path, asks: bool) -> None:
    """Before the pipeline is closed, make the file `left`; with `asks`, wait for it, and list the files of all nodes.

    A server that was asked to leave has ended before.
    """
    close, tier = pipeline.close, pipeline.places.front.tier

    def noted(*given: Any) -> None:
        if asks:
            until(left.exists)
            pipeline.run.tier.listings("gen")
        else:
            if tier.server._left.is_set():
                tier.server._thread.join()
            left.touch()
        close(*given)

    pipeline.close = noted

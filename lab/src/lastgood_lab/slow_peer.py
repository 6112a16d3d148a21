"""`lastgood bench slow-peer`: the steps of a loop whose saves are copied to a node that is slow, or does not answer.

Two network namespaces stand for two nodes with one rank each; a save to memory every few steps is copied to the other
node. After the first save has its copies, the link of node b is slowed down, or the agent of node b is stopped, and the
loop goes on. In each step the processor waits, as for a device that computes. At the end the node is as it was before,
and the newest save must get its copies. Needs root, and the commands `ip` and `tc`.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import lastgood
from lastgood.errors import Refused
from lastgood.io.machine import NODE
from lastgood.run import agent_link, memory_place

from . import namespaces
from .campaigns.memory_kills import memory_for_agents
from .campaigns.node_jobs import joined, placed, serve_stores, sharded
from .journal import Journal, rotated
from .report import Progress, Report, Table, hardware, spread
from .restart import Options as Options
from .usage import working_place
from .worlds import CONTEXT

FREE, SLOW, SILENT = "as it is", "link of 80 Mbit/s", "agent stopped"
PEERS = (FREE, SLOW, SILENT)
MEGABITS = 80
NODES = 2
SHARD_BYTES = 32_000_000
STEPS, STEPS_A_SAVE = 500, 5
DEVICE_SECONDS = 0.04
PLACED_SECONDS = 120.0
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Seat:
    """One rank. `namespace`: of its node. `environment`: that of the node. `store`: host and port of the store."""

    rank: int
    namespace: str
    environment: Mapping[str, str]
    store: tuple[str, int]
    home: str


def run(options: Options, progress: Progress) -> list[Row]:
    """Take the measurements that are missing in the journal in `out`; returns all rows, also those of earlier runs.

    Raises Refused where network namespaces cannot be made.
    """
    lacks = namespaces.missing() or ("" if shutil.which("tc") else "needs tc: apt-get install iproute2")
    if lacks:
        raise Refused(f"this bench {lacks}", safe="Nothing was measured.", todo="")
    journal = Journal(options.out / "slow-peer.journal.jsonl", {"hardware": hardware()})
    keys: list[dict[str, Any]] = [
        {"peer": peer, "round": number, "steps": STEPS, "bytes": SHARD_BYTES, "device_seconds": DEVICE_SECONDS}
        for number in range(options.rounds)
        for peer in rotated(PEERS, number)
    ]
    for key in keys:
        if journal.get(**key) is None:
            with namespaces.Network(NODES) as network, working_place(options) as place, memory_for_agents() as memory:
                journal.put(_measured(network, place, memory, key["peer"]), **key)
            progress(f"round {key['round'] + 1}/{options.rounds}  {key['peer']}")
    return [{**key, **(journal.get(**key) or {})} for key in keys]


def _measured(network: namespaces.Network, place: Path, memory: Path, peer: str) -> dict[str, Any]:
    """One job. What rank 0 has measured, and how long the newest save took to get its copies afterwards."""
    with ExitStack() as held:
        stores, theirs = CONTEXT.Pipe()
        store_host = CONTEXT.Process(
            target=serve_stores, args=(network.name(network.hub), network.address(network.hub), theirs)
        )
        _started(store_host, theirs, held)
        stores.send("new")
        store = network.address(network.hub), int(stores.recv())
        pipes, seats = list[Connection](), [_seat(network, rank, store, place, memory) for rank in range(NODES)]
        for seat in seats:
            ours, theirs = CONTEXT.Pipe()
            _started(CONTEXT.Process(target=_trained, args=(seat, theirs)), theirs, held)
            pipes.append(held.enter_context(closing(ours)))
        _received(pipes)
        agent = agent_link.process_of(memory_place.folder_of(place / "run", seats[1].environment))
        assert agent is not None, "the node has an agent once its saves are copied"
        if peer == SLOW:
            network.slow_down(1, MEGABITS)
        if peer == SILENT:
            os.kill(agent, signal.SIGSTOP)
        _go_on(pipes)
        found = _received(pipes)[0]
        if peer == SLOW:
            network.speed_up(1)
        with suppress(ProcessLookupError):  # an agent that does not answer is replaced
            os.kill(agent, signal.SIGCONT)
        _go_on(pipes)
        placed_seconds = _received(pipes)[0]
        _go_on(pipes)
        return {**found, "placed_seconds": placed_seconds}


def _seat(network: namespaces.Network, rank: int, store: tuple[str, int], place: Path, memory: Path) -> Seat:
    environment = {
        NODE: f"node{rank}",
        memory_place.VARIABLE: str(memory),
        "MASTER_ADDR": store[0],
        "OMP_NUM_THREADS": "1",
    }
    return Seat(rank, network.name(rank), environment, store, str(place / "run"))


def _started(process: Any, theirs: Connection, held: ExitStack) -> None:
    """Start a process, which is killed at the end of `held`. Only it holds its end of the pipe then."""
    process.start()
    theirs.close()
    held.callback(process.join)
    held.callback(process.kill)


def _received(pipes: Sequence[Connection]) -> list[Any]:
    """The answer of each rank, which then waits. Raises EOFError if one has died."""
    return [one.recv() for one in pipes]


def _go_on(pipes: Sequence[Connection]) -> None:
    """Let the ranks go on, which wait after an answer."""
    for one in pipes:
        one.send("on")


# ---- a rank ------------------------------------------------------------------------------------------------------


def _trained(seat: Seat, pipe: Connection) -> None:
    """Save until the copies are made, train and save beside the slow node, and wait for the copies afterwards."""
    joined(seat.rank, NODES, seat.namespace, seat.environment, seat.store)
    shard = torch.zeros(SHARD_BYTES // 4)
    state = {"w": sharded(shard, NODES)}
    tier = lastgood.Tier("memory://", cadence=lastgood.Every(steps=STEPS_A_SAVE), copies=2)
    with lastgood.Checkpointer(seat.home, state, cadence=lastgood.Every(steps=10**6), tiers=[tier]) as ckpt:
        ckpt.restore()
        ckpt.save(1)
        ckpt.wait()
        _answer(pipe, None)
        found, newest = _loop(ckpt, shard)
        _answer(pipe, found)
        _answer(pipe, _placed_seconds(newest) if seat.rank == 0 else 0.0)


def _answer(pipe: Connection, answer: Any) -> None:
    pipe.send(answer)
    pipe.recv()


def _loop(ckpt: lastgood.Checkpointer, shard: torch.Tensor) -> tuple[dict[str, Any], lastgood.Save]:
    """Train and save. Returns what was measured, and the newest save."""
    seconds, saves = list[float](), list[lastgood.Save]()
    for n in range(2, STEPS + 2):
        begun = time.perf_counter()
        time.sleep(DEVICE_SECONDS)
        shard.add_(1.0)
        save = ckpt.step(n)
        seconds.append(time.perf_counter() - begun)
        if save is not None:
            saves.append(save)
    saves[-1].wait_ended()
    found = {
        "step_seconds": statistics.median(seconds),
        "longest_seconds": max(seconds),
        "loop_seconds": sum(seconds),
        "stall_seconds": sum(one.stall_seconds for one in saves),
        "saves": len(saves),
        "committed": sum(one.is_committed() for one in saves),
        "copied": sum(one.durable("node") for one in saves),
    }
    return found, saves[-1]


def _placed_seconds(save: lastgood.Save) -> float:
    """How long it takes until a save has its copies."""
    begun = time.monotonic()
    assert placed(save, PLACED_SECONDS), "the newest save has no copies"
    return time.monotonic() - begun


def report(rows: Sequence[Row], options: Options) -> Report:
    by_peer = {
        peer: sorted((one for one in rows if one["peer"] == peer), key=lambda row: row["round"]) for peer in PEERS
    }
    lines = []
    for peer, of in by_peer.items():
        ratio = [one["loop_seconds"] / free["loop_seconds"] for one, free in zip(of, by_peer[FREE], strict=True)]
        lines.append(
            [
                peer,
                spread([1e3 * one["step_seconds"] for one in of], ".1f"),
                spread([1e3 * one["longest_seconds"] for one in of], ".0f"),
                spread(ratio, ".3f"),
                spread([1e3 * one["stall_seconds"] / one["saves"] for one in of], ".1f"),
                spread([one["committed"] for one in of], ".0f"),
                spread([one["copied"] for one in of], ".0f"),
                spread([one["placed_seconds"] for one in of], ".1f"),
            ]
        )
    head = ["node b", "a step, ms", "longest step, ms", "whole loop / as it is", "wait per save, ms"]
    head += ["saves committed", "with copies at the end", "newest has copies after, s"]
    return Report(
        name="slow-peer",
        title="A loop whose saves are copied to a node that is slow",
        about=(
            f"Medians of {options.rounds} interleaved rounds, (least-most), of rank 0. Two network namespaces of one "
            f"machine; {STEPS} steps that wait {1e3 * DEVICE_SECONDS:.0f} ms; {SHARD_BYTES / 1e6:.0f} MB a rank, saved "
            f"to memory every {STEPS_A_SAVE} steps, with a copy on the other node. The newest save is copied; one that "
            "waits while a newer one is committed is not. Last column: after node b is as it was before."
        ),
        tables=[Table("", head, lines)],
        rows=rows,
        notes=[],
    )

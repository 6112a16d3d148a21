"""`lastgood bench peer`: a restore from the memory of another node, beside one TCP stream of the same bytes.

Two ranks stand for two nodes of this machine, each with a pipeline stage; each node has a copy of the other stage in
its memory. In each round the node with the large stage loses its memory. The call of `restore` in its rank brings its
files back from the agent of the other one, over the loopback interface, verifies them and loads them; the plain stream
carries as many bytes from one process to another, and checks nothing.

The other stage is small. With a large one, its rank would load it at the same time, on the same cores, while the stream
has them for itself; nodes that are machines share no cores.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import lastgood
from lastgood.io.machine import NODE
from lastgood.run import memory_place

from .campaigns.memory_kills import kill_agent, memory_for_agents
from .durable import of_contender, ratios
from .journal import Journal, rotated
from .report import Progress, Report, Table, hardware, spread
from .restore import Options as Options
from .usage import working_place
from .worlds import CONTEXT, world

STREAM, PEER = "one TCP stream", "restore"
CONTENDERS = (STREAM, PEER)
NODES = "a", "b"
STATE_BYTES = 1_490_000_000
"""of a GPT-2 124M with AdamW, at scale 1: the stage of the node that loses its memory"""
OTHER_NUMBERS = 1 << 18
"""float32, in the stage of the other node"""
PIECE_BYTES = 1 << 20
LIMIT_SECONDS = 600.0
Row = Mapping[str, Any]


def run(options: Options, progress: Progress) -> list[Row]:
    """Take the measurements that are missing in the journal in `out`; returns all rows, also those of earlier runs."""
    journal = Journal(options.out / "peer.journal.jsonl", {"hardware": hardware()})
    keys: list[dict[str, Any]] = [
        {"scale": options.scale, "contender": name, "round": number}
        for number in range(options.rounds)
        for name in rotated(CONTENDERS, number)
    ]
    if any(journal.get(**key) is None for key in keys):
        numbers = int(options.scale * STATE_BYTES) // 4
        with working_place(options) as place, memory_for_agents() as memory:
            world(2, _trained, place / "run", memory, numbers, limit_seconds=LIMIT_SECONDS)
            for key in keys:
                if journal.get(**key) is None:
                    if key["contender"] == PEER:
                        found = _restored_from_peer(place / "run", memory, numbers)
                    else:
                        found = _streamed(numbers * 4)
                    journal.put(found, **key)
                    progress(f"round {key['round'] + 1}/{options.rounds}  {key['contender']}")
    return [{**key, **(journal.get(**key) or {})} for key in keys]


# ---- the restore -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(rank: int, home: Path, memory: Path, numbers: int) -> Iterator[tuple[lastgood.Checkpointer, torch.Tensor]]:
    """The run of one rank, which stands for a node, and the tensor of its stage."""
    os.environ |= {NODE: NODES[rank], memory_place.VARIABLE: str(memory)}
    torch.set_num_threads(1)
    stage = torch.ones(numbers if rank else OTHER_NUMBERS)  # in memory that was touched, as the stream has it
    state = {f"stage{rank}": stage}
    tier = lastgood.Tier("memory://", cadence=lastgood.Every(steps=1), copies=2)
    with lastgood.Checkpointer(home, state, cadence=lastgood.Every(steps=10**6), tiers=[tier]) as ckpt:
        yield ckpt, stage


def _trained(rank: int, size: int, home: Path, memory: Path, numbers: int) -> None:
    with _opened(rank, home, memory, numbers) as (ckpt, stage):
        ckpt.restore()
        stage.copy_(_trained_stage(rank, len(stage)))
        ckpt.save(1).result()
        ckpt.wait()  # for the copy on the other node


def _trained_stage(rank: int, numbers: int) -> torch.Tensor:
    return torch.rand(numbers, generator=torch.Generator().manual_seed(rank))


def _resumed(rank: int, size: int, home: Path, memory: Path, numbers: int) -> dict[str, Any]:
    with _opened(rank, home, memory, numbers) as (ckpt, stage):
        begun = time.perf_counter()
        found = ckpt.restore()
        seconds = time.perf_counter() - begun
        expected = _trained_stage(rank, len(stage))
        assert found.step == 1 and torch.equal(stage, expected), "what was restored is what was saved"
        ckpt.wait()
    return {"seconds": seconds, "sources": [*found.sources]}


def _restored_from_peer(home: Path, memory: Path, numbers: int) -> dict[str, Any]:
    """Node b loses its memory; then the job starts again."""
    lost = memory_place.folder_of(home, {NODE: NODES[1], memory_place.VARIABLE: str(memory)})
    kill_agent(lost)
    shutil.rmtree(lost)
    found = world(2, _resumed, home, memory, numbers, limit_seconds=LIMIT_SECONDS)[1]
    assert str(home) not in found["sources"], "nothing comes from the directory"
    return {"seconds": found["seconds"], "bytes": numbers * 4}


# ---- one stream --------------------------------------------------------------------------------------------------


def _sent(address: tuple[str, int], total: int) -> None:
    data = memoryview(bytearray(PIECE_BYTES))
    with socket.create_connection(address) as connection:
        for start in range(0, total, PIECE_BYTES):
            connection.sendall(data[: min(PIECE_BYTES, total - start)])


def _streamed(total: int) -> dict[str, Any]:
    """Receive so many bytes from another process into memory that was touched before."""
    memory = memoryview(bytearray(total))
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = CONTEXT.Process(target=_sent, args=(server.getsockname(), total))
        sender.start()
        connection, _ = server.accept()
        with connection:
            begun, received = time.perf_counter(), 0
            while received < total:
                received += connection.recv_into(memory[received : received + PIECE_BYTES])
            seconds = time.perf_counter() - begun
        sender.join()
    return {"seconds": seconds, "bytes": total}


def report(rows: Sequence[Row], options: Options) -> Report:
    speeds = [{**row, "seconds_per_gb": row["seconds"] / row["bytes"] * 1e9} for row in rows]
    lines = [
        [name, spread([1 / row["seconds_per_gb"] for row in of_contender(speeds, name)], ".2f")] for name in CONTENDERS
    ]
    gigabytes, ratio = rows[0]["bytes"] / 1e9, spread(ratios(speeds, STREAM, PEER, "seconds_per_gb"), ".2f")
    return Report(
        name="peer",
        title=f"Restore from the memory of another node, {gigabytes:.2f} GB",
        about=f"Medians of {options.rounds} interleaved rounds, (least-most). Two nodes on one machine, by loopback.",
        tables=[Table("speed", ["from", "GB/s"], lines)],
        rows=rows,
        notes=[f"restore / one stream, round by round: {ratio}"],
    )

"""`lastgood bench overhead`: what the heartbeat and the Sentinel add to a training step, by paired segments.

In one process, segments without either, with a heartbeat page and with a Sentinel follow each other, in an order that
rotates; with several ranks these train data parallel. A segment is made of blocks of as many steps as lie between two
comparisons of the Sentinel. The share of a step is by processor time of the training thread, which other work on the
machine disturbs least. The differences by the clock stand beside it: they hold what is waited, and the machine's noise.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import lastgood
from lastgood.io import heartbeat

from .journal import Journal, rotated
from .report import Progress, Report, Table, hardware, spread
from .usage import working_place
from .worlds import world

NEITHER, HEARTBEAT, SENTINEL = "neither", "heartbeat", "sentinel"
VARIANTS = (NEITHER, HEARTBEAT, SENTINEL)
WORLDS = (1, 2)
WIDTH, LAYERS, BATCH = 512, 4, 32
SEGMENTS, BLOCKS = 4, 4
"""segments of each variant in a process; blocks of a segment, after one that is not counted"""
SHARE = 0.001
"""of a step's processor time: what each may take"""
LIMIT_SECONDS = 900.0
"""of a process"""
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Options:
    """`out`: for the journal and the report. `place`: for the runs; None: in `out`. `rounds`: processes
    (or pairs of them), one after another. `blocks`: of a segment. `width`: of the four layers; wider ones, longer
    steps."""

    out: Path
    place: Path | None = None
    rounds: int = 5
    blocks: int = BLOCKS
    width: int = WIDTH


class Block(NamedTuple):
    """Means of the steps of one block, in seconds: whole steps, and their calls of `Checkpointer.step()`. `_cpu`: the
    processor time of the training thread."""

    step: float
    step_cpu: float
    call: float
    call_cpu: float


def run(options: Options, progress: Progress) -> list[Row]:
    """Take the measurements that are missing in the journal in `out`; returns all rows, also those of earlier runs."""
    journal = Journal(options.out / "overhead.journal.jsonl", {"hardware": hardware()})
    keys = [
        {"ranks": ranks, "round": number, "blocks": options.blocks, "width": options.width}
        for number in range(options.rounds)
        for ranks in WORLDS
    ]
    for key in keys:
        if journal.get(**key) is None:
            load = os.getloadavg()[0]
            with working_place(options) as place:
                segments = world(
                    key["ranks"], _measured, place, options.blocks, options.width, limit_seconds=LIMIT_SECONDS
                )[0]
            journal.put({"load": load, "segments": segments}, **key)
            progress(f"round {key['round'] + 1}/{options.rounds}  {key['ranks']} ranks")
    return [{**key, **(journal.get(**key) or {})} for key in keys]


def _measured(rank: int, size: int, place: Path, blocks: int, width: int) -> list[dict[str, list[float]]]:
    """On each rank: the segments, of which each item has one of every variant."""
    torch.manual_seed(0)
    network: nn.Module = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)))
    model = network if size == 1 else nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    state = {"model": model, "optimizer": optimizer}
    found = []
    for number in range(SEGMENTS):
        item = {}
        for name in rotated(VARIANTS, number):
            at = f"{name}-{number}"
            page = place / f"page-{rank}-{at}"
            heartbeat.create(str(page))
            os.environ.pop(heartbeat.VARIABLE, None)
            if name == HEARTBEAT:
                os.environ[heartbeat.VARIABLE] = str(page)
            sentinel = lastgood.Sentinel() if name == SENTINEL else None
            seldom = lastgood.Every(steps=10**6)
            with lastgood.Checkpointer(place / at, state, cadence=seldom, sentinel=sentinel) as ckpt:
                ckpt.restore()
                counted = [*_blocks(ckpt, model, optimizer, blocks + 1)][1:]
            item[name] = [statistics.median(values) for values in zip(*counted, strict=True)]
        found.append(item)
    return found


def _blocks(
    ckpt: lastgood.Checkpointer, model: nn.Module, optimizer: torch.optim.Optimizer, count: int
) -> Iterator[Block]:
    inputs = torch.randn(BATCH, next(model.parameters()).shape[1])
    steps, n = lastgood.Sentinel().every, 0
    for _ in range(count):
        begun, begun_cpu, call, call_cpu = time.perf_counter(), time.thread_time(), 0.0, 0.0
        for _ in range(steps):
            n += 1
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            before, before_cpu = time.perf_counter(), time.thread_time()
            ckpt.step(n, metrics={"loss": loss.detach()})
            call_cpu += time.thread_time() - before_cpu
            call += time.perf_counter() - before
        whole = time.perf_counter() - begun, time.thread_time() - begun_cpu, call, call_cpu
        yield Block(*(seconds / steps for seconds in whole))


def report(rows: Sequence[Row], options: Options) -> Report:
    lines = [_line(rows, ranks, name) for ranks in WORLDS for name in VARIANTS[1:]]
    notes = []
    for ranks in WORLDS:
        bare = [one for _, one in _pairs(rows, ranks, NEITHER)]
        texts = [spread([1e3 * getattr(one, part) for one in bare], ".2f") for part in Block._fields]
        notes.append(
            f"{ranks} ranks, neither, ms: a step {texts[0]}, its processor time {texts[1]}, step() {texts[2]}, its "
            f"processor time {texts[3]}"
        )
    notes.append(f"load average (1 minute) before the processes: {spread([row['load'] for row in rows], '.1f')}")
    head = [
        "",
        "processor time of step(), us",
        "of a step's, %",
        "0.1 % of steps of, ms",
        "time of step(), us",
        "whole steps, %",
    ]
    return Report(
        name="overhead",
        title="Heartbeat and Sentinel, beside a step without them",
        about=(
            f"What each adds to a step of a network of {LAYERS} layers of width {options.width}, medians of "
            f"{options.rounds * SEGMENTS} pairs of segments, (least-most). A segment has "
            f"{options.blocks} blocks of {lastgood.Sentinel().every} steps; it counts with its median block. With two "
            "ranks, of which rank 0 is shown, the Sentinel's all-reduce over gloo is in it, once a block."
        ),
        tables=[Table("", head, lines)],
        rows=rows,
        notes=notes,
    )


def _line(rows: Sequence[Row], ranks: int, name: str) -> list[str]:
    pairs = _pairs(rows, ranks, name)
    cells = [f"{name}, {ranks} ranks" if ranks > 1 else f"{name}, one process"]
    cpu = [one.call_cpu - bare.call_cpu for one, bare in pairs]
    shares = [100 * seconds / bare.step_cpu for seconds, (_, bare) in zip(cpu, pairs, strict=True)]
    calls = [1e6 * (one.call - bare.call) for one, bare in pairs]
    steps = [100 * (one.step / bare.step - 1) for one, bare in pairs]
    cells += [spread([1e6 * seconds for seconds in cpu], ".1f"), spread(shares)]
    cells.append(f"{1e3 * statistics.median(cpu) / SHARE:.1f}")
    return [*cells, spread(calls, ".0f"), spread(steps, ".1f")]


def _pairs(rows: Sequence[Row], ranks: int, name: str) -> list[tuple[Block, Block]]:
    """Each segment of a variant, and the one without either of the same turn."""
    items = [item for row in rows if row["ranks"] == ranks for item in row["segments"]]
    return [(Block(*item[name]), Block(*item[NEITHER])) for item in items]

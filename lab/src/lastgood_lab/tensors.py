"""`lastgood bench tensors`: the time, metadata and memory of a save as the number of tensors grows.

All tensors have 16 numbers (parameters and their AdamW state), so that almost nothing is copied and the overhead
remains. First each part of a save is measured alone, in the processor time of its thread and with a cached plan of the
capture. Then whole saves are timed, and the largest memory is measured that saves in flight take beyond their arena.
"""

from __future__ import annotations

import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import lastgood
from lastgood.engine.content_digest import Contents
from lastgood.format import layout
from lastgood.limits import CHUNK_BYTES
from lastgood.records import Blob, Manifest
from lastgood.snapshot import staging
from lastgood.state.capture import Capture
from lastgood.units import size

from .journal import Journal
from .report import Progress, Report, Table, hardware
from .usage import resident_bytes, stored_bytes, working_place

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 16
PARTS = ("first capture", "first layout", "capture", "digests", "pieces", "encode")
WARM = ("capture", "digests", "pieces", "encode")
WHOLE = ("first save waits", "save waits", "save durable")
SAMPLE_SECONDS = 0.005
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Options:
    """`counts` are the numbers of tensors; `in_flight` is the number of saves in flight while memory is measured."""

    out: Path
    place: Path | None = None
    counts: Sequence[int] = (10, 100, 1000, 10_000, 100_000)
    rounds: int = 5
    in_flight: int = 2


def run(options: Options, progress: Progress) -> list[Row]:
    """Take the measurements that are missing in the journal in `out`; returns all rows, also those of earlier runs."""
    journal = Journal(options.out / "tensors.journal.jsonl", {"hardware": hardware()})
    rows: list[Row] = []
    for count in options.counts:
        key = {"tensors": count, "rounds": options.rounds, "in_flight": options.in_flight}
        known = journal.get(**key)
        if known is None:
            state = _built(count)
            with working_place(options) as place:
                found = {**_parts(state, options.rounds), **_whole(state, place, options.rounds)}
                known = journal.put({**found, **_weighed(state, place, options.in_flight)}, **key)
            progress(f"{count:,} tensors: {_warm_milliseconds(known):.1f} ms from capture to manifest")
        rows.append({**key, **known})
    return rows


def _built(count: int) -> dict[str, Any]:
    """Build a model of modules with ten parameters each, and an optimizer with three tensors for each parameter."""
    parameters = max(1, count // 4)
    model = nn.ModuleList(
        nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(min(10, parameters - start))])
        for start in range(0, parameters, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def _parts(state: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Measure the processor seconds of each part of a save, and the bytes of its manifest."""
    seconds: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        begun = time.thread_time()
        found = work()
        seconds.setdefault(name, []).append(time.thread_time() - begun)
        return found

    plan, chunk_bytes = Capture(), CHUNK_BYTES
    timed("first capture", lambda: plan.take(state))
    (image,) = timed("first layout", lambda: staging.lay_out(plan.take(state).tensors))
    memory = memoryview(bytearray(image.length))

    def digests() -> Contents:
        found = Contents(image, "xxh3_128")
        for at in range(0, image.length, chunk_bytes):
            found.see(memory[at : min(at + chunk_bytes, image.length)])
        return found

    data = b""
    for _ in range(rounds):
        captured = timed("capture", lambda: plan.take(state))
        contents = timed("digests", digests)
        pieces = timed("pieces", contents.pieces)
        sums = ["0" * 32] * -(-image.length // chunk_bytes)
        blob = Blob(name=image.blob, length=image.length, chunk_bytes=chunk_bytes, chunks=sums)
        manifest = Manifest(
            format=layout.FORMAT,
            step=1,
            incarnation="00000000",
            rank=0,
            digest="xxh3_128",
            blobs=[blob],
            pieces=pieces,
            aliases=captured.aliases,
            values=captured.values,
        )
        data = timed("encode", partial(layout.encode, manifest))
    return {**seconds, "stored_tensors": len(image.tensors), "manifest_bytes": len(data)}


def _whole(state: dict[str, Any], place: Path, rounds: int) -> dict[str, Any]:
    """Measure the seconds of whole saves until the loop may continue, and until they are durable."""
    found: dict[str, list[float]] = {name: [] for name in WHOLE}
    with lastgood.Checkpointer(place / "run", state, retention=lastgood.Keep(last=1)) as ckpt:
        ckpt.restore()
        for step in range(1, rounds + 3):
            begun = time.perf_counter()
            save = ckpt.save(step)
            waited = time.perf_counter() - begun
            save.result()
            if step == 1:  # the first save walks the state, lays out the file, and faults in the arena
                found["first save waits"].append(waited)
            elif step > 2:
                found["save waits"].append(waited)
                found["save durable"].append(time.perf_counter() - begun)
            ckpt.wait()
        found["stored_bytes"] = [stored_bytes(place / "run")]
    shutil.rmtree(place / "run")
    return found


def _weighed(state: dict[str, Any], place: Path, in_flight: int) -> dict[str, Any]:
    """Measure the largest memory beyond the arena's while `in_flight` saves are in flight."""
    with lastgood.Checkpointer(place / "run", state, retention=lastgood.Keep(last=1), in_flight=in_flight) as ckpt:
        ckpt.save(1).result()
        ckpt.wait()  # from now on everything that is created once (plan, threads, arena) exists
        before = resident_bytes()
        with _most_resident() as most:
            for step in range(2, 2 + 3 * in_flight):
                ckpt.save(step)
            ckpt.wait()
    shutil.rmtree(place / "run")
    return {"memory_bytes": max(0, most[0] - before)}


@contextmanager
def _most_resident() -> Iterator[list[int]]:
    """A context during which the memory of this process is sampled; yields a list whose item is the largest sample."""
    most, over = [0], threading.Event()

    def sample() -> None:
        while not over.wait(SAMPLE_SECONDS):
            most[0] = max(most[0], resident_bytes())

    watcher = threading.Thread(target=sample)
    watcher.start()
    try:
        yield most
    finally:
        over.set()
        watcher.join()


# ---- the report ----------------------------------------------------------------------------------------------


def report(rows: Sequence[Row], options: Options) -> Report:
    parts = [
        [
            f"{row['tensors']:,}",
            *(f"{1000 * statistics.median(row[name]):.2f}" for name in PARTS),
            f"{_warm_milliseconds(row):.2f}",
        ]
        for row in rows
    ]
    whole = [
        [
            f"{row['tensors']:,}",
            *(f"{1000 * statistics.median(row[name]):.1f}" for name in WHOLE),
            size(row["manifest_bytes"]),
            f"{row['manifest_bytes'] / row['stored_tensors']:.0f}",
            size(row["memory_bytes"]),
            f"{row['memory_bytes'] / row['stored_tensors'] / row['in_flight']:.0f}",
        ]
        for row in rows
    ]
    return Report(
        name="tensors",
        title="Cost of a save by the number of tensors",
        about=f"Medians of {options.rounds}; tensors of {WIDTH} numbers, AdamW.",
        tables=[
            Table("Parts, ms of their thread's processor time", ["tensors", *PARTS, "capture to encode"], parts),
            Table(
                f"Whole saves, ms of wall time; memory with {options.in_flight} in flight",
                [
                    "tensors",
                    *WHOLE,
                    "manifest",
                    "bytes a tensor",
                    "memory beyond the first save's",
                    "bytes a tensor and save in flight",
                ],
                whole,
            ),
        ],
        rows=rows,
        notes=[
            "the capture runs in the training loop, and everything after it in the background; the results of the "
            "first capture and the first layout are reused while names, dtypes and shapes stay the same",
            f"memory: the largest of the samples that are taken every {1000 * SAMPLE_SECONDS:.0f} ms during "
            f"{3 * options.in_flight} saves one after the other, minus the memory of the process after its first save",
        ],
        figures={"seconds": lambda: _draw(rows)},
    )


def _warm_milliseconds(row: Row) -> float:
    return 1000 * sum(statistics.median(row[name]) for name in WARM)


def _draw(rows: Sequence[Row]) -> Figure:
    from .figures import panels, style

    figure, (one,) = panels(1, wide=4.6, high=3.4)
    counts = [row["tensors"] for row in rows]
    for at, name in enumerate(("save waits", "save durable")):
        one.plot(counts, [1000 * statistics.median(row[name]) for row in rows], **style(name, at))
    one.plot(counts, [_warm_milliseconds(row) for row in rows], **style("capture to encode", 2))
    one.set_xscale("log")
    one.set_yscale("log")
    one.set_xlabel("tensors")
    one.set_ylabel("ms")
    one.legend()
    return figure

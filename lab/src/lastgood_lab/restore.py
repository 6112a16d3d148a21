"""`lastgood bench restore`: a restore of one large state by lastgood, a raw direct read, torch.load and dcp.load.

Each round measures every contender once, in an order that rotates. Before each, all files are synced and dropped from
the page cache. The raw read reads the tensor file into one reused buffer per thread and checks nothing. Each of the
other contenders ends with the state in the live tensors, except the plain torch.load.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp

import lastgood
from lastgood.units import size

from .contenders import CHUNK_BYTES, warm_memory
from .durable import of_contender, ratios
from .journal import Journal, rotated
from .models import Workload
from .report import Progress, Report, Table, hardware, spread
from .usage import working_place

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RAW_THREADS = (1, 2, 3, 4)
RAW = [f"raw direct read, {count} thread{'s'[: count - 1]}" for count in RAW_THREADS]
OURS, FRESH, SLOTS = "lastgood, in place", "lastgood, optimizer state new", "lastgood, slots, in place"
Row = Mapping[str, Any]
Restore = Callable[[], float]
"""Restores once and returns the seconds."""


@dataclass(frozen=True)
class Options:
    """The state is GPT-2 124M with AdamW; `scale` is the share of its parameters."""

    out: Path
    place: Path | None = None
    scale: float = 1.0
    rounds: int = 5


def run(options: Options, progress: Progress) -> list[Row]:
    """Take the measurements that are missing in the journal in `out`; returns all rows, also those of earlier runs."""
    journal = Journal(options.out / "restore.journal.jsonl", {"hardware": hardware()})
    names = [*RAW, OURS, FRESH, SLOTS, *_PEERS]
    restores: dict[str, Restore] = {}
    rows: list[Row] = []
    total = 0
    with contextlib.ExitStack() as stack:
        for number in range(options.rounds):
            for name in rotated(names, number):
                key = {"scale": options.scale, "contender": name, "round": number}
                known = journal.get(**key)
                if known is None:
                    if not restores:
                        place = stack.enter_context(working_place(options))
                        restores, total = _prepared(Workload("gpt2-124m", options.scale, 0.03), place)
                    drop_from_cache(place)
                    known = journal.put({"seconds": restores[name](), "bytes": total}, **key)
                    progress(f"round {number + 1}/{options.rounds}  {name:40s} {known['seconds']:6.3f} s")
                rows.append({**key, **known})
    return rows


def _prepared(trained: Workload, place: Path) -> tuple[dict[str, Restore], int]:
    """Save the state for every contender; returns the function with which each restores it, and the state's bytes."""
    state = {"model": trained.module, "optimizer": trained.optimizer}
    live = {"model": trained.module.state_dict(), "optimizer": trained.optimizer.state_dict()}
    run, slots = str(place / "run"), f"slots://{place.resolve()}/slots"
    for target in (run, slots):
        with lastgood.Checkpointer(target, state, in_flight=1) as ckpt:
            total = ckpt.save(1).result().bytes
    (blob,) = place.glob("run/gen/*/*.safetensors")
    torch.save(live, place / "state.pt")
    dcp.save(live, storage_writer=dcp.FileSystemWriter(str(place / "dcp")), no_dist=True)

    def ours(target: str, optimizer: Callable[[], torch.optim.Optimizer] = lambda: trained.optimizer) -> Restore:
        """Restore with a new Checkpointer, and so with new buffers, each time; only the restore is timed."""

        def restore() -> float:
            with lastgood.Checkpointer(target, {**state, "optimizer": optimizer()}, in_flight=1) as ckpt:
                return _timed(ckpt.restore)

        return restore

    restores = raw_reads(blob)
    restores |= {OURS: ours(run), FRESH: ours(run, lambda: torch.optim.AdamW(trained.module.parameters()))}
    restores |= {SLOTS: ours(slots)}
    return restores | {
        name: lambda peer=peer: _timed(lambda: peer(place, live)) for name, peer in _PEERS.items()
    }, total


def raw_reads(path: Path) -> dict[str, Restore]:
    """The contenders RAW: each reads a file of the disk once, into memory that is warm."""
    buffer = warm_memory(max(RAW_THREADS))

    def raw(threads: int) -> Restore:
        return lambda: _timed(lambda: _read_direct(path, buffer, threads))

    return {name: raw(count) for name, count in zip(RAW, RAW_THREADS, strict=True)}


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def drop_from_cache(root: Path) -> None:
    os.sync()
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _read_direct(path: Path, buffer: memoryview, threads: int) -> None:
    length = path.stat().st_size
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def get(thread: int) -> None:
        mine = buffer[thread * CHUNK_BYTES :][:CHUNK_BYTES]
        for offset in range(thread * CHUNK_BYTES, length, threads * CHUNK_BYTES):
            assert os.preadv(fd, [mine], offset) == min(CHUNK_BYTES, length - offset)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(get, range(threads)))
    os.close(fd)


# ---- peers ---------------------------------------------------------------------------------------------------


def _torch_load(place: Path, live: Mapping[str, Any]) -> None:
    torch.load(place / "state.pt", weights_only=True)


def _torch_load_in_place(place: Path, live: Mapping[str, Any]) -> None:
    _copy(torch.load(place / "state.pt", weights_only=True), live)


def _torch_load_mapped(place: Path, live: Mapping[str, Any]) -> None:
    _copy(torch.load(place / "state.pt", weights_only=True, mmap=True), live)


def _dcp_load(place: Path, live: Mapping[str, Any]) -> None:
    dcp.load(dict(live), storage_reader=dcp.FileSystemReader(str(place / "dcp")), no_dist=True)


def _copy(found: object, live: object) -> None:
    with torch.no_grad():
        for mine, theirs in zip(_tensors_of(live), _tensors_of(found), strict=True):
            mine.copy_(theirs)


def _tensors_of(state: object) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    inner = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return [one for part in inner for one in _tensors_of(part)]


_PEERS: dict[str, Callable[[Path, Mapping[str, Any]], None]] = {
    "torch.load": _torch_load,
    "torch.load + copy in place": _torch_load_in_place,
    "torch.load(mmap=True) + copy in place": _torch_load_mapped,
    "dcp.load, in place": _dcp_load,
}


# ---- the report ----------------------------------------------------------------------------------------------


def report(rows: Sequence[Row], options: Options) -> Report:
    names, total = [*RAW, OURS, FRESH, SLOTS, *_PEERS], rows[0]["bytes"]
    lines = [[name, spread(_of(rows, name)), f"{total / 1e9 / _middle(rows, name):.2f}"] for name in names]
    raw = min(RAW, key=lambda name: _middle(rows, name))
    notes = [
        f"{name} / {raw}, round by round: {spread(ratios(rows, raw, name, 'seconds'), '.2f')}"
        for name in (OURS, FRESH, SLOTS)
    ]
    notes += [f"{OURS} / {name}: {spread(ratios(rows, name, OURS, 'seconds'), '.2f')}" for name in _PEERS]
    return Report(
        name="restore",
        title=f"Restore, {total / 1e9:.2f} GB GPT-2-size AdamW state",
        about=(
            f"Medians of {options.rounds} interleaved rounds, (least-most); the page cache is dropped before each "
            "restore; lastgood's are verified. Relative speeds are ratios of the times within one round."
        ),
        tables=[Table("", ["contender", "s", "GB/s"], lines)],
        rows=rows,
        notes=notes,
        figures={"seconds": lambda: _draw(rows, names, total)},
    )


def _of(rows: Sequence[Row], name: str) -> list[float]:
    return [row["seconds"] for row in of_contender(rows, name)]


def _middle(rows: Sequence[Row], name: str) -> float:
    return statistics.median(_of(rows, name))


def _draw(rows: Sequence[Row], names: Sequence[str], total: int) -> Figure:
    from .figures import panels

    figure, (one,) = panels(1, wide=6.5, high=0.32 * len(names) + 1.0)
    places = range(len(names))
    ours = (OURS, FRESH, SLOTS)
    colors = ["#56B4E9" if name in RAW else "#000000" if name in ours else "#D9D9D9" for name in names]
    one.barh(places, [_middle(rows, name) for name in names], color=colors)
    for place, name in zip(places, names, strict=True):
        one.plot([min(_of(rows, name)), max(_of(rows, name))], [place, place], color="#E69F00", linewidth=1)
    one.set_yticks(list(places), names)
    one.invert_yaxis()
    one.grid(axis="y", visible=False)
    one.set_xlabel(f"seconds for {size(total)} (line: least to most)")
    return figure

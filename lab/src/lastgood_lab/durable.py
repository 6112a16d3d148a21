"""Durable write of one large state: this project, a raw direct write of the same bytes, and the peers that are there.

Each round does every contender once, in an order that rotates, so that a drift of the machine meets all of them. Three
times are taken of a save: until the loop may go on; until the contender says it is done, as it is shipped; and until
the bytes and names really are durable, with the fsyncs that it leaves out added here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import mmap
import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import lastgood
from lastgood.units import size

from .interval import working_place
from .journal import Journal
from .models import Trained, Workload
from .report import Report, Say, Table, hardware, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHUNK_BYTES = 8 << 20
RAW_CHUNKS, RAW_THREADS = 8, (1, 2, 3, 4)
RAW, OVERWRITE = "raw direct write", "raw direct overwrite"
OURS, SLOTS, MAPPED = "lastgood", "lastgood, slots", "lastgood, slots, mmap"
IN_A_ROW, SLOTS_IN_A_ROW = "lastgood, in a row", "lastgood, slots, in a row"
ROW_SAVES = 8
"""saves in a row, each begun when the one before is durable: verification and deletion come between or beside them"""
Row = Mapping[str, Any]


class Timing(NamedTuple):
    """Seconds from the call: until the loop may go on, until it says it is done, until it is durable."""

    waits: float
    done: float
    durable: float


@dataclass(frozen=True)
class Options:
    """What to measure. `contenders`: names of CONTENDERS; the state is GPT-2 124M with AdamW, times `scale`."""

    out: Path
    place: Path | None = None
    contenders: Sequence[str] = ()
    scale: float = 1.0
    rounds: int = 5
    device: str = "cpu"

    def names(self) -> list[str]:
        """What was asked for; else whatever can run here."""
        return list(self.contenders) or [name for name, one in CONTENDERS.items() if one.here()]


class Bench:
    """What a contender works on: what is trained, its state_dicts, a place of its own."""

    def __init__(self, trained: Trained, place: Path) -> None:
        self.trained, self.place = trained, place
        self.bytes = sum(one.numel() * one.element_size() for one in trained.tensors().values())
        self.step = 0

    def plain(self) -> dict[str, Any]:
        """The state as every peer takes it."""
        return {"model": self.trained.module.state_dict(), "optimizer": self.trained.optimizer.state_dict()}

    def fresh(self) -> Path:
        """A name that was not used before."""
        self.step += 1
        return self.place / f"save-{self.step:06d}"


Save = Callable[[], Timing]


class Contender(NamedTuple):
    """`made` opens it and returns how to save once; what it leaves behind, each save clears away off the clock."""

    made: Callable[[Bench, contextlib.ExitStack], Save]
    needs: str = ""
    """a package that must be importable"""

    def here(self) -> bool:
        """Whether it can run on this machine."""
        return not self.needs or importlib.util.find_spec(self.needs) is not None


# ---- raw -------------------------------------------------------------------------------------------------------


def _raw(bench: Bench, stack: contextlib.ExitStack) -> Save:
    """The same bytes from warm, aligned memory: O_DIRECT into a preallocated new file; fsync of it and its folder."""
    view = warm_memory(RAW_CHUNKS)

    def write(threads: int) -> float:
        path, begun = bench.fresh(), time.perf_counter()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.posix_fallocate(fd, 0, bench.bytes)
        _put_all(fd, view, bench.bytes, threads)
        os.close(fd)
        _sync(bench.place)
        seconds = time.perf_counter() - begun
        path.unlink()
        return seconds

    return _with_the_best_count(write)


def _raw_overwrite(bench: Bench, stack: contextlib.ExitStack) -> Save:
    """The same bytes over a file that is there and was written before: no allocation, one flush."""
    view, path = warm_memory(RAW_CHUNKS), bench.fresh()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    stack.callback(os.close, fd)
    _put_all(fd, view, bench.bytes, 1)

    def write(threads: int) -> float:
        begun = time.perf_counter()
        _put_all(fd, view, bench.bytes, threads)
        return time.perf_counter() - begun

    return _with_the_best_count(write)


def _with_the_best_count(write: Callable[[int], float]) -> Save:
    """Raw is to be as fast as it can be: the number of threads whose better of two tries was the best."""
    threads = min(RAW_THREADS, key=lambda count: min(write(count), write(count)))

    def save() -> Timing:
        seconds = write(threads)
        return Timing(seconds, seconds, seconds)

    return save


def warm_memory(chunks: int) -> memoryview:
    """Touched before, and in huge pages where they can be had: direct I/O into small ones is slower."""
    memory = mmap.mmap(-1, chunks * CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory[:] = os.urandom(len(memory))
    return memoryview(memory)


def _put_all(fd: int, view: memoryview, total: int, threads: int) -> None:
    def put(offset: int) -> None:
        at = offset % len(view)
        os.pwrite(fd, view[at : at + CHUNK_BYTES], offset)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(put, range(0, total, CHUNK_BYTES)))
    os.fsync(fd)


# ---- ours ------------------------------------------------------------------------------------------------------


def _ours(place: str, in_a_row: int = 1, **options: Any) -> Callable[[Bench, contextlib.ExitStack], Save]:
    def made(bench: Bench, stack: contextlib.ExitStack) -> Save:
        state = {"model": bench.trained.module, "optimizer": bench.trained.optimizer}
        target = place.format(bench.place.resolve() / "run")
        ckpt = stack.enter_context(
            lastgood.Checkpointer(
                target,
                state,
                cadence=lastgood.Every(steps=1),
                retention=lastgood.Keep(last=1),
                on_error="raise",
                **options,
            )
        )
        ckpt.restore()

        def one() -> Timing:
            bench.step += 1
            begun = time.perf_counter()
            handle = ckpt.step(bench.step)
            waits = time.perf_counter() - begun
            assert handle is not None
            handle.result()
            durable = time.perf_counter() - begun
            return Timing(waits, durable, durable)

        def save() -> Timing:
            each = [one() for _ in range(in_a_row)]
            ckpt.wait()  # verification and deletion are not the next contender's burden
            return Timing(*map(statistics.mean, zip(*each, strict=True)))

        return save

    return made


# ---- torch -----------------------------------------------------------------------------------------------------


def _torch_save(bench: Bench, stack: contextlib.ExitStack) -> Save:
    """torch.save; to make it durable: fsync, rename, fsync of the directory."""

    def save() -> Timing:
        path, begun = bench.fresh(), time.perf_counter()
        staged = path.with_suffix(".tmp")
        torch.save(bench.plain(), staged)
        done = time.perf_counter() - begun
        _sync(staged)
        os.rename(staged, path)
        _sync(bench.place)
        durable = time.perf_counter() - begun
        path.unlink()
        return Timing(done, done, durable)

    return save


def _dcp(threads: int) -> Callable[[Bench, contextlib.ExitStack], Save]:
    """dcp.save with its default sync_files=True; missing are the metadata's and the directory's fsync."""

    def made(bench: Bench, stack: contextlib.ExitStack) -> Save:
        def write(path: Path) -> None:
            writer = dcp.FileSystemWriter(str(path), thread_count=threads)
            dcp.save(bench.plain(), storage_writer=writer, no_dist=True)

        return _folder_save(bench, write)

    return made


def _dcp_async(kind: AsyncCheckpointerType) -> Callable[[Bench, contextlib.ExitStack], Save]:
    def made(bench: Bench, stack: contextlib.ExitStack) -> Save:
        process = kind is AsyncCheckpointerType.PROCESS
        if process and not dist.is_initialized():
            store = dist.FileStore(str(bench.place / "store"), 1)
            dist.init_process_group("cpu:gloo", store=store, rank=0, world_size=1)
            stack.callback(dist.destroy_process_group)

        def write(path: Path) -> Future[Any]:
            writer = dcp.FileSystemWriter(str(path), thread_count=4)
            answer = dcp.async_save(
                bench.plain(), storage_writer=writer, async_checkpointer_type=kind, no_dist=not process
            )
            return answer if isinstance(answer, Future) else answer.upload_completion

        return _folder_save(bench, write)

    return made


def _folder_save(bench: Bench, write: Callable[[Path], Any]) -> Save:
    """Time a peer that makes a folder; an asynchronous one returns a future."""

    def save() -> Timing:
        path, begun = bench.fresh(), time.perf_counter()
        answer = write(path)
        waits = time.perf_counter() - begun
        if hasattr(answer, "result"):
            answer.result()
        elif hasattr(answer, "wait"):
            answer.wait()
        done = time.perf_counter() - begun
        sync_tree(path)
        durable = time.perf_counter() - begun
        shutil.rmtree(path)
        return Timing(waits, done, durable)

    return save


# ---- packages that may be installed ----------------------------------------------------------------------------


def _torch_checkpointing(bench: Bench, stack: contextlib.ExitStack) -> Save:
    """Without its direct I/O, with which version 0.1.1 fails on ext4 (EINVAL at the unaligned tail)."""
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = CheckpointManager(CheckpointManager.Config(storage_config=storage))
    stack.callback(manager.close)
    return _folder_save(bench, lambda path: manager.save(str(path), bench.plain()))


def _torchsnapshot(bench: Bench, stack: contextlib.ExitStack) -> Save:
    """It aliases live tensors of 128 MiB and more: fast, and no snapshot of what is trained on meanwhile."""
    from torchsnapshot import Snapshot, StateDict

    return _folder_save(bench, lambda path: Snapshot.async_take(str(path), {"state": StateDict(**bench.plain())}))


def _moonclip(bench: Bench, stack: contextlib.ExitStack) -> Save:
    """Its flush() syncs what it wrote."""
    from moonclip import CheckpointManager

    manager = CheckpointManager(str(bench.place / "moonclip"), max_full_snapshots=1)

    def save() -> Timing:
        bench.step += 1
        begun = time.perf_counter()
        manager.save(bench.step, model=bench.trained.module, optimizer=bench.trained.optimizer)
        waits = time.perf_counter() - begun
        manager.flush()
        done = time.perf_counter() - begun
        return Timing(waits, done, done)

    return save


def _orbax(bench: Bench, stack: contextlib.ExitStack) -> Save:
    import orbax.checkpoint as ocp

    checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
    stack.callback(checkpointer.close)

    class Finished:
        """What tells when the last save is done."""

        wait = staticmethod(checkpointer.wait_until_finished)

    def write(path: Path) -> type[Finished]:
        tree = {name: one.cpu().numpy() for name, one in bench.trained.tensors().items()}
        checkpointer.save(path.resolve(), args=ocp.args.PyTreeSave(tree))
        return Finished

    return _folder_save(bench, write)


CONTENDERS: dict[str, Contender] = {
    RAW: Contender(_raw),
    OVERWRITE: Contender(_raw_overwrite),
    OURS: Contender(_ours("{}")),
    SLOTS: Contender(_ours("slots://{}")),
    MAPPED: Contender(_ours("slots://{}", persist="mmap")),
    IN_A_ROW: Contender(_ours("{}", ROW_SAVES)),
    SLOTS_IN_A_ROW: Contender(_ours("slots://{}", ROW_SAVES)),
    "torch.save": Contender(_torch_save),
    "DCP, 1 thread": Contender(_dcp(1)),
    "DCP, 4 threads": Contender(_dcp(4)),
    "DCP async, thread": Contender(_dcp_async(AsyncCheckpointerType.THREAD)),
    "DCP async, process": Contender(_dcp_async(AsyncCheckpointerType.PROCESS)),
    "torch_checkpointing": Contender(_torch_checkpointing, "torch_checkpointing"),
    "torchsnapshot": Contender(_torchsnapshot, "torchsnapshot"),
    "moonclip": Contender(_moonclip, "moonclip"),
    "Orbax": Contender(_orbax, "orbax"),
}


# ---- the bench -------------------------------------------------------------------------------------------------


def run(options: Options, say: Say) -> list[Row]:
    """Every measurement, those of an earlier run included; the journal in `out` keeps them."""
    journal = Journal(options.out / "durable.journal.jsonl", {"hardware": hardware()})
    common = {"scale": options.scale, "device": options.device}
    names = options.names()
    rows: list[Row] = []
    saves: dict[str, Save] = {}
    bench: Bench | None = None
    with contextlib.ExitStack() as stack:
        for number in range(options.rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                key = {**common, "contender": name, "round": number}
                known = journal.get(**key)
                if known is None:
                    if bench is None:
                        place = stack.enter_context(working_place(options))
                        bench = Bench(Workload("gpt2-124m", options.scale, 0.03, options.device), place)
                    if name not in saves:
                        mine = Bench(bench.trained, bench.place / str(len(saves)))
                        mine.place.mkdir()
                        saves[name] = CONTENDERS[name].made(mine, stack)
                        saves[name]()  # the first save touches staging memory for the first time
                    bench.trained.step(lambda: None)  # every save finds another state: some peers write differences
                    os.sync()
                    known = journal.put({**saves[name]()._asdict(), "bytes": bench.bytes}, **key)
                    say(f"round {number + 1}/{options.rounds}  {name:22s} {_told(known)}")
                rows.append({**key, **known})
    return rows


def _told(found: Row) -> str:
    return f"waits {found['waits']:6.3f} s, done {found['done']:6.3f} s, durable {found['durable']:6.3f} s"


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(root: Path) -> None:
    """fsync every file and directory below root, and the directory above it."""
    for folder, _, files in os.walk(root):
        for name in files:
            _sync(Path(folder, name))
        _sync(Path(folder))
    _sync(root.parent)


# ---- the report ------------------------------------------------------------------------------------------------


def report(rows: Sequence[Row], options: Options) -> Report:
    names = [name for name in CONTENDERS if any(row["contender"] == name for row in rows)]
    total = rows[0]["bytes"]
    lines = []
    for name in names:
        mine = of_contender(rows, name)
        lines.append(
            [
                name,
                *(spread([row[one] for row in mine]) for one in Timing._fields),
                f"{total / 1e9 / statistics.median(row['durable'] for row in mine):.2f}",
                spread(ratios(rows, RAW, name, "durable"), ".2f"),
            ]
        )
    notes = ["speeds beside another's are ratios of one round's times, (least-most) over the rounds"]
    if "torchsnapshot" in names:
        notes.append("torchsnapshot does not copy tensors of 128 MiB and more: training may write into its file")
    if {OVERWRITE, SLOTS} <= set(names):
        notes.insert(
            0, f"{SLOTS} / {OVERWRITE}, round by round: {spread(ratios(rows, OVERWRITE, SLOTS, 'durable'), '.2f')}"
        )
    peers = [name for name in names if name not in (RAW, OVERWRITE, OURS, SLOTS, MAPPED, IN_A_ROW, SLOTS_IN_A_ROW)]
    if peers and OURS in names:
        best = min(peers, key=lambda name: statistics.median(row["durable"] for row in of_contender(rows, name)))
        times = spread(ratios(rows, best, OURS, "durable"), ".2f")
        notes.insert(0, f"lastgood / best durable peer ({best}), round by round: {times}")
    return Report(
        name="durable" if options.device == "cpu" else "durable-gpu",
        title=f"Durable write, {total / 1e9:.2f} GB GPT-2-size AdamW state",
        about=f"Medians of {options.rounds} interleaved rounds, (least-most).",
        tables=[
            Table(
                "",
                ["contender", "caller waits, s", "done as shipped, s", "durable, s", "durable GB/s", "speed / raw"],
                lines,
            )
        ],
        rows=rows,
        notes=notes,
        figures={"seconds": lambda: _draw(rows, names, total)},
    )


def of_contender(rows: Sequence[Row], name: str) -> list[Row]:
    return sorted((row for row in rows if row["contender"] == name), key=lambda row: row["round"])


def ratios(rows: Sequence[Row], theirs: str, mine: str, value: str) -> list[float]:
    """Round by round, how many times as fast `mine` is as `theirs`."""
    pairs = zip(of_contender(rows, theirs), of_contender(rows, mine), strict=False)
    return [one[value] / two[value] for one, two in pairs]


def _draw(rows: Sequence[Row], names: Sequence[str], total: int) -> Figure:
    from .figures import legend_below, panels

    figure, (one,) = panels(1, wide=6.5, high=0.32 * len(names) + 1.0)
    places = range(len(names))
    middles = {
        part: [statistics.median(row[part] for row in of_contender(rows, name)) for name in names]
        for part in Timing._fields
    }
    one.barh(places, middles["durable"], color="#D9D9D9", label="+ missing fsyncs")
    one.barh(places, middles["done"], color="#56B4E9", label="done as shipped")
    one.barh(places, middles["waits"], color="#D55E00", label="caller waits")
    durable = [[row["durable"] for row in of_contender(rows, name)] for name in names]
    for place, values in zip(places, durable, strict=True):
        one.plot([min(values), max(values)], [place, place], color="#333333", linewidth=1)
    one.set_yticks(list(places), names)
    one.invert_yaxis()
    one.grid(axis="y", visible=False)
    one.set_xlabel(f"seconds for {size(total)} (line: least to most)")
    legend_below(figure, one)
    return figure

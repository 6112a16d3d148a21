"""The contenders of `lastgood bench durable`: lastgood, raw direct writes, and other checkpointing packages.

Each contender is opened once with a directory of its own, and returns a function that makes and times one save.
"""

from __future__ import annotations

import contextlib
import importlib.util
import mmap
import os
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import lastgood

from .models import Trained

if TYPE_CHECKING:
    pass

CHUNK_BYTES = 8 << 20
RAW_CHUNKS, RAW_THREADS = 8, (1, 2, 3, 4)
RAW, OVERWRITE = "raw direct write", "raw direct overwrite"
OURS, SLOTS, MAPPED = "lastgood", "lastgood, slots", "lastgood, slots, mmap"
IN_A_ROW, SLOTS_IN_A_ROW = "lastgood, in a row", "lastgood, slots, in a row"
ROW_SAVES = 8
"""The number of saves in a row. Each begins when the previous one is durable, so that verification and deletion happen
between or during them."""


class Timing(NamedTuple):
    """Seconds from the call of a save until the loop may continue, the save reports completion, and it is durable."""

    waits: float
    done: float
    durable: float


class Bench:
    """The model and optimizer that a contender saves, and the directory into which it saves them."""

    def __init__(self, trained: Trained, place: Path) -> None:
        self.trained, self.place = trained, place
        self.bytes = sum(one.numel() * one.element_size() for one in trained.tensors().values())
        self.step = 0

    def plain(self) -> dict[str, Any]:
        """The state in the form that the other packages accept."""
        return {"model": self.trained.module.state_dict(), "optimizer": self.trained.optimizer.state_dict()}

    def fresh(self) -> Path:
        """Return a path that was not used before."""
        self.step += 1
        return self.place / f"save-{self.step:06d}"


Save = Callable[[], Timing]


class Contender(NamedTuple):
    """A way to save. `made` opens it and returns a function that saves once.

    Each save deletes its files after its times were taken.
    """

    made: Callable[[Bench, contextlib.ExitStack], Save]
    needs: str = ""
    """a package that must be installed, or empty"""

    def available(self) -> bool:
        """Whether the package that it needs is installed."""
        return not self.needs or importlib.util.find_spec(self.needs) is not None


def _raw(bench: Bench, stack: contextlib.ExitStack) -> Save:
    """Write as many bytes as the state has from warm, aligned memory, with O_DIRECT into a new preallocated file.

    The file and its directory are synced.
    """
    view = warm_memory(RAW_CHUNKS)

    def write(threads: int) -> float:
        path, begun = bench.fresh(), time.perf_counter()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.posix_fallocate(fd, 0, bench.bytes)
        _put_all(fd, view, bench.bytes, threads)
        os.close(fd)
        sync_path(bench.place)
        seconds = time.perf_counter() - begun
        path.unlink()
        return seconds

    return _with_the_best_count(write)


def _raw_overwrite(bench: Bench, stack: contextlib.ExitStack) -> Save:
    """Write as many bytes as the state has over an existing file: no allocation and one fsync."""
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
    """Save with the fastest number of threads, which is found by writing twice with each and taking the better time."""
    threads = min(RAW_THREADS, key=lambda count: min(write(count), write(count)))

    def save() -> Timing:
        seconds = write(threads)
        return Timing(seconds, seconds, seconds)

    return save


def warm_memory(chunks: int) -> memoryview:
    """Allocate memory in huge pages if possible, because direct I/O from small ones is slower, and fault it in."""
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
            ckpt.wait()  # verification and deletion end before the next contender begins
            return Timing(*map(statistics.mean, zip(*each, strict=True)))

        return save

    return made


def _torch_save(bench: Bench, stack: contextlib.ExitStack) -> Save:
    """torch.save; made durable by an fsync of the file, a rename and an fsync of the directory."""

    def save() -> Timing:
        path, begun = bench.fresh(), time.perf_counter()
        staged = path.with_suffix(".tmp")
        torch.save(bench.plain(), staged)
        done = time.perf_counter() - begun
        sync_path(staged)
        os.rename(staged, path)
        sync_path(bench.place)
        durable = time.perf_counter() - begun
        path.unlink()
        return Timing(done, done, durable)

    return save


def _dcp(threads: int) -> Callable[[Bench, contextlib.ExitStack], Save]:
    """dcp.save with its default sync_files=True, which leaves out the fsync of the metadata and of the directory."""

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
    """Time a contender that creates a folder. An asynchronous `write` returns a future, or an object with `wait`."""

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


def _torch_checkpointing(bench: Bench, stack: contextlib.ExitStack) -> Save:
    """torch_checkpointing without direct I/O, with which version 0.1.1 fails on ext4 (EINVAL at the unaligned end)."""
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = CheckpointManager(CheckpointManager.Config(storage_config=storage))
    stack.callback(manager.close)
    return _folder_save(bench, lambda path: manager.save(str(path), bench.plain()))


def _torchsnapshot(bench: Bench, stack: contextlib.ExitStack) -> Save:
    """torchsnapshot, which does not copy tensors of 128 MiB and more: fast, but no snapshot if training continues."""
    from torchsnapshot import Snapshot, StateDict

    return _folder_save(bench, lambda path: Snapshot.async_take(str(path), {"state": StateDict(**bench.plain())}))


def _moonclip(bench: Bench, stack: contextlib.ExitStack) -> Save:
    """moonclip, whose flush() syncs the files that it wrote."""
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
        """Waits until the last save is completed."""

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


def sync_path(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(root: Path) -> None:
    """fsync every file and directory below root, and the directory above it."""
    for folder, _, files in os.walk(root):
        for name in files:
            sync_path(Path(folder, name))
        sync_path(Path(folder))
    sync_path(root.parent)

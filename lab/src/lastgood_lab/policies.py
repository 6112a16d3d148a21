"""Checkpointing policies side by side: the same tensors, arena, copy, slots and direct I/O; only the policy differs.

Each is the strongest honest form of what its paper describes; none takes digests, reads back, or keeps history,
because the originals do not.

    policy       who waits for what                                    host memory   storage      recovery at most
    traditional  the loop stops: copy, write, flush, point             a few chunks  2 m          l + f t
    GPM          the loop stops: copy into a mapped file, msync        none          2 m          l + f t
    CheckFreq    copy beside the next forward/backward, then write     m             2 m          l + 2 f t
                 behind; one in flight
    PCcheck      chunks are written while others are copied; N in      M             (N + 1) m    l + f t
                 flight, the newest complete one is pointed at                                    + t min(N f, Tw/t)
    Gemini       as CheckFreq, but to the memory of a peer process     m             none; 2 m    l + 2 f t
                                                                                     of the peer
    DCP async    torch.distributed.checkpoint.async_save, one in       m             2 m          l + 2 f t
                 flight

m: bytes of the state, f: interval in steps, t: seconds of a step, Tw: seconds of a save, l: seconds of loading, N:
saves in flight, M: bound of the arena (PCcheck, ASPLOS'25, section 4.2 and table 1; CheckFreq, FAST'21; GPM, ASPLOS'22;
Gemini, SOSP'23). As in the originals the copy runs beside forward and backward, and only the *update* waits for it; so
does the wait for a free slot. On the GPU the arena is pinned and copied into on a stream of its own.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import lastgood
from lastgood.policy import tune

from .chunked_copy import Snapshot, lease_chunk, load_newest, open_arena, write_chunk
from .models import Workload
from .policy import Policy, SaveTime, Settings
from .stores import MappedFile, Peer, SlotFile, Store


class Stopping(Policy):
    """Stop the loop until all of it is durable in the older of two slots, and point at it."""

    def __init__(self, snapshot: Snapshot, store: Store, settings: Settings) -> None:
        super().__init__()
        self._snapshot, self._store = snapshot, store
        self._arena_bytes = 2 * settings.writers * settings.chunk_bytes
        self._writers = ThreadPoolExecutor(settings.writers)
        self._number = 0

    @abstractmethod
    def _write(self, slot: int) -> None:
        """Copy the state and write it."""

    @abstractmethod
    def _read(self) -> int: ...

    def save(self, step: int) -> None:
        begun, slot = time.perf_counter(), self._number % 2
        self._number += 1
        self._write(slot)
        self._store.flush()
        self._store.point(self._number, slot, step)
        self.saved.append(SaveTime(step, time.perf_counter() - begun))

    def wait(self) -> None: ...

    def load(self) -> int:
        step = self._read()
        newest = self._store.newest()
        self._number = newest.number if newest else 0
        return step

    def close(self) -> None:
        super().close()
        self._writers.shutdown()
        self._store.close()


class Traditional(Stopping):
    """Copies and writes of chunks overlap."""

    name = "traditional"

    def __init__(self, workload: Workload, place: Path, settings: Settings, _: Path | None) -> None:
        snapshot = Snapshot(workload, settings.chunk_bytes)
        super().__init__(snapshot, SlotFile(place / "slots", 2, snapshot.slot_bytes), settings)
        self._arena = open_arena(workload, self._arena_bytes, settings.chunk_bytes, self._held)

    def _write(self, slot: int) -> None:
        jobs = []
        for index in range(len(self._snapshot)):
            lease = lease_chunk(self._arena)
            self._snapshot.copy_out(index, lease.buffer, {})
            jobs.append(self._writers.submit(write_chunk, self._store, slot, lease, self._snapshot, index))
        for job in jobs:
            job.result()

    def _read(self) -> int:
        return load_newest(self._store, self._snapshot, self._arena, self._writers)


class Gpm(Stopping):
    """Copies into a mapped file with several threads, each chunk synced. No memory of its own."""

    name = "GPM"

    def __init__(self, workload: Workload, place: Path, settings: Settings, _: Path | None) -> None:
        snapshot = Snapshot(workload, settings.chunk_bytes)
        self._mapped = MappedFile(place / "slots", 2, snapshot.slot_bytes)
        super().__init__(snapshot, self._mapped, settings)
        self._workload = workload

    def _write(self, slot: int) -> None:
        def one(index: int) -> None:
            offset, length = index * self._snapshot.chunk_bytes, self._snapshot.padded(index)
            self._snapshot.copy_out(index, self._mapped.place(slot, offset, length), {})
            self._mapped.sync(slot, offset, length)

        list(self._writers.map(one, range(len(self._snapshot))))

    def _read(self) -> int:
        with ExitStack() as held:
            arena = open_arena(self._workload, self._arena_bytes, self._snapshot.chunk_bytes, held)
            return load_newest(self._store, self._snapshot, arena, self._writers)


class Overlapped(Policy):
    """Copies beside forward and backward; the update waits for the copy. N saves in flight on N + 1 slots.

    A complete save becomes the newest unless a later one was complete before it; its predecessor's slot, or its own, is
    free again. `pipelined`: chunks are written while others are copied, so that the arena may be smaller than the
    state; else the whole copy comes first.
    """

    def __init__(
        self,
        workload: Workload,
        settings: Settings,
        store: Store,
        snapshot: Snapshot,
        arena_bytes: int,
        *,
        in_flight: int,
        pipelined: bool,
    ) -> None:
        super().__init__()
        self.in_flight, self._pipelined = in_flight, pipelined
        self._snapshot, self._store = snapshot, store
        arena_bytes = max(arena_bytes, 2 * snapshot.chunk_bytes)
        self._arena = open_arena(workload, arena_bytes, snapshot.chunk_bytes, self._held)
        self._keepers = ThreadPoolExecutor(in_flight)
        self._writers = ThreadPoolExecutor(settings.writers * in_flight)  # p writers for each save
        self._changed = threading.Condition()
        self._free = list(range(in_flight + 1))
        self._number = 0
        self._newest: tuple[int, int] | None = None  # number, slot
        self._copied: Future[None] | None = None
        self._jobs: list[Future[None]] = []

    def save(self, step: int) -> None:
        self._number += 1
        for job in self._jobs:
            if job.done():
                job.result()  # raises the error of a save that failed
        self._jobs = [job for job in self._jobs if not job.done()]
        self._copied = Future()
        kept = self._snapshot.keep_volatile()
        begun = time.perf_counter()
        self._jobs.append(self._keepers.submit(self._one, self._number, step, kept, self._copied, begun))

    def fence(self) -> None:
        if self._copied is not None:
            self._copied.result()
            self._copied = None

    def wait(self) -> None:
        for job in self._jobs:
            job.result()
        self._jobs.clear()

    def load(self) -> int:
        step = load_newest(self._store, self._snapshot, self._arena, self._writers)
        newest = self._store.newest()
        if newest is not None:
            self._free = [slot for slot in range(self.in_flight + 1) if slot != newest.slot]
            self._number, self._newest = newest.number, (newest.number, newest.slot)
        return step

    def close(self) -> None:
        super().close()
        self._keepers.shutdown()
        self._writers.shutdown()
        self._store.close()

    def _one(self, number: int, step: int, kept: dict[int, torch.Tensor], copied: Future[None], begun: float) -> None:
        try:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._free))
                slot = self._free.pop()
            writes, held = [], []
            for index in range(len(self._snapshot)):
                lease = lease_chunk(self._arena)
                self._snapshot.copy_out(index, lease.buffer, kept)
                if self._pipelined:
                    writes.append(self._writers.submit(write_chunk, self._store, slot, lease, self._snapshot, index))
                else:
                    held.append(lease)
        except BaseException as error:
            copied.set_exception(error)
            raise
        copied.set_result(None)
        for index, lease in enumerate(held):
            writes.append(self._writers.submit(write_chunk, self._store, slot, lease, self._snapshot, index))
        wait(writes)
        for write in writes:
            write.result()
        self._store.flush()
        with self._changed:
            if self._newest is None or number > self._newest[0]:
                self._store.point(number, slot, step)
                if self._newest is not None:
                    self._free.append(self._newest[1])
                self._newest = (number, slot)
                self.saved.append(SaveTime(step, time.perf_counter() - begun))
            else:
                self._free.append(slot)  # a later save was complete before this one
            self._changed.notify_all()


class CheckFreq(Overlapped):
    """One in flight: the whole copy, then the write; the next copy waits for the write before it."""

    name = "CheckFreq"

    def __init__(self, workload: Workload, place: Path, settings: Settings, _: Path | None) -> None:
        snapshot = Snapshot(workload, settings.chunk_bytes)
        store = SlotFile(place / "slots", 2, snapshot.slot_bytes)
        whole = len(snapshot) * snapshot.chunk_bytes
        super().__init__(workload, settings, store, snapshot, whole, in_flight=1, pipelined=False)


class PCcheck(Overlapped):
    """N in flight on N + 1 slots, chunks through an arena of M bytes, p writers each, the newest complete one wins."""

    name = "PCcheck"

    def __init__(self, workload: Workload, place: Path, settings: Settings, _: Path | None) -> None:
        snapshot, in_flight = Snapshot(workload, settings.chunk_bytes), settings.in_flight
        store = SlotFile(place / "slots", in_flight + 1, snapshot.slot_bytes)
        arena_bytes = settings.memory_bytes or len(snapshot) * snapshot.chunk_bytes
        super().__init__(workload, settings, store, snapshot, arena_bytes, in_flight=in_flight, pipelined=True)


class Gemini(Overlapped):
    """One in flight, to the memory of a peer process. Survives this process, not the loss of power."""

    name = "Gemini"
    durable = False

    def __init__(self, workload: Workload, place: Path, settings: Settings, peer: Path | None) -> None:
        snapshot = Snapshot(workload, settings.chunk_bytes)
        self._peer = Peer(peer or place / "peer", snapshot.slot_bytes)
        whole = len(snapshot) * snapshot.chunk_bytes
        one = settings._replace(writers=1)  # a socket transfers one chunk at a time
        super().__init__(workload, one, self._peer, snapshot, whole, in_flight=1, pipelined=True)

    def processes(self) -> list[int]:
        return [self._peer.process.pid] if self._peer.process else []


class DcpAsync(Policy):
    """dcp.async_save in a thread, its files written by four and fsynced as it does by default; staging reuses memory.

    A save waits for the one before it; the newest finished one is kept while the next is written.
    """

    name = "DCP async"

    def __init__(self, workload: Workload, place: Path, settings: Settings, _: Path | None) -> None:
        super().__init__()
        self._workload, self._place = workload, place / "dcp"
        self._place.mkdir(exist_ok=True)
        cuda = workload.device.type == "cuda"
        options = StagingOptions(
            use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=cuda, use_non_blocking_copy=cuda
        )
        self._stager = DefaultStager(options)
        self._staged: Future[Any] | None = None
        self._done: Future[Any] | None = None

    def save(self, step: int) -> None:
        self.wait()
        begun = time.perf_counter()
        writer = dcp.FileSystemWriter(str(self._place / f"{step:012d}"), thread_count=4)
        answer = dcp.async_save(
            dict(self._workload.tensors()), storage_writer=writer, async_stager=self._stager, no_dist=True
        )
        staged, done = (
            (answer, answer) if isinstance(answer, Future) else (answer.staging_completion, answer.upload_completion)
        )
        self._staged = staged if staged is not done else None
        self._done = done
        done.add_done_callback(lambda _: self.saved.append(SaveTime(step, time.perf_counter() - begun)))

    def fence(self) -> None:
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def wait(self) -> None:
        if self._done is not None:
            self._done.result()
            self._done = None
            for old in self._finished()[:-1]:
                shutil.rmtree(self._place / old)

    def load(self) -> int:
        finished = self._finished()
        if not finished:
            return 0
        tensors = dict(self._workload.tensors())
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(str(self._place / finished[-1])), no_dist=True)
        return int(finished[-1])

    def close(self) -> None:
        super().close()
        self._stager.close()

    def _finished(self) -> list[str]:
        return sorted(one for one in os.listdir(self._place) if (self._place / one / ".metadata").exists())


class Ours(Policy):
    """This project as it comes: digests, a commit, verification, torn-snapshot check, retention of the newest."""

    def __init__(self, workload: Workload, place: Path, settings: Settings, _: Path | None, tier: str = "") -> None:
        super().__init__()
        state = {"model": workload.module, "optimizer": workload.optimizer}
        self.in_flight = settings.in_flight
        self.checkpointer = lastgood.Checkpointer(
            f"slots://{place.resolve()}/run" if tier == "slots" else str(place / "run"),
            state,
            cadence=lastgood.Every(steps=1),
            retention=lastgood.Keep(last=1),
            on_error="raise",
            in_flight=settings.in_flight,
            writers=settings.writers,
            chunk=settings.chunk_bytes,
            memory=settings.memory_bytes or None,
        )
        self._under_way: list[lastgood.Save] = []
        self._ready = False

    def save(self, step: int) -> None:
        if not self._ready:
            self.load()
        self._settle()
        save = self.checkpointer.step(step)
        assert save is not None
        self._under_way.append(save)

    def fence(self) -> None:
        self.checkpointer.fence()  # the optimizer's hook would call it; here the wait is timed as that of the others is

    def wait(self) -> None:
        self.checkpointer.wait()
        self._settle()

    def load(self) -> int:
        self._ready = True
        return self.checkpointer.restore().step

    def close(self) -> None:
        self.checkpointer.close()
        self._settle()

    def _settle(self) -> None:
        """Note what has become durable."""
        self.saved += [SaveTime(one.step, one.seconds) for one in self._under_way if one.durable()]
        self._under_way = [one for one in self._under_way if not one.durable() and not one.failed()]


class Directory(Ours):
    """A directory on a file system."""

    name = "lastgood"


class Slots(Ours):
    """Preallocated slots."""

    name = "lastgood-slots"

    def __init__(self, workload: Workload, place: Path, settings: Settings, peer: Path | None) -> None:
        super().__init__(workload, place, settings, peer, "slots")


POLICIES: dict[str, Callable[[Workload, Path, Settings, Path | None], Policy]] = {
    one.name: one for one in (Directory, Slots, PCcheck, CheckFreq, Gpm, Traditional, Gemini, DcpAsync)
}


def bound_seconds(
    name: str, interval: int, step_seconds: float, save_seconds: float, load_seconds: float, in_flight: int
) -> float:
    """The longest recovery: loading, and the steps that are done again (PCcheck, section 4.2)."""
    if name in ("traditional", "GPM"):
        return tune.stop_and_write_bound_seconds(load_seconds, interval, step_seconds)
    if name in ("CheckFreq", "Gemini", "DCP async"):
        return tune.one_in_flight_bound_seconds(load_seconds, interval, step_seconds)
    return tune.recovery_bound_seconds(load_seconds, interval, step_seconds, in_flight, save_seconds)

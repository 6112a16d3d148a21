"""Checkpointing policies from papers, which use the same arena, copies, slots and direct I/O; only the policy differs.

Each is the strongest fair implementation of what its paper describes. None of them computes digests, reads its files
back, or keeps older states, because the originals do not.

    policy       how a save proceeds                                   host memory   storage      recovery at most
    traditional  the loop stops: copy, write, flush, point             a few chunks  2 m          l + f t
    GPM          the loop stops: copy into a mapped file, msync        none          2 m          l + f t
    CheckFreq    copy during the next forward and backward, then       m             2 m          l + 2 f t
                 write in the background; one in flight
    PCcheck      chunks are written while others are copied; N in      M             (N + 1) m    l + f t
                 flight, of which the newest complete one counts                                  + t min(N f, Tw/t)
    Gemini       like CheckFreq, but into the memory of a peer         m             none; 2 m    l + 2 f t
                 process                                                             of the peer
    DCP async    torch.distributed.checkpoint.async_save, one in       m             2 m          l + 2 f t
                 flight

m: bytes of the state, f: interval in steps, t: seconds of a step, Tw: seconds of a save, l: seconds of loading, N:
saves in flight, M: limit of the arena (PCcheck, ASPLOS'25, section 4.2 and table 1; CheckFreq, FAST'21; GPM, ASPLOS'22;
Gemini, SOSP'23). As in the originals, the copy runs during forward and backward, and only the *update* waits for it;
the wait for a free slot is part of the copy. On a GPU the arena is pinned and filled on a stream of its own.
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
    """Stops the loop until the state is durable in the older of two slots and is recorded as the newest."""

    def __init__(self, snapshot: Snapshot, store: Store, settings: Settings) -> None:
        super().__init__()
        self._snapshot, self._store = snapshot, store
        self._arena_bytes = 2 * settings.writers * settings.chunk_bytes
        self._writers = ThreadPoolExecutor(settings.writers)
        self._number = 0

    @abstractmethod
    def _write(self, slot: int) -> None:
        """Copy the state and write it to a slot."""

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
    """Copies chunks and writes them with direct I/O; copies and writes of different chunks overlap."""

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
    """Copies into a mapped file with several threads and syncs each chunk. It needs no memory of its own."""

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
    """Copies during forward and backward; the update waits for the copy. There are N saves in flight and N + 1 slots.

    A completed save becomes the newest, and the slot of the previous newest one is free again. If a later save was
    completed first, the slot of this one is free instead. If `pipelined`, chunks are written while others are copied,
    so that the arena may be smaller than the state; else the whole state is copied first.
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
                self._free.append(slot)  # a later save was completed before this one
            self._changed.notify_all()


class CheckFreq(Overlapped):
    """One save in flight: it copies the whole state, then writes it; the next copy waits for that write."""

    name = "CheckFreq"

    def __init__(self, workload: Workload, place: Path, settings: Settings, _: Path | None) -> None:
        snapshot = Snapshot(workload, settings.chunk_bytes)
        store = SlotFile(place / "slots", 2, snapshot.slot_bytes)
        whole = len(snapshot) * snapshot.chunk_bytes
        super().__init__(workload, settings, store, snapshot, whole, in_flight=1, pipelined=False)


class PCcheck(Overlapped):
    """N saves in flight with N + 1 slots, whose chunks pass through one arena; each save has several writers."""

    name = "PCcheck"

    def __init__(self, workload: Workload, place: Path, settings: Settings, _: Path | None) -> None:
        snapshot, in_flight = Snapshot(workload, settings.chunk_bytes), settings.in_flight
        store = SlotFile(place / "slots", in_flight + 1, snapshot.slot_bytes)
        arena_bytes = settings.memory_bytes or len(snapshot) * snapshot.chunk_bytes
        super().__init__(workload, settings, store, snapshot, arena_bytes, in_flight=in_flight, pipelined=True)


class Gemini(Overlapped):
    """One save in flight, to the memory of a peer process. A save survives a kill of this process, not a power loss."""

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
    """dcp.async_save in a thread, with four writers, its default fsyncs, and staging memory that is reused.

    A save waits for the previous one to finish. The newest finished save is kept while the next one is written.
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
    """lastgood with its defaults: digests, commit, verification and the check for torn snapshots. It keeps one save."""

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
        self.checkpointer.fence()  # the optimizer's hook would call it; here it is timed like the other policies' waits

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
        """Record the saves that have become durable."""
        self.saved += [SaveTime(one.step, one.seconds) for one in self._under_way if one.durable()]
        self._under_way = [one for one in self._under_way if not one.durable() and not one.failed()]


class Directory(Ours):
    """lastgood with a run in a directory."""

    name = "lastgood"


class Slots(Ours):
    """lastgood with a run in preallocated slots."""

    name = "lastgood-slots"

    def __init__(self, workload: Workload, place: Path, settings: Settings, peer: Path | None) -> None:
        super().__init__(workload, place, settings, peer, "slots")


POLICIES: dict[str, Callable[[Workload, Path, Settings, Path | None], Policy]] = {
    one.name: one for one in (Directory, Slots, PCcheck, CheckFreq, Gpm, Traditional, Gemini, DcpAsync)
}


def bound_seconds(
    name: str, interval: int, step_seconds: float, save_seconds: float, load_seconds: float, in_flight: int
) -> float:
    """The upper bound of a recovery: loading, and the steps that are repeated (PCcheck, section 4.2)."""
    if name in ("traditional", "GPM"):
        return tune.stop_and_write_bound_seconds(load_seconds, interval, step_seconds)
    if name in ("CheckFreq", "Gemini", "DCP async"):
        return tune.one_in_flight_bound_seconds(load_seconds, interval, step_seconds)
    return tune.recovery_bound_seconds(load_seconds, interval, step_seconds, in_flight, save_seconds)

"""Timed saves of a sample into a scratch run. They use the same arena, writers and commit as a Checkpointer's saves."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np

from ..engine.arena import Arena, Lease
from ..errors import Damaged
from ..format import commit, layout
from ..io.files import round_up
from ..limits import WORKERS
from ..policy import restore, tune
from ..policy.tune import Setting
from ..ports import Stop, Tier, never
from ..records import Commit, Generation, GenerationId, World
from .reader import read_all
from .save import RankWriter, ReadyChunks, SaveRequest, write_part
from .scratch import INCARNATION
from .watched import CountBytes

ALGORITHM = "xxh3_128"
SOURCE_BYTES = 64 << 20
"""Samples are copied from a buffer of this length, again and again. It is larger than most processor caches."""
MATRIX_SIDE = 512
"""Rows and columns of the matrices whose product is one unit of work."""
CALIBRATION_SECONDS = 0.1
"""The least time for which units of work are counted before anything is measured."""

Clock = Callable[[], float]


class TrainingLoad:
    """Work in place of training: products of matrices, on every core that numpy uses. Counts the units of work."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._factor = np.ones((MATRIX_SIDE, MATRIX_SIDE), np.float32)
        self._product = np.empty_like(self._factor)
        self._unit_seconds = 0.0
        self.work_seconds = 0.0
        """how long the work of the last `run_until` takes on an idle machine"""

    def calibrate(self) -> None:
        """Measure how long one unit of work takes while nothing else runs."""
        self._unit()
        begun, count = self._clock(), 0
        while count < 5 or self._clock() - begun < CALIBRATION_SECONDS:
            self._unit()
            count += 1
        self._unit_seconds = (self._clock() - begun) / count

    def run_until(self, done: Callable[[], bool]) -> None:
        """Work until `done()` is true."""
        self.work_seconds = 0.0
        while not done():
            self._unit()
            self.work_seconds += self._unit_seconds

    def _unit(self) -> None:
        np.matmul(self._factor, self._factor, out=self._product)


class TrialSaves:
    """Measures how long a copy, write, save or read of a sample takes. Call `set_sample` and `make_arena` first.

    `state_bytes`: the length of the state of the job for which settings are searched; `memory_bytes`: the memory that
    its arena may take. `count_bytes` is called for all that is copied or written. The generations of the last `save`
    stay on the disk, for `read`, until the next `save` or `write`.
    """

    def __init__(self, tier: Tier, state_bytes: int, memory_bytes: int, count_bytes: CountBytes, clock: Clock) -> None:
        self._tier, self._count_bytes, self._clock = tier, count_bytes, clock
        self._state_bytes, self._memory_bytes = state_bytes, memory_bytes
        self._source = np.frombuffer(os.urandom(min(SOURCE_BYTES, max(state_bytes, *tune.CHUNK_CHOICES))), np.uint8)
        self._saved: list[Generation] = []
        self._steps = itertools.count(1)

    def set_sample(self, sample_bytes: int) -> None:
        """Use a sample of `sample_bytes` from now on, or of the length of the whole state if that is less."""
        self.sample_bytes = min(sample_bytes, self._state_bytes)
        self.scale = self._state_bytes / self.sample_bytes
        """the length of the state divided by the length of the sample"""
        self.image = image_of(self.sample_bytes)

    def make_arena(self, setting: Setting, wanted_bytes: int = 0) -> None:
        """Make an arena of `wanted_bytes`.

        At most as many bytes as the sample's share of `memory_bytes`, and at least as many as the setting needs.
        """
        self._arena = Arena(1, 1)  # frees the old memory before the new memory is allocated
        share_bytes = int(self._memory_bytes / self.scale)
        self._arena = Arena(max(min(wanted_bytes, share_bytes), setting.least_bytes), setting.chunk_bytes)

    def extrapolated_seconds(self, seconds: float, fixed_seconds: float) -> float:
        """The time for the whole state, extrapolated from `seconds` for the sample.

        `fixed_seconds` do not depend on the size; the rest is proportional to it. At least half of `seconds` is taken
        as proportional: a smaller rest is noise, and too long an estimate does less harm than too short a one.
        """
        return seconds + max(seconds / 2, seconds - fixed_seconds) * (self.scale - 1)

    def save(self, setting: Setting, image: layout.Image, load: TrainingLoad | None = None) -> float:
        """Seconds from the first copied byte to the last commit of `setting.in_flight` saves.

        The saves are copied one after the other, as a training loop does. `load` then runs in this thread until all
        saves are durable.
        """
        self._clear()
        arena = self._arena
        queues: list[SimpleQueue[Lease | None]] = []
        jobs: list[Future[Generation]] = []

        def failed() -> bool:
            return any(job.done() and job.exception() is not None for job in jobs)

        with contextlib.ExitStack() as pools:
            writers = [pools.enter_context(ThreadPoolExecutor(setting.writers)) for _ in range(setting.in_flight)]
            savers = pools.enter_context(ThreadPoolExecutor(setting.in_flight))
            begun = self._clock()
            try:
                for pool in writers:
                    chunks: SimpleQueue[Lease | None] = SimpleQueue()
                    queues.append(chunks)
                    job = savers.submit(self._save, self._next(), image, iter(chunks.get, None), pool)
                    job.add_done_callback(lambda _: arena.wake())
                    jobs.append(job)
                    for lease in self._filled(image, failed):
                        chunks.put(lease)
                    if failed():
                        break
                if load is not None:
                    load.run_until(lambda: failed() or all(job.done() for job in jobs))
                self._saved = [job.result() for job in jobs]
                return self._clock() - begun
            finally:
                for chunks in queues:
                    chunks.put(None)  # ends the save, which may be waiting for chunks that will not come

    def copy(self) -> float:
        """Seconds of one copy of the sample into the arena, by one thread."""
        begun = self._clock()
        for lease in self._filled(self.image):
            lease.release()
        return self._clock() - begun

    def write(self) -> float:
        """Seconds of one write and one sync of the sample, without digests and records."""
        self._clear()
        name = f"{layout.folder(self._next())}/{self.image.blob}"
        chunk_bytes = self._arena.chunk_bytes
        lease = self._arena.take()
        assert lease is not None
        begun = self._clock()
        upload = self._tier.create(name, self.sample_bytes)
        for offset in range(0, self.sample_bytes, chunk_bytes):
            upload.write_at(lease.buffer[: round_up(min(chunk_bytes, self.sample_bytes - offset))], offset)
            self._count_bytes(min(chunk_bytes, self.sample_bytes - offset))
        upload.finish()
        seconds = self._clock() - begun
        lease.release()
        self._tier.delete(name)
        return seconds

    def read(self) -> float:
        """Seconds of one verification of a generation that `save` has written. Raises Damaged."""
        arena = Arena(WORKERS * self._arena.chunk_bytes, self._arena.chunk_bytes)
        with ThreadPoolExecutor(WORKERS) as workers:
            begun = self._clock()
            findings = read_all(self._tier, self._saved[0], arena, workers)
            seconds = self._clock() - begun
        if findings:
            raise Damaged(
                f"{self._tier.place}: data that was just written does not read back: {restore.summary(findings)}",
                safe="It was a scratch run; no run of yours was touched.",
                todo="Check the disk and the memory before anything is saved here.",
            )
        return seconds

    def _filled(self, image: layout.Image, stop: Stop = never) -> Iterator[Lease]:
        """Yield the chunks of an image, filled from the source buffer, until `stop()` is true.

        The consumer owns each lease and must `release()` it.
        """
        for parts in layout.segments(image, self._arena.chunk_bytes):
            lease = self._arena.take(stop)
            if lease is None:
                return
            for tensor, start, at, length in parts:
                if tensor < 0:
                    lease.buffer[at : at + length] = image.header[start : start + length]
                else:
                    first = start % (len(self._source) - length + 1)
                    # Assigning to a slice of the memoryview would copy under the GIL, which torch's copies do not.
                    np.copyto(np.frombuffer(lease.buffer, np.uint8, length, at), self._source[first : first + length])
                self._count_bytes(length)
            yield lease

    def _save(self, at: GenerationId, image: layout.Image, chunks: Iterator[Lease], writers: Executor) -> Generation:
        """Write and commit one generation, as `RunWriter` does."""
        request = SaveRequest(at=at, images=[image], chunks=ReadyChunks(chunks), chunk_bytes=self._arena.chunk_bytes)
        part = write_part(request, RankWriter(self._tier, 0, ALGORITHM, writers))
        record = Commit(
            format=layout.FORMAT,
            run=INCARNATION,
            step=at.step,
            incarnation=at.incarnation,
            order=1,
            world=World(ranks=1),
            continues=None,
            parent=None,
            seals=[part.seal],
            created=0.0,
        )
        return commit.publish(self._tier, record, ALGORITHM)

    def _next(self) -> GenerationId:
        return GenerationId(step=next(self._steps), incarnation=INCARNATION)

    def _clear(self) -> None:
        while self._saved:
            commit.retire(self._tier, self._saved.pop().id)


def image_of(length: int) -> layout.Image:
    """The image of a tensor file with one tensor of `length` bytes."""
    (image,) = layout.images([layout.Tensor("sample", "uint8", (length,))])
    return image

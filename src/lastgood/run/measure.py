"""What the disk of a run and this memory can do, measured with the house's own parts on a scratch run beside it.

Invariants
  1. Nothing but a directory `<RUN>.tune-<8 hex>` is written; it is removed in the end, also after an error or Ctrl-C.
  2. A process that is killed leaves that directory; the next measurement of the same RUN removes it, and nothing that
     is locked or holds anything a scratch run does not.
  3. The disk has room for all of it before the first byte; what will be written is known before (`Bounds`).
Decides nothing: policy/tune.py says what to try and what to choose.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from statistics import median

import numpy as np

from ..engine import write_file
from ..engine.arena import Arena, Lease
from ..errors import Damaged, NoSpace, NotARun, NotWritable, Refused, RunLocked, TierDown
from ..format import commit, layout
from ..io.files import round_up
from ..policy import restore, tune
from ..policy.tune import Measured, Setting
from ..ports import Tier
from ..records import Commit, Generation, GenerationId, Manifest, World
from . import access
from .reader import WORKERS, read_all

ALGORITHM = "xxh3_128"
SOURCE_BYTES = 64 << 20
"""what is copied from, over and over: more than the caches of most processors"""
RECORDS_BYTES = 1 << 20
"""room for the manifest and commit of a save, and for folders"""
PILOT_BYTES = 4 << 20
LOAD_SIDE = 512
CALIBRATION_SECONDS = 0.1
NOBODY = "0" * 8
"""incarnation of every scratch save: chance makes none like it"""
_SCRATCH = re.compile(r"\.tune-[0-9a-f]{8}")

Seen = Callable[[int], object]
"""hears of bytes as they are written or read"""


@dataclass(frozen=True)
class Effort:
    """How much is written for one figure, how often it is repeated, and after how long no further setting is tried."""

    sample_bytes: int
    repeats: int
    limit_seconds: float


FULL = Effort(128 << 20, 5, 120.0)
QUICK = Effort(64 << 20, 3, 20.0)


@dataclass(frozen=True)
class Bounds:
    """What a measurement will take at most. No setting is begun after `limit_seconds`; what follows is one more."""

    written_bytes: int
    at_once_bytes: int
    limit_seconds: float


@dataclass(frozen=True)
class Figures:
    """Medians, but for one. Seconds are for the whole state, also where a smaller sample was written."""

    sample_bytes: int
    copy_bytes_per_second: float
    """one thread, memory to arena"""
    storage_bytes_per_second: float
    """one writer, no digest, no commit, flushed"""
    fixed_seconds: float
    """of a save of one page, the quickest of them"""
    measured: list[Measured]
    chosen: Measured
    write_seconds: float
    """Tw of the chosen setting beside a load on every core"""
    write_seconds_range: tuple[float, float]
    """the quickest and the slowest of those"""
    contention_seconds: float
    """of that load's time that one save takes, its copying included"""
    load_seconds: float
    """a verified read, past the page cache"""
    complete: bool
    """the search was not cut short by its limit"""


def bounds(allowed: list[Setting], state_bytes: int, effort: Effort) -> Bounds:
    """What measuring these settings takes at most."""
    sample = min(state_bytes, effort.sample_bytes)
    alone = [one for one in allowed if one.in_flight == 1]
    tried = len({one.writers for one in alone}) + len({one.chunk_bytes for one in alone}) - 1
    most = max(one.in_flight for one in allowed)
    # A pilot and a copy; one write without digests; the search; what is chosen, beside the load.
    samples = 3 + tried + sum(range(2, most + 1)) + most
    records = most * RECORDS_BYTES
    return Bounds((samples * sample + records) * effort.repeats, most * sample + records, effort.limit_seconds)


def beside(run: str) -> str:
    """The directory that scratch runs of `run` are made in: that of RUN, or the nearest above it that exists.

    Raises NotARun for a place that no run can be opened at, Refused where RUN is a disk of its own.
    """
    path = os.path.realpath(run)
    if os.path.lexists(path) and not (os.path.isdir(path) and not os.listdir(path)):
        access.for_reading(path)
    above = os.path.dirname(path)
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    if not os.path.isdir(above):
        raise NotARun(f"{above} is a file, so {path} can be no run", safe="Nothing was touched.")
    if os.path.isdir(path) and os.stat(path).st_dev != os.stat(above).st_dev:
        raise Refused(
            f"{path} is a disk of its own, and what lies beside it is another one",
            safe="Nothing was touched.",
            todo=f"Measure that disk by a name on it: {os.path.join(path, 'new')}.",
        )
    return above


def clear(run: str) -> list[str]:
    """Remove scratch runs that a killed measurement of `run` left; returns their names. Raises what opening raises."""
    home, name = beside(run), os.path.basename(os.path.realpath(run))
    cleared = []
    for other in sorted(os.listdir(home)):
        path = os.path.join(home, other)
        if not other.startswith(name) or not _SCRATCH.fullmatch(other, len(name)):
            continue
        if os.path.islink(path) or not os.path.isdir(path) or not _is_scratch(path):
            continue
        with contextlib.suppress(RunLocked), access.for_writing(path, "atomic_dirsync"):
            _remove(path)
            cleared.append(other)
    return cleared


def figures(
    run: str,
    allowed: list[Setting],
    state_bytes: int,
    memory_bytes: int,
    effort: Effort,
    enough_seconds: float = 0.0,
    seen: Seen = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> Figures:
    """Measure. Raises NoSpace before a byte is written, Damaged, what opening and writing raise."""
    needs = bounds(allowed, state_bytes, effort)
    home = beside(run)
    free = shutil.disk_usage(home).free
    if free < needs.at_once_bytes:
        raise NoSpace(
            f"measuring needs {needs.at_once_bytes:,} bytes in {home} for a while, free are {free:,}",
            safe="Nothing was written.",
            todo="Free space on this disk, or measure less at a time: --quick, or a smaller --disk.",
        )
    with _scratch(os.path.join(home, os.path.basename(os.path.realpath(run)))) as tier:
        return _Bench(tier, state_bytes, memory_bytes, effort, seen, clock).figures(allowed, enough_seconds)


@contextlib.contextmanager
def _scratch(path: str) -> Iterator[Tier]:
    path = f"{path}.tune-{os.urandom(4).hex()}"
    try:
        with access.for_writing(path, "atomic_dirsync") as tier:
            yield tier
    finally:
        _remove(path)


def _remove(path: str) -> None:
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        kind = NotWritable if isinstance(error, PermissionError) else TierDown
        raise kind(
            f"{path} could not be removed: {error.strerror or error}",
            safe="It holds nothing but what was measured with.",
            todo="Remove it.",
        ) from error


def _is_scratch(path: str) -> bool:
    """A run that somebody may want has a header or an incarnation, and neither is ever written here."""
    names = {name for name in os.listdir(path) if not name.startswith(".probe-")}
    inside = os.listdir(os.path.join(path, "gen")) if "gen" in names else []
    return names <= {access.LOCK, "gen"} and all(name.endswith("-" + NOBODY) for name in inside)


class _Bench:
    """The saves of one measurement: what they are copied from, the arena they go through, what lies on the disk now."""

    def __init__(
        self, tier: Tier, state_bytes: int, memory_bytes: int, effort: Effort, seen: Seen, clock: Callable[[], float]
    ) -> None:
        self._tier, self._effort, self._seen, self._clock = tier, effort, seen, clock
        self._state_bytes, self._memory_bytes = state_bytes, memory_bytes
        self._source = np.frombuffer(os.urandom(min(SOURCE_BYTES, max(state_bytes, *tune.CHUNK_BYTES))), np.uint8)
        self._there: list[Generation] = []
        self._steps = itertools.count(1)
        self._take_sample(PILOT_BYTES)

    def figures(self, allowed: list[Setting], enough_seconds: float) -> Figures:
        begun, repeats, limit_seconds = self._clock(), self._effort.repeats, self._effort.limit_seconds
        smallest = min(allowed)
        self._make_arena(smallest)
        page = _image(min(layout.PAGE_BYTES, self._state_bytes))
        fixed = min(self._saves(smallest, page) for _ in range(repeats))
        pilot = self._median(lambda: self._saves(smallest, self._image))
        # So that on a slow disk, too, the four figures that must be had take no longer than the limit.
        in_time = int(self._sample_bytes / pilot * limit_seconds / (4 * repeats))
        self._take_sample(min(self._effort.sample_bytes, max(PILOT_BYTES, in_time)))
        copy, raw = self._median(self._copy), self._median(self._raw)
        measured: list[Measured] = []
        late = False
        while not late and (setting := tune.next_setting(allowed, measured, enough_seconds)):
            self._make_arena(setting, 2 * setting.least_bytes)
            seconds = self._median(partial(self._saves, setting, self._image))
            measured.append(Measured(setting, self._whole(seconds, fixed)))
            late = self._clock() - begun > limit_seconds
        chosen = tune.choose(measured, enough_seconds)
        in_flight = chosen.setting.in_flight
        self._make_arena(chosen.setting, in_flight * round_up(self._sample_bytes, chosen.setting.chunk_bytes))
        load, spans, losses = _Load(self._clock), [], []
        for _ in range(repeats):
            load.calibrate()
            span = self._saves(chosen.setting, self._image, load.run_until)
            spans.append(self._whole(span, fixed))
            losses.append(max(0.0, span - load.worth_seconds) / in_flight * self._scale)
        return Figures(
            sample_bytes=self._sample_bytes,
            copy_bytes_per_second=self._sample_bytes / copy,
            storage_bytes_per_second=self._sample_bytes / raw,
            fixed_seconds=fixed,
            measured=measured,
            chosen=chosen,
            write_seconds=median(spans),
            write_seconds_range=(min(spans), max(spans)),
            contention_seconds=median(losses),
            load_seconds=self._median(self._read) * self._scale,
            complete=not late,
        )

    def _take_sample(self, sample_bytes: int) -> None:
        self._sample_bytes = min(sample_bytes, self._state_bytes)
        self._scale = self._state_bytes / self._sample_bytes
        self._image = _image(self._sample_bytes)

    def _make_arena(self, setting: Setting, wanted_bytes: int = 0) -> None:
        """As much of the sample as the memory holds of the state, but never less than the setting needs."""
        self._arena = Arena(1, 1)  # the old one goes before the new one comes
        most = min(wanted_bytes, int(self._memory_bytes / self._scale))
        self._arena = Arena(max(most, setting.least_bytes), setting.chunk_bytes)

    def _median(self, once: Callable[[], float]) -> float:
        return median(once() for _ in range(self._effort.repeats))

    def _whole(self, seconds: float, fixed: float) -> float:
        """Of the state, from those of the sample: what a save costs at any size stays, the rest grows with it.

        At least half grows: where less is left, the difference is noise, and rather too long than too short.
        """
        return seconds + max(seconds / 2, seconds - fixed) * (self._scale - 1)

    # ---- one figure ----------------------------------------------------------------------------------------

    def _saves(
        self,
        setting: Setting,
        image: layout.Image,
        meanwhile: Callable[[Callable[[], bool]], None] = lambda _: None,
    ) -> float:
        """Seconds from the first copied byte to the last commit of N saves, copied one after the other as a loop does.

        `meanwhile` runs on this thread when all is copied, until what it is given says that all are durable.
        """
        self._clear()
        arena = self._arena
        queues: list[SimpleQueue[Lease | None]] = []
        jobs: list[Future[Generation]] = []

        def broken() -> bool:
            return any(job.done() and job.exception() is not None for job in jobs)

        with contextlib.ExitStack() as pools:
            writers = [pools.enter_context(ThreadPoolExecutor(setting.writers)) for _ in range(setting.in_flight)]
            savers = pools.enter_context(ThreadPoolExecutor(setting.in_flight))
            begun = self._clock()
            try:
                for its_writers in writers:
                    chunks: SimpleQueue[Lease | None] = SimpleQueue()
                    queues.append(chunks)
                    job = savers.submit(self._save, self._next(), image, iter(chunks.get, None), its_writers)
                    job.add_done_callback(lambda _: arena.wake())
                    jobs.append(job)
                    for lease in self._filled(image, broken):
                        chunks.put(lease)
                    if broken():
                        break
                meanwhile(lambda: broken() or all(job.done() for job in jobs))
                self._there = [job.result() for job in jobs]
                return self._clock() - begun
            finally:
                for chunks in queues:
                    chunks.put(None)  # a save that waits for a chunk that will not come ends here

    def _filled(self, image: layout.Image, stop: Callable[[], bool] = lambda: False) -> Iterator[Lease]:
        """Chunks of a state, copied into the arena; no more of them once `stop()`."""
        for parts in layout.segments(image, self._arena.chunk_bytes):
            lease = self._arena.take(stop)
            if lease is None:
                return
            for tensor, start, at, length in parts:
                if tensor < 0:
                    lease.buffer[at : at + length] = image.header[start : start + length]
                else:
                    here = start % (len(self._source) - length + 1)
                    # Not a slice of the memoryview: that copies under the GIL, and torch does not.
                    np.copyto(np.frombuffer(lease.buffer, np.uint8, length, at), self._source[here : here + length])
                self._seen(length)
            yield lease

    def _save(self, at: GenerationId, image: layout.Image, chunks: Iterator[Lease], writers: Executor) -> Generation:
        """A save as the run's writer makes it, from its chunks to its commit."""
        blob, pieces = write_file.write(
            self._tier,
            layout.folder(at),
            image,
            chunks,
            chunk_bytes=self._arena.chunk_bytes,
            algorithm=ALGORITHM,
            writers=writers,
        )
        manifest = Manifest(
            format=layout.FORMAT,
            step=at.step,
            incarnation=at.incarnation,
            rank=0,
            digest=ALGORITHM,
            blobs=[blob],
            pieces=pieces,
            aliases={},
            values={},
        )
        record = Commit(
            format=layout.FORMAT,
            run=NOBODY,
            step=at.step,
            incarnation=at.incarnation,
            order=1,
            world=World(ranks=1),
            continues=None,
            parent=None,
            seals=[commit.seal(self._tier, manifest)],
            created=0.0,
        )
        return commit.publish(self._tier, record, ALGORITHM)

    def _copy(self) -> float:
        begun = self._clock()
        for lease in self._filled(self._image):
            lease.release()
        return self._clock() - begun

    def _raw(self) -> float:
        """One write of the sample and one flush: no digest, no records."""
        self._clear()
        name = f"{layout.folder(self._next())}/{self._image.blob}"
        chunk_bytes = self._arena.chunk_bytes
        lease = self._arena.take()
        assert lease is not None
        begun = self._clock()
        upload = self._tier.create(name, self._sample_bytes)
        for offset in range(0, self._sample_bytes, chunk_bytes):
            upload.write_at(lease.buffer[: round_up(min(chunk_bytes, self._sample_bytes - offset))], offset)
            self._seen(min(chunk_bytes, self._sample_bytes - offset))
        upload.finish()
        seconds = self._clock() - begun
        lease.release()
        self._tier.delete(name)
        return seconds

    def _read(self) -> float:
        """One of the saves that lie there, read back as a verification does."""
        arena = Arena(WORKERS * self._arena.chunk_bytes, self._arena.chunk_bytes)
        with ThreadPoolExecutor(WORKERS) as workers:
            begun = self._clock()
            findings = read_all(self._tier, self._there[0], arena, workers)
            seconds = self._clock() - begun
        if findings:
            raise Damaged(
                f"{self._tier.place}: what was just written does not read back: {restore.told(findings)}",
                safe="It was a scratch run; no run of yours was touched.",
                todo="Check the disk and the memory before anything is saved here.",
            )
        return seconds

    def _next(self) -> GenerationId:
        return GenerationId(step=next(self._steps), incarnation=NOBODY)

    def _clear(self) -> None:
        while self._there:
            commit.retire(self._tier, self._there.pop().id)


class _Load:
    """Stands for training: products of matrices on every core that numpy takes. Counts what it gets done."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._factor = np.ones((LOAD_SIDE, LOAD_SIDE), np.float32)
        self._product = np.empty_like(self._factor)
        self._unit_seconds = 0.0
        self.worth_seconds = 0.0
        """what the units of the last `run_until` take when nothing runs beside them"""

    def calibrate(self) -> None:
        self._unit()
        begun, count = self._clock(), 0
        while count < 5 or self._clock() - begun < CALIBRATION_SECONDS:
            self._unit()
            count += 1
        self._unit_seconds = (self._clock() - begun) / count

    def run_until(self, done: Callable[[], bool]) -> None:
        self.worth_seconds = 0.0
        while not done():
            self._unit()
            self.worth_seconds += self._unit_seconds

    def _unit(self) -> None:
        np.matmul(self._factor, self._factor, out=self._product)


def _image(length: int) -> layout.Image:
    (image,) = layout.images([layout.Tensor("sample", "uint8", (length,))])
    return image

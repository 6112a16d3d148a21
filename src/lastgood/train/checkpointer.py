"""The checkpointer: the one object in the training loop. Holds the threads and the handles; the protocol is not here.

One background thread does what must be done in order (write, commit, verify, point, delete), helped by a few writers;
the training thread copies into the arena and goes on. Everything that happened behind it is told at its next call.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Literal

from ..engine import fetch
from ..engine.arena import Arena, Lease
from ..errors import Cancelled, Damaged, LastgoodError, LastgoodWarning, NoSuchStep, Refused, StepTaken, TimedOut
from ..format import layout
from ..plan.cadence import Every
from ..plan.retention import Keep
from ..rawio.checksum import ALGORITHMS
from ..rawio.files import round_up
from ..records import Event, Generation
from ..run import places, reader
from ..run.reader import WORKERS
from ..run.writer import KEEP, RunWriter
from ..tiers.disk import WriteMode
from . import staging
from . import state as live
from .loading import Request, Restored, load_into
from .sampler import ResumableSampler

CADENCE = Every(seconds=300)
UPKEEP_CHUNKS = 3
LEAST_MEMORY_BYTES = 1 << 20
EXIT_SECONDS = 60.0
"""how long leaving the `with` on an exception waits for saves in flight"""


class Save:
    """A save under way. Every method may be called from any thread."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.stall_seconds = 0.0
        """how long the training loop waited for it"""
        self._begun = time.monotonic()
        self._ended: float | None = None
        self._staged = threading.Event()
        self._outcome: Future[Generation] = Future()

    def staged(self) -> bool:
        """Whether the live state may change again."""
        return self._staged.is_set()

    def durable(self) -> bool:
        """Whether the generation exists and survives power loss."""
        return self._outcome.done() and self._outcome.exception() is None

    def failed(self) -> bool:
        """Whether it ended without a generation."""
        return self._outcome.done() and self._outcome.exception() is not None

    def result(self, timeout: float | None = None) -> Generation:
        """Wait until it is durable. Raises what made it fail, or TimedOut after `timeout` seconds."""
        try:
            return self._outcome.result(timeout)
        except FutureTimeout:
            raise TimedOut(
                f"step {self.step} is not durable after {timeout} s", safe="It is still under way."
            ) from None

    @property
    def seconds(self) -> float:
        """From the call to durable, or until now."""
        return (self._ended or time.monotonic()) - self._begun

    def _end(self, generation: Generation | None, error: BaseException | None) -> None:
        self._ended = time.monotonic()
        if error is not None:
            self._outcome.set_exception(error)
        elif generation is not None:
            self._outcome.set_result(generation)


class _Chunks:
    """Filled chunks on their way from the training thread to the writer."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Lease | None] = queue.SimpleQueue()
        self._complete = self._ended = False
        self.refused = False
        """the writer wants no more"""

    def put(self, lease: Lease) -> None:
        self._queue.put(lease)

    def close(self, complete: bool) -> None:
        self._complete = complete
        self._queue.put(None)

    def __iter__(self) -> Iterator[Lease]:
        while (lease := self._queue.get()) is not None:
            yield lease
        self._ended = True
        if not self._complete:
            raise Cancelled("the copy of the state was given up", safe="Nothing was committed.")

    def drain(self) -> None:
        """Release whatever else comes, to the end."""
        while not self._ended:
            lease = self._queue.get()
            if lease is None:
                self._ended = True
            else:
                lease.release()


class Checkpointer:
    """Saves the complete training state while training goes on, and brings the newest good one back.

    `path`: the run's directory. `state`: name -> module, optimizer, scheduler, scaler, sampler, loader, tensor, number,
    string, dict or list; re-read at every save. Random number generators are captured without asking.
    `memory`: bound of the staging arena in bytes (default: the size of the state; smaller makes the loop wait for the
    disk). `on_error`: "warn" lets training go on when a background save failed, "raise" raises in the loop.
    `on_event` hears, on the training thread, of what happened. `include` / `exclude`: name patterns (fnmatch).
    Raises Refused, NotARun, NotWritable, RunLocked; nothing has been touched then.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        state: MutableMapping[str, Any],
        *,
        cadence: Every = CADENCE,
        retention: Keep = KEEP,
        write_mode: WriteMode = "atomic_dirsync",
        digest: str = "xxh3_128",
        on_error: Literal["warn", "raise"] = "warn",
        memory: int | None = None,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        _require(digest in ALGORITHMS, f"digest={digest!r}", f"One of {', '.join(ALGORITHMS)}.")
        _require(write_mode in ("atomic_dirsync", "atomic_nodirsync", "unsafe"), f"write_mode={write_mode!r}", "")
        _require(on_error in ("warn", "raise"), f"on_error={on_error!r}", 'Give "warn" or "raise".')
        _require(memory is None or memory >= LEAST_MEMORY_BYTES, f"memory={memory}", "At least 1 MiB.")
        _require(isinstance(state, MutableMapping), f"state is a {type(state).__name__}", "Give a dict.")
        self._request = Request(state, include=tuple(include), exclude=tuple(exclude))
        self._cadence, self._keep, self._on_error, self._memory = cadence, retention, on_error, memory
        self._on_event = on_event
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._problems: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self._arena: Arena | None = None
        self._upkeep_arena: Arena | None = None
        self._last: Save | None = None
        self._saved_at = time.monotonic()
        self._waiting = 0  # saves that stand behind the background thread's present work
        self._counting = threading.Lock()
        self._work: list[tuple[Future[None], Save | None]] = []
        self._latest: int | None = None
        self._closed = False
        with contextlib.ExitStack() as opening:
            disk = opening.enter_context(places.for_writing(path, write_mode))
            self._writers = opening.enter_context(ThreadPoolExecutor(WORKERS, "lastgood-write"))
            self._keeper = opening.enter_context(ThreadPoolExecutor(1, "lastgood-keep"))
            self._run = RunWriter(disk, self._writers, keep=retention, algorithm=digest, tell=self._events.put)
            self._note_latest()
            self._resources = opening.pop_all()

    # ---- the loop ------------------------------------------------------------------------------------------

    def restore(
        self, step: int | None = None, strict: bool = True, rename: Mapping[str, str] | None = None
    ) -> Restored:
        """Bring the newest good generation of the lineage (or that of `step`) into the live state.

        With nothing committed it is a fresh start: `.step` is 0. `restore(step=N)` rewinds: what came after N is never
        chosen by itself again; `restore(step=0)` without a generation of step 0 starts over. `rename`: old name -> new.
        Raises StateMismatch, NoSuchStep, Damaged, NothingGood; the live state is untouched then.
        """
        self._require_open()
        self.wait()
        request = Request(self._request.state, strict, rename, self._request.include, self._request.exclude)
        try:
            found = load_into(
                request, self._run.tier, self._run.survey, step, self._reading_arena, self._writers, self._note
            )
        except NoSuchStep:
            if step != 0:
                raise
            found = Restored(step=0, generation=None, seconds=0.0, bytes=0)
        self._run.begin(found.generation.id if found.generation else None)
        if found.generation is not None and not found.generation.verified:
            self._run.conclude(found.generation, [])
        self._run.point()
        self._note_latest()
        self._saved_at = time.monotonic()
        self._last = None
        for at, reason in found.stepped_over:
            self._tell("stepped_over", at, detail=reason)
        if found.stepped_over:
            told = "\n".join(f"  step {at}: {reason}" for at, reason in found.stepped_over)
            warnings.warn(f"resumed from step {found.step}, stepping over\n{told}", LastgoodWarning, stacklevel=2)
        self._deliver()
        return found

    def step(self, n: int) -> Save | None:
        """Call after each optimizer step; `n` is how many are completed. Saves when due, and returns at once.

        Raises or warns of what failed in the background since the last call.
        """
        self._surface(stacklevel=3)
        for one in self._request.state.values():
            if isinstance(one, ResumableSampler):
                one.consumed()
        if self._cadence.due(n, time.monotonic() - self._saved_at):
            return self._save(n, False, None)
        return None

    def save(self, n: int, milestone: bool = False, metrics: Mapping[str, float] | None = None) -> Save:
        """Save now. Returns when the state is copied; `Save.result()` waits until it is durable.

        `milestone` keeps it for ever; `metrics` (finite numbers) feed Keep(best=...). Raises Unstorable, StepTaken,
        NotRestored at once.
        """
        self._surface(stacklevel=3)
        return self._save(n, milestone, metrics)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every save is durable and looked after. Raises TimedOut; surfaces what failed."""
        self._settle(timeout)
        self._surface(stacklevel=3)

    def latest(self) -> int | None:
        """Step of the newest verified generation of the lineage."""
        return self._latest

    def close(self, timeout: float | None = None) -> None:
        """Wait for saves in flight, then let go of the run. Raises TimedOut, and surfaces what failed.

        After TimedOut the saves were given up; the lock stays until their thread has ended.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._settle(timeout)
        except TimedOut:
            self._give_up()
            raise
        else:
            self._resources.close()
        finally:
            self._arena = self._upkeep_arena = None
            self._surface(stacklevel=3)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.close()
            return
        try:
            self.close(EXIT_SECONDS)
        except (LastgoodError, OSError) as second:  # the loop's own exception goes first; this one is told beside it
            warnings.warn(f"while leaving: {second}", LastgoodWarning, stacklevel=2)

    # ---- on the training thread ----------------------------------------------------------------------------

    def _save(self, n: int, milestone: bool, metrics: Mapping[str, float] | None) -> Save:
        self._require_open()
        if self._last is not None and not self._last.failed() and n <= self._last.step:
            raise StepTaken(
                f"step {n} cannot follow step {self._last.step}",
                safe="Nothing was written.",
                todo="Save ascending steps; to go back, restore(step=...) first.",
            )
        options = {"milestone": milestone, "metrics": _finite(metrics or {})}
        captured = live.capture(self._request.state, self._request.include, self._request.exclude)
        images = staging.lay_out(captured.tensors)
        total = sum(image.length for image in images)
        if self._last is None:
            self._run.admit(n)  # nothing is in flight, so the run may be asked from here
            self._tell_bound(total)
        save, chunks, arena = Save(n), _Chunks(), self._writing_arena(images)
        with self._counting:
            self._waiting += 1
        self._work = [(job, of) for job, of in self._work if not job.done()]
        self._work.append((self._keeper.submit(self._persist, save, images, chunks, arena, captured, options), save))
        copied = False
        try:
            for lease in staging.filled(images, captured.tensors, arena, lambda: chunks.refused):
                chunks.put(lease)
            copied = True
        except Cancelled:
            copied = False  # the writer failed first; its error is on the way
        finally:
            chunks.close(copied)
        save.stall_seconds = save.seconds
        save._staged.set()
        self._tell("staged", n, seconds=save.stall_seconds, size=total)
        self._last, self._saved_at = save, time.monotonic()
        self._work.append((self._keeper.submit(self._upkeep), None))
        return save

    def _writing_arena(self, images: list[layout.Image]) -> Arena:
        total = sum(image.length for image in images)
        if self._memory is None:
            chunk_bytes = min(layout.CHUNK_BYTES, round_up(total))
            wanted = sum(round_up(image.length, chunk_bytes) for image in images)
        else:
            chunk_bytes = max(4096, min(layout.CHUNK_BYTES, self._memory // 4 // 4096 * 4096, round_up(total)))
            wanted = min(self._memory, sum(round_up(image.length, chunk_bytes) for image in images))
        if (
            self._arena is None
            or self._arena.chunk_bytes != chunk_bytes
            or self._arena.arena_bytes < wanted // chunk_bytes * chunk_bytes
        ):
            self._settle(None)  # the old arena must have come home before a new one is made beside it
            self._arena = None
            self._arena = Arena(max(wanted // chunk_bytes, 1) * chunk_bytes, chunk_bytes)
        return self._arena

    def _reading_arena(self, image_bytes: int, chunk_bytes: int) -> Arena:
        bound = image_bytes if self._memory is None else min(self._memory, image_bytes)
        if self._arena is None or self._arena.chunk_bytes != chunk_bytes or self._arena.arena_bytes < bound:
            self._arena = None
            self._arena = Arena(max(bound // chunk_bytes, 1) * chunk_bytes, chunk_bytes)
        return self._arena

    def _note(self, generation: Generation, error: Damaged) -> None:
        findings = reader.read_all(self._run.tier, generation, self._small_arena(), self._writers)
        self._run.conclude(generation, findings or [fetch.finding(error)])

    def _settle(self, timeout: float | None) -> None:
        until = None if timeout is None else time.monotonic() + timeout
        for job, _ in self._work:
            try:
                job.result(None if until is None else max(0.0, until - time.monotonic()))
            except FutureTimeout:
                raise TimedOut(
                    f"background work is not done after {timeout} s", safe="Every committed generation is untouched."
                ) from None
        self._work.clear()

    def _give_up(self) -> None:
        self._keeper.shutdown(wait=False, cancel_futures=True)
        for job, save in self._work:
            if job.cancelled() and save is not None:
                save._end(None, Cancelled(f"step {save.step} was given up", safe="Nothing of it was committed."))

    def _surface(self, stacklevel: int) -> None:
        """Tell of what happened behind the loop: events first, then failures."""
        self._deliver()
        while not self._problems.empty():
            error = self._problems.get()
            if self._on_error == "raise" or not isinstance(error, LastgoodError):
                raise error
            warnings.warn(f"{type(error).__name__}: {error}", LastgoodWarning, stacklevel=stacklevel)

    def _deliver(self) -> None:
        while not self._events.empty():
            event = self._events.get()
            if self._on_event is not None:
                self._on_event(event)

    def _tell_bound(self, size: int) -> None:
        kept = self._keep.last + len(self._keep.milestones) + (self._keep.best[2] if self._keep.best else 0)
        more = f", and each {self._keep.every}th step" if self._keep.every else ""
        print(
            f"lastgood: {self._run.tier.place} takes at most ({kept} kept + 1 in flight + 2) x {_readable(size)} = "
            f"{_readable((kept + 3) * size)}{more}; beside that, milestones and what is found damaged stay",
            file=sys.stderr,
        )

    def _tell(self, kind: str, step: int, seconds: float = 0.0, size: int = 0, detail: str = "") -> None:
        self._events.put(
            Event(kind=kind, step=step, at_seconds=time.monotonic(), seconds=seconds, bytes=size, detail=detail)
        )

    def _require_open(self) -> None:
        _require(not self._closed, "this checkpointer is closed", "Open a new one.")

    # ---- on the background thread --------------------------------------------------------------------------

    def _persist(
        self,
        save: Save,
        images: list[layout.Image],
        chunks: _Chunks,
        arena: Arena,
        captured: live.Captured,
        options: dict[str, Any],
    ) -> None:
        """One save from its chunks to its commit; its outcome is told to the handle, its failure to the loop too."""
        with self._counting:
            self._waiting -= 1
        try:
            if self._run.backlog() > self._keep.last:
                self._catch_up()
            generation = self._run.save(
                save.step,
                images,
                iter(chunks),
                chunk_bytes=arena.chunk_bytes,
                aliases=captured.aliases,
                values=captured.values,
                **options,
            )
            chunks.drain()
            save._end(generation, None)
        except BaseException as error:  # noqa: BLE001 - kept, and raised in the training loop
            chunks.refused = True
            arena.wake()
            chunks.drain()
            save._end(None, error)
            self._problems.put(error)

    def _upkeep(self) -> None:
        """Verify, point and clean, giving way to a save that waits, unless too much is unverified already."""
        if self._gives_way():
            return
        try:
            self._look_after(self._gives_way)
        except Cancelled:
            return  # a later commit has made this one uninteresting; that one is looked after
        except BaseException as error:  # noqa: BLE001 - raised in the training loop
            self._problems.put(error)

    def _catch_up(self) -> None:
        """Verify before the next reservation: the disk stays bounded. What that finds does not stop the save."""
        try:
            self._look_after(lambda: False)
        except LastgoodError as error:
            self._problems.put(error)

    def _look_after(self, stop: Callable[[], bool]) -> None:
        try:
            self._run.verify(self._small_arena(), stop)
        finally:
            self._note_latest()
        self._run.clean()

    def _gives_way(self) -> bool:
        return self._waiting > 0 and self._run.backlog() <= self._keep.last

    def _small_arena(self) -> Arena:
        if self._upkeep_arena is None:
            self._upkeep_arena = Arena(UPKEEP_CHUNKS * layout.CHUNK_BYTES, layout.CHUNK_BYTES)
        return self._upkeep_arena

    def _note_latest(self) -> None:
        newest = self._run.newest_verified()
        self._latest = newest.step if newest else None


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    found = {name: float(value) for name, value in metrics.items()}
    bad = [name for name, value in found.items() if not math.isfinite(value)]
    _require(not bad, f"metrics that are no finite numbers: {', '.join(bad)}", "Leave them out.")
    return found


def _readable(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _require(holds: bool, what: str, todo: str) -> None:
    if not holds:
        raise Refused(what, safe="Nothing was touched.", todo=todo)

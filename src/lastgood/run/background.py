"""Behind the training loop: one thread that saves, verifies, points and deletes, in this order. Torch-free.

Owns the lock, the threads and the writer of a run. Whatever fails here lies in `problems` until somebody has told it;
what nobody asked for by the end of the process is printed.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from ..engine.arena import Arena, Lease
from ..errors import Cancelled, LastgoodError, TimedOut
from ..format import layout
from ..format.layout import Image
from ..plan.retention import Keep
from ..records import Event, Generation
from ..tiers.disk import WriteMode
from . import places
from .reader import WORKERS
from .writer import RunWriter

UPKEEP_CHUNKS = 3
BACKLOG_LIMIT = 2
"""unverified generations newer than the newest verified one, above which verifying goes before the next save"""


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

    def note_staged(self) -> None:
        self.stall_seconds = self.seconds
        self._staged.set()

    def note_outcome(self, generation: Generation | None, error: BaseException | None) -> None:
        self._ended = time.monotonic()
        if error is not None:
            self._outcome.set_exception(error)
        elif generation is not None:
            self._outcome.set_result(generation)


class Chunks:
    """Filled chunks on their way from the training thread to the writer. The producer always closes it."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Lease | None] = queue.SimpleQueue()
        self._complete = self._ended = False
        self.refused = False
        """the writer wants no more"""
        self.given_up = False
        """nobody waits for this save any more"""

    def put(self, lease: Lease) -> None:
        self._queue.put(lease)

    def close(self, complete: bool) -> None:
        self._complete = complete
        self._queue.put(None)

    def __iter__(self) -> Iterator[Lease]:
        while not self.given_up and (lease := self._queue.get()) is not None:
            yield lease
        self._ended = not self.given_up
        if self.given_up or not self._complete:
            raise Cancelled("the save was given up", safe="Nothing of it was committed.")

    def drain(self) -> None:
        """Release whatever else comes, to the end."""
        while not self._ended:
            lease = self._queue.get()
            if lease is None:
                self._ended = True
            else:
                lease.release()


class Workers(ThreadPoolExecutor):
    """A pool that still works when the interpreter is ending: then in the thread that asks."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            future: Future[Any] = Future()
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - handed to whoever asks the future
                future.set_exception(error)
            return future


class Background:
    """A run that is open for writing, and the thread that keeps it. Raises what `places.for_writing` raises."""

    def __init__(self, path: str | os.PathLike[str], write_mode: WriteMode, keep: Keep, algorithm: str) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.problems: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self.latest: int | None = None
        """step of the newest verified generation"""
        self._upkeep_arena: Arena | None = None
        self._waiting = 0  # saves that stand behind the thread's present work
        self._counting = threading.Lock()
        self._work: list[tuple[Future[None], Chunks]] = []
        with contextlib.ExitStack() as place:
            disk = place.enter_context(places.for_writing(path, write_mode))
            self.workers = Workers(WORKERS, "lastgood-write")
            self._keeper = Workers(1, "lastgood-keep")
            self.run = RunWriter(disk, self.workers, keep=keep, algorithm=algorithm, tell=self.events.put)
            self._place = place.pop_all()
        self.note_latest()
        self._unheard = weakref.finalize(self, _print_unheard, self.problems, disk.place)

    def start(self, save: Save, images: list[Image], chunks: Chunks, arena: Arena, options: dict[str, Any]) -> None:
        """Queue one save, whose chunks are on their way, and the upkeep after it."""
        with self._counting:
            self._waiting += 1
        self._work = [(job, of) for job, of in self._work if not job.done()]
        self._work.append((self._keeper.submit(self._persist, save, images, chunks, arena, options), chunks))
        self._work.append((self._keeper.submit(self._upkeep, chunks), chunks))

    def wait(self, timeout: float | None = None) -> None:
        """Until everything that was queued is done. Raises TimedOut."""
        until = None if timeout is None else time.monotonic() + timeout
        for job, _ in self._work:
            try:
                job.result(None if until is None else max(0.0, until - time.monotonic()))
            except FutureTimeout:
                raise TimedOut(
                    f"background work is not done after {timeout} s", safe="Every committed generation is untouched."
                ) from None
        self._work.clear()

    def close(self, timeout: float | None = None) -> None:
        """Wait, then let go of the run. On TimedOut what is under way is given up at its next chunk.

        The lock goes when the thread has ended. A system call that hangs holds the thread, and the process with it.
        """
        try:
            self.wait(timeout)
        except TimedOut:
            for _, chunks in self._work:
                chunks.given_up = True
            self._keeper.submit(self._place.close)
            raise
        self._keeper.shutdown()
        self.workers.shutdown()
        self._place.close()
        self._upkeep_arena = None

    def heard(self) -> None:
        """Every problem has been told: nothing is printed at the end."""
        if self.problems.empty():
            self._unheard.detach()

    def small_arena(self) -> Arena:
        """Memory for reading beside a save."""
        if self._upkeep_arena is None:
            self._upkeep_arena = Arena(UPKEEP_CHUNKS * layout.CHUNK_BYTES, layout.CHUNK_BYTES)
        return self._upkeep_arena

    def note_latest(self) -> None:
        newest = self.run.newest_verified()
        self.latest = newest.step if newest else None

    # ---- on the background thread --------------------------------------------------------------------------

    def _persist(self, save: Save, images: list[Image], chunks: Chunks, arena: Arena, options: dict[str, Any]) -> None:
        """One save from its chunks to its commit; its outcome is told to the handle, its failure to the loop too."""
        with self._counting:
            self._waiting -= 1
        try:
            if self.run.backlog() > BACKLOG_LIMIT:
                self._catch_up()
            generation = self.run.save(save.step, images, iter(chunks), chunk_bytes=arena.chunk_bytes, **options)
            chunks.drain()
            save.note_outcome(generation, None)
        except BaseException as error:  # noqa: BLE001 - kept, and raised in the training loop
            chunks.refused = True
            arena.wake()
            chunks.drain()
            save.note_outcome(None, error)
            self.problems.put(error)
            at = time.monotonic()
            self.events.put(
                Event(kind="failed", step=save.step, at_seconds=at, detail=f"{type(error).__name__}: {error}")
            )

    def _upkeep(self, chunks: Chunks) -> None:
        """Verify, point and clean, giving way to a save that waits, unless too much is unverified already."""

        def give_way() -> bool:
            return chunks.given_up or (self._waiting > 0 and self.run.backlog() <= BACKLOG_LIMIT)

        if give_way():
            return
        try:
            self._look_after(give_way)
        except Cancelled:
            return  # a later commit has made this one uninteresting; that one is looked after
        except BaseException as error:  # noqa: BLE001 - raised in the training loop
            self.problems.put(error)

    def _catch_up(self) -> None:
        """Verify before the next reservation: the disk stays bounded. What that finds does not stop the save."""
        try:
            self._look_after(lambda: False)
        except LastgoodError as error:
            self.problems.put(error)

    def _look_after(self, stop: Callable[[], bool]) -> None:
        try:
            self.run.verify(self.small_arena(), stop)
        finally:
            self.note_latest()
        self.run.clean()


def _print_unheard(problems: queue.SimpleQueue[BaseException], place: str) -> None:
    while not problems.empty():
        error = problems.get()
        print(f"lastgood: {place} was never closed; unheard: {type(error).__name__}: {error}", file=sys.stderr)

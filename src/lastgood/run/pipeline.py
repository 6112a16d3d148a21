"""Behind the training loop: saves in flight, each with its threads, and one thread for upkeep.

    training thread: admit a save -> start it             copier: state -> arena -> chunks      (one save after another;
                                                          where the loop waits for the copy, it makes it itself)
    lane (one of `in_flight`): chunks -> writers -> COMMIT     upkeep: verify -> point -> clean

Torch-free. Owns the lock, the threads and the writer of a run. What fails here waits in `outcomes` until the training
thread reports it, at the latest at the end of the process. Nothing here waits for the training thread.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from ..coordination.rounds import RankGroup
from ..coordination.single_rank import AnyRanks, AnyTopic
from ..errors import Cancelled, LastgoodError, NoSpace, Overtaken, Refused, TimedOut
from ..events import Event, EventKind
from ..limits import WORKERS
from ..records import Generation, GenerationId
from . import access
from .chunk_queue import ChunkQueue
from .follower import Follower
from .known import Environment
from .outcomes import Outcomes
from .planned_save import PlannedSave, RunOptions
from .save import SaveRequest, save
from .save_handle import Save
from .thread_pools import Pool, Workers, started
from .upkeep import Upkeep
from .writer import RunWriter


class _Flight:
    """One save between its start and its end."""

    def __init__(self, handle: Save, request: SaveRequest, planned: PlannedSave, topic: AnyTopic) -> None:
        self.handle, self.request, self.planned, self.topic = handle, request, planned, topic
        self.at, self.pinned = request.at, request.pinned

    @property
    def chunks(self) -> ChunkQueue:
        chunks = self.request.chunks
        assert isinstance(chunks, ChunkQueue)
        return chunks

    def cancel(self, reason: BaseException) -> None:
        """The save ends at its next chunk, with this."""
        self.chunks.cancel(reason)
        self.planned.arena.wake()  # guard: memory-waiters-woken


class Pipeline:
    """A run that is open for writing, and the threads that keep it. Raises what `access.for_writing` raises."""

    def __init__(self, path: str | os.PathLike[str], options: RunOptions, ranks: AnyRanks) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.outcomes = Outcomes(os.fspath(path))
        self._ranks = ranks
        self._closing = 0
        """callers that wait for the end of all work: nothing is read again for its own sake meanwhile"""
        self._scrubbing: Future[None] | None = None
        self._busy = threading.Event()
        self._free_places = threading.BoundedSemaphore(options.in_flight)
        self._state = threading.Lock()
        self._flights: list[_Flight] = []
        self._work: list[Future[None]] = []
        self._abandoned: list[tuple[int, Future[None]]] = []
        """what is being cleared away of steps that this rank could not save"""
        opening = ranks.topic("open")
        with opening.failing(), contextlib.ExitStack() as place:
            if not ranks.is_coordinator:
                opening.agree(None, lambda _: None)  # now it is a run that may be written, and it is settled
            disk = place.enter_context(_opened(path, options, ranks))
            pools = place.enter_context(contextlib.ExitStack())  # ended where what follows fails; else by `close`
            self._start_threads(options, pools)
            environment = Environment(emit=self.events.put, make_room=lambda needed: self.upkeep.make_room(needed))
            self.run: RunWriter | Follower
            if isinstance(ranks, RankGroup) and not ranks.is_coordinator:
                self.run = Follower(disk, self.workers, ranks, algorithm=options.algorithm, environment=environment)
            else:
                self.run = RunWriter(
                    disk,
                    self.workers,
                    keep=options.keep,
                    parity=options.parity,
                    algorithm=options.algorithm,
                    ranks=ranks,
                    environment=environment,
                )
                opening.agree(None, lambda _: None)
            opening.agree(None, lambda _: None)  # every rank has it open
            pools.pop_all()
            self._place = place.pop_all()
        self.upkeep = Upkeep(self.run, self.outcomes, options.scrub, self._busy)
        self._unreported = weakref.finalize(self, self.outcomes.report_unread)

    def _start_threads(self, options: RunOptions, pools: contextlib.ExitStack) -> None:
        def running(pool: Pool, count: int) -> Pool:
            pools.callback(pool.shutdown)
            return started(pool, count)

        self.workers = running(Workers(WORKERS, "lastgood-read"), WORKERS)
        self._keeper = running(Workers(1, "lastgood-keep"), 1)
        self._copier = running(ThreadPoolExecutor(1, "lastgood-copy"), 1)
        self._lanes = running(ThreadPoolExecutor(options.in_flight, "lastgood-save"), options.in_flight)
        self._writers: queue.SimpleQueue[Workers] = queue.SimpleQueue()
        for _ in range(options.in_flight):
            self._writers.put(running(Workers(options.writers, "lastgood-write"), options.writers))

    # ---- from the training thread --------------------------------------------------------------------------

    def admit(self, timeout_seconds: float | None) -> bool:
        """Take a place for one more save in flight, waiting so long at most (None: for ever); False if none is free."""
        return self._free_places.acquire(timeout=timeout_seconds)

    def admit_step(self, step: int) -> GenerationId:
        """Where a save of `step` will go, as `RunWriter.admit`, once an earlier try of the same has ended.

        One that Ctrl-C cut short is still being cleared away, and would take the new one for its own.
        """
        at = self.run.admit(step)
        with self._state:
            earlier = [flight.handle for flight in self._flights if flight.at == at]
            abandoned = [job for of, job in self._abandoned if of == step]
            self._abandoned = [(of, job) for of, job in self._abandoned if not job.done()]
        for handle in earlier:  # guard: earlier-attempt-ended-first
            handle.wait_ended()
        for job in abandoned:
            job.exception()
        return self.run.admit(step)

    def leave(self, step: int, topic: AnyTopic, error: BaseException | None) -> None:
        """Give back a place that `start` was not called for; the other ranks learn why, behind the loop."""
        if self._ranks.size == 1 or error is None:
            self._free_places.release()
            return

        def abandon() -> None:
            try:
                self.run.abandon(step, topic, error)
            finally:
                self._free_places.release()

        try:
            job = self._lanes.submit(abandon)
        except RuntimeError:  # the interpreter is ending
            abandon()
            return
        with self._state:
            self._abandoned.append((step, job))
            self._work.append(job)

    def start(
        self,
        handle: Save,
        at: GenerationId,
        planned: PlannedSave,
        topic: AnyTopic,
        pinned: bool,
        milestone: bool,
        metrics: Mapping[str, float],
    ) -> None:
        """Begin to copy and to write one save, whose place was taken; it ends by itself, and upkeep follows it.

        Where the copy is not overlapped this thread makes it, before the return. `pinned`: the save is wanted for
        itself. Raises Refused when the interpreter is ending.
        """
        request = SaveRequest(
            at=at,
            images=planned.images,
            chunks=ChunkQueue(handle),
            chunk_bytes=planned.arena.chunk_bytes,
            aliases=planned.aliases,
            values=planned.values,
            check=planned.check,
            pinned=pinned,
            milestone=milestone,
            metrics=metrics,
        )
        flight = _Flight(handle, request, planned, topic)
        writing: Future[None] | None = None
        try:
            with self._state:
                self._flights.append(flight)
                self._busy.set()
                if pinned:
                    self.run.known.pinned.add(at)
            writing = self._lanes.submit(self._save, flight)
            with self._state:
                self._work = [*(job for job in self._work if not job.done()), writing]
            if planned.overlapped:  # guard: blocking-save-waits-for-copy
                self._copy_behind(flight)
            else:
                self._copy(flight)
        except BaseException as error:
            # Ctrl-C may come between any two of these lines: whatever has begun ends, and close() waits for nobody.
            flight.chunks.close(Cancelled("the save was interrupted", safe="Nothing of it was committed."))
            if writing is None:
                self._end(flight)
            if isinstance(error, RuntimeError):
                raise Refused("the interpreter is ending", todo="Save before its end, and close().") from error
            raise

    def _copy_behind(self, flight: _Flight) -> None:
        try:
            copying = self._copier.submit(self._copy, flight)
        except RuntimeError as error:
            flight.chunks.close(error)  # the lane ends with it
            return
        with self._state:
            self._work.append(copying)

    def add(self, save: Save, milestone: bool, metrics: Mapping[str, float]) -> Save:
        """A save that was begun is wanted for itself from now on; what is added is written once it is durable.

        Returns the save; where something is added, one that ends when that is durable too.
        """
        with self._state:
            for flight in self._flights:
                if flight.handle is save and not self.run.tier.newest_only:
                    flight.pinned = True
                    self.run.known.pinned.add(flight.at)
        if not milestone and not metrics:
            return save
        labelled = Save(save.step)
        labelled.note_staged()
        labelled.note_written()

        def label() -> None:
            save.wait_ended()
            try:
                generation = save.result()
                if isinstance(self.run, RunWriter):
                    generation = self.run.label(generation.id, milestone, metrics)
            except BaseException as error:  # noqa: BLE001 - reported by the training thread
                labelled.note_outcome(None, error)
                if save.durable():  # else its failure is reported
                    self.outcomes.put_for_step(error)
            else:
                labelled.note_outcome(generation, None)

        job = self._keeper.submit(label)
        with self._state:
            self._work.append(job)
        return labelled

    def wait(self, timeout: float | None = None) -> None:
        """Wait until everything that was begun is done. Raises TimedOut after `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        with self._state:
            self._closing += 1
            self._busy.set()
        try:
            while (job := self._unfinished()) is not None:
                job.result(None if until is None else max(0.0, until - time.monotonic()))
        except FutureTimeout:
            raise TimedOut(
                f"background work is not done after {timeout} s", safe="Every committed generation is untouched."
            ) from None
        finally:
            with self._state:
                self._closing -= 1

    def close(self, timeout: float | None = None) -> None:
        """Wait, then release the run. On TimedOut what is under way is cancelled at its next chunk.

        The lock is released when the last thread has ended. A system call that hangs holds its thread, and the process.
        """
        with self._state:
            self._closing += 1
        try:
            self.wait(timeout)
        except TimedOut:
            with self._state:
                flights = list(self._flights)
            for flight in flights:
                flight.cancel(Cancelled("the save was given up", safe="Nothing of it was committed."))
            self._ranks.closed.set()
            self._copier.submit(self._release_when_done)
            raise
        self._ranks.closed.set()
        self._lanes.shutdown()
        self._copier.shutdown()
        self._keeper.shutdown()
        while not self._writers.empty():
            self._writers.get().shutdown()
        self.workers.shutdown()
        self._release_place()

    def reported(self) -> None:
        """Every outcome has been reported: nothing is left for the end of the process."""
        self._unreported.detach()

    # ---- in the background ---------------------------------------------------------------------------------

    def _unfinished(self) -> Future[None] | None:
        with self._state:
            work = [*self._work, *([self._scrubbing] if self._scrubbing else [])]
            return next((job for job in work if not job.done()), None)

    def _end(self, flight: _Flight) -> None:
        """Forget a flight and give back its place, once: a save that was interrupted while it began may end twice."""
        with self._state:
            if flight not in self._flights:
                return
            self._flights.remove(flight)
            self.run.known.pinned.discard(flight.at)
        self._free_places.release()  # guard: finished-save-frees-place

    def _release_when_done(self) -> None:
        """Release the run after everything that was cancelled has ended."""
        while (job := self._unfinished()) is not None:
            job.exception()
        self._release_place()

    def _release_place(self) -> None:
        """What cannot be written at the end is hints: that is reported, and the lock is released all the same."""
        self.upkeep.close()
        try:
            self._place.close()
        except LastgoodError as error:
            self.outcomes.put(error)

    def _copy(self, flight: _Flight) -> None:
        """The live state is read here, and may change again once this is over."""
        failed: BaseException | None = None
        begun = time.monotonic()
        try:
            # guard: copier-stops-when-unwanted
            for lease in flight.planned.source.fill(lambda: flight.chunks.cancelled):
                flight.chunks.put(lease)
            now, size = time.monotonic(), flight.planned.bytes
            self.events.put(Event(kind="staged", step=flight.at.step, at_seconds=now, seconds=now - begun, bytes=size))
        except Exception as error:  # noqa: BLE001 - raised where the chunks are written, and reported from there
            failed = error
        except BaseException:
            failed = Cancelled("the copy was interrupted", safe="Nothing of it was committed.")
            raise  # guard: interrupt-in-copy-raised
        finally:
            flight.handle.note_staged()  # guard: failed-copy-unblocks-loop
            flight.chunks.close(failed)  # guard: failed-copy-fails-save

    def _save(self, flight: _Flight) -> None:
        """On a lane: one save from its chunks to its commit. The handle gets its outcome, the loop its failure."""
        handle, chunks, writers = flight.handle, flight.chunks, self._writers.get()
        generation: Generation | None = None
        failed: BaseException | None = None
        try:
            if not chunks.cancelled:
                self.upkeep.before_save()
            generation = save(self.run, flight.request, self.run.rank_writer(writers), flight.topic)
            self.outcomes.durable(flight.at.step)
            self._overtake(flight)
        except BaseException as error:  # noqa: BLE001 - kept, and reported by the training thread
            failed = error
            flight.cancel(error)
            if generation is None:
                flight.topic.fail(error)  # also of what comes before the save itself
        chunks.drain()  # guard: failed-save-drains-chunks
        self._writers.put(writers)
        # Who receives the outcome may begin the next save.
        # guard: place-freed-before-outcome
        self._end(flight)
        handle.note_outcome(generation, failed)
        if failed is not None:
            self._report_failure(handle, failed)
        # Also after one that was dropped: upkeep for the newer one may have given way to it.
        upkeep = self._keeper.submit(self._after_save)
        with self._state:
            self._work.append(upkeep)

    def _overtake(self, newer: _Flight) -> None:
        """Older saves that are not wanted for themselves end now, and their memory and space are used again."""
        with self._state:
            # guard: older-saves-overtaken
            older = [one for one in self._flights if one.at < newer.at and not one.pinned]
        for one in older:
            one.cancel(Overtaken(f"step {newer.at.step} was committed before step {one.at.step}"))

    def _report_failure(self, handle: Save, error: BaseException) -> None:
        kind: EventKind = "dropped" if handle.dropped() else "refused" if isinstance(error, NoSpace) else "failed"
        detail = f"{type(error).__name__}: {error}"
        self.events.put(
            Event(kind=kind, step=handle.step, at_seconds=time.monotonic(), seconds=handle.seconds, detail=detail)
        )
        self.outcomes.put(error, handle.step)  # guard: save-failure-raised-in-loop

    def _after_save(self) -> None:
        """Upkeep, giving way to saves in flight: where too much is unverified, these see to it."""

        def give_way() -> bool:
            return bool(self._flights)  # guard: upkeep-yields-to-saves

        if give_way() or not self.upkeep.after_save(give_way):
            return
        if self.upkeep.scrub_is_due():
            with self._state:
                if not self._flights and not self._closing:  # guard: scrub-yields-to-saves
                    self._busy.clear()
                    with contextlib.suppress(RuntimeError):  # the interpreter is ending: not here, and not now
                        self._scrubbing = ThreadPoolExecutor.submit(self._keeper, self.upkeep.scrub_one)


def _opened(
    path: str | os.PathLike[str], options: RunOptions, ranks: AnyRanks
) -> contextlib.AbstractContextManager[Any]:
    """The place of the run, locked at the coordinator."""
    if ranks.is_coordinator:
        return access.for_writing(path, options.write_mode, in_flight=options.in_flight, persist=options.persist)
    return access.for_sharing(path, options.write_mode)

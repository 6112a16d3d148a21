"""The background threads of a run that is open for writing: saves in flight, and upkeep.

    training thread: acquires a place, starts the save; copies the state itself if the copy is not overlapped
    copier (one thread): state -> arena, or the file in memory itself -> chunks, one save after another
    lane (one of `in_flight` threads): chunks -> writer threads -> COMMIT
    upkeep thread: verify -> point -> delete, after each save; labels of earlier saves; scrubbing between saves
    readers (WORKERS threads; more for an object store): chunks that a restore, a verification or a scrub reads

Invariants
  1. The pipeline owns the threads, the lock and the writer of the run, and releases all of them in `close`.
  2. No thread of it waits for the training thread, but for the chunks of a copy that the training thread itself makes;
     if that copy fails, the wait ends. An error in a thread is put into `outcomes`, and the training thread reports or
     raises it, at the latest at the end of the process.
  3. Every place that was acquired is given back exactly once, before the outcome of its save is visible.
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

from ..coordination.rounds import RankGroup
from ..coordination.single_rank import AnyRanks, AnyTopic
from ..errors import Cancelled, LastgoodError, NoSpace, Overtaken, Refused, TimedOut
from ..events import Event, EventKind
from ..limits import WORKERS
from ..records import Generation, GenerationId
from . import node_opening, paths
from .chunk_queue import ChunkQueue
from .copied_places import CopiedPlaces
from .flight import Flight
from .follower import Follower
from .known import Environment
from .node_disks import NodeDisks
from .outcomes import Outcomes
from .places import Below, opened_front, unite
from .planned_save import PlannedSave, RunOptions
from .save import SaveRequest, save
from .save_handle import Save
from .thread_pools import Pool, Workers, started
from .upkeep import Upkeep
from .writer import CATALOG_LEAST, RunWriter


class Pipeline:
    """A run that is open for writing, with its threads.

    `path`: of the run. `options`: how it is opened. `ranks`: the ranks of the job, or `SingleRank`; all of them open
    the run at the same time. Raises the errors of `access.for_writing`, and Refused if not all threads can be started.
    """

    def __init__(self, path: str | os.PathLike[str], options: RunOptions, ranks: AnyRanks) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.outcomes = Outcomes(os.fspath(path))
        self._ranks = ranks
        self._closing = 0
        """the number of callers that wait for the end of all work; no scrub begins meanwhile"""
        self._scrubbing: Future[None] | None = None
        self.releasing: Future[None] | None = None
        """after a `close` that has timed out: it ends when the lock of the run is released"""
        self._busy = threading.Event()
        self._free_places = threading.BoundedSemaphore(options.in_flight)
        self.holds_place = False
        """whether the training thread holds a place that no flight has taken over yet"""
        self._state = threading.Lock()
        self._flights: list[Flight] = []
        self._work: list[Future[None]] = []
        self._abandoned: list[tuple[int, Future[None]]] = []
        """steps whose save failed before its start, each with the job that removes their files"""
        self._copied = CopiedPlaces(ranks) if isinstance(ranks, RankGroup) else None
        opening = ranks.topic("open")
        with opening.failing(), contextlib.ExitStack() as storage:
            disk = storage.enter_context(opened_front(path, options, ranks, opening))
            below = Below(options, storage, ranks, lambda: bool(self._flights))
            pools = storage.enter_context(contextlib.ExitStack())  # ends the threads if the opening fails
            self._start_threads(options, max(WORKERS, *(one.reads_at_once for one in (disk, *below.tiers))), pools)
            environment = Environment(emit=self.events.put, make_room=lambda needed: self.upkeep.make_room(needed))
            self.run: RunWriter | Follower
            if isinstance(ranks, RankGroup) and not ranks.is_coordinator:
                self.run = Follower(disk, self.workers, ranks, algorithm=options.algorithm, environment=environment)
            else:
                unite([disk, *below.tiers], environment)
                self.run = RunWriter(
                    disk,
                    self.workers,
                    keep=options.keep,
                    parity=options.parity,
                    algorithm=options.algorithm,
                    ranks=ranks,
                    environment=environment,
                )
                if isinstance(disk, NodeDisks):
                    node_opening.complete_records(disk, self.run.known)
                    node_opening.note_lost_parts(self.run.known)
                opening.agree(None, lambda _: None)  # the other ranks wait for it in `opened_front`
            self.places = below.opened(self.run, self.outcomes, pools)
            opening.agree(None, lambda _: None)  # every rank has now opened the run
            pools.pop_all()  # from now on `close` ends the threads
            self._storage = storage.pop_all()
        self.upkeep = Upkeep(self.run, self.outcomes, options.scrub, self._busy, ranks.closed.is_set)
        start = node_opening.start_agent, self.run.tier, options, below.tiers, self.outcomes
        self._work.append(self._upkeep_thread.submit(*start))
        self._unreported = weakref.finalize(self, self.outcomes.report_unreported)

    def _start_threads(self, options: RunOptions, readers: int, pools: contextlib.ExitStack) -> None:
        def running(pool: Pool, count: int) -> Pool:
            pools.callback(pool.shutdown)
            return started(pool, count)

        self.workers = running(Workers(readers, "lastgood-read"), readers)
        self._upkeep_thread = running(Workers(1, "lastgood-keep"), 1)
        self._copier = running(ThreadPoolExecutor(1, "lastgood-copy"), 1)
        self._lanes = running(ThreadPoolExecutor(options.in_flight, "lastgood-save"), options.in_flight)
        self._writers: queue.SimpleQueue[Workers] = queue.SimpleQueue()
        for _ in range(options.in_flight):
            self._writers.put(running(Workers(options.writers, "lastgood-write"), options.writers))

    # ---- from the training thread --------------------------------------------------------------------------

    def acquire_place(self, timeout_seconds: float | None) -> bool:
        """Acquire a place for one more save in flight. Returns False if none is free in time (None: no limit)."""
        self.holds_place = self._free_places.acquire(timeout=timeout_seconds)
        return self.holds_place

    def admit_step(self, step: int) -> GenerationId:
        """The id of a save of `step`, as `RunWriter.admit`. Waits first until an earlier attempt at the step has ended.

        An attempt that Ctrl-C interrupted still removes its files, which have the same names as those of the new one.
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

    def release_place(self, step: int, topic: AnyTopic, error: BaseException) -> None:
        """Give back the place of a save that failed before `start` took it over. With several ranks a lane posts
        `error`."""
        self.holds_place = False
        if self._ranks.size == 1:
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
        """Begin one save, whose place was acquired. It ends in the background and gives its place back there.

        If the copy is not overlapped, this thread makes it first. `handle` receives the progress and the outcome.
        `pinned`: the save is completed even if a newer one is committed first. Raises Refused if the interpreter ends.
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
        flight = Flight(handle, request, planned, topic)
        writing: Future[None] | None = None
        try:
            with self._state:
                # One statement: whatever line Ctrl-C interrupts, either the flight has the place or this thread has.
                self._flights, self.holds_place = [*self._flights, flight], False
                self.run.known.held.add(at, flight)  # guard: save-in-flight-not-deleted
                self._busy.set()
                if pinned:
                    self.run.known.pinned.add(at)
            flight.copy_into_file(self.run.tier)
            writing = self._lanes.submit(self._save, flight)
            with self._state:
                self._work = [*(job for job in self._work if not job.done()), writing]
            if planned.overlapped:  # guard: blocking-save-waits-for-copy
                copying = self._copier.submit(flight.copy, self.run.known)
                with self._state:
                    self._work.append(copying)
            else:
                flight.copy(self.run.known)
        except BaseException as error:
            # Ctrl-C may come between any two of these lines. Closing the queue ends the lane, so close() does not hang.
            flight.chunks.close(Cancelled("the save was interrupted", safe="Nothing of it was committed."))
            if writing is None:
                self._end(flight)
            if isinstance(error, RuntimeError):
                raise Refused("the interpreter is ending", todo="Save before its end, and close().") from error
            raise

    def pin_and_label(self, save: Save, milestone: bool, metrics: Mapping[str, float]) -> Save:
        """Pin a save that was started before, and label its generation as soon as it is durable.

        On a tier with `newest_only` it is not pinned: a newer commit deletes it anyway. It is copied to all places.
        Returns `save`, or, if there is something to label, a handle that ends when the label is durable too.
        """
        with self._state:
            for flight in self._flights:
                if flight.handle is save and not self.run.tier.newest_only:
                    flight.pinned = True
                    self.run.known.pinned.add(flight.at)
        if save.is_committed() and (self.places.below or not self._ranks.is_coordinator):
            self._note_places(save, save.committed(), self.places.add(save.committed().id))
        if not milestone and not metrics:
            return save
        labelled = Save(save.step)
        labelled.note_staged()
        labelled.note_written()

        def label() -> None:
            save.wait_ended()
            try:
                generation = save.committed()
                if isinstance(self.run, RunWriter):
                    generation = self.run.label(generation.id, milestone, metrics)
                copies = {**save.copies_on_nodes(), **self.places.add(generation.id)}
                self._note_places(labelled, generation, copies)
            except BaseException as error:  # noqa: BLE001 - reported by the training thread
                labelled.note_outcome(None, error)
                if save.is_committed():  # otherwise the failure of the save itself is reported
                    self.outcomes.put_always(error)
            else:
                labelled.note_outcome(generation, None)

        job = self._upkeep_thread.submit(label)
        with self._state:
            self._work.append(job)
        return labelled

    def wait(self, timeout: float | None = None, on_nodes: bool = True) -> None:
        """Wait until all saves, labels and upkeep are done, and the copies: with `on_nodes` those on other nodes too.

        Raises TimedOut after `timeout` seconds (None: no limit).
        """
        until = None if timeout is None else time.monotonic() + timeout
        with self._state:
            self._closing += 1
            self._busy.set()
        try:
            while (job := self._unfinished()) is not None:
                job.result(None if until is None else max(0.0, until - time.monotonic()))
            self.places.wait(None if until is None else max(0.0, until - time.monotonic()), on_nodes)
        except FutureTimeout:
            raise TimedOut(
                f"background work is not done after {timeout} s", safe="Every committed generation is untouched."
            ) from None
        finally:
            with self._state:
                self._closing -= 1

    def wait_for_saves(self) -> None:
        """Wait until the saves in flight have ended, but not for what follows them: upkeep, and copies below."""
        for flight in self._in_flight():
            flight.handle.wait_ended()

    def close(self, timeout: float | None = None, survives: bool = False) -> None:
        """Wait until all work is done, then end the threads and release the lock of the run.

        `survives`: whether another rank has died, so that afterwards nothing waits for other ranks (default False).

        Raises TimedOut after `timeout` seconds (None: no limit). The saves in flight are then cancelled at their next
        chunk, and the lock is released when the last job has ended. A system call that hangs holds the process.
        """
        with self._state:
            self._closing += 1
        try:
            self.wait(timeout)
        except TimedOut:
            for flight in self._in_flight():
                flight.cancel(Cancelled("the save was given up", safe="Nothing of it was committed."))
            self.places.stop()
            self._end_waits(survives)
            self.releasing = self._copier.submit(self._release_when_done)
            raise
        self._end_waits(survives)
        self._lanes.shutdown()
        self._copier.shutdown()
        self._upkeep_thread.shutdown()
        while not self._writers.empty():
            self._writers.get().shutdown()
        self.workers.shutdown()
        self._release_run()

    def reported(self) -> None:
        """Called when every outcome was reported: the end of the process then reports nothing."""
        self._unreported.detach()

    # ---- in the background ---------------------------------------------------------------------------------

    def _in_flight(self) -> list[Flight]:
        with self._state:
            return list(self._flights)

    def _unfinished(self) -> Future[None] | None:
        with self._state:
            work = [*self._work, *([self._scrubbing] if self._scrubbing else [])]
            return next((job for job in work if not job.done()), None)

    def _end(self, flight: Flight) -> None:
        """Remove a flight and give back its place, once: a save that is interrupted during `start` may end twice."""
        with self._state:
            if flight not in self._flights:
                return
            self._flights.remove(flight)
            self.run.known.pinned.discard(flight.at)
            self.run.known.held.discard(flight.at, flight)
        flight.end()  # guard: lent-file-released
        self._free_places.release()  # guard: finished-save-frees-place

    def _end_waits(self, survives: bool) -> None:
        """End what waits for other ranks, as far as a close may; all of it where one of them has died."""
        if survives:
            self._ranks.abandoned.set()  # guard: dead-rank-not-awaited-by-survivor
        self._ranks.closed.set()

    def _release_when_done(self) -> None:
        """Release the run as soon as all cancelled work has ended."""
        while (job := self._unfinished()) is not None:
            job.exception()
        self._release_run()

    def _release_run(self) -> None:
        """Close the storage of the run and release its lock. It writes only hints: an error of it is reported."""
        self.upkeep.close()
        self.places.close()
        if isinstance(self.run, RunWriter):
            self.run.note_catalog(CATALOG_LEAST)
        try:
            self._storage.close()
        except LastgoodError as error:
            self.outcomes.put(error)

    def _save(self, flight: Flight) -> None:
        """On a lane: write and commit one save. The handle receives the outcome, and `outcomes` a failure."""
        handle, chunks, writers = flight.handle, flight.chunks, self._writers.get()
        generation: Generation | None = None
        failed: BaseException | None = None
        try:
            if not chunks.cancelled:
                self.upkeep.before_save()
            # Writing to memory is a copy: one thread that reads each piece once takes the least of the processor.
            used = None if paths.in_memory(self.run.tier.place) else writers
            generation = save(self.run, flight.request, self.run.rank_writer(used), flight.topic)
            self._note_places(handle, generation, self.places.offer(generation, flight.pinned))
            # Only the coordinator learns of the copies, and raises for all ranks if none is made.
            volatile = self._ranks.is_coordinator and paths.in_memory(self.run.tier.place)
            self.outcomes.durable(flight.at.step, in_memory=volatile)
            self._overtake(flight)
        except BaseException as error:  # noqa: BLE001 - kept, and reported by the training thread
            failed = error
            flight.cancel(error)
            if generation is None:
                flight.topic.fail(error)  # an error of `before_save` was not posted yet
        chunks.drain()  # guard: failed-save-drains-chunks
        self._writers.put(writers)
        # A caller that has received the outcome may start the next save at once.
        # guard: place-freed-before-outcome
        self._end(flight)
        handle.note_outcome(generation, failed)
        if failed is not None:
            self._report_failure(flight, failed)
        # After a dropped save too: it may have interrupted the upkeep that follows the newer save.
        upkeep = self._upkeep_thread.submit(self._after_save)
        with self._state:
            self._work.append(upkeep)

    def _note_places(self, save: Save, generation: Generation, copies: Mapping[str, Future[None] | None]) -> None:
        save.note_places(self.run.tier.place, copies)
        if self._copied is not None and self._ranks.is_coordinator:
            self._copied.watch(generation.id, copies)
        elif self._copied is not None:
            save.note_posted(self._copied)

    def _overtake(self, newer: Flight) -> None:
        """Cancel the older saves that are not pinned; this frees their memory and their space on the disk."""
        # guard: older-saves-overtaken
        older = [one for one in self._in_flight() if one.at < newer.at and not one.pinned]
        for one in older:
            one.cancel(Overtaken(f"step {newer.at.step} was committed before step {one.at.step}"))

    def _report_failure(self, flight: Flight, error: BaseException) -> None:
        handle = flight.handle
        kind: EventKind = "dropped" if handle.dropped() else "refused" if isinstance(error, NoSpace) else "failed"
        self.run.known.emit(kind, flight.at, handle.seconds, detail=f"{type(error).__name__}: {error}")
        self.outcomes.put(error, handle.step)  # guard: save-failure-raised-in-loop

    def _after_save(self) -> None:
        """On the upkeep thread: upkeep, and a scrub if one is due. Both end when another save is in flight."""

        def give_way() -> bool:
            # guard: upkeep-yields-to-saves
            return bool(self._flights) or self._ranks.closed.is_set()

        self.run.known.agent.end_hung()
        node_opening.check_agent(self.run.tier)
        if give_way() or not self.upkeep.after_save(give_way):
            return
        if self.upkeep.scrub_is_due():
            with self._state:
                if not self._flights and not self._closing:  # guard: scrub-yields-to-saves
                    self._busy.clear()
                    with contextlib.suppress(RuntimeError):  # the interpreter is ending, and no scrub begins
                        self._scrubbing = ThreadPoolExecutor.submit(self._upkeep_thread, self.upkeep.scrub_one)

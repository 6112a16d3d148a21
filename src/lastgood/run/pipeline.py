"""Behind the training loop: saves in flight, each with its threads, and one thread that verifies, points and deletes.

    training thread: admit a save -> start it             copier: state -> arena -> chunks      (one save after another;
                                                          where the loop waits for the copy, it makes it itself)
    lane (one of `in_flight`): chunks -> writers -> COMMIT     keeper: verify -> point -> clean

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Any, TypeVar

from ..coordination.rounds import Ranks, Topic
from ..engine.arena import Arena, Lease
from ..engine.inline_executor import Inline
from ..errors import Cancelled, Damaged, LastgoodError, NoSpace, Overtaken, Refused, TimedOut, TornSnapshot
from ..format import layout
from ..format.layout import Image
from ..policy.arguments import require_seconds
from ..policy.restore import told
from ..policy.retention import Keep
from ..policy.scrub import Scrub
from ..records import Event, EventKind, Generation, GenerationId, Piece
from ..storage.directory import WriteMode
from . import access
from .authority import Follower, Leader
from .outcomes import Outcomes
from .rank_part import Approve, Files
from .reader import WORKERS
from .scrubber import Scrubber
from .writer import RunWriter

Pool = TypeVar("Pool", bound=ThreadPoolExecutor)

UPKEEP_CHUNKS = 3
DELETIONS_AHEAD = 2
"""generations deleted before a reservation, at most: more than a save adds, so that what is too many is worked off"""
BACKLOG_LIMIT = 2
"""unverified generations newer than the newest verified one, above which verifying goes before the next save"""
UNREAD_LIMIT = 10
"""the same where the tier lets go of older ones by itself, so that no disk fills up meanwhile"""


class Save:
    """A save under way. Every method may be called from any thread."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.stall_seconds = 0.0
        """how long the training loop waited for it: in the call, and at the fence"""
        self._begun = time.monotonic()
        self._ended: float | None = None
        self._staged, self._written = threading.Event(), threading.Event()
        self._outcome: Future[Generation] = Future()

    @classmethod
    def of(cls, generation: Generation) -> Save:
        """The save that this generation came from, as one that has ended."""
        save = cls(generation.step)
        save.note_staged()
        save.note_written()
        save.note_outcome(generation, None)
        return save

    def staged(self) -> bool:
        """Whether the live state may change again."""
        return self._staged.is_set()

    def written(self) -> bool:
        """Whether every byte has been written; it is not committed yet."""
        return self._written.is_set()

    def durable(self) -> bool:
        """Whether the generation exists and survives power loss."""
        return self._outcome.done() and self._outcome.exception() is None

    def dropped(self) -> bool:
        """Whether it was given up on purpose: a newer one was committed first, or the state changed under the copy."""
        return isinstance(self.error(), (Overtaken, TornSnapshot))

    def ended(self) -> bool:
        """Whether nothing more is done for it."""
        return self._outcome.done()

    def failed(self) -> bool:
        """Whether it ended without a generation."""
        return self.error() is not None

    def error(self) -> BaseException | None:
        """What it ended with; None while it is under way, and when it is durable."""
        return self._outcome.exception() if self._outcome.done() else None

    def result(self, timeout: float | None = None) -> Generation:
        """Wait until it is durable. Raises what made it fail, or TimedOut after `timeout` seconds."""
        require_seconds(timeout)
        try:
            return self._outcome.result(timeout)
        except FutureTimeout:
            raise TimedOut(
                f"step {self.step} is not durable after {timeout} s", safe="It is still under way."
            ) from None

    def wait_ended(self) -> None:
        """Until nothing more is done for it; raises nothing."""
        self._outcome.exception()

    @property
    def seconds(self) -> float:
        """From the call to durable, or until now."""
        return (self._ended or time.monotonic()) - self._begun

    def note_staged(self) -> None:
        self._staged.set()

    def note_written(self) -> None:
        self._written.set()

    def note_outcome(self, generation: Generation | None, error: BaseException | None) -> None:
        self._ended = time.monotonic()
        if error is not None:
            self._outcome.set_exception(error)
        elif generation is not None:
            self._outcome.set_result(generation)


class Chunks:
    """Filled chunks on their way from the copier to the lane that writes them. The copier always closes it."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Lease | None] = queue.SimpleQueue()
        self._failed: BaseException | None = None
        self._ended = False
        self._given_up: BaseException | None = None

    @property
    def unwanted(self) -> bool:
        """Nobody takes what else would come."""
        return self._given_up is not None

    def give_up(self, reason: BaseException) -> None:
        """Whoever writes this save ends at its next chunk, with this."""
        self._given_up = self._given_up or reason

    def put(self, lease: Lease) -> None:
        self._queue.put(lease)

    def close(self, failed: BaseException | None) -> None:
        self._failed = failed
        self._queue.put(None)

    def __iter__(self) -> Iterator[Lease]:
        while self._given_up is None and not self._ended:
            lease = self._queue.get()
            if lease is not None:
                yield lease
            self._ended = lease is None
        if self._given_up is not None:
            raise self._given_up
        if self._failed is not None:
            raise self._failed

    def finish(self) -> None:
        """Wait until the copier has closed it. Raises what made the copy fail."""
        for lease in self:
            lease.release()

    def drain(self) -> None:
        """Release whatever else comes, to the end."""
        while not self._ended:
            lease = self._queue.get()
            if lease is None:
                self._ended = True
            else:
                lease.release()


class Workers(ThreadPoolExecutor):
    """A pool that still works when the interpreter is ending: then in the thread that asks. Its threads are started."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            return Inline().submit(fn, *args, **kwargs)


def _started(pool: Pool, count: int) -> Pool:
    """A pool whose threads all run: later, beside many others, there may be none to be had. Raises Refused."""
    together = threading.Barrier(count)
    try:
        # guard: threads-started-ahead
        for job in [ThreadPoolExecutor.submit(pool, together.wait) for _ in range(count)]:
            job.result()
    except RuntimeError as error:
        together.abort()
        pool.shutdown()
        raise Refused(
            f"not all threads could be started: {error}",
            safe="Nothing was touched.",
            todo="Raise the limit of threads of this user or container, or take fewer writers.",
        ) from error
    return pool


class _Flight:
    """One save between its start and its end."""

    def __init__(self, save: Save, at: GenerationId, arena: Arena, pinned: bool, size: int) -> None:
        self.save, self.at, self.arena, self.pinned, self.bytes = save, at, arena, pinned, size
        self.chunks = Chunks()

    def give_up(self, reason: BaseException) -> None:
        self.chunks.give_up(reason)
        self.arena.wake()  # guard: memory-waiters-woken


class Background:
    """A run that is open for writing, and the threads that keep it. Raises what `access.for_writing` raises."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        write_mode: WriteMode,
        keep: Keep,
        algorithm: str,
        *,
        in_flight: int = 2,
        writers: int = WORKERS,
        persist: access.Persist = "direct",
        parity: str | None = None,
        scrub: Scrub | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.outcomes = Outcomes(os.fspath(path))
        self.latest: int | None = None
        """step of the newest verified generation"""
        self._upkeep_arena: Arena | None = None
        self._hurried = 0
        """who waits for the end of the work: nothing is read again for its own sake"""
        self._scrubbing: Future[None] | None = None
        self._scrub, self._scrubbed_at, self._busy = scrub, time.monotonic(), threading.Event()
        self._free_places = threading.BoundedSemaphore(in_flight)
        self._state = threading.Lock()
        self._flights: list[_Flight] = []
        self._work: list[Future[None]] = []
        self._abandoned: list[tuple[int, Future[None]]] = []
        """what is being cleared away of steps that this rank could not save"""
        self._looking, self._ranks = threading.Lock(), ranks
        opening, leads = (ranks.topic("open"), ranks.coordinates) if ranks else (None, True)
        with opening.failing() if opening else contextlib.nullcontext(), contextlib.ExitStack() as place:
            if opening and not leads:
                opening.agree(None, lambda _: None)  # it is ours, it may be written, and it is settled
            disk = place.enter_context(
                access.for_writing(path, write_mode, in_flight=in_flight, persist=persist)
                if leads
                else access.for_sharing(path, write_mode)
            )
            pools = place.enter_context(contextlib.ExitStack())  # ended where what follows fails; else by `close`

            def started(pool: Pool, count: int) -> Pool:
                pools.callback(pool.shutdown)
                return _started(pool, count)

            self.workers = started(Workers(WORKERS, "lastgood-read"), WORKERS)
            self._keeper = started(Workers(1, "lastgood-keep"), 1)
            self._copier = started(ThreadPoolExecutor(1, "lastgood-copy"), 1)
            self._lanes = started(ThreadPoolExecutor(in_flight, "lastgood-save"), in_flight)
            self._writers: queue.SimpleQueue[Workers] = queue.SimpleQueue()
            for _ in range(in_flight):
                self._writers.put(started(Workers(writers, "lastgood-write"), writers))
            self.run = _writer(ranks)(
                disk,
                self.workers,
                keep=keep,
                parity=parity,
                algorithm=algorithm,
                tell=self.events.put,
                make_room=self._make_room,
            )
            if opening and leads:
                opening.agree(None, lambda _: None)
            if opening:
                opening.agree(None, lambda _: None)  # every rank has it open
            pools.pop_all()
            self._place = place.pop_all()
        self._scrubber = Scrubber(
            self.run,
            partial(Arena, UPKEEP_CHUNKS * layout.CHUNK_BYTES, layout.CHUNK_BYTES),  # it may be put aside
            bytes_per_second=scrub.bytes_per_second if scrub else float("inf"),
            pause=self._busy.wait,
        )
        self.note_latest()
        self._unreported = weakref.finalize(self, self.outcomes.report_unread)

    # ---- from the training thread --------------------------------------------------------------------------

    def admit(self, patience_seconds: float | None) -> bool:
        """Take a place for one more save in flight, waiting so long at most (None: for ever); False if none is free."""
        return self._free_places.acquire(timeout=patience_seconds)

    def admit_step(self, step: int) -> GenerationId:
        """Where a save of `step` will go, as `RunWriter.admit`, once an earlier try of the same has ended.

        One that Ctrl-C cut short is still being cleared away, and would take the new one for its own.
        """
        at = self.run.admit(step)
        with self._state:
            earlier = [flight.save for flight in self._flights if flight.at == at]
            abandoned = [job for of, job in self._abandoned if of == step]
            self._abandoned = [(of, job) for of, job in self._abandoned if not job.done()]
        for save in earlier:  # guard: earlier-attempt-ended-first
            save.wait_ended()
        for job in abandoned:
            job.exception()
        return self.run.admit(step)

    def leave(self, step: int, together: Topic | None, error: BaseException | None) -> None:
        """Give back a place that `start` was not called for; of several ranks the others hear why, behind the loop."""
        if together is None or error is None:
            self._free_places.release()
            return

        def abandon() -> None:
            try:
                self.run.abandon(step, together, error)
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
        save: Save,
        at: GenerationId,
        images: Sequence[Image],
        fill: Callable[[Callable[[], bool]], Iterator[Lease]],
        approve: Approve,
        arena: Arena,
        pinned: bool,
        here: bool,
        options: Mapping[str, Any],
    ) -> None:
        """Begin to copy and to write one save, whose place was taken; it ends by itself, and upkeep follows it.

        `fill(stop)` gives the filled chunks, in order, and ends with Cancelled when `stop()`. `approve` as in
        `RunWriter.save`. `here`: this thread makes the copy, before the return. Raises Refused when the interpreter is
        ending.
        """
        flight = _Flight(save, at, arena, pinned, sum(image.length for image in images))
        writing: Future[None] | None = None
        try:
            with self._state:
                self._flights.append(flight)
                self._busy.set()
                if pinned:
                    self.run.pinned.add(at)
            writing = self._lanes.submit(self._persist, flight, images, approve, options)
            with self._state:
                self._work = [*(job for job in self._work if not job.done()), writing]
            if here:
                self._copy(flight, fill)
            else:
                self._copy_behind(flight, fill)
        except BaseException as error:
            # Ctrl-C may come between any two of these lines: whatever has begun ends, and close() waits for nobody.
            flight.chunks.close(Cancelled("the save was interrupted", safe="Nothing of it was committed."))
            if writing is None:
                self._end(flight)
            if isinstance(error, RuntimeError):
                raise Refused("the interpreter is ending", todo="Save before its end, and close().") from error
            raise

    def _copy_behind(self, flight: _Flight, fill: Callable[[Callable[[], bool]], Iterator[Lease]]) -> None:
        try:
            copying = self._copier.submit(self._copy, flight, fill)
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
                if flight.save is save and not self.run.tier.newest_only:
                    flight.pinned = True
                    self.run.pinned.add(flight.at)
        if not milestone and not metrics:
            return save
        labelled = Save(save.step)
        labelled.note_staged()
        labelled.note_written()

        def label() -> None:
            save.wait_ended()
            try:
                generation = self.run.label(save.result().id, milestone, metrics)
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
        """Until everything that was begun is done. Raises TimedOut."""
        until = None if timeout is None else time.monotonic() + timeout
        with self._state:
            self._hurried += 1
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
                self._hurried -= 1

    def close(self, timeout: float | None = None) -> None:
        """Wait, then let go of the run. On TimedOut what is under way is given up at its next chunk.

        The lock goes when the last thread has ended. A system call that hangs holds its thread, and the process too.
        """
        with self._state:
            self._hurried += 1
        try:
            self.wait(timeout)
        except TimedOut:
            with self._state:
                flights = list(self._flights)
            for flight in flights:
                flight.give_up(Cancelled("the save was given up", safe="Nothing of it was committed."))
            self._let_all_go()
            self._copier.submit(self._let_go)
            raise
        self._let_all_go()
        self._lanes.shutdown()
        self._copier.shutdown()
        self._keeper.shutdown()
        while not self._writers.empty():
            self._writers.get().shutdown()
        self.workers.shutdown()
        self._leave_place()
        self._upkeep_arena = None

    def _let_all_go(self) -> None:
        """Nobody waits for other ranks any more."""
        if self._ranks is not None:
            self._ranks.left.set()

    def reported(self) -> None:
        """Every outcome has been reported: nothing is left for the end of the process."""
        self._unreported.detach()

    def small_arena(self) -> Arena:
        """Memory for reading beside a save."""
        if self._upkeep_arena is None:
            self._upkeep_arena = Arena(UPKEEP_CHUNKS * layout.CHUNK_BYTES, layout.CHUNK_BYTES)
        return self._upkeep_arena

    def note_latest(self) -> None:
        newest = self.run.newest_verified()
        self.latest = newest.step if newest else None

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
            self.run.pinned.discard(flight.at)
        self._free_places.release()  # guard: finished-save-frees-place

    def _let_go(self) -> None:
        """After everything that was given up, wherever it stands."""
        while (job := self._unfinished()) is not None:
            job.exception()
        self._leave_place()

    def _leave_place(self) -> None:
        """What cannot be written at the end is hints: told, and the lock goes all the same."""
        self._scrubber.close()
        try:
            self._place.close()
        except LastgoodError as error:
            self.outcomes.put(error)

    def _copy(self, flight: _Flight, fill: Callable[[Callable[[], bool]], Iterator[Lease]]) -> None:
        """The live state is read here, and may change again once this is over."""
        failed: BaseException | None = None
        begun = time.monotonic()
        try:
            for lease in fill(lambda: flight.chunks.unwanted):  # guard: copier-stops-when-unwanted
                flight.chunks.put(lease)
            now = time.monotonic()
            self.events.put(
                Event(kind="staged", step=flight.at.step, at_seconds=now, seconds=now - begun, bytes=flight.bytes)
            )
        except Exception as error:  # noqa: BLE001 - raised where the chunks are written, and told from there
            failed = error
        except BaseException:
            failed = Cancelled("the copy was interrupted", safe="Nothing of it was committed.")
            raise  # guard: interrupt-in-copy-raised
        finally:
            flight.save.note_staged()  # guard: failed-copy-unblocks-loop
            flight.chunks.close(failed)  # guard: failed-copy-fails-save

    def _persist(
        self,
        flight: _Flight,
        images: Sequence[Image],
        approve: Approve,
        options: Mapping[str, Any],
    ) -> None:
        """On a lane: one save from its chunks to its commit. The handle hears its outcome, the loop its failure."""
        save, chunks, writers = flight.save, flight.chunks, self._writers.get()

        def approved(pieces: Sequence[Piece]) -> Files:
            save.note_written()
            # guard: copier-finished-before-commit
            chunks.finish()  # what the copier found out last
            return approve(pieces)

        generation: Generation | None = None
        failed: BaseException | None = None
        try:
            if not chunks.unwanted:
                self._catch_up()
            generation = self.run.save(flight.at, images, iter(chunks), approve=approved, writers=writers, **options)
            self.outcomes.durable(flight.at.step)
            self._overtake(flight)
        except BaseException as error:  # noqa: BLE001 - kept, and reported by the training thread
            failed = error
            flight.give_up(error)
            if options["together"] is not None and generation is None:
                options["together"].fail(error)  # also of what comes before the save itself
        chunks.drain()  # guard: failed-save-drains-chunks
        self._writers.put(writers)
        # guard: place-freed-before-outcome
        self._end(flight)  # whoever has its outcome may begin the next one
        save.note_outcome(generation, failed)
        if failed is not None:
            self._tell_end(save, failed)
        # Also after one that was dropped: upkeep for the newer one may have given way to it.
        upkeep = self._keeper.submit(self._upkeep)
        with self._state:
            self._work.append(upkeep)

    def _overtake(self, newer: _Flight) -> None:
        """Older saves that nobody wants for themselves end now, and their memory and space are used again."""
        with self._state:
            # guard: older-saves-overtaken
            older = [one for one in self._flights if one.at < newer.at and not one.pinned]
        for one in older:
            one.give_up(Overtaken(f"step {newer.at.step} was committed before step {one.at.step}"))

    def _tell_end(self, save: Save, error: BaseException) -> None:
        kind: EventKind = "dropped" if save.dropped() else "refused" if isinstance(error, NoSpace) else "failed"
        detail = f"{type(error).__name__}: {error}"
        self.events.put(
            Event(kind=kind, step=save.step, at_seconds=time.monotonic(), seconds=save.seconds, detail=detail)
        )
        self.outcomes.put(error, save.step)  # guard: save-failure-raised-in-loop

    @property
    def _backlog_limit(self) -> int:
        return UNREAD_LIMIT if self.run.tier.newest_only else BACKLOG_LIMIT

    def _upkeep(self) -> None:
        """Verify, point and clean, giving way to saves in flight: where too much is unverified, these see to it."""

        def give_way() -> bool:
            return bool(self._flights)  # guard: upkeep-yields-to-saves

        if give_way():
            return
        try:
            self._look_after(give_way)
        except Cancelled:
            return  # a later commit has made this one uninteresting; that one is looked after
        except BaseException as error:  # noqa: BLE001 - reported by the training thread
            self.outcomes.put(error)
        # guard: scrub-waits-for-interval
        if self._scrub and time.monotonic() - self._scrubbed_at >= self._scrub.seconds:
            with self._state:
                if not self._flights and not self._hurried:  # guard: scrub-yields-to-saves
                    self._busy.clear()
                    with contextlib.suppress(RuntimeError):  # the interpreter is ending: not here, and not now
                        self._scrubbing = ThreadPoolExecutor.submit(self._keeper, self._read_an_old_one)

    def _read_an_old_one(self) -> None:
        try:
            with self._looking:
                done = self._scrubber.next_one(self._busy.is_set) or self._scrubber.next_one(self._busy.is_set)
        except Cancelled:
            return  # its turn comes again
        except BaseException as error:  # noqa: BLE001 - reported by the training thread
            self.outcomes.put(error)
            done = None
        self._scrubbed_at = time.monotonic()
        if done is not None and not done.whole:  # guard: scrub-damage-raised-in-loop
            self.note_latest()
            self.outcomes.put(
                Damaged(
                    f"step {done.generation.step} was good and does not read back any more: {told(done.findings)}",
                    safe="It is marked; restore goes to a good one. Its neighbours are read next.",
                    todo="Check the disk.",
                )
            )

    def _catch_up(self) -> None:
        """Verify and delete before the next reservation: the disk stays bounded. What is found does not stop the save.

        Only DELETIONS_AHEAD generations are deleted here, so that no save waits for many; upkeep deletes the rest.
        Where the tier lets go of what is not the newest, no other save may be committed while it is read.
        """
        try:
            if self.run.backlog() > self._backlog_limit:  # guard: verify-before-next-save
                self._look_after(lambda: False, self.run.tier.newest_only, DELETIONS_AHEAD)
            elif self.run.surplus():  # guard: delete-before-next-save
                with self._looking:
                    self.run.clean(most=DELETIONS_AHEAD)  # guard: few-deletions-before-save
        except LastgoodError as error:
            self.outcomes.put(error)

    def _look_after(self, stop: Callable[[], bool], alone: bool = False, most: int | None = None) -> None:
        """Verify, point, and delete `most` generations at most; what verifying finds does not keep it from deleting."""
        with self._looking, self.run.turn if alone else contextlib.nullcontext():
            try:
                self.run.verify(self.small_arena(), stop)
                self.outcomes.verified()
            except Cancelled:
                raise
            except LastgoodError as error:
                self.outcomes.put(error)
            finally:
                self.note_latest()
            self.run.clean(stop, most)

    def _make_room(self, needed_bytes: int) -> bool:
        """The disk is full: delete an older generation, once verifying newer ones has made it needless if need be."""
        if self.run.tier.newest_only:
            return False  # its space is reserved already
        with self._looking:
            if self.run.relieve(needed_bytes):
                return True
            try:
                self.run.verify(self.small_arena())
            except LastgoodError as error:
                self.outcomes.put(error)
            self.note_latest()
            return self.run.relieve(needed_bytes)


def _writer(ranks: Ranks | None) -> Callable[..., RunWriter]:
    if ranks is None:
        return RunWriter
    return partial(Leader if ranks.coordinates else Follower, ranks=ranks)

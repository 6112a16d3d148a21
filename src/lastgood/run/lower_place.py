"""A lower place of a run: generations are copied to it behind the training loop, from the place that is written first.
While nothing waits, old generations are read again (place_scrub.py).

Invariants
  1. A generation that waits for its copy is not deleted from the place that it is copied from.
  2. What waits is bounded: more than the retention of this place would keep of the newest generations never wait.
     Milestones, and steps that its retention selects by their number, wait beside them.
  3. While this place cannot be reached, the training loop waits for nothing; what waits is copied once it can.
  4. What is left here of a copy that was given up is deleted before the next one, as far as it can be.
  5. `close` tries once more to copy what waits, and ends the thread. What is still missing then is copied after the
     next opening of the run.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import NamedTuple, cast

from ..coordination.rounds import RankGroup
from ..coordination.single_rank import AnyRanks
from ..engine.arena import Arena
from ..errors import Cancelled, Damaged, LastgoodError, NoSpace, NotWritable, Overtaken, TimedOut, Unavailable
from ..format import commit, layout
from ..io import memory_files
from ..limits import CHUNK_BYTES, EXAMINATION_CHUNKS
from ..policy.places import lacking
from ..policy.retention import wanted_after
from ..ports import Mendable, Tier
from ..records import Generation, GenerationId
from ..units import plural
from . import copying, disk_space
from .known import KnownRun
from .outage import Outage
from .outcomes import Outcomes
from .part_copies import OtherRanks
from .place_scrub import PlaceScrub, Scrubbing
from .save import clear_failed
from .thread_pools import EXIT_POLL_SECONDS, interpreter_is_ending
from .writer import CATALOG_LEAST, RunWriter

PAUSES_SECONDS = (1.0, 5.0, 20.0, 60.0)
"""The pauses after failed attempts in a row; the last one is repeated."""


PROMISES_LIMIT = 1024
"""more saves than are ever in flight"""


def pause_seconds(failures: int) -> float:
    """The pause after so many failed attempts in a row, at least one."""
    return PAUSES_SECONDS[min(failures, len(PAUSES_SECONDS)) - 1]


class _Copy(NamedTuple):
    """A copy that waits. `order`: of the branch of its generation."""

    order: int
    ended: Future[None]


class LowerPlace:
    """Copies generations of an open run from the place of `source` to that of `writer`, and scrubs them there.

    `start` starts the thread that does so. Each of its attempts to copy is one call of `copy_next`.

    `writer`: of this place; it deletes what its retention does not keep. `source`: what the process knows of the run
    where it is written first. `workers`: threads that read and digest; `close` ends them. `outcomes`: receives errors.
    `ranks`: the ranks of the job, each of which copies its part. `index`: the position of this place among the lower
    ones. `scrubbing`: how old generations are read again (None: they are not).
    """

    def __init__(
        self,
        writer: RunWriter,
        source: KnownRun,
        workers: Executor,
        outcomes: Outcomes,
        ranks: AnyRanks,
        index: int,
        scrubbing: Scrubbing | None = None,
    ) -> None:
        self.writer, self._source, self._workers, self._outcomes = writer, source, workers, outcomes
        self._others: copying.Others = copying.Nobody()
        if isinstance(ranks, RankGroup):
            self._others = OtherRanks(ranks, str(index), source.tier, lambda: self._stopped)
        writer.verifier.others, writer.verifier.agent = self._others, source.agent
        self._changed = threading.Condition()
        self._waiting: dict[GenerationId, _Copy] = {}
        self._pinned: set[GenerationId] = set()
        self._owed: set[int] = set()
        """steps of which a copy is due: of the first generation of the step, or of a later one, that is committed"""
        self._promised: set[int] = set()
        """steps whose saves have been promised a copy of their own, whatever is committed before"""
        self._begun: set[GenerationId] = set()
        """generations whose copy was begun and has not been completed: files of them may be here, without COMMIT"""
        self._under_way: GenerationId | None = None
        """the generation of the last attempt, which reads it unless that attempt has failed"""
        self._outage = Outage(source, writer.tier.place, outcomes)
        self._failures = self._failed_attempts = 0
        """how many attempts in a row have failed, and how many since the run was opened"""
        self._copying: GenerationId | None = None
        """the generation of the present attempt"""
        self._again = False
        """whether it was added once more meanwhile"""
        self._trying = self._hurried = self._closing = self._last_try = self._stopped = False
        """whether an attempt is under way; whether no pause is made before the next one; whether this place is being
        closed; whether the present attempt began after that; whether no attempt is to go on"""
        self._report: Callable[[], None] | None = None
        """what the thread calls before its next copy"""
        self._scrub = PlaceScrub(writer, scrubbing, source.agent, outcomes, self._rest) if scrubbing else None
        self._thread = threading.Thread(target=self._run, name="lastgood-drain")

    def start(self) -> LowerPlace:
        """Start the thread, which `close` ends. Returns this place."""
        self._thread.start()
        return self

    def report_first(self, report: Callable[[], None]) -> None:
        """Let the thread call `report` before its next copy, or at `close`. No caller waits if this place hangs."""
        with self._changed:
            self._report = report
            self._changed.notify_all()

    @property
    def tier(self) -> Tier:
        return self.writer.tier

    def owe(self, step: int) -> None:
        """Note that a save of this step begins of which a copy is due; if it fails, one of the next later save."""
        with self._changed:
            self._owed.add(step)
            self._promised.add(step)
            if len(self._promised) > PROMISES_LIMIT:  # the oldest are of saves that have failed
                self._promised.remove(min(self._promised))

    def forget_owed(self) -> None:
        """No copy is due until `owe` is called again."""
        with self._changed:
            self._owed.clear()  # guard: rewind-owes-nothing
            self._promised.clear()

    def offer(self, generation: Generation, pinned: bool) -> Future[None] | None:
        """Called when a generation was committed. Copies it if a copy is due; returns as `add`, None if none is due."""
        with self._changed:
            due = {step for step in self._owed if step <= generation.step}  # guard: each-owed-copy-made
            # A later save may have been committed, or offered, before this one.
            promised = generation.step in self._promised  # guard: later-commit-still-owed
            if not due and not promised and not wanted_after(self.writer.keep, generation.commit):
                return None
            self._owed -= due
            self._promised.discard(generation.step)
        return self.add(generation, pinned)

    def add(self, generation: Generation, pinned: bool) -> Future[None]:
        """Copy a generation behind the loop. The result ends when it is verified here, or when it is given up.

        `pinned`: it is copied even if newer ones are waiting.
        """
        at, keep = generation.id, self.writer.keep
        with self._changed:
            copied = self._waiting.setdefault(at, _Copy(generation.commit.order, Future()))
            if self._copying == at:  # guard: label-during-copy-copied-again
                self._again = True  # the copy may have passed the labels already
            self._source.held.add(at, self)  # guard: waiting-generation-held
            if pinned or wanted_after(keep, generation.commit):
                self._pinned.add(at)
            kept = self._pinned | {self._under_way}  # guard: copy-under-way-not-overtaken
            others = [one for one in self._oldest_first() if one not in kept]
            for old in others[: -keep.last]:  # guard: waiting-copies-bounded
                self._end(old, Overtaken(f"{old} was not copied to {self.tier.place}: newer generations are waiting"))
            self._changed.notify_all()
        return copied.ended

    def catch_up(self) -> None:
        """After the opening: copy the newest good generation and those that retention selects, if they are not here.

        A copy that an earlier process has not read back, or that lacks a label, counts as absent. What is left of
        copies that were interrupted is deleted first.
        """
        self.writer.remove_unfinished_copies()
        source = self._source
        with source.lock:
            lacks = lacking(source.survey, self.writer.known.survey, source.everywhere, self.writer.keep)
        for one in lacks:
            self.add(one, True)

    def waiting(self) -> int:
        """How many generations wait for their copy."""
        with self._changed:
            return len(self._waiting)

    def wait(self, timeout_seconds: float | None) -> None:
        """Wait until everything is copied, or until an attempt that began after this call has failed.

        Raises TimedOut after `timeout_seconds` (None: no limit).
        """
        with self._changed:
            # An attempt that is under way may have begun before this call.
            most = self._failed_attempts + (2 if self._trying else 1)
            self._hurried = True
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not self._waiting or self._failed_attempts >= most, timeout_seconds)
            self._hurried = False
        if not done:
            raise TimedOut(
                f"{self.tier.place} has not received all generations after {timeout_seconds} s",
                safe="They are kept where they were written first, and copied later.",
            )

    def stop(self) -> None:
        """Interrupt the copy that is under way, at its next chunk, and begin no other one."""
        with self._changed:
            self._stopped = self._closing = True
            self._changed.notify_all()

    def close(self) -> None:
        """Try once more to copy what waits, unless `stop` was called, then end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._others.end()
        if not self._stopped:
            self.writer.note_catalog(CATALOG_LEAST)
        self._workers.shutdown()
        with self._changed:
            missing = self._oldest_first()
            if not missing:
                return
            named = f"{missing[-1]}" + (f" and {plural(len(missing) - 1, 'older one')}" if len(missing) > 1 else "")
            late = Unavailable(
                f"{self.tier.place} has not received {named}",
                safe=f"{self._source.tier.place} keeps what waits.",
                todo="It is copied after the next opening of the run with the same places.",
            )
            self._outcomes.put(late)
            for at in missing:
                self._end(at, late)

    # ---- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._wait_for_work():
            if self._trying:
                self.copy_next()
            elif (report := self._report) is not None:
                self._report = None
                try:
                    report()
                except Exception as error:  # noqa: BLE001 - reported by the training thread; copies go on
                    self._outcomes.put(error)
            elif self._scrub is not None:
                self._scrub.scrub_one(self._is_ending, lambda: bool(self._waiting))
        if self._scrub is not None:
            self._scrub.close()

    def _wait_for_work(self) -> bool:
        """Wait until a generation is to be copied (`_trying`) or scrubbed, or there is a report to make. Returns False
        if the thread is to end."""
        with self._changed:
            self._trying = False
            while not self._stopped:
                if self._report is not None:  # guard: bound-below-reported-at-close
                    return True
                if self._closing and (not self._waiting or self._last_try):
                    return False
                if not self._waiting:
                    if self._scrub is not None and not self._is_ending() and self._scrub.is_due():
                        return True
                    self._changed.wait_for(lambda: self._waiting or self._closing or self._report, EXIT_POLL_SECONDS)
                    self._closing |= interpreter_is_ending()  # guard: unclosed-place-ends-with-the-process
                    continue
                if self._failures and not self._closing and not self._paused():
                    continue
                self._trying, self._last_try = True, self._closing
                return True
            return False

    def _is_ending(self) -> bool:
        """Whether a scrub is to end: this place is being closed, or the process ends without a call of `close`."""
        return self._closing or interpreter_is_ending()  # guard: unclosed-scrub-ends-with-the-process

    def _rest(self, seconds: float) -> None:
        """Wait so long between two blocks of a scrub, unless there is a copy to make, or the thread is to end."""
        until = time.monotonic() + seconds
        with self._changed:
            # guard: slow-scrub-gives-way
            while not (self._waiting or self._is_ending()) and (left := until - time.monotonic()) > 0:
                self._changed.wait(min(left, EXIT_POLL_SECONDS))

    def _paused(self) -> bool:
        """Make the pause after a failed attempt. Returns False if this place is to be closed. The lock is held."""
        pause = 0.0 if self._hurried else pause_seconds(self._failures)
        until = time.monotonic() + pause
        while not self._closing and not self._hurried and (left := until - time.monotonic()) > 0:
            self._changed.wait(min(left, EXIT_POLL_SECONDS))
            self._closing |= interpreter_is_ending()
        return not self._closing

    def copy_next(self) -> None:
        """Try to copy the newest generation that waits, if there is one. Only one call may be under way.

        If this place cannot be reached now, the generation goes on waiting. Errors are put into `outcomes`.
        """
        with self._changed:
            if not self._waiting:
                return
            at = self._oldest_first()[-1]  # the newest is worth most
            self._copying, self._again = at, False
        failed: Exception | None = None
        try:
            self._copy(at)
        except Cancelled:
            return
        except Overtaken as error:
            with self._changed:
                self._copying, self._last_try = None, False
                self._end(at, error)  # guard: copy-without-source-given-up
                self._changed.notify_all()
            return
        except (Unavailable, NotWritable) as error:
            if isinstance(error, NoSpace) and self._made_room(at):
                with self._changed:
                    self._under_way, self._last_try = None, False
                return  # what is then the newest is copied at once
            self._outage.failed(at, error)
            with self._changed:
                self._under_way = None  # guard: failed-copy-overtaken
                self._failures += 1
                self._failed_attempts += 1
                self._changed.notify_all()
            return
        except Exception as error:  # noqa: BLE001 - it is damaged at the source, this writer was replaced, or a bug
            self._outcomes.put(error)
            failed = error  # guard: failed-copy-ends-its-wait
        else:
            self._outage.ended()
        with self._changed:
            self._failures, self._last_try, self._copying = 0, False, None
            if failed is not None or not self._again:
                self._end(at, failed)
            self._changed.notify_all()

    def _made_room(self, at: GenerationId) -> bool:
        """Delete a generation here that newer verified ones make unnecessary, if the disk has no room for the rest of
        this one, and this one is newer than all that is here. Returns whether one was deleted."""
        with self._source.lock:
            one = self._source.survey.generations.get(at)
        newest = next(iter(self.writer.lineage()), None)
        if one is None or (newest is not None and (newest.commit.order, newest.id) >= (one.commit.order, at)):
            return False
        try:
            needed = one.bytes - sum(size or 0 for size in self.tier.list(layout.folder(at)).values())
            # Where there is room, the error has another cause, such as a limit on the length of a file.
            lacks = needed > 0 and disk_space.room_bytes(self.tier.place) < needed + memory_files.RECORDS_BYTES
        except (LastgoodError, OSError):
            return False
        return lacks and self.writer.make_room(needed)  # guard: full-place-below-relieved

    def _copy(self, at: GenerationId) -> None:
        known, source = self.writer.known, self._source
        with self._changed:
            if at not in self._waiting:
                raise Overtaken(f"{at} was overtaken between the choice and this call")
            self._under_way = at
        with source.lock:
            generation = source.survey.generations.get(at)
            incarnations = dict(source.view.incarnations)
        if generation is None:
            raise self._deleted(at)
        now = source.environment.monotonic_seconds
        begun = now()
        arena = Arena(EXAMINATION_CHUNKS * CHUNK_BYTES, CHUNK_BYTES)
        target = cast(Mendable, self.tier)
        self._remove_given_up()
        with contextlib.suppress(LastgoodError):  # each COMMIT holds what its record says; the next copy tries again
            copying.copy_incarnations(source.tier, target)
        if held := copying.holds(target, generation):
            commit.copy_records([source.tier], target, generation)  # labels that were added since
        else:
            how = copying.Copying(arena, self._workers, stop=lambda: self._stopped, agent=source.agent)
            self._begun.add(at)
            try:
                copying.complete(target, [source.tier], generation, how, self._others)
            except Damaged:
                # Where COMMIT is, every byte has been copied: what does not read back is damaged there.
                # guard: damaged-copy-is-no-overtaken-one
                if at in source.survey.generations or layout.COMMIT in target.list(layout.folder(at)):
                    raise
                clear_failed(target, at)
                raise self._deleted(at) from None  # guard: overwritten-source-is-not-damage
        self._begun.discard(at)
        there = commit.read_generation(target, at, generation.commit.run)
        with known.lock:
            known.survey.incarnations.update(incarnations)
            known.record(there)
        self._outcomes.copied(at.step)
        if not held:
            source.emit("copied", at, seconds=now() - begun, size=there.bytes, detail=self.tier.place)
        code = self.writer.verifier.code
        if code is not None and there.good:
            self.writer.verifier.protect(there, code, arena, lambda: self._stopped)
        self.writer.clean()

    def _remove_given_up(self) -> None:
        """Delete what is here of copies that were given up after they had begun."""
        with self._changed:
            given_up = self._begun - self._waiting.keys()  # guard: given-up-copy-removed
        for at in given_up:
            if layout.COMMIT not in self.tier.list(layout.folder(at)):
                clear_failed(self.tier, at)
            left = self.tier.list(layout.folder(at))
            if not left or layout.COMMIT in left:  # otherwise it is tried again
                self._begun.discard(at)

    def _deleted(self, at: GenerationId) -> Overtaken:
        """The error for a generation that is not in the place any more that it is copied from: slots keep the newest
        only. The next commit is copied in its place."""
        with self._changed:
            self._owed.add(at.step)
        return Overtaken(f"{at} was deleted from {self._source.tier.place} before {self.tier.place} had its copy")

    def _oldest_first(self) -> list[GenerationId]:
        """What waits. The newest is of the newest branch, whose steps may be lower after a rewind. The lock is held."""
        return sorted(self._waiting, key=lambda at: (self._waiting[at].order, at))  # guard: newest-branch-copied-first

    def _end(self, at: GenerationId, error: Exception | None) -> None:
        """Note that a generation waits no more. The lock is held."""
        copied = self._waiting.pop(at, None)
        self._pinned.discard(at)
        self._source.held.discard(at, self)
        if copied is not None:
            if error is None:
                copied.ended.set_result(None)
            else:
                copied.ended.set_exception(error)

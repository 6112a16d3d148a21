"""Upkeep behind the training loop: verify, point and delete after each save, and read old generations again.

It gives way to saves in flight; where too much is unverified, the next save does it before it reserves its space.
"""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial

from ..engine.arena import Arena
from ..errors import Cancelled, Damaged, LastgoodError
from ..format import layout
from ..policy.restore import summary
from ..policy.scrub import Scrub
from .follower import Follower
from .outcomes import Outcomes
from .scrubber import Scrubber
from .verify import Stop, never
from .writer import RunWriter

ARENA_CHUNKS = 3
DELETIONS_AHEAD = 2
"""generations deleted before a reservation, at most: more than a save adds, so that a surplus shrinks"""
BACKLOG_LIMIT = 2
"""unverified generations newer than the newest verified one, above which verifying goes before the next save"""
UNREAD_LIMIT = 10
"""the same where the tier deletes older ones by itself, so that no disk fills up meanwhile"""


class Upkeep:
    """The upkeep of one run that is open for writing. `busy`: set while saves are in flight or about to begin."""

    def __init__(
        self, run: RunWriter | Follower, outcomes: Outcomes, scrub: Scrub | None, busy: threading.Event
    ) -> None:
        self._run, self._outcomes, self._scrub, self._busy = run, outcomes, scrub, busy
        self._one_at_a_time = threading.Lock()
        self._arena: Arena | None = None
        self._scrubbed_at = time.monotonic()
        self.latest: int | None = None
        """step of the newest verified generation"""
        self._scrubber = (
            Scrubber(
                run.known,
                run.mender,
                partial(Arena, ARENA_CHUNKS * layout.CHUNK_BYTES, layout.CHUNK_BYTES),  # a reading may be interrupted
                bytes_per_second=scrub.bytes_per_second,
                pause=busy.wait,
            )
            if scrub and isinstance(run, RunWriter)
            else None
        )
        self.note_latest()

    def arena(self) -> Arena:
        """Memory for reading beside a save."""
        if self._arena is None:
            self._arena = Arena(ARENA_CHUNKS * layout.CHUNK_BYTES, layout.CHUNK_BYTES)
        return self._arena

    def note_latest(self) -> None:
        """Look up the newest verified generation."""
        newest = self._run.known.newest_verified()
        self.latest = newest.step if newest else None

    def close(self) -> None:
        """Give up a reading that was interrupted, and all memory."""
        if self._scrubber is not None:
            self._scrubber.close()
        self._arena = None

    def after_save(self, stop: Stop) -> bool:
        """Verify, point and delete, until `stop()`; what is found is reported by the training thread.

        Returns False where it gave way: a later commit has made this one unimportant, and upkeep follows that one.
        """
        try:
            self._maintain(stop)
        except Cancelled:
            return False
        except BaseException as error:  # noqa: BLE001 - reported by the training thread
            self._outcomes.put(error)
        return True

    def before_save(self) -> None:
        """Verify and delete before the next reservation: the disk stays bounded. Findings do not stop the save.

        Only DELETIONS_AHEAD generations are deleted here, so that no save waits for many; `after_save` deletes the
        rest. Where the tier deletes what is not the newest, no other save may be committed while it is read.
        """
        newest_only = self._run.tier.newest_only
        try:
            if self._run.backlog() > (UNREAD_LIMIT if newest_only else BACKLOG_LIMIT):  # guard: verify-before-next-save
                self._maintain(never, newest_only, DELETIONS_AHEAD)
            elif isinstance(self._run, RunWriter) and self._run.retirement.surplus():  # guard: delete-before-next-save
                with self._one_at_a_time:
                    self._run.clean(most=DELETIONS_AHEAD)  # guard: few-deletions-before-save
        except LastgoodError as error:
            self._outcomes.put(error)

    def make_room(self, needed_bytes: int) -> bool:
        """The disk is full: delete an older generation, if need be after verifying newer ones has made it needless."""
        run = self._run
        if run.tier.newest_only or not isinstance(run, RunWriter):
            return False  # its space is reserved already; or the coordinator deletes
        with self._one_at_a_time:
            if run.retirement.relieve(needed_bytes):
                return True
            try:
                run.verify(self.arena())
            except LastgoodError as error:
                self._outcomes.put(error)
            self.note_latest()
            return run.retirement.relieve(needed_bytes)

    def scrub_is_due(self) -> bool:
        """Whether it is time to read an old generation again."""
        # guard: scrub-waits-for-interval
        return self._scrub is not None and time.monotonic() - self._scrubbed_at >= self._scrub.seconds

    def scrub_one(self) -> None:
        """Read an old generation again; it is put aside when a save begins, and continued later."""
        assert self._scrubber is not None
        try:
            with self._one_at_a_time:
                done = self._scrubber.next_one(self._busy.is_set) or self._scrubber.next_one(self._busy.is_set)
        except Cancelled:
            return  # its turn comes again
        except BaseException as error:  # noqa: BLE001 - reported by the training thread
            self._outcomes.put(error)
            done = None
        self._scrubbed_at = time.monotonic()
        if done is not None and not done.whole:  # guard: scrub-damage-raised-in-loop
            self.note_latest()
            self._outcomes.put(
                Damaged(
                    f"step {done.generation.step} was good and does not read back any more: {summary(done.findings)}",
                    safe="It is marked; restore goes to a good one. Its neighbours are read next.",
                    todo="Check the disk.",
                )
            )

    def _maintain(self, stop: Stop, no_commits: bool = False, most: int | None = None) -> None:
        """Verify, point, and delete `most` generations at most; findings do not keep it from deleting.

        `no_commits`: nothing is committed meanwhile.
        """
        run = self._run
        with self._one_at_a_time, run.known.lock if no_commits else contextlib.nullcontext():
            try:
                run.verify(self.arena(), stop)
                self._outcomes.verified()
            except Cancelled:
                raise
            except LastgoodError as error:
                self._outcomes.put(error)
            finally:
                self.note_latest()
            if isinstance(run, RunWriter):
                run.clean(stop, most)

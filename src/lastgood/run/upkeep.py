"""Upkeep in the background: verify, point and delete after each save, and scrub old generations between saves.

Upkeep stops as soon as another save is in flight. If too many generations are unverified by then, the next save
verifies and deletes before it reserves its space.

Invariants
  1. One round of verifying, scrubbing or deleting runs at a time (`_one_at_a_time`); within it the workers of the run
     read and delete in parallel.
  2. Errors of upkeep fail no save: they are put into `outcomes`, and the training thread reports or raises them.
"""

from __future__ import annotations

import contextlib
import threading
import time

from ..engine.arena import Arena
from ..errors import Cancelled, LastgoodError
from ..limits import BACKLOG_LIMIT, CHUNK_BYTES, DELETIONS_AHEAD, UNREAD_LIMIT, UPKEEP_CHUNKS
from ..policy.scrub import Scrub
from ..ports import Stop
from .follower import Follower
from .node_disks import NodeDisks
from .outcomes import Outcomes
from .scrubber import Scrubber
from .thread_pools import EXIT_POLL_SECONDS, pools_are_ending
from .writer import RunWriter


def _reading_arena() -> Arena:
    return Arena(UPKEEP_CHUNKS * CHUNK_BYTES, CHUNK_BYTES)


class Upkeep:
    """The upkeep of one run that is open for writing.

    `outcomes` receives its errors. `scrub`: how often old generations are read again (None: never), unless they are in
    slots, in memory or on disks of nodes. Places below have scrubs of their own (place_scrub.py). `busy`: an event that
    is set while saves are in flight or about to begin; a scrub ends then. `closed`: once it is true, all upkeep ends.
    """

    def __init__(
        self, run: RunWriter | Follower, outcomes: Outcomes, scrub: Scrub | None, busy: threading.Event, closed: Stop
    ) -> None:
        self._run, self._outcomes, self._busy, self._closed = run, outcomes, busy, closed
        self._one_at_a_time = threading.Lock()
        self._arena: Arena | None = None
        self._scrubbed_at, self._scrub_seconds = time.monotonic(), scrub.seconds if scrub else 0.0
        self.latest: int | None = None
        """step of the newest verified generation"""
        self._scrubber = (
            Scrubber(
                run.known,
                run.mender,
                _reading_arena,  # a scrub that was interrupted holds its chunks, so its memory is its own
                bytes_per_second=scrub.bytes_per_second,
                pause=self._rest,
            )
            if scrub and isinstance(run, RunWriter) and not (run.tier.newest_only or isinstance(run.tier, NodeDisks))
            else None
        )
        self.note_latest()

    def arena(self) -> Arena:
        """The memory in which generations are verified; allocated by the first call."""
        if self._arena is None:
            self._arena = _reading_arena()
        return self._arena

    def note_latest(self) -> None:
        """Set `latest` to the step of the newest verified generation."""
        self.latest = self._run.known.latest()

    def close(self) -> None:
        """End a scrub that was interrupted, and free all memory."""
        if self._scrubber is not None:
            self._scrubber.close()
        self._arena = None

    def after_save(self, stop: Stop) -> bool:
        """Verify, point and delete. Returns False if `stop()` ended it; the upkeep after the next save then does it."""
        try:
            self._maintain(stop)
        except Cancelled:
            return False
        except BaseException as error:  # noqa: BLE001 - reported by the training thread
            self._outcomes.put(error)
        return True

    def before_save(self) -> None:
        """Verify and delete before a save reserves its space, if upkeep is behind: this bounds the space on the disk.

        At most DELETIONS_AHEAD generations are deleted, so that no save waits for many deletions; `after_save` deletes
        the rest. On a tier with `newest_only` no save is committed meanwhile, because a commit deletes the generation
        that is being read. Findings and errors are put into `outcomes`, and the save goes on.
        """
        newest_only = self._run.tier.newest_only
        try:
            if self._run.backlog() > (UNREAD_LIMIT if newest_only else BACKLOG_LIMIT):  # guard: verify-before-next-save
                self._maintain(self._closed, newest_only, DELETIONS_AHEAD)
            elif isinstance(self._run, RunWriter) and self._run.retirement.surplus():  # guard: delete-before-next-save
                with self._one_at_a_time:
                    self._run.clean(self._closed, most=DELETIONS_AHEAD)  # guard: few-deletions-before-save
        except Cancelled:
            pass  # the run is being closed, and the save is given up too
        except LastgoodError as error:
            self._outcomes.put(error)

    def make_room(self, needed_bytes: int) -> bool:
        """On a full disk, delete an older generation. Returns whether one was deleted.

        If retention can spare none, newer generations are verified first: after that an older one may be needless.
        """
        run = self._run
        if run.tier.newest_only or not isinstance(run, RunWriter):
            return False  # slots have reserved their space already; on a follower, only the coordinator deletes
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
        """Whether the interval since the last scrub is over."""
        # guard: scrub-waits-for-interval
        return self._scrubber is not None and time.monotonic() - self._scrubbed_at >= self._scrub_seconds

    def scrub_one(self) -> None:
        """Read one old generation again, or the rest of one. When a save begins, the reading is interrupted.

        Where a round is over, the first generation of the next round is read.
        """
        assert self._scrubber is not None
        try:
            with self._one_at_a_time:
                done = self._scrubber.scrub_next(self._gives_way) or self._scrubber.scrub_next(self._gives_way)
        except Cancelled:
            return  # the next scrub continues the reading
        except BaseException as error:  # noqa: BLE001 - reported by the training thread
            self._outcomes.put(error)
            done = None
        self._scrubbed_at = time.monotonic()
        if done is not None and done.newly_damaged:  # guard: scrub-damage-raised-in-loop
            self.note_latest()
            self._outcomes.put(done.problem(self._run.tier.place))

    def _gives_way(self) -> bool:
        """Whether a scrub is to end: a save begins, or the process ends without a call of `close`."""
        return self._busy.is_set() or pools_are_ending()  # guard: unclosed-front-scrub-ends-too

    def _rest(self, seconds: float) -> None:
        """Wait so long between two blocks of a scrub, unless it is to end."""
        until = time.monotonic() + seconds
        while not self._gives_way() and (left := until - time.monotonic()) > 0:
            self._busy.wait(min(left, EXIT_POLL_SECONDS))

    def _maintain(self, stop: Stop, no_commits: bool = False, most: int | None = None) -> None:
        """Verify, point, and delete at most `most` generations. Errors of verifying do not prevent the deletions.

        `no_commits`: hold the lock of the run, so that no save is committed meanwhile.
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

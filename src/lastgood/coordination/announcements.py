"""Announcements: what all ranks do from some step on, where no rank can know it by itself. No rank waits for another,
but at the end.

    rank         key                   message
    -----------  --------------------  ---------------------------------------------------------------------------
    coordinator  PLACE/NUMBER          an `Announcement`, numbered from 0 since the last restore
    any other    PLACE/end-request     its rank, when it has received a signal that asks for the end
    any other    PLACE/NUMBER/at/RANK  the step at which it received the announcement NUMBER of the end
    coordinator  PLACE/NUMBER/holds    whether all ranks end at the step of that announcement

PLACE is RUN/RESTORES/announcements (coordination/rounds.py). The coordinator deletes old announcements
as it deletes old verdicts (`RankGroup.delete_later`).

Invariants
  1. The coordinator announces so far ahead that every rank polls before the step: LEAD_POLLS times the time between two
     polls, counted in steps at the highest of the last measured speeds of the loop, so that a pause does not count.
     Each rank polls every ANNOUNCEMENT_POLL_SECONDS, on the training thread, through the quick store.
  2. Steps of announcements ascend, but for the end. A number is used for one announcement only. One whose post failed
     may have reached the store, so it is posted again before anything else is announced.
  3. A rank that receives an announcement after its step fails that step on all ranks, with the error HeardLate
     (loop/schedule.py). The coordinator then doubles the lead, up to LEAD_POLLS_LIMIT.
  4. All ranks end at one step, or none does: an announced end holds only if every rank received it before its step.
     The coordinator finds out when it reaches the step. If the end does not hold, it announces another one and goes on:
     a rank that has passed the step may be waiting for it in a collective operation. From its first announcement of
     the end on, a rank polls at each step.
  5. While the store cannot be reached, every attempt raises TierDown and doubles the pause before the next one.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from ..errors import TierDown, TimedOut
from ..limits import ANNOUNCEMENT_POLL_SECONDS, COORDINATOR_TIMEOUTS, LEAD_POLLS, LEAD_POLLS_LIMIT
from .rounds import RankGroup

END = "end"
SPEEDS_REMEMBERED = 2
"""measured speeds of the loop, of which the highest counts: a pause is in one of them. No more, or the lead would be
many long steps in a loop that has become slower, as after steps that only skip samples."""
LEAST_PERIOD_SECONDS = ANNOUNCEMENT_POLL_SECONDS / 4
"""how long a period has to run until its speed counts"""


class Announcement(NamedTuple):
    """What holds from `step` on: its `kind` (a save, the end, another interval, ...) and, for some kinds, a `value`."""

    step: int
    kind: str
    value: int = 0


class Announcements:
    """The announcements since the last restore, as one rank publishes or receives them."""

    def __init__(self, ranks: RankGroup, monotonic_seconds: Callable[[], float] = time.monotonic) -> None:
        self._ranks, self._now, self._place = ranks, monotonic_seconds, f"{ranks.name}/announcements"
        self._count = 0
        """announcements that were published or received so far"""
        self._requested = False
        """whether this rank has posted its request for the end"""
        self._pause_seconds = ANNOUNCEMENT_POLL_SECONDS
        self._next_poll = monotonic_seconds() + ANNOUNCEMENT_POLL_SECONDS
        self._down_until = 0.0
        """when to call the store again, after a call that failed"""
        self._lead_polls = LEAD_POLLS
        self._latest_step = 0
        """the step of the newest announcement but for the end"""
        self._unposted: Announcement | None = None
        """an announcement whose post failed, or is under way"""
        self._from: tuple[int, float] | None = None
        """step and time from which the speed is measured now"""
        self._last: tuple[int, float] | None = None
        """step and time of the last call of `poll`"""
        self._speeds = deque[float](maxlen=SPEEDS_REMEMBERED)
        """steps a second, of the last periods between two polls"""
        self.pending: list[Announcement] = []
        """announcements whose step has not come yet"""
        self.end: int | None = None
        """the step at which all ranks end, once it is announced, unless it is found not to hold"""
        self._ends: list[int] = []
        """the numbers of all announcements of the end"""

    def poll(self, step: int, request_end: bool = False) -> None:
        """Receive new announcements, if the time for it has come; the loop is at `step`.

        `request_end`: this rank asks for the end; it is repeated until the store has it. Raises TierDown.
        """
        now = self._now()
        self._measure(step, now)
        requests = request_end and not self._requested and self.end is None
        # A new request for the end is posted without waiting for the next poll, but not during a pause after a failure.
        if now < (self._down_until if requests or self._ends else self._next_poll):
            return
        with self._backing_off():
            self._exchange(step, requests)
        self._next_poll = now + ANNOUNCEMENT_POLL_SECONDS

    def _measure(self, step: int, now: float) -> None:
        """Note the speed of the loop, once for each period of ANNOUNCEMENT_POLL_SECONDS in which it made a step."""
        begun, since = self._from or (step, now)
        if step > begun and now - since >= ANNOUNCEMENT_POLL_SECONDS:
            self._speeds.append((step - begun) / (now - since))
            begun, since = step, now
        self._from, self._last = (begun, since), (step, now)

    def _speed(self) -> float:
        """Steps a second: the highest of the last periods and of the one that runs. A long evaluation or a stalled
        batch is in one of them, and after it the loop is as fast as before. 0 before the second step."""
        assert self._from is not None and self._last is not None
        steps, seconds = self._last[0] - self._from[0], self._last[1] - self._from[1]
        counts = seconds >= LEAST_PERIOD_SECONDS or (seconds > 0 and not self._speeds)
        runs = [steps / seconds] if counts else []
        return max([*self._speeds, *runs], default=0.0)  # guard: pause-keeps-the-lead

    def pop_due(self, step: int) -> list[Announcement]:
        """Remove and return the pending announcements for `step` and for earlier steps, in the order of publication."""
        due = [one for one in self.pending if one.step <= step]
        self.pending = [one for one in self.pending if one.step > step]  # guard: announcement-taken-once
        return due

    def announce(self, step: int, kind: str, value: int = 0) -> bool:
        """Publish an announcement for some steps after `step`, at which the loop is. Only the coordinator calls this.

        Returns False if it was not published: during a pause after a failure, or because an earlier announcement had to
        be posted again first. The caller repeats the call at a later step. Raises TierDown.
        """
        if self._now() < self._down_until:
            return False
        with self._backing_off():
            return self._publish(step, kind, value)

    def end_holds(self, step: int) -> bool:
        """Whether all ranks end now: the loop of this rank has reached the announced end, and is at `step`.

        The coordinator decides, and the other ranks wait for its decision. True also where the decision cannot be
        exchanged: then this rank ends, and its last save fails with the reason.
        """
        key = f"{self._place}/{self._ends[-1]}"
        try:
            return self._decide_end(key, step) if self._ranks.is_coordinator else self._await_end(key)
        except (TierDown, TimedOut):
            return True

    def extend_lead(self) -> None:
        """A rank received the last announcement too late: the next ones are made twice as far ahead."""
        self._lead_polls = min(2 * self._lead_polls, LEAD_POLLS_LIMIT)

    def _decide_end(self, key: str, step: int) -> bool:
        """Decide whether the end holds. If it does not, announce another one, for a step that no rank is known to have
        reached; the distance doubles each time."""
        assert self.end is not None
        ranks, keys = self._ranks, [f"{key}/at/{rank}" for rank in range(1, self._ranks.size)]
        received = ranks.receive(keys, ranks.timeout_seconds) if ranks.quick.has(*keys) else None
        holds = received is not None and all(at < self.end for at in received)  # guard: end-received-by-all
        ranks.quick.post(f"{key}/holds", holds)
        ranks.delete_later(f"{key}/holds")
        if not holds:
            self.end = None
            with suppress(TierDown), self._backing_off():  # after a TierDown, the next poll posts it again
                if self._unposted is not None:
                    self._post(self._unposted)
                self._post(Announcement(max([step, *(received or ())]) + 2 ** len(self._ends), END))
        return holds

    def _await_end(self, key: str) -> bool:
        timeout_seconds = COORDINATOR_TIMEOUTS * self._ranks.timeout_seconds
        (holds,) = self._ranks.receive([f"{key}/holds"], timeout_seconds, self._ranks.closed.is_set)
        if not holds:
            self.end = None
        return bool(holds)

    def _publish(self, step: int, kind: str, value: int = 0) -> bool:
        new = self._unposted or Announcement(self._first_safe_step(step, kind), kind, value)
        self._post(new)
        return (new.kind, new.value) == (kind, value)

    def _post(self, new: Announcement) -> None:
        self._unposted = new  # if the post fails, the store may have it: nothing else may get its number
        self._ranks.quick.post(f"{self._place}/{self._count}", new)
        self._unposted = None
        self._ranks.delete_later(f"{self._place}/{self._count}")
        self._record(new)

    def _first_safe_step(self, step: int, kind: str) -> int:
        """The first step before which every rank polls, at the speed of the loop so far."""
        speed, lead_polls = self._speed(), self._lead_polls
        # The grace period of a preemption is short, and an end that a rank receives too late is announced once more.
        if kind == END:
            speed, lead_polls = self._speeds[-1] if self._speeds else speed, LEAD_POLLS
        ahead = lead_polls * ANNOUNCEMENT_POLL_SECONDS * speed if speed > 0 else 1.0
        # Where a step takes longer than the lead, every rank polls in each step, and the next step is early enough. In
        # faster loops, and before the speed is known, one more step covers the step that a rank has just begun.
        safe = step + max(math.ceil(ahead), 1) + (ahead > 1 or speed == 0)  # guard: announced-ahead-of-step
        return safe if kind == END else max(safe, self._latest_step)  # guard: announced-steps-ascend

    def _exchange(self, step: int, requests: bool) -> None:
        store = self._ranks.quick
        if self._ranks.is_coordinator:
            if self.end is None and (requests or store.has(f"{self._place}/end-request")):
                self._publish(step, END)
            return
        if requests:
            store.post(f"{self._place}/end-request", self._ranks.rank)  # guard: failed-end-request-repeated
            self._requested = True
        while (received := store.read(f"{self._place}/{self._count}")) is not None:
            new = Announcement(*received)
            if new.kind == END:
                store.post(f"{self._place}/{self._count}/at/{self._ranks.rank}", step)
            self._record(new)

    def _record(self, new: Announcement) -> None:
        self.pending.append(new)
        if new.kind == END:
            self.end = new.step
            self._ends.append(self._count)
        else:
            self._latest_step = new.step
        self._count += 1

    @contextmanager
    def _backing_off(self) -> Iterator[None]:
        """Calls of the store: after a TierDown the next ones wait for a pause, twice as long after each failure."""
        try:
            yield
        except TierDown:
            self._pause_seconds *= 2  # guard: store-down-backoff
            self._down_until = self._next_poll = self._now() + self._pause_seconds
            raise
        self._pause_seconds = ANNOUNCEMENT_POLL_SECONDS

"""Announcing: what all ranks are to do from some step on, which no rank can know by itself. Waits for nobody.

The coordinator tells it some steps ahead, on its own or because another rank has asked for it. Each rank looks every
LOOK_SECONDS. One that hears of a step when it has passed it misses what the others do there; the agreement about that
fails on all ranks then (coordination/rounds.py), and what is told next is told further ahead.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from ..errors import TierDown
from .rounds import Ranks

LOOK_SECONDS = 1.0
"""between two looks at what was announced; after one that failed twice as long, and so on"""
FACTOR, MOST_FACTOR = 2.0, 16.0
"""how far ahead something is told, in LOOK_SECONDS"""
END = "end"


class Told(NamedTuple):
    """From `step` on: `word` (a save, the end, another interval, ...), and its `value` where it has one."""

    step: int
    word: str
    value: int = 0


class Announcements:
    """What was told of the steps since the last rewind."""

    def __init__(self, ranks: Ranks, monotonic_seconds: Callable[[], float] = time.monotonic) -> None:
        self._ranks, self._now, self._name = ranks, monotonic_seconds, f"{ranks.name}/told"
        self._heard = 0
        self._asked = False
        self._pause_seconds = LOOK_SECONDS
        self._look_at = monotonic_seconds() + LOOK_SECONDS
        self._down_until = 0.0
        self._factor = FACTOR
        self._posting: Told | None = None
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None
        self.coming: list[Told] = []
        self.end: int | None = None
        """the step at which all are to end"""

    def look(self, n: int, ends: bool = False) -> None:
        """The loop is at step `n`; `ends`: this rank asks for the end. Raises TierDown, and asks again later."""
        now = self._now()
        self._first, self._last = self._first or (n, now), (n, now)
        asks = ends and not self._asked and self.end is None
        if now < (self._down_until if asks else self._look_at):
            return
        self._talk(lambda: self._exchange(n, asks))
        self._look_at = now + LOOK_SECONDS

    def take(self, n: int) -> list[Told]:
        """What holds from step `n` on, or held before and was not heard of, in order. Each is taken once."""
        found = [one for one in self.coming if one.step <= n]
        self.coming = [one for one in self.coming if one.step > n]  # guard: announcement-taken-once
        return found

    def tell(self, n: int, word: str, value: int = 0) -> bool:
        """At the coordinator, at step `n`: some steps on. False while the store is down; raises TierDown when it is."""
        if self._now() < self._down_until:
            return False
        assert self._first is not None and self._last is not None
        steps, seconds = self._last[0] - self._first[0], self._last[1] - self._first[1]
        factor = FACTOR if word == END else self._factor  # the grace is short, and who hears late ends all the same
        ahead = factor * LOOK_SECONDS * steps / seconds if seconds > 0 else 1.0
        # Where a step takes longer than that, every rank looks in each, and hears of the next one in time.
        step = n + max(math.ceil(ahead), 1) + (ahead > 1 or steps == 0)  # guard: announced-ahead-of-step
        told = self._posting or Told(step, word, value)
        self._posting = told  # if its post fails it may be there all the same: nothing else is told under its number
        self._talk(lambda: self._ranks.brief.post(f"{self._name}/{self._heard}", told))
        self._posting = None
        self._ranks.forget(f"{self._name}/{self._heard}")
        self._take_in(told)
        return (told.word, told.value) == (word, value)

    def further(self) -> None:
        """A rank had passed the last one: they are told twice as far ahead from now on."""
        self._factor = min(2 * self._factor, MOST_FACTOR)

    def _exchange(self, n: int, asks: bool) -> None:
        posts = self._ranks.brief
        if self._ranks.coordinates:
            if self.end is None and (asks or posts.has(f"{self._name}/asked")):
                self.tell(n, END)
            return
        if asks:
            posts.post(f"{self._name}/asked", self._ranks.rank)  # guard: failed-end-request-repeated
            self._asked = True
        while (told := posts.heard(f"{self._name}/{self._heard}")) is not None:
            self._take_in(Told(*told))

    def _take_in(self, told: Told) -> None:
        self._heard += 1
        self.coming.append(told)
        if told.word == END:
            self.end = told.step

    def _talk(self, say: Callable[[], None]) -> None:
        try:
            say()
        except TierDown:
            self._pause_seconds *= 2  # guard: store-down-backoff
            self._down_until = self._look_at = self._now() + self._pause_seconds
            raise
        self._pause_seconds = LOOK_SECONDS

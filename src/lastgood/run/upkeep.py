"""Scrub: generations that were good are read again, before the day they are needed. Decides nothing but its pace.

One at a time, in the order of plan/scrub.py; what is damaged is rebuilt from parity where there is any, else marked.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..engine.arena import Arena
from ..errors import Cancelled
from ..plan import scrub
from ..records import Finding, Generation, GenerationId, Record, intact
from .writer import RunWriter


class Scrubbed(Record, frozen=True, kw_only=True):
    """What came of one generation."""

    generation: Generation
    findings: list[Finding]
    repaired: bool
    """whether it was damaged, and is whole again"""
    seconds: float

    @property
    def whole(self) -> bool:
        """Whether every byte of it is what was committed, now."""
        return intact(self.findings) or self.repaired


class Scrubber:
    """Rounds through a run. `pause(seconds)` is how it waits for the next chunk, and ends early when it must."""

    def __init__(
        self,
        run: RunWriter,
        arena: Callable[[], Arena],
        *,
        bytes_per_second: float = float("inf"),
        pause: Callable[[float], object] = time.sleep,
        monotonic_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._arena, self._rate = run, arena, bytes_per_second
        self._pause, self._now = pause, monotonic_seconds
        self._read_at: dict[GenerationId, float] = {}
        self._left: set[GenerationId] | None = None
        """of this round, which reads what was there when it began"""
        self._damaged: set[GenerationId] = set()

    def next_one(self, stop: Callable[[], bool] = lambda: False) -> Scrubbed | None:
        """Read the generation whose turn it is; None where the round has ended, and the next call begins another.

        One that is known to be damaged is read too: it may be whole again but for its mark. Raises Cancelled when
        `stop()`: its turn comes again; Unreadable and Unavailable: it does not, in this round.
        """
        with self._run.turn:
            there = list(self._run.survey.generations.values())
        if self._left is None:
            self._left = {one.id for one in there}
        mine = [one for one in there if one.id in self._left]
        generation = scrub.next_to_read(mine, self._read_at, self._damaged)
        if generation is None:
            self._left = None
            self._damaged.clear()
            return None
        begun, seen = self._now(), 0

        def slowly(data: memoryview) -> None:
            nonlocal seen
            seen += len(data)
            ahead = seen / self._rate - (self._now() - begun)
            if ahead > 0:
                self._pause(ahead)

        self._left.discard(generation.id)
        self._read_at[generation.id] = self._now()
        try:
            findings, repaired = self._run.read_again(generation, self._arena(), stop, slowly)
        except Cancelled:
            self._left.add(generation.id)
            del self._read_at[generation.id]
            raise
        if not intact(findings):
            self._damaged.add(generation.id)
        return Scrubbed(generation=generation, findings=findings, repaired=repaired, seconds=self._now() - begun)

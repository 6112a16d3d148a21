"""Scrub: generations that were good are read again, before the day they are needed. Decides nothing but its pace.

One at a time, in the order of policy/scrub.py; what is damaged is rebuilt from parity where there is any, else marked.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..engine.arena import Arena
from ..errors import Cancelled
from ..policy import scrub
from ..records import Finding, Generation, GenerationId, Record, intact
from .known import KnownRun
from .mend import Mender
from .reader import Reading


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


class _UnderWay(NamedTuple):
    """A generation that is being read, in memory of its own."""

    generation: Generation
    arena: Arena
    reading: Reading

    @property
    def put_aside(self) -> bool:
        return inspect.getgeneratorstate(self.reading) != inspect.GEN_CLOSED


class Scrubber:
    """Rounds through a run. `pause(seconds)` is how it waits for the next chunk, and ends early when it must.

    A reading that has to give way is put aside, and goes on where it was: else a large generation would never be read
    to its end beside frequent saves. It keeps its memory (`arena()`, once for each generation) until then.
    """

    def __init__(
        self,
        known: KnownRun,
        mender: Mender,
        arena: Callable[[], Arena],
        *,
        bytes_per_second: float = float("inf"),
        pause: Callable[[float], object] = time.sleep,
        monotonic_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._known, self._mender, self._arena, self._rate = known, mender, arena, bytes_per_second
        self._pause, self._now = pause, monotonic_seconds
        self._read_at: dict[GenerationId, float] = {}
        self._left: set[GenerationId] = set()
        """of this round, which reads what was there when it began"""
        self._round_over = True
        self._damaged: set[GenerationId] = set()
        self._under_way: _UnderWay | None = None
        self._begun, self._seen = 0.0, 0

    def next_one(self, stop: Callable[[], bool] = lambda: False) -> Scrubbed | None:
        """Read the generation whose turn it is; None where the round has ended, and the next call begins another.

        One that is known to be damaged is read too: it may be whole again but for its mark. Raises Cancelled when
        `stop()`: it goes on with the next call; Unreadable and Unavailable: its turn is over, in this round.
        """
        with self._known.lock:
            there = dict(self._known.survey.generations)
        one = self._under_way
        if one is not None and there.get(one.generation.id) != one.generation:  # it has gone, or was judged meanwhile
            self._again(one.generation.id)
            one = None
        if one is None:
            generation = self._choose(there)
            if generation is None:
                return None
            arena = self._arena()
            one = self._under_way = _UnderWay(generation, arena, self._mender.reading(generation, arena, self._slowly))
        generation = one.generation
        self._begun, self._seen = self._now(), 0
        try:
            findings, repaired = self._mender.read_again(generation, one.arena, one.reading, stop)
        except Cancelled:
            if not one.put_aside:  # it was read, and what came after gave way
                self._again(generation.id)
            raise
        except BaseException:
            self.close()
            raise
        self.close()
        if not intact(findings):
            self._damaged.add(generation.id)  # guard: scrub-damage-noted
        return Scrubbed(generation=generation, findings=findings, repaired=repaired, seconds=self._now() - self._begun)

    def close(self) -> None:
        """Give up what is under way, and its memory."""
        if self._under_way is not None:
            self._under_way.reading.close()
            self._under_way = None

    # ---- steps ---------------------------------------------------------------------------------------------

    def _again(self, at: GenerationId) -> None:
        """Its turn comes again, from the beginning."""
        self.close()
        self._left.add(at)  # guard: interrupted-scrub-repeated
        self._read_at.pop(at, None)  # guard: interrupted-scrub-not-counted

    def _choose(self, there: Mapping[GenerationId, Generation]) -> Generation | None:
        if self._round_over:
            self._left, self._round_over = set(there), False
        mine = [one for at, one in there.items() if at in self._left]  # guard: scrub-round-reads-initial-set
        generation = scrub.next_to_read(mine, self._read_at, self._damaged)
        if generation is None:
            self._round_over = True  # guard: scrub-round-ends
            self._damaged.clear()  # guard: scrub-round-forgets-damage
        else:
            self._left.discard(generation.id)
            self._read_at[generation.id] = self._now()
        return generation

    def _slowly(self, data: memoryview) -> None:
        self._seen += len(data)
        ahead = self._seen / self._rate - (self._now() - self._begun)
        if ahead > 0:
            self._pause(ahead)  # guard: scrub-pace

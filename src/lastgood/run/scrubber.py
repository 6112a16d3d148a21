"""Scrubbing: generations that were found good are read again, so that damage is found before they are needed.

One generation is read at a time; policy/scrub.py chooses which. A damaged generation is rebuilt from its parity if it
has any that suffices, and is marked as damaged otherwise (mend.py).

Invariants
  1. A round reads each generation that the run held when the round began, unless it was deleted meanwhile.
  2. A reading that was interrupted counts as read only once it was continued to its end.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..engine.arena import Arena
from ..errors import Cancelled, Damaged
from ..policy import restore, scrub
from ..ports import Stop, never
from ..records import Finding, Generation, GenerationId, Record, intact
from .known import KnownRun
from .mend import Mender
from .reader import Reading

Begin = Callable[[Generation, Arena, Callable[[memoryview], None]], Reading]
"""Begins the reading of a generation, with this memory. What it gets last is called with all bytes that are read."""


class Scrubbed(Record, frozen=True, kw_only=True):
    """The result of reading one generation again."""

    generation: Generation
    """as it was known before"""
    findings: list[Finding]
    repaired: bool
    """whether it was damaged and has been rebuilt"""
    seconds: float
    """how long the last part of the reading took, since it was begun or continued"""

    @property
    def whole(self) -> bool:
        """Whether every byte of the generation is now what was committed."""
        return intact(self.findings) or self.repaired

    @property
    def newly_damaged(self) -> bool:
        """Whether it is damaged, and was not known to be: what is known was reported when it was found."""
        return not self.whole and not self.generation.damaged  # guard: known-damage-not-reported-again

    def problem(self, place: str) -> Damaged:
        """The error that is raised or reported in the training loop if the generation is newly damaged."""
        return Damaged(
            f"step {self.generation.step} was good and does not read back any more in {place}: "
            f"{restore.summary(self.findings)}",
            safe="It is marked as damaged there, so that restore() passes over it. Its neighbours are read next.",
            todo=f"Check {place}.",
        )


class _Task(NamedTuple):
    """The generation that is being read, with memory of its own."""

    generation: Generation
    arena: Arena
    reading: Reading

    @property
    def interrupted(self) -> bool:
        """Whether the reading has not reached its end and can be continued."""
        return inspect.getgeneratorstate(self.reading) != inspect.GEN_CLOSED


class Pace:
    """Limits the rate of a reading. `bytes_per_second`: the limit. `pause`, `monotonic_seconds`: as for `Scrubber`."""

    def __init__(
        self,
        bytes_per_second: float,
        pause: Callable[[float], object],
        monotonic_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bytes_per_second, self._pause, self._now = bytes_per_second, pause, monotonic_seconds
        self.begin()

    def begin(self) -> None:
        """Note that the reading begins now, or goes on."""
        self._begun, self._bytes_read = self._now(), 0

    def keep(self, data: memoryview) -> None:
        """Called after each block: pauses for as long as the reading is ahead of its rate."""
        self._bytes_read += len(data)
        ahead_seconds = self._bytes_read / self._bytes_per_second - (self._now() - self._begun)
        if ahead_seconds > 0:
            self._pause(ahead_seconds)  # guard: scrub-pace


class Scrubber:
    """Reads the generations of a run again, in rounds.

    `arena`: makes the memory for reading one generation. `bytes_per_second`: the largest rate of reading (no limit).
    `pause`: waits up to so many seconds; it may return early, as `Event.wait` does when a save begins.
    `monotonic_seconds`: the clock. `begin` (None: `Mender.reading`): begins each reading.

    A reading that is interrupted is continued by the next call from where it ended: otherwise a large generation would
    never be read to its end between frequent saves. Its memory is held until then.
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
        begin: Begin | None = None,
    ) -> None:
        self._known, self._mender, self._arena, self._now = known, mender, arena, monotonic_seconds
        self._begin, self._pace = begin or mender.reading, Pace(bytes_per_second, pause, monotonic_seconds)
        self._read_at: dict[GenerationId, float] = {}
        self._remaining: set[GenerationId] = set()
        """the generations that this round has still to read"""
        self._round_over = True
        self._damaged: set[GenerationId] = set()
        """the generations that were found damaged in this round"""
        self._task: _Task | None = None

    @property
    def reading(self) -> bool:
        """Whether files are being read, or are to be read on: not while something is done about what was found."""
        return self._task is not None and self._task.interrupted

    def scrub_next(self, stop: Stop = never) -> Scrubbed | None:
        """Read the next generation. Returns None when the round is over; the next call then begins another round.

        A generation that is already marked as damaged is read too: perhaps only its mark is wrong. Raises Cancelled
        when `stop()` is true; the next call then continues the reading. Raises Unreadable or Unavailable when the
        generation cannot be read now; this round does not read it again.
        """
        with self._known.lock:
            generations = dict(self._known.survey.generations)
        task = self._task
        if task is not None and generations.get(task.generation.id) != task.generation:
            self._repeat(task.generation.id)  # it was deleted or marked meanwhile
            task = None
        if task is None:
            generation = self._choose(generations)
            if generation is None:
                return None
            arena = self._arena()
            task = self._task = _Task(generation, arena, self._begin(generation, arena, self._pace.keep))
        generation = task.generation
        begun = self._now()
        self._pace.begin()
        try:
            findings, repaired = self._mender.read_again(generation, task.arena, task.reading, stop)
        except Cancelled:
            if not task.interrupted:  # it was read to its end, and marking or mending it was cancelled
                self._repeat(generation.id)
            raise
        except BaseException:
            self.close()
            raise
        self.close()
        if not intact(findings):
            self._damaged.add(generation.id)  # guard: scrub-damage-noted
        return Scrubbed(generation=generation, findings=findings, repaired=repaired, seconds=self._now() - begun)

    def close(self) -> None:
        """End a reading that is under way or interrupted, and free its memory."""
        if self._task is not None:
            self._task.reading.close()
            self._task = None

    # ---- steps ---------------------------------------------------------------------------------------------

    def _repeat(self, at: GenerationId) -> None:
        """Read this generation again from its beginning, in this round."""
        self.close()
        self._remaining.add(at)  # guard: interrupted-scrub-repeated
        self._read_at.pop(at, None)  # guard: interrupted-scrub-not-counted

    def _choose(self, generations: Mapping[GenerationId, Generation]) -> Generation | None:
        """The generation to read next, noted as read; None when the round is over."""
        if self._round_over:
            self._remaining, self._round_over = set(generations), False
        # guard: scrub-round-reads-initial-set
        unread = [one for at, one in generations.items() if at in self._remaining]
        generation = scrub.next_to_read(unread, self._read_at, self._damaged)
        if generation is None:
            self._round_over = True  # guard: scrub-round-ends
            self._damaged.clear()  # guard: scrub-round-forgets-damage
        else:
            self._remaining.discard(generation.id)
            self._read_at[generation.id] = self._now()
        return generation

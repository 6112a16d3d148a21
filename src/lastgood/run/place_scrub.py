"""Scrubbing of a place below: its generations are read again while no copy waits for it.

The thread that copies to the place does this too, so copies, deletions and repairs there never overlap. The agent of a
run in memory reads, and this process where it cannot. A damaged generation is mended from its parity, or from the other
places; what cannot be mended is marked and reported.

Invariant: only the reading gives way, to copies and to saves in flight, and is continued afterwards. A repair goes on
until it is done or the place is closed: between frequent saves it would never end otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from ..engine.arena import Arena
from ..errors import Cancelled
from ..limits import CHUNK_BYTES, UPKEEP_CHUNKS
from ..policy.scrub import Scrub, pause_seconds
from ..ports import Stop
from ..records import Generation
from .agent_work import AgentWork
from .outcomes import Outcomes
from .reader import Reading
from .scrubber import Scrubber
from .writer import RunWriter


class Scrubbing(NamedTuple):
    """How places below are scrubbed. `options`: what the user has asked for. `saving`: whether a save is in flight."""

    options: Scrub
    saving: Callable[[], bool]


class PlaceScrub:
    """The scrub of one place. Its methods are called by one thread.

    `writer`: of the place. `scrubbing`: how it is scrubbed. `agent`: reads where it can. `outcomes`:
    receives damage and errors. `rest`: waits up to so many seconds, less if something else is to be done.
    """

    def __init__(
        self,
        writer: RunWriter,
        scrubbing: Scrubbing,
        agent: AgentWork,
        outcomes: Outcomes,
        rest: Callable[[float], object],
    ) -> None:
        options, self._saving = scrubbing
        self._options, self._outcomes, self._place = options, outcomes, writer.tier.place

        def begin(generation: Generation, arena: Arena, also: Callable[[memoryview], None]) -> Reading:
            def here() -> Reading:
                return writer.mender.reading(generation, arena, also)

            return agent.reading(writer.tier, generation, options.bytes_per_second, here)

        self.scrubber = Scrubber(
            writer.known,
            writer.mender,
            lambda: Arena(UPKEEP_CHUNKS * CHUNK_BYTES, CHUNK_BYTES),
            bytes_per_second=options.bytes_per_second,
            pause=rest,
            begin=begin,
        )
        self._due_at = time.monotonic() + options.seconds

    def is_due(self) -> bool:
        """Whether the interval since the last reading is over, and no save is in flight."""
        # guard: place-scrub-waits-for-interval
        return time.monotonic() >= self._due_at and not self._saving()

    def scrub_one(self, stop: Stop, gives_way: Stop) -> None:
        """Read one old generation again, or the rest of one, and mend it if it is damaged.

        `stop`: ends both. `gives_way`: interrupts the reading. Where a round is over, the next one begins.
        """
        scrubber = self.scrubber

        def interrupted() -> bool:
            # guard: repair-does-not-give-way
            return stop() or (scrubber.reading and (gives_way() or self._saving()))

        done, failed = None, False
        try:
            done = scrubber.scrub_next(interrupted) or scrubber.scrub_next(interrupted)
        except Cancelled:
            return  # the next call continues
        except Exception as error:  # noqa: BLE001 - reported by the training thread
            self._outcomes.put(error)
            failed = True
        self._due_at = time.monotonic() + pause_seconds(self._options, done is not None, failed)
        if done is not None and done.newly_damaged:
            self._outcomes.put(done.problem(self._place))  # guard: damage-below-raised-in-loop

    def close(self) -> None:
        """End a reading that was interrupted, and free its memory."""
        self.scrubber.close()

"""Which generation to read again next. Pure.

Corruption clusters: a disk that lost one file has often lost what was written about then. So the neighbours in time of
a damaged generation come first, the nearest before all others; then whatever has not been read for longest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..records import Generation, GenerationId
from .arguments import is_number, require


@dataclass(frozen=True)
class Scrub:
    """A generation is read again every `seconds`, at `bytes_per_second` at most, while no save is under way."""

    seconds: float = 3600.0
    bytes_per_second: float = 100e6

    def __post_init__(self) -> None:
        seconds, rate = self.seconds, self.bytes_per_second
        require(is_number(seconds) and seconds >= 0, f"Scrub(seconds={seconds!r})", "Give a number of at least 0.")
        require(is_number(rate) and rate > 0, f"Scrub(bytes_per_second={rate!r})", "Give a number above 0.")


def next_to_read(
    there: Sequence[Generation], read_at: Mapping[GenerationId, float], damaged: Collection[GenerationId]
) -> Generation | None:
    """Of these generations, which have not been read in this round; None when there are none.

    `read_at`: when those were last read that were, seconds of any one clock. `damaged`: found in this round.
    """

    def apart(one: Generation) -> int:
        return min(abs(one.step - other.step) for other in damaged)  # guard: distance-to-nearest-damage

    def longest_ago(one: Generation) -> tuple[float, int, GenerationId]:
        return read_at.get(one.id, 0.0), one.commit.order, one.id  # guard: least-recently-read-first

    # guard: damage-neighbours-first
    return min(there, key=lambda one: (apart(one) if damaged else 0, longest_ago(one)), default=None)

"""Which generation to read again next. Pure.

Corruption clusters: a disk that lost one file has often lost what was written about then. So the neighbours in time of
a damaged generation come first, the nearest before all others; then whatever has not been read for longest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..errors import Refused
from ..records import Generation, GenerationId


@dataclass(frozen=True)
class Scrub:
    """A generation is read again every `seconds`, at `bytes_per_second` at most, while no save is under way."""

    seconds: float = 3600.0
    bytes_per_second: float = 100e6

    def __post_init__(self) -> None:
        numbers = all(
            isinstance(one, (int, float)) and not isinstance(one, bool) for one in (self.seconds, self.bytes_per_second)
        )
        if not (numbers and self.seconds >= 0 and self.bytes_per_second > 0):
            todo = "Give seconds >= 0 and bytes_per_second > 0."
            raise Refused(f"{self}", safe="Nothing was touched.", todo=todo)


def next_to_read(
    there: Sequence[Generation], read_at: Mapping[GenerationId, float], damaged: Collection[GenerationId]
) -> Generation | None:
    """Of these generations, which have not been read in this round; None when there are none.

    `read_at`: when those were last read that were, seconds of any one clock. `damaged`: found in this round.
    """

    def apart(one: Generation) -> int:
        return min(abs(one.step - other.step) for other in damaged)

    def longest_ago(one: Generation) -> tuple[float, int, GenerationId]:
        return read_at.get(one.id, 0.0), one.commit.order, one.id

    return min(there, key=lambda one: (apart(one) if damaged else 0, longest_ago(one)), default=None)

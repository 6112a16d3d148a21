"""Scrubbing: which generation to read again next, and when. Pure.

Corruption is clustered: a disk that has damaged one file has often damaged others that were written at about the same
time. So the generations nearest to a damaged one are read first, then those that were not read for the longest time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..records import Generation, GenerationId
from .arguments import is_number, require

EMPTY_SECONDS = 1.0
"""The shortest time until a place is looked at again that holds no generation."""
FAILED_SECONDS = 60.0
"""The same for a place that cannot be read."""


@dataclass(frozen=True)
class Scrub:
    """How often old generations are read again, in each place of the run but memory, slots and disks of nodes.

    `seconds` (default 3600): the time between two generations of a place, at least 0. `bytes_per_second` (default
    100e6): the largest rate of reading one, above 0. Raises Refused for other values. The training process does not
    read while a save is in flight; the agent of a run in memory reads in its place, and goes on.

    Example: `Checkpointer(path, state, scrub=Scrub(seconds=600))`.
    """

    seconds: float = 3600.0
    bytes_per_second: float = 100e6

    def __post_init__(self) -> None:
        seconds, rate = self.seconds, self.bytes_per_second
        require(is_number(seconds) and seconds >= 0, f"Scrub(seconds={seconds!r})", "Give a number of at least 0.")
        require(is_number(rate) and rate > 0, f"Scrub(bytes_per_second={rate!r})", "Give a number above 0.")


def pause_seconds(scrub: Scrub, found: bool, failed: bool) -> float:
    """The time until the next generation of a place is read.

    `found`: whether there was one to read. `failed`: whether it, or the place, could not be read.
    """
    least = FAILED_SECONDS if failed else 0.0 if found else EMPTY_SECONDS
    return max(scrub.seconds, least)  # guard: failing-place-not-hurried


def next_to_read(
    generations: Sequence[Generation], read_at: Mapping[GenerationId, float], damaged: Collection[GenerationId]
) -> Generation | None:
    """The next generation to read; None if `generations` is empty.

    `generations`: those that were not read in this round yet. `read_at`: when a generation was last read, in seconds of
    one clock. `damaged`: those that were found damaged in this round.
    """

    def apart(one: Generation) -> int:
        return min(abs(one.step - other.step) for other in damaged)  # guard: distance-to-nearest-damage

    def longest_ago(one: Generation) -> tuple[float, int, GenerationId]:
        return read_at.get(one.id, 0.0), one.commit.order, one.id  # guard: least-recently-read-first

    # guard: damage-neighbours-first
    return min(generations, key=lambda one: (apart(one) if damaged else 0, longest_ago(one)), default=None)

"""Advice: what a supervisor, or training itself, has learned about a run, and a later restore is to follow.

A restore of the newest generation follows all of it; one of a step that is asked for follows none. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..ports import Tier
from ..records import Finding, GenerationId, Record
from . import side_records

FOLDER = "advice"
NAMED_SAMPLES = 1000
"""so many samples of a step are named in a mark, which stays as long as its generation"""


class Skip(Record, frozen=True, kw_only=True):
    """Windows of the sampler that are left out from now on. `first`: the first one. `samples`: their ids, if known."""

    epoch: int
    first: int
    count: int
    samples: list[int] = msgspec.field(default_factory=list)


class Advice(Record, frozen=True, kw_only=True):
    """One piece of it. `by`: "supervisor" or "sentinel". `step`: at which training failed. `why`: for people.

    `suspect`: the generation that is not restored any more; None: there is none. `skip`: None: nothing is left out.
    `from_start`: whether nothing was saved before `step` since training began. `withdrawn`: whether the generation is
    not to blame, whatever was said of it before.
    """

    format: int
    by: str
    at: float
    """seconds since 1970, for people; the same in all pieces of one failure"""
    step: int
    why: str
    suspect: GenerationId | None = None
    skip: Skip | None = None
    from_start: bool = False
    withdrawn: bool = False


def append(tier: Tier, advice: Advice) -> None:
    """Add advice to a run. As `side_records.append`."""
    side_records.append(tier, FOLDER, advice)


def read(tier: Tier) -> list[Advice]:
    """The advice of a run, oldest first. As `side_records.read`."""
    return [*side_records.read(tier, FOLDER, Advice).values()]


def suspects(found: Sequence[Advice]) -> list[Advice]:
    """Of all advice, oldest first, the last word about each suspect generation, but for those that are withdrawn.

    The newest generation comes first: it may descend from the others.
    """
    last = {one.suspect: one for one in found if one.suspect is not None}
    newest_first = [last[at] for at in sorted(last, reverse=True)]  # guard: newest-suspect-first
    return [one for one in newest_first if not one.withdrawn]  # guard: withdrawn-advice-not-followed


def finding(one: Advice, found: Sequence[Advice]) -> Finding:
    """The finding with which the suspect generation of `one` is marked. `found`: all advice of the run, which people
    delete in time. So the newest suspect of a failure, which is kept for them, names the batches too, line by line."""
    same = [other for other in found if other.at == one.at]
    lines = [one.why]
    if one.suspect == max(other.suspect for other in same if other.suspect is not None):
        lines += [_batches(other.skip) for other in same if other.skip is not None and other.skip.samples]
    return Finding(kind="Suspect", what="\n".join(lines), layer="training")


def _batches(skip: Skip) -> str:
    last = skip.first + skip.count - 1
    windows = f"window {last}" if skip.count == 1 else f"windows {skip.first} to {last}"
    named = ", ".join(map(str, skip.samples[:NAMED_SAMPLES]))
    more = len(skip.samples) - NAMED_SAMPLES
    rest = f" and {more:,} more, which ResumableSampler.order({skip.epoch}) has" if more > 0 else ""
    return f"batches of its steps: epoch {skip.epoch}, {windows}, samples {named}{rest}"

"""The attempts of a job, as records in its run: one for each attempt, created when it has ended.

`lastgood attempts` reads them. A record is never changed, and nothing is decided by it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec

from ..format import commit, layout
from ..io.files import PosixFiles
from ..ports import Tier
from ..records import Record
from ..run import access, paths
from ..storage.directory import Disk

FOLDER = "attempts"


class Cause(Record, frozen=True, kw_only=True):
    """Why an attempt has failed. `kind`: "signal", "exit", "exception" or "hang". `rank`: that failed first, or, of
    ranks that hang, the one for which the others wait."""

    kind: str
    rank: int
    code: int
    what: str
    """for people: the name of the signal, the exit code, type and message of the exception, or where the rank hangs"""
    stack: str = ""
    """the stack of the exception"""
    stacks: dict[str, str] = msgspec.field(default_factory=dict)
    """of a hang: rank -> the stacks of its threads"""


class Attempt(Record, frozen=True, kw_only=True):
    """One life of all ranks of a job. Times of day: seconds since 1970. Steps: 0 where there was none."""

    format: int
    number: int
    job: str
    """an id of the supervisor that made the attempt"""
    host: str
    command: list[str]
    ranks: int
    began_at: float
    seconds: float
    restored_step: int | None
    """the step from which it went on; None: it failed before it had restored a state"""
    last_step: int
    replayed_steps: int
    """steps that the attempt before had completed, and that were trained again"""
    phases: dict[str, float]
    """phase -> seconds, of the rank that took longest"""
    cause: Cause | None
    """None: it did not fail"""
    answer: str
    """what followed, and why"""


@contextlib.contextmanager
def opened(run: str) -> Iterator[Tier]:
    """A run, for the records of its attempts, beside what its training process writes. Takes no lock."""
    place = paths.parsed(run)
    if place.kind == "objects":
        with access.for_sharing(run, "atomic_dirsync") as tier:
            yield tier
    else:
        yield Disk(PosixFiles(), place.root, shared=True)


def write(tier: Tier, attempt: Attempt) -> None:
    """Create the record of an attempt in a run. Raises what `put_new` raises."""
    tier.put_new(f"{FOLDER}/{attempt.number:06d}.json", layout.encode(attempt))


def read(tier: Tier) -> list[Attempt]:
    """The attempts of a run, oldest first. Damaged records are left out: they are evidence, not state.

    Raises UnknownFormat if a newer version wrote one of them, and Unavailable.
    """
    listing = sorted(tier.list(FOLDER).items())
    found = (commit.read_hint(tier, f"{FOLDER}/{name}", length, Attempt) for name, length in listing)
    return [one for one in found if one is not None]

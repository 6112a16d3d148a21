"""Records beside the generations of a run, for what happens to the job around it: attempts, and advice for restores.

    attempts/000001.json   one attempt of a job, written when it has ended (supervisor/attempt_log.py)
    begun/000001.json      that an attempt has begun, and, in a second one, that its state is restored
    advice/000001.json     what a later restore is to do differently (advice.py)

They are numbered, created whole, never changed, and need no lock: of two that come at once, each gets a number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

from ..errors import NameTaken
from ..format import commit, layout
from ..io.files import PosixFiles
from ..ports import Tier
from ..records import Record
from ..storage.directory import Disk
from . import access, paths

T = TypeVar("T", bound=Record)
TRIES = 10
"""How often a number is tried that another process may take at the same moment."""


@contextlib.contextmanager
def opened(run: str) -> Iterator[Tier]:
    """A run, for its records of this kind, beside what its training process writes. Takes no lock."""
    place = paths.parsed(run)
    if place.kind == "objects":
        with access.for_sharing(run, "atomic_dirsync") as tier:
            yield tier
    else:
        yield Disk(PosixFiles(), place.root, shared=True)


def of_run(run: str) -> Tier:
    """The run that such records are beside, for reading. Of slots of several ranks those of one rank that are on this
    machine, because their path is no run by itself. Raises as `access.for_reading`."""
    root, kind = paths.parsed(run)
    if kind == "slots":
        with opened(run) as beside:
            ranks = sorted(name for name in beside.list("") if layout.is_rank_folder(name))
        run = f"{paths.SLOTS}{root}/{ranks[0]}" if ranks else run  # guard: slots-of-ranks-are-one-run
    return access.for_reading(run)


def append(tier: Tier, folder: str, record: Record) -> int:
    """Create a record with the next number of its folder. Returns the number. Raises what `put_new` raises."""
    for left in reversed(range(TRIES)):
        number = newest(tier, folder) + 1
        try:
            tier.put_new(f"{folder}/{number:06d}.json", layout.encode(record))
            break
        except NameTaken:
            if not left:
                raise
    return number


def newest(tier: Tier, folder: str) -> int:
    """The number of the newest record of a folder; 0: there is none. Raises Unavailable."""
    return max(map(_number, tier.list(folder)), default=0)


def read(tier: Tier, folder: str, kind: type[T], after: int = 0) -> dict[int, T]:
    """Number -> record of a folder, oldest first. Damaged ones are left out. `after`: only of greater numbers.

    Raises UnknownFormat if a newer version wrote one of them, and Unavailable.
    """
    found = dict[int, T]()
    for name, length in sorted(tier.list(folder).items()):
        if _number(name) > after and (one := commit.read_hint(tier, f"{folder}/{name}", length, kind)) is not None:
            found[_number(name)] = one
    return found


def _number(name: str) -> int:
    """The number of a record, from the name of its file; 0 for any other file."""
    return int(name[:6]) if name[:6].isdecimal() else 0

"""Commits the newest save in memory that every rank had sealed when the job was lost, before its coordinator committed.

Called where no training process saves: by the next opening of the run, or by the agent of the only node, under the lock
of the run. Changes nothing else.
"""

from __future__ import annotations

import contextlib
import os

from .. import reporting
from ..errors import CommitUnknown, LastgoodError, NoSpace, NotWritable
from ..format import commit, intents, layout
from ..io.files import Lock
from ..policy import restore
from ..ports import Tier
from ..records import Commit, Incarnation
from . import access, paths
from .known import Environment, KnownRun

HELD = "a process has the run open"


def sealed_by_all(tier: Tier, survey: commit.Survey, run: str) -> tuple[Commit, str] | None:
    """The COMMIT of the newest save that every rank has sealed, and the name of its digest; None if there is none.

    `survey`: of the place. `run`: the id of the run. Raises Unavailable.
    """
    if not paths.in_memory(tier.place):
        return None
    listings = {at: survey.listings[layout.folder(at).partition("/")[2]] for at in survey.incomplete}
    found = {at: one for at, files in listings.items() if (one := intents.find(tier, at, run, files))}
    for at in restore.under_way(survey, {at: one.record for at, one in found.items()}):
        record = found[at].sealed(intents.seals_of(tier, at))
        if record is not None:
            return record, found[at].algorithm
    return None


def commit_in(memory: Tier) -> None:
    """As `commit_sealed`, for an agent, which has not opened the run. The lock of the run is held."""
    known = KnownRun(memory, Environment())
    commit_sealed(known, known.run_id)


def commit_unless_held(memory: Tier, folder: str) -> str:
    """As `commit_in`, under the lock of the run in this folder. Where the save cannot be committed, it stays as it is.

    Returns why it is to be tried again, or "": of a killed process a connection may end before the lock does.
    """
    try:
        lock = Lock(os.path.join(folder, access.LOCK), access.AGENTS_MARK)
    except BlockingIOError:
        return HELD
    except OSError:  # nothing was ever saved here, or somebody has removed it
        return ""
    with contextlib.closing(lock), contextlib.suppress(OSError, LastgoodError):
        commit_in(memory)
    return ""


def commit_sealed(known: KnownRun, run: str) -> None:
    """Commit the newest save that every rank has sealed, if nothing newer is known. `run`: the id of the run.

    Where memory has no room for its COMMIT, the save stays as it is. Raises Unavailable, TierDown.
    """
    tier, survey = known.tier, known.survey
    found = sealed_by_all(tier, survey, run)
    if found is None:
        return
    at = found[0].id
    try:
        commit.publish(tier, *found)  # guard: sealed-save-committed-late
    except (CommitUnknown, NoSpace, NotWritable) as error:
        reporting.warning(f"step {at.step} had been saved by all ranks when the job was lost, and is given up: {error}")
        return  # guard: full-memory-opens
    with contextlib.suppress(LastgoodError):  # beside a COMMIT it has no effect
        intents.withdraw(tier, at)
    survey.incomplete.discard(at)
    survey.generations[at] = one = commit.read_generation(tier, at, run)
    order, parent = one.commit.order, one.commit.continues
    survey.order = max(survey.order, order)
    incarnation = Incarnation(format=layout.FORMAT, order=order, id=at.incarnation, parent=parent)
    survey.incarnations.setdefault(at.incarnation, incarnation)
    reporting.info(f"step {at.step} had been saved by all ranks when the job was lost; it is committed now")

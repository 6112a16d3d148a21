"""Commits the newest save in memory that every rank had sealed when the job was lost, before its coordinator committed.

Called where no training process saves, under the lock of the run: by the next opening, or by the agent of the
coordinator's node. Changes nothing else.

On several nodes the agent asks those of the other ones (`Others`). Only the node of the coordinator has the intent, so
only one agent commits a save.

Invariants
  1. The intent lies beside COMMIT until all other nodes have that: until then each attempt puts it there.
  2. The next opening and the agent create the same bytes: the record of the intent with the seals of all ranks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Protocol

from .. import reporting
from ..errors import CommitUnknown, LastgoodError, NoSpace, NotWritable, Refused, RunLocked, Unavailable
from ..format import commit, intents, layout
from ..format.sealed import read
from ..io.files import Lock
from ..policy import restore
from ..ports import Tier
from ..records import Commit, GenerationId, Incarnation, Seal
from . import access, paths
from .known import Environment, KnownRun

HELD = "a process has the run open"


class Others(Protocol):
    """The agents of the other nodes of the job. No training process may have the run open on any of them."""

    def seals(self, at: GenerationId) -> Sequence[Seal]:
        """As `intents.seals_of`, on all of these nodes. Raises RunLocked, PeerRefused, Unavailable."""

    def commit(self, at: GenerationId, data: bytes) -> None:
        """Create this COMMIT on all of these nodes. Raises as `seals`, as `Tier.put_new`, and Refused by a node that
        has not sealed what COMMIT names."""


def sealed_by_all(
    tier: Tier, survey: commit.Survey, run: str, others: Others | None = None
) -> tuple[Commit, str] | None:
    """The COMMIT of the newest save that every rank has sealed, and the name of its digest; None if there is none.

    `survey`: of the place. `run`: the id of the run. `others`: have seals too (default: none do). Raises Unavailable,
    and what `others` raises.
    """
    if not paths.in_memory(tier.place):
        return None
    listings = {at: survey.listings[layout.folder(at).partition("/")[2]] for at in survey.incomplete}
    found = {at: one for at, files in listings.items() if (one := intents.find(tier, at, run, files))}
    for at in restore.under_way(survey, {at: one.record for at, one in found.items()}):
        seals = intents.seals_of(tier, at)
        record = found[at].sealed(seals)
        if record is None and others is not None:
            record = found[at].sealed([*seals, *others.seals(at)])
        if record is not None:
            return record, found[at].algorithm
    return None


def commit_in(memory: Tier, others: Others | None = None) -> None:
    """As `commit_sealed`, for an agent, which has not opened the run. The lock of the run is held."""
    known = KnownRun(memory, Environment())
    problem = _complete(known, others) if others is not None else None
    commit_sealed(known, known.run_id, others)
    if problem is not None:
        raise problem


def _complete(known: KnownRun, others: Others) -> LastgoodError | None:
    """Put each COMMIT on the other nodes beside which the intent still lies: not all have it yet. Returns why one could
    not be put there; None: all were, or it is of no use."""
    tier, problem = known.tier, None
    for at in known.survey.generations:
        listing = known.survey.listings[layout.folder(at).partition("/")[2]]
        if layout.INTENT not in listing:
            continue
        try:
            others.commit(at, read(tier, f"{layout.folder(at)}/{layout.COMMIT}", listing[layout.COMMIT]))
        except LastgoodError as error:
            if isinstance(error, RunLocked) or not isinstance(error, Refused):
                problem = error
            continue  # refused: it was deleted there, or the nodes have gone on with another job
        with contextlib.suppress(LastgoodError):  # it is completed once more then
            intents.withdraw(tier, at)
    return problem


def commit_unless_held(memory: Tier, folder: str, others: Others | None = None) -> str:
    """As `commit_in`, under the lock of the run in this folder. Where the save cannot be committed, it stays as it is.

    Returns the reason to try again, or "": another process holds the lock (the connection of a killed process may end
    before its lock), or another node is busy or cannot be reached.
    """
    try:
        lock = Lock(os.path.join(folder, access.LOCK), access.AGENTS_MARK)
    except BlockingIOError:
        return HELD
    except OSError:  # nothing was ever saved here, or somebody has removed it
        return ""
    with contextlib.closing(lock), contextlib.suppress(OSError, LastgoodError):
        try:
            commit_in(memory, others)
        except (RunLocked, Unavailable) as error:
            if others is not None:
                return error.what
    return ""


def commit_sealed(known: KnownRun, run: str, others: Others | None = None) -> None:
    """Commit the newest save that every rank has sealed, if nothing newer is known. `run`: the id of the run.

    `others`: as for `sealed_by_all`. Where memory has no room for its COMMIT, the save stays as it is. Raises
    Unavailable, TierDown, and what `others` raises.
    """
    tier, survey = known.tier, known.survey
    found = sealed_by_all(tier, survey, run, others)
    if found is None:
        return
    at = found[0].id
    try:
        commit.publish(tier, *found)  # guard: sealed-save-committed-late
    except CommitUnknown as error:
        reporting.warning(
            f"step {at.step} had been saved by all ranks when the job was lost; whether it is committed now is not "
            f"known, so the run goes on without it, and nothing of it is deleted: {error}"
        )
        survey.incomplete.discard(at)  # guard: unknown-late-commit-not-deleted
        return
    except (NoSpace, NotWritable) as error:
        reporting.warning(f"step {at.step} had been saved by all ranks when the job was lost, and is given up: {error}")
        return  # guard: full-memory-opens
    if others is not None:
        others.commit(at, layout.encode(*found))  # guard: late-commit-put-on-all-nodes
    with contextlib.suppress(LastgoodError):  # beside a COMMIT it has no effect
        intents.withdraw(tier, at)
    survey.incomplete.discard(at)
    survey.generations[at] = one = commit.read_generation(tier, at, run)
    order, parent = one.commit.order, one.commit.continues
    survey.order = max(survey.order, order)
    incarnation = Incarnation(format=layout.FORMAT, order=order, id=at.incarnation, parent=parent)
    survey.incarnations.setdefault(at.incarnation, incarnation)
    reporting.info(f"step {at.step} had been saved by all ranks when the job was lost; it is committed now")

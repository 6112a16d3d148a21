"""Commits the newest save in memory that every rank had sealed when the job was lost, before its coordinator committed.

Called where no training process saves: by the next opening of the run, or by the agent, under the lock of the run.
Changes nothing else.
"""

from __future__ import annotations

from .. import reporting
from ..format import commit, intents, layout
from ..policy import restore
from ..records import GenerationId, Incarnation
from . import paths
from .known import KnownRun


def commit_sealed(known: KnownRun, run: str) -> None:
    """Commit the newest save that every rank has sealed, if nothing newer is known. `run`: the id of the run.

    Raises Unavailable, CommitUnknown, NoSpace, NotWritable, TierDown.
    """
    tier, survey = known.tier, known.survey
    if not paths.in_memory(tier.place):
        return
    listings = {at: survey.listings[layout.folder(at).partition("/")[2]] for at in survey.incomplete}
    intended = {at: one for at, files in listings.items() if (one := intents.found(tier, at, run, files))}
    for at in restore.under_way(survey, intended):
        sealed = intents.sealed_by_all(tier, intended[at], listings[at], survey.generations)
        if sealed is not None:
            commit.publish(tier, *sealed)  # guard: sealed-save-committed-late
            _note(known, at, run)
            reporting.info(f"step {at.step} had been saved by all ranks when the job was lost; it is committed now")
            return


def _note(known: KnownRun, at: GenerationId, run: str) -> None:
    survey = known.survey
    survey.incomplete.discard(at)
    survey.generations[at] = one = commit.read_generation(known.tier, at, run)
    survey.order = max(survey.order, one.commit.order)
    incarnation = Incarnation(
        format=layout.FORMAT, order=one.commit.order, id=at.incarnation, parent=one.commit.continues
    )
    survey.incarnations.setdefault(at.incarnation, incarnation)

"""Opening a run for writing: completes what a crash left half done, and removes what was never committed.

Every step may be repeated: a crash in here leaves a run that the next opening settles.
"""

from __future__ import annotations

import contextlib

from ..errors import LastgoodError, Unreadable
from ..format import commit, layout
from ..format import parity_layout as striping
from ..policy import restore
from ..policy.retention import stale_incarnations
from ..records import RunHeader
from .known import KnownRun
from .retire import Deletions


def settle(known: KnownRun, deletions: Deletions) -> str:
    """Settle a run; returns its id. Raises Unreadable where the run cannot be told from another one now."""
    ident = _identified(known)
    _remove_litter(known, deletions)
    _complete(known)
    survey = known.survey
    for at in sorted(survey.going | restore.never_committed(survey)):
        if deletions.delete(at):  # guard: unfinished-removed-at-opening
            survey.going.discard(at)
            survey.incomplete.discard(at)
    return ident


def _identified(known: KnownRun) -> str:
    """The id of the run; its header is written where it is missing or damaged."""
    survey, tier = known.survey, known.tier
    if survey.run is not None:
        return survey.run
    newest = max(survey.generations.values(), key=lambda one: one.commit.order, default=None)
    unread = next((one for one in survey.broken.values() if isinstance(one, Unreadable)), None)
    if newest is None and unread:
        raise unread  # it may be read later, and a new id now would disown it
    ident = newest.commit.run if newest else known.environment.new_id()
    for name in tier.list(""):
        if name.lower() == layout.HEADER:  # damaged, or on a disk without case the old pointer in its place
            # The commits say which run this is.
            # guard: damaged-run-header-replaced
            tier.delete(name)
    # guard: run-header-written
    tier.put_new(layout.HEADER, layout.encode(RunHeader(format=layout.FORMAT, run=ident)))
    return ident


def _remove_litter(known: KnownRun, deletions: Deletions) -> None:
    """Remove staged files and unfinished parity that a crash left beside what counts."""
    survey, tier = known.survey, known.tier
    kept = [*survey.generations, *survey.broken, *survey.incomplete]
    for folder in ("", "incarnations", *map(layout.folder, kept)):
        for name, length in tier.list(folder).items():
            if length is not None and layout.is_litter(folder, name):
                deletions.remove(f"{folder}/{name}".lstrip("/"))  # guard: litter-removed-at-opening
        for name in striping.unfinished(tier.list(folder)):
            deletions.remove(f"{folder}/{name}")
    if {layout.HEADER, layout.OLD_POINTER} <= tier.list("").keys():  # two files: this disk distinguishes case
        deletions.remove(layout.OLD_POINTER)


def _complete(known: KnownRun) -> None:
    """Make durable what retention relies on, where an earlier process may have ended before it was."""
    survey, tier = known.survey, known.tier
    recorded = tier.list("incarnations")
    for record in survey.incarnations.values():
        name = layout.incarnation_name(record)
        # Otherwise only its COMMITs name its parent, and they may be deleted.
        # guard: missing-incarnation-record-written
        if name.partition("/")[2] not in recorded:
            with contextlib.suppress(LastgoodError):  # the next opening tries again
                tier.put_new(name, layout.encode(record))
    for at, one in survey.generations.items():
        if one.commit.milestone or one.commit.metrics or one.label_unread:
            commit.confirm_labels(tier, at)  # guard: labels-durable-before-use


def record_incarnation(known: KnownRun, deletions: Deletions) -> None:
    """Write the record of this incarnation, once, and delete those that lead nowhere any more."""
    record = known.incarnation
    assert record is not None
    name = layout.incarnation_name(record)
    if name.partition("/")[2] not in known.tier.list("incarnations"):
        known.tier.put_new(name, layout.encode(record))  # guard: incarnation-record-written
    known.survey.incarnations[record.id], known.recorded = record, record.id
    for stale in stale_incarnations(known.survey):
        if deletions.remove(layout.incarnation_name(stale)):
            del known.survey.incarnations[stale.id]

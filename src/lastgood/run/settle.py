"""Settling a run when it is opened for writing: completes what a crash interrupted, removes what was never committed.

Only the rank that commits does it, under the lock of the run. Every step may be repeated: a crash during it leaves a
run that the next opening settles.
"""

from __future__ import annotations

import contextlib

from .. import reporting
from ..errors import LastgoodError, TierDown, Unreadable
from ..format import commit, folders, layout, parity_layout
from ..policy import restore
from ..policy.retention import stale_incarnations
from ..ports import Tier
from ..records import RunHeader
from ..units import plural
from .known import KnownRun
from .late_commit import commit_sealed
from .retire import Deletions


def settle(known: KnownRun, deletions: Deletions) -> str:
    """Settle a run and return its id. Raises Unreadable if its id is recorded only where it cannot be read now."""
    _report_unread(known)  # guard: unread-generation-reported
    run_id = _ensure_header(known)
    _remove_litter(known, deletions)
    commit_sealed(known, run_id)
    _complete(known)
    remove_unfinished(known, deletions)
    return run_id


def _report_unread(known: KnownRun) -> None:
    """Report the generations that cannot be read: the run goes on without them."""
    if unread := known.survey.unread:
        newest, many = max(unread), plural(len(unread), "generation")
        reporting.warning(
            f"{known.tier.place}: {many} cannot be read ({newest}: {unread[newest].what}). They stay and count for "
            "nothing, and no restore goes back past them. Check the owner of the folder, the mount and the disk; what "
            "is not needed can be moved out of the run"
        )


def remove_unfinished(known: KnownRun, deletions: Deletions, copied: bool = False) -> None:
    """Finish the deletions that were begun, and delete what was never committed. `copied`: as `never_committed`.

    Raises TierDown if a folder that was empty when the run was listed, as after a deletion, is a generation now.
    """
    survey = known.survey
    for at in sorted(survey.going):
        listing = folders.names(known.tier, layout.folder(at))
        if layout.COMMIT in listing and layout.GOING not in listing:  # guard: seen-again-is-not-deleted
            raise TierDown(
                f"step {at.step} could not be listed in {known.tier.place} a moment ago, and is there now",
                safe="Nothing was deleted.",
                todo="Look whether the file system stays mounted, then open the run again.",
            )
    for at in sorted(survey.going | restore.never_committed(survey, copied)):
        if deletions.delete(at):  # guard: unfinished-removed-at-opening
            survey.going.discard(at)
            survey.incomplete.discard(at)


def _ensure_header(known: KnownRun) -> str:
    """The id of the run. Writes the run's header if it is missing or damaged."""
    survey, tier = known.survey, known.tier
    if survey.run is not None:
        return survey.run
    newest = max(survey.generations.values(), key=lambda one: one.commit.order, default=None)
    unreadable = [one for one in survey.broken.values() if isinstance(one, Unreadable)] + [*survey.unread.values()]
    if newest is None and unreadable:
        raise unreadable[0]  # it may become readable later, and would not belong to a run with a new id
    run_id = newest.commit.run if newest else known.environment.new_id()
    write_header(tier, run_id)
    return run_id


def write_header(tier: Tier, run_id: str) -> None:
    """Write the header of a run in a place that has none, or a damaged one."""
    for name in tier.list(""):
        # The header is damaged, or the old pointer has its name on a disk that ignores case.
        if name.lower() == layout.HEADER:
            # Nothing is lost: every commit holds the id of the run.
            # guard: damaged-run-header-replaced
            tier.delete(name)
    # guard: run-header-written
    tier.put_new(layout.HEADER, layout.encode(RunHeader(format=layout.FORMAT, run=run_id)))


def _remove_litter(known: KnownRun, deletions: Deletions) -> None:
    """Remove temporary files and unfinished parity that a crash left in the folders of the run."""
    survey, tier = known.survey, known.tier
    kept = {layout.folder(at) for at in (*survey.generations, *survey.broken, *survey.incomplete)}
    listings = {f"gen/{name}": one for name, one in survey.listings.items() if f"gen/{name}" in kept}
    for folder, listing in {"": tier.list(""), "incarnations": tier.list("incarnations"), **listings}.items():
        for name, length in listing.items():
            if length is not None and layout.is_litter(folder, name):
                deletions.remove(f"{folder}/{name}".lstrip("/"))  # guard: litter-removed-at-opening
        for name in parity_layout.unfinished(listing):
            deletions.remove(f"{folder}/{name}")
    if {layout.HEADER, layout.OLD_POINTER} <= tier.list("").keys():  # two files: this disk distinguishes case
        deletions.remove(layout.OLD_POINTER)


def _complete(known: KnownRun) -> None:
    """Make durable what retention relies on: the records of incarnations, and labels.

    The process that wrote them may have ended before they were durable.
    """
    survey, tier = known.survey, known.tier
    recorded = tier.list("incarnations")
    for record in survey.incarnations.values():
        name = layout.incarnation_name(record)
        # Without the record only the COMMITs of the incarnation name its parent, and retention may delete them.
        # guard: missing-incarnation-record-written
        if name.partition("/")[2] not in recorded:
            with contextlib.suppress(LastgoodError):  # the next opening tries again
                # A killed process may have left a COMMIT that is visible and not durable. Were it lost after its
                # record, generations of older incarnations would count as abandoned.
                newest = max(at for at in survey.generations if at.incarnation == record.id)
                commit.confirm(tier, newest)  # guard: commit-durable-before-its-incarnation
                tier.put_new(name, layout.encode(record))
    if commit.visible_is_durable(tier):
        return
    for at, one in survey.generations.items():
        if one.commit.milestone or one.commit.metrics or one.label_unread:
            commit.confirm_labels(tier, at)  # guard: labels-durable-before-use


def record_incarnation(known: KnownRun, deletions: Deletions) -> None:
    """Write the record of this incarnation, and delete the records that no generation descends from any more."""
    record = known.incarnation
    assert record is not None
    name = layout.incarnation_name(record)
    if name.partition("/")[2] not in known.tier.list("incarnations"):
        known.tier.put_new(name, layout.encode(record))  # guard: incarnation-record-written
    known.survey.incarnations[record.id], known.recorded = record, record.id
    for stale in stale_incarnations(known.survey):
        if deletions.remove(layout.incarnation_name(stale)):
            del known.survey.incarnations[stale.id]

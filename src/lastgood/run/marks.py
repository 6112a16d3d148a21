"""Records about committed generations: marks of the guard, labels of users, and the pointer to the newest good one.

Marks and the pointer are hints for restores and for people: a run without any of them restores the same generation,
because a restore verifies what it reads. If one of them cannot be written, this is therefore reported, and nothing is
raised. The exception is the mark of a good generation: the error is raised, because the generation counts as verified
only once its mark is durable.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from .. import reporting
from ..errors import LastgoodError, NoSpace, NoSuchStep, NotWritable, Unavailable
from ..format import commit, layout
from ..policy import restore
from ..policy.retention import unverified_ahead
from ..records import Finding, Generation, GenerationId, Pointer, intact, judged
from . import disk_space
from .known import KnownRun


class Marks:
    """Writes the marks, labels and the pointer of one run that is open for writing."""

    def __init__(self, known: KnownRun) -> None:
        self._known = known
        self._pointed: Pointer | None = None
        """the pointer that this opening has written last; None before its first call, which always writes"""
        self._pointing_failed = self._gave_way = False

    def conclude(self, generation: Generation, findings: list[Finding]) -> None:
        """Mark a generation with the findings of a complete reading; without findings, the pointer is moved if need be.

        A generation with findings counts as bad in this process at once. If its mark cannot be written, that is
        reported, so that the caller goes on to raise the findings themselves. If a good one cannot be marked, the error
        is raised (Unavailable, NotWritable), and it stays unverified.
        """
        known = self._known
        with known.lock:
            now = known.survey.generations.get(generation.id)
            if now is not None:  # a label may have been added while the generation was read
                generation = msgspec.structs.replace(generation, commit=now.commit)
            if findings:  # before the mark: this process must not count on the generation, even if the mark fails
                known.record(judged(generation, findings))
                if generation.id in known.lost:  # guard: lost-part-gets-no-mark
                    return  # its node may come back
            try:
                self._mark(generation, findings)  # guard: mark-before-pointer
            except (Unavailable, NotWritable) as error:
                if not findings:
                    raise
                _report_unmarked(generation.id, error)  # guard: findings-outlive-failed-mark
            known.record(judged(generation, findings))
            if intact(findings):
                known.unread = unverified_ahead(known.lineage())
            if not findings:
                self.point()  # guard: verified-is-pointed-at

    def _mark(self, generation: Generation, findings: list[Finding]) -> None:
        """As `commit.mark`. On a full disk the pointer gives way: without the mark nothing older may be deleted."""
        try:
            commit.mark(self._known.tier, generation, findings)
        except NoSpace as error:
            if not self._gives_way(error):  # guard: pointer-gives-way-to-mark
                raise
            commit.mark(self._known.tier, generation, findings)

    def _gives_way(self, error: NoSpace) -> bool:
        """Delete POINTER.json and the link on a full disk: their space is free then, and nothing names what is deleted
        afterwards. Returns whether a write that has found no space may succeed now. Reported once for each opening."""
        known = self._known
        if not disk_space.is_full(error):  # guard: length-limit-keeps-pointer
            return False
        self._pointed = None
        try:
            there = layout.POINTER in known.tier.list("")
            for name in (layout.POINTER, layout.LINK):
                known.tier.delete(name)
        except LastgoodError:
            return False  # what they name is kept, and `error` is reported
        known.survey.pointer = None
        if there and not self._gave_way:
            self._gave_way = True
            reporting.warning(
                f"the disk of {known.tier.place} is full ({error.what}): {layout.POINTER} and {layout.LINK} were "
                "deleted, so that a generation can be marked as verified and an older one deleted. They are hints: "
                "every committed generation is untouched, and a restore takes the same one without them. They are "
                "written again once there is space. Free space on this disk, or keep fewer generations "
                "(retention=Keep(last=...))."
            )
        return there

    def point(self) -> None:
        """Write the newest verified generation of the durable lineage to POINTER.json and the link latest_ok.

        A failure is reported once, until a call succeeds; every later call tries again.
        """
        known = self._known
        with known.lock:
            chain = restore.lineage(known.survey).chain  # guard: pointer-follows-durable-lineage
            generations = known.survey.generations
            newest = next((generations[at] for at in chain if at in generations and generations[at].good), None)
            if newest is None:
                return
            pointer = Pointer(
                format=layout.FORMAT, step=newest.step, incarnation=newest.id.incarnation, root=newest.root
            )
            if pointer == self._pointed:
                return
            try:
                self._write(pointer, layout.folder(newest.id))
            except LastgoodError as error:
                if not self._pointing_failed:
                    reporting.warning(
                        f"{layout.POINTER} and {layout.LINK} cannot be moved to step {newest.step}: {error.what}. They "
                        "are hints: saving, restoring and deleting go on, and they are moved as soon as that works."
                    )
                self._pointing_failed = True
                return
            known.survey.pointer = self._pointed = pointer
            self._pointing_failed = False

    def _write(self, pointer: Pointer, folder: str) -> None:
        """Write the pointer, and the link to `folder`. On a full disk those that are there are deleted first."""
        known, data = self._known, layout.encode(pointer)
        # It may be there from now on, even if this fails.
        known.survey.pointer = known.survey.pointer or pointer  # guard: unfinished-pointer-names
        try:
            known.tier.point(layout.POINTER, data, folder)  # gap: before_pointer
        except NoSpace as error:
            if not self._gives_way(error):  # guard: full-disk-replaces-pointer
                raise
            known.survey.pointer = pointer  # guard: unfinished-new-pointer-names
            known.tier.point(layout.POINTER, data, folder)

    def label(self, at: GenerationId, milestone: bool, metrics: Mapping[str, float]) -> Generation:
        """Add a milestone or metrics to a committed generation. Returns it with them; the label is durable on return.

        Raises NoSuchStep if the generation was deleted or is being deleted, and NoSpace or TierDown.
        """
        known = self._known
        with known.lock:
            generation = known.survey.generations.get(at)
            if generation is None:
                raise restore.no_such_step(f"{at} has been deleted: nothing can be added to it", known.survey)
            if at in known.deleting:  # guard: no-label-during-deletion
                raise NoSuchStep(
                    f"{at} is being deleted: nothing can be added to it",
                    safe="Nothing was changed.",
                    todo="Add it to a newer step.",
                )
            now = generation.commit
            if (milestone and not now.milestone) or not metrics.items() <= now.metrics.items():
                known.record(commit.label(known.tier, generation, milestone, metrics))
            return known.survey.generations[at]


def _report_unmarked(at: GenerationId, error: LastgoodError) -> None:
    """Report that the mark of a bad generation could not be written."""
    reporting.warning(
        f"{at} is not good, and could not be marked: {error.what}. This process does not restore it; a later one finds "
        "the same when it reads it."
    )

"""What is written beside a committed generation: marks of the guard, labels of people, and the pointer to the newest.

Marks and the pointer are hints for restores and for people; a run without any of them restores the same generation.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from .. import reporting
from ..errors import LastgoodError, NoSuchStep
from ..format import commit, layout
from ..policy import restore
from ..policy.retention import unverified_ahead
from ..records import Finding, Generation, GenerationId, Pointer, intact, judged
from .known import KnownRun


class Marks:
    """The marks, labels and the pointer of one run that is open for writing."""

    def __init__(self, known: KnownRun) -> None:
        self._known = known
        self._pointed: Pointer | None = None
        """what this opening has written to the pointer: its first call replaces whatever stands there"""
        self._pointing_failed = False

    def conclude(self, generation: Generation, findings: list[Finding]) -> None:
        """Mark what a complete reading of a generation found; the pointer follows a good one of the lineage."""
        known = self._known
        with known.lock:
            now = known.survey.generations.get(generation.id)
            if now is not None:  # it may have got a label while it was read
                generation = msgspec.structs.replace(generation, commit=now.commit)
            if findings:  # it does not count any more, also where that cannot be written down
                known.record(judged(generation, findings))
            commit.mark(known.tier, generation, findings)  # guard: mark-before-pointer
            known.record(judged(generation, findings))
            if intact(findings):
                known.unread = unverified_ahead(known.lineage())
            if not findings:
                self.point()  # guard: verified-is-pointed-at

    def point(self) -> None:
        """Let POINTER.json and latest_ok name the newest verified generation of the lineage, as it is durable.

        Both are hints: that they cannot be written is reported once, and every later call tries again.
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
                known.tier.point(
                    layout.POINTER, layout.encode(pointer), layout.folder(newest.id)
                )  # gap: before_pointer
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

    def label(self, at: GenerationId, milestone: bool, metrics: Mapping[str, float]) -> Generation:
        """Add a milestone or metrics to a committed generation: with them, durable on return.

        Raises NoSuchStep where it was deleted, NoSpace, TierDown.
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

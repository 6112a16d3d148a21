"""Mends damaged generations from their parity, and reads again, for the scrubber, generations that were good before.

A damaged file is replaced only by bytes that agree with every digest of the manifest (engine/parity.py). Afterwards the
whole generation is read again and marked; only if it is intact does the mending count as a success.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Executor
from typing import cast

from ..engine import guard, parity
from ..engine.arena import Arena
from ..errors import BeyondRepair, Cancelled, LastgoodError, Unreadable
from ..format import commit
from ..policy import restore
from ..ports import Mendable
from ..records import Finding, Generation, GenerationId, intact, judged
from . import reader
from .known import KnownRun
from .marks import Marks
from .reader import Reading, read_all, read_on
from .verify import Stop, Verifier, never


class Mender:
    """Mends the generations of one run. `mended`: each generation that was mended -> the names of its rebuilt files."""

    def __init__(self, known: KnownRun, marks: Marks, verifier: Verifier, workers: Executor) -> None:
        self._known, self._marks, self._verifier, self._workers = known, marks, verifier, workers
        self.mended: dict[GenerationId, list[str]] = {}

    def mend(self, at: GenerationId, arena: Arena, stop: Stop = never) -> list[str]:
        """Rebuild the damaged files of a generation from its parity, then read and mark it. Returns the file names.

        Damaged parity is written anew; if that fails, the event `not_protected` is emitted. Raises BeyondRepair if the
        parity does not suffice, the errors of writing and reading, and Cancelled once `stop()` returns True. A damaged
        file that was not rebuilt by then is unchanged.
        """
        known = self._known
        usable = self._parity(at)
        if usable is None:
            raise BeyondRepair(f"{at} has no parity that can be read", safe="Nothing was changed.")
        try:
            names = parity.rebuild(cast(Mendable, known.tier), usable, self._workers, stop)
        except BeyondRepair:
            if (one := known.survey.generations.get(at)) is not None:  # it is marked as damaged
                findings = read_all(known.tier, one, arena, self._workers)
                self._marks.conclude(one, findings)  # guard: irreparable-is-marked
            raise
        generation = commit.read_generation(known.tier, at, known.run_id)
        findings = read_all(known.tier, generation, arena, self._workers)  # guard: repair-rereads-everything
        with known.lock:
            self._marks.conclude(generation, findings)
            known.survey.broken.pop(at, None)  # guard: repaired-is-not-broken
            known.survey.incomplete.discard(at)
            known.survey.witnessed.discard(at)
        if not intact(findings):  # guard: failed-repair-raised
            raise BeyondRepair(f"{at} was rebuilt and does not read back: {restore.summary(findings)}")
        if names:
            self.mended[at] = names
            known.emit("repaired", at, detail=", ".join(names))  # guard: repair-reported
        try:
            self._verifier.protect(generation, usable.code, arena, stop)
        except Cancelled:
            raise
        except LastgoodError as error:
            known.emit("not_protected", at, detail=f"{type(error).__name__}: {error.what}")
        return names

    def try_to_mend(self, at: GenerationId, arena: Arena, stop: Stop = never) -> bool:
        """Mend a generation if it has parity. Returns whether it was mended; a failure emits `not_repaired`."""
        try:
            if self._known.tier.newest_only or parity.find(self._known.tier, at) is None:
                return False
            self.mend(at, arena, stop)
        except Cancelled:
            raise
        except LastgoodError as error:
            # guard: repair-failure-reported
            self._known.emit("not_repaired", at, detail=f"{type(error).__name__}: {error.what}")
            return False
        return True

    def mend_known(self, step: int | None, arena: Arena) -> None:
        """Mend the generations that a restore would pass over as damaged, newest first, down to the one it would load.

        `step`: only generations of this step are mended (None: any).
        """
        known = self._known
        chain, lost = restore.lineage(known.view)
        in_lineage = sorted({*chain, *lost}, key=self._age, reverse=True)
        outside = known.survey.broken.keys() - set(in_lineage)
        mended = False
        for at in (*outside, *in_lineage):
            one = known.survey.generations.get(at)
            if one is not None and not one.damaged:  # guard: good-generation-not-mended
                if step is None and not one.unfit:
                    break
                continue
            if step in (None, at.step):
                mended |= self.try_to_mend(at, arena)
        if mended:
            with known.lock:
                # Rebuilt records may name incarnations and predecessors that were unknown before.
                # guard: survey-after-mend
                known.survey = commit.survey(known.tier)

    def _age(self, at: GenerationId) -> tuple[int, int]:
        incarnation = self._known.survey.incarnations.get(at.incarnation)
        return incarnation.order if incarnation else 0, at.step

    def _parity(self, at: GenerationId) -> parity.UsableParity | None:
        return None if self._known.tier.newest_only else parity.find(self._known.tier, at)

    # ---- scrubbing -----------------------------------------------------------------------------------------

    def reading(
        self, generation: Generation, arena: Arena, also: Callable[[memoryview], None] = lambda _: None
    ) -> Reading:
        """Begin a reading of a generation for `read_again`. It may be interrupted between any two chunks."""
        return reader.reading(self._known.tier, generation, arena, self._workers, also=also)

    def read_again(
        self, generation: Generation, arena: Arena, begun: Reading, stop: Stop = never
    ) -> tuple[list[Finding], bool]:
        """Read a generation again that was read before. Returns the findings, and whether damage was mended.

        `begun`: the reading from `reading`, new or interrupted. Findings that differ from the present mark are marked.
        Missing or damaged parity is written. Raises Cancelled when `stop()` returns True, Unavailable, Unreadable.
        """
        known = self._known
        try:
            findings = read_on(begun, stop)
        except Unreadable as error:
            if self.try_to_mend(generation.id, arena, stop):  # guard: unreadable-is-mended
                return [guard.finding(error)], True
            raise
        if generation != judged(generation, findings):  # guard: scrub-findings-marked
            with known.lock:
                if generation.id not in known.survey.generations:
                    raise Cancelled("the generation was deleted while it was read")
                self._marks.conclude(generation, findings)
        if not intact(findings):
            return findings, self.try_to_mend(generation.id, arena, stop)  # guard: scrub-damage-mended
        usable = self._parity(generation.id)
        code = self._verifier.code or (usable.code if usable else None)
        if code is not None and not findings:
            with contextlib.suppress(Cancelled):  # the reading is complete; the next round checks the parity again
                self._verifier.protect(generation, code, arena, stop)  # guard: scrub-restores-parity
        return findings, False

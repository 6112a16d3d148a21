"""Mends damaged generations, and reads again, for the scrubber, generations that were good before.

A damaged file is rebuilt from the parity of its generation (engine/parity.py), or from that among the memories of
nodes (node_parity.py); if that does not suffice, it is taken chunk by chunk from another place of the run (copying.py).
It is replaced only by bytes that agree with every digest of the manifest. Afterwards the whole generation is read again
and marked; only if it is intact does the mending count as a success.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Protocol, cast

from ..engine import guard, parity
from ..engine.arena import Arena
from ..errors import (
    NODE_FAILED,
    BeyondRepair,
    Cancelled,
    Damaged,
    LastgoodError,
    NoSpace,
    PeerDown,
    TierDown,
    Unreadable,
)
from ..format import commit, folders, layout
from ..io.reed_solomon import Code
from ..policy import restore
from ..ports import Mendable, Stop, Tier, never
from ..records import Finding, Generation, GenerationId, intact, judged, with_suspicion
from . import copying, node_opening, reader
from .known import KnownRun
from .marks import Marks
from .reader import Reading, read_all, read_on
from .verify import Verifier

OUTAGES = TierDown, *NODE_FAILED
"""what a node raises, or the rank that leads it, if it cannot be reached now"""
OUTAGE_PAUSES_SECONDS = (1.0, 5.0)
"""The pauses between attempts to rebuild from nodes of which one cannot be read."""


class FromNodes(Protocol):
    """Rebuilds files from parity among the memories of nodes (node_parity.NodeRebuild)."""

    def rebuild(self, generation: Generation, stop: Stop) -> list[str]: ...
    def end(self) -> None: ...


class Mender:
    """Mends the generations of one place of a run.

    `mended`: each generation that was mended -> the names of the files that were written. `sources`: other places of
    the run, the cheapest first; none by default. `others`: ranks that mend their part from these places, where each
    node has a disk of its own; by default this process mends everything. `nodes`: rebuilds files from parity among the
    memories of nodes; by default there is none.
    """

    def __init__(self, known: KnownRun, marks: Marks, verifier: Verifier, workers: Executor) -> None:
        self._known, self._marks, self._verifier, self._workers = known, marks, verifier, workers
        self.mended: dict[GenerationId, list[str]] = {}
        self.sources: Sequence[Tier] = ()
        self.others: copying.Others = copying.Nobody()
        self.nodes: FromNodes | None = None
        self._one_at_a_time = threading.RLock()
        """a restore and a scrub may mend the same generation"""

    def mend(self, at: GenerationId, arena: Arena, stop: Stop = never) -> list[str]:
        """Mend the damaged files of a generation, then read and mark it. Returns the names of the files.

        Damaged parity is written anew; if that fails, the event `not_protected` is emitted. Raises BeyondRepair if
        neither the parity nor the other places suffice, PeerDown if they do not while a node cannot be read, the errors
        of writing and reading, and Cancelled once `stop()` returns True. A damaged file that was not rebuilt by then is
        unchanged.
        """
        with self._one_at_a_time:
            return self._from_anywhere(at, arena, stop)

    def _from_anywhere(self, at: GenerationId, arena: Arena, stop: Stop) -> list[str]:
        """As `mend`: from parity, else from other nodes, else from other places."""
        try:
            return self._from_parity(at, arena, stop)
        except BeyondRepair:
            if not self.sources and self.nodes is None:
                raise
        outage: PeerDown | None = None
        if self.nodes is not None:
            try:
                return self._from_nodes(self.nodes, at, arena, stop)
            except PeerDown as error:
                outage = error
            except BeyondRepair:
                if not self.sources:
                    raise
        try:
            return self._from_places(at, arena, stop)
        except BeyondRepair as error:
            if outage is None:
                raise
            raise outage from error

    def _from_parity(self, at: GenerationId, arena: Arena, stop: Stop) -> list[str]:
        """As `mend`, from the parity of the generation alone."""
        known = self._known
        usable = self._parity(at)
        if not usable:
            raise BeyondRepair(f"{at} has no parity that can be read", safe="Nothing was changed.")
        try:
            names = self._verifier.agent.repair(known.tier, usable[0].generation, stop)  # guard: repair-below-by-agent
            if names is None:
                names = parity.rebuild(cast(Mendable, known.tier), usable, self._workers, stop)
        except BeyondRepair:
            if (one := known.survey.generations.get(at)) is not None:  # it is marked as damaged
                self._marks.conclude(one, self._read(one, arena))  # guard: irreparable-is-marked
            raise
        generation = commit.read_generation(known.tier, at, known.run_id)
        findings = self._read(generation, arena)  # guard: repair-rereads-everything
        with known.lock:
            self._marks.conclude(generation, findings)
            self._note_readable(at)
        if not intact(findings):  # guard: failed-repair-raised
            raise BeyondRepair(f"{at} was rebuilt and does not read back: {restore.summary(findings)}")
        self._note_mended(at, names)
        self._protect(generation, usable[0].code, arena, stop)
        return names

    def _from_nodes(self, nodes: FromNodes, at: GenerationId, arena: Arena, stop: Stop) -> list[str]:
        """As `mend`, from parity among the memories of nodes. Raises PeerDown if one of them cannot be read."""
        known = self._known
        if (lost := known.survey.generations.get(at)) is None:
            raise BeyondRepair(f"the commit of {at} cannot be read", safe="Nothing was changed.")
        names, findings = list[str](), list[Finding]()
        for _ in range(2):  # the first reading may find damage on the nodes that are left
            names += self._rebuilt(nodes, lost, stop)
            generation = commit.read_generation(known.tier, at, known.run_id)
            self.others.ask(generation, "read")
            findings = read_all(known.tier, generation, arena, self._workers, stop, of=self.others.own_part(generation))
            findings += self.others.answers()
            lost = judged(generation, findings)
            if intact(findings):
                break
        with known.lock:
            known.lost.discard(at)
            self._marks.conclude(generation, findings)
            self._note_readable(at)
        if not intact(findings):
            raise BeyondRepair(f"{at} was rebuilt and does not read back: {restore.summary(findings)}")
        self._note_mended(at, names)
        return names

    def _rebuilt(self, nodes: FromNodes, lost: Generation, stop: Stop) -> list[str]:
        """As `FromNodes.rebuild`. Where a node cannot be read now, it is tried again: an agent may be started anew."""
        pauses = iter(OUTAGE_PAUSES_SECONDS)
        while True:
            try:
                return nodes.rebuild(lost, stop)
            except (Cancelled, BeyondRepair, TierDown, NoSpace):  # guard: full-memory-is-no-damage
                raise
            except NODE_FAILED as error:
                if (seconds := next(pauses, None)) is None:
                    raise PeerDown(
                        f"{lost.id} cannot be rebuilt now: {error.what}",
                        safe="No good file was changed.",
                        todo="Start the job again once all of its nodes can reach each other.",
                    ) from error
                self._known.environment.pause(seconds)
            except LastgoodError as error:
                raise BeyondRepair(f"{lost.id}: {error.what}", safe="No good file was changed.") from error

    def _from_places(self, at: GenerationId, arena: Arena, stop: Stop) -> list[str]:
        """As `mend`, with the good chunks and records of all places together."""
        known, found = self._known, self._in_other_places(at)
        if not found:
            raise BeyondRepair(
                f"{at} is damaged in {known.tier.place}, and no other place has it",
                safe="Nothing was changed.",
                todo="Name further places that may hold this run.",
            )
        code = self._code(at)
        how = copying.Copying(arena, self._workers, stop=stop, agent=self._verifier.agent)
        try:
            names = copying.complete(
                cast(Mendable, known.tier), list(found), next(iter(found.values())), how, self.others
            )
        except Damaged as error:
            raise BeyondRepair(
                f"{at}: no place has all of it: {error.what}", safe="No good file was changed.", todo=""
            ) from error
        generation = commit.read_generation(known.tier, at, known.run_id)
        with known.lock:
            known.record(generation)
            self._note_readable(at)
        self._note_mended(at, names)
        if code is not None:
            self._protect(generation, code, arena, stop)
        return names

    def _read(self, generation: Generation, arena: Arena) -> list[Finding]:
        """Read all of a generation, by the agent where it can."""

        def here() -> Reading:
            return self.reading(generation, arena)

        with contextlib.closing(
            self._verifier.agent.reading(self._known.tier, generation, float("inf"), here)
        ) as begun:
            return read_on(begun, never)

    def _in_other_places(self, at: GenerationId) -> dict[Tier, Generation]:
        """The other places that have a readable commit record of this generation."""
        found = dict[Tier, Generation]()
        for tier in self.sources:
            with contextlib.suppress(Damaged, *folders.unread_errors(tier)):
                if layout.COMMIT in tier.list(layout.folder(at)):
                    found[tier] = commit.read_generation(tier, at, self._known.run_id)
        return found

    def _note_readable(self, at: GenerationId) -> None:
        """Note that the commit record of a generation exists again and can be read. The lock is held."""
        survey = self._known.survey
        survey.broken.pop(at, None)  # guard: repaired-is-not-broken
        survey.incomplete.discard(at)
        survey.witnessed.discard(at)

    def _note_mended(self, at: GenerationId, names: list[str]) -> None:
        self._known.lost.discard(at)
        if names:
            self.mended[at] = names
            self._known.emit("repaired", at, detail=", ".join(names))  # guard: repair-reported

    def _protect(self, generation: Generation, code: Code, arena: Arena, stop: Stop) -> None:
        """Write parity for a mended generation. A failure emits `not_protected`."""
        try:
            self._verifier.protect(generation, code, arena, stop)
        except Cancelled:
            raise
        except LastgoodError as error:
            self._known.emit("not_protected", generation.id, detail=f"{type(error).__name__}: {error.what}")

    def try_to_mend(self, at: GenerationId, arena: Arena, stop: Stop = never) -> bool:
        """Mend a generation that has parity, or for which there are other places to read from.

        Returns whether it was mended; a failure emits `not_repaired`. Where nodes rebuild from each other's memory,
        PeerDown or TierDown is raised if one of them does not answer, and NoSpace if one has no room for what is
        rebuilt, unless a place below has the generation: to load an older one instead would give up what this one has.
        """
        known = self._known
        try:
            if known.tier.newest_only or not (self.sources or self.nodes or parity.find_all(known.tier, at)):
                return False
            self.mend(at, arena, stop)
        except Cancelled:
            raise
        except LastgoodError as error:
            if self.nodes is not None and isinstance(error, OUTAGES):  # guard: outage-steps-over-nothing
                raise
            # guard: full-memory-steps-over-nothing
            if self.nodes is not None and isinstance(error, NoSpace) and not self._lies_below(at):
                raise
            # guard: repair-failure-reported
            self._known.emit("not_repaired", at, detail=f"{type(error).__name__}: {error.what}")
            return False
        return True

    def _lies_below(self, at: GenerationId) -> bool:
        """Whether a place below has a copy of a generation that may be restored."""
        found = (one.survey.generations.get(at) for one in self._known.below)
        return any(one is not None and one.restorable for one in found)

    def mend_known(self, step: int | None, arena: Arena) -> None:
        """Mend the generations that a restore would pass over as damaged, newest first, down to the one it would load.
        After that, and if a generation could not be read before, the run is listed again.

        `step`: only generations of this step are mended (None: any).
        """
        known, view = self._known, self._known.view
        chain, lost = restore.lineage(view)
        in_lineage = sorted({*chain, *lost}, key=self._age, reverse=True)
        outside = known.survey.broken.keys() - set(in_lineage)
        here = {*known.survey.generations, *known.survey.broken, *known.survey.incomplete}
        again = bool(known.survey.unread)  # guard: unread-listed-again-at-restore
        for at in (*outside, *in_lineage):
            one = (known.survey if at in here else view).generations.get(at)
            if one is None or one.damaged:  # guard: good-generation-not-mended
                if step not in (None, at.step) or at not in here or not self.try_to_mend(at, arena):
                    continue
                again, one = True, known.survey.generations.get(at)
            # guard: only-loaded-generation-mended
            if step is None and at not in outside and one is not None and not one.unfit:
                break
        if again:
            with known.lock:
                unfit = {at: one.unfit for at, one in known.survey.generations.items() if one.unfit}
                # Rebuilt records may name incarnations and predecessors that were unknown before.
                # guard: survey-after-mend
                known.survey = commit.survey(known.tier)
                for at, findings in unfit.items():  # some in this process only (Places.mark_suspect)
                    now = known.survey.generations.get(at)
                    if now is not None and now.restorable:
                        known.record(judged(now, findings))  # guard: suspect-stays-suspect-after-mend
                node_opening.note_lost_parts(known)

    def _age(self, at: GenerationId) -> tuple[int, int]:
        incarnation = self._known.survey.incarnations.get(at.incarnation)
        return incarnation.order if incarnation else 0, at.step

    def _parity(self, at: GenerationId) -> list[parity.UsableParity]:
        return [] if self._known.tier.newest_only else parity.find_all(self._known.tier, at)

    def _code(self, at: GenerationId) -> Code | None:
        """The parity that a generation is to have: that of the run, or that which it has already."""
        return self._verifier.code or next((one.code for one in self._parity(at)), None)

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
        findings = with_suspicion(generation, findings)  # guard: scrub-acquits-no-suspect
        if generation != judged(generation, findings):  # guard: scrub-findings-marked
            with known.lock:
                if generation.id not in known.survey.generations:
                    raise Cancelled("the generation was deleted while it was read")
                self._marks.conclude(generation, findings)
        if not intact(findings):
            return findings, self.try_to_mend(generation.id, arena, stop)  # guard: scrub-damage-mended
        code = self._code(generation.id)
        if code is not None and not findings:
            with contextlib.suppress(Cancelled):  # the reading is complete; the next round checks the parity again
                self._verifier.protect(generation, code, arena, stop)  # guard: scrub-restores-parity
        return findings, False

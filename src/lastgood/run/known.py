"""The records of a run in memory, at a process that has it open for writing, and their lock. Writes no file.

Invariants
  1. Every change of these records is made under `lock`, except while the run is opened, when no other thread has them.
     Of two saves that end at the same time, the one of the higher step is the newest, in whatever order their threads
     run.
  2. This process is the only writer of the run, or receives each change from the only writer. Therefore the run is
     listed when it is opened, and again only after a repair, and on slots after each commit, which deletes others.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..errors import NotRestored, Overtaken, StepTaken
from ..events import Event, EventKind
from ..format import commit, layout
from ..limits import STEP_LIMIT
from ..policy import places, restore
from ..ports import Tier
from ..records import Generation, GenerationId, Incarnation
from . import agent_work


def _random_id() -> str:
    return os.urandom(4).hex()


def _ignore(event: Event) -> None:
    """Receives events that no callback wants."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the process provides to one opening of a run: identifiers, clocks, waiting, and two callbacks."""

    new_id: Callable[[], str] = _random_id
    """makes an identifier of 8 hexadecimal digits that no other opening has"""
    wall_seconds: Callable[[], float] = time.time
    """the time of day, in seconds since 1970"""
    monotonic_seconds: Callable[[], float] = time.monotonic
    pause: Callable[[float], object] = time.sleep
    """waits for the given number of seconds"""
    emit: Callable[[Event], object] = _ignore
    """receives each event, in the thread that caused it"""
    make_room: Callable[[int], bool] | None = None
    """receives the number of bytes that do not fit on a full disk, and returns whether something was deleted; None: the
    oldest generation is deleted that newer verified ones make unnecessary"""


class Holds:
    """Generations that are not deleted, each with those who need it: several places may wait for the same one.

    An `owner` is any object that is hashed by its identity. Every method may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owners: dict[GenerationId, set[object]] = {}

    def add(self, at: GenerationId, owner: object) -> None:
        with self._lock:
            self._owners.setdefault(at, set()).add(owner)

    def discard(self, at: GenerationId, owner: object) -> None:
        """Note that `owner` does not need the generation any more."""
        with self._lock:
            owners = self._owners.get(at, set())
            owners.discard(owner)
            if not owners:  # guard: held-until-all-have-it
                self._owners.pop(at, None)

    def __contains__(self, at: GenerationId) -> bool:
        with self._lock:
            return at in self._owners


class KnownRun:
    """The generations, incarnations and marks of a run, and the incarnation in which this process saves.

    `resumes`: the generation whose incarnation this process continues, although it did not open that incarnation (None:
    no incarnation yet).
    """

    def __init__(self, tier: Tier, environment: Environment, resumes: GenerationId | None = None) -> None:
        self.tier, self.environment = tier, environment
        self.agent = agent_work.of(tier)
        """reads and copies for this process, if the run is in memory here"""
        self.survey = commit.survey(tier)
        self.run_id = self.survey.run or ""
        self.incarnation: Incarnation | None = self.survey.incarnations.get(resumes.incarnation) if resumes else None
        if resumes:
            self.survey.incomplete.discard(resumes)
        self.recorded = resumes.incarnation if resumes else ""
        """the id of the incarnation whose record is stored in the run; empty while none is"""
        self.pinned: set[GenerationId] = set()
        """saves that are wanted for another reason than their age: a newer commit does not replace them"""
        self.labelling: set[GenerationId] = set()
        """generations that are about to get a label: they are not deleted"""
        self.deleting: set[GenerationId] = set()
        """generations that are being deleted: they get no label"""
        self.held = Holds()
        """generations whose saves have not ended, or that wait for a copy to another place: they are not deleted"""
        self.compared_step: int | None = None
        """the newest step until which a Sentinel has compared all; None: none compares the steps of this process"""
        self.lost: set[GenerationId] = set()
        """generations that lack the files of a rank, because its node was replaced: they get no mark"""
        self.below: Sequence[KnownRun] = ()
        """the same run in the places to which generations are copied from here, the nearest first"""
        self.left_order = 0
        """the highest order of the incarnations in memory of this machine that this opening does not look at"""
        self.unread = 0
        """the number of commits since the newest verified one"""
        self.lock = threading.RLock()
        self._last_tried: GenerationId | None = None

    # ---- queries -------------------------------------------------------------------------------------------

    @property
    def everywhere(self) -> commit.Survey:
        """What this place and those below it hold together."""
        return places.merged([self.survey, *(one.survey for one in self.below)])

    @property
    def view(self) -> commit.Survey:
        """As `everywhere`, but the incarnation of this process is the newest one even before its first save."""
        mine, found = self.incarnation, self.everywhere
        if mine is None or mine.id in found.incarnations:
            return found
        return replace(found, incarnations={**found.incarnations, mine.id: mine})

    def lineage(self) -> list[Generation]:
        """Committed generations of the lineage in this place, newest first, without those with an unreadable commit."""
        with self.lock:
            known = self.survey.generations
            return [known[at] for at in restore.lineage(self.view).chain if at in known]

    def durable_lineage(self) -> list[Generation]:
        """The lineage that the next process would find: an incarnation without a commit is not part of it."""
        with self.lock:
            known = self.survey.generations
            return [known[at] for at in restore.lineage(self.everywhere).chain if at in known]

    def newest_verified(self) -> Generation | None:
        """The newest verified generation of the lineage in this place."""
        return next((one for one in self.lineage() if one.good), None)  # guard: pointer-names-verified

    def latest(self) -> int | None:
        """The step of the newest verified generation of the lineage in any place; None if there is none."""
        with self.lock:
            found = self.view
            chain = (found.generations[at] for at in restore.lineage(found).chain if at in found.generations)
            return next((one.step for one in chain if one.good), None)

    def compared(self, chain: Sequence[Generation]) -> GenerationId | None:
        """Where a Sentinel compares the steps of this process, the newest verified generation of those that were
        compared; where there is none, the newest of these, or the oldest of all: any newer one may turn out to hold
        what has diverged. None: there is none, or no Sentinel. `chain`: the lineage, newest first."""
        limit = self.compared_step
        if limit is None:
            return None
        known = [one for one in chain if one.restorable]
        compared = [one for one in known if one.step <= limit]
        verified = [one for one in compared if one.good]
        return next((one.id for one in (*verified, *compared, *reversed(known))), None)

    def newest_restorable(self) -> Generation | None:
        """The newest generation of the lineage that is neither damaged nor unfit, verified or not."""
        return next((one for one in self.lineage() if one.restorable), None)

    def resumes_at(self, at: GenerationId) -> bool:
        """Whether the next process would resume at this generation: it is the newest restorable one that is durable,
        and newer than any that could not be read."""
        newest = next((one for one in self.durable_lineage() if one.restorable), None)
        return newest is not None and newest.id == at and at in restore.choose(self.everywhere, None).candidates

    def before(self, at: GenerationId) -> GenerationId | None:
        """The id of the predecessor that the commit of `at` names: the last save of this incarnation, or its parent."""
        assert self.incarnation is not None
        # guard: commit-names-predecessor
        mine = (one for one in self.survey.generations if one.incarnation == at.incarnation and one.step < at.step)
        return max(mine, default=self.incarnation.parent)

    # ---- checks before a save ------------------------------------------------------------------------------

    def require_restored(self) -> None:
        """Raises NotRestored if the run holds generations and no restore has chosen the one to continue."""
        # guard: unrestored-run-refused
        if self.incarnation is not None:
            return
        held = {
            at: one.tier.place for one in (*self.below, self) for at in (*one.survey.generations, *one.survey.broken)
        }
        if held:
            newest = max(held)
            raise NotRestored(
                f"{held[newest]} already holds {newest}, which this state does not continue",
                safe="Nothing was written.",
                todo="Call restore() before the first step, or restore(step=0) to start over on purpose.",
            )

    def next_id(self, step: int) -> GenerationId:
        """The id of a save of `step` in this incarnation. Raises StepTaken unless steps ascend."""
        assert self.incarnation is not None
        last = self._last_tried
        last = last if last and last.incarnation == self.incarnation.id else None
        if (last and step <= last.step) or not 0 <= step < STEP_LIMIT:  # guard: step-ascends
            raise StepTaken(
                f"step {step} cannot follow {last or 'nothing'} in this incarnation",
                safe="Nothing was written.",
                todo="Save ascending steps; to go back, restore(step=...) first.",
            )
        return GenerationId(step=step, incarnation=self.incarnation.id)

    def require_newest(self, at: GenerationId, pinned: bool) -> None:
        """Raises Overtaken if a newer save was committed meanwhile, unless this save is pinned."""
        newest = max((one for one in self.survey.generations if one.incarnation == at.incarnation), default=at)
        if newest.step > at.step and not pinned and at not in self.pinned:  # guard: older-save-abandoned
            raise Overtaken(
                f"step {newest.step} was committed before step {at.step}", safe="The newer generation replaces it."
            )

    # ---- changes -------------------------------------------------------------------------------------------

    def begin(self, incarnation: Incarnation) -> None:
        """Save in `incarnation` from now on."""
        with self.lock:
            self.incarnation, self._last_tried = incarnation, incarnation.parent
            self.survey.order = incarnation.order

    def record(self, generation: Generation) -> None:
        """Store the present record of a generation that was committed, verified, marked or labelled.

        On a tier that keeps the newest generations only, those that it has deleted are removed here too.
        """
        self.survey.generations[generation.id] = generation
        if self.incarnation is not None and generation.id.incarnation == self.incarnation.id:
            self.survey.incarnations[self.incarnation.id] = self.incarnation
        if self.tier.newest_only:
            folders = self.tier.list("gen")
            for at in list(self.survey.generations):
                if layout.folder(at).partition("/")[2] not in folders:
                    del self.survey.generations[at]

    def note_tried(self, at: GenerationId) -> None:
        """Note that a save of this step was tried. It may exist, so the step is not used again in this incarnation."""
        last = self._last_tried
        self._last_tried = at if last is None or last.incarnation != at.incarnation else max(last, at)

    def emit(self, kind: EventKind, at: GenerationId, seconds: float = 0.0, size: int = 0, detail: str = "") -> None:
        """Emit an event about a generation, in the calling thread."""
        now = self.environment.monotonic_seconds()
        self.environment.emit(
            Event(kind=kind, step=at.step, at_seconds=now, seconds=seconds, bytes=size, detail=detail)
        )

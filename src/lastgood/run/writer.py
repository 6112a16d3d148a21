"""One opening of a run for writing: save, verify, point, clean.

Holds what lies in the run as this process knows it; it is the only writer, so nothing is listed twice.
The order is the promise: blobs, manifest, commit; then re-read past the cache; then VERIFIED, then the pointer, and
only then may an older generation go.

Any number of threads may be in `save`, one in `verify`, `point`, `clean` and `label`. What they do to the data goes on
side by side; what makes a generation come, count or go is done one at a time, in `turn`: so of two saves that end
together the newer one is the newest, whatever the order in which their threads ran.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any, cast

import msgspec

from .. import reporting
from ..coordination.rounds import Topic
from ..engine import guard, parity, write_file
from ..engine.arena import Arena
from ..engine.finite import exception
from ..errors import (
    BeyondRepair,
    Cancelled,
    CommitUnknown,
    Damaged,
    LastgoodError,
    NameTaken,
    NoSpace,
    NoSuchStep,
    NotFinite,
    NotRestored,
    Overtaken,
    StepDiffers,
    StepTaken,
    SumMismatch,
    TierDown,
    Unavailable,
    Unreadable,
)
from ..format import commit, layout
from ..format import parity_layout as striping
from ..format.layout import Image
from ..io.reed_solomon import Code
from ..policy import restore
from ..policy.retention import KEEP, Keep, stale_incarnations, surplus, under_pressure, unverified_ahead, wanted
from ..ports import Mendable, Tier
from ..records import (
    Commit,
    Event,
    EventKind,
    Finding,
    Generation,
    GenerationId,
    Incarnation,
    Piece,
    Pointer,
    RunHeader,
    World,
    intact,
    judged,
)
from . import disk_space, rank_part, reader
from .disk_space import Roomy
from .rank_part import Approve, Files, Share, nothing_more
from .reader import Reading, read_all, read_on
from .retire import Deletions

MANY = 10
"""deletions that take long enough to be reported before they begin"""
DELETED_TOGETHER = 3
"""generations deleted side by side"""
FULL = "the disk is full"
"""detail of the event of a generation that was deleted to make room for a save"""


class RunWriter:
    """Torch-free writer of one run on one tier.

    `new_id` makes 8 hex digits, `wall_seconds` is the time for people, `tell` hears of events. `resumes`: a generation
    that an earlier opening has admitted, whose files are there and which this one is to commit. `make_room` is called
    when a save finds the disk full, and returns whether it has deleted something (default: `relieve`).
    """

    def __init__(
        self,
        tier: Tier,
        workers: Executor,
        *,
        keep: Keep = KEEP,
        parity: str | None = None,
        algorithm: str = "xxh3_128",
        new_id: Callable[[], str] = lambda: os.urandom(4).hex(),
        wall_seconds: Callable[[], float] = time.time,
        monotonic_seconds: Callable[[], float] = time.monotonic,
        tell: Callable[[Event], object] = lambda _: None,
        resumes: GenerationId | None = None,
        make_room: Callable[[int], bool] | None = None,
    ) -> None:
        self.tier, self._keep, self._algorithm, self._workers = tier, keep, algorithm, workers
        self._code = Code(*striping.parsed(parity)) if parity else None
        self._new_id, self._wall, self._monotonic, self._tell = new_id, wall_seconds, monotonic_seconds, tell
        self.survey = commit.survey(tier)
        self.rank = 0
        self._incarnation = self.survey.incarnations.get(resumes.incarnation) if resumes else None
        if resumes:
            self.survey.incomplete.discard(resumes)
        self._recorded = resumes.incarnation if resumes else ""
        """the incarnation of which the record was written, or found"""
        self._last: GenerationId | None = None
        """newest step that was tried and may exist"""
        self._unread = 0
        """commits since the newest verified one"""
        self._protected: set[GenerationId] = set()
        self.pinned: set[GenerationId] = set()
        """saves that were asked for by name: a newer commit does not stand in for them"""
        self.mended: dict[GenerationId, list[str]] = {}
        """what was put back from parity"""
        self._labelling: set[GenerationId] = set()
        self._deleting: set[GenerationId] = set()
        """a generation that gets a label is not deleted meanwhile, and one that is being deleted gets none"""
        self._deletions = Deletions(tier)
        self._make_room = make_room or self.relieve
        self._roomy = Roomy(tier, self._make_room)
        self._was_full = self._many_reported = False
        self._pointed: Pointer | None = None
        """what this opening has written to the pointer: its first pointing replaces whatever stands there"""
        self._pointing_failed = False
        self.turn = threading.RLock()
        self._settle()

    # ---- opening -------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Write the header where it is missing, end what a crash left half ended, clear what never was committed."""
        ident = self.survey.run
        if ident is None:
            newest = max(self.survey.generations.values(), key=lambda one: one.commit.order, default=None)
            unread = next((one for one in self.survey.broken.values() if isinstance(one, Unreadable)), None)
            if newest is None and unread:
                raise unread  # it may be read later, and a new name now would disown it
            ident = newest.commit.run if newest else self._new_id()
            for name in self.tier.list(""):
                if name.lower() == layout.HEADER:  # damaged, or where case does not count the old pointer in its place
                    # guard: damaged-run-header-replaced
                    self.tier.delete(name)  # the commits say which run this is
            # guard: run-header-written
            self.tier.put_new(layout.HEADER, layout.encode(RunHeader(format=layout.FORMAT, run=ident)))
        self._run = ident
        kept = [*self.survey.generations, *self.survey.broken, *self.survey.incomplete]
        for home in ("", "incarnations", *map(layout.folder, kept)):
            for name, length in self.tier.list(home).items():
                if length is not None and layout.is_litter(home, name):
                    self._deletions.remove(f"{home}/{name}".lstrip("/"))  # guard: litter-removed-at-opening
            for name in striping.unfinished(self.tier.list(home)):
                self._deletions.remove(f"{home}/{name}")
        if {layout.HEADER, layout.OLD_POINTER} <= self.tier.list("").keys():  # two files: this disk minds case
            self._deletions.remove(layout.OLD_POINTER)
        self._complete()
        for at in sorted(self.survey.going | restore.never_committed(self.survey)):
            if self._deletions.delete(at):  # guard: unfinished-removed-at-opening
                self.survey.going.discard(at)
                self.survey.incomplete.discard(at)

    def _complete(self) -> None:
        """Make durable what retention goes by, where an earlier process may have died over it."""
        recorded = self.tier.list("incarnations")
        for record in self.survey.incarnations.values():
            name = layout.incarnation_name(record)
            # guard: missing-incarnation-record-written
            if name.partition("/")[2] not in recorded:  # only its COMMITs say the same, and they may go
                with contextlib.suppress(LastgoodError):  # the next opening tries again
                    self.tier.put_new(name, layout.encode(record))
        for at, one in self.survey.generations.items():
            if one.commit.milestone or one.commit.metrics or one.label_unread:
                commit.confirm_labels(self.tier, at)  # guard: labels-durable-before-use

    def begin(self, parent: GenerationId | None) -> None:
        """Open an incarnation that continues `parent` (None: from scratch), in this process only.

        It becomes durable with its first COMMIT, which names the parent. Until then the next process, and the pointer,
        go by what was there before; this process goes by `view`.
        """
        if parent is not None:
            commit.confirm(self.tier, parent)  # guard: parent-durable-before-continuing
        order = self.survey.order + 1  # guard: incarnation-order-ascends
        record = Incarnation(format=layout.FORMAT, order=order, id=self._new_id(), parent=parent)
        self._incarnation, self._last, self.survey.order = record, parent, order

    def record_incarnation(self) -> None:
        """Write the record of this incarnation, once, and delete those that lead nowhere any more."""
        record = self._incarnation
        assert record is not None
        name = layout.incarnation_name(record)
        if name.partition("/")[2] not in self.tier.list("incarnations"):
            self.tier.put_new(name, layout.encode(record))  # guard: incarnation-record-written
        self.survey.incarnations[record.id], self._recorded = record, record.id
        for stale in stale_incarnations(self.survey):
            if self._deletions.remove(layout.incarnation_name(stale)):
                del self.survey.incarnations[stale.id]

    @property
    def view(self) -> commit.Survey:
        """What lies in the run, as this process goes on from it: its incarnation is the newest, also before a save."""
        mine = self._incarnation
        if mine is None or mine.id in self.survey.incarnations:
            return self.survey
        return replace(self.survey, incarnations={**self.survey.incarnations, mine.id: mine})

    def require_restored(self) -> None:
        """Raises NotRestored where the run holds generations, and no restore has said which of them is continued."""
        # guard: unrestored-run-refused
        if self._incarnation is None and (self.survey.generations or self.survey.broken):
            newest = max([*self.survey.generations, *self.survey.broken])
            raise NotRestored(
                f"{self.tier.place} already holds {newest}, which this state does not continue",
                safe="Nothing was written.",
                todo="Call restore() before the first step, or restore(step=0) to start over on purpose.",
            )

    def admit(self, step: int) -> GenerationId:
        """Where a save of `step` will go. Raises StepTaken, NotRestored; touches nothing in a run that is begun."""
        self.require_restored()
        if self._incarnation is None:
            self.begin(None)
        assert self._incarnation is not None
        last = self._last if self._last and self._last.incarnation == self._incarnation.id else None
        if (last and step <= last.step) or not 0 <= step < layout.STEP_LIMIT:  # guard: step-ascends
            raise StepTaken(
                f"step {step} cannot follow {last or 'nothing'} in this incarnation",
                safe="Nothing was written.",
                todo="Save ascending steps; to go back, restore(step=...) first.",
            )
        return GenerationId(step=step, incarnation=self._incarnation.id)

    # ---- saving --------------------------------------------------------------------------------------------

    def save(
        self,
        at: GenerationId,
        images: Sequence[Image],
        chunks: Iterator[write_file.Chunk],
        *,
        chunk_bytes: int = layout.CHUNK_BYTES,
        aliases: Mapping[str, str],
        values: Mapping[str, Any],
        milestone: bool = False,
        metrics: Mapping[str, float] | None = None,
        approve: Approve = nothing_more,
        writers: Executor | None = None,
        together: Topic | None = None,
    ) -> Generation:
        """Bring a generation that was admitted into being from chunks that arrive in order. Durable on return.

        `approve`: as in `share`. `writers`: the threads of this save. `together`: where the ranks agree, and what
        fails on one of them fails on all. Raises Overtaken where a newer one of this incarnation was committed
        meanwhile, unless retention wants this one for itself. On an error (but CommitUnknown) nothing of it is left.
        """
        begun = self._monotonic()
        pinned = wanted(self._keep, at.step, milestone, metrics or {})
        with together.failing() if together is not None else contextlib.nullcontext(), self.turn:
            self._require_newest(at, pinned)
        try:
            if together is not None and together.again:  # guard: retry-waits-for-first-try
                together.agree(None, lambda _: None)  # by now rank 0 has cleared away what the last try has left
            share = self.share(
                at,
                images,
                chunks,
                chunk_bytes=chunk_bytes,
                aliases=aliases,
                values=values,
                approve=approve,
                writers=writers,
            )
            if together is None:
                generation = self.publish(at, [share], pinned, milestone, metrics)
            else:
                generation = self._committed(
                    together, at, share, lambda shares: self.publish(at, shares, pinned, milestone, metrics)
                )
        except CommitUnknown as error:  # guard: unknown-commit-deletes-nothing
            if together is not None:
                together.fail(error)
            with self.turn:
                # guard: unknown-commit-takes-step
                self._note_tried(at)  # this step may exist: it is not written again
            raise
        except BaseException as error:
            if together is not None:
                together.fail(error)  # from here on nobody writes to it
            # guard: taken-name-deletes-nothing
            if not isinstance(error, NameTaken):  # what lies there is not of this save
                self._clear(at)
            if together is not None and isinstance(error, NoSpace):
                self._make_room(0)  # another rank had no space: this save is lost, and the next one finds some
            raise
        self._tell(self._event("durable", at, seconds=self._monotonic() - begun, size=generation.bytes))
        return generation

    def abandon(self, step: int, together: Topic, error: BaseException) -> None:
        """A save that failed here before it wrote anything: the other ranks hear why, and nothing of theirs stays."""
        together.fail(error)  # from here on nobody writes to it
        if self._incarnation is not None:
            with contextlib.suppress(StepTaken):  # then what lies there is another one's
                self._clear(self.admit(step))

    def share(
        self,
        at: GenerationId,
        images: Sequence[Image],
        chunks: Iterator[write_file.Chunk],
        *,
        chunk_bytes: int,
        aliases: Mapping[str, str],
        values: Mapping[str, Any],
        approve: Approve,
        writers: Executor | None,
    ) -> Share:
        """This rank's files and its manifest, durable and sealed; see `rank_part.share`."""
        begun = self._monotonic()

        def written(pieces: Sequence[Piece]) -> Files:
            seconds, size = self._monotonic() - begun, sum(image.length for image in images)
            more = approve(pieces)
            self._tell(self._event("written", at, seconds, size))
            return more

        return rank_part.share(
            self._roomy,
            at,
            self.rank,
            images,
            chunks,
            chunk_bytes=chunk_bytes,
            algorithm=self._algorithm,
            aliases=aliases,
            values=values,
            approve=written,
            writers=writers or self._workers,
        )

    def publish(
        self,
        at: GenerationId,
        shares: Sequence[Share],
        pinned: bool,
        milestone: bool,
        metrics: Mapping[str, float] | None,
    ) -> Generation:
        """Commit what every rank has sealed. Raises Overtaken, CommitUnknown."""
        assert self._incarnation is not None
        with self.turn:
            self._require_newest(at, pinned)  # guard: overtaken-save-not-committed
            record = Commit(
                format=layout.FORMAT,
                run=self._run,
                step=at.step,
                incarnation=at.incarnation,
                order=self._incarnation.order,
                world=World(ranks=len(shares)),
                continues=self._incarnation.parent,
                parent=self._before(at),
                seals=[one.seal for one in shares],
                created=self._wall(),
                milestone=milestone,
                metrics=dict(metrics or {}),
            )
            size = sum(one.bytes for one in shares)
            # guard: publish-writes-commit
            generation = msgspec.structs.replace(commit.publish(self.tier, record, self._algorithm), bytes=size)
            self._note_tried(at)
            self._take_in(generation)
            self._unread += 1
            if self._recorded != at.incarnation:
                with contextlib.suppress(LastgoodError):  # each COMMIT says the same; the next save tries again
                    self.record_incarnation()
            return generation

    def _committed(
        self, together: Topic, at: GenerationId, share: Share, publish: Callable[[Sequence[Share]], Generation]
    ) -> Generation:
        """The generation that the coordinator published once every rank had sealed its part of it."""
        published: list[Generation] = []

        def decide(told: list[Any]) -> Any:
            if len({folder for folder, _ in told}) > 1:  # guard: ranks-seal-one-generation
                raise StepDiffers(f"ranks have sealed {', '.join(sorted({folder for folder, _ in told}))}")
            published.append(publish([msgspec.convert(one, Share) for _, one in told]))
            return msgspec.to_builtins(published[0])

        try:
            mine = layout.folder(at), msgspec.to_builtins(share)
            return msgspec.convert(together.agree(mine, decide), Generation)
        except TierDown:
            if not published:  # guard: published-survives-lost-store
                raise
            return published[0]  # it is there, whoever could not be told

    def _clear(self, at: GenerationId) -> None:
        """What cannot be removed now is litter without a COMMIT, and the next opening removes it."""
        with contextlib.suppress(LastgoodError):  # guard: failed-save-cleared
            commit.retire(self.tier, at)

    def _require_newest(self, at: GenerationId, pinned: bool) -> None:
        newest = max((one for one in self.survey.generations if one.incarnation == at.incarnation), default=at)
        if newest.step > at.step and not pinned and at not in self.pinned:  # guard: older-save-abandoned
            raise Overtaken(f"step {newest.step} was committed before step {at.step}", safe="Nothing is lost by it.")

    def _before(self, at: GenerationId) -> GenerationId | None:
        """The newest generation before this one: what its commit names."""
        assert self._incarnation is not None
        # guard: commit-names-predecessor
        mine = (one for one in self.survey.generations if one.incarnation == at.incarnation and one.step < at.step)
        return max(mine, default=self._incarnation.parent)

    def _take_in(self, generation: Generation) -> None:
        self.survey.generations[generation.id] = generation
        if self._incarnation is not None and generation.id.incarnation == self._incarnation.id:
            self.survey.incarnations[self._incarnation.id] = self._incarnation
        if self.tier.newest_only:
            there = self.tier.list("gen")
            for gone in [one for one in self.survey.generations if layout.folder(one).partition("/")[2] not in there]:
                del self.survey.generations[gone]

    def _note_tried(self, at: GenerationId) -> None:
        self._last = at if self._last is None or self._last.incarnation != at.incarnation else max(self._last, at)

    # ---- after the commit ----------------------------------------------------------------------------------

    def backlog(self) -> int:
        """How many generations were committed after the newest verified one of the lineage."""
        return self._unread if self.tier.newest_only else unverified_ahead(self.lineage())

    def verify(self, arena: Arena, stop: Callable[[], bool] = lambda: False) -> None:
        """Re-read the newest unverified generation past the page cache, mark it, and point at it.

        One that is not good is marked with the evidence, and the next older unverified one is read; what was found is
        raised at the end: Damaged, or NotFinite. Raises Cancelled when `stop()`, Unavailable.
        """
        problem: LastgoodError | None = None
        known: list[str] | None = None
        for generation in self.lineage():
            if generation.damaged or generation.unfit:
                continue
            if generation.verified:
                break
            begun = self._monotonic()
            try:
                cells = self._cells(generation)
                also = cells.see if cells else _unseen
                findings = self._read(generation, arena, stop, also)  # guard: verify-before-mark  # gap: after_commit
            except (Cancelled, Unavailable, Unreadable):
                if problem:
                    break  # what was found already must be told
                raise
            with self.turn:
                if generation.id not in self.survey.generations:
                    raise Cancelled("it was let go while it was read")
                self.conclude(generation, findings)
            self._tell(
                self._event(
                    "verified" if not findings else "unfit" if intact(findings) else "damaged",
                    generation.id,
                    seconds=self._monotonic() - begun,
                    detail=restore.told(findings),
                )
            )
            if not findings:
                known = cells.digests if cells else None
                break
            problem = problem or _problem(generation.step, findings)  # guard: verify-continues-past-damage
        if problem:  # guard: damage-raised-after-verify
            raise problem
        newest = self.newest_verified()
        # guard: parity-after-verify
        if self._code is not None and newest is not None and newest.id not in self._protected:
            self._protected.add(newest.id)  # an error is told once: scrub tries again
            try:
                self._protect(newest, self._code, arena, stop, known)
            except Cancelled:
                self._protected.discard(newest.id)
                raise

    def _read(
        self, generation: Generation, arena: Arena, stop: Callable[[], bool], also: Callable[[memoryview], None]
    ) -> list[Finding]:
        return read_all(self.tier, generation, arena, self._workers, stop, also=also)

    def _cells(self, generation: Generation) -> parity.Cells | None:
        """What is to see a generation on its way to parity; None where none was asked for, or its cells are unknown."""
        if self._code is None:
            return None
        try:
            manifest = commit.read_manifest(self.tier, generation)
        except Unreadable:
            raise
        except Damaged:
            return None  # found, and told, by the guard
        return parity.Cells(striping.stripes(manifest.blobs, self._code.data, self._code.parity), manifest.digest)

    def _protect(
        self,
        generation: Generation,
        code: Code,
        arena: Arena,
        stop: Callable[[], bool],
        known: list[str] | None = None,
    ) -> None:
        """Give a verified generation its parity, where it is not whole. `known`: the digests of its cells, just read.

        Raises Cancelled when `stop()`, and what kept it from that.
        """
        manifest = commit.read_manifest(self.tier, generation)  # guard: parity-only-of-verified-content
        if known is None:
            if parity.whole(self.tier, generation, manifest, code, stop):  # guard: whole-parity-kept
                return
            cells = parity.Cells(striping.stripes(manifest.blobs, code.data, code.parity), manifest.digest)
            if read_all(self.tier, generation, arena, self._workers, stop, also=cells.see):
                raise SumMismatch(f"{generation.id} was good a moment ago, and is not any more")
            known = cells.digests
        parity.protect(self.tier, generation, manifest, code, known, self._workers, stop)

    def mend(self, at: GenerationId, arena: Arena, stop: Callable[[], bool] = lambda: False) -> list[str]:
        """Put back what is damaged of a generation from its parity, read all of it and mark it; names of these files.

        Parity that was damaged is written anew; where that fails an event says so. Raises BeyondRepair, and what keeps
        it from writing or reading back: the damaged files are as they were then. Cancelled when `stop()`.
        """
        spare = None if self.tier.newest_only else parity.find(self.tier, at)
        if spare is None:
            raise BeyondRepair(f"{at} has no parity that can be read", safe="Nothing was changed.")
        try:
            names = parity.rebuild(cast(Mendable, self.tier), spare, self._workers, stop)
        except BeyondRepair:
            if (known := self.survey.generations.get(at)) is not None:  # the evidence stays, and it counts for nothing
                self.conclude(known, read_all(self.tier, known, arena, self._workers))  # guard: irreparable-is-marked
            raise
        generation = commit.read_generation(self.tier, at, self._run)
        findings = read_all(self.tier, generation, arena, self._workers)  # guard: repair-rereads-everything
        with self.turn:
            self.conclude(generation, findings)
            self.survey.broken.pop(at, None)  # guard: repaired-is-not-broken
            self.survey.incomplete.discard(at)
            self.survey.witnessed.discard(at)
        if not intact(findings):  # guard: failed-repair-raised
            raise BeyondRepair(f"{at} was rebuilt and does not read back: {restore.told(findings)}")
        if names:
            self.mended[at] = names
            self._tell(self._event("repaired", at, detail=", ".join(names)))  # guard: repair-reported
        try:
            self._protect(generation, spare.code, arena, stop)
        except LastgoodError as error:
            self._tell(self._event("not_protected", at, detail=f"{type(error).__name__}: {error.what}"))
        return names

    def try_to_mend(self, at: GenerationId, arena: Arena, stop: Callable[[], bool] = lambda: False) -> bool:
        """Mend a generation that has parity; False where it has none, or could not be mended: an event says why."""
        try:
            if self.tier.newest_only or parity.find(self.tier, at) is None:
                return False
            self.mend(at, arena, stop)
        except Cancelled:
            raise
        except LastgoodError as error:
            # guard: repair-failure-reported
            self._tell(self._event("not_repaired", at, detail=f"{type(error).__name__}: {error.what}"))
            return False
        return True

    def mend_known(self, step: int | None, arena: Arena) -> None:
        """Mend what a restore (of `step`) would pass over, newest first, down to what it would take."""
        chain, lost = restore.lineage(self.view)
        known = sorted({*chain, *lost}, key=self._age, reverse=True)
        astray = self.survey.broken.keys() - set(known)
        mended = False
        for at in (*astray, *known):
            one = self.survey.generations.get(at)
            if one is not None and not one.damaged:  # guard: good-generation-not-mended
                if step is None and not one.unfit:
                    break
                continue
            if step in (None, at.step):
                mended |= self.try_to_mend(at, arena)
        if mended:
            with self.turn:
                # guard: survey-after-mend
                self.survey = commit.survey(self.tier)  # what came back may speak of incarnations, and of what is lost

    def _age(self, at: GenerationId) -> tuple[int, int]:
        known = self.survey.incarnations.get(at.incarnation)
        return known.order if known else 0, at.step

    def reading(
        self, generation: Generation, arena: Arena, also: Callable[[memoryview], None] = lambda _: None
    ) -> Reading:
        """Of a generation, for `read_again`: it may be put aside while it is under way."""
        return reader.reading(self.tier, generation, arena, self._workers, also=also)

    def read_again(
        self,
        generation: Generation,
        arena: Arena,
        begun: Reading,
        stop: Callable[[], bool] = lambda: False,
    ) -> tuple[list[Finding], bool]:
        """Read a generation that was read before: what was found, and whether it was damaged and is whole again.

        It is marked where that is news. Parity that is damaged, or was asked for and is not there, is written. `begun`:
        its reading, from the start or where it was put aside. Raises Cancelled when `stop()`, Unavailable.
        """
        try:
            findings = read_on(begun, stop)
        except Unreadable as error:
            if self.try_to_mend(generation.id, arena, stop):  # guard: unreadable-is-mended
                return [guard.finding(error)], True
            raise
        if generation != judged(generation, findings):  # guard: scrub-findings-marked
            with self.turn:
                if generation.id not in self.survey.generations:
                    raise Cancelled("it was let go while it was read")
                self.conclude(generation, findings)
        if not intact(findings):
            return findings, self.try_to_mend(generation.id, arena, stop)  # guard: scrub-damage-mended
        spare = None if self.tier.newest_only else parity.find(self.tier, generation.id)
        code = self._code or (spare.code if spare else None)
        if code is not None and not findings:
            with contextlib.suppress(Cancelled):  # it was read to its end; its parity has its turn again with it
                self._protect(generation, code, arena, stop)  # guard: scrub-restores-parity
        return findings, False

    def label(self, at: GenerationId, milestone: bool, metrics: Mapping[str, float]) -> Generation:
        """Add a milestone or metrics to a generation that is committed: with them, durable on return.

        On a full disk other generations are deleted to make room for the label. Raises NoSuchStep where it has gone,
        NoSpace, TierDown.
        """
        self._labelling.add(at)
        try:
            while True:
                try:
                    return self._label(at, milestone, metrics)
                except NoSpace:  # `turn` is released by now: making room takes other locks first
                    if not self._make_room(0):
                        raise
        finally:
            self._labelling.discard(at)

    def _label(self, at: GenerationId, milestone: bool, metrics: Mapping[str, float]) -> Generation:
        with self.turn:
            generation = self.survey.generations.get(at)
            if generation is None:
                raise restore.no_such_step(f"{at} has been deleted: nothing can be added to it", self.survey)
            if at in self._deleting:  # guard: no-label-during-deletion
                raise NoSuchStep(
                    f"{at} is being deleted: nothing can be added to it",
                    safe="Nothing was changed.",
                    todo="Add it to a newer step.",
                )
            known = generation.commit
            if (milestone and not known.milestone) or not metrics.items() <= known.metrics.items():
                self._take_in(commit.label(self.tier, generation, milestone, metrics))
            return self.survey.generations[at]

    def conclude(self, generation: Generation, findings: list[Finding]) -> None:
        """Mark what a complete reading of a generation found; the pointer follows a good one of the lineage."""
        with self.turn:
            known = self.survey.generations.get(generation.id)
            if known is not None:  # it may have got a label while it was read
                generation = msgspec.structs.replace(generation, commit=known.commit)
            if findings:  # it counts for nothing any more, also where that cannot be written down
                self._take_in(judged(generation, findings))
            commit.mark(self.tier, generation, findings)  # guard: mark-before-pointer
            self._take_in(judged(generation, findings))
            if intact(findings):
                self._unread = unverified_ahead(self.lineage())
            if not findings:
                self.point()  # guard: verified-is-pointed-at

    def point(self) -> None:
        """Let POINTER.json and latest_ok name the newest verified generation of the lineage, as it is durable.

        Both are hints: where they cannot be written that is reported once, and every later call tries again.
        """
        with self.turn:
            chain = restore.lineage(self.survey).chain  # guard: pointer-follows-durable-lineage
            there = self.survey.generations
            newest = next((there[at] for at in chain if at in there and there[at].good), None)
            if newest is None:
                return
            pointer = Pointer(
                format=layout.FORMAT, step=newest.step, incarnation=newest.id.incarnation, root=newest.root
            )
            if pointer == self._pointed:
                return
            try:
                self.tier.point(layout.POINTER, layout.encode(pointer), layout.folder(newest.id))  # gap: before_pointer
            except LastgoodError as error:
                if not self._pointing_failed:
                    reporting.warning(
                        f"{layout.POINTER} and {layout.LINK} cannot be moved to step {newest.step}: {error.what}. They "
                        "are hints: saving, restoring and deleting go on, and they are moved as soon as that works."
                    )
                self._pointing_failed = True
                return
            self.survey.pointer = self._pointed = pointer
            self._pointing_failed = False

    def clean(self, stop: Callable[[], bool] = lambda: False, most: int | None = None) -> None:
        """Delete what retention lets go, oldest first, each in two phases; never what the pointer still names.

        At most `most` generations, and none after `stop()`; some at a time, so that they share the waits for the disk.
        What cannot be deleted is skipped and tried again later.
        """
        self.point()  # guard: point-before-clean
        self._deletions.next_cleaning()
        flying = deque[Future[bool]]()
        with self.turn:
            going = {at: self._commit_of(at) for at in self.surplus()[:most]}
        if len(going) >= MANY and not self._many_reported:
            self._many_reported = True
            reporting.info(f"{self.tier.place}: deleting {len(going)} generations that retention does not keep")
        for at, decided in going.items():
            if stop():
                break
            if len(flying) == DELETED_TOGETHER:
                flying.popleft().result()
            flying.append(self._workers.submit(self._delete, at, decided))
        for one in flying:
            one.result()

    def relieve(self, needed_bytes: int = 0) -> bool:
        """The disk is full: delete the oldest generation that newer verified ones make needless, whatever `last` says.

        Returns whether one was deleted: none where all of them together would not make room for `needed_bytes`. Pinned
        generations, the newest verified and the newest committed one stay.
        """
        with self.turn:
            going = {at: self._commit_of(at) for at in self._deletable(under_pressure)}
        if not disk_space.may_fit(self.tier.place, needed_bytes, sum(self._bytes_of(at) for at in going)):
            return False
        for at, decided in going.items():
            if self._delete(at, decided, FULL):
                if not self._was_full:
                    reporting.warning(
                        f"the disk of {self.tier.place} is full: {at} was deleted to make room for the next save, and "
                        "older ones will be, down to the newest verified one. Free space on this disk, or keep fewer "
                        "generations (retention=Keep(last=...))."
                    )
                self._was_full = True
                return True
        return False

    def _bytes_of(self, at: GenerationId) -> int:
        known = self.survey.generations.get(at)
        return known.bytes if known else 0

    def _commit_of(self, at: GenerationId) -> Commit | None:
        """What a decision to delete rests on; None for what is not committed."""
        known = self.survey.generations.get(at)
        return known.commit if known else None

    def _delete(self, at: GenerationId, decided: Commit | None, detail: str = "") -> bool:
        """Whether it is gone. It counts no more, and is litter, from the moment that its COMMIT is.

        `decided`: its commit when it was decided on. With a milestone or metrics that were added since, it stays until
        the next decision.
        """
        with self.turn:
            if at in self._labelling or self._commit_of(at) != decided:  # guard: labelled-generation-not-deleted
                return False
            self._deleting.add(at)
        try:
            gone = self._deletions.delete(at)  # guard: deleted-before-forgotten
            if not gone and self._deletions.committed(at):  # guard: uncommitted-counts-as-deleted
                return False
            with self.turn:
                known = self.survey.generations.pop(at, None)
                (self.survey.going.discard if gone else self.survey.going.add)(at)
        finally:
            self._deleting.discard(at)
        if known is not None:
            self._tell(self._event("deleted", at, detail=detail))
        return gone

    def surplus(self) -> list[GenerationId]:
        """What is to be deleted now, oldest first: what retention lets go, and what is left of earlier deletions.

        Nothing where the tier deletes by itself.
        """
        return self._deletable(surplus)

    def _deletable(
        self, decide: Callable[[Keep, list[Generation], list[Generation]], list[GenerationId]]
    ) -> list[GenerationId]:
        if self.tier.newest_only:
            return []
        with self.turn:
            chain = self.lineage()
            of_lineage = {one.id for one in chain}
            abandoned = [one for at, one in self.survey.generations.items() if at not in of_lineage]
            going = [*sorted(self.survey.going), *decide(self._keep, chain, abandoned)]
            named = self.survey.pointer
            pointed = GenerationId(step=named.step, incarnation=named.incarnation) if named else None
            # guard: pointed-generation-kept
            return [at for at in going if at != pointed and not self._deletions.postponed(at)]

    def newest_verified(self) -> Generation | None:
        """The newest verified generation of the lineage."""
        return next((one for one in self.lineage() if one.good), None)  # guard: pointer-names-verified

    def resumes_at(self, at: GenerationId) -> bool:
        """Whether the next process resumes at this generation: nothing newer and good is durable in the lineage."""
        with self.turn:
            known = map(self.survey.generations.get, restore.lineage(self.survey).chain)
            newest = next((one for one in known if one and not one.damaged and not one.unfit), None)
        return newest is not None and newest.id == at

    def lineage(self) -> list[Generation]:
        """Committed generations of the lineage, newest first; those whose commit is not sure are not among them."""
        with self.turn:
            there = self.survey.generations
            chain = restore.lineage(self.view).chain
            return [there[at] for at in chain if at in there]

    def _event(self, kind: EventKind, at: GenerationId, seconds: float = 0.0, size: int = 0, detail: str = "") -> Event:
        return Event(
            kind=kind,
            step=at.step,
            at_seconds=self._monotonic(),
            seconds=seconds,
            bytes=size,
            detail=detail,
        )


def _problem(step: int, findings: list[Finding]) -> LastgoodError:
    what, safe = restore.told(findings), "Older generations are kept; this one is marked and will not be restored."
    if intact(findings):
        return NotFinite(
            f"step {step} is intact, and not good: {what}",
            safe=safe,
            todo=f"If it may hold them, open the run with {exception(*(one.tensor for one in findings[:3]))}; "
            f"restore(step={step}) loads this step by hand. Else go back with restore() if training does not recover. "
            "The evidence is in UNFIT.json beside it.",
        )
    return Damaged(
        f"step {step} was committed and does not read back: {what}",
        safe=safe,
        todo="Check the disk. The evidence is in DAMAGED.json beside it.",
    )


def _unseen(_: memoryview) -> None:
    """Nobody looks on."""

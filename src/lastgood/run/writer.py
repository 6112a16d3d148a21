"""One opening of a run for writing: save, verify, point, clean.

Holds what lies in the run as this process knows it; it is the only writer, so nothing is listed twice.
The order is the promise: blobs, manifest, commit; then re-read past the cache; then VERIFIED, then the pointer, and
only then may an older generation go.

Any number of threads may be in `save`, one in `verify`, `point` and `clean`. What they do to the data goes on side by
side; what makes a generation come, count or go is done one at a time, in `turn`: so of two saves that end together the
newer one is the newest, whatever the order in which their threads ran.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import msgspec

from ..engine import persist
from ..engine.arena import Arena
from ..errors import (
    Cancelled,
    CommitUnknown,
    Damaged,
    LastgoodError,
    NameTaken,
    NotRestored,
    Overtaken,
    StepTaken,
    Unavailable,
    Unreadable,
)
from ..format import commit, layout
from ..format.layout import Image
from ..plan import restore
from ..plan.retention import KEEP, Keep, stale_incarnations, surplus, unverified_ahead, wanted
from ..ports import Tier
from ..records import (
    Commit,
    Event,
    Finding,
    Generation,
    GenerationId,
    Incarnation,
    Manifest,
    Piece,
    Pointer,
    RunHeader,
    World,
)
from .reader import read_all


class RunWriter:
    """Torch-free writer of one run on one tier.

    `new_id` makes 8 hex digits, `wall_seconds` is the time for people, `tell` hears of events.
    """

    def __init__(
        self,
        tier: Tier,
        workers: Executor,
        *,
        keep: Keep = KEEP,
        algorithm: str = "xxh3_128",
        new_id: Callable[[], str] = lambda: os.urandom(4).hex(),
        wall_seconds: Callable[[], float] = time.time,
        monotonic_seconds: Callable[[], float] = time.monotonic,
        tell: Callable[[Event], object] = lambda _: None,
    ) -> None:
        self.tier, self._keep, self._algorithm, self._workers = tier, keep, algorithm, workers
        self._new_id, self._wall, self._monotonic, self._tell = new_id, wall_seconds, monotonic_seconds, tell
        self.survey = commit.survey(tier)
        self._incarnation: Incarnation | None = None
        self._last: GenerationId | None = None
        """newest step that was tried and may exist"""
        self._unread = 0
        """commits since the newest verified one"""
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
            if layout.HEADER in self.tier.list(""):
                self.tier.delete(layout.HEADER)  # damaged: the commits say which run this is
            self.tier.put_new(layout.HEADER, layout.encode(RunHeader(format=layout.FORMAT, run=ident)))
        self._run = ident
        kept = [*self.survey.generations, *self.survey.broken, *self.survey.incomplete]
        for home in ("", "incarnations", *map(layout.folder, kept)):
            for name, length in self.tier.list(home).items():
                if length is not None and layout.is_litter(home, name):
                    self.tier.delete(f"{home}/{name}".lstrip("/"))
        for at in sorted(self.survey.going | restore.never_committed(self.survey)):
            commit.retire(self.tier, at)
            self.survey.going.discard(at)
            self.survey.incomplete.discard(at)

    def begin(self, parent: GenerationId | None) -> None:
        """Open an incarnation that continues `parent` (None: from scratch). Durable on return."""
        if parent is not None:
            commit.confirm(self.tier, parent)
        order = self.survey.order + 1
        record = Incarnation(format=layout.FORMAT, order=order, id=self._new_id(), parent=parent)
        self.tier.put_new(layout.incarnation_name(record), layout.encode(record))
        self.survey.incarnations[record.id], self.survey.order = record, order
        self._incarnation, self._last = record, parent
        for stale in stale_incarnations(self.survey):
            self.tier.delete(layout.incarnation_name(stale))
            del self.survey.incarnations[stale.id]

    def admit(self, step: int) -> GenerationId:
        """Where a save of `step` will go. Raises StepTaken, NotRestored; touches nothing in a run that is begun."""
        if self._incarnation is None:
            if self.survey.generations or self.survey.broken:
                newest = max([*self.survey.generations, *self.survey.broken])
                raise NotRestored(
                    f"{self.tier.place} already holds {newest}, which this state does not continue",
                    safe="Nothing was written.",
                    todo="Call restore() before the first save, or restore(step=0) to start over on purpose.",
                )
            self.begin(None)
        assert self._incarnation is not None
        last = self._last if self._last and self._last.incarnation == self._incarnation.id else None
        if (last and step <= last.step) or not 0 <= step < layout.STEP_LIMIT:
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
        chunks: Iterator[persist.Chunk],
        *,
        chunk_bytes: int = layout.CHUNK_BYTES,
        aliases: Mapping[str, str],
        values: Mapping[str, Any],
        milestone: bool = False,
        metrics: Mapping[str, float] | None = None,
        approve: Callable[[Sequence[Piece]], None] = lambda _: None,
        writers: Executor | None = None,
    ) -> Generation:
        """Bring a generation that was admitted into being from chunks that arrive in order. Durable on return.

        `approve` sees the pieces once all are written, and raises where they must not be published. `writers`: the
        threads of this save. Raises Overtaken where a newer one of this incarnation was committed meanwhile, unless
        retention wants this one for itself. On an error nothing of it is left (but for CommitUnknown, where everything
        is), and the error is raised.
        """
        assert self._incarnation is not None
        incarnation, home, begun = self._incarnation, layout.folder(at), self._monotonic()
        pinned = wanted(self._keep, at.step, milestone, metrics or {})
        with self.turn:
            self._require_newest(at, pinned)
        try:
            blobs, pieces = [], []
            for image in images:
                blob, its_pieces = persist.write(
                    self.tier,
                    home,
                    image,
                    chunks,
                    chunk_bytes=chunk_bytes,
                    algorithm=self._algorithm,
                    writers=writers or self._workers,
                )
                blobs.append(blob)
                pieces += its_pieces
            self._tell(self._event("written", at, self._monotonic() - begun, sum(blob.length for blob in blobs)))
            approve(pieces)
            seal = commit.seal(
                self.tier,
                Manifest(
                    format=layout.FORMAT,
                    step=at.step,
                    incarnation=at.incarnation,
                    rank=0,
                    digest=self._algorithm,
                    blobs=blobs,
                    pieces=pieces,
                    aliases=dict(aliases),
                    values=dict(values),
                ),
            )
            size = seal.length + sum(blob.length for blob in blobs)
            with self.turn:
                self._require_newest(at, pinned)
                record = Commit(
                    format=layout.FORMAT,
                    run=self._run,
                    step=at.step,
                    incarnation=at.incarnation,
                    order=incarnation.order,
                    world=World(ranks=1),
                    continues=incarnation.parent,
                    parent=self._before(at),
                    seals=[seal],
                    created=self._wall(),
                    milestone=milestone,
                    metrics=dict(metrics or {}),
                )
                generation = msgspec.structs.replace(commit.publish(self.tier, record, self._algorithm), bytes=size)
                self._note_tried(at)
                self._take_in(generation)
                self._unread += 1
        except CommitUnknown:
            with self.turn:
                self._note_tried(at)  # this step may exist: it is not written again
            raise
        except NameTaken:
            raise  # what lies there is not of this save
        except BaseException:
            # What cannot be removed now is litter without a COMMIT, and the next opening removes it.
            with contextlib.suppress(LastgoodError):
                commit.retire(self.tier, at)
            raise
        self._tell(self._event("durable", at, seconds=self._monotonic() - begun, size=generation.bytes))
        return generation

    def _require_newest(self, at: GenerationId, pinned: bool) -> None:
        newest = max((one for one in self.survey.generations if one.incarnation == at.incarnation), default=at)
        if newest.step > at.step and not pinned:
            raise Overtaken(f"step {newest.step} was committed before step {at.step}", safe="Nothing is lost by it.")

    def _before(self, at: GenerationId) -> GenerationId | None:
        """The newest generation before this one: what its commit names."""
        assert self._incarnation is not None
        mine = (one for one in self.survey.generations if one.incarnation == at.incarnation and one.step < at.step)
        return max(mine, default=self._incarnation.parent)

    def _take_in(self, generation: Generation) -> None:
        self.survey.generations[generation.id] = generation
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

        One that is damaged is marked with the evidence, and the next older unverified one is read; the damage is raised
        at the end. Raises Cancelled when `stop()`, Unavailable.
        """
        problem: Damaged | None = None
        for generation in self.lineage():
            if generation.damaged:
                continue
            if generation.verified:
                break
            begun = self._monotonic()
            try:
                findings = read_all(self.tier, generation, arena, self._workers, stop)
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
                    "damaged" if findings else "verified",
                    generation.id,
                    seconds=self._monotonic() - begun,
                    detail=restore.told(findings),
                )
            )
            if not findings:
                break
            problem = problem or Damaged(
                f"step {generation.step} was committed and does not read back: {restore.told(findings)}",
                safe="Older generations are kept; this one is marked and will not be restored.",
                todo="Check the disk. The evidence is in DAMAGED.json beside it.",
            )
        if problem:
            raise problem

    def conclude(self, generation: Generation, findings: list[Finding]) -> None:
        """Mark what a complete reading of a generation found; the pointer follows a good one of the lineage."""
        with self.turn:
            commit.mark(self.tier, generation, findings)
            self._take_in(msgspec.structs.replace(generation, verified=not findings, damaged=findings))
            if not findings:
                self._unread = unverified_ahead(self.lineage())
                self.point()

    def point(self) -> None:
        """Let LASTGOOD.json and latest_ok name the newest verified generation of the lineage."""
        with self.turn:
            newest = self.newest_verified()
            if newest is not None:
                pointer = Pointer(
                    format=layout.FORMAT, step=newest.step, incarnation=newest.id.incarnation, root=newest.root
                )
                if pointer != self.survey.pointer:
                    self.tier.point(layout.POINTER, layout.encode(pointer), layout.folder(newest.id))
                    self.survey.pointer = pointer

    def clean(self) -> None:
        """Delete what retention lets go, each in two phases; never what the pointer still names."""
        self.point()
        for at in self.surplus():
            commit.retire(self.tier, at)
            with self.turn:
                self.survey.generations.pop(at, None)
            self._tell(self._event("deleted", at))

    def surplus(self) -> list[GenerationId]:
        """What retention lets go, oldest first; nothing where the tier does so by itself."""
        if self.tier.newest_only:
            return []
        with self.turn:
            chain = self.lineage()
            of_lineage = {one.id for one in chain}
            abandoned = [one for at, one in self.survey.generations.items() if at not in of_lineage]
            return surplus(self._keep, chain, abandoned)

    def newest_verified(self) -> Generation | None:
        """The newest verified generation of the lineage."""
        return next((one for one in self.lineage() if one.verified and not one.damaged), None)

    def lineage(self) -> list[Generation]:
        """Committed generations of the lineage, newest first; those whose commit is not sure are not among them."""
        with self.turn:
            there = self.survey.generations
            chain = restore.lineage(self.survey).chain
            return [there[at] for at in chain if at in there]

    def _event(self, kind: str, at: GenerationId, seconds: float = 0.0, size: int = 0, detail: str = "") -> Event:
        return Event(
            kind=kind,
            step=at.step,
            at_seconds=self._monotonic(),
            seconds=seconds,
            bytes=size,
            detail=detail,
        )

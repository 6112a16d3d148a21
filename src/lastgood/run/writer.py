"""One opening of a run for writing, at the rank that commits: the only rank, or rank 0 of several.

Invariants
  1. The steps of a generation have one order: blobs, manifest and commit (save.py); then the generation is read again
     past the page cache (verify.py); then the mark VERIFIED, then the pointer (marks.py); only then may an older
     generation be deleted (retire.py).
  2. Any number of threads may be in `save`, and one in `verify`, `clean`, `mend` and `label` together. They read and
     write data at the same time; what changes which generations exist or count is done under `known.lock`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence, Set
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

import msgspec

from ..coordination.rounds import encode_error
from ..coordination.single_rank import AnyRanks, AnyTopic, SingleRank
from ..engine.arena import Arena
from ..errors import LastgoodError, NoSpace, StepTaken
from ..format import catalog, commit, intents, layout, parity_layout
from ..io.reed_solomon import Code
from ..limits import RECORD_LIMIT_BYTES
from ..policy import restore
from ..policy.places import holder
from ..policy.retention import KEEP, Keep, unverified_ahead, wanted
from ..ports import Stop, Tier, never
from ..records import Commit, Finding, Generation, GenerationId, Incarnation, Pointer, Record, World
from ..storage.slots import Slots
from . import claims, paths
from .disk_space import RetryingTier
from .known import Environment, KnownRun
from .marks import Marks
from .mend import Mender
from .node_disks import NodeDisks, own_disk
from .reader import read_all
from .retire import Deletions, Retirement
from .save import RankPart, RankWriter, SaveRequest, clear_failed, save
from .settle import record_incarnation, remove_unfinished, settle
from .verify import Verifier, own_findings

CATALOG_EVERY = 64
"""So many generations are new in an object store until its catalog is written again."""
CATALOG_LEAST = 16
"""At the end of an opening the catalog is written if so many are new."""


class SharedSurvey(Record, frozen=True, kw_only=True):
    """What the coordinator knows of a run, as the other ranks receive it: `commit.Survey` without the commits."""

    generations: list[tuple[GenerationId, bool, list[Finding], list[Finding]]]
    """of each generation the id, whether it is verified, and the findings of its marks DAMAGED and UNFIT"""
    broken: list[tuple[GenerationId, dict[str, str]]]
    """generations whose commit cannot be read, each with the error"""
    incomplete: list[GenerationId]
    witnessed: list[GenerationId]
    incarnations: list[Incarnation]
    order: int
    pointer: Pointer | None
    records: list[Generation]
    """of a place on several nodes, where a node may lack a COMMIT: all generations"""


class RunWriter:
    """The writer of one run on one tier. Opening it settles the run (settle.py).

    `workers`: the threads that read, and that write for `save`. `keep`: the retention policy. `parity`: the parity of
    each verified generation, as "8+2" (None: no parity). `algorithm`: of all digests. `ranks`: the ranks of the job
    (None: this one alone). `environment`: ids, clocks and callbacks. `resumes`: a generation that an earlier opening
    admitted and whose files exist; this opening commits it (None: no such generation).
    """

    def __init__(
        self,
        tier: Tier,
        workers: Executor,
        *,
        keep: Keep = KEEP,
        parity: str | None = None,
        algorithm: str = "xxh3_128",
        ranks: AnyRanks | None = None,
        environment: Environment | None = None,
        resumes: GenerationId | None = None,
    ) -> None:
        self.tier, self.ranks = tier, ranks or SingleRank()
        self.keep, self._algorithm, self._workers = keep, algorithm, workers
        self.known = known = KnownRun(tier, environment or Environment(), resumes)
        self._deletions = Deletions(tier)
        known.run_id = settle(known, self._deletions)
        self.marks = Marks(known)
        self.retirement = Retirement(known, self.marks, self._deletions, keep, workers)
        code = Code(*parity_layout.parsed(parity)) if parity else None
        self.verifier = Verifier(known, self.marks, self.ranks, workers, code)
        self.mender = Mender(known, self.marks, self.verifier, workers)
        self._in_memory = paths.in_memory(tier.place)
        self._roomy = RetryingTier(own_disk(tier), self.make_room)
        self._intended: dict[GenerationId, Commit] = {}
        """saves that are under way in memory -> what their COMMIT will say"""
        self._failed: set[GenerationId] = set()
        """saves that have failed: their steps may be saved again"""
        self._catalogued: Set[GenerationId] = known.survey.catalogued
        """the generations in the catalog, where the run has one"""

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def survey(self) -> commit.Survey:
        """All generations, incarnations and marks that this process knows of."""
        return self.known.survey

    def lineage(self) -> list[Generation]:
        """As `KnownRun.lineage`."""
        return self.known.lineage()

    def newest(self) -> Generation | None:
        """The newest generation of the lineage, which a save without a restore continues; None: there is none. Raises
        the error of one that could not be read and may be newer."""
        restore.require_read(self.survey)  # guard: unread-generation-not-abandoned
        return next(iter(self.lineage()), None)

    # ---- saving --------------------------------------------------------------------------------------------

    def begin(self, parent: GenerationId | None, above: int = 0) -> None:
        """Begin an incarnation that continues `parent` (None: it starts from scratch). The other ranks receive it. Its
        order is higher than that of every incarnation that is known here, and than `above` (default 0).

        Nothing is written: the incarnation becomes durable with its first COMMIT, which names the parent. Until then
        the pointer, and a process that opens the run after this one, follow the older incarnations.
        """

        def decide(_: list[Any]) -> Any:
            places = [self.known, *self.known.below]
            if parent is not None:
                # In the place from which it was restored.
                held = places[holder([one.survey.generations for one in places], parent) or 0]
                commit.confirm(held.tier, parent)  # guard: parent-durable-before-continuing
            # What lies in memory that this opening does not look at counts too: one of the two is the newer one.
            left = self.known.left_order  # guard: order-above-memory-left-behind
            order = 1 + max(above, left, *(one.survey.order for one in places))  # guard: incarnation-order-ascends
            order = claims.common_order([one.tier for one in places], order)
            ident = self.known.environment.new_id()
            self.known.begin(Incarnation(format=layout.FORMAT, order=order, id=ident, parent=parent))
            return msgspec.to_builtins(self.known.incarnation)

        self.ranks.agree("begin", None, decide)

    def remove_unfinished_copies(self) -> None:
        """In a place that receives copies: delete what is there of copies that were interrupted."""
        remove_unfinished(self.known, self._deletions, copied=True)

    def record_incarnation(self) -> None:
        """As `settle.record_incarnation`."""
        record_incarnation(self.known, self._deletions)

    def admit(self, step: int) -> GenerationId:
        """The id of a save of `step`; begins an incarnation if there is none. Raises StepTaken, NotRestored."""
        self.known.require_restored()
        if self.known.incarnation is None:
            self.begin(None)
        return self.known.next_id(step)

    def save(self, request: SaveRequest, topic: AnyTopic | None = None) -> Generation:
        """As `save.save`, on the threads of the run; pinned also if the retention policy keeps the step.

        `topic`: through which the ranks agree on this save (None: the topic of its step).
        """
        at = request.at
        with self.known.lock:
            before = self.known.before(at)
        since = before.step if before is not None else 0
        pinned = request.pinned or wanted(self.keep, at.step, request.milestone, request.metrics, since)
        by = self.rank_writer(self._workers)
        return save(self, replace(request, pinned=pinned), by, topic or self.ranks.step_topic("save", at.step))

    def rank_writer(self, writers: Executor | None) -> RankWriter:
        """How this rank writes its part of a save, with these threads. On a full disk older generations are deleted."""
        return RankWriter(self._roomy, self.rank, self._algorithm, writers)

    def abandon(self, step: int, topic: AnyTopic, error: BaseException) -> None:
        """End a save that failed on this rank before it wrote anything: it fails on all ranks, and their files are
        removed."""
        topic.fail(error)  # after this no rank writes to the generation's folder
        if self.known.incarnation is not None:
            with contextlib.suppress(StepTaken):  # the files in that folder belong to another save
                at = self.admit(step)
                self.withdraw(at)
                self.clear(at)

    def intend(self, request: SaveRequest) -> None:
        """In memory: store what the COMMIT of a save will say (format/intents.py), unless the step is saved again.

        A rank that was late may still seal its part of the attempt before: the two must not be put together.
        """
        at = request.at
        if not self._in_memory or at in self._failed:  # guard: step-saved-again-not-committed-late
            return
        with self.known.lock:
            record = self._commit_record(at, request.milestone, request.metrics)
        intents.write(self._roomy, intents.Intent(record, self._algorithm))
        self._intended[at] = record

    def withdraw(self, at: GenerationId) -> None:
        """Note that a save has failed, and in memory delete what `intend` has stored. Raises nothing."""
        self._failed.add(at)
        self._forget_intent(at)

    def _forget_intent(self, at: GenerationId) -> None:
        if self._intended.pop(at, None):
            with contextlib.suppress(LastgoodError):
                intents.withdraw(self._roomy, at)

    def publish(
        self, at: GenerationId, parts: Sequence[RankPart], pinned: bool, milestone: bool, metrics: Mapping[str, float]
    ) -> Generation:
        """Commit the parts that the ranks have sealed. Raises Overtaken, CommitUnknown."""
        known = self.known
        with known.lock:
            known.require_newest(at, pinned)  # guard: overtaken-save-not-committed
            # The same bytes as those of who commits late what this process has intended.
            # guard: commit-as-intended
            record = self._intended.get(at) or self._commit_record(at, milestone, metrics)
            world, seals = World(ranks=len(parts)), [one.seal for one in parts]
            record = msgspec.structs.replace(record, world=world, seals=seals)
            size = sum(one.bytes for one in parts)
            # guard: publish-writes-commit
            generation = msgspec.structs.replace(commit.publish(self.tier, record, self._algorithm), bytes=size)
            self._forget_intent(at)
            known.note_tried(at)
            known.record(generation)
            known.unread += 1
            if known.recorded != at.incarnation:
                with contextlib.suppress(LastgoodError):  # each COMMIT holds the same; the next save tries again
                    self.record_incarnation()
            return generation

    def _commit_record(self, at: GenerationId, milestone: bool, metrics: Mapping[str, float]) -> Commit:
        """The COMMIT of a save, without its seals."""
        known = self.known
        assert known.incarnation is not None
        return Commit(
            format=layout.FORMAT,
            run=known.run_id,
            step=at.step,
            incarnation=at.incarnation,
            order=known.incarnation.order,
            world=World(ranks=self.ranks.size),
            continues=known.incarnation.parent,
            parent=known.before(at),
            seals=[],
            created=known.environment.wall_seconds(),
            milestone=milestone,
            metrics=dict(metrics),
        )

    def note_published(self, generation: Generation) -> None:
        """Does nothing: `publish` has added the generation already."""

    def clear(self, at: GenerationId) -> None:
        """As `save.clear_failed`."""
        clear_failed(self.tier, at)

    def doubt(self, at: GenerationId) -> None:
        """As `Slots.doubt`, in the slots of this rank."""
        if isinstance(slots := own_disk(self.tier), Slots):
            slots.doubt(layout.folder(at))

    def make_room(self, needed_bytes: int) -> bool:
        """As `Environment.make_room`, which by default deletes the oldest generation that retention can spare."""
        make_room = self.known.environment.make_room or self.retirement.relieve
        return make_room(needed_bytes)

    # ---- after the commit ----------------------------------------------------------------------------------

    def backlog(self) -> int:
        """The number of generations of the lineage that were committed after the newest verified one."""
        return self.known.unread if self.tier.newest_only else unverified_ahead(self.lineage())

    def verify(self, arena: Arena, stop: Stop = never) -> None:
        """As `Verifier.verify`."""
        self.verifier.verify(arena, stop)

    def clean(self, stop: Stop = never, most: int | None = None) -> None:
        """As `Retirement.clean`. Where the run has a catalog, it is written from time to time."""
        self.retirement.clean(stop, most)
        self.note_catalog(CATALOG_EVERY)

    def note_catalog(self, least: int) -> None:
        """Write the catalog of an object store, if at least `least` generations are new since it was written.

        It is a cache (format/catalog.py): if it cannot be written, the next opening reads more.
        """
        known, tier = self.known, self.tier
        few = len(known.survey.generations.keys() - self._catalogued) < least
        if few or not commit.visible_is_durable(tier):
            return
        with contextlib.suppress(LastgoodError):
            listings = tier.tree("gen")  # type: ignore[attr-defined]
            # Taken after the listing: a record that is listed is known by now, because both come under the lock. What
            # came after the listing makes an entry that no later listing agrees with.
            with known.lock:
                now = dict(known.survey.generations)
            record = layout.encode(catalog.made(now, listings))
            if len(record) <= RECORD_LIMIT_BYTES:
                self.tier.point(catalog.NAME, record, "")
                self._catalogued = set(now)

    def conclude(self, generation: Generation, findings: list[Finding]) -> None:
        """As `Marks.conclude`."""
        self.marks.conclude(generation, findings)

    def mend(self, at: GenerationId, arena: Arena, stop: Stop = never) -> list[str]:
        """As `Mender.mend`."""
        return self.mender.mend(at, arena, stop)

    def label(self, at: GenerationId, milestone: bool, metrics: Mapping[str, float]) -> Generation:
        """As `Marks.label`. On a full disk older generations are deleted to make room, but never this one."""
        with self.known.lock:
            self.known.labelling.add(at)
        try:
            while True:
                try:
                    return self.marks.label(at, milestone, metrics)
                except NoSpace:  # `known.lock` is not held here: `make_room` acquires other locks before it
                    if not self.make_room(0):
                        raise
        finally:
            with self.known.lock:
                self.known.labelling.discard(at)

    # ---- for the other ranks -------------------------------------------------------------------------------

    def own_findings(self, generation: Generation, arena: Arena, of: Collection[int] | None = None) -> list[Finding]:
        """As `verify.own_findings`."""
        return own_findings(self.known, self.ranks, generation, arena, self._workers, of=of)

    def all_findings(self, generation: Generation, arena: Arena) -> list[Finding]:
        """Read all files of a generation, of every rank, and return the findings."""
        return read_all(self.tier, generation, arena, self._workers)

    def shared_survey(self) -> Any:
        """What this process knows of the run, as `Follower.adopt` receives it."""
        survey = self.survey
        generations = [(one.id, one.verified, one.damaged, one.unfit) for one in survey.generations.values()]
        return msgspec.to_builtins(
            SharedSurvey(
                generations=generations,
                broken=[(at, encode_error(error)) for at, error in survey.broken.items()],
                incomplete=list(survey.incomplete),
                witnessed=list(survey.witnessed),
                incarnations=list(survey.incarnations.values()),
                order=survey.order,
                pointer=survey.pointer,
                records=list(survey.generations.values()) if isinstance(self.tier, NodeDisks) else [],
            )
        )

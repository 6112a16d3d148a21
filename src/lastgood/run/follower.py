"""The run at a rank other than the coordinator: this rank writes and verifies its own files, and nothing else.

Only the coordinator commits, marks and deletes generations (writer.py).
Invariants
  1. After each agreement this rank knows the same generations as the coordinator, so that both choose alike.
  2. The coordinator marks a generation only after it has itself read every part that this rank found damaged, or did
     not report in time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import msgspec

from ..coordination.rounds import RankGroup, decode_error
from ..coordination.single_rank import AnyTopic
from ..engine.arena import Arena
from ..errors import Damaged, StepTaken, TierDown
from ..format import commit, layout
from ..policy import restore
from ..ports import Shared, Stop, never
from ..records import Finding, Generation, GenerationId, Incarnation, judged
from ..storage.slots import Slots
from .known import Environment, KnownRun
from .node_disks import own_disk
from .save import RankPart, RankWriter, SaveRequest
from .verify import own_findings, post_key
from .writer import SharedSurvey


class Follower:
    """One rank's opening of a run to which the coordinator commits."""

    def __init__(
        self,
        tier: Shared,
        workers: Executor,
        ranks: RankGroup,
        *,
        algorithm: str = "xxh3_128",
        environment: Environment | None = None,
    ) -> None:
        self.tier, self.ranks = tier, ranks
        self._workers, self._algorithm = workers, algorithm
        self.known = KnownRun(tier, environment or Environment())
        self._last_read: Generation | None = None

    @property
    def rank(self) -> int:
        return self.ranks.rank

    # ---- saving --------------------------------------------------------------------------------------------

    def begin(self, parent: GenerationId | None) -> None:
        """Receive the incarnation that the coordinator has opened, and continue `parent` in it."""
        self.known.begin(msgspec.convert(self.ranks.agree("begin", None, lambda _: None), Incarnation))
        self._last_read = self.known.survey.generations.get(parent) if parent else None

    def admit(self, step: int) -> GenerationId:
        """Assign the id of a save of `step`. As `RunWriter.admit`: raises NotRestored and StepTaken."""
        self.known.require_restored()
        if self.known.incarnation is None:
            self.begin(None)
        return self.known.next_id(step)

    def rank_writer(self, writers: Executor | None) -> RankWriter:
        """Make the writer of this rank's part of a save."""
        return RankWriter(self.tier, self.rank, self._algorithm, writers)

    def abandon(self, step: int, topic: AnyTopic, error: BaseException) -> None:
        """Post the error of a save to the coordinator. As `RunWriter.abandon`, but deletes nothing."""
        topic.fail(error)
        if self.known.incarnation is not None:
            with contextlib.suppress(StepTaken):
                self.clear(self.admit(step))

    def intend(self, request: SaveRequest) -> None:
        """Does nothing: the coordinator stores it."""

    def withdraw(self, at: GenerationId) -> None:
        """Does nothing, as `intend`."""

    def publish(
        self, at: GenerationId, parts: Sequence[RankPart], pinned: bool, milestone: bool, metrics: Mapping[str, float]
    ) -> Generation:
        """Never called: only the coordinator commits."""
        raise AssertionError("only the coordinator commits")

    def note_published(self, generation: Generation) -> None:
        """Note what the coordinator has published."""
        with self.known.lock:
            self.known.note_tried(generation.id)
            self.known.record(generation)

    def clear(self, at: GenerationId) -> None:
        """Forget the folder of a failed save. The coordinator deletes it, once no rank writes to it."""
        self.tier.forget(layout.folder(at))  # guard: removed-folder-made-again

    def doubt(self, at: GenerationId) -> None:
        """As `Slots.doubt`, in the slots of this rank."""
        if isinstance(slots := own_disk(self.tier), Slots):
            slots.doubt(layout.folder(at))

    def make_room(self, needed_bytes: int) -> bool:
        """Deletes nothing: the coordinator does, when it receives the NoSpace that this rank posts."""
        return False

    # ---- after the commit ----------------------------------------------------------------------------------

    def backlog(self) -> int:
        """The number of this incarnation's generations that are newer than the last one that this rank verified."""
        last = self._last_read.id if self._last_read else None
        mine = self.known.incarnation.id if self.known.incarnation else ""
        with self.known.lock:
            of_mine = [one for one in self.known.survey.generations if one.incarnation == mine]
        return sum(1 for one in of_mine if last is None or one > last)

    def verify(self, arena: Arena, stop: Stop = never) -> None:
        """Read this rank's part of the newest generation again, and post whether it is good.

        Raises as `read_all`. A post that fails is not repeated: the coordinator then reads the part itself.
        """
        newest = next(iter(self.known.lineage()), None)
        if newest is None or (self._last_read and newest.id == self._last_read.id):
            return
        findings = own_findings(self.known, self.ranks, newest, arena, self._workers, stop)
        before, self._last_read = self._last_read, newest
        if self.tier.newest_only and layout.folder(newest.id).partition("/")[2] not in self.tier.list("gen"):
            return  # a newer commit has overwritten it while it was read
        if findings:  # so far only this machine reads it so: the coordinator reads the part itself
            self.known.emit("damaged", newest.id, detail=restore.summary(findings))
        with contextlib.suppress(TierDown):
            self.ranks.post(post_key(self.ranks, newest, self.rank), not findings)  # guard: follower-reports-findings
            if before is not None:
                self.ranks.delete([post_key(self.ranks, before, self.rank)])

    def conclude(self, generation: Generation, findings: list[Finding]) -> None:
        """Note the findings that all ranks agreed on. Stores nothing: the coordinator marks the generation."""
        with self.known.lock:
            self.known.record(judged(generation, findings))

    def own_findings(self, generation: Generation, arena: Arena, of: Collection[int] | None = None) -> list[Finding]:
        """Read the files that this rank has to read and return the findings, as `verify.own_findings`."""
        return own_findings(self.known, self.ranks, generation, arena, self._workers, of=of)

    # ---- the survey, from the disk or from the coordinator -------------------------------------------------

    def refresh(self) -> None:
        """List the run again."""
        with self.known.lock:
            self.known.survey = commit.survey(self.tier)

    def adopt(self, posted: Any) -> None:
        """Replace this rank's survey by that of the coordinator, even where it differs from what this machine lists.

        `posted`: the `SharedSurvey` that the coordinator published. A generation whose commit record this rank cannot
        read counts as broken here. Raises Unavailable.
        """
        shared, known = msgspec.convert(posted, SharedSurvey), self.known
        survey = commit.Survey(
            run=known.survey.run,
            broken={at: decode_error(post) for at, post in shared.broken},
            incomplete=set(shared.incomplete),
            witnessed=set(shared.witnessed),
            incarnations={one.id: one for one in shared.incarnations},
            order=shared.order,
            pointer=shared.pointer,
        )
        records = {one.id: one for one in shared.records}
        with known.lock:
            for at, verified, damaged, unfit in shared.generations:
                try:
                    one = records.get(at) or known.survey.generations.get(at)
                    one = one or commit.read_generation(self.tier, at, known.survey.run)
                except Damaged as error:  # raised only if this generation is chosen; the others can be loaded
                    survey.broken[at] = error
                    continue
                survey.generations[at] = msgspec.structs.replace(one, verified=verified, damaged=damaged, unfit=unfit)
            known.survey = survey

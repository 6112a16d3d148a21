"""Leader and followers: the run as each rank knows it. A follower writes its own files, and nothing else of the run.

What makes a generation come, count or go the leader does, with `run.writer`; a follower takes in what it hears. Each
reads again what it has written, and the leader, which marks, hears of it: nobody reads all.
Invariants
  1. Between two agreements a follower knows the same generations as the leader, so that both choose alike.
  2. What a follower finds wrong the leader reads itself before it marks anything; and what it does not hear of in time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ..coordination.rounds import Ranks, Topic, raised, told
from ..engine.arena import Arena
from ..errors import Damaged, TierDown
from ..format import commit, layout
from ..policy import restore
from ..ports import Shared
from ..records import Finding, Generation, GenerationId, Incarnation, Pointer, Record, judged
from .rank_part import Share
from .reader import disagreeing, read_all
from .writer import RunWriter

LEAST_PATIENCE_SECONDS, POLL_SECONDS = 0.1, 0.01
"""with those who read again what they have written; and how often they are looked for"""


class Seen(Record, frozen=True, kw_only=True):
    """What the leader knows of a run: `commit.Survey`, and of each generation what was found of it."""

    generations: list[tuple[GenerationId, bool, list[Finding], list[Finding]]]
    broken: list[tuple[GenerationId, dict[str, str]]]
    incomplete: list[GenerationId]
    witnessed: list[GenerationId]
    incarnations: list[Incarnation]
    order: int
    pointer: Pointer | None


class _Ranked(RunWriter):
    """A rank's writer. None of them mends: there is no parity with several ranks, and two must not write one file."""

    def __init__(self, *args: Any, ranks: Ranks, pause: Callable[[float], object] = time.sleep, **options: Any) -> None:
        self._ranks, self._pause = ranks, pause
        super().__init__(*args, **options)
        self.rank = ranks.rank

    def mend_known(self, step: int | None, arena: Arena) -> None:
        """It stays as it is."""

    def try_to_mend(self, at: GenerationId, arena: Arena, stop: Callable[[], bool] = lambda: False) -> bool:
        return False

    def read_own(self, generation: Generation, arena: Arena, stop: Callable[[], bool] = lambda: False) -> list[Finding]:
        """What is wrong with this rank's part of the files; all ranks together read all of them."""
        of = [one.rank for one in generation.commit.seals if self._reader(one.rank) == self.rank]
        return read_all(self.tier, generation, arena, self._workers, stop, of=of)

    def _reader(self, rank: int) -> int:
        """Who reads what `rank` has written; in another world it may have been."""
        return rank % self._ranks.size

    def _place(self, generation: Generation, rank: int) -> str:
        """Where a rank says that its part is good, or is not."""
        return f"{self._ranks.name}/read/{generation.id}/{rank}"


class Leader(_Ranked):
    """The coordinator's writer: what it decides for all, all hear of."""

    def begin(self, parent: GenerationId | None) -> None:
        def decide(_: list[Any]) -> Any:
            RunWriter.begin(self, parent)
            return msgspec.to_builtins(self._incarnation)

        self._ranks.agree("begin", None, decide)

    def seen(self) -> Any:
        """What is known of the run, in what a restore goes by, for all to know."""
        known = self.survey
        generations = [(one.id, one.verified, one.damaged, one.unfit) for one in known.generations.values()]
        return msgspec.to_builtins(
            Seen(
                generations=generations,
                broken=[(at, told(error)) for at, error in known.broken.items()],
                incomplete=list(known.incomplete),
                witnessed=list(known.witnessed),
                incarnations=list(known.incarnations.values()),
                order=known.order,
                pointer=known.pointer,
            )
        )

    def _read(
        self, generation: Generation, arena: Arena, stop: Callable[[], bool], also: Callable[[memoryview], None]
    ) -> list[Finding]:
        """Its own part, and what is not called good by those whose part it is, in about the time that this took."""
        begun = self._monotonic()
        findings = self.read_own(generation, arena, stop)  # guard: rank-zero-reads-own-files
        good = {self.rank, *self._called_good(generation, max(self._monotonic() - begun, LEAST_PATIENCE_SECONDS))}
        # guard: only-unconfirmed-ranks-reread
        rest = [one.rank for one in generation.commit.seals if self._reader(one.rank) not in good]
        # guard: unconfirmed-ranks-read
        findings += read_all(self.tier, generation, arena, self._workers, stop, of=rest)
        return findings or disagreeing(self.tier, generation)

    def _called_good(self, generation: Generation, patience_seconds: float) -> list[int]:
        keys = {rank: self._place(generation, rank) for rank in range(1, self._ranks.size)}
        until = self._monotonic() + patience_seconds
        try:
            while not self._ranks.has(*keys.values()) and self._monotonic() < until:
                self._pause(POLL_SECONDS)
            good = [rank for rank, key in keys.items() if self._ranks.heard(key)]
        except TierDown:
            return []  # it is no less good for that
        self._ranks.delete(list(keys.values()))
        return good


class Follower(_Ranked):
    """A rank's writer that publishes, marks and deletes nothing."""

    def __init__(self, tier: Shared, *args: Any, **options: Any) -> None:
        self._was_read: Generation | None = None
        self._shared = tier
        super().__init__(tier, *args, **options)

    def _settle(self) -> None:
        """The coordinator has done so before anybody else has opened the run."""

    def begin(self, parent: GenerationId | None) -> None:
        record = msgspec.convert(self._ranks.agree("begin", None, lambda _: None), Incarnation)
        self._incarnation, self._last, self.survey.order = record, parent, record.order
        self._was_read = self.survey.generations.get(parent) if parent else None

    def _committed(
        self, together: Topic, at: GenerationId, share: Share, publish: Callable[[Sequence[Share]], Generation]
    ) -> Generation:
        generation = super()._committed(together, at, share, publish)
        with self.turn:
            self._note_tried(generation.id)
            self._take_in(generation)
        return generation

    def _clear(self, at: GenerationId) -> None:
        """The leader clears it away, once nobody writes to it any more."""
        self._shared.forget(layout.folder(at))  # guard: removed-folder-made-again

    def look(self) -> None:
        """What lies in the run now."""
        with self.turn:
            self.survey = commit.survey(self.tier)

    def see(self, seen: Any) -> None:
        """Know what `Leader.seen` tells, whatever this machine's own listing says. Raises Damaged, Unavailable."""
        told = msgspec.convert(seen, Seen)
        found = commit.Survey(
            run=self.survey.run,
            broken={at: raised(post) for at, post in told.broken},
            incomplete=set(told.incomplete),
            witnessed=set(told.witnessed),
            incarnations={one.id: one for one in told.incarnations},
            order=told.order,
            pointer=told.pointer,
        )
        with self.turn:
            for at, verified, damaged, unfit in told.generations:
                try:
                    one = self.survey.generations.get(at) or commit.read_generation(self.tier, at, self.survey.run)
                except Damaged as error:  # as rank 0 will find, if it wants this one; the others can be loaded
                    found.broken[at] = error
                    continue
                found.generations[at] = msgspec.structs.replace(one, verified=verified, damaged=damaged, unfit=unfit)
            self.survey = found

    def backlog(self) -> int:
        """How many generations of this incarnation are newer than what it has read again."""
        known = self._was_read.id if self._was_read else None
        mine = self._incarnation.id if self._incarnation else ""
        with self.turn:
            there = [one for one in self.survey.generations if one.incarnation == mine]
        return sum(1 for one in there if known is None or one > known)

    def surplus(self) -> list[GenerationId]:
        return []

    def verify(self, arena: Arena, stop: Callable[[], bool] = lambda: False) -> None:
        """Its part of the newest; the leader hears whether that is good, or reads it too. Raises as `read_own`."""
        with self.turn:
            newest = next(iter(self.lineage()), None)
        if newest is None or (self._was_read and newest.id == self._was_read.id):
            return
        findings, before, self._was_read = self.read_own(newest, arena, stop), self._was_read, newest
        if findings:  # what this machine reads: the leader looks for itself
            self._tell(self._event("damaged", newest.id, detail=restore.told(findings)))
        with contextlib.suppress(TierDown):
            self._ranks.post(self._place(newest, self.rank), not findings)  # guard: follower-reports-findings
            if before is not None:
                self._ranks.delete([self._place(before, self.rank)])

    def point(self) -> None:
        """The leader does."""

    def clean(self, stop: Callable[[], bool] = lambda: False, most: int | None = None) -> None:
        """The leader does."""

    def relieve(self, needed_bytes: int = 0) -> bool:
        """The leader deletes, once it reads that this rank found no space."""
        return False

    def label(self, at: GenerationId, milestone: bool, metrics: Mapping[str, float]) -> Generation:
        """The leader does."""
        return self.survey.generations[at]

    def conclude(self, generation: Generation, findings: list[Finding]) -> None:
        with self.turn:
            self._take_in(judged(generation, findings))

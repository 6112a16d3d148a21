"""Reading committed generations again: verification, and the parity that a verified generation gets.

With several ranks each rank reads again what it has written, and posts whether that is good; the coordinator, which
marks, reads its own files and those of ranks that it has no such post of.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Executor

from ..coordination.rounds import RankGroup
from ..coordination.single_rank import AnyRanks
from ..engine import parity
from ..engine.arena import Arena
from ..engine.finite import exception
from ..errors import Cancelled, Damaged, LastgoodError, NotFinite, SumMismatch, TierDown, Unavailable, Unreadable
from ..events import EventKind
from ..format import commit
from ..format import parity_layout as striping
from ..io.reed_solomon import Code
from ..policy import restore
from ..records import Finding, Generation, GenerationId, intact
from .known import KnownRun
from .marks import Marks
from .reader import disagreeing, read_all

LEAST_WAIT_SECONDS, POLL_SECONDS = 0.1, 0.01
"""for posts of ranks that read again what they have written; and how often they are polled"""

Stop = Callable[[], bool]


def never() -> bool:
    """Nothing stops the reading."""
    return False


def _unseen(_: memoryview) -> None:
    """Nothing else needs the bytes."""


def own_seals(ranks: AnyRanks, generation: Generation, of: Collection[int]) -> list[int]:
    """The ranks that have written a generation, of which the ranks `of` read the files again.

    A generation may have been written by more ranks than there are now.
    """
    return [one.rank for one in generation.commit.seals if one.rank % ranks.size in of]


def own_findings(
    known: KnownRun, ranks: AnyRanks, generation: Generation, arena: Arena, workers: Executor, stop: Stop = never
) -> list[Finding]:
    """What is wrong with the files that this rank reads again; all ranks together read all of them."""
    return read_all(known.tier, generation, arena, workers, stop, of=own_seals(ranks, generation, [ranks.rank]))


def post_key(ranks: RankGroup, generation: Generation, rank: int) -> str:
    """The key under which a rank posts whether its part of a generation is good."""
    return f"{ranks.name}/read/{generation.id}/{rank}"


class Verifier:
    """Verifies the generations of one run at the rank that commits. `code`: the parity that each verified one gets."""

    def __init__(self, known: KnownRun, marks: Marks, ranks: AnyRanks, workers: Executor, code: Code | None) -> None:
        self._known, self._marks, self._ranks, self._workers = known, marks, ranks, workers
        self.code = code
        self._protected: set[GenerationId] = set()

    def verify(self, arena: Arena, stop: Stop = never) -> None:
        """Read the newest unverified generation again past the page cache, mark it, and point at it.

        One that is not good is marked with the evidence, and the next older unverified one is read; what was found is
        raised at the end: Damaged, or NotFinite. Raises Cancelled when `stop()`, Unavailable.
        """
        problem: LastgoodError | None = None
        digests: list[str] | None = None
        for generation in self._known.lineage():
            if not generation.restorable:
                continue
            if generation.verified:
                break
            try:
                findings, digests = self._examined(generation, arena, stop)
            except (Cancelled, Unavailable, Unreadable):
                if problem:
                    break  # what was found already must be raised
                raise
            if not findings:
                break
            problem = problem or _problem(generation.step, findings)  # guard: verify-continues-past-damage
        if problem:  # guard: damage-raised-after-verify
            raise problem
        newest = self._known.newest_verified()
        # guard: parity-after-verify
        if self.code is not None and newest is not None and newest.id not in self._protected:
            self._protected.add(newest.id)  # an error is reported once: scrub tries again
            try:
                self.protect(newest, self.code, arena, stop, digests)
            except Cancelled:
                self._protected.discard(newest.id)
                raise

    def _examined(self, generation: Generation, arena: Arena, stop: Stop) -> tuple[list[Finding], list[str] | None]:
        """Read and mark one generation: what was found, and the digests of its cells where it is to get parity."""
        known, now = self._known, self._known.environment.monotonic_seconds
        begun = now()
        cells = self._cells(generation)
        also = cells.see if cells else _unseen
        findings = self._read(generation, arena, stop, also)  # guard: verify-before-mark  # gap: after_commit
        with known.lock:
            if generation.id not in known.survey.generations:
                raise Cancelled("the generation was deleted while it was read")
            self._marks.conclude(generation, findings)
        kind: EventKind = "verified" if not findings else "unfit" if intact(findings) else "damaged"
        known.emit(kind, generation.id, seconds=now() - begun, detail=restore.summary(findings))
        return findings, cells.digests if cells and not findings else None

    def _read(
        self, generation: Generation, arena: Arena, stop: Stop, also: Callable[[memoryview], None]
    ) -> list[Finding]:
        """All of a generation; with several ranks this rank's part, and what no other rank reports good in time.

        The coordinator waits for the posts of the others about as long as its own part has taken.
        """
        known, ranks, now = self._known, self._ranks, self._known.environment.monotonic_seconds
        if not isinstance(ranks, RankGroup):
            return read_all(known.tier, generation, arena, self._workers, stop, also=also)
        begun = now()
        findings = own_findings(
            known, ranks, generation, arena, self._workers, stop
        )  # guard: rank-zero-reads-own-files
        reported = self._reported_good(ranks, generation, max(now() - begun, LEAST_WAIT_SECONDS))
        good = {ranks.rank, *reported}
        rest = own_seals(ranks, generation, set(range(ranks.size)) - good)  # guard: only-unconfirmed-ranks-reread
        # guard: unconfirmed-ranks-read
        findings += read_all(known.tier, generation, arena, self._workers, stop, of=rest)
        return findings or disagreeing(known.tier, generation)

    def _reported_good(self, ranks: RankGroup, generation: Generation, timeout_seconds: float) -> list[int]:
        """The other ranks that have posted that their part is good, within the timeout."""
        now = self._known.environment.monotonic_seconds
        keys = {rank: post_key(ranks, generation, rank) for rank in range(1, ranks.size)}
        until = now() + timeout_seconds
        try:
            while not ranks.has(*keys.values()) and now() < until:
                self._known.environment.pause(POLL_SECONDS)
            good = [rank for rank, key in keys.items() if ranks.read(key)]
        except TierDown:
            return []  # the generation is no less good for that
        ranks.delete(list(keys.values()))
        return good

    def _cells(self, generation: Generation) -> parity.CellDigests | None:
        """What digests the cells of a generation while it is read; None without parity, or where they are unknown."""
        if self.code is None:
            return None
        try:
            manifest = commit.read_manifest(self._known.tier, generation)
        except Unreadable:
            raise
        except Damaged:
            return None  # the guard finds and reports it
        return parity.CellDigests(striping.grid(manifest.blobs, self.code.data, self.code.parity), manifest.digest)

    def protect(
        self, generation: Generation, code: Code, arena: Arena, stop: Stop, digests: list[str] | None = None
    ) -> None:
        """Give a verified generation its parity, where it is not whole.

        `digests`: of its cells, as they were just read. Raises Cancelled when `stop()`, and what prevented it.
        """
        tier = self._known.tier
        manifest = commit.read_manifest(tier, generation)  # guard: parity-only-of-verified-content
        if digests is None:
            if parity.whole(tier, generation, manifest, code, stop):  # guard: whole-parity-kept
                return
            cells = parity.CellDigests(striping.grid(manifest.blobs, code.data, code.parity), manifest.digest)
            if read_all(tier, generation, arena, self._workers, stop, also=cells.see):
                raise SumMismatch(f"{generation.id} was good a moment ago, and is not any more")
            digests = cells.digests
        parity.protect(tier, generation, manifest, code, digests, self._workers, stop)


def _problem(step: int, findings: list[Finding]) -> LastgoodError:
    what, safe = restore.summary(findings), "Older generations are kept; this one is marked and will not be restored."
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

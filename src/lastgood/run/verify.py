"""Verification: committed generations are read again past the page cache, marked, and protected by parity.

With several ranks each rank reads the files that it has written itself, and posts whether they are good. The
coordinator, which marks the generation, reads its own files and those of every rank that did not post in time that they
are good. Those that lie on other nodes it asks the ranks there to read; what they do not report as good in time it
reads itself. Then it asks the other ranks to write the parity of their files too (part_copies.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor

from ..coordination.rounds import RankGroup
from ..coordination.single_rank import AnyRanks
from ..engine import parity
from ..engine.arena import Arena
from ..engine.finite import exception
from ..errors import Cancelled, Damaged, LastgoodError, NotFinite, SumMismatch, TierDown, Unavailable, Unreadable
from ..events import EventKind
from ..format import commit, layout, parity_layout
from ..format.parity_layout import Grid
from ..io.reed_solomon import Code
from ..policy import restore
from ..policy.parts import divided
from ..ports import Stop, Tier, never
from ..records import Finding, Generation, GenerationId, Manifest, intact
from .agent_work import AgentWork
from .copying import Copying, Nobody, Others
from .known import KnownRun
from .marks import Marks
from .reader import disagreeing, read_all

LEAST_WAIT_SECONDS = 0.1
"""The coordinator waits at least so long for the posts of the other ranks."""
ELSEWHERE_WAIT_SECONDS = 5.0
"""Those that it has asked have twice the time that its own part took, and so long in addition."""
POLL_SECONDS = 0.01
"""The pause between two polls for these posts."""


def _ignore(_: memoryview) -> None:
    """Receives the bytes of a reading that nothing but the guard needs."""


def ranks_read_by(readers: Collection[int], ranks: AnyRanks, generation: Generation) -> list[int]:
    """The ranks that wrote a generation whose files the present ranks `readers` read."""
    parts = divided([one.rank for one in generation.commit.seals], [0] * ranks.size)
    return sorted(one for reader in readers for one in parts[reader])


def own_findings(
    known: KnownRun,
    ranks: AnyRanks,
    generation: Generation,
    arena: Arena,
    workers: Executor,
    stop: Stop = never,
    also: Callable[[memoryview], None] = _ignore,
    of: Collection[int] | None = None,
) -> list[Finding]:
    """Read the files that this rank has to read and return the findings. All ranks together read every file.

    `of`: the ranks that wrote them; None: as `ranks_read_by` divides them.
    """
    mine = ranks_read_by([ranks.rank], ranks, generation) if of is None else of
    return _read_files(known, generation, arena, workers, stop, also, mine)


def _read_files(
    known: KnownRun,
    generation: Generation,
    arena: Arena,
    workers: Executor,
    stop: Stop,
    also: Callable[[memoryview], None],
    of: Collection[int] | None,
) -> list[Finding]:
    """As `read_all`. The agent of memory reads, unless this process needs the bytes itself."""
    if also is _ignore:
        return known.agent.read_all(known.tier, generation, arena, workers, stop, of)
    return read_all(known.tier, generation, arena, workers, stop, also=also, of=of)


def post_key(ranks: RankGroup, generation: Generation, rank: int) -> str:
    """The key under which a rank posts whether its part of a generation is good."""
    return f"{ranks.name}/read/{generation.id}/{rank}"


class _Cells:
    """Computes the digests of the parity cells of some ranks' files, which are read rank by rank."""

    def __init__(self, manifests: Sequence[Manifest], code: Code) -> None:
        self._left = deque[tuple[Grid, parity.CellDigests]]()
        self.digests: dict[int, list[str]] = {}
        """rank -> the digests of its cells"""
        for one in manifests:
            grid = parity_layout.grid(one.blobs, code.data, code.parity)
            of_rank = parity.CellDigests(grid, one.digest)
            self.digests[one.rank] = of_rank.digests
            self._left.append((grid, of_rank))

    def see(self, data: memoryview) -> None:
        """Process the next bytes of the files, of one rank at a time."""
        while data and len(self._left[0][1].digests) == len(self._left[0][0].cells):
            self._left.popleft()
        self._left[0][1].see(data)


def protect_part(
    tier: Tier, generation: Generation, rank: int, code: Code, how: Copying, digests: list[str] | None = None
) -> None:
    """Write the parity of one rank's files of a verified generation, unless they have complete parity already.

    `digests`: those of its cells, from a reading that has just verified it; without them the files are read, by the
    agent of `how` if it can, which then writes the parity too.
    Raises Cancelled when `how.stop()` is true, SumMismatch if the files are not good any more, and the errors of
    reading and writing.
    """
    if digests is None and how.agent.protect(tier, generation, rank, code, how.stop):  # guard: parity-below-by-agent
        return
    manifest = commit.read_manifest(tier, generation, rank)  # guard: parity-only-of-verified-content
    if digests is None:
        if parity.complete(tier, generation, manifest, code, how.stop):  # guard: whole-parity-kept
            return
        cells = _Cells([manifest], code)
        if read_all(tier, generation, how.arena, how.workers, how.stop, also=cells.see, of=[rank]):
            raise SumMismatch(f"{generation.id} was verified, and does not read back any more")
        digests = cells.digests[rank]
    parity.protect(tier, generation, manifest, code, digests, how.workers, how.stop)


class Verifier:
    """Verifies the generations of one run, at the rank that commits.

    `workers`: the threads that read. `code`: the parity that each verified generation gets (None: no parity).
    """

    def __init__(self, known: KnownRun, marks: Marks, ranks: AnyRanks, workers: Executor, code: Code | None) -> None:
        self._known, self._marks, self._ranks, self._workers = known, marks, ranks, workers
        self.code = code
        self.others: Others = Nobody()
        """the other ranks, which write the parity of their files"""
        self.agent = AgentWork(None)
        """writes the parity of a place below memory"""
        self._protected: set[GenerationId] = set()

    def verify(self, arena: Arena, stop: Stop = never) -> None:
        """Read the newest unverified generation of the lineage again, past the page cache; mark it and point at it.

        A generation that is damaged or unfit is marked with the findings, and the next older unverified one is read; at
        the end Damaged or NotFinite is raised for the newest of them. A verified generation gets its parity. Raises
        Cancelled when `stop()` is true, and Unavailable or Unreadable if a generation cannot be read now, unless there
        is a finding about a newer one to raise.
        """
        problem: LastgoodError | None = None
        digests: dict[int, list[str]] | None = None
        for generation in self._known.lineage():
            if not generation.restorable:
                continue
            if generation.verified:
                break
            try:
                findings, digests = self._examined(generation, arena, stop)
            except (Cancelled, Unavailable, Unreadable):
                if problem:
                    break  # the finding about a newer generation is raised instead
                raise
            if not findings:
                break
            problem = problem or _problem(generation.step, findings)  # guard: verify-continues-past-damage
        if problem:  # guard: damage-raised-after-verify
            raise problem
        newest = self._known.newest_verified()
        # guard: parity-after-verify
        if self.code is not None and newest is not None and newest.id not in self._protected:
            self._protected.add(newest.id)  # tried and reported once for each generation; a scrub tries again
            try:
                self.protect(newest, self.code, arena, stop, digests)
            except Cancelled:
                self._protected.discard(newest.id)
                raise

    def _examined(
        self, generation: Generation, arena: Arena, stop: Stop
    ) -> tuple[list[Finding], dict[int, list[str]] | None]:
        """Read and mark one generation. Returns the findings, and the digests of its cells if it is to get parity."""
        known, now = self._known, self._known.environment.monotonic_seconds
        begun = now()
        cells = self._cells(generation)
        also = cells.see if cells else _ignore
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
        """Read a generation and return the findings.

        With several ranks, the coordinator reads its own part, and the parts that no other rank has reported as good in
        time. It waits for the reports of the others for about as long as its own part took. Ranks whose files lie on
        other nodes are asked first: through the store of the job their bytes would delay what every save waits for.
        """
        known, ranks, now = self._known, self._ranks, self._known.environment.monotonic_seconds
        if not isinstance(ranks, RankGroup):
            return _read_files(known, generation, arena, self._workers, stop, also, None)
        begun = now()
        # guard: rank-zero-reads-own-files
        findings = own_findings(known, ranks, generation, arena, self._workers, stop, also)
        seconds = now() - begun
        reported = self._reported_good(ranks, generation, max(seconds, LEAST_WAIT_SECONDS), stop)
        silent = set(range(ranks.size)) - {ranks.rank, *reported}  # guard: only-unconfirmed-ranks-reread
        rest = ranks_read_by(silent, ranks, generation)
        elsewhere = _elsewhere(known.tier, generation, rest)
        # guard: parts-elsewhere-read-there
        if elsewhere and self.others.confirm(generation, elsewhere, 2 * seconds + ELSEWHERE_WAIT_SECONDS, stop):
            rest = [one for one in rest if one not in elsewhere]
        # guard: unconfirmed-ranks-read
        findings += read_all(known.tier, generation, arena, self._workers, stop, of=rest)
        return findings or disagreeing(known.tier, generation)

    def _reported_good(
        self, ranks: RankGroup, generation: Generation, timeout_seconds: float, stop: Stop = never
    ) -> list[int]:
        """The other ranks that post in time that their part is good. Raises Cancelled once `stop()` is true."""
        now = self._known.environment.monotonic_seconds
        keys = {rank: post_key(ranks, generation, rank) for rank in range(1, ranks.size)}
        until = now() + timeout_seconds
        try:
            while not ranks.has(*keys.values()) and now() < until:
                if stop():
                    raise Cancelled("reading was paused")
                self._known.environment.pause(POLL_SECONDS)
            good = [rank for rank, key in keys.items() if ranks.read(key)]
        except TierDown:
            return []  # the store cannot be reached: the coordinator then reads every part itself
        ranks.delete(list(keys.values()))
        return good

    def _cells(self, generation: Generation) -> _Cells | None:
        """Computes the digests of the parity cells of this rank's files while they are read. None if the generation
        gets no parity, and if a manifest is damaged, so that its cells are unknown."""
        if self.code is None:
            return None
        try:
            listing = self._known.tier.list(layout.folder(generation.id))
            ranks = ranks_read_by([self._ranks.rank], self._ranks, generation)
            return _Cells(
                [commit.read_manifest(self._known.tier, generation, one, listing) for one in ranks], self.code
            )
        except Unreadable:
            raise
        except Damaged:
            return None  # the guard finds the damage too, and reports it

    def protect(
        self,
        generation: Generation,
        code: Code,
        arena: Arena,
        stop: Stop,
        digests: Mapping[int, list[str]] | None = None,
    ) -> None:
        """Write the parity of a verified generation, unless it has complete parity already. Each rank writes its own.

        `digests`: rank -> those of its cells, from a reading that has just verified it. Raises as `protect_part`, and
        the error of another rank.
        """
        mine = self.others.own_part(generation)
        self.others.ask(generation, "protect", f"{code.data}+{code.parity}")
        how = Copying(arena, self._workers, stop=stop, agent=self.agent)
        for one in generation.commit.seals:
            if mine is None or one.rank in mine:
                protect_part(self._known.tier, generation, one.rank, code, how, (digests or {}).get(one.rank))
        self.others.answers()


def _elsewhere(tier: Tier, generation: Generation, of: Collection[int]) -> list[int]:
    """The ranks of these that wrote files which do not lie on this node."""
    own: Tier | None = getattr(tier, "own", None)  # of NodeDisks, whose module needs this one
    if own is None or not of:
        return []
    listing = own.list(layout.folder(generation.id))
    here = {one.rank for one in generation.commit.seals if one.manifest in listing}  # it is sent last
    return [one for one in of if one not in here]


def _problem(step: int, findings: list[Finding]) -> LastgoodError:
    """The error that a verification raises for these findings."""
    what, safe = restore.summary(findings), "Older generations are kept; this one is marked and is not restored."
    if intact(findings):
        return NotFinite(
            f"step {step} is intact, and not good: {what}",
            safe=safe,
            todo=f"If these values are expected, save with {exception(*(one.tensor for one in findings[:3]))}; "
            f"restore(step={step}) loads this step on request. Otherwise go back with restore() if training does not "
            "recover. The findings are in UNFIT.json in its folder.",
        )
    return Damaged(
        f"step {step} was committed and does not read back: {what}",
        safe=safe,
        todo="Check the disk. The findings are in DAMAGED.json in its folder.",
    )

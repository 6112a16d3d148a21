"""Reading a run: the newest good generation, one tensor, one verification. Writes nothing; torch-free."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, cast

from ..engine import guard, read_file
from ..engine.arena import Arena
from ..engine.finite import exception
from ..engine.scatter import Scatter
from ..errors import (
    Cancelled,
    Damaged,
    HalfLoaded,
    LoadFailed,
    ManifestInvalid,
    NotFinite,
    NothingGood,
    Unreadable,
)
from ..format import commit, layout
from ..format.commit import Survey
from ..policy import reshard, restore
from ..policy.arguments import require
from ..ports import Tier
from ..records import LAYERS, Blob, Finding, Generation, GenerationId, Manifest, Verdict, intact
from .content import Content

WORKERS = 3
"""threads that write or read a run's bytes"""
BUFFERS = read_file.READS + 2
"""chunks in memory while a run is read: those that are being read, and one that is looked at and copied. Few, so that
they stay in the processor's cache from the digest to the copy"""

Fetch = Callable[[str], memoryview]
"""key of a piece -> its bytes, verified; valid until the next call"""
Loader = Callable[[Generation, list[Manifest]], None]


class Found(NamedTuple):
    """What a restore came to. `generation` is None when nothing was ever committed."""

    generation: Generation | None
    stepped_over: list[tuple[int, str]]
    misread: str = ""
    """what the first reading of this generation found, and the second did not: memory or cable, and not the files"""


def alone(attempt: Callable[[], None]) -> None:
    """Load in a world of one."""
    attempt()


def newest_good(
    tier: Tier,
    survey: Survey,
    step: int | None,
    load: Loader,
    examine: Callable[[Generation], list[Finding]] | None = None,
    mark: Callable[[Generation, list[Finding]], None] = lambda *_: None,
    mend: Callable[[Generation], bool] = lambda _: False,
    together: Callable[[Callable[[], None]], None] = alone,
) -> Found:
    """Try generations until one loads: of the lineage, newest first; or only `step`.

    `load` raises Damaged or NotFinite for what is not good. Then, where there is an `examine`, the generation is read
    again: with findings they are handed to `mark` and the next older one is tried; without any, the fault was not in
    the files, and it is loaded once more, as it is where `mend` says that it is whole again. What `load` has applied by
    then, an older one overwrites; where it would not, `load` raises HalfLoaded, and no older one is tried. LoadFailed
    is no fault of the files: it is raised at once. Raises NoSuchStep, Damaged (for an explicit step, or where intact
    files do not load the second time either), NothingGood (with what is wrong with each), Unavailable.
    """
    choice = restore.choose(survey, step)
    over = [(at.step, reason) for at, reason in choice.passed_over]
    unfit = _known_unfit(survey, [at for at, _ in choice.passed_over])

    def attempt(generation: Generation) -> None:
        together(lambda: load(generation, commit.read_manifests(tier, generation)))

    for at in choice.candidates:
        again, misread = False, ""
        try:
            if at in survey.broken:
                raise survey.broken[at]
            generation = survey.generations[at]
            try:
                attempt(generation)
            except LoadFailed:
                raise
            except (Damaged, NotFinite) as error:
                try:
                    findings = examine(generation) if examine else None
                    misread = str(error) if findings == [] else ""
                except Unreadable:
                    if not mend(generation):  # guard: mended-generation-retried
                        raise
                    findings = []
                if findings is not None and (findings == [] or (not intact(findings) and mend(generation))):
                    again = True
                    attempt(generation)
                else:
                    mark(generation, findings or [])
                    raise
            newer = [one for one in over if one[0] >= at.step]
            return Found(generation, sorted(newer, reverse=True), misread)
        except HalfLoaded:
            raise
        except (Damaged, NotFinite) as error:
            if isinstance(error, NotFinite):
                unfit[at.step] = [error.tensor]
            if again or (step is not None and at == choice.candidates[-1]):  # guard: next-older-after-damage
                raise
            over.append((at.step, str(error)))
    if not over:
        return Found(None, [])
    told = "\n".join(f"  step {at}: {reason}" for at, reason in sorted(over, reverse=True))
    raise NothingGood(
        f"no generation of this run is good:\n{told}",
        safe="\nNothing was loaded and nothing was deleted.",
        todo=_remedy(survey, {at for at, _ in over}, unfit),
    )


def _known_unfit(survey: Survey, passed_over: Sequence[GenerationId]) -> dict[int, list[str]]:
    """Step -> tensors that hold NaN or infinity, of generations that are marked so."""
    known = [survey.generations[at] for at in passed_over if at in survey.generations]
    return {one.step: [finding.tensor for finding in one.unfit[:3]] for one in known if one.unfit}


def _remedy(survey: Survey, over: set[int], unfit: Mapping[int, Sequence[str]]) -> str:
    """What may help where nothing is good. `over`: steps that were tried; `unfit`: tensors of intact steps."""
    if unfit:
        step = max(unfit)
        return (
            f"Step {step} is intact, and restore(step={step}) loads it by hand, as long as it is there. "
            f"If {', '.join(unfit[step])} may hold NaN or infinity, open the run with {exception(*unfit[step])}: "
            "saves are good from then on."
        )
    others = sorted({at.step for at in survey.generations} - over)
    if others:
        return f"Outside the lineage there is still: {', '.join(map(str, others))}; ask for it with restore(step=...)."
    return "Restore the files from a copy, or start over with restore(step=0)."


def _blobs(manifests: Sequence[Manifest]) -> list[Blob]:
    return [blob for manifest in manifests for blob in manifest.blobs]


def reading_bytes(manifests: Sequence[Manifest]) -> tuple[int, int]:
    """Memory in which a generation is read: all of it, and one buffer's."""
    blobs = _blobs(manifests)
    buffer = max(read_file.buffer_bytes(blobs), 1)
    return buffer * min(BUFFERS, sum(len(blob.chunks) for blob in blobs)), buffer


def headers_agree(tier: Tier, generation: Generation, manifests: Sequence[Manifest], arena: Arena) -> bool:
    """Whether each tensor file begins as its manifest says; little else is read. Raises Damaged or Unavailable."""
    home = layout.folder(generation.id)
    with borrowed(arena, read_file.buffer_bytes(_blobs(manifests))) as buffers:
        return all(read_file.headers_agree(tier, home, manifest, buffers[0]) for manifest in manifests)


def stream(
    tier: Tier,
    generation: Generation,
    manifest: Manifest,
    arena: Arena,
    workers: Executor,
    sink: read_file.Sink,
    *,
    unfit: Callable[[str], None] | None = None,
) -> None:
    """Hand every tensor of a rank to `sink`, verified, in one reading. Raises Damaged or Unavailable.

    `unfit` hears which tensors must be finite and are not.
    """
    with borrowed(arena, read_file.buffer_bytes(manifest.blobs)) as buffers:
        read_file.stream(tier, layout.folder(generation.id), manifest, buffers, workers, sink, unfit=unfit)


def opened(tier: Tier, generation: Generation, manifest: Manifest, arena: Arena, workers: Executor) -> Fetch:
    """All of a rank in memory, verified; hands out its tensors by name. Raises Damaged or Unavailable."""
    whole = _Whole(manifest)
    stream(tier, generation, manifest, arena, workers, whole)
    return whole.tensors.__getitem__


class _Whole:
    """`read_file.Sink` into memory of its own."""

    def __init__(self, manifest: Manifest) -> None:
        self.tensors = {piece.key: memoryview(bytearray(piece.extent.length)) for piece in manifest.pieces}

    def put(self, name: str, start: int, data: memoryview) -> None:
        self.tensors[name][start : start + len(data)] = data

    def done(self, name: str) -> None:
        """Nobody asks before everything is there."""


def scatter(
    tier: Tier,
    generation: Generation,
    manifests: Sequence[Manifest],
    arena: Arena,
    workers: Executor,
    into: Scatter,
    *,
    unfit: Callable[[str], None] | None = None,
    fresh: bool = True,
) -> None:
    """Hand what is wanted of a generation to where it belongs; chunks of which nobody wants anything are not read.

    Raises Damaged or Unavailable. `unfit` as in `stream`, `fresh` as in `read_file.stream`.
    """
    home = layout.folder(generation.id)
    with borrowed(arena, read_file.buffer_bytes(_blobs(manifests))) as buffers:
        for manifest in manifests:
            wanted = into.wanted(manifest.rank)
            if wanted:
                sink = into.sink(manifest.rank)
                read_file.stream(tier, home, manifest, buffers, workers, sink, unfit=unfit, wanted=wanted, fresh=fresh)
    into.end()


Reading = Generator[None, None, list[Finding]]
"""of a generation, chunk by chunk: it may be put aside before any, and taken up again; it keeps its memory meanwhile"""


def reading(
    tier: Tier,
    generation: Generation,
    arena: Arena,
    workers: Executor,
    layers: Collection[str] = LAYERS,
    also: Callable[[memoryview], None] = lambda _: None,
    of: Collection[int] | None = None,
) -> Reading:
    """What these layers of the guard find in a generation, read past the page cache; nothing in a good one.

    `also` sees the tensor files as they are read. `of`: those of these ranks, each by itself. Raises Unreadable and
    Unavailable where there is nothing to be found out now.
    """
    looking = guard.Examination(tier, generation, layers, also, of)
    manifests = looking.open()
    for manifest in manifests:
        for blob in manifest.blobs:
            yield from looking.read(manifest, blob, partial(borrowed, arena), workers)
    if of is None and len(manifests) > 1 and not looking.findings and "agreement" in layers:
        looking.findings += disagreeing(tier, generation, manifests)
    return looking.findings


def disagreeing(tier: Tier, generation: Generation, manifests: Sequence[Manifest] | None = None) -> list[Finding]:
    """What is wrong with the records of its ranks beside each other. Raises Unreadable, Unavailable."""
    try:
        manifests = commit.read_manifests(tier, generation) if manifests is None else manifests
        try:
            reshard.tensors(manifests)
        except ManifestInvalid as error:
            return [guard.finding(error, "agreement")]
    except Unreadable:
        raise
    except Damaged as error:
        return [guard.finding(error)]
    return []


def read_on(one: Reading, stop: Callable[[], bool]) -> list[Finding]:
    """To the end of a reading. Raises Cancelled when `stop()`: it stands where it was; and what a reading raises."""
    while not stop():  # guard: reading-can-be-cancelled
        try:
            next(one)
        except StopIteration as end:
            return cast(list[Finding], end.value)
    raise Cancelled("reading was put aside")


def read_all(
    tier: Tier,
    generation: Generation,
    arena: Arena,
    workers: Executor,
    stop: Callable[[], bool] = lambda: False,
    layers: Collection[str] = LAYERS,
    also: Callable[[memoryview], None] = lambda _: None,
    of: Collection[int] | None = None,
) -> list[Finding]:
    """A reading in one go. Raises Cancelled when `stop()`, and what a reading raises."""
    with contextlib.closing(reading(tier, generation, arena, workers, layers, also, of)) as one:
        return read_on(one, stop)


@contextlib.contextmanager
def borrowed(arena: Arena, need_bytes: int) -> Iterator[list[memoryview]]:
    """Read buffers of at least `need_bytes`: of an arena that is free, or fresh ones where its chunks are too small."""
    own = Arena(need_bytes * BUFFERS, need_bytes) if need_bytes > arena.chunk_bytes else arena
    count = min(BUFFERS, own.arena_bytes // own.chunk_bytes)
    leases = [lease for lease in (own.take() for _ in range(count)) if lease]
    try:
        yield [lease.buffer for lease in leases]
    finally:
        for lease in leases:
            lease.release()


class RunReader:
    """A run, for reading only. Every call looks anew, so it may be used beside a writer."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier

    def generations(self) -> list[Generation]:
        """Committed generations whose commit can be believed, ascending by step, abandoned ones included."""
        found = commit.survey(self.tier).generations
        return [found[at] for at in sorted(found)]

    def lineage(self) -> list[Generation]:
        """The generations that a restore would consider, newest first."""
        survey = commit.survey(self.tier)
        chain = restore.lineage(survey).chain
        return [survey.generations[at] for at in chain if at in survey.generations]

    def generation(self, step: int | None = None) -> Generation:
        """The generation of `step`, or the newest undamaged one of the lineage. Raises NoSuchStep, Damaged."""
        survey, at = self._first(step)
        if at in survey.broken:
            raise survey.broken[at]
        return survey.generations[at]

    def _first(self, step: int | None) -> tuple[Survey, GenerationId]:
        """What a restore (of `step`) would try first. Raises NoSuchStep."""
        survey = commit.survey(self.tier)
        candidates = restore.choose(survey, step).candidates
        if not candidates:
            raise restore.no_such_step(f"{self.tier.place} holds no generation that is good", survey)
        return survey, candidates[0]

    def manifest(self, generation: Generation, rank: int = 0) -> Manifest:
        """Pieces and values of a rank. Raises Damaged or Unavailable."""
        return commit.read_manifest(self.tier, generation, rank)

    def bytes_of(self, name: str, step: int | None = None) -> tuple[reshard.Tensor, bytearray]:
        """One tensor and its bytes, checked; nothing else is read. Raises NoSuchStep, NoSuchTensor, Damaged."""
        return self.content(step).tensor(name)

    def content(self, step: int | None = None) -> Content:
        """A generation as one state, whoever wrote it. Raises NoSuchStep, Damaged, Unavailable."""
        return Content(self.tier, self.generation(step))

    def verify(self, step: int | None = None, layers: Collection[str] = LAYERS) -> Verdict:
        """What the guard says of a generation, read past the page cache; default: the newest that a restore would try.

        `layers`: those of `records.LAYERS` that look, each by itself. Raises NoSuchStep, Unavailable; Refused for names
        of no layer, or none at all, which would find everything good.
        """
        require(
            not isinstance(layers, str) and bool(layers) and set(layers) <= set(LAYERS),
            f"layers={layers!r}",
            f"Give some of {', '.join(LAYERS)}.",
        )
        survey, at = self._first(step)
        if at in survey.broken:
            findings = [one for one in [guard.finding(survey.broken[at])] if one.layer in layers]
        else:
            with ThreadPoolExecutor(WORKERS, "lastgood-read") as workers:
                arena = Arena(3 * layout.CHUNK_BYTES, layout.CHUNK_BYTES)
                findings = read_all(self.tier, survey.generations[at], arena, workers, layers=layers)
        return Verdict(at=at, layers=[one for one in LAYERS if one in layers], findings=findings)

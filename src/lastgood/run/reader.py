"""Reading a run: the examination of a generation, and `RunReader`, which opens a run without a live state.

Writes nothing. Torch-free.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import cast

from ..engine import guard, read_file
from ..engine.arena import Arena
from ..errors import Cancelled, Damaged, ManifestInvalid, Unreadable
from ..format import commit, layout
from ..format.commit import Survey
from ..policy import reshard, restore
from ..policy.arguments import require
from ..ports import Tier
from ..records import LAYERS, Finding, Generation, GenerationId, Manifest, Verdict
from .content import Content

WORKERS = 3
"""threads that write or read the bytes of a run"""

Reading = Generator[None, None, list[Finding]]
"""An examination in progress. It pauses before each chunk, may be resumed later, and keeps its memory until then. It
returns the findings."""


def reading(
    tier: Tier,
    generation: Generation,
    arena: Arena,
    workers: Executor,
    layers: Collection[str] = LAYERS,
    also: Callable[[memoryview], None] = lambda _: None,
    of: Collection[int] | None = None,
) -> Reading:
    """Examine a generation, read past the page cache. Returns what these layers of the guard find.

    `also` is called with every byte of the tensor files, in the order in which they are read. `of`: the ranks whose
    files are read, each rank's by itself; None for all ranks and for how their records agree. Raises Unreadable and
    Unavailable where nothing can be found out now.
    """
    examination = guard.Examination(tier, generation, layers, also, of)
    manifests = examination.open()
    for manifest in manifests:
        for blob in manifest.blobs:
            yield from examination.read(manifest, blob, partial(read_file.borrowed, arena), workers)
    if of is None and len(manifests) > 1 and not examination.findings and "agreement" in layers:
        examination.findings += disagreeing(tier, generation, manifests)
    return examination.findings


def disagreeing(tier: Tier, generation: Generation, manifests: Sequence[Manifest] | None = None) -> list[Finding]:
    """How the manifests of a generation's ranks contradict each other. Raises Unreadable, Unavailable."""
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
    """Run an examination to its end, and return its findings. Raises what the examination raises.

    `stop` is polled before each chunk; once it is true, Cancelled is raised, and the examination can be resumed.
    """
    while not stop():  # guard: reading-can-be-cancelled
        try:
            next(one)
        except StopIteration as end:
            return cast(list[Finding], end.value)
    raise Cancelled("reading was paused")


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
    """Examine a generation without a pause; parameters as in `reading` and `read_on`, which say what is raised."""
    with contextlib.closing(reading(tier, generation, arena, workers, layers, also, of)) as one:
        return read_on(one, stop)


class RunReader:
    """A run that is open for reading only. Every call lists the run again, so it may be used beside a writer."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier

    def generations(self) -> list[Generation]:
        """Committed generations with a valid commit record, ascending by step, abandoned ones included."""
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
        """The run, and the generation that a restore (of `step`) would try first. Raises NoSuchStep."""
        survey = commit.survey(self.tier)
        candidates = restore.choose(survey, step).candidates
        if not candidates:
            raise restore.no_such_step(f"{self.tier.place} holds no generation that is good", survey)
        return survey, candidates[0]

    def manifest(self, generation: Generation, rank: int = 0) -> Manifest:
        """The pieces and values of one rank. Raises Damaged or Unavailable."""
        return commit.read_manifest(self.tier, generation, rank)

    def bytes_of(self, name: str, step: int | None = None) -> tuple[reshard.Tensor, bytearray]:
        """One tensor and its verified bytes; nothing else is read. Raises NoSuchStep, NoSuchTensor, Damaged."""
        return self.content(step).tensor(name)

    def content(self, step: int | None = None) -> Content:
        """A generation as one state, however many ranks wrote it. Raises NoSuchStep, Damaged, Unavailable."""
        return Content(self.tier, self.generation(step))

    def verify(self, step: int | None = None, layers: Collection[str] = LAYERS) -> Verdict:
        """Examine a generation, read past the page cache.

        `step`: default the newest generation that a restore would try. `layers`: which of `records.LAYERS` examine it,
        each independently of the others; default all. Raises NoSuchStep, Unavailable; Refused for unknown layers, and
        for no layer at all, which would find everything good.
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

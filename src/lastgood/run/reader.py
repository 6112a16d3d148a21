"""Reads a run: examinations of generations, and `RunReader`, which reads a run without a live state.

An examination reads files past the page cache and returns findings; a file that is damaged is a finding, while a disk
that does not answer is an exception. Writes nothing. Torch-free.
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
from ..format import commit
from ..format.commit import Survey
from ..limits import CHUNK_BYTES, EXAMINATION_CHUNKS, WORKERS
from ..policy import reshard, restore
from ..policy.arguments import require
from ..ports import Stop, Tier, never
from ..records import LAYERS, Finding, Generation, GenerationId, Manifest, Verdict
from .content import Content

Reading = Generator[None, None, list[Finding]]
"""An examination in progress: a generator that pauses before each chunk and at last returns the findings. While it is
paused it keeps its chunks of the arena; `close()` releases them."""


def reading(
    tier: Tier,
    generation: Generation,
    arena: Arena,
    workers: Executor,
    layers: Collection[str] = LAYERS,
    also: Callable[[memoryview], None] = lambda _: None,
    of: Collection[int] | None = None,
) -> Reading:
    """Read a generation past the page cache, and return the findings of these layers of the guard.

    `also`: called with all bytes of the tensor files, in the order in which they are read. `of`: the ranks whose files
    are read, each without regard to the others; None: all ranks, and whether their manifests agree. Raises Unreadable
    or Unavailable if the files cannot be read now, which is no finding.
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
    """Find out whether the manifests of a generation's ranks contradict each other. Returns at most one finding.

    `manifests` (None: they are read). Raises Unreadable, Unavailable.
    """
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


def read_on(one: Reading, stop: Stop) -> list[Finding]:
    """Run an examination to its end, and return its findings. Raises what the examination raises.

    `stop` is polled before each chunk. When it returns True, Cancelled is raised; the examination can be resumed later.
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
    stop: Stop = never,
    layers: Collection[str] = LAYERS,
    also: Callable[[memoryview], None] = lambda _: None,
    of: Collection[int] | None = None,
) -> list[Finding]:
    """Examine a generation in one go. Parameters and errors are those of `reading` and `read_on`."""
    with contextlib.closing(reading(tier, generation, arena, workers, layers, also, of)) as one:
        return read_on(one, stop)


class RunReader:
    """A run that is open for reading only. Each call lists the run again, so another process may write meanwhile."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier

    def generations(self) -> list[Generation]:
        """All generations with a valid commit record, in ascending order of steps, including abandoned ones."""
        found = self._survey().generations
        return [found[at] for at in sorted(found)]

    def lineage(self) -> list[Generation]:
        """The generations that a restore would consider, newest first."""
        survey = self._survey()
        chain = restore.lineage(survey).chain
        return [survey.generations[at] for at in chain if at in survey.generations]

    def generation(self, step: int | None = None) -> Generation:
        """The generation of `step`; by default the newest one that is not marked as damaged or unfit.

        Raises NoSuchStep, and Damaged if its commit record cannot be read.
        """
        survey, at = self._first(step)
        if at in survey.broken:
            raise survey.broken[at]
        return survey.generations[at]

    def _first(self, step: int | None) -> tuple[Survey, GenerationId]:
        """List the run. Returns the survey, and the generation that a restore would try first. Raises NoSuchStep, and
        the error of a newer one that cannot be read."""
        survey = self._survey()
        candidates = restore.choose(survey, step).candidates
        if not candidates:
            restore.require_read(survey)
            raise restore.no_such_step(f"{self.tier.place} holds no generation that is good", survey)
        return survey, candidates[0]

    def _survey(self) -> Survey:
        return commit.survey(self.tier)

    def _tier_of(self, at: GenerationId) -> Tier:
        """The place from which a generation is read."""
        return self.tier

    def manifest(self, generation: Generation, rank: int = 0) -> Manifest:
        """The pieces and values of one rank. Raises Damaged or Unavailable."""
        return commit.read_manifest(self._tier_of(generation.id), generation, rank)

    def bytes_of(self, name: str, step: int | None = None) -> tuple[reshard.Tensor, bytearray]:
        """Read one tensor and verify its bytes. Raises NoSuchStep, NoSuchTensor, Damaged, Unavailable."""
        return self.content(step).tensor(name)

    def content(self, step: int | None = None) -> Content:
        """The content of a generation as one state of all ranks. Raises NoSuchStep, Damaged, Unavailable."""
        generation = self.generation(step)
        return Content(self._tier_of(generation.id), generation)

    def verify(self, step: int | None = None, layers: Collection[str] = LAYERS) -> Verdict:
        """Read a generation past the page cache and return the findings.

        `step` (default: the generation that a restore would try first). `layers` (default: all): those of
        `records.LAYERS` that examine it, each independently of the others. Raises NoSuchStep, Unreadable, Unavailable;
        Refused for unknown layers, and for an empty choice, which would report everything as good.
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
                arena = Arena(EXAMINATION_CHUNKS * CHUNK_BYTES, CHUNK_BYTES)
                findings = read_all(self._tier_of(at), survey.generations[at], arena, workers, layers=layers)
        return Verdict(at=at, layers=[one for one in LAYERS if one in layers], findings=findings)

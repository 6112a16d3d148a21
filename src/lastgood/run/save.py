"""One save, from filled chunks to its commit, as every rank makes it. Decides nothing of what is saved, or when.

    chunks -> tensor files -> checks -> manifest -> seal        each rank, `write_part`
    all sealed -> COMMIT                                        the coordinator, `RunWriter.publish`

Invariants
  1. Nothing is committed before every file of every rank is durable, and every check has passed.
  2. What fails on one rank fails on all. Only after CommitUnknown may anything of a failed save exist.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from ..coordination.single_rank import AnyTopic, SingleTopic
from ..engine import write_file
from ..errors import CommitUnknown, LastgoodError, NameTaken, NoSpace, StepDiffers, TierDown
from ..format import commit, layout
from ..format.layout import Image
from ..ports import Tier
from ..records import Blob, Generation, GenerationId, Manifest, Piece, Record, Seal
from .known import KnownRun

Files = Iterable[tuple[Image, Iterator[write_file.Chunk]]]
"""tensor files, each with the chunks of which it consists"""


class ChunkStream(Protocol):
    """Filled chunks of all images of a save, in order. Whoever takes a chunk must release it."""

    def __iter__(self) -> Iterator[write_file.Chunk]: ...
    def __next__(self) -> write_file.Chunk: ...
    def finish(self) -> None:
        """Called once all chunks are taken and written. Raises what the source found out last, as TornSnapshot."""
        ...


class Check(Protocol):
    """What must hold of the written pieces before they are sealed."""

    def approve(self, pieces: Sequence[Piece]) -> Files:
        """Further files of this rank, where they are needed. Raises where the pieces must not be published."""
        ...


class NoCheck:
    """The pieces are published as they are."""

    def approve(self, pieces: Sequence[Piece]) -> Files:
        return ()


class ReadyChunks:
    """A `ChunkStream` of chunks whose source cannot fail after the last of them."""

    def __init__(self, chunks: Iterator[write_file.Chunk]) -> None:
        self._chunks = chunks

    def __iter__(self) -> Iterator[write_file.Chunk]:
        return self._chunks

    def __next__(self) -> write_file.Chunk:
        return next(self._chunks)

    def finish(self) -> None:
        """Nothing is left to be found out."""


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """What is to be saved under one generation id by one rank."""

    at: GenerationId
    images: Sequence[Image]
    """the tensor files, in the order of their chunks"""
    chunks: ChunkStream
    chunk_bytes: int = layout.CHUNK_BYTES
    aliases: Mapping[str, str] = field(default_factory=dict)
    """further name -> stored name of the same tensor"""
    values: Mapping[str, Any] = field(default_factory=dict)
    check: Check = field(default_factory=NoCheck)
    pinned: bool = False
    """whether it is wanted for itself: a newer commit does not stand in for it"""
    milestone: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class RankPart(Record, frozen=True, kw_only=True):
    """What a rank has made durable of a save."""

    seal: Seal
    bytes: int


@dataclass(frozen=True)
class RankWriter:
    """How one rank writes its part: where, as which rank, with which digest, on which threads."""

    tier: Tier
    rank: int
    algorithm: str
    writers: Executor


class Saving(Protocol):
    """A rank's opening of the run, as `save` uses it."""

    known: KnownRun

    def publish(
        self, at: GenerationId, parts: Sequence[RankPart], pinned: bool, milestone: bool, metrics: Mapping[str, float]
    ) -> Generation:
        """Commit what every rank has sealed. Only the coordinator is asked."""
        ...

    def take_up(self, generation: Generation) -> None:
        """Note what the coordinator has published."""
        ...

    def clear(self, at: GenerationId) -> None:
        """Remove what a failed save has left; raises nothing."""
        ...

    def make_room(self, needed_bytes: int) -> bool:
        """Delete what retention can spare, on a full disk. Returns whether something was deleted."""
        ...


def save(run: Saving, request: SaveRequest, by: RankWriter, topic: AnyTopic) -> Generation:
    """Bring an admitted generation into being; durable on return.

    `by` writes the part of this rank; under `topic` the ranks agree. Raises Overtaken where a newer generation of this
    incarnation was committed meanwhile, and retention does not want this one for itself. After an error other than
    CommitUnknown nothing of the save is left.
    """
    known, at, begun = run.known, request.at, run.known.environment.monotonic_seconds()
    with topic.failing(), known.lock:
        known.require_newest(at, request.pinned)
    try:
        if topic.is_retry:  # guard: retry-waits-for-first-try
            topic.agree(None, lambda _: None)  # now the coordinator has cleared away what the last try has left
        part = write_part(request, by, known, begun)
        generation = _committed(run, request, part, topic)
    except CommitUnknown as error:  # guard: unknown-commit-deletes-nothing
        topic.fail(error)
        with known.lock:
            # This step may exist: it is not written again.
            # guard: unknown-commit-takes-step
            known.note_tried(at)
        raise
    except BaseException as error:
        topic.fail(error)  # from here on no rank writes to it
        # What lies under a taken name is not of this save.
        # guard: taken-name-deletes-nothing
        if not isinstance(error, NameTaken):
            run.clear(at)
        if isinstance(error, NoSpace) and not isinstance(topic, SingleTopic):
            run.make_room(0)  # another rank had no space: this save is lost, and the next one finds some
        raise
    known.emit("durable", at, seconds=known.environment.monotonic_seconds() - begun, size=generation.bytes)
    return generation


def write_part(request: SaveRequest, by: RankWriter, known: KnownRun | None = None, begun: float = 0.0) -> RankPart:
    """Make the files and the manifest of one rank durable, and seal them; commits nothing.

    `known` emits "written", with the seconds since `begun`. On an error the file that is half written is removed; what
    was finished stays, and nothing refers to it.
    """
    blobs: list[Blob] = []
    pieces: list[Piece] = []

    def files() -> Iterator[tuple[Image, Iterator[write_file.Chunk]]]:
        yield from ((image, request.chunks) for image in request.images)
        seconds = known.environment.monotonic_seconds() - begun if known else 0.0
        request.chunks.finish()  # guard: copier-finished-before-commit
        further = request.check.approve(pieces)
        if known:
            known.emit("written", request.at, seconds, sum(image.length for image in request.images))
        yield from further

    for image, chunks in files():
        blob, its_pieces = write_file.write(
            by.tier,
            layout.folder(request.at),
            image,
            chunks,
            chunk_bytes=request.chunk_bytes,
            algorithm=by.algorithm,
            writers=by.writers,
        )
        blobs.append(blob)
        pieces += its_pieces
    at = request.at
    manifest = Manifest(
        format=layout.FORMAT,
        step=at.step,
        incarnation=at.incarnation,
        rank=by.rank,
        digest=by.algorithm,
        blobs=blobs,
        pieces=pieces,
        aliases=dict(request.aliases),
        values=dict(request.values),
    )
    seal = commit.seal(by.tier, manifest)
    return RankPart(seal=seal, bytes=seal.length + sum(blob.length for blob in blobs))


def _committed(run: Saving, request: SaveRequest, part: RankPart, topic: AnyTopic) -> Generation:
    """The generation that the coordinator publishes once every rank has sealed its part of it."""
    published: list[Generation] = []

    def decide(answers: list[tuple[str, Any]]) -> Any:
        if len({folder for folder, _ in answers}) > 1:  # guard: ranks-seal-one-generation
            raise StepDiffers(f"ranks have sealed {', '.join(sorted({folder for folder, _ in answers}))}")
        parts = [msgspec.convert(one, RankPart) for _, one in answers]
        published.append(run.publish(request.at, parts, request.pinned, request.milestone, request.metrics))
        return msgspec.to_builtins(published[0])

    try:
        mine = layout.folder(request.at), msgspec.to_builtins(part)
        generation = msgspec.convert(topic.agree(mine, decide), Generation)
    except TierDown:
        if not published:  # guard: published-survives-lost-store
            raise
        generation = published[0]  # it exists, although some rank cannot be told
    if not published:
        run.take_up(generation)
    return generation


def clear_failed(tier: Tier, at: GenerationId) -> None:
    """Remove a failed save. What cannot be removed now is litter without a COMMIT: the next opening removes it."""
    with contextlib.suppress(LastgoodError):  # guard: failed-save-cleared
        commit.retire(tier, at)

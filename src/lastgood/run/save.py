"""One save, from filled chunks to its commit, as every rank makes it. What is saved, and when, is decided elsewhere.

    chunks -> tensor files -> checks -> manifest -> seal        each rank, `write_part`
    the seals of all ranks -> COMMIT                            the coordinator, `RunWriter.publish`

Invariants
  1. A generation is committed only after every file of every rank is durable and every check has passed.
  2. A save that fails on one rank fails on all ranks. A failed save leaves no generation; only after CommitUnknown it
     is unknown whether the generation exists, and then no file of it is deleted. If the coordinator is lost before it
     has decided, or in the moment in which a save fails, a save in memory that all ranks have sealed is committed late
     (late_commit.py).
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
from ..limits import CHUNK_BYTES
from ..ports import Tier
from ..records import Blob, Generation, GenerationId, Manifest, Piece, Record, Seal
from .disk_space import is_full
from .known import KnownRun

Files = Iterable[tuple[Image, Iterator[write_file.Chunk]]]
"""Tensor files, each with the chunks of which it consists."""


class ChunkStream(Protocol):
    """Filled chunks of all images of a save, in order. The consumer owns each chunk and must `release()` it."""

    def __iter__(self) -> Iterator[write_file.Chunk]: ...
    def __next__(self) -> write_file.Chunk: ...
    def finish(self) -> None:
        """Wait for the source. Called once, after all chunks were written. Raises an error that the source detects only
        at its end, such as TornSnapshot."""
        ...


class Check(Protocol):
    """A condition that the written pieces must meet before they are sealed."""

    def approve(self, pieces: Sequence[Piece]) -> Files:
        """Return further files that this rank must write (usually none). Raises if the save must fail."""
        ...


class NoCheck:
    """A `Check` that every save passes."""

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
        """Return at once: the source has detected every error by now."""


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """What one rank saves under one generation id."""

    at: GenerationId
    images: Sequence[Image]
    """the tensor files, in the order in which `chunks` yields their bytes"""
    chunks: ChunkStream
    chunk_bytes: int = CHUNK_BYTES
    aliases: Mapping[str, str] = field(default_factory=dict)
    """further name of a tensor -> the name under which it is stored"""
    values: Mapping[str, Any] = field(default_factory=dict)
    check: Check = field(default_factory=NoCheck)
    pinned: bool = False
    """whether the save is completed even if a newer step is committed first; otherwise it then raises Overtaken"""
    milestone: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class RankPart(Record, frozen=True, kw_only=True):
    """The part of a save that one rank has made durable."""

    seal: Seal
    bytes: int
    """the length of the rank's tensor files and its manifest together"""


@dataclass(frozen=True)
class RankWriter:
    """How one rank writes its part of a save."""

    tier: Tier
    rank: int
    algorithm: str
    """of all digests (io/checksum.py)"""
    writers: Executor | None
    """the threads that digest and write chunks; None: the calling thread does it, piece by piece"""


class WritableRun(Protocol):
    """The methods of a run that is open for writing which `save` calls (`RunWriter`, `Follower`)."""

    known: KnownRun

    def intend(self, request: SaveRequest) -> None:
        """At the coordinator, for a save in memory: store what its COMMIT will say (format/intents.py)."""
        ...

    def withdraw(self, at: GenerationId) -> None:
        """Note that a save has failed, and delete what `intend` has stored. Raises nothing."""
        ...

    def publish(
        self, at: GenerationId, parts: Sequence[RankPart], pinned: bool, milestone: bool, metrics: Mapping[str, float]
    ) -> Generation:
        """Commit the parts that the ranks have sealed. Called at the coordinator only."""
        ...

    def note_published(self, generation: Generation) -> None:
        """Add a generation that the coordinator has committed to what this process knows of the run."""
        ...

    def clear(self, at: GenerationId) -> None:
        """Remove the files of a failed save. Raises nothing."""
        ...

    def doubt(self, at: GenerationId) -> None:
        """Note that it is unknown whether a generation was committed. Deletes nothing."""
        ...

    def make_room(self, needed_bytes: int) -> bool:
        """On a full disk, delete a generation that retention can spare. Returns whether something was deleted."""
        ...


def save(run: WritableRun, request: SaveRequest, writer: RankWriter, topic: AnyTopic) -> Generation:
    """Write and commit a generation whose id was admitted; it is durable on return. Every rank calls it.

    `writer` writes the part of this rank; through `topic` the ranks agree. Raises Overtaken if a newer generation of
    this incarnation was committed meanwhile and this save is not pinned. After an error the files of the save are
    removed, as far as they can be; but not after CommitUnknown, because the generation may exist, nor after NameTaken,
    because they belong to another save.
    """
    known, at, begun_seconds = run.known, request.at, run.known.environment.monotonic_seconds()
    try:
        with known.lock:
            known.require_newest(at, request.pinned)  # other ranks may have written their parts already
        if topic.is_retry:  # guard: retry-waits-for-first-try
            topic.agree(None, lambda _: None)  # the coordinator has now removed the files of the earlier attempt
        run.intend(request)
        part = write_part(request, writer, known, begun_seconds)
        generation = _committed(run, request, part, topic)
    except CommitUnknown as error:  # guard: unknown-commit-deletes-nothing
        topic.fail(error)
        with known.lock:
            # The generation may exist, so its step is not written again.
            # guard: unknown-commit-takes-step
            known.note_tried(at)
        run.doubt(at)
        raise
    except BaseException as error:
        run.withdraw(at)
        topic.fail(error)  # the coordinator returns once every rank has posted or timed out: none writes any more
        # If a name was taken, the files under it belong to another save.
        # guard: taken-name-deletes-nothing
        if not isinstance(error, NameTaken):
            run.clear(at)
        if isinstance(error, NoSpace) and not isinstance(topic, SingleTopic):
            run.make_room(0)  # another rank may be the one without space; this save fails, and the next one has room
        raise
    known.emit("durable", at, seconds=known.environment.monotonic_seconds() - begun_seconds, size=generation.bytes)
    return generation


def write_part(
    request: SaveRequest, writer: RankWriter, known: KnownRun | None = None, begun_seconds: float = 0.0
) -> RankPart:
    """Make the files and the manifest of one rank durable, and seal them. Commits nothing.

    `known`: emits "written" once the tensor files are written and checked (None: no event). `begun_seconds`: when the
    save began, on the monotonic clock of `known`. On an error the unfinished file is removed; finished files remain
    without a seal that names them, and the caller clears them away.
    """
    blobs: list[Blob] = []
    pieces: list[Piece] = []

    def files() -> Iterator[tuple[Image, Iterator[write_file.Chunk]]]:
        yield from ((image, request.chunks) for image in request.images)
        seconds = known.environment.monotonic_seconds() - begun_seconds if known else 0.0
        request.chunks.finish()  # guard: copier-finished-before-commit
        further = request.check.approve(pieces)
        if known:
            known.emit("written", request.at, seconds, sum(image.length for image in request.images))
        yield from further

    for image, chunks in files():
        blob, blob_pieces = write_file.write(
            writer.tier,
            layout.folder(request.at),
            image,
            chunks,
            chunk_bytes=request.chunk_bytes,
            algorithm=writer.algorithm,
            writers=writer.writers,
        )
        blobs.append(blob)
        pieces += blob_pieces
    return sealed_part(writer, request.at, blobs, pieces, request.aliases, request.values)


def sealed_part(
    writer: RankWriter,
    at: GenerationId,
    blobs: Sequence[Blob],
    pieces: Sequence[Piece],
    aliases: Mapping[str, str],
    values: Mapping[str, Any],
) -> RankPart:
    """Write the manifest of one rank, whose files are durable, and seal it. Raises as a save."""
    manifest = Manifest(
        format=layout.FORMAT,
        step=at.step,
        incarnation=at.incarnation,
        rank=writer.rank,
        digest=writer.algorithm,
        blobs=[*blobs],
        pieces=[*pieces],
        aliases=dict(aliases),
        values=dict(values),
    )
    seal = commit.seal(writer.tier, manifest)
    return RankPart(seal=seal, bytes=seal.length + sum(blob.length for blob in blobs))


def _committed(run: WritableRun, request: SaveRequest, part: RankPart, topic: AnyTopic) -> Generation:
    """Exchange the seals of all ranks; the coordinator commits. Returns the generation, on every rank."""
    published: list[Generation] = []
    doubted: list[CommitUnknown] = []

    def decide(answers: list[tuple[str, Any]]) -> Any:
        if len({folder for folder, _ in answers}) > 1:  # guard: ranks-seal-one-generation
            raise StepDiffers(f"ranks have sealed {', '.join(sorted({folder for folder, _ in answers}))}")
        parts = [msgspec.convert(one, RankPart) for _, one in answers]
        try:
            published.append(_published(run, request, parts))
        except CommitUnknown as error:
            doubted.append(error)
            raise
        except BaseException:
            run.withdraw(request.at)  # guard: failed-save-not-committed-late
            raise
        return msgspec.to_builtins(published[0])

    try:
        answer = layout.folder(request.at), msgspec.to_builtins(part)
        generation = msgspec.convert(topic.agree(answer, decide), Generation)
    except TierDown:
        if doubted:  # guard: doubt-survives-lost-store
            raise doubted[0] from None  # it may exist, although no verdict could be posted
        if not published:  # guard: published-survives-lost-store
            raise
        generation = published[0]  # it exists, although the other ranks may not have received it
    if not published:
        run.note_published(generation)
    return generation


def _published(run: WritableRun, request: SaveRequest, parts: Sequence[RankPart]) -> Generation:
    """Commit. On a full disk older generations are deleted, as for the files before."""
    while True:
        try:
            return run.publish(request.at, parts, request.pinned, request.milestone, request.metrics)
        except NoSpace as error:  # there is no COMMIT; its outcome is known
            if not (is_full(error) and run.make_room(0)):  # guard: full-disk-relieved-for-commit
                raise


def clear_failed(tier: Tier, at: GenerationId) -> None:
    """Remove the files of a failed save, as a committed generation is deleted.

    Raises nothing: without COMMIT and INTENT a file that remains has no effect, and the next opening removes it.
    """
    with contextlib.suppress(LastgoodError):  # guard: failed-save-cleared
        commit.retire(tier, at)

"""Saves and loads of states without torch, for experiments and tests: {name: bytes}, stored as uint8 tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from lastgood.coordination.single_rank import AnyTopic, SingleTopic
from lastgood.engine import read_file
from lastgood.engine.arena import Arena, Lease
from lastgood.engine.inline_executor import Inline
from lastgood.engine.write_file import filled
from lastgood.errors import Damaged, NotFinite
from lastgood.format import layout
from lastgood.format.commit import read_manifests, survey
from lastgood.io.checksum import Buffer
from lastgood.io.files import round_up
from lastgood.ports import Tier
from lastgood.records import Generation, GenerationId, Manifest
from lastgood.run.candidates import Candidates, Found
from lastgood.run.follower import Follower
from lastgood.run.save import RankPart, RankWriter, ReadyChunks, SaveRequest, write_part
from lastgood.run.save import save as save_as_rank
from lastgood.run.writer import RunWriter

State = dict[str, bytes]
ALGORITHM = "xxh3_128"


def save(
    run: RunWriter | Follower,
    step: int | GenerationId,
    state: Mapping[str, Buffer],
    *,
    tensors: Iterable[layout.Tensor] | None = None,
    chunk_bytes: int = 8192,
    meanwhile: Callable[[], object] = lambda: None,
    topic: AnyTopic | None = None,
    **options: Any,
) -> Generation:
    """Save a state as generation `step`: a number, or the id of a save that was admitted before.

    `tensors` describes the bytes if they are not uint8. Several ranks agree through `topic`. `meanwhile` is called
    after the first chunk was consumed. The other options are fields of `SaveRequest`.
    """
    tensors = tensors or (layout.Tensor(name, "uint8", (len(data),)) for name, data in state.items())
    images = layout.images(tensors, run.rank)
    arena = Arena(4 * chunk_bytes, chunk_bytes)

    def chunks() -> Iterator[Lease]:
        for count, lease in enumerate(lease for image in images for lease in filled(image, state, arena)):
            if count == 1:
                meanwhile()
            yield lease

    at, ready = run.admit(step) if isinstance(step, int) else step, ReadyChunks(chunks())
    request = SaveRequest(at=at, images=images, chunks=ready, chunk_bytes=arena.chunk_bytes, **options)
    if isinstance(run, RunWriter):
        return run.save(request, topic)
    return save_as_rank(run, request, run.rank_writer(Inline()), topic or SingleTopic())


def share(tier: Tier, at: GenerationId, rank: int, state: Mapping[str, Buffer], *, chunk_bytes: int = 8192) -> RankPart:
    """Write the part of a rank that does not commit; returns the rank part that it posts to rank 0."""
    images = layout.images((layout.Tensor(name, "uint8", (len(data),)) for name, data in state.items()), rank)
    arena = Arena(4 * chunk_bytes, chunk_bytes)
    chunks = (lease for image in images for lease in filled(image, state, arena))
    request = SaveRequest(at=at, images=images, chunks=ReadyChunks(chunks), chunk_bytes=arena.chunk_bytes)
    return write_part(request, RankWriter(tier, rank, ALGORITHM, Inline()))


def load(tier: Tier, step: int | None = None, workers: Executor | None = None) -> tuple[Found, State]:
    """Load the generation that a restore of `step` (None: the newest) would load. Raises the errors of a restore."""
    pool = workers or ThreadPoolExecutor(2)
    try:
        return load_first(Candidates(survey(tier), step), lambda generation: tier, pool)
    finally:
        if workers is None:
            pool.shutdown()


def load_first(
    candidates: Candidates, place_of: Callable[[Generation], Tier], workers: Executor
) -> tuple[Found, State]:
    """Load the first candidate that is good, each from the place that `place_of` returns."""
    for generation in candidates:
        try:
            return candidates.found(generation), bytes_of(place_of(generation), generation, workers)
        except (Damaged, NotFinite) as error:
            candidates.failed(error)
    return candidates.found(None), {}


def bytes_of(tier: Tier, generation: Generation, pool: Executor) -> State:
    """Read the bytes of every tensor of a generation, of all ranks."""
    state: State = {}
    for manifest in read_manifests(tier, generation):
        size = sum(round_up(blob.length, blob.chunk_bytes) for blob in manifest.blobs)
        arena = Arena(size, max(blob.chunk_bytes for blob in manifest.blobs))
        found = read_rank(tier, generation, manifest, arena, pool)
        state.update({piece.name: bytes(found[piece.name]) for piece in manifest.pieces})
    return state


def read_rank(
    tier: Tier, generation: Generation, manifest: Manifest, arena: Arena, workers: Executor
) -> dict[str, memoryview]:
    """Read all pieces of one rank into new memory and verify them. Returns key of the piece -> its bytes.

    Raises Damaged or Unavailable.
    """
    whole = _NewMemory(manifest)
    with read_file.borrowed(arena, read_file.buffer_bytes(manifest.blobs)) as buffers:
        read_file.stream(read_file.RankFiles(tier, layout.folder(generation.id), manifest), buffers, workers, whole)
    return whole.tensors


class _NewMemory:
    """`read_file.Sink` that puts each piece into an array of its own."""

    def __init__(self, manifest: Manifest) -> None:
        self.tensors = {piece.key: memoryview(bytearray(piece.extent.length)) for piece in manifest.pieces}

    def put(self, name: str, start: int, data: memoryview) -> None:
        self.tensors[name][start : start + len(data)] = data

    def window(self, name: str, start: int, length: int) -> memoryview | None:
        return self.tensors[name][start : start + length]

    def done(self, name: str) -> None:
        """The memory is used only once everything has been put."""

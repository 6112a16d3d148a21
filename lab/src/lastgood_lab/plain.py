"""Torch-free saves and loads: a state is {name: bytes}, each stored as a uint8 tensor. For experiments and tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from lastgood.engine.arena import Arena, Lease
from lastgood.engine.inline_executor import Inline
from lastgood.format import layout
from lastgood.format.commit import survey
from lastgood.io.checksum import Buffer
from lastgood.io.files import round_up
from lastgood.ports import Tier
from lastgood.records import Generation, GenerationId, Manifest
from lastgood.run import rank_part, reader
from lastgood.run.rank_part import Share
from lastgood.run.writer import RunWriter

State = dict[str, bytes]
ALGORITHM = "xxh3_128"


def filled(image: layout.Image, state: Mapping[str, Buffer], arena: Arena) -> Iterator[Lease]:
    for parts in layout.segments(image, arena.chunk_bytes):
        lease = arena.take()
        assert lease is not None
        for place, start, at, length in parts:
            data = image.header if place < 0 else state[image.tensors[place][0].name]
            lease.buffer[at : at + length] = data[start : start + length]
        yield lease


def save(
    run: RunWriter,
    step: int,
    state: Mapping[str, Buffer],
    *,
    tensors: Iterable[layout.Tensor] | None = None,
    chunk_bytes: int = 8192,
    meanwhile: Callable[[], object] = lambda: None,
    **options: Any,
) -> Generation:
    """`tensors`: what the bytes are, if not uint8. `meanwhile` is done when the first chunk has been taken."""
    tensors = tensors or (layout.Tensor(name, "uint8", (len(data),)) for name, data in state.items())
    images = layout.images(tensors, run.rank)
    arena = Arena(4 * chunk_bytes, chunk_bytes)

    def chunks() -> Iterator[Lease]:
        for count, lease in enumerate(lease for image in images for lease in filled(image, state, arena)):
            if count == 1:
                meanwhile()
            yield lease

    options = {"aliases": {}, "values": {}, **options}
    return run.save(run.admit(step), images, chunks(), chunk_bytes=arena.chunk_bytes, **options)


def share(tier: Tier, at: GenerationId, rank: int, state: Mapping[str, Buffer], *, chunk_bytes: int = 8192) -> Share:
    """What `rank`, which does not commit, makes durable of a save."""
    images = layout.images((layout.Tensor(name, "uint8", (len(data),)) for name, data in state.items()), rank)
    arena = Arena(4 * chunk_bytes, chunk_bytes)
    chunks = (lease for image in images for lease in filled(image, state, arena))
    return rank_part.share(
        tier, at, rank, images, chunks, chunk_bytes=chunk_bytes, algorithm=ALGORITHM, aliases={}, values={},
        writers=Inline(),
    )  # fmt: skip


def load(tier: Tier, step: int | None = None, workers: Executor | None = None) -> tuple[reader.Found, State]:
    """What a restore finds, and the bytes it would load. Raises what a restore raises."""
    state: State = {}

    def take(generation: Generation, manifests: list[Manifest]) -> None:
        state.clear()
        for manifest in manifests:
            size = sum(round_up(blob.length, blob.chunk_bytes) for blob in manifest.blobs)
            arena = Arena(size, max(blob.chunk_bytes for blob in manifest.blobs))
            fetch = reader.opened(tier, generation, manifest, arena, pool)
            state.update({piece.name: bytes(fetch(piece.name)) for piece in manifest.pieces})

    pool = workers or ThreadPoolExecutor(2)
    try:
        return reader.newest_good(tier, survey(tier), step, take), state
    finally:
        if workers is None:
            pool.shutdown()

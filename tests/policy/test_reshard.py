"""Boxes: pieces of any sharding fill any other sharding; each element is filled once and from its own place."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgood.engine.scatter import Scatter, Target
from lastgood.errors import ManifestInvalid
from lastgood.format.boxes import Box, contiguous_range, everything, overlap
from lastgood.policy import reshard
from lastgood.policy.reshard import Held, shares
from lastgood.records import Extent, Manifest, Piece

shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


@st.composite
def cut(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A tensor partitioned into boxes by splitting one of the boxes repeatedly."""
    boxes = [everything(shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        along = draw(st.integers(0, len(shape) - 1))
        if box.shape[along] < 2:
            boxes.append(box)
            continue
        at = draw(st.integers(1, box.shape[along] - 1))
        first, second = list(box.shape), list(box.shape)
        first[along], second[along] = at, box.shape[along] - at
        offsets = list(box.offsets)
        offsets[along] += at
        boxes += [Box(box.offsets, tuple(first)), Box(tuple(offsets), tuple(second))]
    return boxes


@st.composite
def two_cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box], list[Box]]:
    shape = draw(shapes)
    return shape, draw(cut(shape)), draw(cut(shape))


def piece(name: str, box: Box, whole: tuple[int, ...], own: bool = False) -> Piece:
    part = box != everything(whole)
    extent = Extent(blob="r00000.safetensors", offset=4096, length=4 * box.elements)
    return Piece(
        name=name,
        dtype="float32",
        shape=list(box.shape),
        extent=extent,
        digest="",
        offsets=list(box.offsets) if part else [],
        whole=list(whole) if part else [],
        own=own,
    )


def manifest(rank: int, *pieces: Piece, aliases: dict[str, str] | None = None) -> Manifest:
    of: dict[str, Any] = {"step": 1, "incarnation": "0a0a0a0a", "digest": "xxh3_128", "blobs": [], "values": {}}
    return Manifest(format=1, rank=rank, pieces=list(pieces), aliases=aliases or {}, **of)


def slices(outer: Box, box: Box) -> tuple[slice, ...]:
    starts = [start - begin for start, begin in zip(box.offsets, outer.offsets, strict=True)]
    return tuple(slice(start, start + size) for start, size in zip(starts, box.shape, strict=True))


class Memory:
    """`scatter.Targets` in arrays of their own. `open`: whether a reader may write to them directly."""

    def __init__(self, boxes: dict[str, Box], open_to_all: bool) -> None:
        self.boxes, self._open = boxes, open_to_all
        self.arrays = {name: np.full(4 * box.elements, 255, np.uint8) for name, box in boxes.items()}
        self.done_with: list[str] = []

    def put(self, name: str, start: int, data: memoryview) -> None:
        self.arrays[name][start : start + len(data)] = np.frombuffer(data, np.uint8)

    def window(self, name: str, start: int, length: int) -> memoryview | None:
        return self.arrays[name].data[start : start + length] if self._open else None

    def windows(self, name: str) -> list[np.ndarray] | None:
        return [self.arrays[name]] if self._open else None

    def done(self, name: str) -> None:
        self.done_with.append(name)

    def read(self, name: str) -> np.ndarray:
        return self.arrays[name].view(np.float32).reshape(self.boxes[name].shape)


@given(two_cuts(), st.booleans(), st.integers(1, 40))
def test_any_sharding_restores_into_any_other_exactly_in_any_parts(cuts, open_to_all, step):
    shape, stored, wanted = cuts
    whole = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    manifests = [manifest(rank, piece("w", box, shape)) for rank, box in enumerate(stored)]
    tensor = reshard.tensors(manifests)["w"]
    boxes = {f"t{number}": box for number, box in enumerate(wanted)}
    memory = Memory(boxes, open_to_all)
    plan = [(Target(name, "float32", box), reshard.parts(tensor, box, 0)) for name, box in boxes.items()]
    scatter = Scatter(plan, memory)
    for one in tensor.stored:
        data = np.ascontiguousarray(whole[slices(everything(shape), one.box)]).reshape(-1).view(np.uint8)
        sink = scatter.sink(one.rank)
        for start in range(0, len(data), step):
            part = data[start : start + step]
            window = sink.window(one.piece.key, start, len(part))
            if window is None:
                sink.put(one.piece.key, start, part.data)
            else:
                window[:] = part.data
        sink.done(one.piece.key)
    scatter.end()
    for name, box in boxes.items():
        assert np.array_equal(memory.read(name), whole[slices(everything(shape), box)])
    assert sorted(memory.done_with) == sorted(boxes)


@given(two_cuts())
def test_the_parts_of_a_target_cover_each_element_once(cuts):
    shape, stored, wanted = cuts
    manifests = [manifest(rank, piece("w", box, shape)) for rank, box in enumerate(stored)]
    tensor = reshard.tensors(manifests)["w"]
    for target in wanted:
        count = np.zeros(target.shape, int)
        for part in reshard.parts(tensor, target, 0):
            count[slices(target, part.box)] += 1
        assert (count == 1).all()


@given(two_cuts())
def test_a_byte_range_matches_row_major_memory(cuts):
    shape, outers, inners = cuts
    order = np.arange(math.prod(shape)).reshape(shape)
    for outer, inner in itertools.product(outers, inners):
        part = overlap(outer, inner)
        if part is None:
            continue
        places = np.arange(outer.elements).reshape(outer.shape)[slices(outer, part)].reshape(-1)
        run = contiguous_range(outer, part)
        assert (run is not None) == (list(places) == list(range(places[0], places[0] + len(places))))
        if run is not None:
            assert run == (places[0], len(places))
        assert order[slices(everything(shape), part)].size == part.elements


def test_a_rank_restores_its_own_values_and_otherwise_the_shared_ones():
    shape = (4,)
    shared, own = piece("w", everything(shape), shape), piece("w", everything(shape), shape, own=True)
    tensor = reshard.tensors([manifest(0, shared), manifest(1, own)])["w"]
    ranks = [[part.stored.rank for part in reshard.parts(tensor, everything(shape), rank)] for rank in (0, 1, 2)]
    assert ranks == [[0], [1], [0]]


HALF, REST = Box((0,), (2,)), Box((2,), (2,))
MISFITS = {
    "a hole": ([piece("w", HALF, (4,))], "leave a hole"),
    "nothing but a rank's own": ([piece("w", everything((4,)), (4,), own=True)], "leave a hole"),
    "an overlap": ([piece("w", HALF, (4,)), piece("w", Box((1,), (3,)), (4,))], "stored twice"),
    "all of it twice": ([piece("w", everything((4,)), (4,))] * 2, "stored twice"),
    "two shapes": ([piece("w", HALF, (4,)), piece("w", REST, (5,))], "two dtypes or shapes"),
    "its own of no piece": (
        [piece("w", HALF, (4,)), piece("w", REST, (4,)), piece("w", Box((1,), (2,)), (4,), own=True)],
        "is no piece",
    ),
}


@pytest.mark.parametrize("case", MISFITS.values(), ids=MISFITS.keys())
def test_contradictory_manifests_are_refused(case):
    pieces, why = case
    with pytest.raises(ManifestInvalid, match=why):
        reshard.tensors([manifest(rank, one) for rank, one in enumerate(pieces)])


def test_only_an_alias_without_a_tensor_on_any_rank_is_refused():
    one = piece("w", everything((4,)), (4,))
    reshard.tensors([manifest(0, one), manifest(1, aliases={"tied": "w"})])
    with pytest.raises(ManifestInvalid, match="alias"):
        reshard.tensors([manifest(0, one), manifest(1, aliases={"tied": "v"})])


held_lists = st.lists(
    st.tuples(st.integers(0, 500), st.sampled_from([1, 17, 1024, 4096])).map(lambda shape: everything(shape)),
    min_size=1,
    max_size=12,
).map(lambda boxes: [Held(f"t{number}", box, 4) for number, box in enumerate(boxes)])


@given(held_lists, st.integers(1, 9))
def test_replicated_pieces_are_written_exactly_once(held, ways):
    found = shares(held, ways)
    assert len(found) == ways
    for one in held:
        rows = [part.box for turn in found for part in turn if part.name == one.name]
        assert sum(box.elements for box in rows) == one.box.elements and rows
        assert not any(overlap(*pair) for pair in itertools.combinations(rows, 2))


@given(st.integers(2, 64), st.integers(1, 40))
def test_holders_write_similar_numbers_of_bytes_where_tensors_split(ways, count):
    held = [Held(f"t{number}", everything((256, 16 * (1 + number % 5))), 4) for number in range(count)]
    held.append(Held("embedding", everything((50_000, 64)), 4))
    written = [sum(part.bytes for part in turn) for turn in shares(held, ways)]
    assert max(written) <= 1.2 * sum(written) / ways


def test_one_holder_writes_all_scalars():
    """Each of the scalars of AdamW, such as the steps of the parameters, was written by another rank. So a rank that
    restored its own shards read a chunk of 8 MiB for each of them from other nodes, which had lost nothing."""
    scalars = [Held(f"step {number}", everything(()), 4) for number in range(40)]
    first, *others = shares([*scalars[:20], Held("w", everything((256, 1024)), 4), *scalars[20:]], 8)
    assert [one.name for one in first if one.name != "w"] == [one.name for one in scalars]
    assert all(one.name == "w" for turn in others for one in turn) and all(others)

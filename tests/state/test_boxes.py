"""Which box of a DTensor a rank holds: as torch computes it, without an index for each element of a dimension."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from lastgood.format.boxes import Box
from lastgood.state.dtensor import box_of

torch_utils = pytest.importorskip("torch.distributed.tensor._utils")


def dtensor(shape: list[int], mesh: list[int], own: list[int], placements: list[Any]) -> Any:
    """What `box_of` asks of a DTensor."""
    device_mesh = SimpleNamespace(size=mesh.__getitem__, get_coordinate=lambda: own)
    return SimpleNamespace(shape=shape, ndim=len(shape), placements=placements, device_mesh=device_mesh)


@st.composite
def layouts(draw: Any) -> tuple[list[int], list[int], list[int], list[Any]]:
    shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    own = [draw(st.integers(0, size - 1)) for size in mesh]
    kinds = st.one_of(st.just(Replicate()), st.integers(0, len(shape) - 1).map(Shard))
    return shape, mesh, own, [draw(kinds) for _ in mesh]


@given(layouts())
def test_a_box_is_the_one_that_torch_computes(layout) -> None:
    shape, mesh, own, placements = layout
    sizes, offsets = torch_utils._compute_local_shape_and_global_offset(tuple(shape), tuple(mesh), own, placements)
    assert box_of(dtensor(shape, mesh, own, placements), "w") == Box(tuple(offsets), tuple(sizes))


def test_the_box_of_a_long_tensor_needs_no_list_of_its_elements() -> None:
    """A flat tensor of 10^15 elements: a list of their indices would fit into no machine."""
    assert box_of(dtensor([10**15], [2], [1], [Shard(0)]), "w") == Box((5 * 10**14,), (5 * 10**14,))

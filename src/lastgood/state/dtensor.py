"""DTensors: which box of each this process holds, and which ranks hold the same. Only this module knows DTensor.

Reads metadata and local memory; moves no data, and calls no collective.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..format.boxes import Box
from ..format.values import join, refusal


class Sharded(NamedTuple):
    """How one tensor is sharded: which box of it this process holds, and which ranks hold the same box."""

    box: Box
    shape: tuple[int, ...]
    """shape of the whole tensor"""
    holders: tuple[int, ...]
    """the ranks that hold the same box, ascending"""
    mesh: tuple[int, ...]
    """all ranks of its device mesh; ranks of another mesh may hold the same tensor too"""


class Shards:
    """A cache of `sharded`, by the DTensorSpec of a tensor, so that only new specs are examined."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Sharded]] = {}

    def localized(self, names: Sequence[str], found: list[torch.Tensor]) -> dict[str, Sharded]:
        """Replace each DTensor in `found` by the memory that this process holds. Returns name -> how it is sharded."""
        module = sys.modules.get("torch.distributed.tensor")
        if module is None or module.DTensor not in set(map(type, found)):
            return {}
        described: dict[str, Sharded] = {}
        known: dict[int, tuple[Any, Sharded]] = {}
        for index, one in enumerate(found):
            if isinstance(one, module.DTensor):
                spec = one._spec
                entry = self._known.get(id(spec))
                if entry is None:
                    entry = spec, sharded(one, names[index])
                known[id(spec)] = entry
                described[names[index]], found[index] = entry[1], local(one)
        self._known = known
        return described


def are_possible() -> bool:
    """Whether this process can have made a DTensor."""
    return "torch.distributed.tensor" in sys.modules


def below(tree: Any, path: str) -> dict[str, torch.Tensor]:
    """Every DTensor in nested dicts, lists and tuples, by its name."""
    if is_sharded(tree):
        return {path: tree}
    if isinstance(tree, dict):
        parts = [(join(path, key), item) for key, item in tree.items()]
    else:
        parts = (
            [(f"{path}.{index}", item) for index, item in enumerate(tree)] if isinstance(tree, (list, tuple)) else []
        )
    return {name: one for part, item in parts for name, one in below(item, part).items()}


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor, of which each process of a device mesh holds a part."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Any) -> torch.Tensor:
    """The memory of a DTensor that this process holds; any other tensor unchanged."""
    if not is_sharded(tensor):
        return tensor  # type: ignore[no-any-return]
    with torch.no_grad():
        return tensor._local_tensor.detach()  # type: ignore[no-any-return]


def sharded(tensor: Any, path: str) -> Sharded:
    """How a DTensor is sharded. Raises Unstorable for one with partial placements, whose sum is pending."""
    mesh = tuple(int(rank) for rank in tensor.device_mesh.mesh.reshape(-1))
    return Sharded(box_of(tensor, path), tuple(tensor.shape), holders(tensor), mesh)


def box_of(tensor: Any, path: str) -> Box:
    """Which box of a DTensor this process holds. Raises Unstorable for one with partial placements."""
    if any(one.is_partial() for one in tensor.placements):
        raise refusal(
            path, f"has a sum over ranks that is still pending: {tensor.placements}", "Call full_tensor() first"
        )
    from torch.distributed.tensor import Replicate, Shard

    own = tensor.device_mesh.get_coordinate()
    if own is not None and {type(one) for one in tensor.placements} <= {Shard, Replicate}:
        return _box_in_chunks(tensor, own)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Box(tuple(offsets), tuple(shape))


def _box_in_chunks(tensor: Any, own: Sequence[int]) -> Box:
    """The box of a DTensor that is divided as by torch.chunk. `own`: the coordinate of this process in the mesh.

    As torch computes it, without a list of all indices along the dimension: of a flat tensor of 745 MB that list took
    another 745 MB and seconds at each capture (torch 2.13).
    """
    shape, offsets = list(tensor.shape), [0] * tensor.ndim
    for at, (placement, coordinate) in enumerate(zip(tensor.placements, own, strict=True)):
        if placement.is_replicate():
            continue
        size, parts = shape[placement.dim], tensor.device_mesh.size(at)
        chunk = -(-size // parts)
        start = min(size, chunk * coordinate)
        shape[placement.dim] = min(size, start + chunk) - start
        offsets[placement.dim] += start
        if not shape[placement.dim]:
            offsets[placement.dim] = tensor.shape[placement.dim]
    return Box(tuple(offsets), tuple(shape))


def holders(tensor: Any) -> tuple[int, ...]:
    """The ranks that hold the same box of a DTensor, ascending; empty on a rank outside of its mesh."""
    mesh, own = tensor.device_mesh.mesh, tensor.device_mesh.get_coordinate()
    if own is None:
        return ()
    at: Sequence[Any] = [
        slice(None) if one.is_replicate() else coordinate
        for one, coordinate in zip(tensor.placements, own, strict=True)
    ]
    return tuple(sorted(int(rank) for rank in mesh[tuple(at)].reshape(-1)))


def like(memory: torch.Tensor, other: Any, stride: tuple[int, ...]) -> torch.Tensor:
    """A DTensor that is sharded as `other`, with `memory` as its local part. `stride`: of the whole tensor."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        memory, other.device_mesh, other.placements, run_check=False, shape=other.shape, stride=stride
    )

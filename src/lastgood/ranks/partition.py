"""Partition: which parts of a captured state this rank writes, and which parts other ranks write for it. Moves no data.

Invariants
  1. Every rank computes the partition by itself, from its own state and from which ranks hold which tensor
     (ranks/replica_check.py). All holders of the same boxes compute the same partition of them.
  2. A box that several ranks hold is written by one of them; each of these ranks writes about the same number of bytes
     (policy/reshard.py). The others digest their copy of it, and the replica check compares the digests.
  3. Each holder writes the state of random number generators, and tensors that the replica check found to differ. The
     first of the holders stores them like any other tensor, the others as content of their own (`Piece.own`).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..format.boxes import Box, everything
from ..format.layout import Tensor
from ..policy.reshard import Held, shares
from ..state.capture import Captured
from ..state.dtensor import Sharded
from ..state.saved_size import beside_bytes, tensor_bytes
from ..state.tensors import dtype_name


@dataclass(frozen=True)
class Item:
    """A part of a tensor that this process holds: how it is stored, and where its bytes are in memory."""

    tensor: Tensor
    name: str
    """the captured tensor that it is a part of"""
    rows: tuple[int, int] | None
    """first row and row after the last in the memory of this process; None for all of it"""

    def view(self, captured: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The part itself, as a view of the captured tensor."""
        one = captured[self.name]
        return one if self.rows is None else one[self.rows[0] : self.rows[1]]


@dataclass(frozen=True)
class Partition:
    """Which rank writes what, as one rank sees it."""

    mine: list[Item]
    """what this rank writes"""
    witnessed: dict[tuple[int, ...], list[Item]]
    """ranks that hold the same boxes, this one among them -> what the other ones write; this rank digests its copy"""
    shared: dict[tuple[int, ...], list[str]]
    """ranks that hold the same boxes -> all that is written of them, by whichever rank: `Tensor.key` of each part. The
    list is the same on each of these ranks"""


def structure_digest(captured: Captured) -> str:
    """A digest of names, dtypes, whole shapes and meshes, and of which names share a tensor.

    It is the same on all ranks that hold the same tensors, or boxes of the same tensors on the same mesh.
    """
    digest = hashlib.sha256()
    for name, one in captured.tensors.items():
        sharded = captured.sharded.get(name)
        shape, mesh = (sharded.shape, sharded.mesh) if sharded else (tuple(one.shape), ())
        digest.update(f"{name}|{one.dtype}|{shape}|{mesh}\n".encode())
    for alias, name in captured.aliases.items():  # guard: aliases-in-structure
        digest.update(f"{alias} = {name}\n".encode())
    return digest.hexdigest()


def structure_list(captured: Captured) -> list[list[Any]]:
    """The structure as a message: for each name its description, its mesh, which is empty if it is not sharded, and
    the bytes that one of its holders writes; 0 for what each holder counts as its own (`own_bytes`)."""
    found = []
    for name, one in captured.tensors.items():
        sharded = captured.sharded.get(name)
        shape, mesh = (sharded.shape, sharded.mesh) if sharded else (tuple(one.shape), ())
        over = f" over {len(mesh)} ranks" if mesh else ""
        size = 0 if sharded or _is_random(name) else tensor_bytes(name, one)
        found.append([name, f"{dtype_name(one.dtype)} {list(shape)}{over}", list(mesh), size])
    return found + [[alias, f"the same as {name}", [], 0] for alias, name in captured.aliases.items()]


def own_bytes(captured: Captured) -> int:
    """The bytes that this rank writes in a save, whatever the other ranks hold: values, random number generators, and
    of its shards the part that falls to it where several ranks hold the same."""
    found = float(beside_bytes(captured.values))
    for name, one in captured.tensors.items():
        if sharded := captured.sharded.get(name):
            found += tensor_bytes(name, one) / max(len(sharded.holders), 1)  # none outside of its mesh
        elif _is_random(name):
            found += tensor_bytes(name, one)
    return math.ceil(found)


def written_bytes(structures: Sequence[str], lists: Mapping[str, list[list[Any]]], own: Sequence[int]) -> list[int]:
    """The bytes that each rank writes in a save, by an estimate that is not too low for all of them together.

    `structures`: the digest of the structure of each rank. `lists`: digest -> its `structure_list`. `own`: the
    `own_bytes` of each rank. The holders of a tensor that is not sharded write about equal parts of it.
    """
    ranks, holders = Counter(structures), Counter[str]()
    for structure, tensors in lists.items():
        for name, *_ in tensors:
            holders[name] += ranks[structure]
    shared = {one: sum(size / holders[name] for name, *_, size in tensors) for one, tensors in lists.items()}
    return [math.ceil(shared[one] + mine) for one, mine in zip(structures, own, strict=True)]


def partition(
    captured: Captured,
    finite: Collection[str],
    rank: int,
    holders: Mapping[str, Sequence[tuple[int, ...]]],
    own: Collection[str],
) -> Partition:
    """The partition as `rank` sees it. `finite`: names whose values must be finite. `own`: names that each rank writes.

    `holders`: name -> groups of ranks. The ranks of a group hold one copy of the tensor between them. For a sharded
    tensor the groups are meshes, over which it is sharded alike; for any other tensor, each holder is a group of one.
    """
    mine: list[Item] = []
    boxes_of: dict[tuple[int, ...], list[tuple[str, Box, tuple[int, ...]]]] = defaultdict(list)
    for name in sorted(captured.tensors):  # the same order on each holder
        one, sharded = captured.tensors[name], captured.sharded.get(name)
        box = sharded.box if sharded else everything(tuple(one.shape))
        whole = sharded.shape if sharded else tuple(one.shape)
        group = _replicas_of(sharded, holders[name])
        if sharded and not box.elements:  # an empty shard: this rank writes nothing
            # A tensor without any elements is recorded by one rank, for its shape.
            # guard: empty-shard-recorded-once
            if 0 in whole and rank == min(_replicas_of(None, holders[name])):
                mine.append(_item(captured, name, everything(whole), whole, everything(whole), name in finite))
            continue
        if len(group) == 1:
            mine.append(_item(captured, name, box, whole, box, name in finite))
        elif _is_random(name) or name in own:  # guard: random-generators-per-rank
            mine.append(_item(captured, name, box, whole, box, name in finite, own=rank != group[0]))
        else:
            boxes_of[group].append((name, box, whole))
    witnessed: dict[tuple[int, ...], list[Item]] = {}
    shared: dict[tuple[int, ...], list[str]] = {}
    for group, boxes in boxes_of.items():
        held = [Held(name, box, captured.tensors[name].element_size()) for name, box, _ in boxes]
        places = {name: (box, whole) for name, box, whole in boxes}
        witnessed[group], shared[group] = [], []
        for member, parts in zip(group, shares(held, len(group)), strict=True):
            for part in parts:
                box, whole = places[part.name]
                item = _item(captured, part.name, part.box, whole, box, part.name in finite)
                (mine if member == rank else witnessed[group]).append(item)
                shared[group].append(item.tensor.key)
    return Partition(mine, witnessed, shared)


def _is_random(name: str) -> bool:
    """Whether a tensor is the state of a random number generator, which each rank has for itself."""
    return name == "rng" or name.startswith("rng.")


def _replicas_of(sharded: Sharded | None, holders: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The ranks that hold the same box as this one: on each mesh, those at the same places. None: all holders."""
    if sharded is None:
        return tuple(sorted(rank for group in holders for rank in group))
    places = [sharded.mesh.index(rank) for rank in sharded.holders]
    return tuple(sorted({group[place] for group in holders for place in places}))


def _item(
    captured: Captured, name: str, part: Box, whole: Sequence[int], held: Box, finite: bool, own: bool = False
) -> Item:
    """`part` of a tensor of shape `whole`, of which this process holds the box `held`."""
    is_piece = part.shape != tuple(whole)
    tensor = Tensor(
        name,
        dtype_name(captured.tensors[name].dtype),
        part.shape,
        finite,
        part.offsets if is_piece else (),
        tuple(whole) if is_piece else (),
        own,
    )
    if part == held:
        return Item(tensor, name, None)
    first = part.offsets[0] - held.offsets[0]
    return Item(tensor, name, (first, first + part.shape[0]))

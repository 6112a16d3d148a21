"""Dividing: what of a captured state this rank writes, and what others write for it. Moves nothing.

What several ranks hold alike one of them writes, each about as many bytes (policy/reshard.py); the others take its
digest, so that what should be equal and is not is told, and never taken in silence. What is a rank's own by nature
(random number generators) or was found to differ, each rank writes itself.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..format.boxes import Box, everything
from ..format.layout import Tensor
from ..policy.reshard import Held, shares
from ..state.capture import Captured
from ..state.dtensor import Sharded
from ..state.tensors import dtype_name


@dataclass(frozen=True)
class Item:
    """A part of a tensor that this process holds: as it is stored, and where it lies in what is held."""

    tensor: Tensor
    name: str
    """of what is held"""
    rows: tuple[int, int] | None
    """None: all of it"""

    def view(self, held: Mapping[str, torch.Tensor]) -> torch.Tensor:
        one = held[self.name]
        return one if self.rows is None else one[self.rows[0] : self.rows[1]]


@dataclass(frozen=True)
class Division:
    """Who writes what, as this rank sees it."""

    mine: list[Item]
    witnessed: dict[tuple[int, ...], list[Item]]
    """holders -> what another of them writes"""
    shared: dict[tuple[int, ...], list[str]]
    """holders -> keys of what one of them writes, whoever it is: the same list at each"""


def described(captured: Captured) -> str:
    """A digest of what a state is made of, the same on all ranks that hold the same, or boxes of the same."""
    told = hashlib.sha256()
    for name, one in captured.tensors.items():
        spread = captured.sharded.get(name)
        shape, mesh = (spread.shape, spread.mesh) if spread else (tuple(one.shape), ())
        told.update(f"{name}|{one.dtype}|{shape}|{mesh}\n".encode())
    for alias, name in captured.aliases.items():  # guard: aliases-in-structure
        told.update(f"{alias} = {name}\n".encode())
    return told.hexdigest()


def listed(captured: Captured) -> list[list[Any]]:
    """Of everything: name, what it is, and over which ranks it is spread (none: it is not)."""
    found = []
    for name, one in captured.tensors.items():
        spread = captured.sharded.get(name)
        shape, mesh = (spread.shape, spread.mesh) if spread else (tuple(one.shape), ())
        over = f" over {len(mesh)} ranks" if mesh else ""
        found.append([name, f"{dtype_name(one.dtype)} {list(shape)}{over}", list(mesh)])
    return found + [[alias, f"the same as {name}", []] for alias, name in captured.aliases.items()]


def divide(
    captured: Captured,
    finite: Collection[str],
    rank: int,
    homes: Mapping[str, Sequence[tuple[int, ...]]],
    own: Collection[str],
) -> Division:
    """What this rank writes. `own`: what each writes for itself.

    `homes`: of what is not sharded, the ranks that hold it, one by one; else the meshes over which it is spread alike.
    """
    mine: list[Item] = []
    groups: dict[tuple[int, ...], list[tuple[str, Box, tuple[int, ...]]]] = defaultdict(list)
    for name in sorted(captured.tensors):  # the same order at each holder
        one, spread = captured.tensors[name], captured.sharded.get(name)
        box = spread.box if spread else everything(tuple(one.shape))
        whole = spread.shape if spread else tuple(one.shape)
        group = _holders(spread, homes[name])
        if spread and not box.elements:  # this rank holds nothing of it
            # guard: empty-shard-recorded-once
            if 0 in whole and rank == min(_holders(None, homes[name])):  # nobody does: one rank records its shape
                mine.append(_item(captured, name, everything(whole), whole, everything(whole), name in finite))
            continue
        if len(group) == 1:
            mine.append(_item(captured, name, box, whole, box, name in finite))
        elif name == "rng" or name.startswith("rng.") or name in own:  # guard: random-generators-per-rank
            mine.append(_item(captured, name, box, whole, box, name in finite, own=rank != group[0]))
        else:
            groups[group].append((name, box, whole))
    witnessed: dict[tuple[int, ...], list[Item]] = {}
    shared: dict[tuple[int, ...], list[str]] = {}
    for group, members in groups.items():
        held = [Held(name, box, captured.tensors[name].element_size()) for name, box, _ in members]
        places = {name: (box, whole) for name, box, whole in members}
        witnessed[group], shared[group] = [], []
        for turn, parts in enumerate(shares(held, len(group))):
            for part in parts:
                box, whole = places[part.name]
                item = _item(captured, part.name, part.box, whole, box, part.name in finite)
                (mine if group[turn] == rank else witnessed[group]).append(item)
                shared[group].append(item.tensor.key)
    return Division(mine, witnessed, shared)


def _holders(spread: Sharded | None, homes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Who holds the same: on other meshes, those in the same places."""
    if spread is None:
        return tuple(sorted(rank for home in homes for rank in home))
    places = [spread.mesh.index(rank) for rank in spread.holders]
    return tuple(sorted({home[place] for home in homes for place in places}))


def _item(
    captured: Captured, name: str, part: Box, whole: Sequence[int], held: Box, finite: bool, own: bool = False
) -> Item:
    some = part.shape != tuple(whole)
    tensor = Tensor(
        name,
        dtype_name(captured.tensors[name].dtype),
        part.shape,
        finite,
        part.offsets if some else (),
        tuple(whole) if some else (),
        own,
    )
    if part == held:
        return Item(tensor, name, None)
    first = part.offsets[0] - held.offsets[0]
    return Item(tensor, name, (first, first + part.shape[0]))

"""The tensors that one walk over a state has found, in the order in which they were found. Copies no tensor.

Each region of memory is reported once, and each further name of it as an alias. Objects that have not changed since the
last save are taken over whole (`reuse`), without encoding them again.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import nn

from ..format.values import refusal
from . import tensors
from .capture_cache import Flat, Part
from .dtensor import Sharded, Shards


class Origin(enum.IntEnum):
    """What changes a tensor. A higher origin may be changed sooner after a capture, and must be copied sooner.

    OPTIMIZER and STEPPED change in the optimizer's step, which the fence delays. When the others change is not known:
    forward may change a buffer at once. Memory with several names has the highest origin of its names.
    """

    OPTIMIZER = 0
    """state of an optimizer of `Captured.optimizers`: only the optimizer's step changes it"""
    STEPPED = 1
    """a parameter of a module that is in a parameter group of one of these optimizers"""
    PARAMETER = 2
    """a parameter of a module that none of these optimizers updates"""
    OTHER = 3
    """buffers, hyperparameters, plain tensors, random number generators, what an object's own state_dict() returns"""


class Regions(NamedTuple):
    """The regions of memory that a walk has found. The first four fields are parallel lists, one entry a region."""

    names: list[str]
    tensors: list[torch.Tensor]
    """without gradients; of a DTensor, the memory that this process holds"""
    addresses: list[int]
    origins: list[Origin]
    aliases: dict[str, str]
    """each further name of a region -> the name under which it is stored"""
    sharded: dict[str, Sharded]
    """name -> how the tensor is sharded; only names of DTensors"""


class Collected:
    """The tensors of one walk.

    `remembered`: the parts of the last walk, by path. `stepped`: ids of the parameters that the optimizers update.
    """

    def __init__(self, remembered: Mapping[str, Part], stepped: set[int]) -> None:
        self._remembered, self._stepped = remembered, stepped
        self.parts: dict[str, Part] = {}
        """path -> part, of this walk: the `remembered` of the next one"""
        self.walks = 0
        """how many objects could not be reused and had to be walked"""
        self.makeup: list[Any] = []
        """the parts, and name, dtype and shape of every other tensor, in order: equal lists have equal layouts"""
        self._names: list[str] = []
        self._tensors: list[torch.Tensor] = []
        self._origins: list[Origin] = []

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: str, tensor: torch.Tensor, origin: Origin) -> None:
        """Add a tensor under this name. Raises Unstorable if it cannot be stored."""
        tensors.require_storable(tensor, name)
        self._names.append(name)
        self._tensors.append(_untracked(tensor))
        self._origins.append(self.origin_of(tensor, origin))
        self.makeup.append((name, tensor.dtype, tuple(tensor.shape)))

    def origin_of(self, tensor: torch.Tensor, origin: Origin) -> Origin:
        """`origin`, or STEPPED for a parameter that an optimizer updates."""
        return Origin.STEPPED if origin is Origin.PARAMETER and id(tensor) in self._stepped else origin

    def reuse(self, path: str, flat: Flat | None) -> Any:
        """Add the live tensors of an object whose structure is unchanged, and return its encoded tree.

        Returns None, and adds nothing, for an object that must be walked. `flat`: the object as it is now.
        """
        part = self._remembered.get(path)
        live = part.stored_tensors(flat) if part and flat else None
        if part is None or live is None:
            self.walks += 1
            return None
        self.parts[path] = part
        self.makeup.append(part)
        self._names += part.names
        self._tensors += live if part.untracked else map(_untracked, live)
        self._origins += part.origins if part.untracked else map(self.origin_of, live, part.origins)
        return part.tree

    def remember(self, path: str, flat: Flat, names: Sequence[str], since: int, tree: Any, refers: bool) -> None:
        """Keep the result of walking an object, if the walk has found exactly the tensors that `flat` lists.

        `names`: one for each slot of `flat`, empty for a slot that is not stored. `since`: `len(self)` before the walk.
        `refers`: see `Part`.
        """
        live = list(compress(flat.slots, names))
        if self._names[since:] == list(filter(None, names)) and all(
            tensors.region(one) == tensors.region(other) for one, other in zip(live, self._tensors[since:], strict=True)
        ):
            origins = [Origin.PARAMETER if one is Origin.STEPPED else one for one in self._origins[since:]]
            part = self.parts[path] = Part(flat, names, tree, origins, refers)
            self.makeup[len(self.makeup) - len(live) :] = [part]

    def regions(self, shards: Shards, *, same_names: bool) -> Regions:
        """Every region of memory once. To be called once, after the walk.

        `same_names`: the last walk has found the same names, so they need not be checked. Raises Unstorable if two
        tensors have one name.
        """
        names, found, origins = self._names, self._tensors, self._origins
        sharded = shards.localized(names, found)
        if not same_names and len(set(names)) < len(names):
            name = next(name for name, count in Counter(names).items() if count > 1)
            raise refusal(name, "is the name of two tensors", "Rename one of them")
        addresses = list(map(torch.Tensor.data_ptr, found))
        if len(set(addresses)) == len(addresses):
            return Regions(names, found, addresses, origins, {}, sharded)
        shared = {address for address, count in Counter(addresses).items() if count > 1}
        first: dict[Hashable, int] = {}
        aliases: dict[str, str] = {}
        for index, address in enumerate(addresses):
            if address in shared and (region := tensors.region(found[index])) is not None:
                stored_at = first.setdefault(region, index)
                if stored_at != index:
                    aliases[names[index]] = names[stored_at]
                    origins[stored_at] = max(origins[stored_at], origins[index])
        stored = [index for index, name in enumerate(names) if name not in aliases]
        return Regions(
            [names[index] for index in stored],
            [found[index] for index in stored],
            [addresses[index] for index in stored],
            [origins[index] for index in stored],
            aliases,
            {name: one for name, one in sharded.items() if name not in aliases},
        )


def _untracked(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its gradient. One that has none is returned itself: 10^5 new objects would start the
    garbage collector. A DTensor is returned itself too; `Shards.localized` replaces it later.
    """
    kind = type(tensor)
    tracked = kind is nn.Parameter or (kind is torch.Tensor and tensor.requires_grad)
    return tensor.detach() if tracked else tensor

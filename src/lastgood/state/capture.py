"""Capture: a live state -> named tensors and values. Reads; changes nothing. See rules.py.

`Capture` takes one capture after another of the state of a run. Each capture walks the state (walk.py), collects the
tensors (collected.py) and reuses what has not changed since the last one (capture_cache.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from ..errors import Refused, Unstorable
from ..format.values import LEFT_OUT, Filter, component
from . import adapters
from .capture_cache import Owners, Part
from .collected import Origin
from .dtensor import Sharded, Shards
from .objects import read_rng
from .walk import Walk
from .wrappers import Wrappers

__all__ = ["Capture", "Captured", "Origin", "capture", "finite", "require_keys", "visit", "wanted"]


@dataclass(frozen=True)
class Captured:
    """What a state consists of. The tensors are the live ones, without their gradients.

    Only a numpy array that torch cannot view (read-only, negative strides, a dtype that torch lacks) is copied.

    What does not change from save to save is shared between the captures of one `Capture`: do not change any field.
    """

    tensors: dict[str, torch.Tensor]
    """stored name -> tensor; each region of memory once"""
    addresses: list[int]
    """address of the memory of each of `tensors`, in this order. If a tensor has other memory when a snapshot copies it
    later (`.data = ...`), a comparison with this address shows it."""
    aliases: dict[str, str]
    """further name of a tensor -> the name under which it is stored"""
    values: dict[str, Any]
    """name of a top-level entry, and "rng" -> JSON with typed tags"""
    key: int
    """of one `Capture`: it increases where a name, dtype, shape or sharding differs from the last capture"""
    origins: dict[str, Origin]
    """stored name -> what changes the tensor"""
    optimizers: list[Optimizer]
    """the optimizers of the state whose step can be hooked, whether `include` and `exclude` want them or not"""
    hookable: bool
    """whether the state holds no other object that acts like an optimizer"""
    sharded: dict[str, Sharded] = field(default_factory=dict)
    """stored name -> how the tensor is sharded; only for DTensors, of which this process may hold a part"""


def capture(state: Mapping[str, Any], include: Sequence[str] = (), exclude: Sequence[str] = ()) -> Captured:
    """Everything in `state`, and the random number generators; see `lastgood.state.rules` for names and rules.

    `include`, `exclude`: patterns (fnmatch) on dotted names; each also matches every name below a name that it matches.
    Default: everything. "rng" is included unless it is excluded. Raises Unstorable, by name, for what cannot be stored
    without running code on load.
    """
    return Capture(include, exclude).take(state)


class Capture:
    """`capture` for one run: remembers the structure of the last capture, and walks only objects that have changed.

    `include`, `exclude`: as in `capture`.
    """

    def __init__(self, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> None:
        self._include, self._exclude = include, exclude
        self._names = wanted(include, exclude)
        self._owners, self._wrappers = Owners(), Wrappers()
        self._parts: dict[str, Part] = {}
        self._makeup: list[Any] = []
        self._layout: tuple[Any, ...] = ()
        self._aliases: dict[str, str] = {}
        self._origins: dict[str, Origin] = {}
        self._shards, self._sharded = Shards(), dict[str, Sharded]()
        self._peft = adapters.Watch()
        self._key = 0
        self.walks = 0
        """how many modules, optimizers and containers of tensors have been walked in all captures so far"""

    def without(self, names: Iterable[str]) -> Capture:
        """Another one, which leaves out further names."""
        return Capture(self._include, [*self._exclude, *names])

    def take(self, state: Mapping[str, Any]) -> Captured:
        """As `capture(state)`. Every tensor is read from the live objects; only names and structure are remembered."""
        require_keys(state)
        self._peft.require_storable(state, self._names)
        walk = Walk(state, self._names, self._owners, self._parts, self._wrappers)
        trees = {component(key): walk.encode(value, component(key)) for key, value in state.items()}
        if self._names.enters("rng"):
            trees["rng"] = walk.encode(read_rng(), "rng")
        collected = walk.collected
        self._parts = collected.parts
        self.walks += collected.walks
        same = collected.makeup == self._makeup
        found = collected.regions(self._shards, same_names=same)
        if not (same and found.aliases == self._aliases and found.sharded == self._sharded):
            shapes = [tuple(one.shape) for one in found.tensors]
            layout = found.names, [one.dtype for one in found.tensors], shapes, found.sharded
            self._key += layout != self._layout
            self._layout = layout
        self._makeup, self._aliases, self._sharded = collected.makeup, found.aliases, found.sharded
        if found.origins != list(self._origins.values()) or found.names != list(self._origins):
            self._origins = dict(zip(found.names, found.origins, strict=True))
        return Captured(
            dict(zip(found.names, found.tensors, strict=True)),
            found.addresses,
            found.aliases,
            {name: tree for name, tree in trees.items() if tree is not LEFT_OUT},
            self._key,
            self._origins,
            walk.optimizers,
            walk.hookable,
            found.sharded,
        )


def finite(
    captured: Captured, also: Sequence[str] = (), but: Sequence[str] = (), exempt: Collection[str] = ()
) -> frozenset[str]:
    """Stored names of the tensors in which NaN or infinity makes a state unfit.

    These are the parameters of modules, the state of the optimizers whose step can be hooked, and the names that match
    `also`; never those that match `but`, nor tensors of integers. `exempt`: stored names that count only if `also`
    matches them. `also` and `but` are patterns as in `capture`.
    """
    named, left = Filter(also, ()), Filter((), but)
    return frozenset(
        name
        for name, tensor in captured.tensors.items()
        if (tensor.is_floating_point() or tensor.is_complex())
        and ((captured.origins[name] is not Origin.OTHER and name not in exempt) or (also and named.keeps(name)))
        and left.keeps(name)
    )


def wanted(include: Sequence[str], exclude: Sequence[str]) -> Filter:
    """The filter for a caller's patterns; it keeps "rng" also where `include` does not name it."""
    names = Filter(include, exclude)
    return names if not include else Filter([*include, "rng"], exclude)


def visit(state: Mapping[str, Any], names: Filter) -> None:
    """Call the methods of `names` for every name in `state` and in the random number generators, as a capture does.

    In an entry that cannot be stored, only the names before the obstacle are visited.
    """
    walk = Walk(state, names, Owners(), {}, Wrappers())
    for key, value in (*state.items(), ("rng", read_rng())):
        with suppress(Unstorable):
            walk.encode(value, component(key))


def require_keys(state: Mapping[str, Any]) -> None:
    """Raises Refused for keys that cannot be names."""
    for key in state:
        if type(key) is not str or key in ("rng", "__metadata__"):
            reason = " is taken: the random number generators are kept there" if key == "rng" else " cannot be a name"
            raise Refused(f"the key {key!r} of the state{reason}", safe="Nothing was touched.", todo="Use another key.")

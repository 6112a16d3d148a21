"""Capture: a live state -> named tensors and values. Reads; copies no tensor, changes nothing. See state.py."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import Refused
from ..format.values import LEFT_OUT, Filter, component, dtype_text, encode, refusal
from . import tensors
from .objects import KINDS, Parameters, module_entries, read_rng, tag_of

Inner = Callable[[Any, str], Any]


@dataclass(frozen=True)
class Captured:
    """What a state is made of. Nothing is copied: the tensors are the live ones, detached."""

    tensors: dict[str, torch.Tensor]
    """stored name -> tensor; each region of memory once"""
    aliases: dict[str, str]
    """further name of a tensor -> the name under which it is stored"""
    values: dict[str, Any]
    """name of a top-level entry, and "rng" -> JSON with typed tags"""


def capture(state: Mapping[str, Any], include: Sequence[str] = (), exclude: Sequence[str] = ()) -> Captured:
    """Everything in `state`, and the random number generators; see `lastgood.train.state` for names and rules.

    `include`, `exclude`: patterns (fnmatch) on dotted names, each speaking of all that lies below; "rng" stays unless
    it is excluded. Raises Unstorable, by name, for what cannot be stored without running code on load.
    """
    names = wanted(include, exclude)
    require_keys(state)
    walk = _Capture(state, names)
    trees = {component(key): encode(value, component(key), walk.leaf, names) for key, value in state.items()}
    if names.enters("rng"):
        trees["rng"] = encode(read_rng(), "rng", walk.leaf, names)
    values = {name: tree for name, tree in trees.items() if tree is not LEFT_OUT}
    return Captured(walk.tensors, walk.aliases, values)


def wanted(include: Sequence[str], exclude: Sequence[str]) -> Filter:
    """The filter that a caller's patterns make."""
    names = Filter(include, exclude)
    return names if not include else Filter([*include, "rng"], exclude)


def require_keys(state: Mapping[str, Any]) -> None:
    """Raises Refused for keys that cannot be names."""
    for key in state:
        if type(key) is not str or key in ("rng", "__metadata__"):
            taken = " is taken: the random number generators are kept there" if key == "rng" else " cannot be a name"
            raise Refused(f"the key {key!r} of the state{taken}", safe="Nothing was touched.", todo="Use another key.")


class _Capture:
    """One walk over a state, and what it has found so far."""

    def __init__(self, state: Mapping[str, Any], names: Filter) -> None:
        self._state, self._names = state, names
        self.tensors: dict[str, torch.Tensor] = {}
        self.aliases: dict[str, str] = {}
        self._regions: dict[Hashable, str] = {}
        self._only_data = False

    def leaf(self, obj: Any, path: str, inner: Inner) -> Any:
        """The hook of the codec: what it does not know."""
        if isinstance(obj, (torch.Tensor, np.ndarray)):
            return self._tensor(obj, path) if self._names.keeps(path) else LEFT_OUT
        if isinstance(obj, torch.dtype) and obj in tensors.TORCH_DTYPES.values():
            return {"!torch.dtype": tensors.dtype_name(obj)}
        if isinstance(obj, torch.device):
            return {"!torch.device": str(obj)}
        if isinstance(obj, torch.Size):
            return {"!torch.Size": list(obj)}
        tag = tag_of(obj)
        if not tag:
            return NotImplemented
        if self._only_data:
            if not self._names.keeps(path):
                return LEFT_OUT
            what = f"is a {type(obj).__qualname__} inside of another object's state, with no place to be restored to"
            raise refusal(path, what, "Hand out what it is made of (its state_dict() or get_state())")
        if tag == "!module":
            return self._module(obj, path, inner)
        with self._data_from_here():
            if tag == "!optimizer":
                return self._optimizer(obj, path, inner)
            tree = inner(KINDS[tag].read(obj), path)
            return tree if tree is LEFT_OUT else {tag: tree}

    @contextmanager
    def _data_from_here(self) -> Iterator[None]:
        """What an object is made of is handed back to it as data: there are no live objects in there to write into."""
        self._only_data = True
        try:
            yield
        finally:
            self._only_data = False

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        tensors.require_storable(tensor, name)
        if name in self.tensors or name in self.aliases:
            raise refusal(name, "is the name of two tensors", "Rename one of them")
        spot = tensors.region(tensor)
        first = name if spot is None else self._regions.setdefault(spot, name)
        if first == name:
            self.tensors[name] = tensor.detach()
        else:
            self.aliases[name] = first

    def _tensor(self, obj: torch.Tensor | np.ndarray, path: str) -> Any:
        if isinstance(obj, np.ndarray):
            self._add(path, tensors.from_array(obj, path))
            return {"!ndarray": [path, dtype_text(obj.dtype)]}
        self._add(path, obj)
        is_parameter, wants_grad = isinstance(obj, nn.Parameter), obj.requires_grad and obj.is_leaf
        if obj.device.type == "cpu" and not is_parameter and not wants_grad:
            return {"!tensor": path}
        return {"!tensor": [path, str(obj.device), is_parameter, wants_grad]}

    def _module(self, module: nn.Module, path: str, inner: Inner) -> Any:
        extra: dict[str, Any] = {}
        found = self._names.keeps(path)
        entries, names = module_entries(module, path)
        for name, raw in names.items():
            if isinstance(entries[raw], torch.Tensor):
                if self._names.keeps(name):
                    self._add(name, entries[raw])
                    found = True
                continue
            with self._data_from_here():
                tree = inner(entries[raw], name)
            if tree is not LEFT_OUT:
                extra[name] = tree
        return {"!module": extra} if found or extra else LEFT_OUT

    def _optimizer(self, optimizer: Optimizer, path: str, inner: Inner) -> Any:
        groups: list[dict[str, Any]] = []
        state: dict[str, Any] = {}
        known: set[torch.Tensor] = set()
        for index, members in enumerate(self._parameters.of(optimizer, path)):
            options = dict(optimizer.param_groups[index])
            named = [[one.qualified, list(one.parameter.shape)] for one in members]
            for key in ("params", "param_names"):
                options.pop(key, None)
            groups.append({"params": named, "options": inner(options, f"{path}.param_groups.{index}")})
            for one in members:
                known.add(one.parameter)
                if one.parameter in optimizer.state:
                    state[one.qualified] = inner(optimizer.state[one.parameter], f"{path}.state.{one.short}")
        common = {key: item for key, item in optimizer.state.items() if key not in known}
        if any(isinstance(key, torch.Tensor) for key in common):
            what = "holds the state of a tensor that is in none of its groups"
            raise refusal(f"{path}.state", what, "Delete that entry of optimizer.state")
        shared = inner(common, f"{path}.state")
        parts = [*state.values(), shared, *(group["options"] for group in groups)]
        if not self._names.keeps(path) and all(part is LEFT_OUT for part in parts):
            return LEFT_OUT
        return {
            "!optimizer": {
                "class": type(optimizer).__qualname__,
                "groups": [{**group, "options": {}} if group["options"] is LEFT_OUT else group for group in groups],
                "state": {name: tree for name, tree in state.items() if tree is not LEFT_OUT},
                "common": {} if shared is LEFT_OUT else shared,
            }
        }

    @cached_property
    def _parameters(self) -> Parameters:
        return Parameters(self._state)

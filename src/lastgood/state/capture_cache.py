"""A cache of structure: what a module, optimizer or container consisted of at the last save, so it need not be walked.

The cache holds names, shapes and JSON, and no reference to a tensor, a storage or an object of the user. So it never
extends the life of any of them. Every save reads the live objects again, in tight loops, as a `Flat`: their tensors,
and a signature of their structure (`flat_module`, `flat_container`, `Owners.flat_optimizer`). `Part.stored_tensors`
compares that with what the cache knows. Where anything differs, the object is walked anew. So a stale entry can
neither bring back an old tensor nor give a wrong name to a new one.

Objects whose contents only their own code knows are never cached: modules that override state_dict() or have a hook or
extra state, optimizers with state that is not a tensor.
"""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..format.values import join

TENSORS = frozenset({torch.Tensor, nn.Parameter})
"""exact types that can be plain memory"""

_CONTAINERS = frozenset({dict, OrderedDict, list, tuple})
_NESTING_LIMIT = 20
_BLOCK = 512
"""tensors that are compared attribute by attribute before the next ones, so that they stay in the processor's cache"""
_END, _TENSOR = object(), object()  # marks in a signature

_METHODS = (
    "state_dict",
    "_save_to_state_dict",
    "get_extra_state",
    "named_parameters",
    "_named_members",
    "named_modules",
    "__getattribute__",
)
_ORIGINAL = {name: getattr(nn.Module, name) for name in _METHODS}

_dtype, _device, _layout = map(operator.attrgetter, ("dtype", "device", "layout"))
_shape, _nested = operator.attrgetter("shape"), operator.attrgetter("is_nested")
_stride = torch.Tensor.stride
_gradient = operator.attrgetter("requires_grad", "is_leaf")


@dataclass
class Flat:
    """The tensors of a live object in one flat list, and a signature of its structure.

    It has nothing to do with the flattened tensor subclasses (subclasses.py).
    """

    signature: list[Any] = field(default_factory=list)
    """keys and marks; equal signatures mean the same names in the same order"""
    slots: list[Any] = field(default_factory=list)
    """the values under these names, in order: live tensors, or None"""
    parameters: list[torch.Tensor] = field(default_factory=list)
    """of an optimizer: its parameters, whose shapes and memory orders are in its JSON; their module stores them"""


# ---- live objects -> flat ----------------------------------------------------------------------------------------


def flat_module(module: nn.Module) -> Flat | None:
    """Its tensors in the order of its state_dict(); None if the module has code of its own that may change these."""
    flat = Flat()
    return flat if _flatten_module(module, flat, {}) else None


def _flatten_module(module: nn.Module, flat: Flat, plain: dict[type, bool]) -> bool:
    kind, inside = type(module), module.__dict__
    known = plain.get(kind)
    if known is None:
        known = plain[kind] = all(getattr(kind, name) is one for name, one in _ORIGINAL.items())
    parameters, buffers, children = inside.get("_parameters"), inside.get("_buffers"), inside.get("_modules")
    if not (
        known
        and type(parameters) is type(buffers) is type(children) is dict
        and not inside["_state_dict_hooks"]
        and not inside["_state_dict_pre_hooks"]
        and inside.keys().isdisjoint(_METHODS)
    ):
        return False
    signature = flat.signature
    signature += parameters
    signature.append(_END)
    if buffers:
        signature += buffers
        if passing := inside["_non_persistent_buffers_set"]:
            signature.append(tuple(sorted(passing)))
        flat.slots += parameters.values()
        flat.slots += buffers.values()
    else:
        flat.slots += parameters.values()
    signature.append(_END)
    for name, child in children.items():
        signature.append(name)
        if child is None:
            signature.append(None)
        elif not _flatten_module(child, flat, plain):
            return False
    signature.append(_END)
    return True


def module_slots(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """(name, whether it is stored) of each slot of `flat_module`; buffers that are not persistent are not stored."""
    for name in module._parameters:
        yield prefix + name, True
    for name in module._buffers:
        yield prefix + name, name not in module._non_persistent_buffers_set
    for name, child in module._modules.items():
        if child is not None:
            yield from module_slots(child, f"{prefix}{name}.")


def flat_container(obj: Any) -> Flat | None:
    """The tensors in nested dicts, lists and tuples that hold only tensors; None for any other container."""
    flat = Flat()
    return flat if _flatten_container(obj, flat, 0) and flat.slots else None


def _flatten_container(obj: Any, flat: Flat, depth: int) -> bool:
    kind, signature = type(obj), flat.signature
    signature.append(kind)
    if kind is dict or kind is OrderedDict:
        if not set(map(type, obj)) <= {str, int}:
            return False
        signature += obj
        values = obj.values()
    else:
        signature.append(len(obj))
        values = obj
    kinds = set(map(type, values))
    if kinds <= TENSORS:
        signature.append(_END)
        flat.slots += values
        return True
    if not kinds <= TENSORS | _CONTAINERS or depth > _NESTING_LIMIT:
        return False
    for value in values:
        if type(value) in TENSORS:
            signature.append(_TENSOR)
            flat.slots.append(value)
        elif not _flatten_container(value, flat, depth + 1):
            return False
    return True


def container_slots(obj: Any, path: str) -> Iterator[str]:
    """The name of each slot of `flat_container`."""
    mapping = type(obj) in (dict, OrderedDict)
    for key, value in obj.items() if mapping else enumerate(obj):
        name = join(path, key) if mapping else f"{path}.{key}"
        if type(value) in TENSORS:
            yield name
        else:
            yield from container_slots(value, name)


class Owners:
    """The parameters of all modules of a state, which decide the names of the parameters of an optimizer.

    `version` changes when a module is added, is removed or changes its structure, or when two parameters become one
    shared parameter, or the reverse.
    """

    def __init__(self) -> None:
        self.version = 0
        self._known: tuple[Any, ...] = ()
        self._places: dict[int, int] = {}

    def update(self, modules: dict[str, nn.Module], flats: Sequence[Flat | None]) -> bool:
        """Read the modules as they are now. False if one has no `Flat`: then no optimizer can be cached either."""
        self._places = {}
        if any(flat is None for flat in flats):
            return False
        slots = list(map(id, chain.from_iterable(flat.slots for flat in flats if flat)))
        self._places = dict(zip(reversed(slots), range(len(slots) - 1, -1, -1), strict=True))
        known = (
            list(modules),
            [flat.signature for flat in flats if flat],
            list(map(self._places.__getitem__, slots)),  # equal numbers: one shared parameter
        )
        if known != self._known:
            self.version += 1
            self._known = known
        return True

    def flat_optimizer(self, optimizer: Optimizer, hooked: bool) -> Flat | None:
        """The tensors of its state, parameter by parameter; None if its state holds more than tensors.

        `hooked`: whether its step can be hooked, which decides the origin of its tensors.
        """
        state: Any = optimizer.state
        groups = [group["params"] for group in optimizer.param_groups]
        parameters = list(chain.from_iterable(groups))
        if type(state) not in (dict, defaultdict) or not set(map(type, parameters)) <= TENSORS:
            return None
        ids = list(map(id, parameters))
        held = dict(zip(map(id, state), state.values(), strict=True))
        if not held.keys() <= set(ids) or not set(map(type, held.values())) <= {dict}:
            return None
        flat = Flat([self.version, hooked, list(map(len, groups)), list(map(self._places.get, ids))])
        flat.parameters = parameters
        signature, slots = flat.signature, flat.slots
        for entry in map(held.get, ids):
            if entry is None:
                signature.append(None)
            else:
                signature += entry
                signature.append(_END)
                slots += entry.values()
        return flat if set(map(type, slots)) <= TENSORS else None


# ---- the cache ----------------------------------------------------------------------------------------------------


class Part:
    """The names and the JSON of one object, and the structure for which they are valid.

    `names`: one for each slot, empty for a slot that is not stored. `tree`: the JSON; all saves share it, and nothing
    changes it. `origins`: one for each tensor that is stored. `refers`: whether the JSON has an entry for each
    tensor, with its `requires_grad` and its memory order, so that a change of these changes the JSON. That of a
    module has none: its tensors are found by their names.
    """

    def __init__(self, flat: Flat, names: Sequence[str], tree: Any, origins: Sequence[Any], refers: bool) -> None:
        self._kept = None if all(names) else list(map(bool, names))
        kept = list(compress(flat.slots, names))
        self.names = list(filter(None, names))
        self.origins, self.tree = origins, tree
        one: dict[Any, Any] = {}  # equal shapes and devices share one object
        self._signature, self._types = flat.signature, list(map(type, flat.slots))
        self._dtypes = list(map(_dtype, kept))
        self._devices = [one.setdefault(device, device) for device in map(_device, kept)]
        self._shapes = [one.setdefault(shape, shape) for shape in map(_shape, kept)]
        self._parameter_shapes = [one.setdefault(shape, shape) for shape in map(_shape, flat.parameters)]
        self._parameter_strides = [one.setdefault(stride, stride) for stride in map(_stride, flat.parameters)]
        self._strides = [one.setdefault(stride, stride) for stride in map(_stride, kept)] if refers else None
        self._grads = [one.setdefault(grad, grad) for grad in map(_gradient, kept)] if refers else None
        self.untracked = refers and nn.Parameter not in self._types and not any(one.requires_grad for one in kept)
        """whether all are plain tensors that require no gradient"""

    def stored_tensors(self, flat: Flat) -> list[torch.Tensor] | None:
        """The live tensors that are stored, one for each of `names`; None if the structure has changed."""
        if flat.signature != self._signature or list(map(type, flat.slots)) != self._types:
            return None
        kept = flat.slots if self._kept is None else list(compress(flat.slots, self._kept))
        same = all(self._same(kept[at : at + _BLOCK], at) for at in range(0, len(kept), _BLOCK))
        same = same and all(map(operator.eq, map(_shape, flat.parameters), self._parameter_shapes))
        # guard: plan-compares-parameter-strides
        return kept if same and all(map(operator.eq, map(_stride, flat.parameters), self._parameter_strides)) else None

    def _same(self, block: list[torch.Tensor], at: int) -> bool:
        to = slice(at, at + len(block))
        return (  # guard: plan-compares-strides
            not any(map(_nested, block))
            and set(map(_layout, block)) == {torch.strided}
            and list(map(_dtype, block)) == self._dtypes[to]
            and list(map(_device, block)) == self._devices[to]
            and list(map(_shape, block)) == self._shapes[to]
            and (self._strides is None or list(map(_stride, block)) == self._strides[to])
            and (self._grads is None or list(map(_gradient, block)) == self._grads[to])
        )

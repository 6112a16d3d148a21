"""One walk over a state: every object, container and tensor in it -> trees of JSON, and the tensors that it has found.

`Walk` gives the codec (format/values.py) the hooks for what the codec does not know: tensors, torch's types, modules,
optimizers and other objects. Names and tags are described in rules.py. It reads, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ..format.encodings import dtype_tree
from ..format.values import LEFT_OUT, Filter, encode, join, refusal
from . import instances, subclasses, tensors
from .capture_cache import Flat, Owners, Part, container_slots, flat_container, flat_module, module_slots
from .collected import Collected, Origin
from .instances import Inner
from .objects import (
    KINDS,
    Member,
    Parameters,
    can_be_hooked,
    find_objects,
    may_step,
    module_entries,
    plain_name,
    require_no_loader,
    stale_state,
    tag_of,
)
from .wrappers import Wrappers


class Walk:
    """One walk over `state`.

    `names`: which names are wanted. `owners`, `wrappers`: kept by the caller from walk to walk. `remembered`: the
    `collected.parts` of the last walk.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        names: Filter,
        owners: Owners,
        remembered: Mapping[str, Part],
        wrappers: Wrappers,
    ) -> None:
        self._names, self._owners, self._wrappers = names, owners, wrappers
        objects = {path: wrappers.unwrapped(one) for path, one in find_objects(state).items()}
        self._modules = {path: one for path, one in objects.items() if isinstance(one, nn.Module)}
        stepping = {id(one): one for one in objects.values() if may_step(one)}.values()
        self.optimizers: list[Optimizer] = [one for one in stepping if can_be_hooked(one)]
        self.hookable = len(self.optimizers) == len(stepping)
        groups = [group["params"] for one in self.optimizers for group in one.param_groups]
        self.collected = Collected(remembered, set(map(id, chain.from_iterable(groups))))
        self._only_data = self._as_one = False
        self._origin = Origin.OTHER

    def encode(self, obj: Any, path: str) -> Any:
        """The JSON of a top-level entry; LEFT_OUT if no name in it is wanted. Raises Unstorable."""
        return encode(obj, path, self._leaf, self._names, self._whole)

    # ---- the hooks of the codec ----------------------------------------------------------------------------

    def _leaf(self, obj: Any, path: str, inner: Inner) -> Any:
        """Encode a leaf whose type the codec does not know."""
        if subclasses.is_flattenable(obj):
            return self._flattened(obj, path, inner) if self._names.keeps(path) else LEFT_OUT
        if isinstance(obj, torch.Tensor) or (isinstance(obj, np.ndarray) and type(obj) is not np.ma.MaskedArray):
            return self._tensor(obj, path) if self._names.keeps(path) else LEFT_OUT
        if isinstance(obj, torch.dtype):
            return {"!torch.dtype": str(obj).removeprefix("torch.")}
        if isinstance(obj, torch.device):
            return {"!torch.device": str(obj)}
        if isinstance(obj, torch.Size):
            return {"!torch.Size": list(obj)}
        obj = self._wrappers.unwrapped(obj)
        tag = tag_of(obj)
        if not tag:
            require_no_loader(obj, path)
            return instances.encode(obj, path, inner, self._names)
        if self._only_data:
            if not self._names.keeps(path):
                return LEFT_OUT
            what = f"is a {type(obj).__qualname__} inside of another object's state, which is restored as plain data"
            raise refusal(path, what, "Let the outer state_dict() return its state_dict() or get_state()")
        if tag == "!module":
            return self._module(obj, path, inner)
        with self._mode(only_data=True):
            if tag == "!optimizer":
                return self._optimizer(obj, path, inner)
            tree = inner(KINDS[tag].read(obj), path)
            return tree if tree is LEFT_OUT else {tag: tree}

    def _whole(self, obj: Any, path: str, walk: Callable[[], Any]) -> Any:
        """Encode a container. One that holds only tensors is reused as a whole if it has not changed."""
        flat = None if self._as_one else flat_container(obj)
        if flat is None:
            return walk()
        tree = self.collected.reuse(path, flat)
        if tree is None:
            since = len(self.collected)
            with self._mode(as_one=True):
                tree = walk()
            names = [name if self._names.keeps(name) else "" for name in container_slots(obj, path)]
            self.collected.remember(path, flat, names, since, tree, refers=True)
        return tree

    @contextmanager
    def _mode(self, *, only_data: bool = False, as_one: bool = False, origin: Origin = Origin.OTHER) -> Iterator[None]:
        """How everything inside of the `with` block is encoded.

        `only_data`: it belongs to an object that will be loaded from plain data, so it must hold no object that is
        restored by writing into it. `as_one`: it belongs to an object that is remembered as a whole. `origin`: of its
        tensors.
        """
        before = self._only_data, self._as_one, self._origin
        self._only_data, self._as_one, self._origin = before[0] or only_data, before[1] or as_one, origin
        try:
            yield
        finally:
            self._only_data, self._as_one, self._origin = before

    def _tensor(self, obj: torch.Tensor | np.ndarray, path: str) -> Any:
        if isinstance(obj, np.ndarray):
            tensor = tensors.from_array(obj, path)
            self.collected.add(path, tensor, Origin.OTHER)
            return _in_order(tensor, {"!ndarray": [path, dtype_tree(obj.dtype)]})
        self.collected.add(path, obj, self._origin)
        is_parameter, wants_grad = isinstance(obj, nn.Parameter), obj.requires_grad and obj.is_leaf
        if obj.device.type == "cpu" and not is_parameter and not wants_grad:
            return _in_order(obj, {"!tensor": path})
        return _in_order(obj, {"!tensor": [path, str(obj.device), is_parameter, wants_grad]})

    def _flattened(self, obj: Any, path: str, inner: Inner) -> Any:
        """A tensor subclass: its inner tensors, named below its own name, and the data to make it again."""
        found, inside = len(self.collected), subclasses.inner_tensors(obj)
        if not all(self._names.keeps(join(path, name)) for name in (*inside, "__context__")):
            return LEFT_OUT
        context = inner(obj.__tensor_flatten__()[1], join(path, "__context__"))
        if len(self.collected) > found:
            raise refusal(path, f"is a {type(obj).__qualname__} whose context holds a tensor", "Store its tensors")
        with self._mode(only_data=True, as_one=True, origin=self.collected.origin_of(obj, self._origin)):
            parts = {name: inner(one, join(path, name)) for name, one in inside.items()}
        return {
            "!flattened": {
                "class": instances.class_name(type(obj)),
                "parts": parts,
                "context": context,
                "size": list(obj.shape),
                "stride": list(obj.stride()),
                "parameter": isinstance(obj, nn.Parameter),
                "requires_grad": obj.requires_grad and obj.is_leaf,
            }
        }

    def _module(self, module: nn.Module, path: str, inner: Inner) -> Any:
        flat = self._flats.get(id(module))
        tree = self.collected.reuse(path, flat)
        if tree is not None:
            return tree
        since = len(self.collected)
        entries, names = module_entries(module, path)
        own_parameters = module.named_parameters(remove_duplicate=False)
        parameters = {f"{path}.{plain_name(raw)}": one for raw, one in own_parameters}
        extra: dict[str, Any] = {}
        found = self._names.keeps(path)
        for name, raw in names.items():
            if subclasses.is_flattenable(entries[raw]):
                with self._mode(origin=Origin.PARAMETER if name in parameters else Origin.OTHER):
                    data = inner(parameters.get(name, entries[raw]), name)
                if data is not LEFT_OUT:
                    extra[name] = data
                continue
            if isinstance(entries[raw], torch.Tensor):
                if self._names.keeps(name):
                    tensors.require_storable(entries[raw], name)
                    own = parameters.get(name)
                    if own is not None and tensors.region(own) == tensors.region(entries[raw]):
                        self.collected.add(name, own, Origin.PARAMETER)
                    else:
                        self.collected.add(name, entries[raw], Origin.OTHER)
                    found = True
                continue
            with self._mode(only_data=True):
                data = inner(entries[raw], name)
            if data is not LEFT_OUT:
                extra[name] = data
        tree = {"!module": extra} if found or extra else LEFT_OUT
        if flat is not None:
            slots = zip(module_slots(module), flat.slots, strict=True)
            full = [f"{path}.{plain_name(raw)}" if stored and one is not None else "" for (raw, stored), one in slots]
            kept = [name if self._names.keeps(name) else "" for name in full]
            self.collected.remember(path, flat, kept, since, tree, refers=False)
        return tree

    def _optimizer(self, optimizer: Optimizer, path: str, inner: Inner) -> Any:
        options = []
        for index, group in enumerate(optimizer.param_groups):
            own = {key: one for key, one in group.items() if key not in ("params", "param_names")}
            options.append(inner(own, f"{path}.param_groups.{index}"))
        hooked = any(one is optimizer for one in self.optimizers)
        flat = self._owners.flat_optimizer(optimizer, hooked) if self._owned else None
        tree = self.collected.reuse(path, flat)
        if tree is None:
            since = len(self.collected)
            members = self._parameters.of(optimizer, path)
            with self._mode(as_one=True, origin=Origin.OPTIMIZER if hooked else Origin.OTHER):
                tree = self._optimizer_state(optimizer, members, path, inner)
            if flat is not None:
                of = optimizer.state
                held = [one for group in members for one in group if one.parameter in of]
                names = [join(f"{path}.state.{one.short}", key) for one in held for key in of[one.parameter]]
                kept = [name if self._names.keeps(name) else "" for name in names]
                self.collected.remember(path, flat, kept, since, tree, refers=True)
        named, state, shared = tree
        if not self._names.keeps(path) and not state and all(part is LEFT_OUT for part in (shared, *options)):
            return LEFT_OUT
        return {
            "!optimizer": {
                "class": type(optimizer).__qualname__,
                "groups": [
                    {"params": params, "options": {} if own is LEFT_OUT else own}
                    for params, own in zip(named, options, strict=True)
                ],
                "state": state,
                "common": {} if shared is LEFT_OUT else shared,
            }
        }

    def _optimizer_state(self, optimizer: Optimizer, members: list[list[Member]], path: str, inner: Inner) -> Any:
        """Names and shapes of the parameters by group, the state of each parameter, and state that belongs to none."""
        named = [[_described(one) for one in group] for group in members]
        state: dict[str, Any] = {}
        known: set[torch.Tensor] = set()
        for one in chain.from_iterable(members):
            known.add(one.parameter)
            if one.parameter in optimizer.state:
                data = inner(optimizer.state[one.parameter], f"{path}.state.{one.short}")
                if data is not LEFT_OUT:
                    state[one.qualified] = data
        common = {key: item for key, item in optimizer.state.items() if key not in known}
        if any(isinstance(key, torch.Tensor) for key in common):
            raise stale_state(optimizer, path)
        return named, state, inner(common, f"{path}.state")

    @cached_property
    def _flats(self) -> dict[int, Flat | None]:
        return {id(one): flat_module(one) for one in self._modules.values()}

    @cached_property
    def _owned(self) -> bool:
        return self._owners.update(self._modules, [self._flats[id(one)] for one in self._modules.values()])

    @cached_property
    def _parameters(self) -> Parameters:
        return Parameters(self._modules)


def _in_order(tensor: torch.Tensor, tree: dict[str, Any]) -> dict[str, Any]:
    """The tree that refers to a tensor, with the tensor's memory order where that is not row-major."""
    order = tensors.order(tensor)
    return {"!permuted": [[*order], tree]} if order else tree


def _described(one: Member) -> list[Any]:
    """Name and shape of a parameter of an optimizer, with its memory order where that is not row-major."""
    order = tensors.order(one.parameter)
    return [one.qualified, [*one.parameter.shape], *([[*order]] if order else [])]  # guard: parameter-order-stored

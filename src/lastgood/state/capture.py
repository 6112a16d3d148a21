"""Capture: a live state -> named tensors and values. Reads; copies no tensor, changes nothing. See state.py."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, compress
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import Refused, Unstorable
from ..format.encodings import dtype_tree
from ..format.values import LEFT_OUT, Filter, component, encode, join, refusal
from . import adapters, instances, subclasses, tensors
from .capture_cache import Flat, Owners, Part, container_slots, flat_container, flat_module, module_slots
from .dtensor import Sharded, Shards
from .objects import (
    KINDS,
    Member,
    Parameters,
    can_be_hooked,
    find_objects,
    may_step,
    module_entries,
    plain_name,
    read_rng,
    require_no_loader,
    stale_state,
    tag_of,
)
from .wrappers import Wrappers

Inner = Callable[[Any, str], Any]


class Origin(enum.IntEnum):
    """Who changes a tensor. The higher, the sooner it must be copied; memory with several names has the highest."""

    OPTIMIZER = 0
    """state of an optimizer of `Captured.optimizers`: only its step changes it"""
    STEPPED = 1
    """a parameter of a module, in a group of one of these optimizers"""
    PARAMETER = 2
    """a parameter of a module that none of these optimizers steps"""
    OTHER = 3
    """buffers, options, plain tensors, random number generators, what an object's own state_dict() says"""


@dataclass(frozen=True)
class Captured:
    """What a state is made of. Nothing is copied: the tensors are the live ones, without their gradients.

    What is the same in every save is shared between saves: nothing in here may be changed.
    """

    tensors: dict[str, torch.Tensor]
    """stored name -> tensor; each region of memory once"""
    addresses: list[int]
    """of each of them, in this order: one that is copied later may have been moved by then (`.data = ...`)"""
    aliases: dict[str, str]
    """further name of a tensor -> the name under which it is stored"""
    values: dict[str, Any]
    """name of a top-level entry, and "rng" -> JSON with typed tags"""
    key: int
    """of one `Capture`: another number when a name, dtype or shape in `tensors` is not what it was the last time"""
    origins: dict[str, Origin]
    """stored name -> who changes it"""
    optimizers: list[Optimizer]
    """those of the state, wanted or not, whose step can be hooked"""
    hookable: bool
    """whether nothing else in the state looks like an optimizer"""
    sharded: dict[str, Sharded] = field(default_factory=dict)
    """stored name -> what of it this process holds, where that is not all"""


def capture(state: Mapping[str, Any], include: Sequence[str] = (), exclude: Sequence[str] = ()) -> Captured:
    """Everything in `state`, and the random number generators; see `lastgood.state.rules` for names and rules.

    `include`, `exclude`: patterns (fnmatch) on dotted names, each speaking of all that lies below; "rng" stays unless
    it is excluded. Raises Unstorable, by name, for what cannot be stored without running code on load.
    """
    return Capture(include, exclude).take(state)


class Capture:
    """`capture` for one run: knows from the last time what the state was made of, and walks only what has changed."""

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
        """how many modules, optimizers and containers of tensors have been walked, all saves together"""

    def without(self, names: Iterable[str]) -> Capture:
        """Another one, which leaves out further names."""
        return Capture(self._include, [*self._exclude, *names])

    def take(self, state: Mapping[str, Any]) -> Captured:
        """As `capture(state)`. Every reference is read anew; the plan says no more than how things are named."""
        require_keys(state)
        self._peft.require_storable(state, self._names)
        walk = _Walk(state, self._names, self._owners, self._parts, self._wrappers)
        trees = {component(key): walk.encode(value, component(key)) for key, value in state.items()}
        if self._names.enters("rng"):
            trees["rng"] = walk.encode(read_rng(), "rng")
        self._parts = walk.parts
        self.walks += walk.walks
        same = walk.makeup == self._makeup
        names, found, addresses, origins, aliases, sharded = walk.once(same, self._shards)
        if not (same and aliases == self._aliases and sharded == self._sharded):
            layout = names, [one.dtype for one in found], [tuple(one.shape) for one in found], sharded
            self._key += layout != self._layout
            self._layout = layout
        self._makeup, self._aliases, self._sharded = walk.makeup, aliases, sharded
        if origins != list(self._origins.values()) or names != list(self._origins):
            self._origins = dict(zip(names, origins, strict=True))
        return Captured(
            dict(zip(names, found, strict=True)),
            addresses,
            aliases,
            {name: tree for name, tree in trees.items() if tree is not LEFT_OUT},
            self._key,
            self._origins,
            walk.optimizers,
            walk.hookable,
            sharded,
        )


def finite(
    captured: Captured, also: Sequence[str] = (), but: Sequence[str] = (), exempt: Collection[str] = ()
) -> frozenset[str]:
    """Tensors in which NaN or infinity makes a state unfit: parameters, what optimizers keep, and what `also` names.

    Never those named in `but`, nor what can hold neither; those in `exempt` only where `also` names them. `also` and
    `but` are patterns as in `capture`, `exempt` are stored names.
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
    """The filter that a caller's patterns make."""
    names = Filter(include, exclude)
    return names if not include else Filter([*include, "rng"], exclude)


def visit(state: Mapping[str, Any], names: Filter) -> None:
    """Ask `names` about every name in `state`, and of the random number generators, as a capture would.

    Of an entry that cannot be stored, about the names before the obstacle.
    """
    walk = _Walk(state, names, Owners(), {}, Wrappers())
    for key, value in (*state.items(), ("rng", read_rng())):
        with suppress(Unstorable):
            walk.encode(value, component(key))


def require_keys(state: Mapping[str, Any]) -> None:
    """Raises Refused for keys that cannot be names."""
    for key in state:
        if type(key) is not str or key in ("rng", "__metadata__"):
            taken = " is taken: the random number generators are kept there" if key == "rng" else " cannot be a name"
            raise Refused(f"the key {key!r} of the state{taken}", safe="Nothing was touched.", todo="Use another key.")


def _untracked(tensor: torch.Tensor) -> torch.Tensor:
    """Without its gradient; what has none stands for itself, because 10^5 new objects set the collector off."""
    kind = type(tensor)
    tracked = kind is nn.Parameter or (kind is torch.Tensor and tensor.requires_grad)  # a shard is taken later
    return tensor.detach() if tracked else tensor


def _in_order(tensor: torch.Tensor, tree: dict[str, Any]) -> dict[str, Any]:
    """A reference, and the memory order of its tensor where that is not row-major."""
    order = tensors.order(tensor)
    return {"!permuted": [[*order], tree]} if order else tree


def _described(one: Member) -> list[Any]:
    """Name and shape of an optimizer's parameter, and its memory order where that is not row-major."""
    order = tensors.order(one.parameter)
    return [one.qualified, [*one.parameter.shape], *([[*order]] if order else [])]  # guard: parameter-order-stored


class _Walk:
    """One walk over a state, and what it has found so far."""

    def __init__(
        self,
        state: Mapping[str, Any],
        names: Filter,
        owners: Owners,
        remembered: Mapping[str, Part],
        wrappers: Wrappers,
    ) -> None:
        self._names, self._owners, self._remembered, self._wrappers = names, owners, remembered, wrappers
        objects = {path: wrappers.unwrapped(one) for path, one in find_objects(state).items()}
        self._modules = {path: one for path, one in objects.items() if isinstance(one, nn.Module)}
        stepping = {id(one): one for one in objects.values() if may_step(one)}.values()
        self.optimizers: list[Optimizer] = [one for one in stepping if can_be_hooked(one)]
        self.hookable = len(self.optimizers) == len(stepping)
        groups = [group["params"] for one in self.optimizers for group in one.param_groups]
        self._stepped = set(map(id, chain.from_iterable(groups)))
        self.parts: dict[str, Part] = {}
        self.walks = 0
        self.makeup: list[Any] = []
        """the parts, and name, dtype and shape of every other tensor, in order: equal ones have equal layouts"""
        self._found_names: list[str] = []
        self._found: list[torch.Tensor] = []
        self._found_origins: list[Origin] = []
        self._only_data = self._as_one = False
        self._origin = Origin.OTHER

    def encode(self, obj: Any, path: str) -> Any:
        return encode(obj, path, self._leaf, self._names, self._whole)

    # ---- what was found ------------------------------------------------------------------------------------

    def once(
        self, named_before: bool, shards: Shards
    ) -> tuple[list[str], list[torch.Tensor], list[int], list[Origin], dict[str, str], dict[str, Sharded]]:
        """Names, tensors, addresses and origins, each region of memory once; further name -> name of those with two.

        Of what is sharded the memory that is here, and which box of it that is.
        """
        names, found, origins = self._found_names, self._found, self._found_origins
        sharded = shards.localized(names, found)
        if not named_before and len(set(names)) < len(names):
            name = next(name for name, count in Counter(names).items() if count > 1)
            raise refusal(name, "is the name of two tensors", "Rename one of them")
        addresses = list(map(torch.Tensor.data_ptr, found))
        if len(set(addresses)) == len(addresses):
            return names, found, addresses, origins, {}, sharded
        shared = {address for address, count in Counter(addresses).items() if count > 1}
        first: dict[Hashable, int] = {}
        aliases: dict[str, str] = {}
        for index, address in enumerate(addresses):
            if address in shared and (spot := tensors.region(found[index])) is not None:
                at = first.setdefault(spot, index)
                if at != index:
                    aliases[names[index]] = names[at]
                    origins[at] = max(origins[at], origins[index])
        stored = [index for index, name in enumerate(names) if name not in aliases]
        return (
            [names[at] for at in stored],
            [found[at] for at in stored],
            [addresses[at] for at in stored],
            [origins[at] for at in stored],
            aliases,
            {name: one for name, one in sharded.items() if name not in aliases},
        )

    def _add(self, name: str, tensor: torch.Tensor, origin: Origin) -> None:
        tensors.require_storable(tensor, name)
        self._found_names.append(name)
        self._found.append(_untracked(tensor))
        self._found_origins.append(self._stepping(tensor, origin))
        self.makeup.append((name, tensor.dtype, tuple(tensor.shape)))

    def _stepping(self, tensor: torch.Tensor, origin: Origin) -> Origin:
        return Origin.STEPPED if origin is Origin.PARAMETER and id(tensor) in self._stepped else origin

    def _known(self, path: str, flat: Flat | None) -> Any:
        """The tree of what is as it was the last time, its tensors taken; None for anything else."""
        part = self._remembered.get(path)
        live = part.take(flat) if part and flat else None
        if part is None or live is None:
            self.walks += 1
            return None
        self.parts[path] = part
        self.makeup.append(part)
        self._found_names += part.names
        self._found += live if part.untracked else map(_untracked, live)
        self._found_origins += part.origins if part.untracked else map(self._stepping, live, part.origins)
        return part.tree

    def _remember(self, path: str, flat: Flat, names: Sequence[str], since: int, tree: Any, refers: bool) -> None:
        """Keep what a walk has made of an object, if since `since` it has found just what `flat` says.

        `names`: one for each slot of `flat`, empty for what is not stored.
        """
        live = list(compress(flat.slots, names))
        if self._found_names[since:] == list(filter(None, names)) and all(
            tensors.region(one) == tensors.region(other) for one, other in zip(live, self._found[since:], strict=True)
        ):
            origins = [Origin.PARAMETER if one is Origin.STEPPED else one for one in self._found_origins[since:]]
            part = self.parts[path] = Part(flat, names, tree, origins, refers)
            self.makeup[len(self.makeup) - len(live) :] = [part]

    # ---- the walk ------------------------------------------------------------------------------------------

    def _leaf(self, obj: Any, path: str, inner: Inner) -> Any:
        """The hook of the codec: what it does not know."""
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
            what = f"is a {type(obj).__qualname__} inside of another object's state, with no place to be restored to"
            raise refusal(path, what, "Hand out what it is made of (its state_dict() or get_state())")
        if tag == "!module":
            return self._module(obj, path, inner)
        with self._mode(only_data=True):
            if tag == "!optimizer":
                return self._optimizer(obj, path, inner)
            tree = inner(KINDS[tag].read(obj), path)
            return tree if tree is LEFT_OUT else {tag: tree}

    def _whole(self, obj: Any, path: str, walk: Callable[[], Any]) -> Any:
        """The codec's hook for containers: one that holds nothing but tensors may be known as a whole."""
        flat = None if self._as_one else flat_container(obj)
        if flat is None:
            return walk()
        tree = self._known(path, flat)
        if tree is None:
            since = len(self._found)
            with self._mode(as_one=True):
                tree = walk()
            names = [name if self._names.keeps(name) else "" for name in container_slots(obj, path)]
            self._remember(path, flat, names, since, tree, refers=True)
        return tree

    @contextmanager
    def _mode(self, *, only_data: bool = False, as_one: bool = False, origin: Origin = Origin.OTHER) -> Iterator[None]:
        """`only_data`: what an object is made of is handed back to it as data, with no live objects in there to write
        into. `as_one`: what is met belongs to something that is remembered as a whole."""
        before = self._only_data, self._as_one, self._origin
        self._only_data, self._as_one, self._origin = before[0] or only_data, before[1] or as_one, origin
        try:
            yield
        finally:
            self._only_data, self._as_one, self._origin = before

    def _tensor(self, obj: torch.Tensor | np.ndarray, path: str) -> Any:
        if isinstance(obj, np.ndarray):
            tensor = tensors.from_array(obj, path)
            self._add(path, tensor, Origin.OTHER)
            return _in_order(tensor, {"!ndarray": [path, dtype_tree(obj.dtype)]})
        self._add(path, obj, self._origin)
        is_parameter, wants_grad = isinstance(obj, nn.Parameter), obj.requires_grad and obj.is_leaf
        if obj.device.type == "cpu" and not is_parameter and not wants_grad:
            return _in_order(obj, {"!tensor": path})
        return _in_order(obj, {"!tensor": [path, str(obj.device), is_parameter, wants_grad]})

    def _flattened(self, obj: Any, path: str, inner: Inner) -> Any:
        """A tensor subclass: its inner tensors under its name, and what else makes it what it is."""
        found, inside = len(self._found), subclasses.inner_tensors(obj)
        if not all(self._names.keeps(join(path, name)) for name in (*inside, "__context__")):
            return LEFT_OUT
        context = inner(obj.__tensor_flatten__()[1], join(path, "__context__"))
        if len(self._found) > found:
            raise refusal(path, f"is a {type(obj).__qualname__} whose context holds a tensor", "Store its tensors")
        with self._mode(only_data=True, as_one=True, origin=self._stepping(obj, self._origin)):
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
        tree = self._known(path, flat)
        if tree is not None:
            return tree
        since = len(self._found)
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
                        self._add(name, own, Origin.PARAMETER)
                    else:
                        self._add(name, entries[raw], Origin.OTHER)
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
            self._remember(path, flat, kept, since, tree, refers=False)
        return tree

    def _optimizer(self, optimizer: Optimizer, path: str, inner: Inner) -> Any:
        options = []
        for index, group in enumerate(optimizer.param_groups):
            own = {key: one for key, one in group.items() if key not in ("params", "param_names")}
            options.append(inner(own, f"{path}.param_groups.{index}"))
        hooked = any(one is optimizer for one in self.optimizers)
        flat = self._owners.flat_optimizer(optimizer, hooked) if self._owned else None
        tree = self._known(path, flat)
        if tree is None:
            since = len(self._found)
            members = self._parameters.of(optimizer, path)
            with self._mode(as_one=True, origin=Origin.OPTIMIZER if hooked else Origin.OTHER):
                tree = self._optimizer_state(optimizer, members, path, inner)
            if flat is not None:
                of = optimizer.state
                held = [one for group in members for one in group if one.parameter in of]
                names = [join(f"{path}.state.{one.short}", key) for one in held for key in of[one.parameter]]
                kept = [name if self._names.keeps(name) else "" for name in names]
                self._remember(path, flat, kept, since, tree, refers=True)
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
        """Names and shapes of the parameters by group, their state, and what is the state of none."""
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
        return self._owners.look(self._modules, [self._flats[id(one)] for one in self._modules.values()])

    @cached_property
    def _parameters(self) -> Parameters:
        return Parameters(self._modules)

"""Binding: each live thing beside what is stored for it -> what differs, and how it will be written.

Compares only. What is to be done is collected for `Match.apply`, in this order: `checks` of all tensors; `places` and
`takers` of all tensors; the Puts of the state; and `last`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.optim import LBFGS, Optimizer

from ..format.boxes import Box
from ..format.values import LEFT_OUT, Filter, join, only_numbers
from . import adapters, dtensor, instances, subclasses, tensors
from .decode import ArrayRef, SavedFlattened, SavedInstance, SavedObject, SavedOptimizer, Stored, TensorRef
from .objects import KINDS, Parameters, holds_objects, module_entries, plain_name, tag_of
from .own_loading import OwnLoading, calling
from .tensor_sink import Place, Take
from .wrappers import Wrappers

Put = Callable[[], Any]
"""run once the tensors are there: makes what belongs at a place; where it can be, the live object itself, refilled"""


class Making(NamedTuple):
    """How a new tensor is made: its device, its memory order, and the tensor that it is sharded like, if it is."""

    device: torch.device
    order: tensors.Order = ()
    like: torch.Tensor | None = None


Home = Callable[[TensorRef, str], Making]
"""how the new tensor at a path is made"""

ABSENT: Any = type("Absent", (), {"__doc__": "Stands where the live state has nothing."})()


class Binder:
    """One walk over a live state beside a stored one, and what it has found."""

    def __init__(
        self,
        stored: Stored,
        offered: dict[str, str],
        names: Filter,
        rename: Callable[[str], str],
        modules: Mapping[str, nn.Module],
    ) -> None:
        self._stored, self._offered, self._names = stored, offered, names
        self._rename, self._parameters, self._own_loading = rename, Parameters(modules), OwnLoading(modules)
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.mismatched: list[str] = []
        self.checks: dict[str, list[Take]] = {}
        self.conflicts: list[str] = []
        """what the checks have found: differences that only the content shows"""
        self.places: dict[str, list[Place]] = {}
        self.takers: dict[str, list[Take]] = {}
        self.last: list[Callable[[], object]] = []
        self._claimed: set[str] = set()  # names in `offered` that the live state has a place for
        self._whole: list[str] = []  # names listed as one difference, with all below them
        self._regions: dict[Hashable, tuple[str, str]] = {}  # live memory -> stored tensor it takes, live name
        self._wrappers = Wrappers()
        self.boxed: dict[str, tuple[str, Box]] = {}
        """name in `places`, `takers`, `checks` -> the stored tensor, and which box of it"""
        self._slots: dict[tuple[str, torch.device, tensors.Order], tuple[list[torch.Tensor], torch.Tensor | None]] = {}

    def differences(self) -> list[str]:
        """All of them, each with its reason."""
        missing = [f"{name}: missing in the generation" for name in self.missing]
        return missing + [f"{name}: unexpected in the generation" for name in self.unexpected] + self.mismatched

    def offers_below(self, path: str) -> bool:
        """Whether a tensor of a module is stored under this path."""
        return any(name.startswith(f"{path}.") for name in self._offered)

    def has_no_place(self, path: str) -> None:
        """Note something that is stored and cannot be made from data alone, as one difference."""
        self._whole.append(path)
        if self._names.keeps(path):
            self.unexpected.append(path)

    def leave_out(self, paths: list[str]) -> None:
        """Note entries that are stored and not asked for; they are no difference."""
        self._whole += paths

    def note_unclaimed(self) -> None:
        """Note the stored tensors that no module has asked for."""
        for name in self._offered:
            listed = name in self._claimed or any(name.startswith(f"{one}.") for one in self._whole)
            if not listed and self._names.keeps(name):
                self.unexpected.append(name)

    def bind(self, live: Any, saved: Any, path: str, home: Home | None = None) -> Put:
        """How `saved` goes to where `live` is. Where they differ it is noted, and the live one stays."""
        if saved is LEFT_OUT or not self._names.enters(path):
            return _stays(live)
        if isinstance(saved, SavedObject):
            return self._object(live, saved, path)
        if isinstance(saved, SavedInstance):
            return self._instance(live, saved, path, home)
        if isinstance(saved, SavedFlattened):
            return self._flattened(live, saved, path, home)
        alike = type(live) is type(saved)
        if type(saved) in (dict, OrderedDict, defaultdict) and (alike or not holds_objects(live)):
            return self._mapping(live if alike else _empty(saved), saved, path, home)
        if type(saved) is deque and alike and live.maxlen != saved.maxlen:
            alike = False  # the bound of a deque cannot be changed
        if type(saved) in (list, tuple, deque) and (alike or not holds_objects(live)):
            return self._sequence(live if alike else _empty(saved), saved, path, home)
        if not self._names.keeps(path):
            return _stays(live)
        if holds_objects(live):
            self._differs(path, f"data in the generation, {_kind(live)} here")
            return _stays(live)
        if isinstance(saved, TensorRef):
            return self._tensor(live, saved, path, home)
        if isinstance(saved, ArrayRef):
            return self._array(live, saved, path)
        return partial(_refill, live, saved) if alike and type(saved) in (set, Counter, bytearray) else lambda: saved

    def _differs(self, path: str, why: str) -> None:
        self.mismatched.append(f"{path}: {why}")
        self._whole.append(path)

    # ---- data ----------------------------------------------------------------------------------------------------

    def _mapping(self, live: dict[Any, Any], saved: dict[Any, Any], path: str, home: Home | None) -> Put:
        puts = [(key, self.bind(live.get(key, ABSENT), item, join(path, key), home)) for key, item in saved.items()]
        staying = [key for key in live if key not in saved and self._has_to_stay(live[key], join(path, key))]

        def put() -> Any:
            entries = {key: made for key, one in puts if (made := one()) is not LEFT_OUT}
            return _refill(live, entries | {key: live[key] for key in staying})

        return put

    def _sequence(self, live: Any, saved: Any, path: str, home: Home | None) -> Put:
        if self._names.everything and only_numbers(saved) and only_numbers(live):
            return partial(_refill_sequence, live, lambda: saved)
        beside = [*live, *[ABSENT] * (len(saved) - len(live))]
        puts = [self.bind(beside[index], item, f"{path}.{index}", home) for index, item in enumerate(saved)]
        over = range(len(saved), len(live))
        staying = [live[index] for index in over if self._has_to_stay(live[index], f"{path}.{index}")]
        return partial(_refill_sequence, live, lambda: [*(one() for one in puts), *staying])

    def _has_to_stay(self, live: Any, path: str) -> bool:
        """Whether something that the generation lacks is not simply removed: an object, or what is not wanted."""
        if not self._names.keeps(path):
            return True
        if holds_objects(live):
            self.missing.append(path)
            return True
        return False

    def _instance(self, live: Any, saved: SavedInstance, path: str, home: Home | None) -> Put:
        """Its parts where the live ones are; the live instance is refilled where it can be."""
        kind, why = instances.resolve(saved.tag, saved.name, saved.parts, live)
        alike = type(live) is kind
        if not why and (tag_of(live) or (not alike and holds_objects(live))):
            why = f"data in the generation, {_kind(live)} here"
        if why:
            if self._names.keeps(path):
                self._differs(path, why)
            return _stays(live)
        before = instances.FORMS[saved.tag].apart(live) if alike else {}
        lacking = (join(path, name) for name in before.keys() - saved.parts.keys())
        self.missing += sorted(filter(self._names.keeps, lacking))
        puts = {
            name: self.bind(before.get(name, ABSENT), part, join(path, name), home)
            for name, part in saved.parts.items()
        }

        def put() -> Any:
            made = {name: one() for name, one in puts.items()}
            parts = before | {name: None if part is LEFT_OUT else part for name, part in made.items()}
            return instances.FORMS[saved.tag].together(kind, parts, live if alike else None)

        return put

    # ---- tensors -------------------------------------------------------------------------------------------------

    def _flattened(self, live: Any, saved: SavedFlattened, path: str, home: Home | None) -> Put:
        """A tensor subclass: its inner tensors in place where it fits; else only an optimizer gets a new one."""
        if not self._names.keeps(path):
            return _stays(live)
        kind, why = subclasses.resolve(saved.name, live)
        context = self.bind(ABSENT, saved.context, join(path, "__context__"))()
        alike = not why and type(live) is kind and subclasses.is_like(live, set(saved.parts), context, saved.shape)
        if not why and not alike and home is None and isinstance(live, torch.Tensor):
            why = f"{saved.name} {list(saved.shape)} in the generation, {_kind(live)} {list(live.shape)} here"
        if why:
            self._differs(path, why)
            return _stays(live)
        before: dict[str, Any] = subclasses.inner_tensors(live) if alike else {}
        puts = {
            name: self.bind(before.get(name, ABSENT), part, join(path, name), home)
            for name, part in saved.parts.items()
        }
        if not alike or home is not None:
            try:
                self._trial(live, saved, path, home)
            except TypeError as error:
                self._differs(path, f"{saved.name} cannot be made here: {error}")
                return _stays(live)

        def put() -> Any:
            parts = {name: one() for name, one in puts.items()}
            if alike and all(part is before[name] for name, part in parts.items()):
                return live
            made = subclasses.together(kind, parts, context, saved.shape, saved.stride)
            return _formed(made, saved.is_parameter, saved.wants_grad)

        return put

    def _trial(self, live: Any, saved: SavedFlattened, path: str, home: Home | None) -> Any:
        """A tensor subclass of the stored parts without their content, to see that one can be made of them."""
        parts = {}
        for name, part in saved.parts.items():
            if isinstance(part, SavedFlattened):
                parts[name] = self._trial(getattr(live, name, ABSENT), part, join(path, name), home)
            else:
                making = self._making(part, join(path, name), home)
                parts[name] = tensors.blank(*self._stored.tensors[part.name], making.device, making.order)
        kind, why = subclasses.resolve(saved.name, live)
        if why:
            raise TypeError(why)
        context = self.bind(ABSENT, saved.context, join(path, "__context__"))()
        return subclasses.together(kind, parts, context, saved.shape, saved.stride)

    def _making(self, ref: TensorRef, path: str, home: Home | None) -> Making:
        return home(ref, path) if home else Making(tensors.at_hand(ref.device), ref.order)

    def _tensor(self, live: Any, ref: TensorRef, path: str, home: Home | None) -> Put:
        """In place where a live tensor fits. Where it does not, only an optimizer (`home`) gets a new one."""
        making = self._making(ref, path, home)
        if isinstance(live, torch.Tensor):
            if not subclasses.is_flattenable(live):
                tensors.require_storable(live, path)
            why = self._unlike(live, ref.name)
            if home is None and why:
                self._differs(path, why)
                return _stays(live)
            # guard: live-memory-order-must-match
            fits = (live.device, tensors.order(live)) == (making.device, making.order)
            if not why and (home is None or (fits and self._is_free(live, ref.name))):
                self._write(live, ref.name, path)
                return _stays(live)
        slot = self._new(ref.name, making, path)
        return lambda: _formed(slot[0], ref.is_parameter, ref.wants_grad)

    def _array(self, live: Any, ref: ArrayRef, path: str) -> Put:
        if isinstance(live, np.ndarray):
            if (live.dtype, live.shape) != (ref.dtype, ref.shape):
                theirs, ours = (f"{one.dtype} {list(one.shape)}" for one in (ref, live))
                self._differs(path, f"array {theirs} in the generation, {ours} here")
                return _stays(live)
            if live.flags.writeable:
                memory = ("numpy", live.ctypes.data, live.dtype.str, live.shape, live.strides) if live.size else None
                if self._claims(memory, ref.name, path):
                    taker = partial(_fill_array, live, ref.dtype)
                    self.takers.setdefault(self._target(ref.name), []).append(taker)
                return _stays(live)
        slot = self._new(ref.name, Making(torch.device("cpu"), ref.order), path)
        return lambda: tensors.to_array(slot[0], ref.dtype)

    def _target(self, name: str) -> str:
        return self._stored.aliases.get(name, name)

    def _placed(self, live: torch.Tensor, name: str, path: str) -> tuple[torch.Tensor, str]:
        """The memory that is to be written, and the name of what comes there: of a shard, the box that it is."""
        if not dtensor.is_sharded(live):
            return live, self._target(name)
        box, here = dtensor.box_of(live, path), dtensor.local(live)
        key = f"{self._target(name)} {box.offsets} {box.shape}"
        self.boxed[key] = self._target(name), box
        return here, key

    def _unlike(self, live: torch.Tensor, name: str) -> str:
        theirs = self._stored.tensors[name]
        ours = (tensors.dtype_name(live.dtype), tuple(live.shape))
        if subclasses.is_flattenable(live):
            return f"a plain tensor in the generation, {_kind(live)} here"
        if theirs == ours:
            return ""
        return f"{theirs[0]} {list(theirs[1])} in the generation, {ours[0]} {list(ours[1])} here"

    def _is_free(self, live: torch.Tensor, name: str) -> bool:
        taken = self._regions.get(tensors.region(live))
        return taken is None or taken[0] == self._target(name)

    def _claims(self, memory: Hashable, name: str, path: str) -> bool:
        """Whether this live memory is still to be written; notes it if another stored tensor goes there too."""
        if memory is None:
            return False
        first = self._regions.setdefault(memory, (self._target(name), path))
        if first[0] != self._target(name):
            self._differs(path, f"one tensor with {first[1]} here, two in the generation")
        return first == (self._target(name), path)

    def _write(self, live: torch.Tensor, name: str, path: str) -> None:
        """Plan to fill a live tensor, once for each region of memory."""
        if not self._claims(tensors.region(live), name, path):
            return
        live, target = self._placed(live, name, path)
        part = tensors.once(live)
        if part.shape == live.shape:
            self._fill(live, target)
            return
        first = tuple(slice(size) for size in part.shape)

        def check(source: torch.Tensor) -> None:
            if not torch.equal(tensors.as_bytes(source[first].expand_as(source)), tensors.as_bytes(source)):
                self.conflicts.append(
                    f"{path}: expanded here (one element in memory for many), and they differ in the generation"
                )

        self.checks.setdefault(target, []).append(check)
        self.takers.setdefault(target, []).append(lambda source: tensors.write(part, source[first]))

    def _fill(self, tensor: torch.Tensor, target: str) -> None:
        """Plan to write all of a tensor: part by part where its memory is one run of its bytes, else as a whole."""
        if place := Place.of(tensor):
            self.places.setdefault(target, []).append(place)
        else:
            self.takers.setdefault(target, []).append(partial(tensors.write, tensor))

    def _new(self, name: str, making: Making, path: str) -> list[torch.Tensor]:
        """Where a new tensor will be found; one for all names of one stored tensor."""
        device, order, like = making
        target = self._target(name) if like is None else self._placed(like, name, path)[1]
        return self._slots.setdefault((target, device, order), ([], like))[0]

    def make_new(self) -> None:
        """Make the new tensors; their content is still to come."""
        for (target, device, order), (slot, like) in self._slots.items():
            stored, box = self.boxed.get(target) or (target, None)
            dtype, shape = self._stored.tensors[stored]
            made = tensors.blank(dtype, shape if box is None else box.shape, device, order)
            slot[:] = [made if like is None else dtensor.like(made, like, tensors.strides(like.shape, order))]
            self._fill(made, target)

    # ---- objects -------------------------------------------------------------------------------------------------

    def _object(self, live: Any, saved: SavedObject, path: str) -> Put:
        if live is ABSENT:
            self.has_no_place(path)
            return _stays(live)
        as_object = tag_of(live) == saved.tag == "!object"  # a wrapper itself takes what earlier versions saved of it
        inner = live if as_object else self._wrappers.unwrapped(live)
        if tag_of(inner) != saved.tag:
            self._differs(path, f"{saved.tag[1:]} in the generation, {_kind(live)} here")
        elif saved.tag == "!module":
            return self._module(live, saved.data, path)
        elif saved.tag == "!optimizer":
            self._optimizer(inner, saved.data, path)
        elif why := KINDS[saved.tag].differs(live, saved.data):
            self._differs(path, why)
        else:
            data = self.bind(ABSENT, saved.data, path, self._as_it_is_spread(live, saved.tag, path))
            return partial(self._loaded, live, KINDS[saved.tag].load, data, path)
        return _stays(live)

    def _loaded(self, live: Any, load: Callable[[Any, Any], None], data: Put, path: str) -> Any:
        content = data()
        with calling(live, path, self._stored.step):
            load(live, content)
        return live

    def _as_it_is_spread(self, live: Any, tag: str, path: str) -> Home | None:
        """What the object hands out as shards it is handed back as such; asked only where there may be shards."""
        spread = dtensor.below(KINDS[tag].read(live), path) if dtensor.are_possible() else {}

        def home(ref: TensorRef, path: str) -> Making:
            like = spread.get(path)
            if like is None or self._unlike(like, ref.name):
                return Making(tensors.at_hand(ref.device), ref.order)
            return Making(like.device, ref.order, like)

        return home if spread else None

    def _module(self, live: nn.Module, extra: dict[str, Any], path: str) -> Put:
        """Its own tensors in place; what its state_dict computes or adds goes back through its load_state_dict."""
        if found := adapters.merged(live):  # guard: merged-adapters-refused-on-load
            self._differs(path, f"adapters are merged into its weights here ({found}): call unmerge_adapter() before")
            return _stays(live)
        extra = {self._rename(name): saved for name, saved in extra.items()}
        own = {tensors.storage(one) for one in (*live.parameters(), *live.buffers())}
        own_parameters = live.named_parameters(remove_duplicate=False)
        parameters = {f"{path}.{plain_name(raw)}": one for raw, one in own_parameters}
        entries, names = module_entries(live, path)
        handed: dict[str, Put] = {}
        reshaped: list[str] = []
        for name, raw in names.items():
            value = entries[raw]
            if name in extra:
                saved = extra.pop(name)
                if isinstance(saved, SavedFlattened):
                    self.bind(parameters.get(name, value), saved, name)
                else:
                    handed[raw] = self.bind(ABSENT, saved, name)
            elif not self._names.keeps(name):
                continue
            elif name not in self._offered:
                self.missing.append(name)
            elif not isinstance(value, torch.Tensor):
                self._differs(name, f"a tensor in the generation, {_kind(value)} here")
            elif self._own_loading.takes_shape(name, *self._stored.tensors[self._offered[name]]):
                reshaped.append(raw)
                handed[raw] = self.bind(ABSENT, TensorRef(self._offered[name], value.device), name)
            else:
                if not subclasses.is_flattenable(value):
                    tensors.require_storable(value, name)
                why = self._unlike(value, self._offered[name])
                if why and not raw.endswith(_EXTRA_STATE_KEY_SUFFIX):  # which may be of any size
                    self._differs(name, why)
                elif not why and tensors.storage(value) in own:
                    self._write(value, self._offered[name], name)
                else:
                    handed[raw] = self.bind(ABSENT, TensorRef(self._offered[name], value.device), name)
            self._claimed.add(name)
        self.unexpected += [name for name in extra if self._names.keeps(name)]
        followed = path in self._own_loading.modules or any(one._load_state_dict_post_hooks for one in live.modules())
        if not handed and not followed:
            return _stays(live)

        def put() -> nn.Module:
            made = {raw: one() for raw, one in handed.items()}
            entries.update({raw: value for raw, value in made.items() if value is not LEFT_OUT})
            with calling(live, path, self._stored.step):
                live.load_state_dict(entries)
            self._own_loading.require_taken(live, {raw: made[raw] for raw in reshaped}, path, self._stored.step)
            return live

        return put

    # ---- optimizers ----------------------------------------------------------------------------------------------

    def _optimizer(self, live: Optimizer, saved: SavedOptimizer, path: str) -> None:
        """Its state and hyperparameters, name by name; after everything else, as a scheduler may write there too."""
        groups = self._parameters.of(live, path)
        kind = type(live).__qualname__
        if kind != saved.kind:
            return self._differs(path, f"{saved.kind} in the generation, {kind} here")
        if len(groups) != len(saved.groups):
            return self._differs(path, f"{len(saved.groups)} parameter groups in the generation, {len(groups)} here")
        puts: list[Callable[[], object]] = []
        for index, (members, theirs) in enumerate(zip(groups, saved.groups, strict=True)):
            where, group = f"{path}.param_groups.{index}", live.param_groups[index]
            stored = {self._rename(name.replace("._forward_module.", ".")): name for name in theirs.params}
            ours = [one.qualified for one in members]
            if isinstance(live, LBFGS) and list(stored) != ours:  # one flat vector over all parameters, in their order
                return self._differs(where, "other parameters, or another order of them, in the generation")
            self.missing += [f"{where}: {name}" for name in ours if name not in stored]
            self.unexpected += [f"{where}: {name}" for name in stored if name not in ours]
            for key, item in theirs.options.items():
                puts.append(partial(_set, group, key, self.bind(group.get(key, ABSENT), item, join(where, key))))
            flags = group | {key: item for key, item in theirs.options.items() if self._names.enters(join(where, key))}
            held = bool(flags.get("capturable") or flags.get("fused"))
            for one in members:
                if one.qualified not in stored:
                    continue
                (shape, order), short = theirs.params[stored[one.qualified]], f"{path}.state.{one.short}"
                if why := self._shape_differs(one.parameter, list(shape), short):
                    self._differs(short, why)
                else:
                    data = saved.state.get(stored[one.qualified], ABSENT)
                    puts.append(self._of_parameter(live, one.parameter, order, held, data, short))
        shared = {key: item for key, item in live.state.items() if not isinstance(key, torch.Tensor)}
        puts.append(
            partial(_replace, live.state, set(shared), self._mapping(shared, saved.common, f"{path}.state", None))
        )
        self.last.extend(puts)
        return None

    def _shape_differs(self, parameter: torch.Tensor, stored: list[int], path: str) -> str:
        """Why the state of a parameter of this shape does not fit; nothing if it does, or will once that is loaded."""
        if nn.parameter.is_lazy(parameter):
            return "of a lazy parameter that has no shape yet: run one forward pass first"
        ours = list(parameter.shape)
        if ours != stored and self._own_loading.may_resize(parameter):
            self.last.append(partial(self._own_loading.require_shape, parameter, stored, path, self._stored.step))
            return ""
        return "" if ours == stored else f"of a parameter of shape {stored} in the generation, {ours} here"

    def _of_parameter(
        self, live: Optimizer, parameter: torch.Tensor, order: tensors.Order, held: bool, saved: Any, path: str
    ) -> Callable[[], object]:
        """`order`: the memory order of the parameter at the save. `held`: capturable or fused, which keep all of its
        state with the parameter.

        State that had the shape and the memory order of the parameter takes the memory order of the live parameter,
        because fused kernels pair elements by their place in memory. All other state keeps its own.
        """
        before = live.state.get(parameter, ABSENT)
        if saved is ABSENT:
            return partial(_set_or_clear, live.state, parameter, self.bind(before, {}, path))
        parts = saved.values() if isinstance(saved, dict) else [saved]
        accelerated = any(isinstance(part, TensorRef) and part.device.type != "cpu" for part in parts)

        def home(ref: TensorRef, path: str) -> Making:
            """With the parameter, but for scalars on the host: `step`, and what a parameter elsewhere had there."""
            shape = self._stored.tensors[ref.name][1]
            alike = shape == tuple(parameter.shape)
            scalar = shape == () and ref.device.type == "cpu"
            device = ref.device if scalar and not held and (accelerated or path.endswith(".step")) else parameter.device
            # guard: new-state-memory-order
            memory = tensors.order(parameter) if alike and ref.order == order else ref.order
            return Making(device, memory, parameter if alike and dtensor.is_sharded(parameter) else None)

        return partial(_set, live.state, parameter, self.bind(before, saved, path, home))


# ---- what a Put does ---------------------------------------------------------------------------------------------


def _stays(live: Any) -> Put:
    return partial(_itself, LEFT_OUT if live is ABSENT else live)


def _itself(obj: Any) -> Any:
    return obj


def _refill(live: Any, content: Any) -> Any:
    live.clear()
    (live.extend if isinstance(live, bytearray) else live.update)(content)
    return live


def _empty(saved: Any) -> Any:
    """A new container of the kind of a stored one."""
    if type(saved) is deque:
        return deque(maxlen=saved.maxlen)
    return defaultdict(saved.default_factory) if type(saved) is defaultdict else type(saved)()


def _refill_sequence(live: Any, content: Put) -> Any:
    items = [None if item is LEFT_OUT else item for item in content()]
    if type(live) is list:
        live[:] = items
        return live
    if type(live) is deque:
        live.clear()
        live.extend(items)
        return live
    same = len(items) == len(live) and all(one is other for one, other in zip(items, live, strict=True))
    return live if same else tuple(items)


def _set(entries: Any, key: Any, put: Put) -> None:
    if (made := put()) is not LEFT_OUT:
        entries[key] = made


def _set_or_clear(entries: Any, key: Any, put: Put) -> None:
    made = put()
    if made is LEFT_OUT or made == {}:
        entries.pop(key, None)
    else:
        entries[key] = made


def _replace(entries: Any, before: set[Any], put: Put) -> None:
    made = put()
    for key in before - made.keys():
        del entries[key]
    entries.update(made)


def _formed(made: torch.Tensor, is_parameter: bool, wants_grad: bool) -> torch.Tensor:
    if is_parameter:
        return nn.Parameter(made, requires_grad=wants_grad)
    return made.detach().requires_grad_() if wants_grad else made


def _fill_array(live: np.ndarray, dtype: np.dtype[Any], source: torch.Tensor) -> None:
    np.copyto(live, tensors.to_array(source, dtype))


def _kind(obj: Any) -> str:
    return type(obj).__qualname__

"""Binder: each live object beside what is stored for it. Finds what differs, and plans how it will be written.

Compares only. `Match.apply` carries the plan out in this order: the plan of the tensors (tensor_plan.py), the Puts of
the state, and `last`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from ..format.values import LEFT_OUT, Filter, join, only_numbers
from . import dtensor, instances, subclasses, tensors
from .binding import ABSENT, Placement, Put
from .decode import ArrayRef, SavedFlattened, SavedInstance, SavedObject, Stored, TensorRef
from .differences import Differences
from .module_binder import ModuleBinder
from .objects import KINDS, Parameters, exact_sampler, holds_objects, tag_of
from .optimizer_binder import OptimizerBinder
from .own_loading import OwnLoading, calling
from .puts import empty, formed, kind_of, refill, refill_sequence, stays
from .rename import Rename
from .tensor_plan import Making, TensorPlan
from .wrappers import Wrappers


class Binder:
    """One comparison of a live state with a stored one, and what it has found (`binding.Walk`).

    `of_modules`: live name -> stored name of the tensors that belong to modules. `names`: what is wanted. `modules`:
    path -> module, of the live state.
    """

    def __init__(
        self,
        stored: Stored,
        of_modules: dict[str, str],
        names: Filter,
        rename: Rename,
        modules: Mapping[str, nn.Module],
    ) -> None:
        self.stored, self.names = stored, names
        self.differences = Differences(names)
        self.tensors = TensorPlan(stored, self.differences)
        self.last: list[Put] = []
        """what is done after everything else"""
        own_loading = OwnLoading(modules)
        self.modules = ModuleBinder(self, of_modules, rename, own_loading)
        self._optimizers = OptimizerBinder(self, Parameters(modules), rename, own_loading)
        self._wrappers = Wrappers()
        self._restored = set[int]()
        """the ids of the objects that are restored from their own data"""

    def bind(self, live: Any, saved: Any, path: str, placement: Placement | None = None) -> Put:
        """Plan how `saved` goes to where `live` is. Where they differ that is recorded, and the live object stays.

        `placement`: how new tensors of an optimizer or object are made. Without it live tensors are written in place.
        """
        if saved is LEFT_OUT or not self.names.enters(path):
            return stays(live)
        if isinstance(saved, SavedObject):
            return self._object(live, saved, path)
        if isinstance(saved, SavedInstance):
            return self._instance(live, saved, path, placement)
        if isinstance(saved, SavedFlattened):
            return self._flattened(live, saved, path, placement)
        alike = type(live) is type(saved)
        if type(saved) in (dict, OrderedDict, defaultdict) and (alike or not holds_objects(live)):
            return self._mapping(live if alike else empty(saved), saved, path, placement)
        if type(saved) is deque and alike and live.maxlen != saved.maxlen:
            alike = False  # the bound of a deque cannot be changed
        if type(saved) in (list, tuple, deque) and (alike or not holds_objects(live)):
            return self._sequence(live if alike else empty(saved), saved, path, placement)
        if not self.names.keeps(path):
            return stays(live)
        if holds_objects(live):
            self.differences.differs(path, f"data in the generation, {kind_of(live)} here")
            return stays(live)
        if isinstance(saved, TensorRef):
            return self._tensor(live, saved, path, placement)
        if isinstance(saved, ArrayRef):
            return self._array(live, saved, path)
        return partial(refill, live, saved) if alike and type(saved) in (set, Counter, bytearray) else lambda: saved

    # ---- data ----------------------------------------------------------------------------------------------

    def _mapping(self, live: dict[Any, Any], saved: dict[Any, Any], path: str, placement: Placement | None) -> Put:
        puts = [
            (key, self.bind(live.get(key, ABSENT), item, join(path, key), placement)) for key, item in saved.items()
        ]
        staying = [key for key in live if key not in saved and self._has_to_stay(live[key], join(path, key))]

        def put() -> Any:
            entries = {key: made for key, one in puts if (made := one()) is not LEFT_OUT}
            return refill(live, entries | {key: live[key] for key in staying})

        return put

    def _sequence(self, live: Any, saved: Any, path: str, placement: Placement | None) -> Put:
        if self.names.everything and only_numbers(saved) and only_numbers(live):
            return partial(refill_sequence, live, lambda: saved)
        beside = [*live, *[ABSENT] * (len(saved) - len(live))]
        puts = [self.bind(beside[index], item, f"{path}.{index}", placement) for index, item in enumerate(saved)]
        over = range(len(saved), len(live))
        staying = [live[index] for index in over if self._has_to_stay(live[index], f"{path}.{index}")]
        return partial(refill_sequence, live, lambda: [*(one() for one in puts), *staying])

    def _has_to_stay(self, live: Any, path: str) -> bool:
        """Whether a live item that the generation lacks is kept. All other items are removed.

        Items that are not wanted are kept, and so are objects, which are reported as missing.
        """
        if not self.names.keeps(path):
            return True
        if holds_objects(live):
            self.differences.missing.append(path)
            return True
        return False

    def _instance(self, live: Any, saved: SavedInstance, path: str, placement: Placement | None) -> Put:
        """Plan the parts of an instance; a live instance of the same class is refilled if it can be."""
        kind, why = instances.resolve(saved.tag, saved.name, saved.parts, live)
        alike = type(live) is kind
        if not why and (tag_of(live) or (not alike and holds_objects(live))):
            why = f"data in the generation, {kind_of(live)} here"
        if why:
            if self.names.keeps(path):
                self.differences.differs(path, why)
            return stays(live)
        before = instances.FORMS[saved.tag].parts(live) if alike else {}
        lacking = (join(path, name) for name in before.keys() - saved.parts.keys())
        self.differences.missing += sorted(filter(self.names.keeps, lacking))
        puts = {
            name: self.bind(before.get(name, ABSENT), part, join(path, name), placement)
            for name, part in saved.parts.items()
        }

        def put() -> Any:
            made = {name: one() for name, one in puts.items()}
            parts = before | {name: None if part is LEFT_OUT else part for name, part in made.items()}
            return instances.FORMS[saved.tag].assemble(kind, parts, live if alike else None)

        return put

    # ---- tensors -------------------------------------------------------------------------------------------

    def _flattened(self, live: Any, saved: SavedFlattened, path: str, placement: Placement | None) -> Put:
        """Plan a tensor subclass: write its inner tensors in place, or make a new one where an optimizer needs it."""
        if not self.names.keeps(path):
            return stays(live)
        kind, why = subclasses.resolve(saved.name, live)
        context = self.bind(ABSENT, saved.context, join(path, "__context__"))()
        alike = not why and type(live) is kind and subclasses.is_like(live, set(saved.parts), context, saved.shape)
        if not why and not alike and placement is None and isinstance(live, torch.Tensor):
            why = f"{saved.name} {list(saved.shape)} in the generation, {kind_of(live)} {list(live.shape)} here"
        if why:
            self.differences.differs(path, why)
            return stays(live)
        before: dict[str, Any] = subclasses.inner_tensors(live) if alike else {}
        puts = {
            name: self.bind(before.get(name, ABSENT), part, join(path, name), placement)
            for name, part in saved.parts.items()
        }
        if not alike or placement is not None:
            try:
                self._trial(live, saved, path, placement)
            except TypeError as error:
                self.differences.differs(path, f"{saved.name} cannot be made here: {error}")
                return stays(live)

        def put() -> Any:
            parts = {name: one() for name, one in puts.items()}
            if alike and all(part is before[name] for name, part in parts.items()):
                return live
            made = subclasses.assemble(kind, parts, context, saved.shape, saved.stride)
            return formed(made, saved.is_parameter, saved.wants_grad)

        return put

    def _trial(self, live: Any, saved: SavedFlattened, path: str, placement: Placement | None) -> Any:
        """Make a tensor subclass of the stored parts, without their content. Raises TypeError if that is impossible."""
        parts = {}
        for name, part in saved.parts.items():
            if isinstance(part, SavedFlattened):
                parts[name] = self._trial(getattr(live, name, ABSENT), part, join(path, name), placement)
            else:
                making = self._making(part, join(path, name), placement)
                parts[name] = self.tensors.blank(part, making)
        kind, why = subclasses.resolve(saved.name, live)
        if why:
            raise TypeError(why)
        context = self.bind(ABSENT, saved.context, join(path, "__context__"))()
        return subclasses.assemble(kind, parts, context, saved.shape, saved.stride)

    def _making(self, ref: TensorRef, path: str, placement: Placement | None) -> Making:
        return placement.making(ref, path) if placement else Making(tensors.available(ref.device), ref.order)

    def _tensor(self, live: Any, ref: TensorRef, path: str, placement: Placement | None) -> Put:
        """Plan to write a tensor in place. Where no live tensor fits, only an optimizer or object gets a new one."""
        making = self._making(ref, path, placement)
        if isinstance(live, torch.Tensor):
            if not subclasses.is_flattenable(live):
                tensors.require_storable(live, path)
            why = self.tensors.difference(live, ref.name)
            if placement is None and why:
                self.differences.differs(path, why)
                return stays(live)
            # guard: live-memory-order-must-match
            fits = (live.device, tensors.order(live)) == (making.device, making.order)
            if not why and (placement is None or (fits and self.tensors.is_free(live, ref.name))):
                self.tensors.write(live, ref.name, path)
                return stays(live)
        made = self.tensors.new(ref.name, making, path)
        return lambda: formed(made[0], ref.is_parameter, ref.wants_grad)

    def _array(self, live: Any, ref: ArrayRef, path: str) -> Put:
        """Plan to write an array in place; a read-only one is replaced. Another dtype or shape is a difference."""
        if isinstance(live, np.ndarray):
            if (live.dtype, live.shape) != (ref.dtype, ref.shape):
                theirs, ours = (f"{one.dtype} {list(one.shape)}" for one in (ref, live))
                self.differences.differs(path, f"array {theirs} in the generation, {ours} here")
                return stays(live)
            if live.flags.writeable:
                self.tensors.write_array(live, ref, path)
                return stays(live)
        made = self.tensors.new(ref.name, Making(torch.device("cpu"), ref.order), path)
        return lambda: tensors.to_array(made[0], ref.dtype)

    # ---- objects -------------------------------------------------------------------------------------------

    def _object(self, live: Any, saved: SavedObject, path: str) -> Put:
        if live is ABSENT:
            self.differences.has_no_place(path)
            return stays(live)
        as_object = tag_of(live) == saved.tag == "!object"  # earlier versions saved a wrapper as an object
        inner = live if as_object else self._wrappers.unwrapped(live)
        if tag_of(inner) != saved.tag:
            self.differences.differs(path, f"{saved.tag[1:]} in the generation, {kind_of(live)} here")
        elif saved.tag == "!module":
            return self.modules.bind(live, saved.data, path)
        elif saved.tag == "!optimizer":
            self._optimizers.bind(inner, saved.data, path)
        elif why := KINDS[saved.tag].differs(live, saved.data):
            self.differences.differs(path, why)
        else:
            self._restored.add(id(live))
            data = self.bind(ABSENT, saved.data, path, self._sharding(live, saved.tag, path))
            return partial(self._loaded, live, saved.tag, data, path)
        return stays(live)

    def _loaded(self, live: Any, tag: str, data: Put, path: str) -> Any:
        content = data()
        # The copy of the state of its sampler that such a loader has lags behind by what was fetched ahead. Where the
        # sampler is restored by itself it would be replaced at the next iteration: so the loader begins anew there.
        if id(exact_sampler(live)) in self._restored and not hasattr(live.dataset, "load_state_dict"):
            content = {}  # guard: sampler-keeps-its-position
        with calling(live, path, self.stored.step):
            KINDS[tag].load(live, content)
        return live

    def _sharding(self, live: Any, tag: str, path: str) -> Placement | None:
        """Tensors that the object's state_dict() returns as shards are handed back as such shards. One whose
        state_dict() fails now, as that of a mean over nothing may before its first step, has none."""
        if not dtensor.are_possible():
            return None
        try:
            shards = dtensor.below(KINDS[tag].read(live), path)
        except Exception:  # noqa: BLE001 - code of a user; what it is given, it loads below, or that error is raised
            return None
        return _LikeShards(self.tensors, shards) if shards else None


class _LikeShards:
    """`binding.Placement`: new tensors are sharded as the live ones of the same paths."""

    def __init__(self, plan: TensorPlan, shards: Mapping[str, torch.Tensor]) -> None:
        self._plan, self._shards = plan, shards

    def making(self, ref: TensorRef, path: str) -> Making:
        like = self._shards.get(path)
        if like is None or self._plan.difference(like, ref.name):
            return Making(tensors.available(ref.device), ref.order)
        return Making(like.device, ref.order, like)

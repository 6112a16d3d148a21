"""OptimizerBinder: the state and hyperparameters of live optimizers beside what is stored for them.

Both are matched by the names of parameters, not by their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from ..format.values import join
from . import dtensor, tensors
from .binding import ABSENT, Put, Walk
from .decode import SavedGroup, SavedOptimizer, TensorRef
from .objects import Member, Parameters
from .own_loading import OwnLoading
from .puts import replace_entries, set_entry, set_or_clear
from .rename import Rename
from .tensor_plan import Making


class OptimizerBinder:
    """Binds optimizers. What it plans is done after everything else, as a scheduler may write into them too."""

    def __init__(self, walk: Walk, parameters: Parameters, rename: Rename, own_loading: OwnLoading) -> None:
        self._walk, self._parameters, self._rename, self._own_loading = walk, parameters, rename, own_loading

    def bind(self, live: Optimizer, saved: SavedOptimizer, path: str) -> None:
        """Compare an optimizer with what is stored for it, name by name, and plan to load it."""
        walk, groups = self._walk, self._parameters.of(live, path)
        kind = type(live).__qualname__
        if kind != saved.kind:
            walk.differences.differs(path, f"{saved.kind} in the generation, {kind} here")
            return
        if len(groups) != len(saved.groups):
            why = f"{len(saved.groups)} parameter groups in the generation, {len(groups)} here"
            walk.differences.differs(path, why)
            return
        puts: list[Put] = []
        for index, (members, theirs) in enumerate(zip(groups, saved.groups, strict=True)):
            found = self._group(live, index, members, theirs, saved, path)
            if found is None:
                return
            puts += found
        shared = {key: item for key, item in live.state.items() if not isinstance(key, torch.Tensor)}
        common = walk.bind(shared, saved.common, f"{path}.state")
        puts.append(partial(replace_entries, live.state, set(shared), common))
        walk.last.extend(puts)

    def _group(
        self, live: Optimizer, index: int, members: list[Member], theirs: SavedGroup, saved: SavedOptimizer, path: str
    ) -> list[Put] | None:
        """How one parameter group is loaded. None where its parameters differ so much that no group can be."""
        walk, group, where = self._walk, live.param_groups[index], f"{path}.param_groups.{index}"
        stored = {self._rename.name(name.replace("._forward_module.", ".")): name for name in theirs.params}
        ours = [one.qualified for one in members]
        if isinstance(live, LBFGS) and list(stored) != ours:  # one flat vector over all parameters, in their order
            walk.differences.differs(where, "other parameters, or another order of them, in the generation")
            return None
        walk.differences.missing += [f"{where}: {name}" for name in ours if name not in stored]
        walk.differences.unexpected += [f"{where}: {name}" for name in stored if name not in ours]
        puts: list[Put] = []
        for key, item in theirs.options.items():
            puts.append(partial(set_entry, group, key, walk.bind(group.get(key, ABSENT), item, join(where, key))))
        flags = group | {key: item for key, item in theirs.options.items() if walk.names.enters(join(where, key))}
        held = bool(flags.get("capturable") or flags.get("fused"))
        for one in members:
            if one.qualified not in stored:
                continue
            (shape, order), short = theirs.params[stored[one.qualified]], f"{path}.state.{one.short}"
            if why := self._shape_differs(one.parameter, list(shape), short) or self._dtype_differs(
                one.parameter, stored[one.qualified]
            ):
                walk.differences.differs(short, why)
            else:
                data = saved.state.get(stored[one.qualified], ABSENT)
                puts.append(self._of_parameter(live, _ParameterState(walk, one.parameter, order, held, data), short))
        return puts

    def _shape_differs(self, parameter: torch.Tensor, stored: list[int], path: str) -> str:
        """Why the state of a parameter of this shape does not fit; empty if it does, or will once that is loaded."""
        if nn.parameter.is_lazy(parameter):
            return "of a lazy parameter that has no shape yet: run one forward pass first"
        ours = list(parameter.shape)
        if ours != stored and self._own_loading.may_change_shape(parameter):
            check = partial(self._own_loading.require_changed_shape, parameter, stored, path, self._walk.stored.step)
            self._walk.last.append(check)
            return ""
        return "" if ours == stored else f"of a parameter of shape {stored} in the generation, {ours} here"

    def _dtype_differs(self, parameter: torch.Tensor, stored: str) -> str:
        """Why the state of a parameter that is not loaded itself is not loaded either; empty if it may be."""
        theirs, ours = self._walk.stored.tensors.get(stored), tensors.dtype_name(parameter.dtype)
        if theirs is None or theirs[0] == ours or self._own_loading.may_change_shape(parameter):
            return ""
        # guard: state-of-skipped-parameter-skipped
        return f"of a parameter of {theirs[0]} in the generation, {ours} here"

    def _of_parameter(self, live: Optimizer, state: _ParameterState, path: str) -> Put:
        """How the state of one parameter is loaded."""
        before = live.state.get(state.parameter, ABSENT)
        if state.saved is ABSENT:
            return partial(set_or_clear, live.state, state.parameter, self._walk.bind(before, {}, path))
        return partial(set_entry, live.state, state.parameter, self._walk.bind(before, state.saved, path, state))


@dataclass(frozen=True)
class _ParameterState:
    """The stored state of one parameter, and where its new tensors are made (`binding.Placement`).

    State that had the shape and the memory order of the parameter takes the memory order of the live parameter,
    because fused kernels pair elements by their place in memory. All other state keeps its own.
    """

    walk: Walk
    parameter: torch.Tensor
    order: tensors.Order
    """the memory order of the parameter when it was saved"""
    held: bool
    """capturable or fused: these optimizers keep all of the state on the device of the parameter"""
    saved: Any

    @property
    def accelerated(self) -> bool:
        """Whether some of the state was stored from another device than the CPU."""
        parts = self.saved.values() if isinstance(self.saved, dict) else [self.saved]
        return any(isinstance(part, TensorRef) and part.device.type != "cpu" for part in parts)

    def making(self, ref: TensorRef, path: str) -> Making:
        """On the device of the parameter, except scalars that were on the host: `step`, and what an accelerated
        optimizer kept there.
        """
        parameter, order = self.parameter, self.order
        shape = self.walk.stored.tensors[ref.name][1]
        alike = shape == tuple(parameter.shape)
        on_host = shape == () and ref.device.type == "cpu" and (self.accelerated or path.endswith(".step"))
        device = ref.device if on_host and not self.held else parameter.device
        # guard: new-state-memory-order
        memory = tensors.order(parameter) if alike and ref.order == order else ref.order
        return Making(device, memory, parameter if alike and dtensor.is_sharded(parameter) else None)

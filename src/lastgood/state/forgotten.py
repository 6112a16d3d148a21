"""Optimizers and schedules of a state's parameters that are not in the state itself. Reads; changes nothing.

The whole process is looked through only where the state has signs of one: parameters that are trained and that no
optimizer of the state has, or an optimizer with the learning rates that a schedule begins with.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .objects import find_objects, tag_of

_PACKAGES = {"torch", "torchdata", "lastgood"}
"""whose objects hold no optimizer or schedule in their `state_dict()`, but those that are optimizers or schedules"""


def forgotten(state: Mapping[str, Any]) -> list[str]:
    """The classes of optimizers that keep something of parameters of the state, and of schedules of its optimizers,
    that live in this process and are not in the state. So are optimizers inside of those of the state, of which their
    `state_dict()` has nothing. Empty if the state has objects of the user or of another package, or modules with a
    state of their own, whose `state_dict()` may have them.
    """
    objects = [*find_objects(state).values()]
    if any(map(_may_hold_others, objects)):
        return []
    trained, begun = _without_optimizer(objects), _without_schedule(objects)
    inner = [one for outer in objects if isinstance(outer, Optimizer) for one in _left_out_by(outer, objects)]
    live = _live() if trained or begun else []
    optimizers = [one for one in live if isinstance(one, Optimizer)]
    keeping = [one for one in optimizers if getattr(one, "state", None) and trained & _parameters_of(one)]
    schedules = [one for one in live if isinstance(one, LRScheduler) and _optimizer_of(one) in begun]
    return [*dict.fromkeys(type(one).__name__ for one in (*inner, *keeping, *schedules))]


def _may_hold_others(obj: Any) -> bool:
    if isinstance(obj, nn.Module):
        return any(type(one).get_extra_state is not nn.Module.get_extra_state for one in obj.modules())
    if isinstance(obj, Optimizer | LRScheduler):
        return False
    return tag_of(obj) == "!object" and type(obj).__module__.partition(".")[0] not in _PACKAGES


def _without_optimizer(objects: list[Any]) -> set[int]:
    """The ids of parameters that are trained, and that no optimizer among these objects has."""
    modules = [one for one in objects if isinstance(one, nn.Module)]
    trained = {id(one) for module in modules for one in module.parameters() if one.requires_grad}
    return trained.difference(*(_parameters_of(one) for one in objects if isinstance(one, Optimizer)))


def _without_schedule(objects: list[Any]) -> set[int]:
    """The ids of optimizers with the learning rates that a schedule begins with, of which no schedule is here."""
    optimizers = [one for one in objects if isinstance(one, Optimizer)]
    begun = {id(one) for one in optimizers if any("initial_lr" in group for group in _groups(one))}
    return begun - {_optimizer_of(one) for one in objects if isinstance(one, LRScheduler)}


def _left_out_by(outer: Optimizer, objects: list[Any]) -> list[Optimizer]:
    """The optimizers that are attributes of one of the state, keep something, and are saved nowhere: as in SAM."""
    held = [one for one in vars(outer).values() if isinstance(one, Optimizer) and getattr(one, "state", None)]
    held = [one for one in held if not any(one is other for other in objects)]
    if not held:
        return []
    saved = _tensors_in(outer.state_dict())
    return [one for one in held if (kept := _tensors_in(dict(one.state))) and not kept & saved]


def _tensors_in(value: Any) -> set[int]:
    """The ids of the tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return {id(value)}
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return set[int]().union(*map(_tensors_in, parts))


def _groups(optimizer: Optimizer) -> list[Mapping[str, Any]]:
    """Its groups. A subclass may not have called the constructor yet."""
    groups = getattr(optimizer, "param_groups", None)
    return [one for one in groups if isinstance(one, Mapping)] if isinstance(groups, list) else []


def _parameters_of(optimizer: Optimizer) -> set[int]:
    return {id(one) for group in _groups(optimizer) for one in group.get("params", ())}


def _optimizer_of(schedule: LRScheduler) -> int:
    return id(getattr(schedule, "optimizer", None))


def _live() -> list[Any]:
    """The optimizers and schedules of this process. Classes come first: `isinstance` would run code of proxies, and a
    process may have millions of objects."""
    objects = gc.get_objects()
    classes = {id(one): one for one in map(type, objects)}
    kinds = {key for key, one in classes.items() if issubclass(one, Optimizer | LRScheduler)}
    return [one for one in objects if id(type(one)) in kinds]

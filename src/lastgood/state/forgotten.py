"""Optimizers and schedules of a state's parameters that are not in the state itself. Reads; changes nothing.

The whole process is looked through only where the state has signs of one: parameters that are trained and that no
optimizer of the state has, or an optimizer with the learning rates that a schedule begins with.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .objects import find_objects, tag_of

_PACKAGES = {"torch", "torchdata", "lastgood"}
"""whose objects hold no optimizer or schedule in their `state_dict()`, but those that are optimizers or schedules"""

T = TypeVar("T")


def forgotten(state: Mapping[str, Any]) -> list[str]:
    """The classes of optimizers that keep something of parameters of the state, and of schedules of its optimizers,
    that live in this process and are not in the state. Empty if the state has objects of the user or of another
    package, whose `state_dict()` may have them.
    """
    objects = [*find_objects(state).values()]
    if any(_is_unknown(one) for one in objects):
        return []
    return [type(one).__name__ for one in (*_optimizers(objects), *_schedules(objects))]


def _is_unknown(obj: Any) -> bool:
    known = isinstance(obj, LRScheduler) or hasattr(obj, "param_groups")
    return tag_of(obj) == "!object" and not known and type(obj).__module__.partition(".")[0] not in _PACKAGES


def _optimizers(objects: list[Any]) -> list[Optimizer]:
    held = {id(one) for of in objects for one in _parameters_of(of)}
    modules = [one for one in objects if isinstance(one, nn.Module)]
    trained = {id(one) for module in modules for one in module.parameters() if one.requires_grad} - held
    live = _live(Optimizer) if trained else ()
    return [one for one in live if one.state and any(id(each) in trained for each in _parameters_of(one))]


def _parameters_of(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]


def _schedules(objects: list[Any]) -> list[LRScheduler]:
    scheduled = {id(one.optimizer) for one in objects if isinstance(one, LRScheduler)}
    begun = {
        id(one)
        for one in objects
        if isinstance(one, Optimizer) and any("initial_lr" in group for group in one.param_groups)
    } - scheduled
    return [one for one in _live(LRScheduler) if id(one.optimizer) in begun] if begun else []


def _live(kind: type[T]) -> Iterator[T]:
    """The objects of a class in this process. `isinstance` would run code of proxies among all its objects."""
    return (one for one in gc.get_objects() if issubclass(type(one), kind))

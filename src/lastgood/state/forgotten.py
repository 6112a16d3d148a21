"""What a training has and the state lacks: optimizers, schedules, samplers, scalers, averages and parameters; and
datasets of the state that worker processes advance. Reads only.

The whole process is looked through only where the state has a sign that this may find something.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset

from ..data.sampler import ResumableSampler
from ..format.values import only_numbers
from .instances import parts_of
from .objects import find_objects, tag_of
from .tensors import storage
from .wrappers import Wrappers

_PACKAGES = {"torch", "torchdata", "lastgood"}
"""whose objects hold no optimizer or schedule in their `state_dict()`, but those that are optimizers or schedules"""
_KINDS = (Optimizer, LRScheduler, ResumableSampler, GradScaler, AveragedModel)


def forgotten(state: Mapping[str, Any]) -> list[str]:
    """The classes of optimizers that keep something of parameters of the state, and of schedules of its optimizers,
    that live in this process and are not in the state. So are optimizers inside of those of the state, of which their
    `state_dict()` has nothing; and, if the state has an optimizer, a ResumableSampler from which batches are read, a
    GradScaler that has scaled a loss, and an AveragedModel that has averaged, if it has none of that class. Empty if
    the state has objects of the user or of another package, or modules with a state of their own, whose `state_dict()`
    may have them.
    """
    unwrapped = Wrappers().unwrapped
    objects = [unwrapped(one) for one in find_objects(state).values()]  # guard: wrapped-optimizer-has-schedule
    if any(map(_may_hold_others, objects)):
        return []
    trained, begun = _without_optimizer(objects), _without_schedule(objects, unwrapped)
    inner = [one for outer in objects if isinstance(outer, Optimizer) for one in _left_out_by(outer, objects)]
    beside = _kinds_beside(objects)
    live = _live() if trained or any(isinstance(one, Optimizer) for one in objects) else []
    optimizers = [one for one in live if isinstance(one, Optimizer)]
    keeping = [one for one in optimizers if getattr(one, "state", None) and trained & _parameters_of(one)]
    schedules = [one for one in live if isinstance(one, LRScheduler) and _optimizer_of(one, unwrapped) in begun]
    names = [type(one).__name__ for one in (*inner, *keeping, *schedules)]
    used = [*_used(live, beside), *_schedules_beside(live, objects, unwrapped)]
    if used:  # by an earlier training, it may be, whose objects are not collected yet
        del live, optimizers, keeping, schedules
        gc.collect()  # guard: garbage-is-not-in-use
        live = _live()
        used = [*_used(live, beside), *_schedules_beside(live, objects, unwrapped)]
    return [*dict.fromkeys([*names, *used])]


def read_by_workers(state: Mapping[str, Any]) -> list[str]:
    """The paths of the datasets of a state that a DataLoader of this process reads in worker processes: these advance
    copies of them. torchdata's StatefulDataLoader asks its workers for their positions."""
    datasets = {id(one): path for path, one in find_objects(state).items() if isinstance(one, IterableDataset)}
    loaders = _live((DataLoader,)) if datasets else []
    loaders = [one for one in loaders if getattr(one, "num_workers", 0) and not hasattr(one, "state_dict")]
    return [path for key, path in datasets.items() if any(id(one.dataset) == key for one in loaders)]


def unstored(state: Mapping[str, Any]) -> list[torch.Tensor]:
    """The parameters that an optimizer of the state trains, and of whose memory no entry of the state has anything,
    whether `include` and `exclude` want it saved or not. Empty where `forgotten` is for objects of the state that may
    have them, and for modules that store something else than their parameters and buffers.

    An optimizer may train copies of the parameters of a module, as with weights in half precision. So where a module
    has trained parameters that no optimizer of the state has, those of their shapes, and flat ones, are left out.
    """
    objects = [*find_objects(state).values()]
    modules = [one for one in objects if isinstance(one, nn.Module)]
    if any(map(_may_hold_others, objects)) or any(map(_stores_more, modules)):
        return []
    alone = _without_optimizer(objects)
    originals = [one for module in modules for one in module.parameters() if id(one) in alone]
    copied = {one.shape for one in originals if storage(one) is not None}
    tensors = [one for module in modules for one in (*module.parameters(), *module.buffers())]
    held = {None, 0, *map(storage, tensors), *_memory_in(state)}  # 0: without elements
    trained = {
        id(one): one for optimizer in objects if isinstance(optimizer, Optimizer) for one in _trained_by(optimizer)
    }
    lacking = [one for one in trained.values() if storage(one) not in held]
    # guard: master-weights-are-no-entries
    return [one for one in lacking if not copied or (one.dim() != 1 and one.shape not in copied)]


def _trained_by(optimizer: Optimizer) -> list[torch.Tensor]:
    """Its parameters with a gradient or a state. A layer that was taken out of the model has neither."""
    known = getattr(optimizer, "state", {})
    parameters = [one for group in _groups(optimizer) for one in group.get("params", ()) if one.requires_grad]
    return [one for one in parameters if one.grad is not None or known.get(one)]  # guard: removed-layer-is-no-loss


def _may_hold_others(obj: Any) -> bool:
    if isinstance(obj, nn.Module):
        return any(type(one).get_extra_state is not nn.Module.get_extra_state for one in obj.modules())
    if isinstance(obj, Optimizer | LRScheduler):
        return False
    return tag_of(obj) == "!object" and type(obj).__module__.partition(".")[0] not in _PACKAGES


def _stores_more(module: nn.Module) -> bool:
    """Whether a module, or one inside of it, may add tensors of its own to its `state_dict()`."""
    parts = [*module.modules()]
    methods = ("state_dict", "_save_to_state_dict")
    own = any(getattr(type(one), name) is not getattr(nn.Module, name) for one in parts for name in methods)
    return own or any(one._state_dict_hooks for one in parts)


def _memory_in(state: Mapping[str, Any]) -> set[int | None]:
    """Addresses of the memory of tensors and arrays in the containers of a state, of which each is searched once."""
    found, searched, left = set[int | None](), set[int](), [*state.values()]
    while left:
        one = left.pop()
        if isinstance(one, torch.Tensor):
            found.add(storage(one))
        elif isinstance(one, np.ndarray):
            found.add(one.ctypes.data)
        elif id(one) not in searched:
            searched.add(id(one))
            if isinstance(one, Mapping):
                left += one.values()
            elif isinstance(one, list | tuple | deque):
                left += [] if only_numbers(one) else one
            elif isinstance(beside := getattr(one, "trained_beside", None), dict):  # progress of a transformers.Trainer
                left += beside.values()
            else:
                left += parts_of(one).values()
    return found


def _without_optimizer(objects: list[Any]) -> set[int]:
    """The ids of parameters that are trained, and that no optimizer among these objects has."""
    modules = [one for one in objects if isinstance(one, nn.Module)]
    trained = {id(one) for module in modules for one in module.parameters() if one.requires_grad}
    return trained.difference(*(_parameters_of(one) for one in objects if isinstance(one, Optimizer)))


def _without_schedule(objects: list[Any], unwrapped: Callable[[Any], Any]) -> set[int]:
    """The ids of optimizers with the learning rates that a schedule begins with, of which no schedule is here."""
    optimizers = [one for one in objects if isinstance(one, Optimizer)]
    begun = {id(one) for one in optimizers if any("initial_lr" in group for group in _groups(one))}
    return begun - {_optimizer_of(one, unwrapped) for one in objects if isinstance(one, LRScheduler)}


def _kinds_beside(objects: list[Any]) -> tuple[type, ...]:
    """The classes that a loop may use beside the optimizer of a state, and of which the state has none.

    No sampler, if any object may have a position in the data: another sampler may then be that of an evaluation.
    """
    if not any(isinstance(one, Optimizer) for one in objects):
        return ()
    others = [one for one in objects if not isinstance(one, Optimizer | LRScheduler)]
    kinds: list[type] = [] if any(tag_of(one) == "!object" for one in others) else [ResumableSampler]
    parts = [part for one in others if isinstance(one, nn.Module) for part in one.modules()]
    return (*kinds, *(kind for kind in (GradScaler, AveragedModel) if not _has(kind, (*others, *parts))))


def _has(kind: type, objects: Iterable[Any]) -> bool:
    return any(isinstance(one, kind) for one in objects)


def _schedules_beside(live: list[Any], objects: list[Any], unwrapped: Callable[[Any], Any]) -> list[str]:
    """The classes of the schedules that have stepped with an optimizer of the state, and that are neither in the state
    nor held by a schedule that is."""
    optimizers = {id(one) for one in objects if isinstance(one, Optimizer)}
    known = [one for one in objects if isinstance(one, LRScheduler)]
    for one in known:  # grows meanwhile
        held = chain.from_iterable(part if isinstance(part, list | tuple) else [part] for part in vars(one).values())
        known += [part for part in held if isinstance(part, LRScheduler) and not any(part is other for other in known)]
    saved = {*map(id, known)}
    found = [one for one in live if isinstance(one, LRScheduler) and id(one) not in saved]
    found = [one for one in found if _optimizer_of(one, unwrapped) in optimizers]
    return [type(one).__name__ for one in found if getattr(one, "last_epoch", 0) > 0]  # guard: second-schedule-reported


def _used(live: list[Any], kinds: tuple[type, ...]) -> list[str]:
    """The names of the classes among these of which an object is in use."""
    used = []
    for one in live:
        if not isinstance(one, kinds):
            continue
        if isinstance(one, ResumableSampler):
            in_use = getattr(one, "is_read_uncounted", False)  # guard: forgotten-sampler-reported
        elif isinstance(one, AveragedModel):
            in_use = bool(getattr(one, "n_averaged", 0))  # guard: forgotten-average-reported
        else:
            in_use = getattr(one, "_scale", None) is not None  # guard: forgotten-scaler-reported
        used += [type(one).__name__] if in_use else []
    return used


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


def _optimizer_of(schedule: LRScheduler, unwrapped: Callable[[Any], Any]) -> int:
    return id(unwrapped(getattr(schedule, "optimizer", None)))


def _live(wanted: tuple[type, ...] = _KINDS) -> list[Any]:
    """The objects of this process of these classes; by default of those that may be forgotten. Classes come first:
    `isinstance` would run code of proxies, and a process may have millions of objects."""
    objects = gc.get_objects()
    classes = {id(one): one for one in map(type, objects)}
    kinds = {key for key, one in classes.items() if issubclass(one, wanted)}
    return [one for one in objects if id(type(one)) in kinds]

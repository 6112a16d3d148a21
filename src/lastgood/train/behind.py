"""Behind the fence: which tensors of a state nothing but an optimizer's step changes. Reads; copies nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .torn import Bearer, watchable


@dataclass
class Behind:
    """What can be copied while the next forward and backward run."""

    optimizers: list[Optimizer] = field(default_factory=list)
    hookable: bool = True
    """every optimizer of the state can be asked to wait before its step, and no module moves its weights about"""
    trained: dict[str, Bearer] = field(default_factory=dict)
    """stored names of what these optimizers update: parameters, and their own state"""
    others: dict[str, Bearer] = field(default_factory=dict)
    """... of parameters that none of them updates: frozen ones, or an average that is kept by hand"""


def find(state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Behind:
    """Go through a state whose tensors were captured. Names are found by the memory that they stand for."""
    found = Behind()
    at = {one.data_ptr(): name for name, one in tensors.items()}

    def named(tensor: object) -> str | None:
        if not isinstance(tensor, torch.Tensor) or tensor.is_sparse or not tensor.numel():
            return None
        name = at.get(tensor.data_ptr())
        same = name is not None and tensors[name].shape == tensor.shape and tensors[name].dtype == tensor.dtype
        return name if same and watchable(tensor) else None

    modules: list[nn.Module] = []
    for thing in _things(state, 0):
        if isinstance(thing, nn.Module):
            modules.append(thing)
        elif isinstance(thing, Optimizer):
            found.optimizers.append(thing)
        elif hasattr(thing, "step") and hasattr(thing, "param_groups"):
            found.hookable = False
    trained = {id(one) for each in found.optimizers for group in each.param_groups for one in group["params"]}
    for module in modules:
        for part in module.modules():
            found.hookable &= type(part).__name__ != "FullyShardedDataParallel"
            for key, parameter in part._parameters.items():
                if parameter is not None and (name := named(parameter)):
                    (found.trained if id(parameter) in trained else found.others)[name] = Bearer(
                        part._parameters, key, parameter
                    )
    for optimizer in found.optimizers:
        for entry in optimizer.state.values():
            if isinstance(entry, dict):
                for key, tensor in entry.items():
                    if name := named(tensor):
                        found.trained[name] = Bearer(entry, key, tensor)
        for group in optimizer.param_groups:  # parameters of no module of the state
            params = dict(enumerate(group["params"]))
            for index, parameter in params.items():
                if (name := named(parameter)) and name not in found.trained:
                    found.trained[name] = Bearer(params, index, parameter)
    return found


def _things(state: object, depth: int) -> Iterator[object]:
    if isinstance(state, Mapping) and depth < 20:
        for one in state.values():
            yield from _things(one, depth + 1)
    elif isinstance(state, (list, tuple)) and depth < 20:
        for one in state:
            yield from _things(one, depth + 1)
    else:
        yield state

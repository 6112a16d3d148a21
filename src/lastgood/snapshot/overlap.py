"""Behind the fence: which tensors of a state nothing but an optimizer's step changes. Reads; copies nothing."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ..state import dtensor, subclasses
from ..state.capture import Captured, Origin
from ..state.objects import is_fsdp1, modules_of
from .torn_check import Bearer, watchable


class Behind:
    """What can be copied while the next forward and backward run, by its stored names."""

    def __init__(self, captured: Captured, found: Mapping[str, Bearer], moves: bool) -> None:
        self.moves = moves
        """a module moves its weights about in forward and backward"""
        self.hookable = captured.hookable and not moves
        """every optimizer of the state can be asked to wait before its step, and no module moves its weights about"""
        parameters = (Origin.OPTIMIZER, Origin.STEPPED)
        self.trained = {name: one for name, one in found.items() if captured.origins[name] in parameters}
        """what the optimizers of the state update: parameters, and their own state"""
        self.all = dict(found)
        """... and parameters that none of them updates: frozen ones, or an average that is kept by hand"""
        sizes = {name: one.nbytes for name, one in captured.tensors.items()}
        total = sum(sizes.values())
        self.beside_trained_bytes = total - sum(sizes[name] for name in self.trained)
        self.beside_all_bytes = total - sum(sizes[name] for name in self.all)
        self._places = [(one.container, one.key) for one in found.values()]
        self._tensors = [one.tensor for one in found.values()]
        self._numbers = [number for number, name in enumerate(captured.tensors) if name in found]
        self._addresses = [captured.addresses[number] for number in self._numbers]

    def holds(self, captured: Captured) -> bool:
        """Whether each still hangs and lies where it was found, and is what was captured under its name."""
        return (
            all(map(operator.is_, (container.get(key) for container, key in self._places), self._tensors))
            and list(map(torch.Tensor.data_ptr, self._tensors)) == self._addresses
            and [captured.addresses[number] for number in self._numbers] == self._addresses
        )


def find(state: Mapping[str, Any], captured: Captured) -> Behind:
    """Go through a state that was captured. Names are found by the memory that they stand for."""
    tensors, moves = captured.tensors, False
    at = dict(zip(captured.addresses, tensors, strict=True))
    found: dict[str, Bearer] = {}

    def note(container: Mapping[Any, Any], key: Any, tensor: object) -> None:
        if isinstance(tensor, torch.Tensor) and dtensor.is_sharded(tensor):
            # Its module hangs up the whole parameter in forward and backward: what counts is the memory of the shard.
            tensor, key = dtensor.local(tensor), 0
            container = {key: tensor}
        if subclasses.is_flattenable(tensor):
            for part, inner in subclasses.inner_tensors(tensor).items():
                note(vars(tensor), part, inner)
            return
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or not tensor.numel():
            return
        name = at.get(tensor.data_ptr())
        # guard: objects-own-tensors-cloned
        if name is None or captured.origins[name] is Origin.OTHER or name in found or not watchable(tensor):
            return
        if tensors[name].shape == tensor.shape and tensors[name].dtype == tensor.dtype:
            found[name] = Bearer(container, key, tensor)

    for module in modules_of(state).values():
        for part in module.modules():
            moves |= is_fsdp1(part)  # guard: fsdp1-waits-for-copy
            for key, parameter in part._parameters.items():
                note(part._parameters, key, parameter)
    for optimizer in captured.optimizers:
        for container, key, tensor in _held(optimizer):
            note(container, key, tensor)
    return Behind(captured, {name: found[name] for name in tensors if name in found}, moves)


def _held(optimizer: Optimizer) -> Iterator[tuple[Mapping[Any, Any], Any, object]]:
    for entry in optimizer.state.values():
        if isinstance(entry, dict):
            for key, tensor in entry.items():
                yield entry, key, tensor

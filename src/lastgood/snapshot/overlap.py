"""Overlap: which tensors forward and backward do not change, so that they can be copied while training goes on.

These are parameters and the state of optimizers. Reads the live state; copies nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ..state import dtensor, subclasses
from ..state.capture import Captured, Origin
from ..state.objects import is_fsdp1, modules_of
from .torn_check import Reference, watchable


class Overlappable:
    """The tensors that can be copied during the next forward and backward, by their stored names.

    `found`: the entries that refer to them. `moves`: see below.
    """

    def __init__(self, captured: Captured, found: Mapping[str, Reference], moves: bool) -> None:
        self.moves = moves
        """whether a module moves its weights to other memory in forward and backward (FSDP1)"""
        self.hookable = captured.hookable and not moves
        """whether every optimizer of the state can be made to wait before its step, and no module moves its weights"""
        stepped = (Origin.OPTIMIZER, Origin.STEPPED)
        self.trained = {name: one for name, one in found.items() if captured.origins[name] in stepped}
        """parameters that the optimizers of the state update, and the state of these optimizers"""
        self.all = dict(found)
        """as `trained`, and parameters that no optimizer updates: frozen ones, or an average that the loop computes"""
        sizes = {name: one.nbytes for name, one in captured.tensors.items()}
        total = sum(sizes.values())
        # what must be cloned if only `trained`, or `all`, is copied later
        self.beside_trained_bytes = total - sum(sizes[name] for name in self.trained)
        self.beside_all_bytes = total - sum(sizes[name] for name in self.all)
        self._places = [(one.container, one.key) for one in found.values()]
        self._tensors = [one.tensor for one in found.values()]
        self._numbers = [number for number, name in enumerate(captured.tensors) if name in found]
        self._addresses = [captured.addresses[number] for number in self._numbers]

    def holds(self, captured: Captured) -> bool:
        """Whether each tensor is still in its container at its address, and was captured under its name."""
        return (
            all(map(operator.is_, (container.get(key) for container, key in self._places), self._tensors))
            and list(map(torch.Tensor.data_ptr, self._tensors)) == self._addresses
            and [captured.addresses[number] for number in self._numbers] == self._addresses
        )


def find(state: Mapping[str, Any], captured: Captured) -> Overlappable:
    """The overlappable tensors of a state that was captured. Live tensors get their stored names by their addresses."""
    tensors, moves = captured.tensors, False
    at = dict(zip(captured.addresses, tensors, strict=True))
    found: dict[str, Reference] = {}

    def add(container: Mapping[Any, Any], key: Any, tensor: object) -> None:
        if isinstance(tensor, torch.Tensor) and dtensor.is_sharded(tensor):
            # In forward and backward FSDP2 puts the whole parameter into the module; the memory of the shard stays.
            tensor, key = dtensor.local(tensor), 0
            container = {key: tensor}
        if subclasses.is_flattenable(tensor):
            for part, inner in subclasses.inner_tensors(tensor).items():
                add(vars(tensor), part, inner)
            return
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or not tensor.numel():
            return
        name = at.get(tensor.data_ptr())
        # guard: objects-own-tensors-cloned
        if name is None or captured.origins[name] is Origin.OTHER or name in found or not watchable(tensor):
            return
        if tensors[name].shape == tensor.shape and tensors[name].dtype == tensor.dtype:
            found[name] = Reference(container, key, tensor)

    for module in modules_of(state).values():
        for part in module.modules():
            moves |= is_fsdp1(part)  # guard: fsdp1-waits-for-copy
            for key, parameter in part._parameters.items():
                add(part._parameters, key, parameter)
    for optimizer in captured.optimizers:
        for container, key, tensor in _state_of(optimizer):
            add(container, key, tensor)
    return Overlappable(captured, {name: found[name] for name in tensors if name in found}, moves)


def _state_of(optimizer: Optimizer) -> Iterator[tuple[Mapping[Any, Any], Any, object]]:
    """(container, key, value) of everything that an optimizer keeps for its parameters."""
    for entry in optimizer.state.values():
        if isinstance(entry, dict):
            for key, tensor in entry.items():
                yield entry, key, tensor

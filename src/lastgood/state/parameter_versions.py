"""Whether parameters and buffers have changed since an earlier call, as far as torch's version counters show, and
whether optimizers have made steps. Copies nothing.

`ParameterWatch` reports a state whose parameters never change although steps of it are saved, or that lacks what
trains them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import reporting
from ..units import plural, shortened
from .forgotten import forgotten, read_by_workers, unstored
from .objects import find_objects, modules_of, plain_name

UNCHANGED_SAVES, UNCHANGED_STEPS = 3, 20
"""After so many saves and steps without a change of a parameter it is reported. Mixed precision may pass over its first
steps, until its scale is low enough."""
SAMPLED = 32
"""Of so many parameters two elements are compared as well: a CUDA graph that is replayed counts no version."""


def version(state: Mapping[str, Any]) -> tuple[int, int]:
    """A pair of numbers that changes when an optimizer has made a step, and does not change in an evaluation.

    It counts the in-place changes of the parameters and of the tensors that optimizers keep. A fused kernel does not
    increase the counters of parameters, but optimizers with fused kernels count their steps in a tensor. The one case
    that is missed is fused SGD without momentum.
    """
    tensors = [one for one in _trained(state) if not nn.parameter.is_lazy(one) and not one.is_inference()]
    return len(tensors), sum(one._version for one in tensors)


def _trained(state: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    yield from (one for one in state.values() if isinstance(one, torch.Tensor))
    for one in find_objects(state).values():
        if isinstance(one, nn.Module):
            yield from one.parameters()
        elif isinstance(one, Optimizer):
            for entry in one.state.values():
                if isinstance(entry, Mapping):
                    yield from (kept for kept in entry.values() if isinstance(kept, torch.Tensor))


def stepped(state: Mapping[str, Any]) -> list[str]:
    """The paths of torch's own optimizers of a state that have made a step, here or where their state was loaded from.
    SGD without momentum keeps nothing that shows it."""
    optimizers = {path: one for path, one in find_objects(state).items() if isinstance(one, Optimizer)}
    own = {path: one for path, one in optimizers.items() if type(one).__module__.startswith("torch.optim.")}
    return [path for path, one in own.items() if any(map(_has_stepped, one.state.values()))]


def _has_stepped(entry: Any) -> bool:
    """Whether an optimizer has stepped with the parameter that has this entry. Some make theirs with step 0."""
    return isinstance(entry, Mapping) and any(one is not None for one in entry.values()) and entry.get("step") != 0


class BufferWatch:
    """Finds buffers of modules that have changed in place since a step of the loop, as in a forward pass in training
    mode. Only buffers that are saved are watched."""

    def __init__(self) -> None:
        self._buffers, self._versions = dict[str, torch.Tensor](), list[int]()

    def begin(self, state: Mapping[str, Any]) -> None:
        """Watch the buffers that the modules of a state have now."""
        self._buffers = dict(_buffers(state))

    def note(self) -> None:
        """The loop has completed a step."""
        self._versions = [one._version for one in self._buffers.values()]

    def changed(self) -> list[str]:
        """The names of the buffers that have changed since `note`."""
        pairs = zip(self._buffers.items(), self._versions, strict=True)
        return [name for (name, one), version in pairs if one._version != version]


def _buffers(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in modules_of(state).items():
        for prefix, part in module.named_modules():
            for name, one in part._buffers.items():
                if one is not None and name not in part._non_persistent_buffers_set and not one.is_inference():
                    yield ".".join(filter(None, (path, plain_name(prefix), name))), one


class ParameterWatch:
    """Reports parameters that do not change while steps are saved: then the loop trains other objects than the state
    has, and what is saved is not what it has trained. A notebook cell that is run again makes such ones. When they have
    changed, what trains them and the state lacks is reported, and so are trained parameters that it lacks.

    `step`: of the state, which is looked at until its parameters have changed once, or were reported.
    """

    def __init__(self, state: Mapping[str, Any], step: int) -> None:
        self._begun, self._saves, self._version = step, 0, version(state)
        self.steps = 0
        """how often `Checkpointer.step` was called: its numbers may count samples"""
        self._elements = _elements(state)
        """empty: nothing is looked at, or not any more"""

    def saved(self, step: int, state: Mapping[str, Any]) -> None:
        """Note that a save of `step` begins, in the training thread."""
        if not self._elements:
            return
        self._saves += 1
        if version(state) != self._version or _elements(state) != self._elements:
            self._elements = []
            if left_out := forgotten(state):  # guard: forgotten-optimizer-reported
                reporting.threat(
                    f"the state lacks {shortened(left_out, 3)}, which seems to be part of its training: it begins anew "
                    "after a restore, and the run does not go on as it was. Give it in the state too. If it is not "
                    "used any more, nothing is wrong. To leave it out on purpose, give it, and exclude its name."
                )
            if datasets := read_by_workers(state):  # guard: datasets-of-workers-reported
                reporting.threat(
                    f"the state has {shortened(datasets, 3)}, which a DataLoader reads in worker processes: they "
                    "advance copies of it, and each save has its position before the first batch. Give torchdata's "
                    "StatefulDataLoader in the state in its place, or num_workers=0. If its state changes in this "
                    "process only, nothing is wrong."
                )
            if lacking := unstored(state):  # guard: unstored-parameters-reported
                shapes = shortened([str(list(one.shape)) for one in lacking], 3)
                reporting.threat(
                    f"an optimizer of the state trains {plural(len(lacking), 'parameter')} ({shapes}) that no entry "
                    "of the state holds: saves lack what was trained, or have copies of it that never change, and "
                    "after a restore it begins anew. Give the module that has them in the state, and no copy of its "
                    "tensors. To leave them out on purpose, give it, and exclude its name."
                )
        # guard: untrained-state-reported
        elif self._saves >= UNCHANGED_SAVES and min(step - self._begun, self.steps or step) >= UNCHANGED_STEPS:
            self._elements = []
            reporting.threat(
                f"no parameter of the state has changed from step {self._begun} to step {step}, in {self._saves} "
                "saves: does the loop train other objects than those that were given to the Checkpointer? A cell of a "
                "notebook that is run again makes a new model and a new optimizer, which nothing saves: close() the "
                "Checkpointer, and make it again from the objects of the loop. If nothing was trained in these steps, "
                "nothing is wrong."
            )


def _elements(state: Mapping[str, Any]) -> list[tuple[object, ...]]:
    """Elements of some of the parameters that are trained; empty if none is."""
    found = [*{id(one): one for one in _parameters(state)}.values()]
    return [_ends(one) for one in found[:: max(1, len(found) // SAMPLED)]]


def _parameters(state: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The parameters of modules and optimizers that are trained."""
    for one in find_objects(state).values():
        if isinstance(one, nn.Module):
            yield from (kept for kept in one.parameters() if kept.requires_grad)
        elif isinstance(one, Optimizer):
            yield from (kept for group in one.param_groups for kept in group["params"] if kept.requires_grad)


def _ends(tensor: torch.Tensor) -> tuple[object, ...]:
    """The first and the last element of a tensor, or of this rank's part of it. None of a tensor without memory, and
    of a subclass, which need not support that."""
    if nn.parameter.is_lazy(tensor):
        return ()
    local = getattr(tensor, "_local_tensor", tensor).detach()
    if type(local) is not torch.Tensor or local.is_meta or not local.numel() or local.layout != torch.strided:
        return ()
    return local[(0,) * local.ndim].item(), local[(-1,) * local.ndim].item()

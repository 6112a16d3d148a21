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
from ..format.values import Filter
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
    tensors = [one for one in _trained(state) if _has_version(one)]
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
    """Finds buffers of modules that have changed in place, or were replaced, since a step of the loop, as in a forward
    pass in training mode."""

    def __init__(self) -> None:
        self._places = dict[str, tuple[nn.Module, str]]()
        """name -> the module that has the buffer, and its name there"""
        self._noted = dict[str, tuple[torch.Tensor, int]]()
        """name -> the buffer, and its version"""

    def begin(self, state: Mapping[str, Any], saved: Filter) -> None:
        """Watch the buffers that the modules of a state have now, and of which `saved` keeps the names."""
        self._places = {name: place for name, place in _buffers(state) if saved.keeps(name)}

    def note(self) -> None:
        """The present values are those of the newest step."""
        self._noted = {name: (one, one._version) for name, one in self._now().items()}

    def changed(self) -> list[str]:
        """The names of the buffers that have changed since `note`."""
        noted = {name: (id(one), version) for name, (one, version) in self._noted.items()}
        return [name for name, one in self._now().items() if noted.get(name) != (id(one), one._version)]

    def spoiled(self) -> list[str]:
        """The names of the buffers that hold NaN, if any has changed since `note`: batch normalization counts its
        batches, and does not raise the version of its statistics."""
        return [name for name, one in self._now().items() if _holds_nan(one)] if self.changed() else []

    def _now(self) -> dict[str, torch.Tensor]:
        found = {name: getattr(module, of, None) for name, (module, of) in self._places.items()}
        return {name: one for name, one in found.items() if isinstance(one, torch.Tensor) and _has_version(one)}


def _buffers(state: Mapping[str, Any]) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    """The persistent buffers of the modules: name in a save -> the module that has it, and its name there."""
    for path, module in modules_of(state).items():
        for prefix, part in module.named_modules():
            others = getattr(part, "_non_persistent_buffers_set", ())
            for name in [name for name, _ in part.named_buffers(recurse=False) if name not in others]:
                yield f"{path}.{plain_name(f'{prefix}.{name}' if prefix else name)}", (part, name)


def _has_version(tensor: torch.Tensor) -> bool:
    return not nn.parameter.is_lazy(tensor) and not tensor.is_inference()


def _holds_nan(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or this rank's part of it, holds NaN. False for a subclass, which need not support that."""
    local = getattr(tensor, "_local_tensor", tensor)
    return type(local) is torch.Tensor and local.is_floating_point() and bool(local.isnan().any())


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

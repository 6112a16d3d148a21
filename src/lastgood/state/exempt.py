"""Parameters that may hold NaN or infinity although the training has not diverged; most of them are masks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from ..format.values import join
from . import dtensor, subclasses, tensors
from .capture import Captured, Origin
from .objects import modules_of, plain_name

_SUMMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def untrained(state: Mapping[str, Any], captured: Captured) -> frozenset[str]:
    """Stored names of the parameters that require no gradient under any name, and that no optimizer updates."""
    trains: dict[str, bool] = {}
    for name, _, wants_grad in _parameters(state):
        stored = captured.aliases.get(name, name)
        trains[stored] = trains.get(stored, False) or wants_grad
    # guard: trained-parameters-not-exempt
    return frozenset(name for name in trains if not trains[name] and captured.origins.get(name) is Origin.PARAMETER)


def masks(state: Mapping[str, Any], among: Collection[str] | None = None) -> frozenset[str]:
    """Names of the parameters that hold infinity and no NaN now. `among`: the names to examine (default: all).

    A parameter with NaN is not taken for a mask: NaN is a sign of divergence. A frozen one may be `untrained`.
    """
    wanted = ((name, one) for name, one, _ in _parameters(state) if among is None or name in among)
    return frozenset(name for name, one in wanted if _is_mask(one))


def _is_mask(parameter: torch.Tensor) -> bool:
    """Whether a parameter, or the part of it that this process holds, contains infinity and no NaN."""
    if tensors.storage(parameter) is None:  # the next save refuses it by name
        return False
    local = dtensor.local(parameter).detach()
    if not (local.is_floating_point() or local.is_complex()):
        return False
    if local.dtype in _SUMMED and bool(torch.isfinite(local.sum())):
        return False  # a sum with NaN or infinity is not finite; a sum that is not finite may also have overflowed
    numbers = torch.view_as_real(local) if local.is_complex() else local if local.dtype in _SUMMED else local.float()
    return bool(numbers.isinf().any()) and not bool(numbers.isnan().any())


def _parameters(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """(name in a save, tensor, whether it requires a gradient) of the parameters of all modules of a state.

    A tensor subclass is replaced by its inner tensors, because it need not support any computation.
    """
    for path, module in modules_of(state).items():
        for raw, parameter in module.named_parameters(remove_duplicate=False):
            for name, part in _parts(f"{path}.{plain_name(raw)}", parameter):
                yield name, part, parameter.requires_grad


def _parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if not subclasses.is_flattenable(tensor):  # guard: frozen-subclass-inner-tensors
        yield name, tensor
        return
    for inner, part in subclasses.inner_tensors(tensor).items():
        yield from _parts(join(name, inner), part)

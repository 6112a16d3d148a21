"""Whether parameters have changed since an earlier call, as far as torch's version counters show. Copies nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .objects import find_objects


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

"""Own loading: modules and objects that load by code of their own.

Such a module may load a tensor of another shape than it has now: an observer of quantization-aware training, a lazy
module that has no shape yet, a point cloud that has grown. Its code is called with tensors that have been verified.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..errors import LoadFailed
from . import dtensor
from .objects import plain_name
from .tensors import TORCH_DTYPES

_OF_TORCH = ("torch.nn.", "torch.distributed.")
"""Packages whose loading code only translates old names and versions, and resizes nothing."""


_SAFE = "The generations are untouched. The live state is part of that step: do not train on it."


@contextmanager
def calling(live: Any, path: str, step: int) -> Iterator[None]:
    """Surrounds a call of the user's code that loads `live`. Raises LoadFailed from any exception of that code."""
    try:
        yield
    except Exception as error:
        raise LoadFailed(
            f"loading step {step} had begun when {path} ({type(live).__qualname__}) could not load its part: "
            f"{type(error).__name__}: {error}",
            safe=_SAFE,
            todo="Fix its load_state_dict, build the state anew and restore again.",
        ) from error


def _is_own(code: Any) -> bool:
    while isinstance(code, partial):
        code = code.func
    return not str(getattr(code, "__module__", "")).startswith(_OF_TORCH)


def _has_own_hook(module: nn.Module) -> bool:
    hooks = (getattr(one, "hook", one) for one in module._load_state_dict_pre_hooks.values())
    return any(map(_is_own, hooks))


class OwnLoading:
    """Which modules have loading code of their own, and which tensors may therefore change their shape in a load.

    These tensors are the lazy ones, those of a module with its own `_load_from_state_dict`, and all tensors of a
    top-level module with its own `load_state_dict`. A load_state_dict pre-hook is run too, but most hooks only rename
    entries, so the tensors of its module must keep their shapes.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self.modules: set[str] = set()
        """paths of the top-level modules in which some module has loading code of its own"""
        for path, root in modules.items():
            whole = _is_own(root.load_state_dict)
            for prefix, module in root.named_modules(remove_duplicate=False):
                own = whole or _is_own(module._load_from_state_dict)
                for name, tensor in chain(module._parameters.items(), module._buffers.items()):
                    if tensor is not None and (own or nn.parameter.is_lazy(tensor)):
                        self._tensors[f"{path}.{plain_name(f'{prefix}.{name}' if prefix else name)}"] = tensor
                if own or _has_own_hook(module):
                    self.modules.add(path)
        self._ids = set(map(id, self._tensors.values()))

    def may_load_shape(self, name: str, dtype: str, shape: tuple[int, ...]) -> bool:
        """Whether a load may give the tensor of this name this dtype and shape, which it does not have now."""
        live = self._tensors.get(name)
        if live is None or dtensor.is_sharded(live) or live.dtype is not TORCH_DTYPES[dtype]:
            return False
        return nn.parameter.is_lazy(live) or tuple(live.shape) != shape

    def may_change_shape(self, parameter: torch.Tensor) -> bool:
        """Whether this parameter may change its shape in a load."""
        return id(parameter) in self._ids and not nn.parameter.is_lazy(parameter)

    def require_loaded_shapes(self, live: nn.Module, handed: Mapping[str, torch.Tensor], path: str, step: int) -> None:
        """Check a module after its load. Raises LoadFailed if it has not taken a tensor of another shape."""
        entries = live.state_dict() if handed else {}
        left = [
            raw
            for raw, one in handed.items()
            if not isinstance(entries.get(raw), torch.Tensor) or entries[raw].shape != one.shape
        ]
        if left:
            names = ", ".join(f"{raw} {list(handed[raw].shape)}" for raw in left)
            raise LoadFailed(
                f"loading step {step} had begun when {path} ({type(live).__qualname__}) left out what has "
                f"another shape in the generation: {names}",
                safe=_SAFE,
                todo="Build the module in the stored shapes, or let its load_state_dict resize these tensors, and "
                "restore again into a new state.",
            )

    def require_changed_shape(self, parameter: torch.Tensor, shape: list[int], path: str, step: int) -> None:
        """Check a parameter after the modules were loaded. Raises LoadFailed unless it has `shape` now.

        `shape`: that of the parameter to which the optimizer's state at `path` belonged when it was saved."""
        if list(parameter.shape) != shape:
            raise LoadFailed(
                f"loading step {step} had begun. The state at {path} belongs to a parameter of shape {shape}, but the "
                f"module that owns the parameter has left it at {list(parameter.shape)}, or has replaced it",
                safe=_SAFE,
                todo="Let the module resize the parameter in place (`.data`), and restore again into a new state.",
            )

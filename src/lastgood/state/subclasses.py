"""Tensor subclasses that consist of plain tensors, such as the quantized tensors of torchao. Their tag is "!flattened".

A subclass is taken apart and made again by torch's own protocol: `__tensor_flatten__` returns the names of its inner
tensors and a context of plain data, `__tensor_unflatten__` makes a tensor from these. Nested tensors and DTensors have
the protocol too; they are not handled in this module.

On load `instances.find_class` finds the class among the imported ones, and its `__tensor_unflatten__` is called. That
is code of a tensor class that the program has imported, never code that is stored.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import nn

from . import dtensor
from .instances import FORMS, attribute, class_name, find_class, tag_of_class


def is_flattenable(obj: Any) -> bool:
    """Whether it is a tensor subclass that can be stored as the inner tensors that it consists of."""
    return (
        isinstance(obj, torch.Tensor)
        and type(obj) not in (torch.Tensor, nn.Parameter)
        and not dtensor.is_sharded(obj)
        and not obj.is_nested
        and _has_protocol(type(obj))
        and find_class(class_name(type(obj))) is type(obj)
    )


def _has_protocol(kind: type) -> bool:
    return all(attribute(kind, f"__tensor_{verb}__") is not None for verb in ("flatten", "unflatten"))


def inner_tensors(tensor: Any) -> dict[str, torch.Tensor]:
    """The tensors that it consists of, by the name of the attribute."""
    names, _ = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def resolve(name: str, live: Any) -> tuple[Any, str]:
    """The class of this name, and why no tensor of it can be made; empty if one can."""
    kind, noun = find_class(name, live), f"a tensor of class {name[:200].replace(':', '.')}"
    if kind is None:
        return None, f"{noun} in the generation, which is not imported here: import its module before the restore"
    known = issubclass(kind, torch.Tensor) and _has_protocol(kind)
    return kind, "" if known else f"{noun} in the generation, and no such tensor class here"


def is_like(live: Any, names: set[str], context: Any, shape: tuple[int, ...]) -> bool:
    """Whether the live tensor can become the stored one by writing into its inner tensors alone."""
    inner, live_context = live.__tensor_flatten__()
    return set(inner) == names and tuple(live.shape) == shape and _equal(live_context, context)


def _equal(one: Any, other: Any) -> bool:
    """Whether two contexts are equal. Instances are compared part by part: no `__eq__` of their classes runs."""
    if type(one) is not type(other):
        return False
    if tag := tag_of_class(type(one)):
        one, other = FORMS[tag].parts(one), FORMS[tag].parts(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(part, other[key]) for key, part in one.items())
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def assemble(kind: Any, parts: dict[str, torch.Tensor], context: Any, shape: tuple[int, ...], stride: list[int]) -> Any:
    """A new tensor of this class. Raises TypeError where its `__tensor_unflatten__` raises or returns another thing."""
    try:
        with torch.no_grad():
            made = kind.__tensor_unflatten__(parts, context, torch.Size(shape), tuple(stride))
    except Exception as error:
        raise TypeError(f"its __tensor_unflatten__ raised {type(error).__name__}: {error}") from error
    if type(made) is not kind or tuple(made.shape) != shape:
        raise TypeError(f"its __tensor_unflatten__ made a {type(made).__qualname__} of another class or shape")
    return made

"""Decoding: the values of a manifest, with tensors and objects as references. Touches nothing live.

The result has been validated: each reference names a tensor that the generation has, each optimizer has its groups.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..errors import ManifestInvalid
from ..format.encodings import need, numpy_dtype, parsed
from ..format.values import decode
from . import tensors
from .instances import FORMS
from .objects import KINDS


@dataclass(frozen=True)
class Stored:
    """What a generation holds, as one process loads it."""

    step: int
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    """every name, aliases included -> (dtype name such as "bfloat16", shape)"""
    aliases: dict[str, str]
    """further name -> stored name"""
    values: dict[str, Any]
    """name of a top-level entry, and "rng" -> JSON with typed tags"""


@dataclass(frozen=True)
class TensorRef:
    """A stored tensor: the device it was on, whether it was a Parameter, its `requires_grad`, its memory order."""

    name: str
    device: torch.device
    is_parameter: bool = False
    wants_grad: bool = False
    order: tensors.Order = ()


@dataclass(frozen=True)
class ArrayRef:
    """A stored numpy array."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    order: tensors.Order = ()


@dataclass(frozen=True)
class SavedObject:
    """The stored state of an object; of a module, what its state_dict() holds besides tensors."""

    tag: str
    data: Any


@dataclass(frozen=True)
class SavedInstance:
    """An instance of a user's class: the tag of its kind, the name of its class, and its parts."""

    tag: str
    name: str
    parts: dict[str, Any]


@dataclass(frozen=True)
class SavedFlattened:
    """A tensor subclass: the name of its class, its inner tensors, what else `__tensor_unflatten__` takes."""

    name: str
    parts: dict[str, TensorRef | SavedFlattened]
    context: Any
    shape: tuple[int, ...]
    stride: list[int]
    is_parameter: bool
    wants_grad: bool


@dataclass(frozen=True)
class SavedGroup:
    """A parameter group: for each parameter, by qualified name, its shape and memory order; and the hyperparameters."""

    params: dict[str, tuple[tuple[int, ...], tensors.Order]]
    options: dict[str, Any]


@dataclass(frozen=True)
class SavedOptimizer:
    """An optimizer. `state`: by the qualified name of a parameter; `common`: the state under all other keys."""

    kind: str
    groups: list[SavedGroup]
    state: dict[str, Any]
    common: dict[Any, Any]


def read_values(stored: Stored) -> tuple[dict[str, Any], set[str]]:
    """Decode the values. Returns them, and the names of the tensors that they refer to: all but those of modules.

    Raises ManifestInvalid for malformed values.
    """
    for alias, name in stored.aliases.items():
        need(alias in stored.tensors and name in stored.tensors and name not in stored.aliases, f"the alias {alias!r}")
    decoder = _TagDecoder(stored)
    return {name: decode(tree, decoder.leaf) for name, tree in stored.values.items()}, decoder.referenced


class _TagDecoder:
    """Decodes the tags that format/values.py does not know, and records which tensors they refer to."""

    def __init__(self, stored: Stored) -> None:
        self._tensors = stored.tensors
        self.referenced: set[str] = set()

    def leaf(self, tag: str, body: Any, inner: Callable[[Any], Any]) -> Any:
        if tag == "!tensor":
            return self._tensor(body)
        if tag == "!ndarray":
            return self._array(body)
        if tag == "!permuted":
            return self._permuted(body)
        if tag == "!torch.dtype":
            need(type(body) is str and body in tensors.EVERY_DTYPE, tag)
            return tensors.EVERY_DTYPE[body]
        if tag == "!torch.device":
            return _device(body)
        if tag == "!torch.Size":
            return torch.Size(_shape(body))
        if tag == "!module":
            need(type(body) is dict, tag)
            return SavedObject(tag, {name: inner(tree) for name, tree in body.items()})
        if tag == "!optimizer":
            return SavedObject(tag, _optimizer(body, inner))
        if tag in FORMS:
            return _instance(tag, body, inner)
        if tag == "!flattened":
            return _flattened(body, inner)
        return SavedObject(tag, inner(body)) if tag in KINDS else NotImplemented

    def _tensor(self, body: Any) -> TensorRef:
        if type(body) is str:
            return TensorRef(self._known(body), torch.device("cpu"))
        need(_types(body) == [str, str, bool, bool], "!tensor")
        name, device, is_parameter, wants_grad = body
        return TensorRef(self._known(name), _device(device), is_parameter, wants_grad)

    def _array(self, body: Any) -> ArrayRef:
        need(_types(body) in ([str, str], [str, dict]), "!ndarray")
        dtype, (stored, shape) = numpy_dtype(body[1]), self._tensors[self._known(body[0])]
        if tensors.native(dtype):
            need(stored == dtype.name, "!ndarray of another dtype")
            return ArrayRef(body[0], dtype, shape)
        need((stored, shape[-1:]) == ("uint8", (dtype.itemsize,)) and dtype.itemsize, "!ndarray of another dtype")
        return ArrayRef(body[0], dtype, shape[:-1])

    def _permuted(self, body: Any) -> TensorRef | ArrayRef:
        """A tensor or array whose memory is not row-major."""
        need(_types(body) == [list, dict] and len(body[1]) == 1, "!permuted")
        ((tag, inside),) = body[1].items()
        need(tag in ("!tensor", "!ndarray"), "!permuted")
        ref = self._tensor(inside) if tag == "!tensor" else self._array(inside)
        shape = self._tensors[ref.name][1]
        need(isinstance(ref, TensorRef) or ref.shape == shape, "!permuted")
        return replace(ref, order=_order(body[0], shape))

    def _known(self, name: str) -> str:
        need(name in self._tensors, f"no tensor {name[:200]!r}")
        self.referenced.add(name)
        return name


def _optimizer(body: Any, inner: Callable[[Any], Any]) -> SavedOptimizer:
    need(type(body) is dict and body.keys() == {"class", "groups", "state", "common"}, "!optimizer")
    need(_types(list(body.values())) == [_PARTS[key] for key in body], "!optimizer")
    groups = []
    for group in body["groups"]:
        need(type(group) is dict and group.keys() == {"params", "options"}, "a group of an !optimizer")
        need(type(group["params"]) is list, "a group of an !optimizer")
        params = dict(_parameter(one) for one in group["params"])
        need(len(params) == len(group["params"]), "a parameter that an !optimizer has twice")
        groups.append(SavedGroup(params, inner(group["options"])))
    state = {name: inner(tree) for name, tree in body["state"].items()}
    common = inner(body["common"])
    need(all(type(one) is dict for one in (common, *(group.options for group in groups))), "!optimizer")
    need(not any(key in group.options for group in groups for key in ("params", "param_names")), "!optimizer")
    return SavedOptimizer(body["class"], groups, state, common)


def _instance(tag: str, body: Any, inner: Callable[[Any], Any]) -> SavedInstance:
    need(type(body) is dict and body.keys() == {"class", "parts"}, tag)
    need(type(body["class"]) is str and type(body["parts"]) is dict, tag)
    parts = {name: inner(tree) for name, tree in body["parts"].items()}
    if tag == "!np.ma":
        _need_masked(parts)
    return SavedInstance(tag, body["class"], parts)


def _need_masked(parts: dict[str, Any]) -> None:
    """Raises ManifestInvalid unless a masked array can be made of these parts."""
    data, mask, fill = parts.get("data"), parts.get("mask"), parts.get("fill_value")
    if not isinstance(data, ArrayRef) or type(parts.get("hard", False)) is not bool:
        raise ManifestInvalid("a stored value is malformed: !np.ma")
    if mask is not None:
        alike = isinstance(mask, ArrayRef) and mask.shape == data.shape
        need(alike and mask.dtype == np.ma.make_mask_descr(data.dtype), "!np.ma")
    if fill is not None:
        need(isinstance(fill, np.generic), "!np.ma")
        parsed(np.ma.MaskedArray, np.zeros(1, data.dtype), np.ma.nomask, None, False, False, True, False, True, fill)


def _flattened(body: Any, inner: Callable[[Any], Any]) -> SavedFlattened:
    need(type(body) is dict and body.keys() == _FLATTENED.keys(), "!flattened")
    need(_types(list(body.values())) == [_FLATTENED[key] or type(body[key]) for key in body], "!flattened")
    shape = _shape(body["size"])
    need(len(body["stride"]) == len(shape) and all(type(one) is int for one in body["stride"]), "!flattened")
    parts = {name: inner(tree) for name, tree in body["parts"].items()}
    need(all(isinstance(one, (TensorRef, SavedFlattened)) for one in parts.values()), "!flattened")
    context = decode(body["context"], _TagDecoder(Stored(0, {}, {}, {})).leaf)  # it cannot refer to a tensor
    return SavedFlattened(
        body["class"], parts, context, shape, body["stride"], body["parameter"], body["requires_grad"]
    )


_FLATTENED = {
    "class": str,
    "parts": dict,
    "context": None,
    "size": list,
    "stride": list,
    "parameter": bool,
    "requires_grad": bool,
}
_PARTS = {"class": str, "groups": list, "state": dict, "common": dict}


def _types(items: Any) -> list[type]:
    return [type(item) for item in items] if type(items) is list else []


def _shape(body: Any) -> tuple[int, ...]:
    need(type(body) is list and all(type(size) is int and 0 <= size < 2**63 for size in body), "a shape")
    return tuple(body)


def _order(body: Any, shape: tuple[int, ...]) -> tensors.Order:
    plain = [*range(len(shape))]
    need(type(body) is list and body != plain and all(type(at) is int for at in body), "a memory order")
    need(sorted(body) == plain, "a memory order")
    return tuple(body)


def _parameter(body: Any) -> tuple[str, tuple[tuple[int, ...], tensors.Order]]:
    need(_types(body) in ([str, list], [str, list, list]), "a parameter of an !optimizer")
    shape = _shape(body[1])
    return body[0], (shape, _order(body[2], shape) if len(body) > 2 else ())


def _device(text: Any) -> torch.device:
    need(type(text) is str and re.fullmatch(r"[a-z]{1,20}(:\d{1,3})?", text), "a device")
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise ManifestInvalid(f"a stored value is malformed: no device {text}") from error

"""Tensors: which can be stored, as which bytes, and how they are written in place. Knows no state."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..format.encodings import dtype_tree
from ..format.layout import DTYPES
from ..format.values import refusal
from . import shards

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
EVERY_DTYPE: dict[str, torch.dtype] = {
    str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)
}
"""those of quantized tensors included, which can be stored as values only"""

# torch lacks copy kernels for these, on some device or all, or warns of them: they are copied as integers.
_COPIED_AS = {
    **{TORCH_DTYPES[f"{sign}int{bits}"]: torch.uint8 for sign in ("", "u") for bits in range(1, 8)},
    **{TORCH_DTYPES[name]: torch.uint8 for name in ("bits1x8", "bits2x4", "bits4x2", "bits8")},
    torch.bits16: torch.int16,
    torch.complex32: torch.int32,
}


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as the format says it: `bfloat16`."""
    return _NAMES[dtype]


# ---- bytes -----------------------------------------------------------------------------------------------------


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The content in row-major order: uint8 [bytes], on the tensor's device; a view of it where it is contiguous."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return _copyable(tensor).contiguous().reshape(-1).view(torch.uint8)


def from_bytes(data: torch.Tensor, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """The inverse of `as_bytes`: a view of `data`, uint8 [bytes], as `dtype` (a name: `bfloat16`) of `shape`."""
    return data.view(TORCH_DTYPES[dtype]).reshape(tuple(shape))


def from_buffer(data: bytearray, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """As `from_bytes`, of memory that is no tensor."""
    raw = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return from_bytes(raw, dtype, shape)


def _copyable(tensor: torch.Tensor) -> torch.Tensor:
    shell = _COPIED_AS.get(tensor.dtype)
    return tensor if shell is None else tensor.view(shell)


# ---- live tensors ----------------------------------------------------------------------------------------------


def write(live: torch.Tensor, source: torch.Tensor) -> None:
    """Copy into a live tensor of the same dtype and shape, on any device."""
    with torch.inference_mode(live.is_inference()), torch.no_grad():
        if not live.is_conj():  # of the dtypes concerned only a complex one can be, and then has no view
            live, source = _copyable(live), _copyable(source)
        live.copy_(source)


def blank(dtype: str, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """A new tensor, one run of memory whose content is to come."""
    kind = TORCH_DTYPES[dtype]
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty(tuple(shape), dtype=_COPIED_AS.get(kind, kind), device=device).view(kind)


def at_hand(device: torch.device) -> torch.device:
    """The device, or the CPU where this machine has no such one."""
    here = torch.accelerator.current_accelerator()
    if here is not None and here.type == device.type and (device.index or 0) < torch.accelerator.device_count():
        return device
    return torch.device("cpu")


def region(tensor: torch.Tensor) -> Hashable:
    """What tensors that are one and the same memory have in common; None for an empty one, which shares nothing."""
    tensor = shards.local(tensor)
    if tensor.numel() == 0:
        return None
    flags = (tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), flags)


def once(tensor: torch.Tensor) -> torch.Tensor:
    """The part of an expanded tensor that has memory of its own; other tensors whole."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor[tuple(slice(1 if size > 1 and stride == 0 else None) for size, stride in strides)]


def storage(tensor: torch.Tensor) -> int | None:
    """Address of the memory that a tensor is a view of; None if it cannot be stored."""
    return None if _obstacle(tensor) else shards.local(tensor).untyped_storage().data_ptr()


def require_storable(tensor: torch.Tensor, path: str) -> None:
    """Raises Unstorable, by name, for a tensor that is not plain memory of a dtype that the format knows."""
    if found := _obstacle(tensor):
        raise refusal(path, *found)


def _obstacle(tensor: torch.Tensor) -> tuple[str, str] | None:
    """What a tensor is instead, and the remedy."""
    tensor = shards.local(tensor)
    if nn.parameter.is_lazy(tensor):
        return "is a lazy parameter that has no shape yet", "Run one forward pass first"
    if tensor.is_nested:
        return "is a nested tensor", "Store the list of its tensors: unbind()"
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        return f"is a tensor subclass ({kind})", "Store the plain tensors that it is made of"
    if tensor.is_quantized:
        return "is a quantized tensor", "Store int_repr() with its scale and zero point"
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}", "Store to_dense(), or the tensors of its indices and values"
    if tensor.is_meta:
        return "is on the meta device and has no content", "Give it memory first: module.to_empty()"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"lies on the device {tensor.device}, which has not been tried", "Move it to the host first: cpu()"
    if tensor.dtype not in _NAMES:
        return f"has dtype {tensor.dtype}, which the format does not know", "Store a view of it as integers"
    return None


# ---- numpy arrays ----------------------------------------------------------------------------------------------


def from_array(array: np.ndarray, path: str) -> torch.Tensor:
    """A tensor of the same content, and the same memory where torch can describe it.

    A dtype that torch lacks (dates, text, other byte orders) becomes uint8 with one more dimension, its bytes.
    Raises Unstorable, by name.
    """
    dtype = array.dtype
    if type(array) is not np.ndarray or not dtype_tree(dtype) or dtype.itemsize == 0:
        raise refusal(path, f"is a numpy {type(array).__name__} of {dtype}", "Store plain arrays, one for each field")
    if not native(dtype):
        raw = array.copy().reshape(-1).view(np.uint8)
        return torch.from_numpy(raw.reshape(*array.shape, dtype.itemsize))
    odd = any(stride < 0 or stride % dtype.itemsize for stride in array.strides)
    return torch.from_numpy(array if array.flags.writeable and not odd else array.copy())


def to_array(tensor: torch.Tensor, dtype: np.dtype[Any]) -> np.ndarray:
    """The inverse of `from_array`, on the memory of `tensor` (CPU)."""
    array = tensor.numpy()
    return array if native(dtype) else array.reshape(-1).view(dtype).reshape(array.shape[:-1])


def native(dtype: np.dtype[Any]) -> bool:
    """Whether torch has this dtype."""
    return dtype.isnative and dtype.name in TORCH_DTYPES

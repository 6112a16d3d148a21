"""Tensors: which can be stored, as which bytes, in which memory order, and how they are written in place.

Each function handles one tensor or array, and knows nothing of the state that it belongs to.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import Refused
from ..format.encodings import dtype_tree
from ..format.layout import DTYPES
from ..format.values import refusal
from . import dtensor

Order = tuple[int, ...]
"""memory order: the dimensions of a tensor from the outermost to the innermost in memory; empty for row-major"""

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)}
"""the dtypes of the format that this version of torch has"""
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
EVERY_DTYPE: dict[str, torch.dtype] = {
    str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)
}
"""all dtypes of torch by name; those of quantized tensors can be stored as values, not as tensors"""

# torch lacks copy kernels for these on some device, or warns about them: they are copied as integers.
_INTEGERS = {
    **{f"{sign}int{bits}": torch.uint8 for sign in ("", "u") for bits in range(1, 8)},
    **dict.fromkeys(("bits1x8", "bits2x4", "bits4x2", "bits8"), torch.uint8),
    "bits16": torch.int16,
    "float4_e2m1fn_x2": torch.uint8,
    "complex32": torch.int32,
    "bcomplex32": torch.int32,
}
_COPIED_AS = {TORCH_DTYPES[name]: integer for name, integer in _INTEGERS.items() if name in TORCH_DTYPES}


def dtype_of(name: str) -> torch.dtype:
    """The dtype of this name in the format. Raises Refused where this version of torch does not have it."""
    if name not in TORCH_DTYPES:
        raise Refused(
            f"the generation holds tensors of {name}, which torch {torch.__version__} does not have",
            safe="Nothing was loaded.",
            todo="Load it with a newer torch, or leave these tensors out with exclude=[...].",
        )
    return TORCH_DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in the format: `bfloat16`."""
    return _NAMES[dtype]


# ---- bytes -----------------------------------------------------------------------------------------------------


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The content in row-major order: uint8 [bytes], on the tensor's device; a view of it where it is contiguous.

    A contiguous tensor of at most one element may have any stride, and `view(dtype)` refuses all strides but 1. So the
    flat tensor is made by `as_strided`, and not by `reshape`.
    """
    tensor = _copyable(tensor.detach().resolve_conj().resolve_neg()).contiguous()
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # guard: single-element-stride-bytes


def from_bytes(data: torch.Tensor, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """The inverse of `as_bytes`: a view of `data`, uint8 [bytes], as `dtype` (a name: `bfloat16`) of `shape`."""
    return data.view(dtype_of(dtype)).reshape(tuple(shape))


def from_buffer(data: bytearray, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """As `from_bytes`, on the memory of a bytearray."""
    raw = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return from_bytes(raw, dtype, shape)


def _copyable(tensor: torch.Tensor) -> torch.Tensor:
    integer = _COPIED_AS.get(tensor.dtype)
    return tensor if integer is None else tensor.view(integer)


# ---- live tensors ----------------------------------------------------------------------------------------------


def write(live: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` into a live tensor of the same dtype and shape, on any device."""
    with torch.inference_mode(live.is_inference()), torch.no_grad():
        if not live.is_conj():  # a conjugated tensor is complex, and has no view as integers
            live, source = _copyable(live), _copyable(source)
        live.copy_(source)


def blank(dtype: str, shape: Sequence[int], device: torch.device, order: Order = ()) -> torch.Tensor:
    """A new dense tensor with its dimensions in this memory order. Its content is undefined."""
    kind = dtype_of(dtype)
    with torch.inference_mode(False), torch.no_grad():
        made = torch.empty_strided(tuple(shape), strides(shape, order), dtype=_COPIED_AS.get(kind, kind), device=device)
        return made.view(kind)


def order(tensor: torch.Tensor) -> Order:
    """The memory order of a tensor; for a DTensor, that of the part that this process holds.

    Gaps between elements do not matter. Tensors of at most one element, and expanded ones (a stride of 0), count
    as row-major. For every dense tensor, `strides(shape, order(tensor))` are its own strides.
    """
    tensor = dtensor.local(tensor)
    shape, stride = tensor.shape, tensor.stride()
    if tensor.numel() <= 1 or 0 in stride:  # guard: expanded-counts-as-row-major
        return ()
    plain = range(tensor.dim())
    found = sorted(plain, key=lambda at: (-stride[at], shape[at] == 1))  # guard: unit-dimensions-sort-last
    return () if found == [*plain] else tuple(found)


def strides(shape: Sequence[int], order: Order = ()) -> tuple[int, ...]:
    """The strides of a dense tensor whose dimensions have this memory order."""
    found, step = [0] * len(shape), 1
    for at in reversed(order or range(len(shape))):
        found[at] = step
        step *= max(shape[at], 1)
    return tuple(found)


def available(device: torch.device) -> torch.device:
    """The device, or the CPU if this machine does not have this device."""
    if device.type == "cuda" and (device.index or 0) < torch.cuda.device_count():
        return device
    return torch.device("cpu")


def region(tensor: torch.Tensor) -> Hashable:
    """A key that is equal for tensors that are the same memory; None for an empty tensor, which shares none."""
    tensor = dtensor.local(tensor)
    if tensor.numel() == 0:
        return None
    flags = (tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), flags)


def once(tensor: torch.Tensor) -> torch.Tensor:
    """The part of an expanded tensor that has memory of its own; any other tensor unchanged."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor[tuple(slice(1 if size > 1 and stride == 0 else None) for size, stride in strides)]


def storage(tensor: torch.Tensor) -> int | None:
    """The address of the storage of a tensor; None if the tensor cannot be stored."""
    return None if _obstacle(tensor) else dtensor.local(tensor).untyped_storage().data_ptr()


def require_storable(tensor: torch.Tensor, path: str) -> None:
    """Raises Unstorable, by name, unless the tensor is plain memory of a dtype that the format knows."""
    if found := _obstacle(tensor):
        raise refusal(path, *found)


def _obstacle(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Why a tensor cannot be stored, and the remedy; None if it can."""
    tensor = dtensor.local(tensor)
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
        return (
            f"is on the device {tensor.device}, and only CPU and CUDA tensors can be stored",
            "Move it to the host first: cpu()",
        )
    if tensor.dtype not in _NAMES:
        return f"has dtype {tensor.dtype}, which the format does not know", "Store a view of it as integers"
    return None


# ---- numpy arrays ----------------------------------------------------------------------------------------------


def from_array(array: np.ndarray, path: str) -> torch.Tensor:
    """A tensor of the same content; it shares the memory of the array where torch can describe that.

    An array of a dtype that torch lacks (dates, text, other byte orders) becomes uint8 with one more dimension, the
    bytes of each element. Raises Unstorable, by name, for subclasses of arrays and for dtypes of objects or records.
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

"""Values of torch.distributed.checkpoint: everything that its planners write as bytes, as typed values. Runs no code.

torch pickles each such value. Here it is stored with the tags of format/values.py and of state/rules.py, and these:

    {"!io.BytesIO": [base64, position]}                    {"!array": [numpy dtype, shape, base64]}
    {"!bare_tensor": [dtype, shape, base64]}               a tensor inside a value that the planner did not flatten

On load a value is built from its tags and pickled for the planner, which expects bytes. No stored pickle is read.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from ..format import values
from ..format.encodings import dtype_tree, need, numpy_dtype
from ..format.layout import DTYPES
from ..state import tensors


def of_item(item: WriteItem, planner: SavePlanner) -> Any:
    """The value of a write item as typed values. Raises Unstorable, by name.

    torch's default planner has the object itself; of any other planner only the bytes that it makes are known.
    """
    name = item.index.fqn
    made = (getattr(type(planner), one, None) for one in ("resolve_data", "transform_object"))
    if tuple(made) == (DefaultSavePlanner.resolve_data, DefaultSavePlanner.transform_object):
        return values.encode(planner.lookup_object(item.index), name, _encoded)  # type: ignore[attr-defined]
    return of_pickle(name, planner.resolve_data(item))


def of_pickle(name: str, raw: Any) -> Any:
    """What torch has pickled, as typed values. Raises Unstorable, by name."""
    try:
        raw.seek(0)
        loaded = torch.load(raw, weights_only=True)
    except Exception as error:
        raise values.refusal(name, "is no plain value: torch's restricted unpickler refuses it") from error
    return values.encode(loaded, name, _encoded)


def of_paths(mappings: Mapping[str, Any] | None) -> dict[str, Any]:
    """For each name its place in nested dicts, as typed values."""
    return {name: values.encode(tuple(path), name) for name, path in (mappings or {}).items()}


def decoded(tree: Any) -> Any:
    """The value that `of_item` or `of_pickle` stored. Raises ManifestInvalid."""
    return values.decode(tree, _decoded)


def _encoded(obj: Any, path: str, _: Callable[[Any, str], Any]) -> Any:
    if type(obj) is io.BytesIO:
        return {"!io.BytesIO": [_base64(obj.getvalue()), obj.tell()]}
    if isinstance(obj, torch.Size):
        return {"!torch.Size": list(obj)}
    if isinstance(obj, torch.dtype) and obj in tensors.TORCH_DTYPES.values():
        return {"!torch.dtype": tensors.dtype_name(obj)}
    if isinstance(obj, torch.device):
        return {"!torch.device": str(obj)}
    if type(obj) is np.ndarray and (kind := dtype_tree(obj.dtype)):
        return {"!array": [kind, list(obj.shape), _base64(obj.tobytes())]}
    if isinstance(obj, torch.Tensor):
        tensors.require_storable(obj, path)
        data = tensors.as_bytes(obj).cpu().numpy().tobytes()
        return {"!bare_tensor": [tensors.dtype_name(obj.dtype), list(obj.shape), _base64(data)]}
    return NotImplemented


def _decoded(tag: str, body: Any, _: Callable[[Any], Any]) -> Any:
    build = _BUILD.get(tag)
    if build is None:
        return NotImplemented
    try:
        return build(*body) if type(body) is list and tag != "!torch.Size" else build(body)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        need(False, f"{tag}: {error}")


def _bytes_io(text: str, position: int) -> io.BytesIO:
    found = io.BytesIO(base64.b64decode(text, validate=True))
    found.seek(position)
    return found


def _array(dtype: Any, shape: list[int], text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text, validate=True), numpy_dtype(dtype)).reshape(shape).copy()


def _tensor(dtype: str, shape: list[int], text: str) -> torch.Tensor:
    need(dtype in DTYPES, "!bare_tensor of no known dtype")
    return tensors.from_buffer(bytearray(base64.b64decode(text, validate=True)), dtype, shape)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


_BUILD: dict[str, Callable[..., Any]] = {
    "!io.BytesIO": _bytes_io,
    "!torch.Size": torch.Size,
    "!torch.dtype": tensors.TORCH_DTYPES.__getitem__,
    "!torch.device": torch.device,
    "!array": _array,
    "!bare_tensor": _tensor,
}

"""Imports and exports folders in the format of torch.distributed.checkpoint's FileSystemWriter.

An imported folder becomes what `lastgood.dcp.Writer` would have written, with an empty `rng`, and,
with a prefix, without the record of its paths. No code in a folder is
run: an unpickler that knows torch's classes of metadata only reads its metadata, and torch's restricted unpickler reads
its values.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import warnings
from collections.abc import Mapping
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import ReadItem

from ..errors import LastgoodError, ManifestInvalid, Unstorable
from ..format.boxes import Box
from ..policy import reshard
from ..run.content import Content
from ..state import tensors as live
from . import dcp as storage
from . import dcp_values
from .importing import DCP_METADATA, Foreign


def _member(kind: Any, name: Any) -> Any:
    """A member of torch's one enum of metadata, which Python 3.11.0 to 3.11.3 write as a call of `getattr`."""
    if kind is not dcp._MEM_FORMAT_ENCODING or name not in kind.__members__:  # guard: metadata-reads-no-attribute
        raise Unstorable(
            "the metadata of the folder asks for an attribute that is no member of torch's enum",
            safe="No code in it was run, and nothing was touched.",
        )
    return kind[name]


_KNOWN: dict[tuple[str, str], Any] = {
    ("builtins", "getattr"): _member,
    **{
        (dcp.__name__, kind.__name__): kind
        for kind in (
            dcp.BytesStorageMetadata,
            dcp.ChunkStorageMetadata,
            dcp.Metadata,
            dcp.MetadataIndex,
            dcp.StorageMeta,
            dcp.TensorProperties,
            dcp.TensorStorageMetadata,
            dcp._MEM_FORMAT_ENCODING,
        )
    },
    (_StorageInfo.__module__, _StorageInfo.__qualname__): _StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "PurePosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,  # as Python 3.13 names it
}


# ---- import ----------------------------------------------------------------------------------------------------------


def opened(path: str, prefix: str) -> Foreign:
    """The contents of a folder. Its metadata is checked; one tensor at a time is in memory, when it is read.

    `prefix`: is put before all names. Raises Unstorable, ManifestInvalid.
    """
    reader = _Reader(path)
    try:
        return _opened(reader, prefix)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        what = f"{os.path.join(path, DCP_METADATA)} is not valid: {error}"
        raise ManifestInvalid(what, safe="Nothing was touched.") from error


def _opened(reader: _Reader, prefix: str) -> Foreign:
    metadata = reader.read_metadata()
    entries = metadata.state_dict_metadata
    stored = {prefix + name: one for name, one in entries.items() if isinstance(one, dcp.TensorStorageMetadata)}
    newest: dict[str, torch.Tensor] = {}
    """the tensor that was read last, by name"""

    def read(name: str, start: int, mv: memoryview) -> None:
        if name not in newest:
            newest.clear()
            newest[name] = torch.empty(stored[name].size, dtype=stored[name].properties.dtype)
            _load(reader, {name.removeprefix(prefix): newest[name]})
        mv[:] = live.as_bytes(newest[name])[start : start + len(mv)].numpy().data

    found = Foreign(read)
    for name, one in stored.items():
        _require_whole(str(reader.path), name, one)
        found.add(name, live.dtype_name(one.properties.dtype), tuple(one.size))
    others = {name: None for name in entries if prefix + name not in stored}
    values = _load(reader, others) if others else {}
    found.values[storage.VALUES] = {prefix + name: tree for name, tree in values.items()}
    if not prefix:
        found.values[storage.PATHS] = dcp_values.of_paths(metadata.planner_data)
    return found


def _require_whole(path: str, name: str, entry: dcp.TensorStorageMetadata) -> None:
    """Raise ManifestInvalid unless the parts of a tensor cover all of it, without overlaps."""
    boxes = [Box(tuple(one.offsets), tuple(one.sizes)) for one in entry.chunks]
    inside = all(
        len(box.shape) == len(entry.size)
        and all(at >= 0 and at + n <= whole for at, n, whole in zip(box.offsets, box.shape, entry.size, strict=True))
        for box in boxes
    )
    if not inside or reshard.overlapping(boxes) or sum(one.elements for one in boxes) != math.prod(entry.size):
        raise ManifestInvalid(
            f"{path}: the parts of {name} do not make a tensor of shape {list(entry.size)}", safe="Nothing was touched."
        )


class _Reader(torch_dcp.FileSystemReader):
    """torch's reader, except that the pickled metadata is read once, and by an unpickler that does not trust it."""

    _metadata: dcp.Metadata | None = None

    def read_metadata(self, *args: Any, **options: Any) -> dcp.Metadata:
        if self._metadata is None:
            path = _inside(self.path, DCP_METADATA)
            try:
                with open(path, "rb") as file:
                    found = _Unpickler(file).load()
                if not isinstance(found, dcp.Metadata):
                    raise TypeError(f"a {type(found).__name__}")
                for one in found.storage_data.values():
                    _inside(self.path, str(one.relative_path))
            except (OSError, LastgoodError):
                raise
            except Exception as error:
                raise ManifestInvalid(f"{path} cannot be read: {error}", safe="Nothing was touched.") from error
            self._metadata = found
        return self._metadata


def _inside(folder: str | os.PathLike[str], name: str) -> str:
    """The path of a file in the folder. Raises ManifestInvalid if it is outside of the folder, or no file."""
    root = os.path.realpath(folder)
    path = os.path.realpath(os.path.join(root, name))
    if not path.startswith(root + os.sep) or not os.path.isfile(path):
        what = f"{folder} refers to {name!r}, which is outside of the folder, or no file"
        raise ManifestInvalid(what, safe="Nothing was touched.")
    return path


_InPython: Any = pickle._Unpickler


class _Unpickler(_InPython):  # type: ignore[misc]
    """Builds objects of known classes only. It is Python's: the C unpickler would set attributes of classes as well."""

    dispatch: ClassVar[dict[int, Any]] = dict(_InPython.dispatch)

    def load_build(self) -> None:
        if isinstance(self.stack[-2], type) or callable(self.stack[-2]):
            raise Unstorable("the metadata of the folder would change a class", safe="No code in it was run.")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            known = getattr(torch, name)
        if known is None:
            raise Unstorable(
                f"the metadata of the folder asks for {module}.{name}, which is no class of metadata",
                safe="No code in it was run, and nothing was touched.",
            )
        return known


class _Planner(DefaultLoadPlanner):
    """torch's planner, except that values are converted to typed values without trusting their pickles."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.values: dict[str, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        self.values[name] = dcp_values.of_pickle(name, value)


def _load(reader: _Reader, state: dict[str, Any]) -> dict[str, Any]:
    """Fill the tensors in `state`. Returns everything else as typed values, by name."""
    planner = _Planner()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns that there is no process group
            torch_dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        if isinstance(first, LastgoodError | OSError) or not isinstance(first, Exception):
            raise first from error
        reason = str(first).partition("\n")[0]
        raise ManifestInvalid(f"{reader.path} cannot be read: {reason}", safe="Nothing was committed.") from error
    return planner.values


# ---- export ---------------------------------------------------------------------------------------------------------


def write(content: Content, chosen: Mapping[str, str], folder: str, whole: bool) -> int:
    """Write tensors to an empty folder. Returns the bytes of its files.

    `chosen`: name in the folder -> name in the run. `whole`: also write the values that `lastgood.dcp.Writer` stored.
    """
    stored: dict[str, torch.Tensor] = {}  # keyed by the name in the run, so that tied tensors stay tied
    for name in chosen.values():
        if name not in stored:
            tensor, data = content.tensor(name)
            stored[name] = live.from_buffer(data, tensor.dtype, tensor.shape)
    flat: dict[str, Any] = {name: stored[of] for name, of in chosen.items()}
    kept, paths = storage.kept_values(content) if whole else ({}, {})
    flat |= kept
    state: dict[str, Any] = {}
    for name, value in flat.items():
        _put(state, paths.get(name, (name,)), value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            torch_dcp.save(state, storage_writer=torch_dcp.FileSystemWriter(folder), no_dist=True)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error  # the cause, for example a full disk
    return sum(one.stat().st_size for one in os.scandir(folder))


def _put(state: Any, path: tuple[Any, ...], value: Any) -> None:
    """Put a value into nested dicts and lists. An int in `path` is an index of a list."""
    for key, below in pairwise(path):
        empty: Any = [] if isinstance(below, int) else {}
        if isinstance(state, list):
            state.extend([None] * (key + 1 - len(state)))
            state[key] = empty if state[key] is None else state[key]
            state = state[key]
        else:
            state = state.setdefault(key, empty)
    if isinstance(state, list):
        state.extend([None] * (path[-1] + 1 - len(state)))
    state[path[-1]] = value

"""Makes a generation from a `.safetensors`, a `.pt`, or a folder of torch.distributed.checkpoint or of Hugging Face.

Headers and indexes are checked before anything is written. torch is imported for a `.pt` and for a folder of
torch.distributed.checkpoint only. A `.pt` is read with `weights_only=True`: no code in it runs.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..engine.arena import Arena, Lease
from ..errors import ManifestInvalid, StepTaken, Truncated, Unstorable
from ..extras import needed
from ..format import layout
from ..format.layout import Tensor
from ..io import os_errors
from ..io.files import PosixFiles, round_up
from ..limits import CHUNK_BYTES, HEADER_LIMIT_BYTES, WORKERS
from ..policy import restore
from ..ports import File
from ..records import Generation
from ..run import access
from ..run.left_behind import order_beside
from ..run.save import ReadyChunks, SaveRequest
from ..run.watched import CountBytes, Watched
from ..run.writer import RunWriter
from .exporting import HF_FILE, HF_INDEX

DCP_METADATA = ".metadata"
"""a file that every folder of torch.distributed.checkpoint has"""
_F4 = "F4"
"""a dtype of half a byte, which torch only has in pairs"""
_DTYPES = {theirs: ours for ours, (_, theirs) in layout.DTYPES.items() if theirs} | {
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    _F4: "float4_e2m1fn_x2",
}
"""name of a dtype in a `.safetensors` file -> its name in a run, whose own files hold the newer ones as bytes"""

Read = Callable[[str, int, memoryview], None]
"""fills a buffer: name of a tensor, offset of the first byte within the tensor, buffer"""


def is_known_folder(path: str) -> bool:
    """Whether the folder `path` is one of torch.distributed.checkpoint or of Hugging Face. Raises as `at_path`."""
    with os_errors.translated(path):
        return not {DCP_METADATA, HF_FILE, HF_INDEX}.isdisjoint(os.listdir(path))


class Foreign:
    """The contents of a file or folder, under the names that they will have in the run. `read` reads the tensors."""

    def __init__(self, read: Read) -> None:
        self.read = read
        self.names: set[str] = set()
        self.tensors: list[Tensor] = []
        self.aliases: dict[str, str] = {}
        self.values: dict[str, Any] = {"rng": {}}
        """the empty "rng" means: no random number generators are stored. Without it a strict load would refuse."""

    def add(self, name: str, dtype: str, shape: tuple[int, ...], same_as: str = "") -> None:
        """Add a tensor, or with `same_as` a further name of the tensor that has that name. Raises Unstorable."""
        _require_text(name)
        if not name or name == layout.METADATA or name in self.names or name in self.values.keys() - {"rng"}:
            why = "cannot be stored" if name in ("", layout.METADATA) else "occurs twice"
            raise Unstorable(f"a tensor of the name {name!r} {why}", safe="Nothing was touched.", todo="Rename it.")
        self.names.add(name)
        if same_as in ("", name):
            self.tensors.append(Tensor(name, dtype, shape))
        else:
            self.aliases[name] = same_as

    def require_free(self, name: str) -> None:
        """Raise Unstorable if a value cannot be added under this name."""
        _require_text(name)
        if name == "rng":
            raise Unstorable(
                "a value has the name 'rng', which a run reserves for its random number generators",
                safe="Nothing was touched.",
                todo="Put all names under another one: `lastgood import --under PREFIX`.",
            )
        if name in self.names or name in self.values:
            raise Unstorable(f"the name {name!r} occurs twice", safe="Nothing was touched.", todo="Rename it.")


def _require_text(name: str) -> None:
    """Raise Unstorable for a name with half of a surrogate pair, which no file of a run can hold."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise Unstorable(
            f"the name {name!r} is no valid Unicode text", safe="Nothing was touched.", todo="Rename it."
        ) from error


def bring(source: Foreign, run: str, step: int, count_bytes: CountBytes, take_over: bool = False) -> Generation:
    """Save the contents as a generation that continues the newest one, and verify it. The run is made if need be.

    `count_bytes` is called for every byte twice: when it is copied for the write, and when it is verified.
    `take_over`: as for `access.for_writing`. Raises
    StepTaken if the lineage of the run has, or has lost, a generation of this step or of a later one; what opening and
    saving raise.
    """
    with (
        access.for_writing(run, "atomic_dirsync", take_over=take_over) as disk,
        ThreadPoolExecutor(WORKERS) as workers,
    ):
        writer = RunWriter(Watched(disk, count_bytes), workers)
        chain, lost = restore.lineage(writer.survey)
        newest = max([*chain, *lost], default=None)
        if newest is not None and newest.step >= step:
            raise StepTaken(
                f"{disk.place} is at step {newest.step} already, so step {step} would hide what it holds",
                safe="Nothing was written.",
                todo=f"Import into another run, or as a later step: --step {newest.step + 1}.",
            )
        parent = writer.newest()
        writer.begin(parent.id if parent else None, order_beside((), [disk]))
        images = layout.images(source.tensors)
        chunk_bytes = min(CHUNK_BYTES, round_up(max(image.length for image in images)))
        arena = Arena(2 * WORKERS * chunk_bytes, chunk_bytes)
        chunks = (lease for image in images for lease in _filled(image, source.read, arena, count_bytes))
        generation = writer.save(
            SaveRequest(
                at=writer.admit(step),
                images=images,
                chunks=ReadyChunks(chunks),
                chunk_bytes=arena.chunk_bytes,
                aliases=source.aliases,
                values=source.values,
            )
        )
        writer.verify(arena)
        return writer.survey.generations[generation.id]


def _filled(image: layout.Image, read: Read, arena: Arena, count_bytes: CountBytes) -> Iterator[Lease]:
    """Chunks of an image, read from the file. The consumer releases each lease."""
    for parts in layout.segments(image, arena.chunk_bytes):
        lease = arena.take()
        assert lease is not None
        try:
            for place, start, at, length in parts:
                if place < 0:
                    lease.buffer[at : at + length] = image.header[start : start + length]
                elif length:
                    read(image.tensors[place][0].name, start, lease.buffer[at : at + length])
                count_bytes(length)
        except BaseException:
            lease.release()
            raise
        yield lease


@contextlib.contextmanager
def opened(path: str, under: str) -> Iterator[Foreign]:
    """A file or folder, open and checked. `under`: a prefix for all names.

    Raises Refused, Unstorable, ManifestInvalid, Truncated, NotWritable, TierDown.
    """
    prefix = under.rstrip(".") + "." if under else ""
    with os_errors.translated(path):
        if os.path.isdir(path) and not os.path.exists(os.path.join(path, DCP_METADATA)):
            from . import hf_folder

            with hf_folder.opened(path, prefix) as source:
                yield source
        elif os.path.isdir(path):
            with needed("torch", "`lastgood import` of a folder of torch.distributed.checkpoint"):
                from . import dcp_folder

            yield dcp_folder.opened(path, prefix)
        elif path.endswith(".safetensors"):
            file = PosixFiles().open(os.path.realpath(path), "read")
            try:
                yield safetensors(file, path, prefix)
            finally:
                file.close()
        else:
            yield _pt(path, prefix)


def safetensors(file: File, path: str, prefix: str) -> Foreign:
    """The contents of a `.safetensors` file. Its header is checked: every byte must belong to exactly one tensor."""

    def need(holds: bool, what: str) -> None:
        if not holds:
            raise ManifestInvalid(f"{path} is no valid .safetensors file: {what}", safe="Nothing was touched.")

    def read(offset: int, mv: memoryview) -> None:
        got = 0
        while got < len(mv):
            with os_errors.translated(path):
                count = file.read_into(mv[got:], offset + got)
            if not count:
                raise Truncated(f"{path} ends at {offset + got:,} bytes", safe="Nothing was committed.")
            got += count

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        need(len(dict(pairs)) == len(pairs), "a name occurs twice in its header")
        return dict(pairs)

    length, head = file.size(), bytearray(8)
    need(length >= 8, f"{length} bytes")
    read(0, memoryview(head))
    count = int.from_bytes(head, "little")
    need(count <= min(length - 8, HEADER_LIMIT_BYTES), f"a header of {count:,} bytes in a file of {length:,}")
    text = bytearray(count)
    read(8, memoryview(text))
    try:
        header = json.loads(bytes(text).decode(), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise ManifestInvalid(f"{path} is no valid .safetensors file: {error}", safe="Nothing was touched.") from error
    need(isinstance(header, dict), "its header is no object")
    header.pop(layout.METADATA, None)
    starts: dict[str, int] = {}
    found = Foreign(lambda name, start, mv: read(8 + count + starts[name] + start, mv))
    spans = []
    for name, entry in header.items():
        need(isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}, f"its entry {name!r}")
        shape, span, dtype = entry["shape"], entry["data_offsets"], entry["dtype"]
        for numbers in (shape, span):
            need(
                isinstance(numbers, list) and all(type(n) is int and 0 <= n < 2**63 for n in numbers),
                f"{name!r}: {numbers}",
            )
        need(isinstance(dtype, str), f"{name!r}: dtype {dtype!r}")
        if dtype not in _DTYPES:
            raise Unstorable(f"{path}: tensor {name!r} has the unknown type {dtype!r}", safe="Nothing was touched.")
        if dtype == _F4:
            need(bool(shape) and shape[-1] % 2 == 0, f"{name!r} of shape {shape} and dtype {_F4}")
            shape = [*shape[:-1], shape[-1] // 2]
        found.add(prefix + name, _DTYPES[dtype], tuple(shape))
        need(len(span) == 2 and span[1] - span[0] == found.tensors[-1].length, f"{name!r} of shape {shape} at {span}")
        starts[prefix + name] = span[0]
        spans.append(span)
    end = 0
    for start, stop in sorted(spans):
        need(start == end, f"a hole or an overlap at byte {end:,}")
        end = stop
    need(8 + count + end == length, f"{length:,} bytes, but {8 + count + end:,} by its header")
    return found


def _loaded_pt(path: str) -> Any:
    """What a file of torch.save holds, without running code. Raises Unstorable, ManifestInvalid."""
    import pickle
    import zipfile

    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise Unstorable(
            f"{path} holds more than tensors and plain values, or is no file of torch.save",
            safe="Nothing in it was run, and nothing was touched.",
            todo="Save a state_dict() instead, and import that.",
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError) as error:
        reason = str(error).partition("\n")[0] or "it is empty"
        raise ManifestInvalid(f"{path} cannot be read: {reason}", safe="Nothing was touched.") from error


def _pt(path: str, prefix: str) -> Foreign:
    """The contents of a file of torch.save. Raises as `_loaded_pt`."""
    with needed("torch", "`lastgood import` of a .pt file"):
        import torch

        from ..state import tensors as live
        from ..state.capture import capture

    loaded = _loaded_pt(path)
    kept: dict[str, torch.Tensor] = {}
    regions: dict[Any, str] = {}

    def has_tensor(value: Any) -> bool:
        if isinstance(value, dict | list | tuple):
            return any(map(has_tensor, value.values() if isinstance(value, dict) else value))
        return isinstance(value, torch.Tensor)

    def walk(value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            live.require_storable(value, name)
            region = live.region(value)
            first = name if region is None else regions.setdefault(region, name)
            kept[name] = value
            found.add(name, live.dtype_name(value.dtype), tuple(value.shape), first)
        elif has_tensor(value):
            for key, part in value.items() if isinstance(value, dict) else enumerate(value):
                walk(part, f"{name}.{key}" if name else f"{prefix}{key}")
        else:
            found.require_free(name)
            (found.values[name],) = capture({name: value}, exclude=["rng"]).values.values()

    newest: dict[str, torch.Tensor] = {}
    """the tensor that was read last, in row-major order: to arrange it anew for each chunk takes long"""

    def read(name: str, start: int, mv: memoryview) -> None:
        if name not in newest:
            newest.clear()
            newest[name] = live.as_bytes(kept[name])
        mv[:] = newest[name][start : start + len(mv)].numpy().data

    found = Foreign(read)
    try:
        if not has_tensor(loaded) or isinstance(loaded, torch.Tensor):
            raise Unstorable(
                f"{path} holds no dict of tensors", safe="Nothing was touched.", todo="Save a state_dict()."
            )
        walk(loaded, "")
    except RecursionError as error:
        raise Unstorable(
            f"{path} is nested too deeply, or holds a container that contains itself", safe="Nothing was touched."
        ) from error
    return found

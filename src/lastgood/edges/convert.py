"""Tensors of a run held against each other, taken out of it, and brought into it. Every byte that is read is verified.

Holds the numbers of `diff`, the writer and the reader of foreign files. torch is imported for `.pt` files only, and a
`.pt` is read with `weights_only=True`: nothing in it runs.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import IO, TYPE_CHECKING, Any, cast

from ..engine import fetch
from ..engine.arena import Arena, Lease
from ..errors import (
    ManifestInvalid,
    NoSpace,
    NoSuchTensor,
    NotWritable,
    Refused,
    StepTaken,
    SumMismatch,
    TierDown,
    Truncated,
    Unstorable,
)
from ..format import commit, layout
from ..format.layout import Tensor
from ..plan import restore
from ..ports import File, Tier
from ..rawio.files import PosixFiles, round_up
from ..records import Extent, Generation, Manifest, Piece
from ..run import places
from ..run.reader import WORKERS
from ..run.writer import RunWriter
from .show import Watched, is_place, leaves_of, natural

if TYPE_CHECKING:
    import numpy as np
    import torch

    Array = np.ndarray[Any, Any]

BLOCK_BYTES = 8 << 20
_NATIVE = {there: ours for ours, (_, there) in layout.DTYPES.items() if there}

Seen = Callable[[int], None]
Read = Callable[[str, int, memoryview], None]

# ---- diff ------------------------------------------------------------------------------------------------------


def compared(tier: Tier, first: Generation, second: Generation) -> dict[str, Any]:
    """Every tensor and every value of two generations. Equal content digests are equal tensors, and are not read."""
    one, two = commit.read_manifest(tier, first), commit.read_manifest(tier, second)
    ours, theirs = _by_name(one), _by_name(two)
    rows = []
    for name in sorted(ours.keys() | theirs.keys(), key=natural):
        if name in one.aliases and one.aliases.get(name) == two.aliases.get(name):
            continue  # told under the name that it is stored under
        a, b = ours.get(name), theirs.get(name)
        row: dict[str, Any] = {"name": name}
        if a is None or b is None:
            row["status"] = "only in the second" if a is None else "only in the first"
        elif (a.dtype, a.shape) != (b.dtype, b.shape):
            row |= {"status": "other type or shape", "first": [a.dtype, a.shape], "second": [b.dtype, b.shape]}
        elif one.digest == two.digest and a.digest == b.digest:
            row["status"] = "same"
        else:
            x = fetch.tensor(tier, layout.folder(first.id), one, a)
            y = fetch.tensor(tier, layout.folder(second.id), two, b)
            found = differences(x, y, a.dtype)
            row |= {"status": "differs" if found["differing"] else "same", "dtype": a.dtype, "shape": a.shape, **found}
        rows.append(row)
    before, after = _leaves(one), _leaves(two)
    changed = [
        {"path": path}
        | ({"first": before[path]} if path in before else {})
        | ({"second": after[path]} if path in after else {})
        for path in dict.fromkeys([*before, *after])
        if path not in before or path not in after or before[path] != after[path]
    ]
    same = not changed and all(row["status"] == "same" for row in rows)
    return {"place": tier.place, "same": same, "tensors": rows, "values": changed}


def _leaves(manifest: Manifest) -> dict[str, Any]:
    return {path: leaf for path, leaf in leaves_of(manifest.values) if not is_place(leaf)}


def _by_name(manifest: Manifest) -> dict[str, Piece]:
    pieces = {piece.name: piece for piece in manifest.pieces}
    return pieces | {alias: pieces[name] for alias, name in manifest.aliases.items()}


def differences(first: bytearray, second: bytearray, dtype: str) -> dict[str, Any]:
    """How two tensors of one type and length differ, as stored bits: elements, and by how much where numpy can tell.

    `max_abs` is max |a - b|, `relative_l2` is |a - b| / |a|; where either is not finite, its name as text.
    """
    import numpy as np

    unit = layout.DTYPES[dtype][0] // 8
    numeric = _decoded(np.zeros(unit, np.uint8), dtype) is not None
    differing, most, squares, norm = 0, 0.0, 0.0, 0.0
    block = BLOCK_BYTES // unit * unit
    with np.errstate(all="ignore"):
        for start in range(0, len(first), block):
            a = np.frombuffer(first, np.uint8)[start : start + block]
            b = np.frombuffer(second, np.uint8)[start : start + block]
            changed = (a != b).reshape(-1, unit).any(axis=1)
            differing += int(changed.sum())
            if not numeric:
                continue
            x, y = _decoded(a, dtype), _decoded(b, dtype)
            assert x is not None and y is not None
            norm += float(np.square(np.abs(x.astype(_wide(x)))).sum())
            gap = _gap(x[changed], y[changed])
            most = max(most, float(gap.max(initial=0.0)), key=lambda v: math.inf if math.isnan(v) else v)
            squares += float(np.square(gap).sum())
    if not numeric:
        return {"elements": len(first) // unit, "differing": differing}
    relative = math.sqrt(squares) / math.sqrt(norm) if norm else math.inf if squares else 0.0
    return {
        "elements": len(first) // unit,
        "differing": differing,
        "max_abs": most if math.isfinite(most) else str(most),
        "relative_l2": relative if math.isfinite(relative) else str(relative),
    }


def _decoded(raw: Array, dtype: str) -> Array | None:
    """uint8 [bytes] as numbers; None where numpy has no such numbers."""
    import numpy as np

    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype == "float8_e5m2":  # the upper half of a float16
        return (raw.astype(np.uint16) << 8).view(np.float16)
    if dtype == "float8_e4m3fn":  # sign, 4 bits of exponent (bias 7), 3 of mantissa; no inf; all ones is nan
        code = np.arange(256)
        exponent, mantissa = code >> 3 & 15, code & 7
        table = np.where(exponent == 0, mantissa / 512, (8 + mantissa) * 2.0 ** (exponent - 10))
        return np.where(code & 127 == 127, np.nan, np.where(code > 127, -table, table))[raw]
    try:
        return raw.view(np.dtype(dtype))
    except TypeError:
        return None


def _wide(x: Array) -> str:
    return "complex128" if x.dtype.kind == "c" else "float64"


def _gap(x: Array, y: Array) -> Array:
    """|x - y| in float64; exact for whole numbers before they become floats."""
    import numpy as np

    if x.dtype.kind in "iu":
        return (np.maximum(x, y).astype(np.uint64) - np.minimum(x, y).astype(np.uint64)).astype(np.float64)
    return np.asarray(np.abs(x.astype(_wide(x)) - y.astype(_wide(y))))


# ---- export ----------------------------------------------------------------------------------------------------


def export(tier: Tier, generation: Generation, to: str, only: str | None, force: bool) -> dict[str, Any]:
    """Write tensors to a new `.safetensors` or `.pt`. The target appears whole, durable and verified, or not at all.

    Memory: 8 MiB, whatever the size of a tensor; for `.pt` all that is written. Raises Refused, NoSuchTensor, Damaged.
    """
    manifest = commit.read_manifest(tier, generation)
    chosen = _chosen(manifest, only)
    target = os.path.abspath(to)
    _require_free(target, force)
    staged = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.{os.urandom(4).hex()}.tmp")
    files, home = PosixFiles(), layout.folder(generation.id)
    with _telling(target):
        file = files.open(staged, "new")
        try:
            try:
                sink = _Sink(file)
                if target.endswith(".safetensors"):
                    _write_safetensors(tier, home, manifest, chosen, sink)
                else:
                    _write_pt(tier, home, manifest, chosen, sink)
                file.sync()
            finally:
                file.close()
            _require_free(target, force)
            files.rename(staged, target)
        except BaseException:
            files.remove(staged)
            raise
        files.sync_dir(os.path.dirname(target))
    foreign = {name: piece.dtype for name, piece in chosen.items() if not layout.DTYPES[piece.dtype][1]}
    return {
        "file": target,
        "step": generation.step,
        "incarnation": generation.id.incarnation,
        "tensors": len(chosen),
        "bytes": sink.length,
        "as_bytes": foreign if target.endswith(".safetensors") else {},
    }


def _chosen(manifest: Manifest, only: str | None) -> dict[str, Piece]:
    """Name in the file -> piece."""
    everything = _by_name(manifest)
    if only is None:
        chosen = everything
    else:
        prefix = only.rstrip(".") + "."
        chosen = {name.removeprefix(prefix): piece for name, piece in everything.items() if name.startswith(prefix)}
    if not chosen:
        tops = ", ".join(sorted({name.partition(".")[0] for name in everything})) or "none"
        what = f"step {manifest.step} has no tensor under {only!r}" if only else f"step {manifest.step} has no tensor"
        raise NoSuchTensor(what, safe="Nothing was written.", todo=f"Its tensors are under: {tops}.")
    return chosen


def _require_free(target: str, force: bool) -> None:
    if os.path.isdir(target) or (os.path.lexists(target) and not force):
        todo = "Give the name of a file." if os.path.isdir(target) else "Give another name, or --force to replace it."
        raise Refused(f"{target} exists already", safe="It is untouched.", todo=todo)


def _write_safetensors(tier: Tier, home: str, manifest: Manifest, chosen: Mapping[str, Piece], sink: _Sink) -> None:
    images = layout.images(Tensor(name, one.dtype, tuple(one.shape)) for name, one in chosen.items())
    if len(images) > 1 or "__metadata__" in chosen:
        raise Refused("these names do not fit the header of one .safetensors file", todo="Take fewer with --only.")
    sink.reserve(images[0].length)
    sink.write(images[0].header)
    buffer = memoryview(bytearray(BLOCK_BYTES))
    for one, _ in images[0].tensors:
        piece = chosen[one.name]
        hasher = layout.content_hasher(manifest.digest, piece.dtype, piece.shape)
        for start in range(0, one.length, BLOCK_BYTES):
            part = buffer[: min(BLOCK_BYTES, one.length - start)]
            at = Extent(blob=f"{home}/{piece.extent.blob}", offset=piece.extent.offset + start, length=len(part))
            tier.read_into(at, part)
            hasher.update(part)
            sink.write(part)
        if hasher.hexdigest() != piece.digest:
            raise SumMismatch(
                f"{home}/{piece.extent.blob}: tensor {piece.name} differs from its digest",
                blob=piece.extent.blob,
                offset=piece.extent.offset,
                tensor=piece.name,
                safe="Nothing was written.",
                todo=f"`lastgood verify RUN {manifest.step}` says what is damaged; export another step.",
            )


def _write_pt(tier: Tier, home: str, manifest: Manifest, chosen: Mapping[str, Piece], sink: _Sink) -> None:
    import torch

    from ..train.tensors import from_bytes

    stored: dict[str, torch.Tensor] = {}  # by the name in the run, so that tied tensors stay one
    for piece in chosen.values():
        if piece.name not in stored:
            data = fetch.tensor(tier, home, manifest, piece)
            raw = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            stored[piece.name] = from_bytes(raw, piece.dtype, piece.shape)
    try:
        torch.save({name: stored[piece.name] for name, piece in chosen.items()}, cast(IO[bytes], sink))
    except RuntimeError:
        if sink.failed is not None:  # torch closes its archive all the same, and raises that it cannot
            raise sink.failed from None
        raise


class _Sink:
    """A file that is written from its start; what torch.save needs of one."""

    def __init__(self, file: File) -> None:
        self._file, self.length = file, 0
        self.failed: OSError | None = None

    def reserve(self, length: int) -> None:
        self._file.reserve(length)

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        done = 0
        try:
            while done < len(view):
                done += self._file.write_at(view[done:], self.length + done)
        except OSError as error:
            self.failed = error
            raise
        self.length += done
        return done

    def flush(self) -> None:
        """Nothing waits here."""


# ---- import ----------------------------------------------------------------------------------------------------


class Foreign:
    """What a file holds, under the names that it will have. `read` fills a buffer with bytes of a tensor."""

    def __init__(self, read: Read) -> None:
        self.read = read
        self.names: set[str] = set()
        self.tensors: list[Tensor] = []
        self.aliases: dict[str, str] = {}
        self.values: dict[str, Any] = {"rng": {}}
        """it keeps no state of any generator, and says so: a strict load would miss it"""

    def add(self, name: str, dtype: str, shape: tuple[int, ...], same_as: str = "") -> None:
        """`same_as`: the name of the tensor that this one is a further name of."""
        if not name or name == "__metadata__" or name in self.names:
            why = "stands twice" if name in self.names else "cannot be stored"
            raise Unstorable(f"a tensor of the name {name!r} {why}", safe="Nothing was touched.")
        self.names.add(name)
        if same_as in ("", name):
            self.tensors.append(Tensor(name, dtype, shape))
        else:
            self.aliases[name] = same_as


def bring(source: Foreign, run: str, step: int, seen: Seen) -> Generation:
    """Make a generation of it, durable and verified; it continues the newest one. `seen` hears of every byte twice.

    Raises StepTaken where the run is at that step already, and what opening and saving raise.
    """
    with places.for_writing(run, "atomic_dirsync") as disk, ThreadPoolExecutor(WORKERS) as workers:
        writer = RunWriter(Watched(disk, seen), workers)
        chain, lost = restore.lineage(writer.survey)
        newest = max([*chain, *lost], default=None)
        if newest is not None and newest.step >= step:
            raise StepTaken(
                f"{disk.place} is at step {newest.step} already, so step {step} would hide what it holds",
                safe="Nothing was written.",
                todo=f"Import into another run, or as a later step: --step {newest.step + 1}.",
            )
        parent = next(iter(writer.lineage()), None)
        writer.begin(parent.id if parent else None)
        images = layout.images(source.tensors)
        chunk_bytes = min(layout.CHUNK_BYTES, round_up(max(image.length for image in images)))
        arena = Arena(2 * WORKERS * chunk_bytes, chunk_bytes)
        chunks = (lease for image in images for lease in _filled(image, source.read, arena, seen))
        generation = writer.save(
            step, images, chunks, chunk_bytes=arena.chunk_bytes, aliases=source.aliases, values=source.values
        )
        writer.verify(arena)
        return writer.survey.generations[generation.id]


def _filled(image: layout.Image, read: Read, arena: Arena, seen: Seen) -> Iterator[Lease]:
    for parts in layout.segments(image, arena.chunk_bytes):
        lease = arena.take()
        assert lease is not None
        try:
            for place, start, at, length in parts:
                if place < 0:
                    lease.buffer[at : at + length] = image.header[start : start + length]
                elif length:
                    read(image.tensors[place][0].name, start, lease.buffer[at : at + length])
                seen(length)
        except BaseException:
            lease.release()
            raise
        yield lease


@contextlib.contextmanager
def opened(path: str, under: str) -> Iterator[Foreign]:
    """A `.safetensors` or `.pt` file, checked. Raises Refused, Unstorable, ManifestInvalid, Truncated."""
    prefix = under.rstrip(".") + "." if under else ""
    with _telling(path):
        if path.endswith(".safetensors"):
            file = PosixFiles().open(os.path.realpath(path), "read")
            try:
                yield _safetensors(file, path, prefix)
            finally:
                file.close()
        else:
            yield _pt(path, prefix)


def _safetensors(file: File, path: str, prefix: str) -> Foreign:
    def need(holds: bool, what: str) -> None:
        if not holds:
            raise ManifestInvalid(f"{path} is no valid .safetensors file: {what}", safe="Nothing was touched.")

    def read(offset: int, mv: memoryview) -> None:
        got = 0
        while got < len(mv):
            count = file.read_into(mv[got:], offset + got)
            if not count:
                raise Truncated(f"{path} ends at {offset + got:,} bytes", safe="Nothing was committed.")
            got += count

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        need(len(dict(pairs)) == len(pairs), "a name stands twice in its header")
        return dict(pairs)

    length, head = file.size(), bytearray(8)
    need(length >= 8, f"{length} bytes")
    read(0, memoryview(head))
    count = int.from_bytes(head, "little")
    need(count <= min(length - 8, layout.HEADER_LIMIT_BYTES), f"a header of {count:,} bytes in a file of {length:,}")
    text = bytearray(count)
    read(8, memoryview(text))
    try:
        header = json.loads(bytes(text).decode(), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise ManifestInvalid(f"{path} is no valid .safetensors file: {error}", safe="Nothing was touched.") from error
    need(isinstance(header, dict), "its header is no object")
    header.pop("__metadata__", None)
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
        if dtype not in _NATIVE:
            raise Unstorable(
                f"{path}: tensor {name} has type {dtype!r}, which is not known here", safe="Nothing was touched."
            )
        found.add(prefix + name, _NATIVE[dtype], tuple(shape))
        need(len(span) == 2 and span[1] - span[0] == found.tensors[-1].length, f"{name!r} of shape {shape} at {span}")
        starts[prefix + name] = span[0]
        spans.append(span)
    end = 0
    for start, stop in sorted(spans):
        need(start == end, f"a hole or an overlap at byte {end:,}")
        end = stop
    need(8 + count + end == length, f"{length:,} bytes, its header speaks of {8 + count + end:,}")
    return found


def _pt(path: str, prefix: str) -> Foreign:
    import pickle
    import zipfile

    import torch

    from ..train import tensors as live
    from ..train.capture import capture

    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise Unstorable(
            f"{path} holds more than tensors and plain values, or is no file of torch.save",
            safe="Nothing in it was run, and nothing was touched.",
            todo="Save a state_dict() instead, and import that.",
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError) as error:
        told = str(error).partition("\n")[0]
        raise ManifestInvalid(f"{path} cannot be read: {told}", safe="Nothing was touched.") from error
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
            (found.values[name],) = capture({name: value}, exclude=["rng"]).values.values()

    def read(name: str, start: int, mv: memoryview) -> None:
        mv[:] = live.as_bytes(kept[name])[start : start + len(mv)].numpy().data

    found = Foreign(read)
    if not has_tensor(loaded) or isinstance(loaded, torch.Tensor):
        raise Unstorable(f"{path} holds no dict of tensors", safe="Nothing was touched.")
    walk(loaded, "")
    return found


@contextlib.contextmanager
def _telling(path: str) -> Iterator[None]:
    """Turn an OSError into the tree's word for it."""
    try:
        yield
    except OSError as error:
        what = f"{path}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise NoSpace(what, safe="Nothing was written.", todo="Free space, or give another place.") from error
        if error.errno in (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EINVAL):
            raise Refused(what, safe="Nothing was touched.", todo="Check the path.") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise NotWritable(what, safe="Nothing was touched.", todo="Check the owner and the rights.") from error
        raise TierDown(what, safe="Nothing was written.") from error

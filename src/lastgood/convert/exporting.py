"""Tensors of a generation, written to one file or one folder, every byte verified on its way. Changes no run.

A name that ends in `.safetensors` or `.pt` is a file; in `.dcp` a folder of torch.distributed.checkpoint; in `/` a
folder in the layout of Hugging Face, shards of `.safetensors` and their index. torch is imported for `.pt` and `.dcp`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import IO, Any, cast

from ..errors import NoSpace, NoSuchTensor, NotWritable, Refused, SumMismatch, TierDown
from ..extras import needed
from ..format import layout
from ..format.layout import Tensor
from ..io.files import PosixFiles
from ..ports import File, Tier
from ..records import Generation
from ..run.content import Content

SHARD_BYTES = 5_000_000_000
"""of a file in a folder of Hugging Face"""
HF_FILE, HF_INDEX = "model.safetensors", "model.safetensors.index.json"


def export(
    tier: Tier, generation: Generation, to: str, only: str | None, force: bool, shard_bytes: int = SHARD_BYTES
) -> dict[str, Any]:
    """Write tensors to a new file or folder. The target appears whole, durable and verified, or not at all.

    Memory: 8 MiB, whatever the size of a tensor; for `.pt` and `.dcp` all that is written. Raises Refused,
    NoSuchTensor, Damaged.
    """
    content = Content(tier, generation)
    chosen = _chosen(content, only)
    target = os.path.abspath(to)
    folder = to.endswith(("/", ".dcp"))
    _require_free(target, force, folder)
    staged = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.{os.urandom(4).hex()}.tmp")
    with telling(target):
        try:
            if to.endswith("/"):
                os.mkdir(staged)
                length = _write_shards(content, chosen, staged, shard_bytes)
            elif to.endswith(".dcp"):
                with needed("torch", "`lastgood export` to .dcp"):
                    from . import dcp_folder

                os.mkdir(staged)
                length = dcp_folder.write(content, chosen, staged, whole=only is None)
            else:
                write = _write_safetensors if target.endswith(".safetensors") else _write_pt
                length = _file(staged, lambda sink: write(content, chosen, sink))
            if folder:
                PosixFiles().sync_dir(staged)
            _require_free(target, force, folder)
            PosixFiles().rename(staged, target)
        except BaseException:
            if os.path.isdir(staged):
                shutil.rmtree(staged)
            elif os.path.lexists(staged):
                PosixFiles().remove(staged)
            raise
        PosixFiles().sync_dir(os.path.dirname(target))
    dtypes = {name: content.tensors()[stored].dtype for name, stored in chosen.items()}
    foreign = {name: dtype for name, dtype in dtypes.items() if not layout.DTYPES[dtype][1]}
    return {
        "file": target,
        "step": generation.id.step,
        "incarnation": generation.id.incarnation,
        "tensors": len(chosen),
        "bytes": length,
        "as_bytes": foreign if to.endswith((".safetensors", "/")) else {},
    }


def _file(path: str, write: Callable[[_Sink], object]) -> int:
    """A new file, durable when this returns; how long it is."""
    file = PosixFiles().open(path, "new")
    try:
        sink = _Sink(file)
        write(sink)
        file.sync()
    finally:
        file.close()
    return sink.length


def _write_shards(content: Content, chosen: Mapping[str, str], folder: str, shard_bytes: int) -> int:
    """As many files as there must be, and where there is more than one an index of which tensor lies in which."""
    shards: list[dict[str, str]] = [{}]
    held = total = 0
    for name, stored in chosen.items():
        one = content.tensors()[stored]
        length = Tensor(name, one.dtype, one.shape).length
        if shards[-1] and held + length > shard_bytes:
            shards.append({})
            held = 0
        shards[-1][name] = stored
        held, total = held + length, total + length
    if len(shards) == 1:
        return _file(os.path.join(folder, HF_FILE), lambda sink: _write_safetensors(content, chosen, sink))
    length, where = 0, dict[str, str]()
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        length += _file(os.path.join(folder, file), partial(_write_safetensors, content, shard))
        where |= dict.fromkeys(shard, file)
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}, indent=2)
    return length + _file(os.path.join(folder, HF_INDEX), lambda sink: sink.write(index.encode()))


def _chosen(content: Content, only: str | None) -> dict[str, str]:
    """Name in the file -> name under which the tensor is stored."""
    everything = {name: content.aliases.get(name, name) for name in content.names()}
    if only is None:
        chosen = everything
    else:
        prefix = only.rstrip(".") + "."
        chosen = {name.removeprefix(prefix): stored for name, stored in everything.items() if name.startswith(prefix)}
    if not chosen:
        tops = ", ".join(sorted({name.partition(".")[0] for name in everything})) or "none"
        step = content.generation.step
        what = f"step {step} has no tensor under {only!r}" if only else f"step {step} has no tensor"
        raise NoSuchTensor(what, safe="Nothing was written.", todo=f"Its tensors are under: {tops}.")
    return chosen


def _require_free(target: str, force: bool, folder: bool) -> None:
    """No folder is replaced, nor by one."""
    there = os.path.isdir(target)
    if there or (os.path.lexists(target) and (folder or not force)):
        name = "Give another name" if folder else "Give the name of a file"
        todo = f"{name}." if there or folder else "Give another name, or --force to replace it."
        raise Refused(f"{target} exists already", safe="It is untouched.", todo=todo)


def _write_safetensors(content: Content, chosen: Mapping[str, str], sink: _Sink) -> None:
    tensors = {name: content.tensors()[stored] for name, stored in chosen.items()}
    images = layout.images(Tensor(name, one.dtype, one.shape) for name, one in tensors.items())
    if len(images) > 1 or layout.METADATA in chosen:
        raise Refused("these names do not fit the header of one .safetensors file", todo="Take fewer with --only.")
    sink.reserve(images[0].length)
    sink.write(images[0].header)
    for one, _ in images[0].tensors:
        try:
            for part in content.parts(chosen[one.name], layout.CHUNK_BYTES):
                sink.write(part)
        except SumMismatch as error:
            raise SumMismatch(
                error.what,
                blob=error.blob,
                offset=error.offset,
                tensor=error.tensor,
                safe="Nothing was written.",
                todo=f"`lastgood verify RUN {content.generation.step}` says what is damaged; export another step.",
            ) from error


def _write_pt(content: Content, chosen: Mapping[str, str], sink: _Sink) -> None:
    with needed("torch", "`lastgood export` to .pt"):
        import torch

        from ..state.tensors import from_buffer

    stored: dict[str, torch.Tensor] = {}  # by the name in the run, so that tied tensors stay one
    for name in chosen.values():
        if name not in stored:
            tensor, data = content.tensor(name)
            stored[name] = from_buffer(data, tensor.dtype, tensor.shape)
    try:
        torch.save({name: stored[of] for name, of in chosen.items()}, cast(IO[bytes], sink))
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


@contextlib.contextmanager
def telling(path: str) -> Iterator[None]:
    """Turn an OSError into the tree's word for it."""
    try:
        yield
    except OSError as error:
        what = f"{path}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise NoSpace(what, safe="There is no half file.", todo="Free space, or give another place.") from error
        if error.errno in (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EINVAL):
            raise Refused(what, safe="Nothing was touched.", todo="Check the path.") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise NotWritable(what, safe="Nothing was touched.", todo="Check the owner and the rights.") from error
        raise TierDown(what, safe="There is no half file.") from error

"""Writes the tensors of a generation to a file or folder of another format. Every byte is verified; no run is changed.

The name of the target decides: `.safetensors` and `.pt` (`.pth`) are files, `.dcp` is a folder of
torch.distributed.checkpoint, and a name that ends in `/` is a folder of Hugging Face (shards of `.safetensors` and an
index). torch is imported for `.pt` and `.dcp` only.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from typing import IO, Any, cast

from ..errors import NoSuchTensor, Refused
from ..extras import needed
from ..format import layout
from ..format.layout import Tensor
from ..io import os_errors
from ..io.files import PosixFiles
from ..limits import CHUNK_BYTES
from ..ports import File, Tier
from ..records import Generation
from ..run.content import Content
from ..units import shortened

SHARD_BYTES = 5_000_000_000
"""of tensors, in one file of a folder of Hugging Face"""
HF_FILE, HF_INDEX = "model.safetensors", "model.safetensors.index.json"


def export(
    tier: Tier, generation: Generation, to: str, only: str | None, force: bool, shard_bytes: int = SHARD_BYTES
) -> dict[str, Any]:
    """Write tensors to a new file or folder, which appears complete and verified or not at all. Durable on return.

    `to`: path of the target. `only`: write the tensors below this name, and remove it from theirs, or, where there is
    none, the tensor of this name, under the last part of it; None: all tensors.
    `force`: replace an existing file. `shard_bytes` (default 5 GB): tensor bytes in a file of a Hugging Face folder; a
    longer tensor has a file of its own.
    Needs 8 MiB of memory for tensors of any size; for `.pt` and `.dcp` as much as is written. Returns what was written,
    as `--json` shows it. Raises Refused, NoSuchTensor, Damaged, NoSpace, NotWritable, TierDown.
    """
    content = Content(tier, generation)
    chosen = _chosen(content, only)
    target = os.path.abspath(to)
    if target.endswith(".dcp"):
        to = target  # with a slash, as the completion of a shell adds it, too
    folder = to.endswith(("/", ".dcp"))
    _require_absent(target, force, folder)
    staged = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.{os.urandom(4).hex()}.tmp")
    with os_errors.translated(target):
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
            _require_absent(target, force, folder)
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
    """Write a new file and sync it. Returns its length."""
    file = PosixFiles().open(path, "new")
    try:
        sink = _Sink(file)
        write(sink)
        file.sync()
    finally:
        file.close()
    return sink.length


def _write_shards(content: Content, chosen: Mapping[str, str], folder: str, shard_bytes: int) -> int:
    """Write the tensors in order, a new file after `shard_bytes`, and an index of several files. Returns all bytes."""
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
    """Name in the target -> name under which the tensor is stored in the run. Raises NoSuchTensor."""
    everything = {name: content.aliases.get(name, name) for name in content.names()}
    if only is None:
        chosen = everything
    else:
        prefix = only.rstrip(".") + "."
        chosen = {name.removeprefix(prefix): stored for name, stored in everything.items() if name.startswith(prefix)}
        if not chosen and only in everything:
            chosen = {only.rpartition(".")[2] or only: everything[only]}
    if not chosen:
        tops = sorted({name.partition(".")[0] for name in everything})
        shown = shortened(tops, 10)
        step = content.generation.step
        what = f"step {step} has no tensor under {only!r}" if only else f"step {step} has no tensor"
        raise NoSuchTensor(what, safe="Nothing was written.", todo=f"Its tensors are under: {shown or 'none'}.")
    return chosen


def _require_absent(target: str, force: bool, folder: bool) -> None:
    """Raise Refused if the target exists. With `force` a file may replace a file; no folder is replaced."""
    is_folder = os.path.isdir(target)
    if is_folder or (os.path.lexists(target) and (folder or not force)):
        name = "Give another name" if folder else "Give the name of a file"
        todo = f"{name}." if is_folder or folder else "Give another name, or --force to replace it."
        raise Refused(f"{target} exists already", safe="It is untouched.", todo=todo)


def _write_safetensors(content: Content, chosen: Mapping[str, str], sink: _Sink) -> None:
    tensors = {name: content.tensors()[stored] for name, stored in chosen.items()}
    images = layout.images(Tensor(name, one.dtype, one.shape) for name, one in tensors.items())
    if len(images) > 1 or layout.METADATA in chosen:
        raise Refused(
            "these names do not fit the header of one .safetensors file",
            safe="Nothing was written.",
            todo="Take fewer with --only.",
        )
    sink.reserve(images[0].length)
    sink.write(images[0].header)
    for one, _ in images[0].tensors:
        for part in content.parts(chosen[one.name], CHUNK_BYTES):
            sink.write(part)


def _write_pt(content: Content, chosen: Mapping[str, str], sink: _Sink) -> None:
    with needed("torch", "`lastgood export` to .pt"):
        import torch

        from ..state.tensors import from_buffer

    stored: dict[str, torch.Tensor] = {}  # keyed by the name in the run, so that tied tensors stay tied
    for name in chosen.values():
        if name not in stored:
            tensor, data = content.tensor(name)
            stored[name] = from_buffer(data, tensor.dtype, tensor.shape)
    try:
        torch.save({name: stored[of] for name, of in chosen.items()}, cast(IO[bytes], sink))
    except RuntimeError:
        if sink.failed is not None:  # torch then fails to close its archive, and raises only that
            raise sink.failed from None
        raise


class _Sink:
    """A file object that appends to a new file, with the methods that torch.save calls."""

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
        """Does nothing: nothing is buffered."""

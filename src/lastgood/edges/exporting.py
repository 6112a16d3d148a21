"""Tensors of a generation, written to one `.safetensors` or `.pt`, every byte verified on its way. Changes no run.

torch is imported for a `.pt` only.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from typing import IO, Any, cast

from ..errors import NoSpace, NoSuchTensor, NotWritable, Refused, SumMismatch, TierDown
from ..format import layout
from ..format.layout import Tensor
from ..ports import File, Tier
from ..rawio.files import PosixFiles
from ..records import Generation
from ..run.content import Content
from .show import named


def export(tier: Tier, generation: Generation, to: str, only: str | None, force: bool) -> dict[str, Any]:
    """Write tensors to a new `.safetensors` or `.pt`. The target appears whole, durable and verified, or not at all.

    Memory: 8 MiB, whatever the size of a tensor; for `.pt` all that is written. Raises Refused, NoSuchTensor, Damaged.
    """
    content = Content(tier, generation)
    chosen = _chosen(content, only)
    target = os.path.abspath(to)
    _require_free(target, force)
    staged = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.{os.urandom(4).hex()}.tmp")
    files = PosixFiles()
    with telling(target):
        file = files.open(staged, "new")
        try:
            try:
                sink = _Sink(file)
                if target.endswith(".safetensors"):
                    _write_safetensors(content, chosen, sink)
                else:
                    _write_pt(content, chosen, sink)
                file.sync()
            finally:
                file.close()
            _require_free(target, force)
            files.rename(staged, target)
        except BaseException:
            files.remove(staged)
            raise
        files.sync_dir(os.path.dirname(target))
    dtypes = {name: content.tensors()[stored].dtype for name, stored in chosen.items()}
    foreign = {name: dtype for name, dtype in dtypes.items() if not layout.DTYPES[dtype][1]}
    return {
        "file": target,
        **named(generation.id),
        "tensors": len(chosen),
        "bytes": sink.length,
        "as_bytes": foreign if target.endswith(".safetensors") else {},
    }


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


def _require_free(target: str, force: bool) -> None:
    if os.path.isdir(target) or (os.path.lexists(target) and not force):
        todo = "Give the name of a file." if os.path.isdir(target) else "Give another name, or --force to replace it."
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
    import torch

    from ..train.tensors import from_buffer

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

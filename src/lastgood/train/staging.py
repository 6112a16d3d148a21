"""Staging: live tensors -> the image of their files, in arena chunks. Copies; writes no file, decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from ..engine.arena import Arena, Lease
from ..errors import Cancelled
from ..format.layout import Image, Tensor, images, segments
from .tensors import as_bytes, dtype_name


def lay_out(tensors: Mapping[str, torch.Tensor]) -> list[Image]:
    """The files that these tensors make."""
    return images(Tensor(name, dtype_name(one.dtype), tuple(one.shape)) for name, one in tensors.items())


def filled(
    layout: Sequence[Image],
    tensors: Mapping[str, torch.Tensor],
    arena: Arena,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Lease]:
    """Copy everything, chunk by chunk; each filled chunk is the taker's, who releases it.

    Waits for free chunks where the arena is smaller than the state. Raises Cancelled when `stop()`.
    """
    for image in layout:
        source: torch.Tensor | None = None
        for parts in segments(image, arena.chunk_bytes):
            lease = arena.take(stop)
            if lease is None:
                raise Cancelled("the copy of the state was given up", safe="Nothing was committed.")
            try:
                chunk = torch.frombuffer(lease.buffer, dtype=torch.uint8)
                for place, start, at, length in parts:
                    if place < 0:
                        lease.buffer[at : at + length] = image.header[start : start + length]
                        continue
                    if start == 0:
                        source = as_bytes(tensors[image.tensors[place][0].name])
                    assert source is not None
                    chunk[at : at + length].copy_(source[start : start + length])
            except BaseException:
                lease.release()
                raise
            yield lease

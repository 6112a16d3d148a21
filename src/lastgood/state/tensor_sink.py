"""TensorSink: writes the bytes of stored tensors into live tensors, part by part as they are read. Decides nothing.

A part is written directly into a tensor whose memory is one run of bytes, on any device. For any other destination
(a strided or expanded tensor, a numpy array) the parts are gathered first, and the whole tensor is handed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from ..engine.scatter import Target
from ..format.boxes import Box, everything
from ..format.layout import Tensor
from .tensors import as_bytes, from_bytes

Take = Callable[[torch.Tensor], None]
"""Receives a whole stored tensor, on the CPU; its memory is reused as soon as the call returns."""


class Place:
    """A live tensor whose memory is one run of bytes; several threads write parts of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.device = tensor.device
        self._tensor = tensor
        self._bytes = as_bytes(tensor)
        self.window = self._bytes.numpy() if tensor.device.type == "cpu" else None
        """its memory, uint8 [bytes], where the host can write it; else None"""

    @staticmethod
    def of(tensor: torch.Tensor) -> Place | None:
        """The place of a tensor; None where its memory is not one run of its bytes."""
        plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        return Place(tensor) if plain else None

    def put(self, start: int, data: memoryview) -> None:
        """Write bytes at offset `start`."""
        if self.window is not None:  # numpy copies without the GIL, and without torch's threads beside it
            np.copyto(self.window[start : start + len(data)], np.frombuffer(data, np.uint8))
        else:
            with torch.inference_mode(self._tensor.is_inference()):
                self._bytes[start : start + len(data)].copy_(torch.frombuffer(data, dtype=torch.uint8))

    def done(self) -> None:
        """Let autograd know that the tensor has changed."""
        if self.window is not None and not self._tensor.is_inference():
            torch.autograd.graph.increment_version(self._tensor)  # as any write through torch does


class TensorSink:
    """Where a generation's tensors go: `engine.read_file.Sink` and `engine.scatter.Targets`.

    `stored`: name -> dtype and shape of every stored tensor. `places`, `takers`: name -> where that tensor goes.
    `boxed`: name -> stored tensor and box, for a box that is wanted as if it were a tensor of its own.
    """

    def __init__(
        self,
        stored: Mapping[str, tuple[str, tuple[int, ...]]],
        places: Mapping[str, Sequence[Place]],
        takers: Mapping[str, Sequence[Take]],
        boxed: Mapping[str, tuple[str, Box]],
    ) -> None:
        self._stored, self._places, self._takers, self.boxed = stored, places, takers, boxed
        self._gathered: dict[str, np.ndarray] = {}
        self.begun = False
        """whether anything was written"""
        self.in_place = True
        """whether parts may be read where they are to be; False where live tensors may share memory"""

    def begin(self) -> None:
        """Wait until the devices are idle: parts are written by other threads, and so on other CUDA streams."""
        devices = {place.device for places in self._places.values() for place in places}
        for device in devices - {torch.device("cpu")}:
            torch.cuda.synchronize(device)

    def targets(self) -> Iterator[tuple[str, Target]]:
        """The stored name of each wanted tensor, and which box of it is wanted."""
        for name in self._places.keys() | self._takers.keys():
            stored, box = self.boxed.get(name) or (name, everything(self._stored[name][1]))
            yield stored, Target(name, self._stored[stored][0], box)

    @property
    def bytes(self) -> int:
        """The bytes of all wanted boxes."""
        return sum(Tensor(one.name, one.dtype, one.box.shape).length for _, one in self.targets())

    def windows(self, name: str) -> list[np.ndarray] | None:
        """The memory of all places of this name; None if something else takes it too. The caller writes there."""
        places = [place.window for place in self._places.get(name, ())]
        found = [one for one in places if one is not None]
        if name in self._takers or len(found) < len(places):
            return None
        self.begun = True
        return found

    def window(self, name: str, start: int, length: int) -> memoryview | None:
        """As `engine.read_file.Sink.window`: the memory of the only place of this name."""
        if not self.in_place or len(self._places.get(name, ())) != 1:
            return None
        found = self.windows(name)
        return found[0].data[start : start + length] if found else None

    def put(self, name: str, start: int, data: memoryview) -> None:
        """Write a part to every place of this name, and keep it where the whole tensor is wanted."""
        for place in self._places.get(name, ()):
            self.begun = True
            place.put(start, data)
        if name in self._takers:
            whole = self._gathered.get(name)
            if whole is None:  # of two threads that get here at once, both use the memory of the first
                whole = self._gathered.setdefault(name, np.empty(self._length(name), np.uint8))
            np.copyto(whole[start : start + len(data)], np.frombuffer(data, np.uint8))

    def done(self, name: str) -> None:
        """Finish the tensor of this name, all of which was put."""
        for place in self._places.get(name, ()):
            place.done()
        if name in self._takers:
            self.begun = True
            whole = self._gathered.pop(name, None)
            source = torch.from_numpy(np.empty(0, np.uint8) if whole is None else whole)
            for take in self._takers[name]:
                take(from_bytes(source, *self._kind(name)))

    def _kind(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape of the tensor or box of this name."""
        if name not in self.boxed:
            return self._stored[name]
        stored, box = self.boxed[name]
        return self._stored[stored][0], box.shape

    def _length(self, name: str) -> int:
        return Tensor(name, *self._kind(name)).length

"""Filling: the bytes of stored tensors, part by part as they are read -> the live tensors. Decides nothing.

A part goes straight to where a tensor is one run of bytes, on any device. For a tensor that is not (strided, expanded,
a numpy array) it is gathered, and taken when it is whole.
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
"""what is done with a whole stored tensor: on the CPU, and another one's the moment it returns"""


class Place:
    """A tensor whose memory is one run of bytes, to be written in parts, from several threads."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.device = tensor.device
        self._tensor = tensor
        self._bytes = as_bytes(tensor)
        self.window = self._bytes.numpy() if tensor.device.type == "cpu" else None
        """its memory, uint8 [bytes], where the host can write it"""

    @staticmethod
    def of(tensor: torch.Tensor) -> Place | None:
        """None where its memory is no single run of its bytes."""
        plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        return Place(tensor) if plain else None

    def put(self, start: int, data: memoryview) -> None:
        if self.window is not None:  # numpy copies without the GIL, and without torch's threads beside it
            np.copyto(self.window[start : start + len(data)], np.frombuffer(data, np.uint8))
        else:
            with torch.inference_mode(self._tensor.is_inference()):
                self._bytes[start : start + len(data)].copy_(torch.frombuffer(data, dtype=torch.uint8))

    def done(self) -> None:
        if self.window is not None and not self._tensor.is_inference():
            torch.autograd.graph.increment_version(self._tensor)  # as any write through torch does


class Filling:
    """`engine.fetch.Sink` and `engine.scatter.Targets` into tensors: `places` and `takers` by stored name.

    `stored`: its dtype and shape. `boxed`: names of boxes of tensors that are wanted like tensors of their own.
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
        """whether anything was written or taken"""

    def begin(self) -> None:
        """Wait for what the devices still do: parts are written by other threads, which are on other streams."""
        devices = {place.device for places in self._places.values() for place in places}
        for device in devices - {torch.device("cpu")}:
            torch.cuda.synchronize(device)

    def targets(self) -> Iterator[tuple[str, Target]]:
        """What is wanted: the stored name of a tensor, and which box of it."""
        for name in self._places.keys() | self._takers.keys():
            stored, box = self.boxed.get(name) or (name, everything(self._stored[name][1]))
            yield stored, Target(name, self._stored[stored][0], box)

    @property
    def bytes(self) -> int:
        """Of all targets."""
        return sum(Tensor(one.name, one.dtype, one.box.shape).length for _, one in self.targets())

    def windows(self, name: str) -> list[np.ndarray] | None:
        places = [place.window for place in self._places.get(name, ())]
        found = [one for one in places if one is not None]
        if name in self._takers or len(found) < len(places):
            return None
        self.begun = True
        return found

    def put(self, name: str, start: int, data: memoryview) -> None:
        for place in self._places.get(name, ()):
            self.begun = True
            place.put(start, data)
        if name in self._takers:
            whole = self._gathered.get(name)
            if whole is None:  # of two threads that come here at once, the first one's memory is kept
                whole = self._gathered.setdefault(name, np.empty(self._length(name), np.uint8))
            np.copyto(whole[start : start + len(data)], np.frombuffer(data, np.uint8))

    def done(self, name: str) -> None:
        for place in self._places.get(name, ()):
            place.done()
        if name in self._takers:
            self.begun = True
            whole = self._gathered.pop(name, None)
            source = torch.from_numpy(np.empty(0, np.uint8) if whole is None else whole)
            for take in self._takers[name]:
                take(from_bytes(source, *self._kind(name)))

    def _kind(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape of what comes under this name."""
        if name not in self.boxed:
            return self._stored[name]
        stored, box = self.boxed[name]
        return self._stored[stored][0], box.shape

    def _length(self, name: str) -> int:
        return Tensor(name, *self._kind(name)).length

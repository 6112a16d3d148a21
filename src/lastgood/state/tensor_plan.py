"""TensorPlan: where each stored tensor goes: into live tensors and arrays, or into new ones. Plans; writes nothing.

`Match.apply` carries it out in this order: the `checks` of all tensors; `make_new`; `places` and `takers`.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from ..format.boxes import Box
from . import dtensor, subclasses, tensors
from .decode import ArrayRef, Stored, TensorRef
from .differences import Differences
from .tensor_sink import Place, Take


class Making(NamedTuple):
    """How a new tensor is made: its device, its memory order, and the tensor whose sharding it gets, if any."""

    device: torch.device
    order: tensors.Order = ()
    like: torch.Tensor | None = None


class _Written(NamedTuple):
    """A live tensor that is written: its device, the addresses of its first byte and behind its last one."""

    device: str
    start: int
    end: int
    target: str
    tensor: torch.Tensor
    path: str

    @staticmethod
    def of(tensor: torch.Tensor, target: str, path: str) -> _Written:
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr()
        return _Written(str(tensor.device), start, start + span * tensor.element_size(), target, tensor, path)


class TensorPlan:
    """Where the tensors of one generation go.

    The keys of `places`, `takers` and `checks` are targets. A target is a stored name, or, for a live DTensor, a text
    of name, offsets and shape of the box that this process holds; `boxed` has the two parts of such a text.
    """

    def __init__(self, stored: Stored, differences: Differences) -> None:
        self._stored, self._differences = stored, differences
        self.checks: dict[str, list[Take]] = {}
        """what must be checked with the content of a tensor before anything is written"""
        self.conflicts: list[str] = []
        """what the checks have found"""
        self.places: dict[str, list[Place]] = {}
        self.takers: dict[str, list[Take]] = {}
        self.boxed: dict[str, tuple[str, Box]] = {}
        """target of a DTensor -> the stored tensor, and which box of it"""
        self.overwritten: list[str] = []
        """what the comparisons have found: the live names of tensors that another one has changed"""
        self._written: list[_Written] = []
        self._regions: dict[Hashable, tuple[str, str]] = {}
        """live memory -> the stored tensor that is written there, and its live name"""
        self._new: dict[tuple[str, torch.device, tensors.Order], tuple[list[torch.Tensor], torch.Tensor | None]] = {}

    @property
    def targets(self) -> set[str]:
        """Everything that is wanted, whether or not its tensors have been made."""
        return {*self.places, *self.takers, *(target for target, _, _ in self._new)}

    def difference(self, live: torch.Tensor, name: str) -> str:
        """Why a live tensor cannot hold the stored one; empty if it can."""
        theirs = self._stored.tensors[name]
        ours = (tensors.dtype_name(live.dtype), tuple(live.shape))
        if subclasses.is_flattenable(live):
            return f"a plain tensor in the generation, {type(live).__qualname__} here"
        if theirs == ours:
            return ""
        return f"{theirs[0]} {list(theirs[1])} in the generation, {ours[0]} {list(ours[1])} here"

    def is_free(self, live: torch.Tensor, name: str) -> bool:
        """Whether no other stored tensor is written into the memory of a live tensor."""
        taken = self._regions.get(tensors.region(live))
        return taken is None or taken[0] == self._target(name)

    # ---- live ones -----------------------------------------------------------------------------------------

    def write(self, live: torch.Tensor, name: str, path: str) -> None:
        """Plan to write a stored tensor into a live one, once for each region of memory."""
        if not self._claims(tensors.region(live), name, path):
            return
        live, target = self._placed(live, name, path)
        self._written.append(_Written.of(live, target, path))
        part = tensors.once(live)
        if part.shape == live.shape:
            self._fill(live, target)
            return
        first = tuple(slice(size) for size in part.shape)

        def check(source: torch.Tensor) -> None:
            if not torch.equal(tensors.as_bytes(source[first].expand_as(source)), tensors.as_bytes(source)):
                self.conflicts.append(
                    f"{path}: expanded here (one element in memory for many), and they differ in the generation"
                )

        self.checks.setdefault(target, []).append(check)
        self.takers.setdefault(target, []).append(lambda source: tensors.write(part, source[first]))

    def write_array(self, live: np.ndarray, ref: ArrayRef, path: str) -> None:
        """Plan to write a stored array into a live one, once for each region of memory."""
        memory = ("numpy", live.ctypes.data, live.dtype.str, live.shape, live.strides) if live.size else None
        if self._claims(memory, ref.name, path):
            self.takers.setdefault(self._target(ref.name), []).append(partial(_fill_array, live, ref.dtype))

    def _claims(self, memory: Hashable, name: str, path: str) -> bool:
        """Whether this live memory is still to be written. It is a difference if two stored tensors go there."""
        if memory is None:
            return False
        first = self._regions.setdefault(memory, (self._target(name), path))
        if first[0] != self._target(name):
            self._differences.differs(path, f"one tensor with {first[1]} here, two in the generation")
        return first == (self._target(name), path)

    def _target(self, name: str) -> str:
        return self._stored.aliases.get(name, name)

    def _placed(self, live: torch.Tensor, name: str, path: str) -> tuple[torch.Tensor, str]:
        """The memory to write, and the name of what goes there; for a shard the name of its box."""
        if not dtensor.is_sharded(live):
            return live, self._target(name)
        box, here = dtensor.box_of(live, path), dtensor.local(live)
        key = f"{self._target(name)} {box.offsets} {box.shape}"
        self.boxed[key] = self._target(name), box
        return here, key

    def _fill(self, tensor: torch.Tensor, target: str) -> None:
        """Plan to write all of a tensor: part by part where its memory is one run of its bytes, else as a whole."""
        if place := Place.of(tensor):
            self.places.setdefault(target, []).append(place)
        else:
            self.takers.setdefault(target, []).append(partial(tensors.write, tensor))

    def comparisons(self) -> dict[str, list[Take]]:
        """Target -> what compares a tensor with its content, of those that may share a part of their memory with
        another one. To be done when all are written."""
        groups, end = list[list[_Written]](), 0
        for one in sorted(self._written, key=lambda one: one[:2]):
            if groups and groups[-1][0].device == one.device and one.start < end:
                groups[-1].append(one)
                end = max(end, one.end)
            else:
                groups.append([one])
                end = one.end
        found: dict[str, list[Take]] = {}
        for one in (one for group in groups if len(group) > 1 for one in group):
            found.setdefault(one.target, []).append(partial(self._compare, one))
        return found

    def _compare(self, one: _Written, source: torch.Tensor) -> None:
        if not torch.equal(tensors.as_bytes(one.tensor).cpu(), tensors.as_bytes(source)):
            self.overwritten.append(one.path)

    # ---- new ones ------------------------------------------------------------------------------------------

    def new(self, name: str, making: Making, path: str) -> list[torch.Tensor]:
        """Plan a new tensor, one for all names of a stored tensor. `make_new` puts it into the list returned."""
        device, order, like = making
        target = self._target(name) if like is None else self._placed(like, name, path)[1]
        return self._new.setdefault((target, device, order), ([], like))[0]

    def make_new(self) -> None:
        """Make the new tensors; their content is still to come."""
        for (target, device, order), (made, like) in self._new.items():
            stored, box = self.boxed.get(target) or (target, None)
            dtype, shape = self._stored.tensors[stored]
            blank = tensors.blank(dtype, shape if box is None else box.shape, device, order)
            made[:] = [blank if like is None else dtensor.like(blank, like, tensors.strides(like.shape, order))]
            self._fill(blank, target)

    def blank(self, ref: TensorRef, making: Making) -> torch.Tensor:
        """A tensor of the stored dtype and shape, without its content."""
        return tensors.blank(*self._stored.tensors[ref.name], making.device, making.order)


def _fill_array(live: np.ndarray, dtype: np.dtype[Any], source: torch.Tensor) -> None:
    np.copyto(live, tensors.to_array(source, dtype))

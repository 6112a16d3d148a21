"""The boundary after a step, as one rank notes it: what only it has is copied, the rest stays in its memory, watched.

Every tensor belongs to one of three kinds:

    copied      random numbers, buffers, averages: they may change before the next boundary     `Note.tensors`
    held        parameters and optimizer states, of which this rank holds all or a shard        `Held`
    nowhere     shards without elements, which no rank stores

Invariant: `Boundary.changed` names each held tensor whose memory is not that of the boundary any more, as far as
version counters and samples show it (snapshot/torn_check.py).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import msgspec
import torch

from ..format.boxes import everything
from ..format.layout import Tensor
from ..policy.survival import Holders
from ..ranks.partition import structure_digest
from ..run.survivor_notes import Note, NotedTensor, samples_digest
from ..snapshot import torn_check
from ..state.capture import Captured
from ..state.capture import Origin as Changes
from ..state.dtensor import Sharded
from ..state.tensors import as_bytes, dtype_name

NOTE_LIMIT_BYTES = 16 << 20
"""What a rank may note at a step: copying more would take longer than a small step."""


class CannotNote(Exception):
    """Why this rank cannot note a boundary."""


@dataclass(frozen=True)
class Part:
    """A tensor, or a shard of one, in the memory of this rank. `stored`: how it is stored."""

    stored: Tensor
    memory: torch.Tensor


class Held:
    """What the same ranks hold of tensors that only training changes. `holders`: these ranks."""

    def __init__(self, holders: Holders, parts: list[Part]) -> None:
        self.holders, self.parts = holders, parts
        self._watch = torn_check.Watch(
            {one.stored.name: torn_check.Reference({0: one.memory}, 0, one.memory) for one in parts}
        )
        places = [f"{one.stored.name}|{one.stored.offsets}|{one.stored.shape}" for one in parts]
        self._described = "\n".join(places)

    def observe(self) -> torn_check.Observation:
        """Versions and samples now."""
        return self._watch.observe()

    def samples(self, observed: torn_check.Observation) -> str:
        """A digest, equal on all holders as long as they are replicas."""
        return samples_digest(self._described, *(one.tobytes() for one in observed.arrays))

    def changed(self, observed: torn_check.Observation) -> set[str]:
        """Names of the tensors that have changed since they were `observed`."""
        return self._watch.replaced(observed.versions) | observed.differs(self._watch.observe())


@dataclass(frozen=True)
class Boundary:
    """The newest step that this rank has completed, and how to see whether the live memory is still that of it."""

    step: int
    captured: Captured
    held: list[Held]
    observed: list[torn_check.Observation]

    def changed(self) -> list[str]:
        """Names of the tensors that have changed since."""
        found = (one.changed(observed) for one, observed in zip(self.held, self.observed, strict=True))
        return sorted(set().union(*found))


class Notes:
    """Makes the boundaries and notes of one rank. `size`: the number of all ranks."""

    def __init__(self, size: int) -> None:
        self._everyone = tuple(range(size))
        self._structure, self._structure_of = "", -1

    def boundary(self, n: int, captured: Captured, before: Boundary | None) -> Boundary:
        """The boundary after step `n`. `before`: the last one, whose watches are used where the memory is the same.

        Raises CannotNote where another rank could not save it.
        """
        same = before is not None and _is_same_memory(before.captured, captured)
        held = before.held if before is not None and same else self._held(captured)
        return Boundary(n, captured, held, [one.observe() for one in held])

    def note(self, boundary: Boundary, opening: str) -> Note:
        """What is noted of a boundary. `opening`: as in `Note`.

        Raises CannotNote where too much would have to be copied."""
        captured = boundary.captured
        held = {part.stored.name for one in boundary.held for part in one.parts}
        beside = {name: one for name, one in captured.tensors.items() if name not in held}
        beside = {name: one for name, one in beside.items() if not _is_nowhere(captured.sharded.get(name))}
        values = msgspec.json.encode(captured.values)
        sizes = {"numbers and texts": len(values), **{name: one.nbytes for name, one in beside.items()}}
        if sum(sizes.values()) > NOTE_LIMIT_BYTES:
            largest, size = max(sizes, key=lambda name: sizes[name]), sum(sizes.values())
            what = f"{size >> 20} MiB beside parameters and optimizer states, {largest} first"
            raise CannotNote(f"{what}: at most {NOTE_LIMIT_BYTES >> 20} MiB can be copied at each step")
        observed = zip(boundary.held, boundary.observed, strict=True)
        return Note(
            step=boundary.step,
            opening=opening,
            process=os.getpid(),
            structure=self._structure_digest(captured),
            samples=[([*one.holders], one.samples(seen)) for one, seen in observed],
            aliases=captured.aliases,
            values=values,
            tensors=[_noted(name, one) for name, one in beside.items()],
        )

    def _held(self, captured: Captured) -> list[Held]:
        groups = dict[Holders, list[Part]]()
        for name, one in captured.tensors.items():
            sharded = captured.sharded.get(name)
            if captured.origins[name] is Changes.OTHER or not torn_check.watchable(one):
                if sharded is not None:
                    raise CannotNote(f"{name} is sharded, and no optimizer trains it")
            elif not _is_nowhere(sharded):
                groups.setdefault(self._holders(name, sharded), []).append(Part(_stored(name, one, sharded), one))
        return [Held(holders, parts) for holders, parts in sorted(groups.items())]

    def _holders(self, name: str, sharded: Sharded | None) -> Holders:
        if sharded is None or 0 in sharded.shape:
            return self._everyone
        if len(sharded.holders) == 1:  # guard: single-shard-not-noted
            raise CannotNote(f"{name} is sharded: what a dead rank held of it, no other rank has")
        if tuple(sorted(sharded.mesh)) != self._everyone:
            raise CannotNote(f"{name} is sharded over some of the ranks only")
        return sharded.holders

    def _structure_digest(self, captured: Captured) -> str:
        if self._structure_of != captured.key:
            self._structure, self._structure_of = structure_digest(captured), captured.key
        return self._structure


def _noted(name: str, tensor: torch.Tensor) -> NotedTensor:
    data = as_bytes(tensor).cpu().numpy().tobytes()
    return NotedTensor(name=name, dtype=dtype_name(tensor.dtype), shape=list(tensor.shape), data=data)


def _stored(name: str, tensor: torch.Tensor, sharded: Sharded | None) -> Tensor:
    whole = sharded.shape if sharded is not None else tuple(tensor.shape)
    box = sharded.box if sharded is not None and sharded.box.elements else everything(whole)
    piece = (box.offsets, whole) if box.shape != whole else ((), ())
    return Tensor(name, dtype_name(tensor.dtype), box.shape, False, *piece)


def _is_nowhere(sharded: Sharded | None) -> bool:
    """Whether it is a shard without elements, of a tensor with some."""
    return sharded is not None and not sharded.box.elements and 0 not in sharded.shape


def _is_same_memory(before: Captured, now: Captured) -> bool:
    """Whether the tensors that only training changes are the same ones, in the same memory. Another tensor may lie in
    the same memory, and counts its versions apart. Others, as random numbers, are new in each capture."""
    if before.key != now.key:
        return False
    old = zip(before.addresses, before.tensors.values(), strict=True)
    new = zip(now.addresses, now.tensors.values(), strict=True)
    every = zip(old, new, now.origins.values(), strict=True)
    watched = ((then, one) for then, one, origin in every if origin is not Changes.OTHER)
    # guard: replaced-tensor-watched-anew
    return all(then[0] == one[0] and then[1] is one[1] for then, one in watched)

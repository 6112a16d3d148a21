"""The expectations that the crash model compares each crash state with: what was saved, and what must be kept.

A `Ledger` records the state of each save that has begun, which saves were acknowledged as durable, which generations
were verified, deleted, damaged or rebuilt, the parent of each incarnation and the labels. `owed` returns the
generations that must still exist, and `choices` those that a restore may load.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from lastgood.errors import Damaged
from lastgood.format import layout
from lastgood.limits import STEP_LIMIT
from lastgood.policy.retention import Keep
from lastgood.records import Commit, GenerationId, Mark, Pointer
from lastgood.storage.directory import WriteMode

from .labels import Labels
from .plain import State


class Violation(AssertionError):
    """A promise was broken; the message names the generation and the calls that led to the state."""


@functools.lru_cache(4096)
def payload(at: GenerationId, attempt: int, weight: int) -> State:
    """The state that one attempt to save a generation writes; no other attempt writes the same bytes."""
    rng = random.Random(f"{at} {attempt}")
    return {"w": rng.randbytes(weight), "b": rng.randbytes(40), "none": b""}


Kind = TypeVar("Kind", Commit, Mark, Pointer)
Choices = list[tuple[set[GenerationId], GenerationId | None]]
"""Of each incarnation that may be the newest: the generations that a restore may load, and the oldest of them."""


def decoded(data: bytes, kind: type[Kind]) -> Kind | None:
    """The record of this kind that the bytes hold, or None if they are damaged or of another kind."""
    found = _decoded(data, kind)
    return found if isinstance(found, kind) else None


@functools.lru_cache(4096)
def _decoded(data: bytes, kind: type[Kind]) -> Kind | None:
    try:
        return layout.decode(data, kind, "")
    except Damaged:
        return None


def named(folder: str) -> GenerationId:
    """The generation that a folder below `gen/` belongs to. Raises Violation for any other name."""
    at = layout.parse_folder(folder)
    if at is None:
        raise Violation(f"{folder} is in gen/ although it is no folder of a generation")
    return at


def must(holds: object, otherwise: str) -> None:
    if not holds:
        raise Violation(otherwise)


@dataclass
class Ledger:
    """The saves of a run, the generations that it promised to keep, and those that may be lost or deleted since."""

    keep: Keep = field(default_factory=Keep)
    mode: WriteMode = "atomic_dirsync"
    direct: bool = False
    given: dict[GenerationId, State] = field(default_factory=dict)
    """the state of each save that has begun and has not failed"""
    sealed: dict[GenerationId, dict[str, int]] = field(default_factory=dict)
    """digests of the files of a generation at the moment before its COMMIT is created, by file name"""
    acknowledged: set[GenerationId] = field(default_factory=set)
    verified: set[GenerationId] = field(default_factory=set)
    ending: set[GenerationId] = field(default_factory=set)
    """generations that retention has begun to delete"""
    rotten: set[GenerationId] = field(default_factory=set)
    found: set[GenerationId] = field(default_factory=set)
    """those of `rotten` whose damage the running process knows of, so that retention may not count them as verified"""
    mending: set[GenerationId] = field(default_factory=set)
    """damaged generations that are being rebuilt from parity, so that they may be good again"""
    doubted: set[GenerationId] = field(default_factory=set)
    """good generations that were marked as damaged because a read of them failed"""
    labels: Labels = field(default_factory=Labels)
    """labels that were added to generations after their commit"""
    orders: dict[str, int] = field(default_factory=dict)
    parents: dict[str, GenerationId | None] = field(default_factory=dict)
    current: str | None = None
    held: set[GenerationId] = field(default_factory=set)
    """generations that wait for their copy to another place, so that retention may not delete them"""
    receives_copies: bool = False
    """every generation is copied to this place from another one, where it was sealed"""
    opening: set[str] = field(default_factory=set)
    """incarnations newer than `current` whose first COMMIT may or may not be durable"""
    idents: int = 0
    attempts: int = 0
    parity: str | None = None
    weight: int = 4700
    """bytes of the largest tensor of a save"""
    disturbed: bool = False
    """an error was injected: files left behind and a pointer or marks out of date are no violation"""
    full: bool = False
    """the disk is full: retention may delete all but the newest verified generation and pinned ones"""
    ranks: int = 1
    """how many ranks write each generation"""
    in_flight: int = 0
    """uploads that may be in flight in a run in slots; 0: the run is in directories"""
    tables: tuple[frozenset[GenerationId], ...] = (frozenset(),)
    """of a run in slots: every set of generations that a crash may leave: the last durable table, and those whose
    write has begun or has an unknown outcome"""

    def copied(self) -> Ledger:
        fresh: dict[str, Any] = {
            name: type(value)(value) for name, value in vars(self).items() if isinstance(value, (dict, set))
        }
        return replace(self, labels=self.labels.copied(), **fresh)

    def emptied(self) -> Ledger:
        """The ledger of this place after its disk was lost whole: it owes nothing, and the run goes on elsewhere."""
        fresh = Ledger(keep=self.keep, mode=self.mode, direct=self.direct, receives_copies=self.receives_copies)
        kept = ("given", "sealed", "orders", "parents", "current", "opening", "idents", "attempts", "weight", "parity")
        return replace(fresh, **{name: getattr(self, name) for name in kept})

    def rank(self, at: GenerationId) -> tuple[int, int]:
        return self.orders[at.incarnation], at.step

    def line(self, incarnation: str | None) -> list[GenerationId]:
        """Every generation of `given` in the lineage that ends in this incarnation, newest first."""
        found: list[GenerationId] = []
        bound = STEP_LIMIT
        while incarnation is not None:
            mine = [at for at in self.given if at.incarnation == incarnation and at.step <= bound]
            found += sorted(mine, reverse=True)
            parent = self.parents[incarnation]
            incarnation, bound = (parent.incarnation, parent.step) if parent else (None, 0)
        return found

    def newest(self, step: int) -> GenerationId:
        """The newest save of `step` in the current lineage."""
        return next(at for at in self.line(self.current) if at.step == step)

    def owed(self) -> set[GenerationId]:
        """Generations that must exist with exactly the bytes that were saved."""
        return self.acknowledged - self.ending - self.rotten - self.doubted

    def choices(self, owed: Set[GenerationId] | None = None, bad: Set[GenerationId] | None = None) -> Choices:
        """For each incarnation that may be the newest: the generations that a restore may load, and the oldest of them.

        An incarnation exists only once it has a COMMIT. If its first COMMIT may be missing, a restore of it can load
        only generations that it saved itself. The oldest is the newest one that must exist, or None. `owed`: those that
        must exist (None: those that this place owes). `bad`: those that must not load (None: those damaged here).
        """
        owed = self.owed() if owed is None else owed
        bad = self.rotten - self.mending if bad is None else bad
        found = []
        for incarnation in {self.current, *self.opening}:
            line = self.line(incarnation)
            mine = [at for at in line if incarnation == self.current or at.incarnation == incarnation]
            found.append((set(mine) - bad, next((at for at in line if at in owed), None)))
        return found

    def end(self, at: GenerationId) -> None:
        """Record that retention begins to delete `at`. Raises Violation if the retention rules still require it."""
        if at in self.ending:
            return
        must(at not in self.held, f"{at} is deleted although it waits for its copy to another place")
        line = self.line(self.current)
        good = self.verified - self.ending - self.found - self.doubted
        newer = [one for one in line if one in good and self.rank(one) > self.rank(at)]
        need = self.keep.last if (at in good or at not in line) and not self.full else 1
        must(
            len(newer) >= need or any(one.step == at.step for one in newer),
            f"{at} is deleted while only {len(newer)} of the required {need} newer generations are verified",
        )
        must(at not in good or not self._is_selected(at, line), f"{at} is deleted although retention pins it")
        must(not self.labels.milestones.get(at), f"{at} is deleted although a durable label makes it a milestone")
        if self.keep.best is not None and at in good and at in line:
            rivals = [one for one in line if one in good and one not in self.ending and one != at]
            must(self.labels.beaten(at, rivals), f"{at} is deleted although no other has a metric as good")
        self.ending.add(at)

    def _is_selected(self, at: GenerationId, line: list[GenerationId]) -> bool:
        """Whether `every` keeps a generation: its step is a multiple, or no save of the same steps of the lineage is
        older. `line`: that lineage."""
        every = self.keep.every
        if every is None or at.step % every == 0:
            return every is not None
        same = [one for one in line if one.step // every == at.step // every]
        return at.step > every and at in same and at == min(same, key=self.rank)

    def key(self) -> int:
        """A hash: ledgers with equal keys demand the same of a crash state."""
        owed = frozenset(self.tables) if self.in_flight else frozenset(self.owed())
        labels = self.labels.key()
        return hash((owed, frozenset(self.given), frozenset(self.rotten), self.current, *self.opening, labels))

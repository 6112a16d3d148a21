"""What a run was given and what it promised: the expectations that the crash model holds each crash state against.

A `Ledger` records the state of each save that has begun, which saves were acknowledged as durable, which generations
were verified, deleted, damaged or rebuilt, the parent of each incarnation and the labels. `owed` is what must still be
found, and `choices` is what a restore may load.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from lastgood.errors import Damaged
from lastgood.format import layout
from lastgood.policy.retention import Keep
from lastgood.records import Commit, GenerationId, Mark, Pointer
from lastgood.storage.directory import WriteMode

from .labels import Labels
from .plain import State


class Violation(AssertionError):
    """A promise that did not hold, with the way to it."""


@functools.lru_cache(4096)
def payload(at: GenerationId, attempt: int, weight: int) -> State:
    """A state that no other save has."""
    rng = random.Random(f"{at} {attempt}")
    return {"w": rng.randbytes(weight), "b": rng.randbytes(40), "none": b""}


Kind = TypeVar("Kind", Commit, Mark, Pointer)


def decoded(data: bytes, kind: type[Kind]) -> Kind | None:
    """The record in these bytes, or None."""
    found = _decoded(data, kind)
    return found if isinstance(found, kind) else None


@functools.lru_cache(4096)
def _decoded(data: bytes, kind: type[Kind]) -> Kind | None:
    try:
        return layout.decode(data, kind, "")
    except Damaged:
        return None


def named(folder: str) -> GenerationId:
    """The generation of a folder."""
    at = layout.parse_folder(folder)
    if at is None:
        raise Violation(f"{folder} lies in gen/")
    return at


def must(holds: object, otherwise: str) -> None:
    if not holds:
        raise Violation(otherwise)


@dataclass
class Ledger:
    """What the run was given, what it promised, and what may have gone since."""

    keep: Keep = field(default_factory=Keep)
    mode: WriteMode = "atomic_dirsync"
    direct: bool = False
    given: dict[GenerationId, State] = field(default_factory=dict)
    """each state whose save has begun and has not failed"""
    sealed: dict[GenerationId, dict[str, int]] = field(default_factory=dict)
    """digests of the files beside a COMMIT, from when it was about to be created"""
    acknowledged: set[GenerationId] = field(default_factory=set)
    verified: set[GenerationId] = field(default_factory=set)
    ending: set[GenerationId] = field(default_factory=set)
    """retention has begun to delete them"""
    rotten: set[GenerationId] = field(default_factory=set)
    mending: set[GenerationId] = field(default_factory=set)
    """of the rotten ones: being rebuilt from parity, so that they may be good again"""
    doubted: set[GenerationId] = field(default_factory=set)
    """marked as damaged after a read failed: good, and given up"""
    labels: Labels = field(default_factory=Labels)
    """what was added to generations after their commit"""
    orders: dict[str, int] = field(default_factory=dict)
    parents: dict[str, GenerationId | None] = field(default_factory=dict)
    current: str | None = None
    opening: set[str] = field(default_factory=set)
    """incarnations newer than `current` of which the first COMMIT may or may not be there"""
    idents: int = 0
    attempts: int = 0
    parity: str | None = None
    weight: int = 4700
    """bytes of the largest tensor of a save"""
    disturbed: bool = False
    """an error was injected, so litter and stale hints are no violation"""
    full: bool = False
    """the disk is full: only the newest verified generation and pinned ones are owed"""
    ranks: int = 1
    """how many write a generation together"""
    in_flight: int = 0
    """how many uploads the slots were announced; 0: the run lives in directories"""
    tables: tuple[frozenset[GenerationId], ...] = (frozenset(),)
    """of slots: all that a crash may bring up, each in full: what was durable last, and what nobody can say of"""

    def copied(self) -> Ledger:
        fresh: dict[str, Any] = {
            name: type(value)(value) for name, value in vars(self).items() if isinstance(value, (dict, set))
        }
        return replace(self, labels=self.labels.copied(), **fresh)

    def rank(self, at: GenerationId) -> tuple[int, int]:
        return self.orders[at.incarnation], at.step

    def line(self, incarnation: str | None) -> list[GenerationId]:
        """Everything given on the way back from an incarnation, newest first."""
        found: list[GenerationId] = []
        bound = layout.STEP_LIMIT
        while incarnation is not None:
            mine = [at for at in self.given if at.incarnation == incarnation and at.step <= bound]
            found += sorted(mine, reverse=True)
            parent = self.parents[incarnation]
            incarnation, bound = (parent.incarnation, parent.step) if parent else (None, 0)
        return found

    def newest(self, step: int) -> GenerationId:
        """The newest save of `step` in the current line."""
        return next(at for at in self.line(self.current) if at.step == step)

    def owed(self) -> set[GenerationId]:
        """What must be there, to the bit."""
        return self.acknowledged - self.ending - self.rotten - self.doubted

    def choices(self) -> list[tuple[set[GenerationId], GenerationId | None]]:
        """For each incarnation that may be the newest: what a restore may choose, and the oldest it may choose.

        An incarnation is nothing without a COMMIT: of one that may have none, only what it saved itself is chosen.
        """
        owed = self.owed()
        found = []
        for incarnation in {self.current, *self.opening}:
            line = self.line(incarnation)
            mine = [at for at in line if incarnation == self.current or at.incarnation == incarnation]
            found.append((set(mine) - (self.rotten - self.mending), next((at for at in line if at in owed), None)))
        return found

    def end(self, at: GenerationId) -> None:
        """Retention begins to delete `at`: only what newer, verified generations make needless may go."""
        if at in self.ending:
            return
        line = self.line(self.current)
        good = self.verified - self.ending - self.rotten - self.doubted
        newer = [one for one in line if one in good and self.rank(one) > self.rank(at)]
        need = self.keep.last if (at in good or at not in line) and not self.full else 1
        must(
            len(newer) >= need or any(one.step == at.step for one in newer),
            f"{at} is deleted while {len(newer)} newer ones are verified, of {need}",
        )
        pinned = self.keep.every is not None and at.step % self.keep.every == 0 and at in good
        must(not pinned, f"{at} is deleted, and was to be kept")
        must(not self.labels.milestones.get(at), f"{at} is deleted, and a durable label makes it a milestone")
        if self.keep.best is not None and at in good and at in line:
            rivals = [one for one in line if one in good and one not in self.ending and one != at]
            must(self.labels.beaten(at, rivals), f"{at} is deleted, and no other has a metric as good")
        self.ending.add(at)

    def key(self) -> int:
        """Two ledgers of one key ask the same of a state."""
        owed = frozenset(self.tables) if self.in_flight else frozenset(self.owed())
        labels = self.labels.key()
        return hash((owed, frozenset(self.given), frozenset(self.rotten), self.current, *self.opening, labels))

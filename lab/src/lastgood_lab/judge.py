"""The judge of the crash model: draws crash states of an instant, counts them, and has each one checked.

It does not know what a run consists of: a `World` (crashmodel.py) or `TwoPlaces` (two_places.py) draws the states and
checks them.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from .hostile import STAGED
from .ledger import Violation


class Played(Protocol):
    """A run that is played, as the judge sees it.

    `depth`: how many crashes lie before its processes. `continues`: whether the next process is played after a power
    loss; the weaker write modes may leave a run that cannot be used.
    """

    depth: int
    continues: bool

    def crashes(self, most: int) -> Iterable[Any]:
        """About `most` crash states of this instant. The first one has everything that readers see."""

    def key(self) -> int:
        """A hash: worlds with equal keys demand the same of a crash state."""

    def hold(self, state: Any) -> bool:
        """Check a crash state against the promises. Raises Violation. Returns whether everything acknowledged exists;
        only the weaker write modes may lose some of it."""

    def killed(self) -> Played:
        """The next process after a kill now."""

    def next(self, state: Any) -> Played:
        """The next process after the power loss that left this state."""

    def carry_on(self) -> None:
        """Play the next process after a crash: it opens, restores and saves, each of which must succeed."""


@dataclass
class Judge:
    """Counts the distinct crash states and checks each against the ledger.

    At each call about `samples` states are drawn. In a share `carry_on` of the new states the next process is played;
    crash states are drawn at a share `nest` of its calls too, down to `depth` levels.
    """

    rng: random.Random
    samples: int = 16
    carry_on: float = 0.06
    nest: float = 0.005
    depth: int = 3
    states: set[int] = field(default_factory=set)
    judged: set[int] = field(default_factory=set)
    by_step: Counter[str] = field(default_factory=Counter)
    """number of judged states, by the call before which the crash happens"""
    violation: Violation | None = None
    """the first violation, after which nothing is judged"""
    lost: int = 0
    """states of the weaker write modes in which an acknowledged generation is lost"""

    def crash(self, world: Played, step: str = "at the end") -> None:
        """Judge crash states of this instant, before the call named by `step`: those of power losses and of a kill."""
        if world.depth and self.rng.random() > self.nest:
            return
        for state in world.crashes(self.samples):
            self.see(world, state, step)
        if self.rng.random() < self.carry_on and world.depth < self.depth:
            world.killed().carry_on()

    def see(self, world: Played, state: Any, step: str) -> None:
        digest = state.digest()
        self.states.add(digest)
        if (key := hash((digest, world.key()))) in self.judged:
            return
        self.judged.add(key)
        self.by_step[step] += 1
        self.lost += not world.hold(state)
        if world.continues and world.depth < self.depth and self.rng.random() < self.carry_on:
            world.next(state).carry_on()


def step_of(call: str, path: str) -> str:
    """The name of a call without the names that are specific to a run, such as "link gen/*/COMMIT.json". `path`: inside
    the run."""
    name = STAGED.sub("", path)
    name = re.sub(r"^gen/[^/]+", "gen/*", name)
    return f"{call} {re.sub(r'[0-9a-f-]*[0-9]{2}[0-9a-f-]*(?![a-z])', '*', name) or 'the run'}"


class Deputy(Protocol):
    """The judge of one place of a run that has several: it judges all of them at once."""

    violation: Violation | None

    @property
    def rng(self) -> random.Random: ...

    def crash(self, world: Any, step: str) -> None: ...

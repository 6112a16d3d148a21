"""The record of a mutant: a safeguard, the change that disables it, and the tests of which at least one must fail."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from lastgood_lab.campaigns.checkout import checkout

from .change import Change, Statement


class Mutant(NamedTuple):
    """A change that disables one safeguard in the source."""

    kind: str
    """the group of safeguards, a heading of the report"""
    what: str
    """one sentence about the fault that the change introduces"""
    guard: str
    """the name that marks the statement in the source"""
    change: Change
    tests: tuple[str, ...]
    """the test files that run on it, in this order, relative to the repository"""
    equivalent: str = ""
    """why no test can kill it; empty for all others"""

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.what}"

    @property
    def key(self) -> str:
        """Identifies the mutant in the file of verdicts. It does not depend on the description."""
        return f"{self.guard} {hashlib.sha256(repr(self.change).encode()).hexdigest()[:8]}"

    def apply(self, source: str) -> str:
        """The changed text of `source`, the file that holds the guard. Raises Unfit if the change does not fit."""
        return self.change.apply(Statement.of(source, self.guard))


Row = tuple[str, str, Change] | tuple[str, str, Change, str]


def test_file(name: str) -> str:
    """The path of tests/ROOM/test_NAME.py, relative to the repository. Raises LookupError if there is none."""
    found = list(checkout().glob(f"tests/*/test_{name}.py"))
    if not found:
        raise LookupError(f"no room of tests/ holds test_{name}.py")
    return str(found[0].relative_to(checkout()))


def table(kind: str, tests: tuple[str, ...], *rows: Row) -> tuple[Mutant, ...]:
    """Mutants of one kind from rows of (what, guard, change) or (what, guard, change, why no test can kill it)."""
    return tuple(
        Mutant(kind, what, guard, change, tuple(map(test_file, tests)), *why) for what, guard, change, *why in rows
    )

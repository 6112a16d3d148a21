"""The record of a mutant: a safeguard, what is changed about it, and the tests of which one must fail."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from lastgood_lab.campaigns.checkout import checkout

from .change import Change, Statement


class Mutant(NamedTuple):
    """A safeguard that is taken out of the source."""

    kind: str
    what: str
    guard: str
    """the name that marks the statement in the source"""
    change: Change
    tests: tuple[str, ...]
    """the test files that are run on it, in this order, relative to the repository"""
    equivalent: str = ""
    """why no test can find it"""

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.what}"

    @property
    def key(self) -> str:
        """Identifies the mutant in the file of verdicts, whatever its description says."""
        return f"{self.guard} {hashlib.sha256(repr(self.change).encode()).hexdigest()[:8]}"

    def apply(self, source: str) -> str:
        """`source`, the text of the file that holds the guard, without the safeguard. Raises Unfit."""
        return self.change.apply(Statement.of(source, self.guard))


Row = tuple[str, str, Change] | tuple[str, str, Change, str]


def test_file(name: str) -> str:
    """The path of tests/ROOM/test_NAME.py, relative to the repository. Raises LookupError where there is none."""
    found = list(checkout().glob(f"tests/*/test_{name}.py"))
    if not found:
        raise LookupError(f"no room of tests/ holds test_{name}.py")
    return str(found[0].relative_to(checkout()))


def table(kind: str, tests: tuple[str, ...], *rows: Row) -> tuple[Mutant, ...]:
    """Mutants of one kind from rows of (what, guard, change) or (what, guard, change, why no test can find it)."""
    return tuple(
        Mutant(kind, what, guard, change, tuple(map(test_file, tests)), *why) for what, guard, change, *why in rows
    )

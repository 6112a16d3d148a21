"""Differences between a generation and a live state, collected while the two are compared."""

from __future__ import annotations

from ..format.values import Filter


class Differences:
    """What of a generation does not fit the live state."""

    def __init__(self, names: Filter) -> None:
        self._names = names
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.mismatched: list[str] = []
        self._covered: list[str] = []
        """names that are listed as one difference together with everything below them"""

    def differs(self, path: str, why: str) -> None:
        """What is stored at `path` is of another kind, shape or dtype."""
        self.mismatched.append(f"{path}: {why}")
        self._covered.append(path)

    def has_no_place(self, path: str) -> None:
        """What is stored at `path` cannot be made from data alone, and the live state has nothing to load it into."""
        self._covered.append(path)
        if self._names.keeps(path):
            self.unexpected.append(path)

    def leave_out(self, paths: list[str]) -> None:
        """These entries are stored and were not asked for, which is no difference."""
        self._covered += paths

    def covers(self, name: str) -> bool:
        """Whether a name above this one is listed already."""
        return any(name.startswith(f"{one}.") for one in self._covered)

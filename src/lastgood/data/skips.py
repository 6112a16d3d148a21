"""Windows of the order that are left out: batches that made training diverge. Pure; knows no cursor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class Skips:
    """A set of windows, each of an epoch. Empty at first."""

    def __init__(self) -> None:
        self._windows: dict[int, set[int]] = {}

    def add(self, epoch: int, windows: Iterable[int]) -> None:
        """Leave these windows of an epoch out."""
        self._windows.setdefault(epoch, set()).update(windows)

    def next(self, epoch: int, window: int) -> int:
        """The first window from this one on that is not left out. It may lie behind the last one of the epoch."""
        skipped = self._windows.get(epoch, ())
        while window in skipped:
            window += 1
        return window

    def remaining(self, epoch: int, window: int, windows: int) -> int:
        """How many windows from this one on are not left out, of an epoch of so many `windows`."""
        return windows - window - sum(window <= one < windows for one in self._windows.get(epoch, ()))

    def of(self, epoch: int) -> list[int]:
        """The windows of an epoch that are left out, ascending."""
        return sorted(self._windows.get(epoch, ()))

    def state(self) -> list[list[object]]:
        """[epoch, windows] of each epoch, ascending."""
        return [[epoch, self.of(epoch)] for epoch in sorted(self._windows)]

    def __bool__(self) -> bool:
        return bool(self._windows)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((epoch, window) for epoch in sorted(self._windows) for window in self.of(epoch))

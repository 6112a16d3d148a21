"""Windows of the order that are left out, batches that made training diverge, and which windows come without them.

Pure; knows no cursor. `windows`: of an epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class Skips:
    """A set of windows, each of an epoch. Empty at first."""

    def __init__(self) -> None:
        self._windows: dict[int, set[int]] = {}

    def add(self, epoch: int, windows: Iterable[int]) -> None:
        """Leave these windows of an epoch out."""
        self._windows.setdefault(epoch, set()).update(windows)

    def before(self, epoch: int) -> Skips:
        """Those of the epochs before this one."""
        kept = Skips()
        for one, windows in self._windows.items():
            if one < epoch:
                kept.add(one, windows)
        return kept

    def next(self, epoch: int, window: int) -> int:
        """The first window from this one on that is not left out. It may lie behind the last one of the epoch."""
        skipped = self._windows.get(epoch, ())
        while window in skipped:
            window += 1
        return window

    def remaining(self, epoch: int, window: int, windows: int) -> int:
        """How many windows of an epoch, from this one on, are not left out."""
        return windows - window - sum(window <= one < windows for one in self._windows.get(epoch, ()))

    def place(self, epoch: int, window: int, windows: int) -> tuple[int, int]:
        """Epoch and window of the first one from this one on that is not left out, in this epoch or a later one."""
        while (window := self.next(epoch, window)) >= windows:  # guard: skipped-windows-passed
            epoch, window = epoch + 1, window - windows
        return epoch, window

    def after(self, epoch: int, window: int, windows: int, steps: int, each: int) -> tuple[int, int]:
        """Epoch and window behind so many steps, of `each` windows, from this one on. No step takes windows from two
        epochs: the last one of an epoch takes what is left of it."""
        if self:
            return self._after(epoch, window, windows, steps, each)
        left = -(-(windows - window) // each)  # guard: last-step-takes-remainder
        if steps < left:
            return epoch, window + steps * each
        epochs, steps = divmod(steps - left, -(-windows // each))
        return epoch + 1 + epochs, steps * each

    def _after(self, epoch: int, window: int, windows: int, steps: int, each: int) -> tuple[int, int]:
        """As `after`, step by step."""
        epoch, window = self.place(epoch, window, windows)
        for _ in range(steps):
            began, left = epoch, each
            while left and epoch == began:
                (epoch, window), left = self.place(epoch, window + 1, windows), left - 1
        return epoch, window

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

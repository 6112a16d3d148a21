"""How far the StatefulDataLoaders (torchdata) of a state have come, which count their batches themselves: a batch that
they have yielded counts as trained in the next save, whether a step has trained it or not. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..format.values import Filter, join
from .objects import exact_sampler, find_objects


def counting_loaders(state: Mapping[str, Any], saved: Filter) -> dict[str, Any]:
    """The StatefulDataLoaders of a state that count their batches themselves, and whose position `saved` keeps, by
    path. The position of one over a ResumableSampler is that of its sampler."""
    return {
        path: one
        for path, one in find_objects(state).items()
        if type(one).__name__ == "StatefulDataLoader"
        and exact_sampler(one) is None
        and saved.keeps(join(path, "_snapshot"))
    }


class LoaderWatch:
    """Finds loaders that have yielded batches since a step of the loop."""

    def __init__(self) -> None:
        self._loaders = dict[str, Any]()
        self._noted = dict[str, tuple[int, int]]()
        """path -> the iteration, and how many batches it had yielded"""

    def begin(self, state: Mapping[str, Any], saved: Filter) -> None:
        """Watch the loaders that a state has now, and whose position `saved` keeps."""
        self._loaders = counting_loaders(state, saved)

    def note(self) -> None:
        """What was yielded until now was trained by the newest step, or by one before."""
        self._noted = self._now()

    def ahead(self) -> list[str]:
        """The paths of the loaders that have yielded a batch since `note`, and are in the middle of their data."""
        return [path for path, at in self._now().items() if at[1] and at != self._noted.get(path)]

    def _now(self) -> dict[str, tuple[int, int]]:
        running = {path: getattr(one, "_iterator", None) for path, one in self._loaders.items()}
        return {
            path: (id(one), getattr(one, "_num_yielded", 0))
            for path, one in running.items()
            if not getattr(one, "_finished", True)
        }

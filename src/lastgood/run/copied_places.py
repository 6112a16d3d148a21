"""Which places have received copies of the newest saves, as rank 0 posts it and the other ranks read it.

    OPENING/copied   folder of a generation -> the places that have received it, of the newest POSTED generations

It is for what a rank shows of its saves (`Save.where`, `Save.durable`), and nothing is decided by it. Where the store
cannot be reached, a save is shown with the place that it was committed in first.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial

from ..coordination.rounds import RankGroup
from ..errors import TierDown
from ..format import layout
from ..records import GenerationId

POSTED = 16
"""So many generations are posted: those of the saves whose handles a script may still hold."""


class CopiedPlaces:
    """`ranks`: of the job. Every method may be called from any thread."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks, self._key = ranks, f"{ranks.opening}/copied"
        self._lock = threading.Lock()
        self._places: dict[str, list[str]] = {}

    def watch(self, at: GenerationId, copies: Mapping[str, Future[None] | None]) -> None:
        """At rank 0: post each place once its copy has ended well. `copies`: place -> the end of its copy."""
        for place, copied in copies.items():
            if copied is not None:
                copied.add_done_callback(partial(self._note, layout.folder(at), place))

    def of(self, at: GenerationId) -> list[str]:
        """At another rank: the places that have received a generation, as far as rank 0 has posted it."""
        try:
            posted: dict[str, list[str]] = self._ranks.quick.read(self._key) or {}
        except TierDown:
            return []
        return posted.get(layout.folder(at), [])

    def _note(self, folder: str, place: str, copied: Future[None]) -> None:
        if copied.exception() is not None:  # guard: failed-copy-not-posted
            return
        with self._lock, contextlib.suppress(TierDown):
            has = self._places.setdefault(folder, [])
            if place in has:  # a label was copied there too
                return
            has.append(place)
            for old in [*self._places][:-POSTED]:
                del self._places[old]
            self._ranks.quick.post(self._key, self._places)  # the caller may hold the lock of a place

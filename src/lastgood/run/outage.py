"""An outage of a place, or of other nodes: copies that fail, attempt after attempt, and how that is reported."""

from __future__ import annotations

import re

from ..records import GenerationId
from .known import KnownRun
from .outcomes import Outcomes, first_line

_VARIABLE = re.compile(r"\S*\d\S*")
"""What differs between errors of one cause: names of generations, ports, sizes, times."""


class Outage:
    """Every failed attempt is an event, and each cause is reported once until an attempt succeeds, also where causes
    alternate. Of a cause that comes again in later outages, `outcomes` reports the 1st, 2nd, 4th, 8th, ...

    `source`: emits the events. `place`: where the copies are made; empty: none are made there. `outcomes`: receives the
    errors.
    """

    def __init__(self, source: KnownRun, place: str, outcomes: Outcomes) -> None:
        self._source, self._place, self._outcomes = source, place, outcomes
        self._reported = set[str]()

    def failed(self, at: GenerationId, error: Exception) -> None:
        """An attempt to copy a generation failed, and is made again."""
        if self._place:
            self._source.emit("not_copied", at, detail=f"{self._place}: {first_line(error)}")
        cause = _VARIABLE.sub("", first_line(error))
        if cause not in self._reported:  # guard: outage-reported-once
            self._reported.add(cause)
            self._outcomes.put(error, cause=cause)

    def ended(self) -> None:
        """An attempt succeeded."""
        self._reported.clear()

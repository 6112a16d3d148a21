"""A follower: the run as a rank knows it that does not coordinate. Writes its own files, and nothing else of the run.

What makes a generation come, count or go the coordinator does, with `run.writer`; a follower takes in what it hears.
Invariant: between two agreements it knows the same generations as the coordinator, so that both choose alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ..engine.arena import Arena
from ..format import commit
from ..records import Finding, Generation, GenerationId, Incarnation, judged
from .ranks import Ranks, Topic
from .sharing import Share
from .writer import RunWriter


class _Ranked(RunWriter):
    """A rank's writer. None of them mends: there is no parity with several ranks, and two must not write one file."""

    def __init__(self, *args: Any, ranks: Ranks, **options: Any) -> None:
        self._ranks = ranks
        super().__init__(*args, **options)
        self.rank = ranks.rank

    def mend_known(self, step: int | None, arena: Arena) -> None:
        """It stays as it is."""

    def try_to_mend(self, at: GenerationId, arena: Arena, stop: Callable[[], bool] = lambda: False) -> bool:
        return False


class Leader(_Ranked):
    """The coordinator's writer: what it decides for all, all hear of."""

    def begin(self, parent: GenerationId | None) -> None:
        def decide(_: list[Any]) -> Any:
            RunWriter.begin(self, parent)
            return msgspec.to_builtins(self._incarnation)

        self._ranks.agree("begin", None, decide)


class Follower(_Ranked):
    """A rank's writer that publishes, marks and deletes nothing."""

    def _settle(self) -> None:
        """The coordinator has done so before anybody else has opened the run."""

    def begin(self, parent: GenerationId | None) -> None:
        record = msgspec.convert(self._ranks.agree("begin", None, lambda _: None), Incarnation)
        self.survey.incarnations[record.id], self.survey.order = record, record.order
        self._incarnation, self._last = record, parent

    def _committed(
        self, together: Topic, at: GenerationId, share: Share, publish: Callable[[Sequence[Share]], Generation]
    ) -> Generation:
        generation = super()._committed(together, at, share, publish)
        with self.turn:
            self._note_tried(generation.id)
            self._take_in(generation)
        return generation

    def _clear(self, at: GenerationId) -> None:
        """The coordinator clears it away, once nobody writes to it any more."""

    def look(self) -> None:
        """What lies in the run now."""
        with self.turn:
            self.survey = commit.survey(self.tier)

    def backlog(self) -> int:
        return 0

    def surplus(self) -> list[GenerationId]:
        return []

    def verify(self, arena: Arena, stop: Callable[[], bool] = lambda: False) -> None:
        """The coordinator does."""

    def point(self) -> None:
        """The coordinator does."""

    def clean(self) -> None:
        """The coordinator does."""

    def conclude(self, generation: Generation, findings: list[Finding]) -> None:
        with self.turn:
            self._take_in(judged(generation, findings))

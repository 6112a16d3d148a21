"""The run of a Checkpointer as a restore uses it, and what the ranks agree on before one."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Any

import msgspec

from ..coordination.single_rank import AnyRanks, AnyTopic
from ..engine.arena import Arena
from ..errors import NotWritable, Unavailable
from ..format.commit import Survey
from ..ports import Tier
from ..records import Finding, Generation
from ..run import reader
from ..run.authority import Follower, Leader
from ..run.pipeline import Background
from .save_planner import Cutter


class WritableRun:
    """`run.candidates.RestorableRun`: all ranks examine a generation; it is marked, and mended from parity."""

    def __init__(self, behind: Background, planner: Cutter, ranks: AnyRanks) -> None:
        self._behind, self._planner, self._ranks = behind, planner, ranks

    @property
    def tier(self) -> Tier:
        return self._behind.run.tier

    @property
    def survey(self) -> Survey:
        return self._behind.run.view

    @property
    def workers(self) -> Executor:
        return self._behind.workers

    def arena(self, total_bytes: int, chunk_bytes: int) -> Arena:
        """The arena of the saves, where that is large enough."""
        return self._planner.reading_arena(total_bytes, chunk_bytes)

    def examine(self, generation: Generation, topic: AnyTopic | None = None) -> list[Finding]:
        """Read all of a generation again; of several ranks each reads a part of the files, and all return the same.

        `topic`: where the ranks agree; None for a new topic.
        """
        run, arena = self._behind.run, self._behind.small_arena()
        if not isinstance(run, (Leader, Follower)):
            return reader.read_all(run.tier, generation, arena, self._behind.workers)
        topic = topic or self._ranks.topic("examine")
        with topic.failing():
            mine = run.read_own(generation, arena)

        def decide(posts: list[Any]) -> Any:
            found = [one for findings in posts for one in findings]
            return found or msgspec.to_builtins(reader.disagreeing(run.tier, generation))

        return msgspec.convert(topic.agree(msgspec.to_builtins(mine), decide), list[Finding])

    def mark(self, generation: Generation, findings: list[Finding]) -> None:
        """Record what was found. A mark that cannot be written now is reported, and the restore goes on."""
        try:
            self._behind.run.conclude(generation, findings)
        except (Unavailable, NotWritable) as error:
            self._behind.outcomes.put(error)

    def mend(self, generation: Generation) -> bool:
        return self._behind.run.try_to_mend(generation.id, self._behind.small_arena())

    def share_survey(self, topic: AnyTopic) -> None:
        """Every rank adopts what rank 0 knows of the run, and counts the same restores: all of them choose alike."""
        run, ranks = self._behind.run, self._ranks
        # guard: restore-counted-by-coordinator
        ranks.rewind(topic.agree(ranks.rewound, lambda counts: 1 + max(counts)))
        seen = topic.agree(None, lambda _: run.seen() if isinstance(run, Leader) else None)
        if isinstance(run, Follower):
            run.see(seen)  # guard: followers-adopt-survey
        topic.agree(None, lambda _: None)

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
from ..run.follower import Follower
from ..run.pipeline import Pipeline
from ..run.writer import RunWriter
from .save_planner import SavePlanner


class WritableRun:
    """`run.candidates.RestorableRun`: all ranks examine a generation; it is marked, and mended from parity."""

    def __init__(self, pipeline: Pipeline, planner: SavePlanner, ranks: AnyRanks) -> None:
        self._pipeline, self._planner, self._ranks = pipeline, planner, ranks

    @property
    def tier(self) -> Tier:
        return self._pipeline.run.tier

    @property
    def survey(self) -> Survey:
        return self._pipeline.run.known.view

    @property
    def workers(self) -> Executor:
        return self._pipeline.workers

    def arena(self, total_bytes: int, chunk_bytes: int) -> Arena:
        """The arena of the saves, where that is large enough."""
        return self._planner.reading_arena(total_bytes, chunk_bytes)

    def examine(self, generation: Generation, topic: AnyTopic | None = None) -> list[Finding]:
        """Read all of a generation again; of several ranks each reads a part of the files, and all return the same.

        `topic`: where the ranks agree; None for a new topic.
        """
        run, arena = self._pipeline.run, self._pipeline.upkeep.arena()
        if self._ranks.size == 1:
            return reader.read_all(run.tier, generation, arena, self._pipeline.workers)
        topic = topic or self._ranks.topic("examine")
        with topic.failing():
            mine = run.own_findings(generation, arena)

        def decide(posts: list[Any]) -> Any:
            found = [one for findings in posts for one in findings]
            return found or msgspec.to_builtins(reader.disagreeing(run.tier, generation))

        return msgspec.convert(topic.agree(msgspec.to_builtins(mine), decide), list[Finding])

    def mark(self, generation: Generation, findings: list[Finding]) -> None:
        """Record what was found. A mark that cannot be written now is reported, and the restore goes on."""
        try:
            self._pipeline.run.conclude(generation, findings)
        except (Unavailable, NotWritable) as error:
            self._pipeline.outcomes.put(error)

    def mend(self, generation: Generation) -> bool:
        """Rebuild it from its parity. Returns whether it is whole; with several ranks there is no parity."""
        run = self._pipeline.run
        if not isinstance(run, RunWriter) or self._ranks.size > 1:
            return False
        return run.mender.try_to_mend(generation.id, self._pipeline.upkeep.arena())

    def share_survey(self, topic: AnyTopic) -> None:
        """Every rank adopts what rank 0 knows of the run, and counts the same restores: all of them choose alike."""
        run, ranks = self._pipeline.run, self._ranks
        # guard: restore-counted-by-coordinator
        ranks.rewind(topic.agree(ranks.restore_count, lambda counts: 1 + max(counts)))
        shared = topic.agree(None, lambda _: run.shared_survey() if isinstance(run, RunWriter) else None)
        if isinstance(run, Follower):
            run.adopt(shared)  # guard: followers-adopt-survey
        topic.agree(None, lambda _: None)

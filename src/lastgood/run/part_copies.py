"""Work on a generation of several ranks in which each rank does its part: copies to a place, parity, repairs.

The coordinator does its own part as well: all ranks together work on every file. It asks the others through
rank_requests.py, under OPENING/parts/PLACE: the place is "front" or its position among the lower ones. Only it writes
COMMIT at the place, and only after all ranks have answered that their files are durable there (copying.complete).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

import msgspec

from ..coordination.rounds import RankGroup
from ..engine.arena import Arena
from ..errors import Cancelled, LastgoodError
from ..format import commit, layout, parity_layout
from ..io.reed_solomon import Code
from ..limits import CHUNK_BYTES, EXAMINATION_CHUNKS
from ..policy.places import packed_parts
from ..ports import Mendable, Shared, Stop, Tier, never
from ..records import Finding, Generation, GenerationId, Record
from . import agent_work, copying, node_opening
from .agent_work import AgentWork
from .node_disks import NodeDisks
from .rank_requests import Requests, RequestServer
from .thread_pools import Workers
from .verify import protect_part

FRONT = "front"


class Request(Record, frozen=True, kw_only=True):
    """What the coordinator asks of the other ranks."""

    at: GenerationId
    task: copying.Task
    code: str
    """of the parity that they write, as "8+2"; "" for other tasks"""
    parts: list[list[int]]
    """for each rank, the ranks that wrote the generation whose files are its part"""


class OtherRanks:
    """The other ranks of the job, as the coordinator asks them for their part (`copying.Others`).

    `ranks`: of the job. `place`: "front", or the position of the place among the lower ones. `front`: the place that
    each rank writes first; files that lie on one node only are the part of a rank there. `stop`: once it is true, no
    answer is waited for.
    """

    def __init__(self, ranks: RankGroup, place: str, front: Tier, stop: Stop = never) -> None:
        self._group, self._front = ranks, front
        self._requests = Requests(ranks, f"parts/{place}", range(1, ranks.size), stop)
        self._divided: tuple[GenerationId, list[list[int]]] | None = None

    def own_part(self, generation: Generation) -> Collection[int]:
        """The ranks that wrote the generation whose files are the part of this process."""
        return self._parts(generation)[self._group.rank]

    def packed_part(self, generation: Generation) -> Collection[int]:
        """The ranks that wrote the generation whose files this process puts into a pack."""
        return self._parts(generation, "pack")[self._group.rank]

    def confirm(self, generation: Generation, of: Collection[int], seconds: float, stop: Stop) -> bool:
        """As `copying.Others.confirm`. A rank that finds damage, cannot read, or does not answer confirms nothing."""
        try:
            parts = node_opening.parts(self._front, self._group, generation)
            parts = [[one for one in part if one in of] for part in parts]
            if parts[self._group.rank]:  # nobody else has these files
                return False
            self._requests.ask(Request(at=generation.id, task="read", code="", parts=parts))
            return not any(self._requests.answers(most_seconds=seconds, stop=stop))  # guard: finding-confirms-nothing
        except LastgoodError as error:
            if isinstance(error, Cancelled) and (stop() or self._group.abandoned.is_set()):
                raise
            return False

    def ask(self, generation: Generation, task: copying.Task, code: str = "") -> None:
        """Ask the other ranks to do their part. `code`: of the parity. Raises TierDown."""
        self._requests.ask(Request(at=generation.id, task=task, code=code, parts=self._parts(generation, task)))

    def answers(self) -> list[Finding]:
        """Wait until the other ranks have done what they were asked last; returns their findings.

        Raises as `Requests.answers`.
        """
        return msgspec.convert([one for answer in self._requests.answers() for one in answer], list[Finding])

    def end(self) -> None:
        """Tell the other ranks that nothing more is asked. Without a store they time out."""
        self._requests.end()

    def _parts(self, generation: Generation, task: copying.Task = "copy") -> list[list[int]]:
        """For each rank its part. Those of the ranks of a node are put together for a pack.

        They are divided once for each generation, so that what a copy adds to a node does not change whose part it is.
        """
        if self._divided is None or self._divided[0] != generation.id:
            self._divided = generation.id, node_opening.parts(self._front, self._group, generation)
        parts = self._divided[1]
        if task != "pack":
            return parts
        disks = self._front.nodes.leaders if isinstance(self._front, NodeDisks) else None
        return packed_parts(parts, [str(leader) for leader in disks] if disks else self._group.nodes)


class PartServer:
    """A rank other than the coordinator: a thread does this rank's part of what is asked for about one place.

    `tier`: the place. `place`: as for `OtherRanks`. `sources`: the places from which is copied. `workers`: threads that
    read and digest; `close` ends them.
    """

    def __init__(self, tier: Shared, place: str, sources: Sequence[Tier], ranks: RankGroup, workers: Workers) -> None:
        self._tier, self._sources, self._rank, self._workers = tier, sources, ranks.rank, workers
        self._agent = AgentWork(None) if not sources else agent_work.of(sources[0])
        self._reader = agent_work.of(tier) if place == FRONT else self._agent
        self._server = RequestServer(ranks, f"parts/{place}", self)

    def leave(self) -> None:
        """As `RequestServer.leave`."""
        self._server.leave()

    def close(self) -> None:
        """As `RequestServer.close`."""
        self._server.close()
        self._workers.shutdown()

    def served(self, request: Any, stop: Stop) -> list[Finding]:
        """Do what is asked for with this rank's part; returns the findings if it was read."""
        asked, target = msgspec.convert(request, Request), cast(Mendable, self._tier)
        mine = asked.parts[self._rank]
        if asked.task == "read" and not mine:
            return []
        generation = self._generation(asked)
        arena = Arena(EXAMINATION_CHUNKS * CHUNK_BYTES, CHUNK_BYTES)
        how = copying.Copying(arena, self._workers, stop=stop, agent=self._agent)
        if asked.task == "read":
            return self._reader.read_all(target, generation, how.arena, how.workers, how.stop, mine)
        self._tier.forget(layout.folder(asked.at))  # the coordinator may have deleted an earlier copy
        if asked.task == "pack":
            copying.pack_files(target, self._sources, generation, mine, how)
            return []
        if asked.task == "copy":
            copying.copy_files(target, self._sources, generation, mine, how)
            return []
        for rank in mine:
            protect_part(target, generation, rank, Code(*parity_layout.parsed(asked.code)), how)
        return []

    def _generation(self, asked: Request) -> Generation:
        """The generation as the first place has it in which its commit record can be read. What is read lies here; a
        source may be down."""
        places: list[Tier] = [self._tier, *self._sources] if asked.task == "read" else [*self._sources, self._tier]
        return commit.first_generation(places, asked.at)

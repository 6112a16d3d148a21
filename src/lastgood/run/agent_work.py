"""Bytes that the agent of a node reads, copies and repairs for the training process, whose processor the loop needs.

Only the work is the agent's. The training process decides what is done, waits for it, and writes every record; it holds
the locks of the places meanwhile. What the agent cannot do, the training process does itself.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Executor
from typing import Literal

from .. import reporting
from ..engine.arena import Arena
from ..errors import BeyondRepair, Damaged, NotWritable, RunReplaced, class_named
from ..format import layout
from ..io.reed_solomon import Code
from ..ports import Stop, Tier
from ..records import Finding, Generation
from . import agent_link, agent_messages, paths, reader
from .agent_link import PROTOCOL
from .agent_messages import Answer, Request, Work
from .reader import Reading

LIFE_SECONDS = 1.0
"""How long an agent that reads may take to say that it lives. A save may wait for the reading."""
BEYOND_REPAIR = f"{BeyondRepair.__name__}: "
"""how the error of a repair begins that parity does not suffice for"""


class AgentWork:
    """`own`: the memory of this node, or its disk; None: nothing is done by an agent."""

    def __init__(self, own: Tier | None) -> None:
        self._own = own
        self._folder = "" if own is None else paths.parsed(own.place).root
        self._failures = 0
        self._silent_until = 0.0
        """until when, by the monotonic clock, an agent that did not say that it lives is not asked to read"""
        self._may_hang = False

    def read_all(
        self,
        tier: Tier,
        generation: Generation,
        arena: Arena,
        workers: Executor,
        stop: Stop,
        of: Collection[int] | None = None,
    ) -> list[Finding]:
        """As `reader.read_all`, in memory or in a place below. `arena`, `workers`: where this process has to read."""
        answer = self._done("read", tier, generation, of, stop)
        return reader.read_all(tier, generation, arena, workers, stop, of=of) if answer is None else answer.findings

    def reading(
        self, tier: Tier, generation: Generation, bytes_per_second: float, here: Callable[[], Reading]
    ) -> Reading:
        """Begin a reading of all of a generation in a place below, at most at this rate, for a scrub.

        While it is paused the agent goes on. `here`: begins the same reading in this process, where the agent cannot.
        """
        if (own := self._own) is not None:  # guard: scrub-read-by-agent
            at, root, place = generation.id, generation.root, tier.place
            work = Work(at=at, root=root, task="scrub", place=place, of=None, bytes_per_second=bytes_per_second)
            answer = yield from self._asked(own, work)
            if answer is not None:
                return answer.findings
        return (yield from here())

    def copy(
        self,
        target: Tier,
        sources: Sequence[Tier],
        generation: Generation,
        of: Collection[int] | None,
        stop: Stop,
        task: Literal["copy", "pack"] = "copy",
    ) -> list[str] | None:
        """As `copying.copy_files` or `copying.pack_files`, from what lies on this node and from other places. Returns
        the names of the files, and None if this process has to do it.

        `of`: the ranks that wrote the files; None: all ranks. Raises Cancelled once `stop()` is true.
        """
        # guard: places-copied-from-by-agent
        others = [one.place for one in sources if self._own is not None and one.place != self._own.place]
        answer = self._done(task, target, generation, of, stop, others)
        return answer.written if answer is not None else None

    def repair(self, tier: Tier, generation: Generation, stop: Stop) -> list[str] | None:
        """As `parity.rebuild`, in a place below, with the parity that it has there. Returns the names of the files, and
        None if this process has to do it.

        Raises BeyondRepair, and Cancelled once `stop()` is true.
        """
        if self._own is None:
            return None
        at, root, order = generation.id, generation.root, getattr(tier, "order", 0)
        work = Work(at=at, root=root, task="repair", place=tier.place, of=None, order=order)
        answer = agent_link.waited_for(self._asked(self._own, work, tier), stop)
        if answer is not None and answer.error:
            raise BeyondRepair(answer.error.removeprefix(BEYOND_REPAIR))
        return answer.written if answer is not None else None

    def protect(self, tier: Tier, generation: Generation, rank: int, code: Code, stop: Stop) -> bool:
        """Write the parity of one rank's files in a place below, as `verify.protect_part`.

        Returns False if this process has to do it. Raises Cancelled once `stop()` is true.
        """
        if self._own is None:
            return False
        at, root, text = generation.id, generation.root, f"{code.data}+{code.parity}"
        order = getattr(tier, "order", 0)
        work = Work(at=at, root=root, task="protect", place=tier.place, of=[rank], code=text, order=order)
        return agent_link.waited_for(self._asked(self._own, work, tier), stop) is not None

    def end_hung(self) -> None:
        """Kill the agent if it was silent, and still is for ATTACH_SECONDS. No save in flight waits meanwhile."""
        if not self._may_hang or self._own is None:
            return
        self._may_hang, folder = False, self._folder
        # The next work raises the same error, which is reported.
        ignored = contextlib.suppress(OSError, ValueError, NotWritable)
        with ignored, contextlib.closing(agent_link.connected(folder)) as connection:
            try:
                agent_link.asked(connection, Request(protocol=PROTOCOL, call="status"))
                self._silent_until = 0.0
            except TimeoutError:
                agent_link.kill(connection)  # guard: hung-agent-killed-behind-saves
                reporting.warning(f"the agent of {folder}: {agent_link.ENDED}")

    def _done(
        self,
        task: agent_messages.Task,
        tier: Tier,
        generation: Generation,
        of: Collection[int] | None,
        stop: Stop,
        sources: Sequence[str] = (),
    ) -> Answer | None:
        own = self._own
        if own is None or (of is not None and not of):
            return None
        below = task == "read" and tier.place != own.place  # guard: place-below-read-by-agent
        if not (below or sources or _lies_in(own, generation, of)):
            return None
        # The agent has opened memory; a disk it opens anew, to read past the cache of the system.
        here = tier.place == own.place and paths.in_memory(own.place)
        ranks, place = None if of is None else sorted(of), "" if here else tier.place
        work = Work(at=generation.id, root=generation.root, task=task, place=place, of=ranks, sources=[*sources])
        return agent_link.waited_for(self._asked(own, work), stop)

    def _asked(self, own: Tier, work: Work, claimed: Tier | None = None) -> Generator[None, None, Answer | None]:
        """Let the agent do a work, as `agent_link.answering`. Returns None if this process has to do it, and an answer
        with an error only if nobody can: BeyondRepair. `claimed`: the place whose claim has the order of the work.

        An agent that is silent is not asked to read for ATTACH_SECONDS: a save may wait for that. See `end_hung`.
        """
        reads = work.task == "read"
        if reads and time.monotonic() < self._silent_until:  # guard: silent-agent-holds-no-save
            return None
        request = Request(protocol=PROTOCOL, call="work", work=work)
        try:
            life_seconds = LIFE_SECONDS if reads else None
            answer = yield from agent_link.answering(self._folder, request, not reads, life_seconds)
            error = answer.error
        except (FileNotFoundError, ConnectionError, NotWritable):
            return None  # there is no agent now, or another user's: `AgentLink.check` reports that, or starts one
        except TimeoutError as failure:
            self._silent_until = time.monotonic() + agent_link.ATTACH_SECONDS
            self._may_hang = self._may_hang or reads
            error = f"{type(failure).__name__}: {failure}"
        except (OSError, ValueError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        if not error or error.startswith(BEYOND_REPAIR):  # guard: irreparable-read-once
            return answer
        # guard: damage-is-no-agents-failure
        if work.sources and issubclass(class_named(error.partition(":")[0], NotWritable), Damaged):
            return None  # what it lacks may lie on other nodes
        if work.order < getattr(claimed, "order", 0) and error.startswith(f"{RunReplaced.__name__}: "):
            return None  # not another process has opened the run, but this one has begun an incarnation meanwhile
        self._failures += 1
        if reporting.is_reported(self._failures):
            reporting.warning(
                f"the agent of {self._folder} could not {work.task} {work.at} (time {self._failures}); this process "
                f"does it instead: {error}"
            )
        return None


def of(tier: Tier) -> AgentWork:
    """The agent of a place that this process writes first, if that is memory or a disk of the node: the latter has one
    where nodes keep copies or parity for each other. Slots have none."""
    own: Tier | None = getattr(tier, "own", None)  # of NodeDisks and NodeView, whose module needs this one
    # guard: node-disks-read-by-agent
    return AgentWork(None if own is None or own.newest_only else own)


def _lies_in(own: Tier, generation: Generation, of: Collection[int] | None) -> bool:
    """Whether the files of these ranks lie on this node. Others are read from where they lie."""
    here = own.list(layout.folder(generation.id))
    seals = [one for one in generation.commit.seals if of is None or one.rank in of]
    return all(one.manifest in here and layout.blob_name(one.rank) in here for one in seals)

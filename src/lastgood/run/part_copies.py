"""Work on a generation of several ranks in which each rank does its part: copies to a lower place, and parity.

    rank         key                message
    -----------  -----------------  ------------------------------------------------------------------------
    coordinator  PARTS/NUMBER       what the other ranks are asked to do (`Request`); None: nothing more comes
    any other    PARTS/NUMBER/RANK  the findings of its reading, or the error that kept it from an answer

PARTS is OPENING/parts/PLACE: the opening of the run, and the place, "front" or its position among the lower ones.

Invariants
  1. The coordinator does its own part as well: all ranks together work on every file. Only it writes COMMIT at the
     place, and only after all ranks have answered that their files are durable there (copying.complete).
  2. A rank that does not answer within its timeout fails the attempt. The next one asks under a new number, and finds
     what was done before.
  3. A rank serves requests until it receives None. Once it is being closed it waits no longer than for a verdict
     (coordination/rounds.py); after an exception in its loop it does not wait at all.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection
from typing import Any, cast

import msgspec

from ..coordination.rounds import RankGroup, decode_error, encode_error
from ..engine.arena import Arena
from ..errors import Cancelled, TierDown, TimedOut
from ..format import commit, layout, parity_layout
from ..io.reed_solomon import Code
from ..limits import CHUNK_BYTES, COORDINATOR_TIMEOUTS, EXAMINATION_CHUNKS
from ..policy.places import packed_parts
from ..ports import Mendable, Shared, Tier
from ..records import Finding, Generation, GenerationId, Record
from . import copying
from .reader import read_all
from .thread_pools import Workers
from .verify import Stop, never, protect_part, ranks_read_by

POLL_SECONDS = 0.2
"""How soon a rank that waits for a request notices that it is to end."""


class Request(Record, frozen=True, kw_only=True):
    """What the coordinator asks of the other ranks."""

    at: GenerationId
    task: copying.Task
    code: str
    """of the parity that they write, as "8+2"; "" for other tasks"""


class OtherRanks:
    """The other ranks of the job, as the coordinator asks them for their part (`copying.Others`).

    `ranks`: of the job. `place`: "front", or the position of the place among the lower ones. `stop`: once it is true,
    no answer is waited for.
    """

    def __init__(self, ranks: RankGroup, place: str, stop: Stop = never) -> None:
        self._group, self._stop, self._keys = ranks, stop, _keys(ranks, place)
        self._asked = 0
        self._asked_at = 0.0

    def own_part(self, generation: Generation) -> Collection[int]:
        """The ranks that wrote the generation whose files are the part of this process."""
        return ranks_read_by([self._group.rank], self._group, generation)

    def packed_part(self, generation: Generation) -> Collection[int]:
        """The ranks that wrote the generation whose files this process puts into a pack."""
        return _packed_part(self._group, generation)

    def ask(self, at: GenerationId, task: copying.Task, code: str = "") -> None:
        """Ask the other ranks to do their part. `code`: of the parity. Raises TierDown."""
        self._group.post(f"{self._keys}/{self._asked}", Request(at=at, task=task, code=code))
        self._asked, self._asked_at = self._asked + 1, time.monotonic()

    def answers(self) -> list[Finding]:
        """Wait until the other ranks have done what they were asked last; returns their findings.

        They have as much time again as this rank took for its own part, and the timeout between ranks. Raises the error
        of the first rank that failed, and TierDown if one does not answer in time.
        """
        group, number = self._group, self._asked - 1
        keys = [f"{self._keys}/{number}/{rank}" for rank in range(1, group.size)]
        seconds = group.timeout_seconds + time.monotonic() - self._asked_at
        try:
            posts = group.receive(keys, seconds, self._stop, POLL_SECONDS)
        except TimedOut as error:
            if self._stop():
                raise Cancelled("the copy was interrupted while other ranks made their part of it") from None
            silent = [rank for rank, key in enumerate(keys, 1) if not group.has(key)]
            raise TierDown(
                f"rank {silent[0] if silent else 1} has not done its part within {seconds:.0f} s",
                safe="The generation is kept where it was written.",
            ) from error
        group.delete([f"{self._keys}/{number}", *keys])
        for rank, post in enumerate(posts, 1):
            if "error" in post:  # guard: failed-part-fails-copy
                raise decode_error({**post, "what": f"rank {rank}: {post['what']}"})
        return msgspec.convert([one for post in posts for one in post["answer"]], list[Finding])

    def end(self) -> None:
        """Tell the other ranks that nothing more is asked. Without a store they time out."""
        with contextlib.suppress(TierDown):
            self._group.post(f"{self._keys}/{self._asked}", None)


class PartServer:
    """A rank other than the coordinator: a thread does this rank's part of what is asked for about one place.

    `tier`: the place. `place`: as for `OtherRanks`. `source`: the place from which is copied. `workers`: threads that
    read and digest; `close` ends them.
    """

    def __init__(self, tier: Shared, place: str, source: Tier, ranks: RankGroup, workers: Workers) -> None:
        self._tier, self._source, self._ranks, self._workers = tier, source, ranks, workers
        self._keys = _keys(ranks, place)
        self._left = threading.Event()
        self._closing_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="lastgood-drain")
        self._thread.start()

    def leave(self) -> None:
        """End after the request that is being served, or at its next chunk."""
        self._left.set()

    def close(self) -> None:
        """Serve requests until the coordinator ends them, then end the thread."""
        self._closing_since = time.monotonic()
        self._thread.join()
        self._workers.shutdown()

    # ---- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        number = 0
        while (asked := self._next(number)) is not None:
            try:
                post: dict[str, Any] = {"answer": msgspec.to_builtins(self._served(asked))}
            except Exception as error:  # noqa: BLE001 - the coordinator raises it
                post = encode_error(error)
            with contextlib.suppress(TierDown):  # the coordinator asks again
                self._ranks.post(f"{self._keys}/{number}/{self._ranks.rank}", post)
            number += 1
            if self._closing_since is not None:
                self._closing_since = time.monotonic()

    def _next(self, number: int) -> Request | None:
        """Wait for a request; None: this rank serves no more."""
        while not self._is_over():
            try:
                key = f"{self._keys}/{number}"
                (post,) = self._ranks.receive([key], self._ranks.timeout_seconds, self._is_over, POLL_SECONDS)
                return msgspec.convert(post, Request | None)
            except TimedOut:
                continue
            except TierDown:  # rank 0 may have ended
                self._left.wait(self._ranks.timeout_seconds / COORDINATOR_TIMEOUTS)
                if self._closing_since is not None:
                    return None
        return None

    def _is_over(self) -> bool:
        since, limit_seconds = self._closing_since, COORDINATOR_TIMEOUTS * self._ranks.timeout_seconds
        return self._left.is_set() or (since is not None and time.monotonic() - since > limit_seconds)

    def _served(self, asked: Request) -> list[Finding]:
        """Do what is asked for with this rank's part; returns the findings if it was read."""
        target = cast(Mendable, self._tier)
        at = target if asked.task == "protect" else self._source
        generation = commit.read_generation(at, asked.at, None)
        mine = ranks_read_by([self._ranks.rank], self._ranks, generation)
        how = copying.Copying(Arena(EXAMINATION_CHUNKS * CHUNK_BYTES, CHUNK_BYTES), self._workers, stop=self._is_over)
        if asked.task == "read":
            return read_all(target, generation, how.arena, how.workers, how.stop, of=mine)
        self._tier.forget(layout.folder(asked.at))  # the coordinator may have deleted an earlier copy
        if asked.task == "pack":
            part = _packed_part(self._ranks, generation)
            with copying.pack_files(target, [self._source], generation, part, how, with_manifests=False):
                return []
        if asked.task == "copy":
            copying.copy_files(target, [self._source], generation, mine, how)
            return []
        for rank in mine:
            protect_part(target, generation, rank, Code(*parity_layout.parsed(asked.code)), how)
        return []


def _packed_part(ranks: RankGroup, generation: Generation) -> list[int]:
    parts = [ranks_read_by([rank], ranks, generation) for rank in range(ranks.size)]
    return packed_parts(parts, ranks.nodes)[ranks.rank]


def _keys(ranks: RankGroup, place: str) -> str:
    return f"{ranks.opening}/parts/{place}"

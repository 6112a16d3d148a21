"""Ranks: how the processes of one job come to one answer, through a store, and never through a collective.

    every rank        posts what it has to say of a topic: an answer, or what kept it from one
    the coordinator   (rank 0) waits for all of them, decides, posts the verdict
    every rank        takes the verdict: an answer, or one error that names the rank and the cause

Invariants
  1. Whoever has a topic before it either answers or fails in it: nobody waits for a rank that has given up.
  2. Nobody waits longer than `patience_seconds` for the others, nor more than twice that for the coordinator; what the
     store itself may take to answer comes on top (train/agree.py).
  3. The coordinator reads each rank's post once and writes one verdict: O(ranks) work, whatever the size of the state.
Torch-free. Every thread has a client of the store of its own, since one that waits blocks it for all.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from .. import errors
from ..errors import LastgoodError, RankFailed, StateMismatch, TierDown, TimedOut
from ..ports import Store

PATIENCE_SECONDS = 120.0
LOOK_SECONDS = 1.0
"""between two looks at what was announced"""
COORDINATOR = 0


class Ranks:
    """One rank among `size`. `connect` makes a client of the store; `name` sets the topics of this run apart."""

    def __init__(
        self, rank: int, size: int, connect: Callable[[], Store], name: str, patience_seconds: float = PATIENCE_SECONDS
    ) -> None:
        self.rank, self.size, self.patience_seconds = rank, size, patience_seconds
        self._connect, self.name = connect, name
        self._clients = threading.local()
        self._numbers: dict[str, int] = {}
        self._old: list[str] = []
        self._lock = threading.Lock()

    @property
    def coordinates(self) -> bool:
        return self.rank == COORDINATOR

    def topic(self, kind: str) -> Topic:
        """The next of its kind. Every rank must come to the same ones in the same order."""
        with self._lock:
            number = self._numbers[kind] = self._numbers.get(kind, 0) + 1
        return Topic(self, f"{self.name}/{kind}/{number}")

    def agree(self, kind: str, mine: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """The next topic of its kind, in one round."""
        return self.topic(kind).agree(mine, decide)

    # ---- the store -----------------------------------------------------------------------------------------

    @property
    def _store(self) -> Store:
        client = getattr(self._clients, "store", None)
        if client is None:
            client = self._clients.store = self._connect()
        return client

    def post(self, key: str, said: Any) -> None:
        self._store.set(key, msgspec.json.encode(said))

    def hear(self, *keys: str, patience_seconds: float) -> list[Any]:
        """What was posted under each. Raises TimedOut."""
        return [msgspec.json.decode(one) for one in self._store.get(keys, patience_seconds)]

    def has(self, key: str) -> bool:
        return self._store.has(key)

    def forget(self, keys: Sequence[str]) -> None:
        """Of topics before the last but one, which everybody has left: what is posted is read once."""
        with self._lock:
            self._old += keys
            gone, self._old = self._old[: -4 * len(keys)], self._old[-4 * len(keys) :]
        if gone:
            with suppress(TierDown):  # they are in nobody's way, and what they were about has been settled
                self._store.delete(gone)


class Topic:
    """One thing to come to an answer about, in one or several rounds."""

    def __init__(self, ranks: Ranks, name: str) -> None:
        self._ranks, self._name = ranks, name
        self._round = 0
        self._over = False

    def agree(self, mine: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """A round: post an answer, take the verdict: what `decide(answers of all ranks, in order)` returns.

        It runs at the coordinator only. Raises what it raises there, and RankFailed, on all ranks.
        """
        return self._settle({"answer": mine}, decide)

    def fail(self, error: BaseException) -> None:
        """Post what kept this rank from the next answer: nobody waits for it, and the topic ends for all."""
        if self._over:
            return
        try:
            self._settle(told(error), lambda _: None)
        except LastgoodError:
            return  # that is what it was for

    @contextmanager
    def failing(self) -> Iterator[None]:
        """What is raised in here is posted: nobody waits for this rank."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def _settle(self, post: dict[str, Any], decide: Callable[[list[Any]], Any]) -> Any:
        ranks, key = self._ranks, f"{self._name}/{self._round}"
        self._round += 1
        verdict = f"{key}/verdict"
        try:
            if not ranks.coordinates:
                ranks.post(f"{key}/{ranks.rank}", post)
                (heard,) = ranks.hear(verdict, patience_seconds=2 * ranks.patience_seconds)
            else:
                heard = self._verdict(key, post, decide)
                ranks.post(verdict, heard)
                ranks.forget([verdict, *(f"{key}/{rank}" for rank in range(ranks.size))])
        except TimedOut as error:
            self._over = True
            raise RankFailed(
                f"rank {COORDINATOR} said nothing about {self._name} for {2 * ranks.patience_seconds:.0f} s",
                safe="Every committed generation is untouched.",
                todo="See why that process ended or hangs.",
            ) from error
        except TierDown:
            self._over = True  # nobody can be told of it, either
            raise
        if "error" in heard:
            self._over = True
            raise raised(heard)
        return heard["answer"]

    def _verdict(self, key: str, mine: dict[str, Any], decide: Callable[[list[Any]], Any]) -> dict[str, Any]:
        ranks, keys = self._ranks, [f"{key}/{rank}" for rank in range(1, self._ranks.size)]
        try:
            posts = [mine, *ranks.hear(*keys, patience_seconds=ranks.patience_seconds)]
        except TimedOut:
            silent = {"error": "TimedOut", "what": f"nothing was heard for {ranks.patience_seconds:.0f} s"}
            posts = [mine]
            for one in keys:
                posts += ranks.hear(one, patience_seconds=ranks.patience_seconds) if ranks.has(one) else [silent]
        failed = [(rank, post) for rank, post in enumerate(posts) if "error" in post]
        if failed:
            rank, post = failed[0]
            more = f" (and {len(failed) - 1} more ranks failed)" if len(failed) > 1 else ""
            return {**post, "what": f"rank {rank}: {post['what']}{more}"}
        try:
            return {"answer": decide([post["answer"] for post in posts])}
        except LastgoodError as error:
            return told(error)


class Announcements:
    """Steps at which all ranks are to do something, which no rank can know by itself: told some steps ahead.

    The coordinator tells them, on its own or because another rank has asked for it. Nobody waits: each rank looks every
    LOOK_SECONDS. One that has passed the step when it hears of it says so in the agreement about what was to be done,
    which then fails on all ranks; the next is told twice as far ahead.
    """

    def __init__(self, ranks: Ranks, kind: str, monotonic_seconds: Callable[[], float] = time.monotonic) -> None:
        self._ranks, self._now, self._name = ranks, monotonic_seconds, f"{ranks.name}/{kind}"
        self._heard = 0
        self._asked = False
        self._looked_at = monotonic_seconds()
        self._factor = 2.0
        self._last: tuple[int, float] | None = None
        self._begun: tuple[int, float] | None = None
        self.coming: int | None = None
        """the next of these steps"""

    def passed(self, n: int) -> None:
        """The loop is at step `n`."""
        now = self._now()
        if self._begun is None:
            self._begun = n, now
        self._last = n, now

    def announce(self, n: int) -> None:
        """At the coordinator, at step `n`: it is due."""
        if self.coming is not None:
            return
        assert self._begun is not None and self._last is not None
        steps, seconds = self._last[0] - self._begun[0], self._last[1] - self._begun[1]
        ahead = self._factor * LOOK_SECONDS * steps / seconds if seconds > 0 else 1.0
        # Where a step takes longer than that, every rank looks in each, and hears of the next one in time.
        self.coming = n + max(math.ceil(ahead), 1) + (ahead > 1 or steps == 0)
        self._ranks.post(f"{self._name}/{self._heard}", self.coming)
        self._heard += 1

    def ask(self) -> None:
        """At any other rank: it is due."""
        if not self._asked:
            self._asked = True
            self._ranks.post(f"{self._name}/asked", self._ranks.rank)

    def look(self, n: int) -> None:
        """Whether something was told; at the coordinator, whether something was asked for."""
        now = self._now()
        if self.coming is not None or now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        if self._ranks.coordinates:
            if self._ranks.has(f"{self._name}/asked"):
                self.announce(n)
            return
        key = f"{self._name}/{self._heard}"
        if self._ranks.has(key):
            self.coming = int(*self._ranks.hear(key, patience_seconds=self._ranks.patience_seconds))
            self._heard += 1

    def over(self) -> None:
        """It has begun, or its step was passed."""
        self.coming = None

    def further(self) -> None:
        """A rank had passed the last one: they are told twice as far ahead from now on."""
        self._factor *= 2


def told(error: BaseException) -> dict[str, Any]:
    """An error as it is posted."""
    what = error.what if isinstance(error, LastgoodError) else f"{type(error).__name__}: {error}"
    safe, todo = (error.safe, error.todo) if isinstance(error, LastgoodError) else ("", "")
    return {"error": type(error).__name__, "what": what, "safe": safe, "todo": todo}


def raised(post: dict[str, Any]) -> LastgoodError:
    """The error that was posted, of its own class where that takes no more than words."""
    kind = getattr(errors, post["error"], None)
    if not (isinstance(kind, type) and issubclass(kind, LastgoodError)) or kind is StateMismatch:
        kind = RankFailed
    return kind(post["what"], safe=post.get("safe", ""), todo=post.get("todo", ""))

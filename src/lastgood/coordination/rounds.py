"""Ranks: how the processes of one job come to one answer, through a store, and never through a collective.

    every rank        posts what it has to say of a topic: an answer, or what kept it from one
    the coordinator   (rank 0) waits for all of them, decides, posts the verdict
    every rank        takes the verdict: an answer, or one error that names the rank and the cause

Invariants
  1. Whoever has a topic before it either answers or fails in it: nobody waits for a rank that has given up.
  2. Nobody waits longer than `patience_seconds` for the others, nor more than twice that for the coordinator; what the
     store itself may take to answer comes on top (ranks/torch_store.py).
  3. A topic of a step has its name from the step: a rank that leaves one out fails that one, and meets the others in
     the next. Who has begun a later one is not waited for in an earlier.
  4. The coordinator reads each rank's post once and writes one verdict: O(ranks) work, whatever the size of the state.
Torch-free.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from .. import errors
from ..errors import Cancelled, LastgoodError, RankFailed, StateMismatch, StepDiffers, TierDown, TimedOut
from ..ports import Store

PATIENCE_SECONDS = 120.0
COORDINATOR = 0
REMEMBERED = 128
"""steps that a rank tells it has begun, and verdicts that are kept: more than saves can be in flight"""


class Posts:
    """What is posted in a store, from any thread. Raises TierDown where the store is."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def post(self, key: str, said: Any) -> None:
        self.post_all({key: said})

    def post_all(self, posts: Mapping[str, Any]) -> None:
        """What is said under each key, in one message."""
        self._store.set({key: msgspec.json.encode(said) for key, said in posts.items()})

    def hear(self, keys: Sequence[str], seconds: float, no_use: Callable[[], bool] = lambda: False) -> list[Any]:
        """What was posted under each. Raises TimedOut, also when waiting is of no use any more."""
        return [msgspec.json.decode(one) for one in self._store.get(keys, seconds, no_use)]

    def heard(self, key: str) -> Any | None:
        """What was posted; None where nothing was."""
        return self.hear([key], PATIENCE_SECONDS)[0] if self.has(key) else None

    def has(self, *keys: str) -> bool:
        """Whether something was posted under each."""
        return self._store.has(keys)

    def delete(self, keys: Sequence[str]) -> None:
        with suppress(TierDown):  # they are in nobody's way, and what they were about has been settled
            self._store.delete(keys)


class Ranks(Posts):
    """One rank among `size`. `name` sets the topics of this run apart; `brief` answers soon, or not at all."""

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        name: str,
        patience_seconds: float = PATIENCE_SECONDS,
        brief: Store | None = None,
    ) -> None:
        super().__init__(store)
        self.rank, self.size, self.patience_seconds = rank, size, patience_seconds
        self.brief = Posts(brief or store)
        """for who must not be held up"""
        self.rewound = 0
        """restores so far, as rank 0 counts them"""
        self.left = threading.Event()
        """nobody waits for anything any more"""
        self._name = name
        self._numbers: dict[str, int] = {}
        self._begun: dict[str, list[int]] = {}
        self._verdicts: list[str] = []
        self._lock = threading.Lock()

    @property
    def coordinates(self) -> bool:
        return self.rank == COORDINATOR

    @property
    def name(self) -> str:
        """Of all that is about steps since the last rewind."""
        return f"{self._name}/{self.rewound}"

    def rewind(self, number: int) -> None:
        """Steps and topics begin again: what was said before reaches nobody any more."""
        with self._lock:
            self.rewound = number  # guard: rewind-starts-new-topics
            self._begun.clear()

    def topic(self, kind: str, lasting: bool = False) -> Topic:
        """The next of its kind since the last rewind (`lasting`: of all). Every rank must come to the same ones in the
        same order."""
        with self._lock:
            name = f"{self._name if lasting else self.name}/{kind}"
            number = self._numbers[name] = self._numbers.get(name, 0) + 1
        return Topic(self, f"{name}/{number}")

    def at(self, kind: str, step: int) -> Topic:
        """What all ranks come to at `step`: the next try of it."""
        with self._lock:
            begun = self._begun[kind] = [*self._begun.get(kind, ())[1 - REMEMBERED :], step]
        # guard: topic-named-by-step
        return Topic(self, f"{self.name}/{kind}/{step}/{begun.count(step)}", f"{self.name}/{kind}/begun", tuple(begun))

    def agree(self, kind: str, mine: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """The next topic of its kind, in one round."""
        return self.topic(kind).agree(mine, decide)

    def forget(self, verdict: str) -> None:
        """It may still be on its way to somebody: it is deleted when many others have followed."""
        with self._lock:
            self._verdicts.append(verdict)
            gone, self._verdicts = self._verdicts[:-REMEMBERED], self._verdicts[-REMEMBERED:]
        if gone:
            self.delete(gone)  # guard: old-verdicts-deleted


class Topic:
    """One thing to come to an answer about, in one or several rounds. `begun`: of a step, all that this rank began of
    its kind, this one last; told to others under `series`."""

    def __init__(self, ranks: Ranks, name: str, series: str = "", begun: Sequence[int] = ()) -> None:
        self._ranks, self._name, self._series, self._begun = ranks, name, series, begun
        self._round = 0
        self._over = False

    @property
    def again(self) -> bool:
        """Whether this rank has tried this step before."""
        return self._begun.count(self._begun[-1]) > 1 if self._begun else False

    def agree(self, mine: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """A round: post an answer, take the verdict: what `decide(answers of all ranks, in order)` returns.

        It runs at the coordinator only. Raises what it raises there, RankFailed and StepDiffers, on all ranks.
        """
        return self._settle({"answer": mine}, decide)

    def fail(self, error: BaseException) -> None:
        """Post what kept this rank from the next answer: nobody waits for it, and the topic ends for all.

        The coordinator returns when all the others have posted too.
        """
        if self._over:
            return
        with suppress(LastgoodError):  # that is what it was for; who cannot be told finds out by waiting
            if self._ranks.coordinates:
                self._settle(told(error), lambda _: None)
            else:
                self._over = True
                self._ranks.post(f"{self._name}/{self._round}/{self._ranks.rank}", told(error))

    @contextmanager
    def failing(self) -> Iterator[None]:
        """What is raised in here is posted: nobody waits for this rank."""
        try:
            yield
        except BaseException as error:
            self.fail(error)  # guard: rank-failure-posted
            raise

    def _settle(self, post: dict[str, Any], decide: Callable[[list[Any]], Any]) -> Any:
        ranks, key = self._ranks, f"{self._name}/{self._round}"
        try:
            if self._begun and not self._round:
                ranks.post(f"{self._series}/{ranks.rank}", self._begun)
            self._round += 1
            verdict = self._given(key, post, decide) if ranks.coordinates else self._taken(key, post)
        except (Cancelled, RankFailed, StepDiffers, TierDown):
            self._over = True  # where the store is gone nobody can be told of it, either
            raise
        if "error" in verdict:
            self._over = True
            raise raised(verdict)
        return verdict["answer"]

    def _given(self, key: str, mine: dict[str, Any], decide: Callable[[list[Any]], Any]) -> dict[str, Any]:
        """The verdict that the coordinator comes to, and posts."""
        ranks, posts = self._ranks, self._posts(key)
        try:
            verdict = self._verdict([mine, *(posts[rank] for rank in range(1, ranks.size))], decide)
        except Exception as error:  # a bug, or no memory: nobody waits for it
            self._over = True
            ranks.post(f"{key}/verdict", told(error))  # guard: verdict-failure-posted
            raise
        ranks.post(f"{key}/verdict", verdict)
        ranks.forget(f"{key}/verdict")
        if failed := [f"{key}/{rank}" for rank, one in posts.items() if "error" in one]:
            ranks.delete(failed)  # who fails waits for no verdict
        return verdict

    def _taken(self, key: str, mine: dict[str, Any]) -> dict[str, Any]:
        """The verdict that another rank hears, once it has posted its own."""
        ranks, seconds = self._ranks, 2 * self._ranks.patience_seconds
        ranks.post(f"{key}/{ranks.rank}", mine)
        elsewhere = ""

        def no_use() -> bool:
            nonlocal elsewhere
            elsewhere = self._elsewhere(COORDINATOR)  # guard: coordinator-in-other-step-detected
            return bool(elsewhere) or ranks.left.is_set()

        try:
            (verdict,) = ranks.hear([f"{key}/verdict"], seconds, no_use)
        except TimedOut:
            safe = "Every committed generation is untouched."
            if ranks.left.is_set():
                raise Cancelled("the run was let go of", safe=safe) from None
            if elsewhere:
                raise StepDiffers(f"rank {COORDINATOR} {elsewhere}", safe=safe) from None
            raise RankFailed(
                f"rank {COORDINATOR} said nothing about {self._name} for {seconds:.0f} s",
                safe=safe,
                todo="See why that process ended or hangs.",
            ) from None
        # guard: read-posts-deleted
        ranks.delete([f"{key}/{ranks.rank}"])  # it has been read
        return dict(verdict)

    def _posts(self, key: str) -> dict[int, dict[str, Any]]:
        """What all others have posted; of those that have not, why."""
        ranks, found = self._ranks, dict[int, dict[str, Any]]()
        until = time.monotonic() + ranks.patience_seconds

        def no_use() -> bool:
            before = len(found)
            for rank in missing:
                if elsewhere := self._elsewhere(rank):  # guard: rank-in-other-step-detected
                    found[rank] = {"error": "StepDiffers", "what": elsewhere}
            return len(found) > before or ranks.left.is_set()

        while missing := [rank for rank in range(1, ranks.size) if rank not in found]:
            before, left = len(found), max(until - time.monotonic(), 0.0)
            try:
                posts = ranks.hear([f"{key}/{rank}" for rank in missing], left, no_use)
                found |= dict(zip(missing, posts, strict=True))
            except TimedOut:
                if len(found) == before:
                    if ranks.left.is_set():
                        raise Cancelled("the run was let go of") from None
                    silent = {"error": "TimedOut", "what": f"nothing was heard for {ranks.patience_seconds:.0f} s"}
                    found |= {rank: ranks.heard(f"{key}/{rank}") or silent for rank in missing}
        return found

    def _elsewhere(self, rank: int) -> str:
        """Why `rank` will not come to this step any more; nothing where it may."""
        begun = None
        with suppress(TierDown):  # then it is waited for
            begun = self._ranks.brief.heard(f"{self._series}/{rank}") if self._begun else None
        if begun is None or self._begun[-1] in begun or max(begun) < self._begun[-1]:  # guard: slow-rank-still-awaited
            return ""
        return f"has come to step {max(begun)}, without step {self._begun[-1]}"

    def _verdict(self, posts: Sequence[dict[str, Any]], decide: Callable[[list[Any]], Any]) -> dict[str, Any]:
        failed = [(rank, post) for rank, post in enumerate(posts) if "error" in post]
        if failed:  # guard: one-failure-fails-all
            rank, post = failed[0]
            more = f" (and {len(failed) - 1} more ranks failed)" if len(failed) > 1 else ""
            return {**post, "what": f"rank {rank}: {post['what']}{more}"}  # guard: failed-rank-named
        try:
            return {"answer": decide([post["answer"] for post in posts])}
        except LastgoodError as error:
            return told(error)


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

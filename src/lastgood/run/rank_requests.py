"""Requests of the coordinator to other ranks, which a thread of each of them serves: one request after another.

    rank         key                  message
    -----------  -------------------  --------------------------------------------------------------------------
    coordinator  REQUESTS/NUMBER      a random nonce and a request; None: nothing more comes
    any other    REQUESTS/NONCE/RANK  the answer, or the error that kept this rank from it

REQUESTS is OPENING/KIND/SUBJECT: the opening of the run, and what the requests are about. What they ask for is defined
elsewhere (part_copies.py, node_disks.py).

Invariants
  1. Every server receives every request, in the order in which the coordinator has made them.
  2. A rank that does not answer within its timeout fails the request. The next request has a new number.
     An answer belongs to one request: one that was posted late, after the store seemed to be down, answers no other.
  3. A rank serves requests until it receives None. Once it is being closed it waits no longer than for a verdict
     (coordination/rounds.py), and not for a store that cannot be reached; after an exception in its loop it does not
     wait at all.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from ..coordination.rounds import RankGroup, decode_error, encode_error
from ..errors import Cancelled, LastgoodError, TierDown, TimedOut
from ..limits import COORDINATOR_TIMEOUTS
from ..ports import Stop, never
from ..records import Record
from .thread_pools import interpreter_is_ending

T = TypeVar("T")
POLL_SECONDS = 0.2
"""How soon a rank that waits for a request notices that it is to end."""
IDLE_SECONDS = 20 * 86_400.0
"""How long one call to the store waits for a request. torch's client logs two lines for each wait that runs out, which
a job would repeat for as long as it runs; it takes at most 24 days."""
POLLS_OF_A_WAIT = 4
"""How often in a timeout between ranks it asks whether the request is there: who has asked waits for one timeout."""
SUCCESSOR_POLL_SECONDS = 1.0
"""How often a rank that serves a request polls for the next one, which shows that nobody waits for this one."""


class Requests:
    """The coordinator's side. Used by one thread at a time.

    `ranks`: of the job. `subject`: KIND/SUBJECT of the keys. `servers`: the ranks that answer. `stop`: once it is true,
    no answer is waited for (default: never); nor once the ranks are abandoned.
    """

    def __init__(self, ranks: RankGroup, subject: str, servers: Sequence[int], stop: Stop = never) -> None:
        self._group, self._servers, self._stop = ranks, servers, stop
        self._keys = f"{ranks.opening}/{subject}"
        self._asked = 0
        self._asked_at = 0.0
        self._nonce = ""
        self._is_unsure = False
        """whether the last request may be in the store although posting it failed"""

    def ask(self, request: Record) -> None:
        """Post a request. Raises TierDown."""
        key = f"{self._keys}/{self._asked}"
        if self._is_unsure and self._group.has(key):
            self._asked += 1
            key = f"{self._keys}/{self._asked}"
        self._nonce, self._asked_at, self._is_unsure = secrets.token_hex(8), time.monotonic(), True
        self._group.post(key, {"nonce": self._nonce, "request": request})
        self._asked, self._is_unsure = self._asked + 1, False

    def answers(self, least_seconds: float = 0.0, most_seconds: float | None = None, stop: Stop = never) -> list[Any]:
        """Wait for the answers to the last request; returns them in the order of the servers.

        A rank has as much time as this process took since the request, and the timeout between ranks in addition; at
        least `least_seconds` (default 0), or just `most_seconds` (None: no such limit).
        Raises the error of the first rank that failed, TierDown if one does not answer in time, and Cancelled once
        `stop()` is true.
        """
        group, number = self._group, self._asked - 1
        keys = [f"{self._keys}/{self._nonce}/{rank}" for rank in self._servers]  # guard: answer-belongs-to-its-request
        seconds = max(group.timeout_seconds + time.monotonic() - self._asked_at, least_seconds)
        if most_seconds is not None:
            seconds = most_seconds

        def is_stopped() -> bool:
            return self._is_stopped() or stop()

        try:
            posts = group.receive(keys, seconds, is_stopped, POLL_SECONDS)
        except TimedOut as error:
            if is_stopped():
                raise Cancelled("the work was interrupted while other ranks did their part of it") from None
            silent = [rank for rank, key in zip(self._servers, keys, strict=True) if not group.has(key)]
            raise TierDown(
                f"rank {(silent or self._servers)[0]} has not done its part within {seconds:.0f} s",
                safe="Every committed generation is untouched.",
            ) from error
        group.delete([f"{self._keys}/{number}", *keys])
        for rank, post in zip(self._servers, posts, strict=True):
            if "error" in post:  # guard: failed-part-fails-copy
                raise decode_error({**post, "what": f"rank {rank}: {post['what']}"})
        return [post["answer"] for post in posts]

    def _is_stopped(self) -> bool:
        return self._group.abandoned.is_set() or self._stop()  # guard: abandoned-rank-answers-nothing

    def end(self) -> None:
        """Tell the servers that nothing more is asked. Without a store they time out."""
        with contextlib.suppress(TierDown):
            self._group.post(f"{self._keys}/{self._asked}", None)


def ask_all(
    requests: Requests, request: Record, here: Callable[[], T], least_seconds: float = 0.0
) -> tuple[T, list[Any]]:
    """Let all servers answer a request while this process does its own part, `here`. Returns what both returned.

    Answers are waited for in any case, so that the next request finds the servers idle. Raises the error of this
    process, or the first one of another. `least_seconds`: as for `Requests.answers`.
    """
    requests.ask(request)
    try:
        own = here()
    except BaseException:
        with contextlib.suppress(LastgoodError):  # guard: own-error-of-copies-first
            requests.answers(least_seconds)
        raise
    return own, requests.answers(least_seconds)


class Service(Protocol):
    """What a `RequestServer` serves."""

    def served(self, request: Any, stop: Stop) -> Any:
        """Do what is asked for, and return the answer as a record or a builtin type. Any error is an answer too.

        `stop`: once it is true, the work is to end with Cancelled.
        """


class RequestServer:
    """A rank other than the coordinator: a thread answers the requests about one subject. Begins at once.

    `ranks`, `subject`: as for `Requests`. `service`: answers them.
    """

    def __init__(self, ranks: RankGroup, subject: str, service: Service) -> None:
        self._ranks, self._service = ranks, service
        self._keys = f"{ranks.opening}/{subject}"
        self._left, self._ending = threading.Event(), threading.Event()
        self._closing_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="lastgood-serve")
        self._thread.start()

    def leave(self) -> None:
        """End after the request that is being served, or as soon as it can be interrupted."""
        self._left.set()
        self._ending.set()

    def close(self) -> None:
        """Serve requests until the coordinator ends them, then end the thread."""
        self._closing_since = time.monotonic()
        self._ending.set()
        self._thread.join()

    # ---- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        number = 0
        while (asked := self._next(number)) is not None:
            try:
                # Once the next request is there, the coordinator has given this one up.
                stop = self._stop_once_there(number + 1, SUCCESSOR_POLL_SECONDS)
                answer = self._service.served(asked["request"], stop)
                post: dict[str, Any] = {"answer": msgspec.to_builtins(answer)}
            except Exception as error:  # noqa: BLE001 - the coordinator raises it
                post = encode_error(error)
            with contextlib.suppress(TierDown):  # the coordinator asks again
                self._ranks.post(f"{self._keys}/{asked['nonce']}/{self._ranks.rank}", post)
            number += 1
            if self._closing_since is not None:
                self._closing_since = time.monotonic()

    def _stop_once_there(self, number: int, poll_seconds: float) -> Stop:
        """Is true once this rank serves no more, or once this request is in the store, which is asked so often."""
        polled_at = time.monotonic()

        def stop() -> bool:
            nonlocal polled_at
            now = time.monotonic()
            if self._is_over() or now - polled_at < poll_seconds:
                return self._is_over()
            polled_at = now
            try:
                return self._ranks.quick.has(f"{self._keys}/{number}")  # guard: abandoned-request-ends
            except TierDown:
                if self._ending.is_set():  # guard: cut-off-store-ends-closing
                    self._left.set()
                return self._is_over()

        return stop

    def _next(self, number: int) -> Any:
        """Wait for a request; None: this rank serves no more."""
        while not self._is_over():
            # A request that is there, and for which this call still waits, is one whose connection was lost.
            missed = self._stop_once_there(number, self._ranks.timeout_seconds / POLLS_OF_A_WAIT)
            try:
                keys = [f"{self._keys}/{number}"]
                (post,) = self._ranks.receive(keys, IDLE_SECONDS, missed, POLL_SECONDS)  # guard: lost-wait-renewed
                return post
            except TimedOut:
                continue
            except TierDown:  # rank 0 may have ended, and the store with it
                # guard: lost-store-ends-closing
                if self._ending.wait(self._ranks.timeout_seconds / COORDINATOR_TIMEOUTS):
                    return None
        return None

    def _is_over(self) -> bool:
        since, limit_seconds = self._closing_since, COORDINATOR_TIMEOUTS * self._ranks.timeout_seconds
        if interpreter_is_ending():  # the run was never closed
            return True
        return self._left.is_set() or (since is not None and time.monotonic() - since > limit_seconds)

"""Agreement rounds: the ranks of a job reach one decision through a key-value store, without any collective.

    no.   rank           key                    message
    ----  -------------  ---------------------  -----------------------------------------------------------------
    1     every other    TOPIC/ROUND/RANK       its answer, or the error that kept it from an answer
    2     coordinator    TOPIC/ROUND/verdict    the decision from all answers, or one error that names rank and cause
    3     every other    -                      receives the verdict, then deletes its own message

TOPIC is RUN/RESTORES/KIND/NUMBER, or RUN/RESTORES/KIND/STEP/ATTEMPT for a topic of a step. RUN is unique to one opening
of the run (rendezvous.py), RESTORES counts the restores since then. The coordinator is rank 0. It decides in its
own process, so it posts no answer. In a topic of a step every rank, including the coordinator, publishes the steps that
it has begun before its first answer, under RUN/RESTORES/KIND/steps/RANK.

Invariants
  1. A rank that begins a topic posts an answer or an error in it, so no rank waits for one that has given up.
  2. The coordinator waits `timeout_seconds` for the other ranks. These wait COORDINATOR_TIMEOUTS times as long for its
     verdict. The store may add its own timeout to each call (ranks/torch_store.py). At a barrier each rank says that it
     is at work, and is then waited for without a limit.
  3. A rank that posts nothing in time fails the round on all ranks, with TimedOut. Without a verdict in time the
     waiting rank raises RankFailed.
  4. The name of a topic of a step contains the step. So a rank that skips a step fails that step only, and agrees with
     the others in the next one. A rank that has begun a later step is not waited for in an earlier one: StepDiffers.
  5. The coordinator reads one message of each rank and writes one verdict: O(ranks) work, whatever the size of the
     state. It deletes a verdict once VERDICT_HISTORY newer ones exist, because some rank may not have read it before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from .. import errors, reporting
from ..errors import Cancelled, Damaged, LastgoodError, RankFailed, Refused, StepDiffers, TierDown, TimedOut
from ..limits import (
    COORDINATOR_TIMEOUTS,
    QUICK_STORE_SECONDS,
    RANK_TIMEOUT_SECONDS,
    STEP_HISTORY,
    VERDICT_HISTORY,
)
from ..ports import Store
from ..units import plural

COORDINATOR = 0
DELETED_POLL_SECONDS = 0.2
"""How soon a rank that reads a message notices that it was deleted."""
ALL_CALL = "Call restore(), step() and save() on every rank, not only on rank 0. Else find out why that process hangs."
"""the remedy where a rank has posted nothing"""


class MessageStore:
    """Messages under keys of a `ports.Store`, encoded as JSON.

    Every method may be called from any thread. All but `delete` raise TierDown where the store cannot be reached.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def post(self, key: str, message: Any) -> None:
        self.post_all({key: message})

    def post_all(self, messages: Mapping[str, Any]) -> None:
        """Post a message under each key, in one call to the store."""
        self._store.set({key: msgspec.json.encode(message) for key, message in messages.items()})

    def receive(
        self,
        keys: Sequence[str],
        timeout_seconds: float,
        cancelled: Callable[[], bool] = lambda: False,
        poll_seconds: float | None = None,
    ) -> list[Any]:
        """Wait for a message under each key. Raises TimedOut, also once `cancelled()` is true.

        `poll_seconds`: the pause between two calls of `cancelled`; None: growing pauses.
        """
        return [msgspec.json.decode(one) for one in self._store.get(keys, timeout_seconds, cancelled, poll_seconds)]

    def post_bytes(self, key: str, data: bytes) -> None:
        """Post bytes that are no JSON."""
        self._store.set({key: data})

    def receive_bytes(self, keys: Sequence[str], timeout_seconds: float) -> list[bytes]:
        """Wait for bytes under each key. Raises TimedOut."""
        return self._store.get(keys, timeout_seconds)

    def read(self, key: str) -> Any | None:
        """The message under the key; None if there is none yet, if it is deleted meanwhile, or if the store does not
        return it within QUICK_STORE_SECONDS."""
        if not self.has(key):
            return None
        try:
            # A store only waits for keys: one that another rank deletes now would be waited for.
            (data,) = self._store.get([key], QUICK_STORE_SECONDS, lambda: not self.has(key), DELETED_POLL_SECONDS)
        except TimedOut:
            return None  # guard: deleted-message-not-awaited
        # torch's store answers with nothing for a key that was deleted after it had waited for it.
        return msgspec.json.decode(data) if data else None

    def has(self, *keys: str) -> bool:
        """Whether there is a message under every one of these keys."""
        return self._store.has(keys)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete messages that nobody reads any more. Where the store cannot be reached, they stay."""
        with suppress(TierDown):  # a message that stays does no harm: its topic has ended
            self._store.delete(keys)


class RankGroup(MessageStore):
    """This process as one of the `size` ranks that have a run open.

    `name` starts all keys of this opening of the run. `timeout_seconds` is how long a rank is waited for. `quick` is a
    store whose calls end soon, with TierDown if necessary; default: `store`. `nodes`: the name of each rank's node;
    empty (the default) if they are not known. `abandoned`: the event of that name, which `store` knows too; None (the
    default): a new one, which it does not.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        name: str,
        timeout_seconds: float = RANK_TIMEOUT_SECONDS,
        quick: Store | None = None,
        nodes: Sequence[str] = (),
        abandoned: threading.Event | None = None,
    ) -> None:
        super().__init__(store)
        self.nodes = nodes
        self.rank, self.size, self.timeout_seconds = rank, size, timeout_seconds
        self.quick = MessageStore(quick or store)
        """the same messages, for callers that must not be blocked for long: the training thread, and polls in a wait"""
        self.restore_count = 0
        """restores since the run was opened, as the coordinator counts them"""
        self.closed = threading.Event()
        """set when the run is closed: every wait ends with Cancelled"""
        self.abandoned = abandoned or threading.Event()
        """set when another rank has died, and this one leaves: neither ranks nor their store are waited for any more"""
        self.opening = name
        """starts all keys of this opening of the run"""
        self._topic_counts: dict[str, int] = {}
        self._steps: dict[str, list[int]] = {}
        self._old_keys: list[str] = []
        self._lock = threading.Lock()

    @property
    def is_coordinator(self) -> bool:
        return self.rank == COORDINATOR

    @property
    def name(self) -> str:
        """The start of all keys that belong to steps since the last restore."""
        return f"{self.opening}/{self.restore_count}"

    def begin_restore(self, restore_count: int) -> None:
        """Begin topics and steps again after a restore: messages from before it have other keys and are not read."""
        with self._lock:
            self.restore_count = restore_count  # guard: rewind-starts-new-topics
            self._steps.clear()

    def topic(self, kind: str, across_restores: bool = False) -> Topic:
        """The next topic of its kind since the last restore, or since the run was opened with `across_restores`.

        Topics pair up by their number, so every rank must begin the same topics of a kind in the same order.
        """
        with self._lock:
            name = f"{self.opening if across_restores else self.name}/{kind}"
            number = self._topic_counts[name] = self._topic_counts.get(name, 0) + 1
        return Topic(self, f"{name}/{number}")

    def step_topic(self, kind: str, step: int) -> Topic:
        """The topic of this kind for a step. A second call for the same step is a retry, with a topic of its own."""
        with self._lock:
            steps = self._steps[kind] = [*self._steps.get(kind, ())[1 - STEP_HISTORY :], step]
        # guard: topic-named-by-step
        return Topic(self, f"{self.name}/{kind}/{step}/{steps.count(step)}", f"{self.name}/{kind}/steps", tuple(steps))

    def agree(self, kind: str, mine: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Agree in one round of the next topic of this kind. See `Topic.agree`."""
        return self.topic(kind).agree(mine, decide)

    def delete_later(self, key: str) -> None:
        """Register a message that every rank reads once, and delete all but the VERDICT_HISTORY newest of these.

        No rank acknowledges such a message, so it stays until no rank can be so far behind.
        """
        with self._lock:
            self._old_keys.append(key)
            expired, self._old_keys = self._old_keys[:-VERDICT_HISTORY], self._old_keys[-VERDICT_HISTORY:]
        if expired:
            self.delete(expired)  # guard: old-verdicts-deleted


class Topic:
    """One subject on which all ranks agree, in one or several rounds.

    `name` starts the keys of its messages. A topic of a step also has `steps`: all steps that this rank has begun for
    this kind of topic, its own step last. They are published under `steps_key`, so that other ranks learn which steps
    this rank has skipped.
    """

    def __init__(self, ranks: RankGroup, name: str, steps_key: str = "", steps: Sequence[int] = ()) -> None:
        self._ranks, self._name, self._steps_key, self.steps = ranks, name, steps_key, steps
        self._round = 0
        self._ended = False

    @property
    def is_retry(self) -> bool:
        """Whether this rank has begun a topic of the same step before."""
        return self.steps.count(self.steps[-1]) > 1 if self.steps else False

    def agree(self, mine: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Post this rank's answer and return the verdict, which is `decide(answers)` with the answers in rank order.

        `decide` runs at the coordinator only, which keeps its own answer. On all ranks this raises the LastgoodError
        that `decide` raises (RankFailed for one that cannot be made from texts, as StateMismatch), or one that names a
        rank that failed, timed out or skipped the step. Raises RankFailed where the coordinator publishes
        no verdict in time, TierDown where the store cannot be reached, Cancelled when the run is closed.
        """
        return self._run_round({"answer": mine}, decide)

    @contextmanager
    def barrier(self) -> Iterator[None]:
        """A block with a barrier at its end, which waits for each rank however long that takes. All ranks enter it.

        A thread tells the other ranks meanwhile that this one is at work. An Exception of the block fails the topic on
        all ranks, once all have left their blocks; of several, all ranks raise that of the first. Raises as `agree`.
        """
        left, failed = threading.Event(), list[BaseException]()

        def accompany() -> None:
            rounds, everyone = 0, False
            while not everyone:
                done = left.wait(self._ranks.timeout_seconds / 3)  # guard: slow-rank-not-given-up
                if failed and not isinstance(failed[0], Exception):
                    self.fail(failed[0])  # Ctrl-C waits for nobody
                    return
                rounds += 1
                everyone = self.agree([done, encode_error(failed[0]) if failed else None], self._decided_at(rounds))

        with ThreadPoolExecutor(1, "lastgood-barrier") as thread:
            try:
                job = thread.submit(accompany)
            except RuntimeError as error:
                alone = Refused(
                    f"no thread could be started that keeps in touch with the other ranks: {error}",
                    safe="Nothing was changed.",
                    todo="Raise the limit of threads of this user or container.",
                )
                self.fail(alone)
                raise alone from error
            try:
                yield
            except Exception as error:
                failed.append(error)
                left.set()
                agreed = job.exception()
                if isinstance(error, LastgoodError) and type(agreed) is not type(error) and agreed is not None:
                    raise agreed from error  # guard: ranks-fail-alike
                raise
            except BaseException as error:
                failed.append(error)
                raise
            finally:
                left.set()
            job.result()

    def _decided_at(self, rounds: int) -> Callable[[list[Any]], bool]:
        """The decision of a barrier in this round: whether all have left. Raises the first error, once they have."""

        def decide(answers: list[Any]) -> bool:
            at_work = [rank for rank, (done, _) in enumerate(answers) if not done]
            if at_work:
                if reporting.is_reported(rounds):
                    seconds = rounds * self._ranks.timeout_seconds / 3
                    reporting.info(f"rank {at_work[0]} is still at work after {seconds:.0f} s; the others wait for it")
                return False
            for rank, (_, error) in enumerate(answers):
                if error is not None:
                    raise decode_error({**error, "what": f"rank {rank}: {error['what']}"})
            return True

        return decide

    def fail(self, error: BaseException) -> None:
        """Post the error that keeps this rank from its next answer: the topic fails on all ranks without a wait.

        The coordinator returns once the other ranks have posted too, or have timed out. Does nothing in a topic that
        has failed already.
        """
        if self._ended:
            return
        # What is raised here is the failure itself, as intended; without a store the other ranks time out.
        with suppress(LastgoodError):
            if self._ranks.is_coordinator:
                self._run_round(encode_error(error), lambda _: None)
            else:
                self._ended = True
                self._ranks.post(f"{self._name}/{self._round}/{self._ranks.rank}", encode_error(error))

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Call `fail` with any exception that is raised in the block, and raise it."""
        try:
            yield
        except BaseException as error:
            self.fail(error)  # guard: rank-failure-posted
            raise

    def _run_round(self, post: dict[str, Any], decide: Callable[[list[Any]], Any]) -> Any:
        ranks, key = self._ranks, f"{self._name}/{self._round}"
        try:
            if self.steps and not self._round:
                ranks.post(f"{self._steps_key}/{ranks.rank}", self.steps)
            self._round += 1
            verdict = (
                self._publish_verdict(key, post, decide) if ranks.is_coordinator else self._await_verdict(key, post)
            )
        except (Cancelled, RankFailed, StepDiffers, TierDown):
            self._ended = True  # the other ranks time out, or have skipped the step: a later `fail` would reach nobody
            raise
        if "error" in verdict:
            self._ended = True
            raise decode_error(verdict)
        return verdict["answer"]

    # ---- the coordinator -----------------------------------------------------------------------------------

    def _publish_verdict(self, key: str, mine: dict[str, Any], decide: Callable[[list[Any]], Any]) -> dict[str, Any]:
        """Collect the messages of all ranks, decide, and post the verdict."""
        ranks, posts = self._ranks, self._collect(key)
        try:
            verdict = self._decided([mine, *(posts[rank] for rank in range(1, ranks.size))], decide)
        except Exception as error:  # a bug or too little memory: the other ranks must not wait for a verdict
            self._ended = True
            ranks.post(f"{key}/verdict", encode_error(error))  # guard: verdict-failure-posted
            ranks.delete_later(f"{key}/verdict")
            raise
        ranks.post(f"{key}/verdict", verdict)
        ranks.delete_later(f"{key}/verdict")
        if failed := [f"{key}/{rank}" for rank, one in posts.items() if "error" in one]:
            ranks.delete(failed)  # a rank that has failed receives no verdict, and does not delete its message itself
        return verdict

    def _collect(self, key: str) -> dict[int, dict[str, Any]]:
        """The message of every other rank; for a rank that times out or has skipped the step, an error."""
        ranks, found = self._ranks, dict[int, dict[str, Any]]()
        until = time.monotonic() + ranks.timeout_seconds

        def cancelled() -> bool:
            """Polled while this rank waits: records the ranks that have skipped the step, and then ends the wait."""
            before = len(found)
            for rank in missing:
                if skipped := self._skipped_by(rank):  # guard: rank-in-other-step-detected
                    found[rank] = {"error": "StepDiffers", "what": skipped}
            return len(found) > before or ranks.closed.is_set()

        while missing := [rank for rank in range(1, ranks.size) if rank not in found]:
            before, left_seconds = len(found), max(until - time.monotonic(), 0.0)
            try:
                posts = ranks.receive([f"{key}/{rank}" for rank in missing], left_seconds, cancelled)
                found |= dict(zip(missing, posts, strict=True))
            except TimedOut:
                if (
                    len(found) == before
                ):  # closed or out of time; otherwise the wait goes on for the ranks still missing
                    if ranks.closed.is_set():
                        raise Cancelled("close() was called while this rank was waiting for the others") from None
                    what = f"posted nothing within {ranks.timeout_seconds:.0f} s"
                    silent = {"error": "TimedOut", "what": what, "todo": ALL_CALL}
                    found |= {rank: ranks.read(f"{key}/{rank}") or silent for rank in missing}
        return found

    def _decided(self, posts: Sequence[dict[str, Any]], decide: Callable[[list[Any]], Any]) -> dict[str, Any]:
        """The decision from the messages of all ranks: the error of the first rank that failed, if any did."""
        failed = [(rank, post) for rank, post in enumerate(posts) if "error" in post]
        if failed:  # guard: one-failure-fails-all
            rank, post = failed[0]
            more = f" (and {plural(len(failed) - 1, 'more rank')} failed)" if len(failed) > 1 else ""
            return {**post, "what": f"rank {rank}: {post['what']}{more}"}  # guard: failed-rank-named
        try:
            return {"answer": decide([post["answer"] for post in posts])}
        except LastgoodError as error:
            return encode_error(error)

    # ---- the other ranks -----------------------------------------------------------------------------------

    def _await_verdict(self, key: str, mine: dict[str, Any]) -> dict[str, Any]:
        """Post this rank's message, wait for the coordinator's verdict and return it."""
        ranks, timeout_seconds = self._ranks, COORDINATOR_TIMEOUTS * self._ranks.timeout_seconds
        ranks.post(f"{key}/{ranks.rank}", mine)
        skipped = ""

        def cancelled() -> bool:
            nonlocal skipped
            skipped = self._skipped_by(COORDINATOR)  # guard: coordinator-in-other-step-detected
            return bool(skipped) or ranks.closed.is_set()

        try:
            (verdict,) = ranks.receive([f"{key}/verdict"], timeout_seconds, cancelled)
        except TimedOut:
            safe = "Every committed generation is untouched."
            if ranks.closed.is_set():
                raise Cancelled("close() was called while this rank was waiting for the others", safe=safe) from None
            if skipped:
                raise StepDiffers(f"rank {COORDINATOR} {skipped}", safe=safe) from None
            raise RankFailed(
                f"rank {COORDINATOR} published no verdict on {self._name} within {timeout_seconds:.0f} s",
                safe=safe,
                todo="Find out why that process ended or hangs.",
            ) from None
        # The coordinator has read it: its verdict exists.
        # guard: read-posts-deleted
        ranks.delete([f"{key}/{ranks.rank}"])
        return dict(verdict)

    # ---- both ----------------------------------------------------------------------------------------------

    def _skipped_by(self, rank: int) -> str:
        """How `rank` has skipped the step of this topic, for an error; "" while it may still begin that step."""
        steps = None
        with suppress(TierDown):  # the rank is waited for until the timeout
            steps = self._ranks.quick.read(f"{self._steps_key}/{rank}") if self.steps else None
        if steps is None or self.steps[-1] in steps or max(steps) < self.steps[-1]:  # guard: slow-rank-still-awaited
            return ""
        return f"has begun step {max(steps)} and skipped step {self.steps[-1]}"


def encode_error(error: BaseException) -> dict[str, Any]:
    """An error as a message."""
    what = error.what if isinstance(error, LastgoodError) else f"{type(error).__name__}: {error}"
    safe, todo = (error.safe, error.todo) if isinstance(error, LastgoodError) else ("", "")
    fields = {name: getattr(error, name) for name in Damaged.FIELDS} if isinstance(error, Damaged) else {}
    return {"error": type(error).__name__, "what": what, "safe": safe, "todo": todo, **fields}


def decode_error(message: Mapping[str, Any]) -> LastgoodError:
    """The error of a message: of its own class if that is a LastgoodError made from texts alone, else RankFailed."""
    kind = errors.class_named(message["error"], RankFailed)
    fields = {name: message[name] for name in Damaged.FIELDS if name in message and issubclass(kind, Damaged)}
    return kind(message["what"], safe=message.get("safe", ""), todo=message.get("todo", ""), **fields)

"""Agreeing: the store of a torch process group, as the ranks of a run use it. Calls no collective."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import platform
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from typing import Any, TypeVar

import torch.distributed as dist

from ..coordination.rendezvous import meet
from ..coordination.rounds import PATIENCE_SECONDS, Posts, Ranks
from ..errors import Refused, TierDown, TimedOut

T = TypeVar("T")
BRIEF_SECONDS = 5.0
"""for what the training thread asks beside its steps"""
FIRST_LOOK = 1 / 60
"""of the patience, after which it is asked whether waiting is of use; then after twice as long, and so on"""


class Clients:
    """Clients of a store of torch's, which `connect` makes: as many as there are questions at a time, and no more.

    None that works is let go of: torch's server answers nobody while it looks up the name of a new one, which takes
    seconds where names are looked up slowly.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect, self._free = connect, queue.SimpleQueue[Any]()

    def take(self) -> Any:
        with contextlib.suppress(queue.Empty):
            return self._free.get_nowait()
        return self._connect()

    def give(self, client: Any) -> None:
        self._free.put(client)


class GroupStore:
    """`ports.Store` over clients of torch's, from any thread. Every call ends, `patience_seconds` after its own.

    A client of torch's waits for an answer without a bound where the host of its store is cut off, and nothing ends
    that wait. So each question is asked in a thread of its own, and left behind with its client if no answer comes: a
    daemon, the only one in the house, for a process must be able to end beside it.
    """

    def __init__(self, clients: Clients, patience_seconds: float) -> None:
        self._clients, self._patience_seconds = clients, patience_seconds

    def set(self, posts: Mapping[str, bytes]) -> None:
        def put(client: Any) -> None:
            if client.has_extended_api():
                client.multi_set(list(posts), list(posts.values()))
            else:  # it is a file
                for key, data in posts.items():
                    client.set(key, data)

        self._ask(put)

    def get(self, keys: Sequence[str], seconds: float, no_use: Callable[[], bool] = lambda: False) -> list[bytes]:
        names = list(keys)

        def get(client: Any) -> list[bytes]:
            try:
                client.wait(names, datetime.timedelta(seconds=max(seconds, 0.001)))  # in a file none is for ever
            except RuntimeError as error:
                if not isinstance(error, dist.DistStoreError) and "Wait timeout" not in str(error):  # as a file says it
                    raise
                raise TimedOut(f"something was not posted: {', '.join(names[:3])}, ...") from error
            at_once = client.has_extended_api()  # else it is a file, and each key a question of its own
            return [bytes(one) for one in (client.multi_get(names) if at_once else map(client.get, names))]

        return self._ask(get, seconds, no_use)

    def has(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(lambda client: client.check(list(keys))))

    def delete(self, keys: Sequence[str]) -> None:
        self._ask(lambda client: [client.delete_key(key) for key in keys])

    def _ask(self, what: Callable[[Any], T], seconds: float = 0.0, no_use: Callable[[], bool] = lambda: False) -> T:
        answer: Future[T] = Future()

        def ask() -> None:
            try:
                client = self._clients.take()
                try:
                    found = what(client)
                except TimedOut:
                    self._clients.give(client)
                    raise
                self._clients.give(client)  # but for one that has failed
                answer.set_result(found)
            except BaseException as error:  # noqa: BLE001 - it is raised below
                answer.set_exception(error)

        try:
            threading.Thread(target=ask, name="lastgood-store", daemon=True).start()
            return _waited(answer, seconds, self._patience_seconds, no_use)
        except TimedOut:
            raise
        except (RuntimeError, NoAnswer) as error:
            why = str(error) or f"no answer in {seconds + self._patience_seconds:.0f} s"
            safe = "Every committed generation is untouched."
            raise TierDown(f"the store of the process group cannot be reached: {why}", safe=safe) from error


def _waited(answer: Future[T], seconds: float, patience_seconds: float, no_use: Callable[[], bool]) -> T:
    """What comes in time. It is asked at FIRST_LOOK of the patience whether that is of use; then ever more rarely."""
    look, until = FIRST_LOOK * patience_seconds, time.monotonic() + seconds + patience_seconds
    while time.monotonic() + look < until:
        with contextlib.suppress(NoAnswer):
            return answer.result(look)
        if no_use():
            raise TimedOut("it is of no use to wait for what is not posted")
        look *= 2
    return answer.result(max(0.0, until - time.monotonic()))


def machine() -> str:
    """The same for all processes that share a page cache."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return platform.node()


def among_ranks() -> bool:
    """Whether this process is one of several of a group."""
    return world_size() > 1


def world_size() -> int:
    """Processes of the group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def require_group(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse a process that a launcher has started as one of several, and that has not joined their group."""
    size, rank = environ.get("WORLD_SIZE", ""), environ.get("RANK", "")
    if size.isdigit() and int(size) > 1 and rank.isdigit() and not (dist.is_available() and dist.is_initialized()):
        raise Refused(
            f"this is rank {rank} of {size} (RANK and WORLD_SIZE are set), and torch.distributed is not initialised",
            safe="Nothing was touched.",
            todo="Call torch.distributed.init_process_group() before opening the run. For one process by itself unset "
            "RANK and WORLD_SIZE.",
        )


def ranks_of(path: str | os.PathLike[str], patience_seconds: float = PATIENCE_SECONDS) -> Ranks:
    """This process among those of its group, once all are here. All ranks open their runs in the same order."""
    store: Any = dist.distributed_c10d._get_default_store()  # the one that the group itself met through
    rank, size = dist.get_rank(), dist.get_world_size()
    place = f"lastgood/{hashlib.sha256(os.path.abspath(path).encode()).hexdigest()[:12]}"

    clients = Clients(store.clone)
    usual, brief = GroupStore(clients, patience_seconds), GroupStore(clients, min(patience_seconds, BRIEF_SECONDS))
    name = meet(Posts(usual), place, rank, size, patience_seconds)
    return Ranks(rank, size, usual, f"{place}/{name}", patience_seconds, brief)

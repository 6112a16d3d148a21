"""The store of a torch process group, as the ranks of a run use it. Calls no collective.

Invariants
  1. Every call ends: a call to the store takes at most `timeout_seconds`, in addition to what `get` is asked to wait.
     After that it raises TierDown. This also holds where the host of the store is cut off from the network.
  2. A client of the store is used by one thread at a time. Later calls use it again, unless a call on it raised another
     error than TimedOut, which says only that keys were not posted in time.
  3. A rank that has no connection to the store learns so after COORDINATOR_TIMEOUTS + 1 timeouts, at the latest: it
     waits so long for a verdict (coordination/rounds.py), and one timeout more for the answer of the store.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import hashlib
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..coordination.rendezvous import join
from ..coordination.rounds import MessageStore, RankGroup
from ..errors import Refused, TierDown, TimedOut
from ..io.machine import machine
from ..limits import POLLS_PER_TIMEOUT, QUICK_STORE_SECONDS, RANK_TIMEOUT_SECONDS

ABANDONED_POLL_SECONDS = 0.2
"""How soon a call notices that nothing is waited for any more."""
T = TypeVar("T")


class Clients:
    """A pool of clients of one torch store. `connect` makes a client; there are as many as calls at the same time.

    A client that works is kept for later calls, because connecting is slow: torch's server resolves the host name of
    each new client, which may take seconds, and answers no other client meanwhile.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect, self._free = connect, queue.SimpleQueue[Any]()

    def acquire(self) -> Any:
        """A free client, or a new one. The caller releases it, unless a call on it raised anything but TimedOut."""
        with contextlib.suppress(queue.Empty):
            return self._free.get_nowait()
        return self._connect()

    def release(self, client: Any) -> None:
        self._free.put(client)


class GroupStore:
    """`ports.Store` over the clients of a torch store. A call that gets no answer in time raises TierDown.

    torch's client waits for an answer without a limit where the host of the store is cut off, and no other thread can
    end that wait. So each call runs in a thread of its own. When no answer comes in time, or once `abandoned` is set
    (as in `RankGroup`), the thread and its client are given up. It is a daemon thread, so that the process can exit
    while it still waits. No other thread in this package is one.
    """

    def __init__(self, clients: Clients, timeout_seconds: float, abandoned: threading.Event | None = None) -> None:
        self._clients, self._timeout_seconds = clients, timeout_seconds
        self._abandoned = abandoned or threading.Event()

    def set(self, values: Mapping[str, bytes]) -> None:
        def put(client: Any) -> None:
            if client.has_extended_api():
                client.multi_set(list(values), list(values.values()))
            else:  # a FileStore
                for key, data in values.items():
                    client.set(key, data)

        self._call(put)

    def has(self, keys: Sequence[str]) -> bool:
        return bool(self._call(lambda client: client.check(list(keys))))

    def get(
        self,
        keys: Sequence[str],
        timeout_seconds: float,
        cancelled: Callable[[], bool] = lambda: False,
        poll_seconds: float | None = None,
    ) -> list[bytes]:
        names = list(keys)

        def get(client: Any) -> list[bytes]:
            try:
                # A FileStore waits forever if the timeout is zero.
                client.wait(names, datetime.timedelta(seconds=max(timeout_seconds, 0.001)))
            except RuntimeError as error:
                # A FileStore raises a plain RuntimeError when the time is over.
                if not isinstance(error, dist.DistStoreError) and "Wait timeout" not in str(error):
                    raise
                raise TimedOut(f"keys were not posted in time: {', '.join(names[:3])}, ...") from error
            if client.has_extended_api():
                return [bytes(one) for one in client.multi_get(names)]
            return [bytes(client.get(name)) for name in names]  # a FileStore

        return self._call(get, timeout_seconds, cancelled, poll_seconds)

    def delete(self, keys: Sequence[str]) -> None:
        self._call(lambda client: [client.delete_key(key) for key in keys])

    def _call(
        self,
        act: Callable[[Any], T],
        wait_seconds: float = 0.0,
        cancelled: Callable[[], bool] = lambda: False,
        poll_seconds: float | None = None,
    ) -> T:
        """Call `act` with a client in a new thread. `wait_seconds`: how long the store itself may wait for keys."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                client = self._clients.acquire()
                try:
                    found = act(client)
                except TimedOut:
                    self._clients.release(client)
                    raise
                self._clients.release(client)  # a client on which a call failed is not used again
                answer.set_result(found)
            except BaseException as error:  # noqa: BLE001 - the calling thread raises it
                answer.set_exception(error)

        try:
            threading.Thread(target=run, name="lastgood-store", daemon=True).start()
            return self._result(answer, wait_seconds, cancelled, poll_seconds)
        except TimedOut:
            raise
        except (RuntimeError, NoAnswer) as error:
            why = str(error) or f"no answer in {wait_seconds + self._timeout_seconds:.0f} s"
            safe = "Every committed generation is untouched."
            raise TierDown(f"the store of the process group cannot be reached: {why}", safe=safe) from error

    def _result(
        self, answer: Future[T], wait_seconds: float, cancelled: Callable[[], bool], poll_seconds: float | None
    ) -> T:
        """Wait for the answer. `cancelled` is polled every `poll_seconds`; with None after a short pause, and then
        after pauses of twice the length each.

        Raises TimedOut once `cancelled()` is true, NoAnswer when the time is over. With abandoned ranks: TimedOut
        for keys, else NoAnswer.
        """
        pause_seconds, now = poll_seconds or self._timeout_seconds / POLLS_PER_TIMEOUT, time.monotonic()
        until, next_poll = now + wait_seconds + self._timeout_seconds, now + pause_seconds
        while now < until:
            with contextlib.suppress(NoAnswer):
                return answer.result(min(ABANDONED_POLL_SECONDS, max(next_poll - now, 0.0), until - now))
            if self._abandoned.is_set():  # guard: store-of-dead-rank-not-awaited
                if wait_seconds:
                    raise TimedOut("keys are not waited for any more: another rank has died")
                raise NoAnswer("another rank has died")
            now = time.monotonic()
            if now >= next_poll:
                if cancelled():
                    raise TimedOut("the wait for keys was cancelled")
                pause_seconds = poll_seconds or 2 * pause_seconds
                now = time.monotonic()
                next_poll = now + pause_seconds
        return answer.result(0)


def among_ranks() -> bool:
    """Whether this process is one of several in a torch process group."""
    return world_size() > 1


def device_of_group() -> torch.device:
    """On which device the process group exchanges tensors: the processor if it has a backend for that, else the CUDA
    device of this process."""
    if _cpu_backend() is None:  # guard: group-without-cpu-on-cuda
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def world_size() -> int:
    """The number of processes in the torch process group; 1 without a group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def require_group(environ: Mapping[str, str] = os.environ) -> None:
    """Raise Refused in a process that a launcher started as one of several and that has no process group.

    Otherwise each process would open the run as the only rank of a world of its own.
    """
    size, rank = environ.get("WORLD_SIZE", ""), environ.get("RANK", "")
    if size.isdigit() and int(size) > 1 and rank.isdigit() and not (dist.is_available() and dist.is_initialized()):
        raise Refused(
            f"this is rank {rank} of {size} (RANK and WORLD_SIZE are set), and torch.distributed is not initialised",
            safe="Nothing was touched.",
            todo="Call torch.distributed.init_process_group() before opening the run. For one process by itself unset "
            "RANK and WORLD_SIZE.",
        )


def join_group(url: str, timeout_seconds: float = RANK_TIMEOUT_SECONDS) -> RankGroup:
    """Wait until all ranks of the process group have called this for `url`, and return this process among them.

    All ranks must open their runs in the same order. Raises RankFailed, TierDown.
    """
    _keep_gloo()
    store: Any = dist.distributed_c10d._get_default_store()  # the store through which the process group was made
    rank, size = dist.get_rank(), dist.get_world_size()
    place = f"lastgood/{hashlib.sha256(os.fsencode(url)).hexdigest()[:12]}"
    clients = Clients(store.clone)
    abandoned = threading.Event()
    usual = GroupStore(clients, timeout_seconds, abandoned)
    quick = GroupStore(clients, min(timeout_seconds, QUICK_STORE_SECONDS), abandoned)
    joined = join(MessageStore(usual), place, rank, size, timeout_seconds, machine())
    return RankGroup(rank, size, usual, f"{place}/{joined.name}", timeout_seconds, quick, joined.nodes, abandoned)


def _keep_gloo() -> None:
    """Keep the gloo part of the process group until this process ends, also after `destroy_process_group()`.

    torch 2.13 joins the threads of a gloo group when its last owner lets go of it. If that is a DDP model, which often
    lives until the end of the program, it holds the interpreter lock meanwhile. A thread of the group that waits for
    the lock then never ends, and neither does the rank. A reference that is not given back leaves the threads to the
    end of the process, as in programs that do not destroy their groups.
    """
    backend = _cpu_backend()
    if backend is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))  # guard: gloo-outlives-models


def _cpu_backend() -> Any:
    """The backend of the process group for the processor; None if it has none, and so no gloo."""
    try:
        return dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    except RuntimeError:
        return None

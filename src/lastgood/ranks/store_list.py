"""Where the store of a job is, among the endpoints of `--rdzv-endpoint`. What is chosen: policy/membership.py."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ..policy.membership import Past, Seen, may_move, store_to_join
from ..supervisor.held_store import parted
from ..supervisor.membership import ACTIVE, Settings, active_round, active_text
from .store_server import ID

JOB = "lastgood.job"
"""prefix of the keys of a whole job"""
PROBE_SECONDS = 3.0
"""how long a store may take to answer"""
LOST_SECONDS = 5.0
"""How long a store is asked again before a node goes on to the next one."""
WATCH_SECONDS = 5.0
"""how often a node that waits looks whether the others are at another store"""
READ_SECONDS = 60
"""torch's default of read_timeout"""


class NoStore(Exception):
    """No store of the list can be joined."""


def of_job(store: Any, run_id: str) -> Any:
    """The keys of a whole job in a store."""
    from torch.distributed import PrefixStore

    return PrefixStore(f"{JOB}.{run_id}", store)


def raised(store: Any, key: str, value: str) -> None:
    """Set a key unless it has a later value, in the order of texts."""
    seen = ""
    while seen < value:
        seen = store.compare_set(key, seen, value).decode()


class Stores:
    """The stores of the list, as this node sees them. Not safe for threads.

    At most one probe of each is under way: a store that is stopped takes the connection, and torch then waits for it
    without a bound. The thread of such a probe ends with the process (os._exit in ranks/membership.py).
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self._probes = settings, dict[int, _Probe]()

    def seen(self) -> list[Seen | None]:
        """What they show; None: it does not answer in time."""
        free = [one for one in range(len(self._settings.stores)) if not self._under_way(one)]
        for number in free:
            self._probes[number] = _Probe(self._settings.stores[number], self._settings.run_id)
            self._probes[number].start()
        until = time.monotonic() + 2 * PROBE_SECONDS
        for number in free:
            self._probes[number].join(max(0.0, until - time.monotonic()))
        return [self._probes[number].found for number in range(len(self._settings.stores))]

    def _under_way(self, number: int) -> bool:
        return number in self._probes and self._probes[number].is_alive()


class _Probe(threading.Thread):
    """Asks one store what it shows. `found`: None until it has answered."""

    def __init__(self, endpoint: str, run_id: str) -> None:
        super().__init__(name="lastgood-probe")
        self._endpoint, self._run_id = endpoint, run_id
        self.found: Seen | None = None

    def run(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            # torch tries again where a connection is refused
            socket.create_connection(parted(self._endpoint), PROBE_SECONDS).close()
            store = _connected(self._endpoint, PROBE_SECONDS)
            job, active = of_job(store, self._run_id), None
            if job.check([ACTIVE]):
                active = active_round(job.get(ACTIVE).decode())
            self.found = Seen(id=store.get(ID).decode(), active=active)


def found(settings: Settings, stores: Stores) -> tuple[int, str, Any]:
    """The number, the id, and a connection to the store that this node joins. Waits for it as torch does.

    Raises NoStore, and what torch raises.
    """
    known, began = settings.known, time.monotonic()
    read_seconds = int(settings.configuration.get("read_timeout", READ_SECONDS))
    most_seconds = read_seconds if known.past.last is None else LOST_SECONDS
    while True:
        seen, over = stores.seen(), time.monotonic() - began > most_seconds
        number = store_to_join(seen, known.past, known.at, over and may_move(known.past))
        chosen = None if number is None else seen[number]
        if number is not None and chosen is not None:
            store = _connected(settings.stores[number], read_seconds)
            if store.get(ID).decode() == chosen.id:  # else it was replaced since
                _arrived(of_job(store, settings.run_id), known.past, number)
                return number, chosen.id, store
        elif over:
            raise NoStore("no store of the list that this node may join answers")
        time.sleep(1.0)


def _arrived(job: Any, past: Past, number: int) -> None:
    """Show, in the store of this number, that this node has come from another one; and that the job is here, if more
    than half of the nodes of its last round have. A node that comes again counts once."""
    last = past.last
    if last is None or last.store >= number:
        return
    key = f"moved/{last.store}.{last.id}.{last.order}"
    if job.add(f"{key}/{past.node}", 1) == 1:
        job.add(key, 1)
    if 2 * job.add(key, 0) > last.nodes:
        raised(job, ACTIVE, active_text(last))


class Watch:
    """Calls `moved` from a thread, once, when this node waits for a round at another store than it should.

    `at`: number of the store that it has joined. `answering`: is held meanwhile. Who holds it after `end`, to tell that
    a round was joined, is not interrupted.
    """

    def __init__(self, stores: Stores, at: int, moved: Callable[[], object], answering: threading.Lock) -> None:
        self._stores, self._at, self._moved, self._answering = stores, at, moved, answering
        self._past, self._waits = Past(), threading.Event()
        threading.Thread(target=self._poll, name="lastgood-stores").start()

    def begin(self, past: Past) -> None:
        """This node begins to wait. `past`: what it brings."""
        self._past = past
        self._waits.set()

    def end(self) -> None:
        """It does not wait any more."""
        self._waits.clear()

    def _poll(self) -> None:
        while True:
            time.sleep(WATCH_SECONDS)
            self._waits.wait()
            number = store_to_join(self._stores.seen(), self._past, self._at, leaves=False)
            if number not in (None, self._at):
                with self._answering:
                    if self._waits.is_set():
                        self._moved()
                        return


def _connected(endpoint: str, seconds: float) -> Any:
    from torch.distributed import TCPStore

    host, port = parted(endpoint)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))

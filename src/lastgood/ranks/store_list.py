"""Where the store of a job is, among the endpoints of `--rdzv-endpoint`. What is chosen: policy/membership.py."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from ..policy.membership import Seen, store_to_join
from ..supervisor.held_store import parted
from ..supervisor.membership import ACTIVE, Settings
from .store_server import ID

JOB = "lastgood.job"
"""prefix of the keys of a whole job"""
PROBE_SECONDS = 3.0
"""how long a store may take to answer"""
LOST_SECONDS = 5.0
"""How long a store is asked again before a node goes on to the next one."""
WATCH_SECONDS = 5.0
"""how often a node that waits looks whether the others are at a later store"""
READ_SECONDS = 60
"""torch's default of read_timeout"""


class NoStore(Exception):
    """No store of the list can be joined."""


def of_job(store: Any, run_id: str) -> Any:
    """The keys of a whole job in a store."""
    from torch.distributed import PrefixStore

    return PrefixStore(f"{JOB}.{run_id}", store)


def found(settings: Settings) -> tuple[int, str, Any]:
    """The number, the id, and a connection to the store that this node joins. Waits for it as torch does.

    Raises NoStore, and what torch raises.
    """
    known, began = settings.known, time.monotonic()
    read_seconds = int(settings.configuration.get("read_timeout", READ_SECONDS))
    most_seconds = read_seconds if known.last is None else LOST_SECONDS
    while True:
        seen, over = _seen(settings, known.at), time.monotonic() - began > most_seconds
        # One of two nodes is no majority; and before the first round no store but the first one can begin a job.
        leaves = over and bool(known.id) and known.last is not None and known.last.nodes > 2
        number = store_to_join(seen, known.at, known.id, leaves)
        if number is not None:
            break
        if over:
            raise NoStore("no store of the list, from this one on, can be joined")
        time.sleep(1.0)
    store = _connected(settings.stores[number], read_seconds)
    job, last = of_job(store, settings.run_id), known.last
    if last is not None and last.store < number:
        came = job.add(f"moved/{last.store}.{last.order}", 1)
        if 2 * came > last.nodes:
            job.set(ACTIVE, "")
    return number, store.get(ID).decode(), store


def watch(settings: Settings, at: int, moved: Callable[[], None]) -> threading.Event:
    """Call `moved` from a thread once the nodes of the job are at a later store than `at`, while the event is set."""
    waits = threading.Event()

    def poll() -> None:
        while True:
            time.sleep(WATCH_SECONDS)
            waits.wait()
            if any(one is not None and one.active for one in _seen(settings, at + 1)) and waits.is_set():
                moved()

    threading.Thread(target=poll, name="lastgood-stores", daemon=True).start()
    return waits


def _seen(settings: Settings, first: int) -> Sequence[Seen | None]:
    """What the stores show, from number `first` on; those before are not asked."""
    found: list[Seen | None] = [None] * len(settings.stores)

    def probe(number: int) -> None:
        endpoint = settings.stores[number]
        with contextlib.suppress(OSError, RuntimeError):
            socket.create_connection(parted(endpoint), PROBE_SECONDS).close()  # torch tries again where it is refused
            store = _connected(endpoint, PROBE_SECONDS)
            found[number] = Seen(id=store.get(ID).decode(), active=of_job(store, settings.run_id).check([ACTIVE]))

    # A store that is stopped takes the connection, and torch then waits for it without a bound.
    probes = [threading.Thread(target=probe, args=[one], daemon=True) for one in range(first, len(found))]
    for one in probes:
        one.start()
    until = time.monotonic() + 2 * PROBE_SECONDS
    for one in probes:
        one.join(max(0.0, until - time.monotonic()))
    return [*found]


def _connected(endpoint: str, seconds: float) -> Any:
    from torch.distributed import TCPStore

    host, port = parted(endpoint)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))

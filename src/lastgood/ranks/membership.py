"""The process that holds a node's membership in a job of several nodes: `python -m lastgood.ranks.membership`.

It answers the requests of its supervisor (supervisor/membership.py), one after another, with torch's elastic rendezvous
and the store behind it. torch keeps the membership alive in a thread of its own. Decides nothing.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from ..io import processes
from ..supervisor import framed, program
from ..supervisor.membership import (
    Answer,
    Claim,
    Close,
    Connected,
    Drop,
    Failed,
    Join,
    Joined,
    Put,
    Raise,
    Read,
    Request,
    Settings,
    Values,
    Waiters,
    Waiting,
    Where,
)
from ..supervisor.placement import is_loopback
from . import store_list

os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # torch reads it; the ranks have a store of their own


class Member:
    """The membership of this node. Connects when it is made. Raises what torch raises.

    `moved`, `answering`: as for `store_list.Watch`.
    """

    def __init__(self, settings: Settings, moved: Callable[[], None], answering: threading.Lock) -> None:
        from torch.distributed.elastic.rendezvous import RendezvousParameters, c10d_rendezvous_backend
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
        from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=settings.endpoint,
            run_id=settings.run_id,
            min_nodes=settings.least,
            max_nodes=settings.most,
            local_addr=settings.local_address or None,
            **settings.configuration,
        )
        self._at, self._id = 0, ""
        """number and id of the store, where it can move"""
        if settings.stores:
            stores = store_list.Stores(settings)
            self._at, self._id, self._store = store_list.found(settings, stores)
            backend = c10d_rendezvous_backend.C10dRendezvousBackend(self._store, settings.run_id)
        else:
            backend, self._store = c10d_rendezvous_backend.create_backend(parameters)
        self._handler = create_handler(self._store, backend, parameters)
        endpoint = settings.stores[self._at] if settings.stores else settings.endpoint
        self._settings = msgspec.structs.replace(settings, endpoint=endpoint)
        chosen = parameters.get_as_bool("is_host")
        host, _ = parse_rendezvous_endpoint(settings.endpoint, default_port=29400)
        self._holds_store = _matches_machine_hostname(host) if chosen is None else chosen
        self._watch = store_list.Watch(stores, self._at, moved, answering) if settings.stores else None
        self._round: Any = None
        """the store with the keys of the current round"""

    def answer(self, request: Request) -> Answer:
        """Do what a request asks for. Raises what torch raises."""
        match request:
            case Where():
                return Connected(store=self._at, id=self._id)
            case Join():
                if self._handler.is_closed() and not request.waited:
                    return Failed(kind="ended", what=f"the job of --rdzv-id {self._settings.run_id} has ended")
                if self._watch is not None:
                    self._watch.begin(request.past)
                found = self._next_round()
                if self._watch is not None:
                    self._watch.end()
                self._round = found.store
                return Joined(
                    node=found.rank,
                    nodes=found.world_size,
                    address=self._address(),
                    holds_store=self._holds_store,
                    order=self._order(),
                )
            case Put():
                store = self._of(request.job)
                for key, value in request.values.items():
                    store.set(key, value)
                return Values(values=[])
            case Read():
                store = self._of(request.job)
                return Values(values=[store.get(key).decode() if store.check([key]) else None for key in request.keys])
            case Claim():
                store = self._of(request.job)
                return Values(values=[store.compare_set(request.key, request.before, request.value).decode()])
            case Raise():
                store_list.raised(self._of(job=True), request.key, request.value)
                return Values(values=[])
            case Drop():
                for key in request.keys:
                    self._round.delete_key(key)
                return Values(values=[])
            case Waiting():
                return Waiters(joining=self._handler.num_nodes_waiting(), reserve=self._reserve())
            case Close():
                self._handler.set_closed()
                return Values(values=[])

    def _next_round(self) -> Any:
        """Join the next round, once it is complete. A node in reserve that was stopped for so long that torch has
        forgotten it goes into the reserve again, where torch sets no time in which it must join."""
        from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

        while True:
            try:
                return self._handler.next_rendezvous()
            except RendezvousTimeoutError:
                if not self._is_full():  # guard: stopped-spare-waits-again
                    raise

    def _of(self, job: bool) -> Any:
        return store_list.of_job(self._store, self._settings.run_id) if job else self._round

    def _order(self) -> int:
        """The order of the round among those of this store, the same on all nodes."""
        number = self._of(job=True).add("rounds", 1)
        return int(self._round.compare_set("order", "", str(number)))

    def _reserve(self) -> int | None:
        """How many nodes wait because the round has the most. torch has no public call for it: None if another version
        keeps it elsewhere. The state is the one that `num_nodes_waiting` has just read, without nodes that show no sign
        of life."""
        try:
            return len(self._handler._state_holder.state.redundancy_list)
        except AttributeError:
            return None

    def _is_full(self) -> bool:
        """Whether the round is complete and has the most nodes. As for `_reserve`, torch has no public call for it."""
        try:
            state = self._handler._state_holder.state
            return bool(state.complete) and len(state.participants) >= self._settings.most
        except AttributeError:
            return False

    def _address(self) -> str:
        """The address of this node that other nodes reach: that from which it reaches the endpoint; or the name in the
        endpoint, where that is this node and the name has a loopback address here, as Debian's hosts file says."""
        if self._settings.local_address:
            return self._settings.local_address
        from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

        host, port = parse_rendezvous_endpoint(self._settings.endpoint, default_port=29400)
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as one:
            one.connect(place)  # sends nothing
            found = str(one.getsockname()[0])
        return host if is_loopback(found) and not is_loopback(host) else found  # guard: address-is-no-loopback


def _failed(error: Exception) -> Failed:
    from torch.distributed.elastic.rendezvous import api

    if isinstance(error, api.RendezvousClosedError | api.RendezvousGracefulExitError):
        return Failed(kind="closed", what="")
    if isinstance(error, api.RendezvousTimeoutError):
        return Failed(kind="timeout", what="too few nodes have joined in time (join_timeout of --rdzv-conf)")
    if isinstance(error, store_list.NoStore):
        return Failed(kind="gone", what=str(error))
    if isinstance(error, ValueError | KeyError | TypeError) or error.__cause__ is None:
        kind = "refused" if isinstance(error, ValueError | KeyError | TypeError) else "store"
        return Failed(kind=kind, what=f"{type(error).__name__}: {error}")
    return Failed(kind="store", what=f"{error} ({error.__cause__})".replace("\n", " "))


def main() -> None:
    """Answer requests until the supervisor ends or closes the connection."""
    program.forget_current_folder()
    processes.die_with(int(sys.argv[2]))
    processes.outlive_signals()  # guard: membership-outlives-signals
    connection, member = socket.socket(fileno=int(sys.argv[1])), None
    failed: Failed | None = None
    answering = threading.Lock()

    def moved() -> None:
        framed.send(connection, msgspec.json.encode(Failed(kind="moved", what="")))
        os._exit(0)  # torch waits in the main thread

    settings = msgspec.json.decode(framed.receive(connection), type=Settings)
    try:
        member = Member(settings, moved, answering)
    except Exception as error:  # noqa: BLE001 - the supervisor reports it, as the answer to its first request
        failed = _failed(error)
    try:
        with contextlib.suppress(EOFError, OSError):
            seconds: float | None = None  # the supervisor imports torch before its first request, perhaps for minutes
            while _asks_in_time(connection, seconds):
                seconds = settings.silent_seconds
                request = msgspec.json.decode(framed.receive(connection), type=Request)
                try:
                    answer = failed if member is None else member.answer(request)
                except Exception as error:  # noqa: BLE001 - the supervisor reports it
                    answer = _failed(error)
                with answering:
                    framed.send(connection, msgspec.json.encode(answer))
    finally:
        connection.close()
        if settings.stores:  # the threads of store_list.py: a probe of a store that is stopped waits in torch for ever
            raised = sys.exc_info()[1]
            if raised is not None:
                traceback.print_exception(raised)
            os._exit(raised is not None)


def _asks_in_time(connection: socket.socket, seconds: float | None) -> bool:
    """Wait for the next request. Returns False if the supervisor is stopped or hangs: this node must not go on showing
    torch that it is there, because the other nodes would wait for it. `seconds`: None: it shows nothing yet."""
    return bool(select.select([connection], [], [], seconds)[0])


if __name__ == "__main__":
    main()

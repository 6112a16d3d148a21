"""Requests to one peer, over a few connections that are opened when they are needed and used again."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from .. import reporting
from ..errors import Cancelled, FrameInvalid, LastgoodError, PeerDown
from ..limits import WIRE_BULK_LIMIT_BYTES, WIRE_REUSE_SECONDS
from .frames import SAFE, SAME_VERSION
from .handshake import Random, Side, expect, greet
from .messages import Failure, Reply, Request, check_sizes, error_of
from .port import Answer, Peer
from .security import Security
from .session import Session
from .sockets import Deadline, Stream, connect
from .window import MakeMemory, offer_window, require_clear

CONNECTIONS = 2


class _Idle(NamedTuple):
    session: Session
    since_seconds: float


class Channel:
    """A `Wire` to the node `node` at `address`, until `close` or the end of the `with` block.

    `address`: host and port. `me`: this node. `security`: the mode, the same at all nodes. `connections`: how many
    calls run at the same time; a further one waits. Default 2. `clock`: a monotonic clock, in seconds. `random`:
    returns so many random bytes. `windows`: makes windows for bulk bytes (`nixl.Nixl`), where the other node has them
    too. Default: bulk bytes go through the sockets. Nothing is opened before the first call, and the calling threads do
    all the work. Raises Refused for windows with encryption.
    """

    def __init__(
        self,
        address: tuple[str, int],
        node: str,
        me: Peer,
        security: Security,
        connections: int = CONNECTIONS,
        clock: Callable[[], float] = time.monotonic,
        random: Random = os.urandom,
        windows: MakeMemory | None = None,
    ) -> None:
        require_clear(windows, security)
        self._address, self._node, self._side = address, node, Side(me, security, random)
        self._connections, self._clock, self._windows = connections, clock, windows
        self._turn = threading.Condition()
        self._idle: list[_Idle] = []
        self._busy: dict[int, Session | Stream | None] = {}
        """the thread of each call in progress, and its connection once it has one"""
        self._closed = False

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections. Calls in progress, and later ones, raise Cancelled."""
        with self._turn:
            self._closed = True
            for session, _ in self._idle:
                session.close()
            self._idle.clear()
            for one in self._busy.values():
                if one is not None:
                    one.cut()
            self._turn.notify_all()

    def call(
        self,
        request: bytes,
        *,
        outgoing: Iterable[memoryview] = (),
        incoming: memoryview | None = None,
        timeout_seconds: float,
        background: bool = False,
        caller_verifies: bool = False,
    ) -> Answer:
        """See `port.Wire`."""
        bulk = [one.cast("B") for one in outgoing]
        length = sum(map(len, bulk))
        room = incoming.cast("B") if incoming is not None else memoryview(b"")
        check_sizes(request, length)
        deadline = Deadline(self._clock, timeout_seconds, f"a request to {self._node} at {self._address[0]}")
        with self._session(deadline) as session:
            message = Request(request, min(len(room), WIRE_BULK_LIMIT_BYTES), length, session.digest(bulk))
            session.send(message, bulk, deadline, background)
            answer = session.receive(deadline)
            if isinstance(answer, Failure):
                failed = error_of(answer)
                if isinstance(failed, FrameInvalid | PeerDown):
                    raise failed  # the server closes the connection
            else:
                failed = None
                reply = expect(Reply, answer, session.name)
                if reply.length > len(room):  # guard: wire-answer-fits-buffer
                    what = f"{session.name} sends {reply.length} bulk bytes into a buffer of {len(room)}"
                    raise FrameInvalid(what, safe=SAFE, todo=SAME_VERSION, reason="length")
                if reply.length and caller_verifies and not reply.digest:  # guard: wire-digest-left-out-if-asked
                    session.receive_unverified(room[: reply.length], deadline)
                elif reply.length:
                    session.receive_bulk(room[: reply.length], reply.digest, deadline)
        if failed is not None:
            raise failed
        return Answer(reply.record, (room[: reply.length],) if reply.length else ())

    @contextlib.contextmanager
    def _session(self, deadline: Deadline) -> Iterator[Session]:
        """A connection for one request. After any error in the block it is closed, and not used again."""
        me = threading.get_ident()
        session = self._acquire(me, deadline)
        try:
            if session is None:
                session = self._open(me, deadline)
            yield session
        except BaseException as error:
            with self._turn:
                del self._busy[me]
                self._turn.notify()
                closed = self._closed
            if session is not None:
                session.close()  # guard: wire-failed-connection-closed
            if closed and isinstance(error, LastgoodError):
                raise _closed() from error
            raise
        with self._turn:
            del self._busy[me]
            if self._closed:
                session.close()
            else:
                self._idle.append(_Idle(session, self._clock()))
            self._turn.notify()

    def _acquire(self, me: int, deadline: Deadline) -> Session | None:
        """Wait for the turn of this call. Returns a connection that is open, or None where one has to be opened."""
        with self._turn:
            while not self._closed and len(self._busy) >= self._connections:
                self._turn.wait(deadline.left())
            if self._closed:
                raise _closed()
            found = None
            while self._idle and found is None:
                session, since_seconds = self._idle.pop()
                # A byte that waits there belongs to no request of this side; at the end of the stream nobody answers.
                # guard: wire-stale-connection-dropped
                if session.is_quiet() and self._clock() - since_seconds < WIRE_REUSE_SECONDS:
                    found = session
                else:
                    session.close()
            self._busy[me] = found
            return found

    def _open(self, me: int, deadline: Deadline) -> Session:
        """A new connection, after its handshake."""
        stream, windows = connect(self._address, deadline), self._windows
        try:
            with self._turn:
                self._busy[me] = stream
                if self._closed:
                    raise _closed()
            session = greet(stream, self._side, self._node, lambda: connect(self._address, deadline), deadline)
        except BaseException:
            stream.close()
            raise
        with self._turn:
            self._busy[me] = session
            if self._closed:
                session.cut()
        if windows is not None and (reason := self._offer_window(session, windows, deadline)):
            with self._turn:
                first, self._windows = self._windows is not None, None
            if first:
                reporting.warning(f"bulk bytes to {self._node} go through sockets, not NIXL: {reason}")
        return session

    def _offer_window(self, session: Session, windows: MakeMemory, deadline: Deadline) -> str:
        """See `offer_window`."""
        try:
            return offer_window(session, windows, deadline)
        except BaseException:
            session.close()
            raise


def _closed() -> Cancelled:
    return Cancelled("the connection to another node was closed by this one while a request was in progress")

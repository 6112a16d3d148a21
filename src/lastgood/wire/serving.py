"""The server: accepts connections, and passes the requests of peers to a service.

One thread accepts, and each connection has a thread of its own. All of them end with the `with` block. Connections
that have not yet shown who they are (strangers) are few, few for one address, and short: when there are too many, the
newest is closed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..errors import FrameInvalid, LastgoodError, PeerDown
from ..limits import WIRE_IDLE_SECONDS
from .handshake import JOIN_FIRST_BYTE, Random, Side, expect, receive_client, receive_token
from .messages import Offer, Ready, Reply, Request, check_sizes, failure_of
from .port import Answer, Peer, Service
from .security import Security
from .session import Session
from .sockets import Deadline, Stream, listen, prepare
from .window import MakeMemory, answer_offer, require_clear

ACCEPT_PAUSE_MILLISECONDS = 50
"""after a connection that could not be accepted"""


@dataclass(frozen=True)
class Bounds:
    """How much a server gives to its peers, and to strangers."""

    connections: int = 512
    strangers: int = 256
    strangers_of_address: int = 64
    """16 ranks of a node begin to read at once after a restart, each with two connections"""
    handshake_seconds: float = 10.0
    transfer_seconds: float = 120.0
    """for a request with its bulk bytes, and again for the answer"""
    idle_seconds: float = WIRE_IDLE_SECONDS
    """without a request"""


class Server:
    """Serves `service` at `address` until the end of the `with` block.

    `address`: host and port; port 0 chooses a free one. There is no default, so nothing listens at all interfaces
    unless it is asked to. `me`: this node. `security`: the mode, the same at all nodes. `bounds`: see `Bounds`.
    `clock`: a monotonic clock, in seconds. `random`: returns so many random bytes. `windows`: as for `Channel`; a peer
    that offers none is served through its sockets. Raises Refused for windows with encryption. Entering raises Refused
    for an address that the mode does not allow, and PeerDown for one that cannot be listened at.
    """

    def __init__(
        self,
        address: tuple[str, int],
        me: Peer,
        security: Security,
        service: Service,
        bounds: Bounds | None = None,
        clock: Callable[[], float] = time.monotonic,
        random: Random = os.urandom,
        windows: MakeMemory | None = None,
    ) -> None:
        require_clear(windows, security)
        self._address = address
        self._conversations = Conversations(Side(me, security, random), service, bounds or Bounds(), clock, windows)
        self._listener: socket.socket | None = None
        self._accepting = threading.Thread(target=self._accept, name="wire-accept")
        self._wake, self._woken = socket.socketpair()

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens, with the port that was chosen."""
        assert self._listener is not None, "the server is not entered"
        host, port = self._listener.getsockname()[:2]
        return host, port

    def __enter__(self) -> Server:
        try:
            self._conversations.side.security.check_address(self._address[0])
            self._listener = listen(self._address)
        except BaseException:
            self._close_sockets()
            raise
        self._accepting.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._wake.close()  # the accepting thread sees the end of the pair
        self._accepting.join()
        self._conversations.close()
        self._close_sockets()

    def _close_sockets(self) -> None:
        for one in (self._listener, self._wake, self._woken):
            if one is not None:
                one.close()

    def _accept(self) -> None:
        assert self._listener is not None
        self._listener.settimeout(0)  # a client that has ended since the poll must not block the thread
        poll, ended = select.poll(), select.poll()
        for one in (self._listener, self._woken):
            poll.register(one, select.POLLIN)
        ended.register(self._woken, select.POLLIN)
        while self._woken.fileno() not in [fd for fd, _ in poll.poll()]:
            try:
                sock, address = self._listener.accept()
            except OSError:  # the client has ended, or this process has too many files open
                ended.poll(ACCEPT_PAUSE_MILLISECONDS)
            else:
                self._conversations.begin(sock, address[0])


class Conversations:
    """The connections of a server: one thread for each, counted while they are strangers and in all."""

    def __init__(
        self,
        side: Side,
        service: Service,
        bounds: Bounds,
        clock: Callable[[], float],
        windows: MakeMemory | None = None,
    ) -> None:
        self.side, self._service, self._bounds, self._clock, self._windows = side, service, bounds, clock, windows
        self._lock = threading.Lock()
        self._open: dict[threading.Thread, tuple[Stream, ...]] = {}
        self._strangers: dict[threading.Thread, str] = {}
        self._joins: dict[bytes, queue.SimpleQueue[Stream | None]] = {}
        self._closing = False

    def begin(self, sock: socket.socket, host: str) -> None:
        """Serve this connection in a thread; close it where there are too many."""
        stream = Stream(sock, host)
        thread = threading.Thread(target=self._run, args=(stream,), name="wire-connection")
        bounds = self._bounds
        with self._lock:
            strangers = [*self._strangers.values()]
            # guard: wire-strangers-bounded
            if (
                len(self._open) >= bounds.connections
                or len(strangers) >= bounds.strangers
                or strangers.count(host) >= bounds.strangers_of_address
            ):
                stream.close()
                return
            self._open[thread], self._strangers[thread] = (stream,), host
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads for this process
            self._forget(thread)  # guard: wire-unstarted-connection-closed
            stream.close()

    def close(self) -> None:
        """End all connections, and wait for their threads. A request that the service handles is waited for."""
        with self._lock:
            self._closing = True
            for stream in itertools.chain.from_iterable(self._open.values()):
                stream.cut()  # guard: wire-connections-cut-at-close
            for arrived in self._joins.values():
                arrived.put(None)
            threads = [*self._open]
        for thread in threads:
            thread.join()  # guard: wire-connection-threads-joined

    def _run(self, stream: Stream) -> None:
        try:
            with contextlib.suppress(LastgoodError):  # the peer has seen why, or is the one that broke it
                prepare(stream.raw)
                self.serve(stream)
        finally:
            self._forget(threading.current_thread())  # guard: wire-ended-connection-forgotten

    def _forget(self, thread: threading.Thread) -> None:
        with self._lock:
            self._open.pop(thread, None)
            self._strangers.pop(thread, None)

    def serve(self, stream: Stream) -> None:
        """Serve one connection until it ends. Raises the LastgoodError that ended it; the connection is closed then."""
        deadline = Deadline(self._clock, self._bounds.handshake_seconds, f"the handshake with {stream.name}")
        joined = False
        try:
            if self.side.security.bulk_apart and stream.peek(deadline) == JOIN_FIRST_BYTE:
                joined = self._joins_other(stream, deadline)
                return
            peer, session, token = receive_client(stream, self.side, deadline)
            with self._lock:
                self._strangers.pop(threading.current_thread(), None)
            with contextlib.closing(session):
                if self.side.security.bulk_apart:
                    with self._bulk_stream(session, token, deadline) as bulk:
                        session.attach(bulk)
                        self._serve_peer(peer, session, deadline)
                else:
                    self._serve_peer(peer, session, deadline)
        finally:
            if not joined:
                stream.close()

    # ---- a second connection, for bulk bytes -----------------------------------------------------------------

    @contextlib.contextmanager
    def _bulk_stream(self, session: Session, token: bytes, deadline: Deadline) -> Iterator[Stream]:
        """The stream that the client joins with this token, closed at the end of the block."""
        arrived: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        with self._lock:
            self._joins[token] = arrived
        bulk = None
        try:
            try:
                session.send(Ready(), (), deadline)
                with contextlib.suppress(queue.Empty):
                    bulk = arrived.get(timeout=deadline.left())
            finally:
                bulk = bulk or self._withdraw(token, arrived)
            if bulk is None:
                raise deadline.passed()
            with self._lock:
                self._open[threading.current_thread()] += (bulk,)
                if self._closing:
                    bulk.cut()
            yield bulk
        finally:
            if bulk is not None:
                bulk.close()

    def _withdraw(self, token: bytes, arrived: queue.SimpleQueue[Stream | None]) -> Stream | None:
        """Wait for this token no longer. Returns the stream that has joined with it in the last moment."""
        with self._lock:
            self._joins.pop(token, None)
        return None if arrived.empty() else arrived.get()

    def _joins_other(self, stream: Stream, deadline: Deadline) -> bool:
        """Hand a stream to the connection that its token belongs to. Returns whether there is one."""
        token = receive_token(stream, deadline)
        with self._lock:
            arrived = self._joins.pop(token, None)  # guard: wire-token-used-once
            if arrived is not None:
                arrived.put(stream)
        return arrived is not None

    # ---- requests --------------------------------------------------------------------------------------------

    def _serve_peer(self, peer: Peer, session: Session, deadline: Deadline) -> None:
        session.send(Ready(), (), deadline)
        offered = False
        with contextlib.ExitStack() as sending:
            while True:
                idle = Deadline(self._clock, self._bounds.idle_seconds, f"the next request of {session.name}")
                first = session.receive_first(idle)
                sending.close()  # the peer has all of the last answer  # guard: wire-file-open-until-received
                deadline = self._transfer(f"receiving a request of {session.name}")
                message = session.receive(deadline, first)
                if isinstance(message, Offer) and not offered:  # guard: window-offered-once
                    offered = True
                    answer_offer(session, self._windows, message, deadline)
                else:
                    request = expect(Request, message, session.name)
                    self._serve_request(peer, session, request, deadline, sending)

    def _serve_request(
        self, peer: Peer, session: Session, request: Request, deadline: Deadline, sending: contextlib.ExitStack
    ) -> None:
        """Receive the bulk bytes of a request, let the service handle it, and send the answer.

        `sending` closes the file of which a part is sent.
        """
        mv = memoryview(b"")
        if request.length:
            try:
                mv = self._buffer(peer, request)
            except Exception as error:
                session.discard_bulk(request.length, deadline)
                self._send_error(session, error)
                if not isinstance(error, LastgoodError):
                    raise
                return
            try:
                session.receive_bulk(mv, request.digest, deadline)
            except BaseException as error:
                self._service.abandon(peer, request.record)  # guard: wire-broken-buffer-abandoned
                if isinstance(error, FrameInvalid):
                    self._send_error(session, error)
                raise
        try:
            answer = self._service.handle(peer, request.record, mv)
            if answer.part is not None:
                sending.callback(answer.part.file.close)
            bulk, length = _bulk_of(answer, session)
            reply = Reply(answer.record, length, session.digest(bulk))
            check_sizes(reply.record, reply.length, request.room)
        except Exception as error:
            self._send_error(session, error)
            if not isinstance(error, LastgoodError):
                raise
            return
        deadline = self._transfer(f"sending an answer to {session.name}")
        if answer.part is not None and not bulk:
            session.send_part(reply, answer.part, deadline)
        else:
            session.send(reply, bulk, deadline, answer.background)

    def _buffer(self, peer: Peer, request: Request) -> memoryview:
        """The service's buffer for the bulk bytes of a request."""
        mv = self._service.buffer(peer, request.record, request.length).cast("B")
        if len(mv) != request.length or mv.readonly:
            self._service.abandon(peer, request.record)
            raise ValueError(f"buffer() returned {len(mv)} bytes (readonly: {mv.readonly}) for {request.length}")
        return mv

    def _send_error(self, session: Session, error: Exception) -> None:
        """Send the error that a request ended with."""
        session.send(failure_of(error), (), self._transfer(f"sending an error to {session.name}"))

    def _transfer(self, what: str) -> Deadline:
        return Deadline(self._clock, self._bounds.transfer_seconds, what)


def _bulk_of(answer: Answer, session: Session) -> tuple[list[memoryview], int]:
    """The bulk bytes of an answer, and their number. There are none of them where a part of a file is sent as it is.

    Raises PeerDown for a part that cannot be read.
    """
    if answer.part is None:
        bulk = [one.cast("B") for one in answer.bulk]
        return bulk, sum(map(len, bulk))
    if session.sends_files:
        return [], answer.part.length
    try:
        data = os.pread(answer.part.file.fileno(), answer.part.length, answer.part.offset)
    except OSError as error:
        raise PeerDown(f"a file of that node cannot be read: {error.strerror}") from error
    return [memoryview(data)], len(data)

"""One stream of bytes over a socket, with a deadline for every wait. OSErrors become errors of errors.py."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence

from ..errors import LastgoodError, PeerDown, TimedOut
from .background import Background, background_of
from .port import FilePart
from .tls import stream_error

SEND_BYTES = 1 << 20
"""The most bytes of one call that sends: a deadline is looked at between two of them."""
DROPPED_BYTES = 1 << 20
"""The most bytes that are read and dropped at the end of a connection."""
BUFFERS_AT_ONCE = 64
"""The most buffers of one `sendmsg`; the system's limit is far above it."""
KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
"""A connection whose peer's machine is gone ends after 60 + 4 * 15 s without traffic, where the system allows it."""


class Deadline:
    """A point in time until which a call has to end. `clock`: a monotonic clock, in seconds."""

    def __init__(self, clock: Callable[[], float], seconds: float, what: str) -> None:
        self._clock, self._until, self._seconds, self._what = clock, clock() + seconds, seconds, what

    def left(self) -> float:
        """The seconds that are left. Raises TimedOut."""
        left = self._until - self._clock()
        if left <= 0:  # guard: wire-deadline-kept
            raise self.passed()
        return left

    def passed(self) -> TimedOut:
        """The error that says so."""
        return TimedOut(
            f"{self._what}: not done within {self._seconds:g} s",
            safe="The connection is closed; a late answer is not read.",
            todo="Repeat the request. If this happens again, see whether that node or its network is overloaded.",
        )


class Stream:
    """A connected socket. `name`: of the other end, for errors. Other threads than its own may only call `cut`."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._socket, self.name = sock, name
        self._background: Background | None = None
        """the rate for bytes of the background, once some were sent"""

    @property
    def raw(self) -> socket.socket:
        """The socket."""
        return self._socket

    def replace(self, sock: socket.socket) -> None:
        """Go on with this socket, which has taken over the connection of the one before."""
        self._socket = sock

    def send(self, buffers: Sequence[bytes | memoryview], deadline: Deadline, background: bool = False) -> None:
        """Send these buffers whole, without copying them. `background`: slower than others on the same path
        (background.py). Raises PeerDown or TimedOut."""
        left = [memoryview(one).cast("B") for one in buffers if len(one)]
        with self._failing(deadline):
            rate = self._rate(background)
            while left:
                self._socket.settimeout(deadline.left())
                sent = self._send_some(left) if rate is None else self._send_part(left[0], rate)
                while left and sent >= len(left[0]):
                    sent -= len(left.pop(0))
                if sent:
                    left[0] = left[0][sent:]

    @property
    def sends_files(self) -> bool:
        """Whether `send_part` can be called: not through TLS."""
        return not isinstance(self._socket, ssl.SSLSocket)

    def send_part(self, part: FilePart, deadline: Deadline) -> None:
        """Send a part of a file from the pages of the file, without copying them. Raises PeerDown or TimedOut.

        The system may send some of them after this has returned.
        """
        at, end = part.offset, part.offset + part.length
        with self._failing(deadline):
            self._rate(background=False)
            self._socket.settimeout(deadline.left())  # which lets no call block
            writable = select.poll()
            writable.register(self._socket, select.POLLOUT)
            while at < end:
                if not writable.poll(1000 * deadline.left()):
                    raise deadline.passed()
                with contextlib.suppress(BlockingIOError):
                    sent = os.sendfile(self._socket.fileno(), part.file.fileno(), at, end - at)
                    if not sent:
                        raise _down(self.name, "a file that was being sent has become shorter")
                    at += sent

    def _send_some(self, buffers: Sequence[memoryview]) -> int:
        if isinstance(self._socket, ssl.SSLSocket) or len(buffers) == 1:
            return self._socket.send(buffers[0][:SEND_BYTES])
        return self._socket.sendmsg(buffers[:BUFFERS_AT_ONCE])

    def _send_part(self, buffer: memoryview, rate: Background) -> int:
        sent = self._socket.send(buffer[: rate.part_bytes()])
        rate.measure()
        return sent

    def _rate(self, background: bool) -> Background | None:
        """The rate for what is sent now; None: there is none."""
        if not background:
            if self._background is not None:
                self._background.end()
            return None
        if self._background is None:
            self._background = background_of(self._socket)
        if self._background is not None:
            self._background.begin()
        return self._background

    def receive_into(self, mv: memoryview, deadline: Deadline) -> None:
        """Fill `mv`. Raises PeerDown where the stream ends before, or TimedOut."""
        with self._failing(deadline):
            while len(mv):
                self._socket.settimeout(deadline.left())
                got = self._socket.recv_into(mv)
                if not got:  # guard: wire-end-of-stream-is-error
                    raise _down(self.name, "the connection was closed by the other side")
                mv = mv[got:]

    def receive(self, length: int, deadline: Deadline) -> bytes:
        """The next `length` bytes. Raises PeerDown or TimedOut."""
        data = bytearray(length)
        self.receive_into(memoryview(data), deadline)
        return bytes(data)

    def peek(self, deadline: Deadline) -> bytes:
        """The next byte, which stays to be received. Raises PeerDown or TimedOut."""
        with self._failing(deadline):
            self._socket.settimeout(deadline.left())
            return self._socket.recv(1, socket.MSG_PEEK)

    def is_quiet(self) -> bool:
        """Whether the stream is open and holds nothing to read, as it has to be between two requests."""
        return not self.waits(0)

    def waits(self, milliseconds: int) -> bool:
        """Whether there is something to read, or the end of the stream, within this time."""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(milliseconds))

    def cut(self) -> None:
        """End every wait on the stream, in whichever thread, with PeerDown."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def end(self, deadline: Deadline) -> None:
        """Send nothing more, and drop what comes until the other side ends too, so that it reads what was sent before.

        Bytes that nobody has read would make the system reset the connection. Raises nothing.
        """
        with contextlib.suppress(LastgoodError), self._failing(deadline):
            socket.socket.shutdown(self._socket, socket.SHUT_WR)
            left = DROPPED_BYTES
            while left > 0:
                self._socket.settimeout(deadline.left())
                if not (part := self._socket.recv(min(left, SEND_BYTES))):
                    return
                left -= len(part)

    def close(self) -> None:
        """Close the socket. May be called again."""
        with contextlib.suppress(OSError):
            self._socket.close()

    @contextlib.contextmanager
    def _failing(self, deadline: Deadline) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise deadline.passed() from None
        except ssl.SSLError as error:
            raise stream_error(self.name, error) from error
        except (OSError, ValueError) as error:  # ValueError: a TLS socket that was cut by another thread
            raise _down(self.name, getattr(error, "strerror", None) or str(error)) from error


def connect(address: tuple[str, int], deadline: Deadline) -> Stream:
    """A new connection. Raises PeerDown or TimedOut."""
    name = f"{address[0]}:{address[1]}"
    try:
        sock = socket.create_connection(address, timeout=deadline.left())
    except TimeoutError:
        raise deadline.passed() from None
    except OSError as error:
        raise _down(name, error.strerror or str(error)) from error
    prepare(sock)
    return Stream(sock, name)


def listen(address: tuple[str, int]) -> socket.socket:
    """A socket that accepts connections at this address. Raises PeerDown."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        return socket.create_server(address, family=family, backlog=128)
    except OSError as error:
        raise PeerDown(
            f"{address[0]}:{address[1]} cannot be listened at: {error.strerror or error}",
            todo="Name an address of this machine, and a port that is free (0 chooses one).",
        ) from error


def prepare(sock: socket.socket) -> None:
    """Small frames leave at once, and a connection to a machine that is gone ends."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _down(name: str, why: str) -> PeerDown:
    return PeerDown(
        f"the connection to {name} failed: {why}",
        safe="Nothing that was received in part is used.",
        todo="Repeat the request, or go on with another peer.",
    )

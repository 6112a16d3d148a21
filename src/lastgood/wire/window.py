"""Bulk bytes through windows: memory of one side that the other one writes. The exchange around it, over a session.

    client                    server
    Offer               ->
                        <-    Offer                        or Decline: bulk bytes stay on the sockets
    sender                    receiver
    writes a piece into the window of the receiver
    Placed(length)      ->
                        <-    Taken                        the piece was copied out of the window

Each connection has a window at both sides: WIRE_PIECES pieces, written in turn, in the same places at both sides. It
is all that a peer may write, it belongs to one connection, and it goes with it. The memory of a caller is never
registered: a piece is digested after it was copied to where it stays, so what a peer writes late, or again, changes
nothing that is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from ..errors import PeerDown, Refused
from ..limits import WIRE_PIECE_BYTES, WIRE_PIECES
from .handshake import expect
from .messages import TEXT_LIMIT, Decline, Failure, Offer, Placed, Taken, error_of
from .security import NO_CONNECTION, Security
from .session import Session
from .sockets import Deadline

WINDOW_BYTES = WIRE_PIECE_BYTES * WIRE_PIECES
QUICK_CHECKS = 200
"""So often a sender looks whether a piece is written before it waits between two looks: on a fast network, no more."""
WAIT_MILLISECONDS = 1


class Memory(Protocol):
    """The window of one side of a connection, and the way to that of the other one. Used by one thread at a time."""

    @property
    def offer(self) -> Offer:
        """What the other side needs to write here."""

    @property
    def view(self) -> memoryview:
        """The window: WINDOW_BYTES bytes."""

    def connect(self, offer: Offer) -> None:
        """Prepare writing to the window that the other side has offered. Raises PeerDown."""

    def write(self, start: int, length: int) -> None:
        """Begin to write view[start : start + length] to the same place of the other window. Raises PeerDown."""

    def written(self) -> bool:
        """Whether that has been done. Raises PeerDown."""

    def progress(self) -> None:
        """Let what the other side writes arrive, where the processor has to do that."""

    def close(self) -> None:
        """End the connection, and then the window. May be called again."""


MakeMemory = Callable[[], Memory]


def require_clear(make: MakeMemory | None, security: Security) -> None:
    """Refuse windows where bulk bytes are to be encrypted. Raises Refused."""
    if make is not None and security.encrypt:  # guard: window-never-in-place-of-encryption
        raise Refused(
            "bulk bytes are to be encrypted, and NIXL sends them in the clear",
            safe=NO_CONNECTION,
            todo="Use sockets, or certificates without encrypt=True.",
        )


def offer_window(session: Session, make: MakeMemory, deadline: Deadline) -> str:
    """The client's side: use windows on this connection. Returns why the server does not, or "".

    Raises PeerDown, FrameInvalid or TimedOut.
    """
    memory = make()
    try:
        session.send(memory.offer, (), deadline)
        answer = session.receive(deadline)
        if isinstance(answer, Decline):
            memory.close()
            return answer.reason or "?"
        memory.connect(expect(Offer, answer, session.name))
    except BaseException:
        memory.close()  # guard: window-ends-with-failed-offer
        raise
    session.attach(Window(session, memory))
    return ""


def answer_offer(session: Session, make: MakeMemory | None, offer: Offer, deadline: Deadline) -> None:
    """The server's side: use windows on this connection, or decline. Raises PeerDown or TimedOut."""
    if make is None:
        session.send(Decline("it uses sockets"), (), deadline)
        return
    with contextlib.ExitStack() as made:
        try:
            memory = make()
            made.callback(memory.close)
            memory.connect(offer)
        except PeerDown as error:
            session.send(Decline(error.what[:TEXT_LIMIT]), (), deadline)
            return
        session.send(memory.offer, (), deadline)
        made.pop_all()
    session.attach(Window(session, memory))


class Window:
    """The carrier of bulk bytes of a session whose two sides have exchanged their offers."""

    def __init__(self, session: Session, memory: Memory) -> None:
        self._session, self._memory = session, memory
        self._sent = self._untaken = self._received = 0
        """pieces"""
        self._at = self._left = 0
        """the part of the oldest piece that was not read yet"""

    def send(self, buffers: Sequence[bytes | memoryview], deadline: Deadline, background: bool = False) -> None:
        """Send these buffers whole. `background` changes nothing: what shares the network of such memory is its matter.
        Raises PeerDown, FrameInvalid or TimedOut."""
        for parts in pieces(buffers, WIRE_PIECE_BYTES):
            while self._untaken == WIRE_PIECES:  # guard: window-piece-taken-before-next
                self._await_taken(deadline)
            start = end = self._sent % WIRE_PIECES * WIRE_PIECE_BYTES
            for part in parts:
                self._memory.view[end : end + len(part)] = part
                end += len(part)
            self._memory.write(start, end - start)
            self._await_written(deadline)
            self._session.send(Placed(end - start), (), deadline)
            self._sent += 1
            self._untaken += 1
        while self._untaken:
            self._await_taken(deadline)

    def _await_written(self, deadline: Deadline) -> None:
        checks = 0
        while not self._memory.written():
            deadline.left()  # guard: window-write-ends-in-time
            checks += 1
            if self._session.waits(WAIT_MILLISECONDS if checks > QUICK_CHECKS else 0):
                self._await_taken(deadline)  # or the end of the connection

    def _await_taken(self, deadline: Deadline) -> None:
        message = self._session.receive(deadline)
        if isinstance(message, Failure):  # what the receiver found in between
            raise error_of(message)
        expect(Taken, message, self._session.name)
        self._untaken -= 1

    def receive_into(self, mv: memoryview, deadline: Deadline) -> None:
        """Fill `mv`. Raises PeerDown, FrameInvalid or TimedOut."""
        while len(mv):
            if not self._left:
                self._await_placed(deadline)
            length = min(len(mv), self._left)
            mv[:length] = self._memory.view[self._at : self._at + length]
            mv = mv[length:]
            self._at, self._left = self._at + length, self._left - length
            if not self._left:
                self._received += 1
                self._session.send(Taken(), (), deadline)

    def _await_placed(self, deadline: Deadline) -> None:
        while not self._session.waits(WAIT_MILLISECONDS):
            deadline.left()  # guard: window-wait-ends-in-time
            self._memory.progress()
        placed = expect(Placed, self._session.receive(deadline), self._session.name)
        self._at, self._left = self._received % WIRE_PIECES * WIRE_PIECE_BYTES, placed.length

    def is_quiet(self) -> bool:
        """Whether it is between two requests."""
        return not self._untaken and not self._left

    def cut(self) -> None:
        """Nothing: every wait here is one for the session, which is cut."""

    def close(self) -> None:
        """End the connection of the windows. May be called again."""
        self._memory.close()  # guard: window-ends-with-connection


def pieces(buffers: Sequence[bytes | memoryview], limit: int) -> Iterator[list[memoryview]]:
    """These buffers, cut into pieces of `limit` bytes; the last one may be shorter. Each is a list of views."""
    parts, room = [], limit
    for buffer in buffers:
        mv = memoryview(buffer).cast("B")
        while len(mv):
            parts.append(mv[:room])
            mv, room = mv[room:], room - len(parts[-1])
            if not room:
                yield parts
                parts, room = [], limit
    if parts:
        yield parts

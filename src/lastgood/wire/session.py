"""An authenticated connection: messages, and bulk bytes after them, in both directions."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Protocol

from ..errors import FrameInvalid
from .frames import HEADER, SAFE, SAME_VERSION, FrameReader, FrameWriter
from .keys import KEYED_DIGESTS, ConnectionKeys, digest, hasher
from .messages import Message
from .port import FilePart
from .sockets import Deadline, Stream

RECEIVE_BYTES = 256 << 10
"""Bulk bytes are received and digested in parts of this length, which stay in the processor's cache."""
DISCARD_BYTES = 64 << 10


def receive_message(stream: Stream, reader: FrameReader, deadline: Deadline, first: bytes = b"") -> Message:
    """The next message of a stream. `first`: what was read of it already. Raises FrameInvalid, PeerDown or TimedOut."""
    header = first + stream.receive(HEADER.size - len(first), deadline)
    return reader.decode(header, stream.receive(reader.rest_bytes(header), deadline))


class Bulk(Protocol):
    """What carries the bulk bytes of a connection: a stream, or a window."""

    def send(self, buffers: Sequence[bytes | memoryview], deadline: Deadline, background: bool = False) -> None: ...
    def receive_into(self, mv: memoryview, deadline: Deadline) -> None: ...
    def is_quiet(self) -> bool: ...
    def cut(self) -> None: ...
    def close(self) -> None: ...


class Session:
    """One connection after its handshake. It belongs to one thread; only `cut` may come from others.

    `control` carries frames, and bulk bytes too until `attach`. `algorithm`: the digest of bulk bytes. `server`: which
    of the two sides this is. After any error the session must be closed.
    """

    def __init__(self, control: Stream, keys: ConnectionKeys, algorithm: str, *, server: bool) -> None:
        self._control, self._algorithm = control, algorithm
        self._carriers: list[Bulk] = [control]
        """the last one carries bulk bytes"""
        to_server, to_client = keys.frames_to_server, keys.frames_to_client
        self._writer = FrameWriter(to_client if server else to_server)
        self._reader = FrameReader(to_server if server else to_client, control.name)
        self._send_key = keys.bulk_to_client if server else keys.bulk_to_server
        self._receive_key = keys.bulk_to_server if server else keys.bulk_to_client

    @property
    def name(self) -> str:
        """The other end, for errors."""
        return self._control.name

    @property
    def _bulk(self) -> Bulk:
        return self._carriers[-1]

    def attach(self, bulk: Bulk) -> None:
        """Send and receive bulk bytes on this carrier from now on. It is closed with the connection."""
        self._carriers.append(bulk)

    def join(self, frame: bytes, deadline: Deadline) -> None:
        """Send the first frame of the stream for bulk bytes. Raises PeerDown or TimedOut."""
        self._bulk.send([frame], deadline)

    def digest(self, buffers: Sequence[memoryview]) -> bytes:
        """The digest of bulk bytes that this side is about to send."""
        return digest(self._algorithm, self._send_key, buffers) if buffers else b""

    def send(self, message: Message, bulk: Sequence[memoryview], deadline: Deadline, background: bool = False) -> None:
        """Send a message, and these bulk bytes after it, in the background or not. Raises PeerDown or TimedOut."""
        frame = self._writer.encode(message)
        if self._bulk is self._control:
            self._control.send([frame, *bulk], deadline, background and bool(bulk))
        else:
            self._control.send([frame], deadline)
            if bulk:
                self._bulk.send(bulk, deadline, background)

    @property
    def sends_files(self) -> bool:
        """Whether this side may send a part of a file in place of bytes: in the clear, and with no keyed digest."""
        return isinstance(self._bulk, Stream) and self._bulk.sends_files and self._algorithm not in KEYED_DIGESTS

    def send_part(self, message: Message, part: FilePart, deadline: Deadline) -> None:
        """Send a message, and a part of a file after it, where `sends_files`. Raises PeerDown or TimedOut."""
        assert isinstance(self._bulk, Stream), "only a stream sends files"
        self._control.send([self._writer.encode(message)], deadline)
        self._bulk.send_part(part, deadline)

    def receive_first(self, deadline: Deadline) -> bytes:
        """The first byte of the next message. Raises PeerDown or TimedOut."""
        return self._control.receive(1, deadline)

    def receive(self, deadline: Deadline, first: bytes = b"") -> Message:
        """The next message. `first`: what was read of it already. Raises FrameInvalid, PeerDown or TimedOut."""
        return receive_message(self._control, self._reader, deadline, first)

    def waits(self, milliseconds: int) -> bool:
        """Whether there is a message, or the end of the connection, within this time."""
        return self._control.waits(milliseconds)

    def receive_bulk(self, mv: memoryview, expected: bytes, deadline: Deadline) -> None:
        """Fill `mv` with bulk bytes that have this digest. Raises FrameInvalid, PeerDown or TimedOut."""
        found = hasher(self._algorithm, self._receive_key)
        for at in range(0, len(mv), RECEIVE_BYTES):
            part = mv[at : at + RECEIVE_BYTES]
            self._bulk.receive_into(part, deadline)
            found.update(part)
        if not hmac.compare_digest(found.digest(), expected):  # guard: wire-bulk-digest-checked
            raise FrameInvalid(
                f"{len(mv)} bulk bytes from {self.name} do not have the digest that was sent",
                safe=SAFE,
                todo="Repeat the request. If this happens again, check the network and the memory of both nodes.",
                reason="digest",
            )

    def receive_unverified(self, mv: memoryview, deadline: Deadline) -> None:
        """Fill `mv` with bulk bytes that were sent without a digest. Raises FrameInvalid for a mode whose digests are
        keyed, PeerDown or TimedOut."""
        if self._algorithm in KEYED_DIGESTS:  # guard: wire-keyed-digest-never-left-out
            what = f"{len(mv)} bulk bytes from {self.name} have no digest"
            raise FrameInvalid(what, safe=SAFE, todo=SAME_VERSION, reason="digest")
        self._bulk.receive_into(mv, deadline)

    def discard_bulk(self, length: int, deadline: Deadline) -> None:
        """Read bulk bytes that nobody wants, so that the connection can go on. Raises PeerDown or TimedOut."""
        scratch = memoryview(bytearray(min(length, DISCARD_BYTES)))
        while length:
            part = scratch[: min(length, DISCARD_BYTES)]
            self._bulk.receive_into(part, deadline)
            length -= len(part)

    def is_quiet(self) -> bool:
        """Whether the connection is open, and holds nothing to read."""
        return all(one.is_quiet() for one in self._carriers)

    def cut(self) -> None:
        """End every wait on the connection with PeerDown."""
        for one in self._carriers:
            one.cut()

    def close(self) -> None:
        """Close the connection. May be called again."""
        for one in self._carriers:
            one.close()

"""What the wire between nodes offers, as contracts: `Wire` at the node that asks, `Service` at the node that answers.

They name no transport. The implementation of this room is `Channel` (channel.py) and `Server` (serving.py), over
sockets of the standard library; bulk bytes may go through windows instead (window.py), over a network with remote
memory access.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol


class OpenFile(Protocol):
    """A file that can be sent by its descriptor."""

    def fileno(self) -> int: ...
    def close(self) -> None: ...


class FilePart(NamedTuple):
    """A range of an open file, all of which exists."""

    file: OpenFile
    offset: int
    length: int


class Peer(NamedTuple):
    """The identity of a node in a run."""

    run: str
    """the id of the run"""
    node: str
    """the name of the node in the run"""


class Answer(NamedTuple):
    """The answer to one request: a small record and, where it was asked for, bulk bytes."""

    record: bytes = b""
    """at most limits.WIRE_RECORD_LIMIT_BYTES long; its meaning is a matter of the service"""
    bulk: Sequence[memoryview] = ()
    """contiguous views of bytes. At the node that asked: the filled part of its own buffer, or nothing"""
    background: bool = False
    """as for `Wire.call`, for the bulk bytes of the answer"""
    part: FilePart | None = None
    """the bulk bytes of an answer to a call with `caller_verifies`, in place of `bulk`. The wire closes the file, which
    may not change before that: the system sends its pages, perhaps after it has taken the answer"""


class Wire(Protocol):
    """Requests to one peer. Every call may be made from any thread.

    ==================  ====================================================================================
    outcome of a call   what it means
    ==================  ====================================================================================
    returns an Answer   the service has handled the request once; every byte has the digest that was sent, if one was
    PeerRefused         nothing was sent: the two nodes do not accept each other
    Refused             the request exceeds a limit, and nothing was sent; or the answer exceeds `incoming`
    another error       raised by the service with this class, what, safe and todo
    PeerDown            the connection failed, or the service failed with a bug
    FrameInvalid        what came back is not what the peer has sent, or the peer found that of the request
    TimedOut            no answer within `timeout_seconds`
    Cancelled           the wire was closed
    ==================  ====================================================================================

    After PeerDown, FrameInvalid, TimedOut and Cancelled it is not known whether the service has handled the request,
    and the connection is not used again. Nothing is sent a second time, so a request that may be repeated is repeated
    by the caller. In every outcome but the first the content of `incoming` is undefined.

    `request`: bytes whose meaning is a matter of the service. `outgoing`: contiguous buffers that are sent with it,
    in this order; they must not change until the call returns. Default: none. `incoming`: the buffer into which the
    bulk bytes of the answer are received; it may be longer than they are. Default: an answer with
    bulk bytes is refused. `timeout_seconds`: the time for the whole call, the connection included. `background`: the
    outgoing bytes are sent so that others on the same path need not wait (background.py). Default: as fast as possible.
    `caller_verifies` (default False): the caller compares the bulk bytes of the answer with a digest that it has, and
    the wire accepts them without one, unless its mode has keyed digests. The service learns of it by the request.
    """

    def call(
        self,
        request: bytes,
        *,
        outgoing: Iterable[memoryview] = (),
        incoming: memoryview | None = None,
        timeout_seconds: float,
        background: bool = False,
        caller_verifies: bool = False,
    ) -> Answer: ...

    def close(self) -> None:
        """Close all connections. Calls in progress, and later ones, raise Cancelled."""


class Service(Protocol):
    """What a node does with the requests of its peers. Calls come from several threads, one for each connection.

    =============================  =========================================================================
    call                           required behaviour
    =============================  =========================================================================
    buffer(peer, request, length)  returns a writable, contiguous buffer of exactly `length` bytes, into
                                   which the bulk bytes of the request are received; is called before any
                                   of them is read, and only for a request that has some
    handle(peer, request, bulk)    returns the answer; `bulk` is that buffer, filled and verified, or empty
    abandon(peer, request)         drops that buffer: the connection broke, or the bytes were not those that
                                   were sent; raises nothing
    =============================  =========================================================================

    A connection has one request at a time, from receiving it until its answer was sent: memory of `buffer` and of an
    answer may be used again in the next call from the same thread. After `buffer` has returned, exactly one of `handle`
    and `abandon` is called. `buffer` and `handle` may raise a LastgoodError, which the peer's call raises with the same
    class. Any other exception is a bug: the peer's call raises PeerDown, and the exception ends the thread of the
    connection, so that `threading.excepthook` reports it. `peer` was authenticated as far as the mode does that.
    """

    def buffer(self, peer: Peer, request: bytes, length: int) -> memoryview: ...
    def handle(self, peer: Peer, request: bytes, bulk: memoryview) -> Answer: ...
    def abandon(self, peer: Peer, request: bytes) -> None: ...

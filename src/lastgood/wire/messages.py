"""The messages of the wire, as records. Each field is bounded, and a message with an unknown field is none. Pure."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from .. import errors
from ..errors import LastgoodError, PeerDown, Refused
from ..limits import WIRE_BULK_LIMIT_BYTES, WIRE_PIECE_BYTES, WIRE_RECORD_LIMIT_BYTES

SECRET_BYTES = 32
"""of a nonce, a proof, a token and a digest of blake3"""
Name = Annotated[str, Meta(min_length=1, max_length=256)]
TEXT_LIMIT = 8192
"""characters of each text of an error"""
Text = Annotated[str, Meta(max_length=TEXT_LIMIT)]
Secret = Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
Record = Annotated[bytes, Meta(max_length=WIRE_RECORD_LIMIT_BYTES)]
Length = Annotated[int, Meta(ge=0, le=WIRE_BULK_LIMIT_BYTES)]
Digest = Annotated[bytes, Meta(max_length=SECRET_BYTES)]
Piece = Annotated[int, Meta(ge=1, le=WIRE_PIECE_BYTES)]
AGENT_LIMIT_BYTES = 64 << 10
"""of what the transport needs to reach a window: a few hundred bytes for each network device"""


class _Message(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


class Hello(_Message, frozen=True):
    """The client begins a connection."""

    run: Name
    node: Name
    mode: Name
    """the mode of security and the digest of bulk bytes, which have to be the same on both sides"""
    nonce: Secret


class Welcome(_Message, frozen=True):
    """The server's answer to Hello."""

    run: Name
    node: Name
    nonce: Secret


class Proof(_Message, frozen=True):
    """One side shows that it has the key, to the other one's nonce."""

    proof: Secret


class Refusal(_Message, frozen=True):
    """The server does not accept the client."""

    reason: Name


class Join(_Message, frozen=True):
    """The first frame of a second connection, for bulk bytes."""

    token: Secret


class Ready(_Message, frozen=True):
    """The server accepts the client. The first frame under the keys of the connection."""


class Request(_Message, frozen=True):
    """A request, followed by `length` bulk bytes with this digest."""

    record: Record
    room: Length
    """the most bulk bytes that the answer may have"""
    length: Length = 0
    digest: Digest = b""


class Reply(_Message, frozen=True):
    """An answer, followed by `length` bulk bytes with this digest."""

    record: Record
    length: Length = 0
    digest: Digest = b""


class Offer(_Message, frozen=True):
    """Memory of one side, its window, that the other one may write. The server answers with its own."""

    agent: Annotated[bytes, Meta(min_length=1, max_length=AGENT_LIMIT_BYTES)]
    """how the transport reaches it"""
    address: Annotated[int, Meta(ge=0, lt=2**62)]


class Decline(_Message, frozen=True):
    """The server's answer to Offer where bulk bytes stay on the sockets."""

    reason: Text


class Placed(_Message, frozen=True):
    """The sender has written the next piece of bulk bytes into the window of the receiver."""

    length: Piece


class Taken(_Message, frozen=True):
    """The receiver has copied the oldest piece out of its window."""


class Failure(_Message, frozen=True):
    """The error that a request ended with."""

    kind: Name
    what: Text
    safe: Text
    todo: Text


Handshake = Hello | Welcome | Proof | Refusal | Join | Ready
Message = Handshake | Request | Reply | Failure | Offer | Decline | Placed | Taken


def check_sizes(record: bytes, length: int, room: int = WIRE_BULK_LIMIT_BYTES) -> None:
    """Refuse what does not fit a request or an answer. `room`: the most bulk bytes. Raises Refused."""
    for what, size, limit in (("the record", len(record), WIRE_RECORD_LIMIT_BYTES), ("the bulk bytes", length, room)):
        if size > limit:  # guard: wire-sizes-checked
            raise Refused(f"{what}: {size} bytes, more than the limit of {limit}", safe="None of them were sent.")


def failure_of(error: BaseException) -> Failure:
    """An error of a service as a message. One that is no LastgoodError becomes PeerDown."""
    if not isinstance(error, LastgoodError):
        what = f"the request failed on the peer, by a bug: {type(error).__name__}: {error}"
        error = PeerDown(what, todo="The output of the process there has the traceback.")
    what, safe, todo = (
        part[:TEXT_LIMIT].encode(errors="replace").decode() for part in (error.what, error.safe, error.todo)
    )
    return Failure(type(error).__name__, what, safe, todo)


def error_of(failure: Failure) -> LastgoodError:
    """The error of a message: of its own class if that is a LastgoodError made from texts alone, else PeerDown."""
    kind = errors.class_named(failure.kind, PeerDown)
    return kind(failure.what or "?", safe=failure.safe, todo=failure.todo)

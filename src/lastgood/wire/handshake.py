"""The handshake: two nodes show that they belong to the same run, and agree on the keys of one connection.

    client                                   server
    Hello(run, node, mode, nonce)     ->
                                      <-     Welcome(run, node, nonce)  Proof       or Refusal(reason)
    Proof                             ->
                                      <-     Ready                                  or Refusal(reason)
    Join(token), a second connection  ->                                            where bulk bytes have one
                                      <-     Ready

Proofs and keys are derived from the secret, and from all that both sides have sent: what was changed on the way gives
other keys. With certificates all of it goes through TLS, and the peer's name is compared with its certificate. Ready
is the first frame under the keys. Frames before it have a public key. A Refusal is not authenticated, so it only ends
a handshake.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import NamedTuple, NoReturn, TypeVar

from ..errors import FrameInvalid, PeerRefused
from .frames import HANDSHAKE_BODY_BYTES, PUBLIC_KEY, REPEAT, SAFE, SAME_VERSION, FrameReader, FrameWriter
from .keys import ConnectionKeys
from .messages import SECRET_BYTES, Hello, Join, Message, Proof, Ready, Refusal, Welcome
from .port import Peer
from .security import NO_CONNECTION, Security
from .session import Session, receive_message
from .sockets import Deadline, Stream

JOIN_FIRST_BYTE = b"L"
"""A frame begins with it and a TLS handshake does not, so a server tells the two kinds of connection apart."""
Random = Callable[[int], bytes]
M = TypeVar("M", bound=Message)


class Side(NamedTuple):
    """One side of a handshake: who it is, and how it knows others."""

    me: Peer
    security: Security
    random: Random
    """returns so many random bytes: os.urandom"""


class _Handshake:
    """The frames of a handshake, in both directions, and the transcript of them."""

    def __init__(self, stream: Stream, deadline: Deadline) -> None:
        self._stream, self._deadline = stream, deadline
        self._writer = FrameWriter(PUBLIC_KEY)
        self._reader = FrameReader(PUBLIC_KEY, stream.name, HANDSHAKE_BODY_BYTES)

    def send(self, message: Message) -> None:
        self._stream.send([self._writer.encode(message)], self._deadline)

    def receive(self, kind: type[M]) -> M:
        """The next message, which has to be of this kind. Raises PeerRefused for a Refusal."""
        try:
            message = receive_message(self._stream, self._reader, self._deadline)
        except FrameInvalid as error:
            if error.reason == "version":  # guard: other-version-answered
                self.send(Refusal("version"))  # a frame of this version, by which the other side sees what it is
                self._stream.end(self._deadline)
            raise
        if isinstance(message, Refusal):
            raise refused(self._stream.name, message.reason, "by that node")
        return expect(kind, message, self._stream.name)

    def refuse(self, reason: str) -> NoReturn:
        """Send a Refusal and raise PeerRefused."""
        self.send(Refusal(reason))
        raise refused(self._stream.name, reason, "here")


def expect(kind: type[M], message: Message, name: str) -> M:
    """The message, if it is of this kind. Raises FrameInvalid."""
    if not isinstance(message, kind):
        raise FrameInvalid(
            f"{name} sent {type(message).__name__} where {kind.__name__} was expected",
            safe=SAFE,
            todo=REPEAT,
            reason="order",
        )
    return message


def keys_of(security: Security, hello: Hello, welcome: Welcome) -> ConnectionKeys:
    """The keys after this exchange."""
    return ConnectionKeys.of(security.secret, [FrameWriter(b"").encode(one) for one in (hello, welcome)])


def greet(stream: Stream, side: Side, node: str, connect: Callable[[], Stream], deadline: Deadline) -> Session:
    """The handshake of a client with the peer `node`. `connect` makes the second connection, if there is one.

    Raises PeerRefused, PeerDown, FrameInvalid or TimedOut.
    """
    security, name = side.security, stream.name
    stream = security.wrap(stream, deadline, server=False)
    talk = _Handshake(stream, deadline)
    hello = Hello(side.me.run, side.me.node, security.mode, side.random(SECRET_BYTES))
    talk.send(hello)
    welcome = talk.receive(Welcome)
    peer = Peer(welcome.run, welcome.node)
    if peer.run != side.me.run:  # guard: wire-client-compares-run
        raise refused(name, "run", "here")
    if peer.node != node:  # guard: wire-client-compares-node
        raise refused(name, "node", "here")
    security.check_peer(stream, peer)  # guard: wire-client-checks-certificate-name
    keys = keys_of(security, hello, welcome)
    if not hmac.compare_digest(talk.receive(Proof).proof, keys.server_proof):  # guard: wire-server-proof-checked
        raise refused(name, "key", "here")
    talk.send(Proof(keys.client_proof))
    session = Session(stream, keys, security.digest, server=False)
    expect(Ready, session.receive(deadline), name)
    if security.bulk_apart:
        session.attach(connect())
        try:
            session.join(FrameWriter(PUBLIC_KEY).encode(Join(keys.token)), deadline)
            expect(Ready, session.receive(deadline), name)
        except BaseException:
            session.close()
            raise
    return session


class Accepted(NamedTuple):
    """A client that has shown who it is. The server sends Ready next."""

    peer: Peer
    session: Session
    token: bytes
    """comes with the connection for bulk bytes, if there is one"""


def receive_client(stream: Stream, side: Side, deadline: Deadline) -> Accepted:
    """The handshake of a server, up to the proof of the client.

    Raises PeerRefused, PeerDown, FrameInvalid or TimedOut.
    """
    security = side.security
    stream = security.wrap(stream, deadline, server=True)
    talk = _Handshake(stream, deadline)
    hello = talk.receive(Hello)
    peer = Peer(hello.run, hello.node)
    if peer.run != side.me.run:  # guard: wire-server-compares-run
        talk.refuse("run")
    if hello.mode != security.mode:  # guard: wire-server-compares-mode
        talk.refuse("mode")
    try:
        security.check_peer(stream, peer)  # guard: wire-server-checks-certificate-name
    except PeerRefused:
        talk.send(Refusal("certificate name"))
        raise
    welcome = Welcome(side.me.run, side.me.node, side.random(SECRET_BYTES))
    keys = keys_of(security, hello, welcome)
    talk.send(welcome)
    talk.send(Proof(keys.server_proof))
    if not hmac.compare_digest(talk.receive(Proof).proof, keys.client_proof):  # guard: wire-client-proof-checked
        talk.refuse("key")
    return Accepted(peer, Session(stream, keys, security.digest, server=True), keys.token)


def receive_token(stream: Stream, deadline: Deadline) -> bytes:
    """The token of a connection for bulk bytes. Raises FrameInvalid, PeerDown or TimedOut."""
    return _Handshake(stream, deadline).receive(Join).token


REFUSALS = {
    "run": (
        "it belongs to another opening of this run, or to another run",
        "See which jobs run on the two nodes, and end the one that was replaced. A start of the job makes its nodes "
        "known to each other anew.",
    ),
    "node": (
        "it has another name than it was expected to have",
        "Give each node a name and an address of its own (LASTGOOD_NODE, LASTGOOD_ADDRESS), and start the job again: "
        "its nodes then exchange them.",
    ),
    "mode": (
        "it has another mode of security, or another digest",
        "Set the same variables LASTGOOD_TLS_* on all nodes of the run, or none on any, and start the job again.",
    ),
    "key": (
        "the two nodes have different keys",
        "Start the job again: each opening of a run makes a key, and its nodes exchange it. If this comes back, "
        "see what else listens at that address.",
    ),
    "version": ("it has another version of lastgood", SAME_VERSION),
    "certificate name": (
        "the name in its certificate is not that of the node",
        "Give each node a certificate with its name (LASTGOOD_NODE), or list the names that are accepted "
        "(LASTGOOD_TLS_NAMES).",
    ),
}


def refused(name: str, reason: str, where: str) -> PeerRefused:
    """The error of a handshake that one side ended. `where`: which side."""
    what, todo = REFUSALS.get(reason, ("for an unknown reason", SAME_VERSION))
    return PeerRefused(
        f"the connection with {name} was refused {where}: {what}", safe=NO_CONNECTION, todo=todo, reason=reason
    )

"""How two nodes know each other: with a shared key, with certificates, or not at all.

=============  =================================================  ======================================================
mode           authentication                                     bulk bytes
=============  =================================================  ======================================================
SharedKey      both sides prove that they have the key            in the clear; an authenticated frame has their digest
MutualTls      certificates, TLS 1.3                              the same, on a second connection, or through TLS too
Plain          none                                               in the clear; digests find accidents only
=============  =================================================  ======================================================

`digest`: of bulk bytes. "xxh3_128" (the default) finds accidents; "blake3" is keyed and finds forgeries too. Both nodes
must have the same mode and digest.
"""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass, field
from typing import Protocol

from ..errors import PeerRefused, Refused
from .keys import DIGESTS, checked_key, require_private
from .port import Peer
from .sockets import Deadline, Stream
from .tls import certificate_error, names_of

ACCEPTED = b"+"
"""what a server sends first through TLS"""
NO_CONNECTION = "No request was sent or answered."


class Security(Protocol):
    """What the handshake asks of a mode."""

    @property
    def mode(self) -> str:
        """Name of the mode and its options, which have to be the same on both sides."""

    @property
    def digest(self) -> str:
        """The digest of bulk bytes, one of DIGESTS."""

    @property
    def secret(self) -> bytes:
        """What both sides have to know."""

    @property
    def encrypt(self) -> bool:
        """Whether bulk bytes are encrypted."""

    @property
    def bulk_apart(self) -> bool:
        """Whether bulk bytes have a second connection, in the clear."""

    def check_address(self, host: str) -> None:
        """Refuse an address at which this mode does not listen. Raises Refused."""

    def wrap(self, stream: Stream, deadline: Deadline, *, server: bool) -> Stream:
        """The stream on which the handshake goes on. Raises PeerRefused, PeerDown or TimedOut."""

    def check_peer(self, stream: Stream, peer: Peer) -> None:
        """Refuse a peer that claims to be another node than it is. Raises PeerRefused."""


class _InTheClear:
    """What the modes without TLS have in common."""

    bulk_apart = encrypt = False

    def wrap(self, stream: Stream, deadline: Deadline, *, server: bool) -> Stream:
        return stream

    def check_peer(self, stream: Stream, peer: Peer) -> None:
        """Nothing beyond the proof of the key shows which node it is."""


@dataclass(frozen=True)
class SharedKey(_InTheClear):
    """All nodes of the run have the same key. `key`: at least 32 random bytes. A node can claim any name."""

    key: bytes = field(repr=False)
    digest: str = "xxh3_128"

    def __post_init__(self) -> None:
        _check_digest(self.digest)
        checked_key(self.key)

    @property
    def mode(self) -> str:
        return f"shared key, {self.digest}"

    @property
    def secret(self) -> bytes:
        return self.key

    def check_address(self, host: str) -> None:
        """Any address: strangers cannot prove that they have the key."""


@dataclass(frozen=True)
class Plain(_InTheClear):
    """No authentication, for networks with nobody else, and for tests. Listens at loopback and private addresses."""

    digest: str = "xxh3_128"

    def __post_init__(self) -> None:
        _check_digest(self.digest)

    @property
    def mode(self) -> str:
        return f"plain, {self.digest}"

    @property
    def secret(self) -> bytes:
        return b""

    def check_address(self, host: str) -> None:
        try:
            at = ipaddress.ip_address(host)
            inside = (at.is_loopback or at.is_private) and not at.is_unspecified
        except ValueError:
            inside = host == "localhost"
        if not inside:  # guard: wire-plain-stays-private
            raise Refused(
                f"the wire is without authentication, and {host} is not a loopback or private address",
                safe="Nothing listens there.",
                todo="Use a shared key or certificates, or name an address inside.",
            )


@dataclass(frozen=True)
class MutualTls:
    """Both sides show a certificate. TLS 1.3 only; there are no revocation lists.

    `certificate`, `key`, `authority`: PEM files: of this node, its private key, and of those who sign certificates.
    `encrypt`: bulk bytes go through TLS too. Default: in the clear. `names`: a certificate counts if it has one of
    these names (subject alternative name or common name). Default: it has to have the name of the node, as those have
    that an authority of the run signs.
    """

    certificate: str
    key: str
    authority: str
    digest: str = "xxh3_128"
    encrypt: bool = False
    names: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        _check_digest(self.digest)

    @property
    def mode(self) -> str:
        return f"certificates, {'encrypted, ' if self.encrypt else ''}{self.digest}"

    @property
    def secret(self) -> bytes:
        return b""  # the nonces of the handshake are secret inside of TLS, and so are the keys

    @property
    def bulk_apart(self) -> bool:
        return not self.encrypt

    def check_address(self, host: str) -> None:
        """Any address: strangers have no certificate. Raises PeerRefused where the files of this node are unusable."""
        self._context(server=True)  # guard: unusable-certificate-does-not-listen

    def wrap(self, stream: Stream, deadline: Deadline, *, server: bool) -> Stream:
        context = self._context(server)
        try:
            stream.raw.settimeout(deadline.left())
            # Python leaves the socket open if it finds in `wrap_socket` that the other side has reset the connection;
            # what comes between these two lines is left to the garbage collector.
            stream.raw.getpeername()  # guard: reset-connection-closed
            sock = context.wrap_socket(stream.raw, server_side=server, do_handshake_on_connect=False)
        except OSError as error:
            raise certificate_error(stream.name, error) from error
        stream.replace(sock)
        try:
            sock.do_handshake()
        except TimeoutError:
            raise deadline.passed() from None
        except OSError as error:
            raise certificate_error(stream.name, error) from error
        # In TLS 1.3 a client has finished before the server has seen its certificate: it waits for the server here.
        if server:
            stream.send([ACCEPTED], deadline)
        else:
            stream.receive(len(ACCEPTED), deadline)
        return stream

    def check_peer(self, stream: Stream, peer: Peer) -> None:
        assert isinstance(stream.raw, ssl.SSLSocket)
        found = names_of(stream.raw.getpeercert() or {})
        if not found & (self.names or {peer.node}):  # guard: wire-certificate-names-node
            raise PeerRefused(
                f"{stream.name} is {peer.node!r} by its own account; its certificate is for {sorted(found)}",
                safe=NO_CONNECTION,
                todo="Give each node a certificate with its name (LASTGOOD_NODE), or list the names that are accepted "
                "(LASTGOOD_TLS_NAMES).",
                reason="certificate name",
            )

    def _context(self, server: bool) -> ssl.SSLContext:
        """The files are read each time. Raises PeerRefused where they cannot be used."""
        require_private(self.key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # nodes are known by their names in the run, which check_peer compares
        context.verify_mode = ssl.CERT_REQUIRED  # guard: wire-certificate-required
        if server:
            context.num_tickets = 0  # every connection shows its certificate
        try:
            context.load_cert_chain(self.certificate, self.key)
            context.load_verify_locations(self.authority)
        except (OSError, ssl.SSLError) as error:
            raise PeerRefused(
                f"the certificates cannot be used: {error}",
                safe=NO_CONNECTION,
                todo=f"Look at {self.certificate}, {self.key} and {self.authority}: PEM files of one authority.",
                reason="certificate files",
            ) from error
        return context


def _check_digest(digest: str) -> None:
    if digest not in DIGESTS:
        raise Refused(f"digest={digest!r} is not one of {', '.join(DIGESTS)}", safe=NO_CONNECTION)

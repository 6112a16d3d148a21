"""Who may talk to whom: keys, certificates, runs and names, and what an error tells the user to do."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import ssl
import struct
import threading
import time

import pytest

from lastgood.errors import FrameInvalid, PeerDown, PeerRefused, Refused, TimedOut
from lastgood.wire.channel import Channel
from lastgood.wire.frames import HEADER, MAGIC, PUBLIC_KEY, VERSION, FrameWriter
from lastgood.wire.messages import Hello, Join, Proof, Refusal, Welcome
from lastgood.wire.port import Peer
from lastgood.wire.security import MutualTls, Plain, SharedKey
from lastgood.wire.serving import Bounds, Server
from lastgood.wire.sockets import Deadline, connect
from wired import (
    CLIENT,
    HOST,
    KEY,
    MODES,
    RUN,
    SECONDS,
    SERVER,
    TO_SERVER,
    Network,
    Recorder,
    Stranger,
    authority,
    channel,
    security,
    serving,
)


def refused(server_side, client_side, run: str = RUN, node: str = CLIENT, expected: str = SERVER) -> PeerRefused:
    """The error of a call between these two, in which the service must not take part."""
    service = Recorder()
    with (
        serving(server_side, service) as server,
        Channel(server.address, expected, Peer(run, node), client_side) as wire,
        pytest.raises(PeerRefused) as error,
    ):
        wire.call(b"ping", timeout_seconds=SECONDS)
    assert not service.handled and error.value.safe == "No request was sent or answered." and error.value.todo
    return error.value


@pytest.mark.parametrize("mode", MODES)
def test_a_node_of_another_run_is_refused_by_name(mode, signer):
    error = refused(security(mode, SERVER, signer), security(mode, CLIENT, signer), run="run-2")
    assert error.reason == "run" and "another opening of this run, or to another run" in error.what
    assert "end the one that was replaced" in error.todo


@pytest.mark.parametrize("mode", MODES)
def test_another_node_at_an_old_address_is_refused(mode, signer):
    error = refused(security(mode, SERVER, signer), security(mode, CLIENT, signer), expected="node-c")
    assert error.reason == "node"


@pytest.mark.parametrize(
    ("server_side", "client_side"),
    [
        (SharedKey(KEY), Plain()),
        (Plain(), SharedKey(KEY)),
        (SharedKey(KEY, "blake3"), SharedKey(KEY)),
    ],
    ids=["no key", "a key for nobody", "another digest"],
)
def test_two_modes_do_not_talk_to_each_other(server_side, client_side):
    assert refused(server_side, client_side).reason == "mode"


def test_certificates_and_no_certificates_do_not_talk(signer):
    sides = (signer().node(SERVER), SharedKey(KEY)), (Plain(), signer().node(CLIENT))
    for server_side, client_side in sides:
        with (
            serving(server_side, Recorder()) as server,
            channel(server.address, client_side) as wire,
            pytest.raises((PeerDown, FrameInvalid, PeerRefused), match=r"same mode|connection|no frame"),
        ):
            wire.call(b"ping", timeout_seconds=SECONDS)


def test_a_wrong_key_is_refused_with_its_remedy():
    """The error named key files, which no job has: its key is made when the run is opened."""
    error = refused(SharedKey(KEY), SharedKey(KEY[::-1]))
    assert error.reason == "key" and "each opening of a run makes a key" in error.todo and "file" not in error.todo


def test_a_client_without_the_key_is_not_served():
    service = Recorder()
    with serving(SharedKey(KEY), service) as server, Stranger(server.address) as stranger:
        stranger.send(Hello(RUN, CLIENT, SharedKey(KEY).mode, b"n" * 32))
        stranger.send(Proof(b"p" * 32))
        assert FrameWriter(PUBLIC_KEY, 2).encode(Refusal("key")) in stranger.received()
    assert not service.handled


def test_a_client_of_another_run_is_refused_whatever_it_checks_itself():
    with serving(Plain(), Recorder()) as server, Stranger(server.address) as stranger:
        stranger.send(Hello("run-2", CLIENT, Plain().mode, b"n" * 32))
        assert FrameWriter(PUBLIC_KEY).encode(Refusal("run")) == stranger.received()


@pytest.mark.parametrize(("run", "reason"), [(RUN, "key"), ("run-2", "run")])
def test_a_server_that_is_no_peer_receives_no_request(run, reason):
    """It has the address of a node, and answers as that node would, but for the key or the run."""
    received = []

    def pretend(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            writer = FrameWriter(PUBLIC_KEY)
            received.append(sock.recv(4096))
            sock.sendall(writer.encode(Welcome(run, SERVER, b"n" * 32)) + writer.encode(Proof(b"p" * 32)))
            try:
                received.append(sock.recv(4096))
            except ConnectionResetError:  # the client has closed without reading all
                received.append(b"")

    with socket.create_server((HOST, 0)) as listener, channel(listener.getsockname(), SharedKey(KEY)) as wire:
        thread = threading.Thread(target=pretend, args=(listener,))
        thread.start()
        with pytest.raises(PeerRefused) as error:
            wire.call(b"secret", timeout_seconds=SECONDS)
        thread.join()
    assert error.value.reason == reason and received[1] == b"" and KEY not in received[0]


@pytest.mark.parametrize("other", ["server", "client"])
def test_a_node_of_another_version_is_named_on_both_sides(other):
    """The server closed without an answer: the client saw a reset connection, and was asked to repeat its request."""
    hello = FrameWriter(PUBLIC_KEY).encode(Hello(RUN, CLIENT, "plain", b"n" * 32))
    magic, version, *rest = HEADER.unpack(hello[: HEADER.size])
    frame = HEADER.pack(magic, version + 1, *rest) + hello[HEADER.size :]
    if other == "client":
        with (
            serving(SharedKey(KEY), Recorder()) as server,
            socket.create_connection(server.address, timeout=SECONDS) as sock,
        ):
            sock.sendall(frame)
            header = sock.recv(HEADER.size, socket.MSG_WAITALL)
            assert HEADER.unpack(header)[:2] == (MAGIC, VERSION), "by which it sees the version of the server"
        return

    def answer(listener):
        with listener.accept()[0] as sock:
            sock.recv(4096)
            sock.sendall(frame)
            sock.recv(4096)

    with socket.create_server((HOST, 0)) as listener, channel(listener.getsockname(), SharedKey(KEY)) as wire:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        with pytest.raises(FrameInvalid) as error:
            wire.call(b"secret", timeout_seconds=SECONDS)
        thread.join()
    assert error.value.reason == "version" and error.value.todo == "Install the same version on all nodes."


# ---- certificates ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expired", ["server", "client"])
def test_an_expired_certificate_is_refused_with_its_remedy(signer, expired):
    days = {side: -1 if side == expired else 30 for side in ("server", "client")}
    error = refused(signer().node(SERVER, days=days["server"]), signer().node(CLIENT, days=days["client"]))
    assert error.reason == "certificate expired" and error.todo.startswith("Renew the certificate")
    assert f"because of the certificate of {'that' if expired == 'server' else 'this'} node" in error.what


@pytest.mark.parametrize("early", ["server", "client"])
def test_a_certificate_that_is_not_valid_yet_is_a_matter_of_clocks(signer, early):
    """It was called expired where the certificate was read, and of an unknown authority where it came from: OpenSSL
    names no reason in its alert."""
    sides = {"server": signer().node(SERVER), "client": signer().node(CLIENT)}
    sides[early] = MutualTls(*signer().tomorrow(SERVER if early == "server" else CLIENT), signer().file)
    error = refused(sides["server"], sides["client"])
    assert error.reason == ("certificate not valid yet" if early == "server" else "bad certificate")
    assert "ompare the clocks of the two nodes" in error.todo


@pytest.mark.parametrize("stranger", ["server", "client"])
def test_a_certificate_of_another_authority_is_refused(signer, stranger, tmp_path):
    other = authority(tmp_path, "other")
    own = signer()
    mixed = {node: MutualTls(*other.certificate(node), own.file) for node in (SERVER, CLIENT)}
    error = refused(
        mixed[SERVER] if stranger == "server" else own.node(SERVER),
        mixed[CLIENT] if stranger == "client" else own.node(CLIENT),
    )
    assert error.reason == "unknown authority"


def test_a_client_without_a_certificate_is_refused(signer):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    service = Recorder()
    with (
        serving(signer().node(SERVER), service) as server,
        socket.create_connection(server.address, timeout=SECONDS) as raw,
        context.wrap_socket(raw) as sock,
        pytest.raises((ssl.SSLError, ConnectionError)),
    ):
        sock.sendall(FrameWriter(PUBLIC_KEY).encode(Hello(RUN, CLIENT, signer().node(CLIENT).mode, b"n" * 32)))
        assert sock.recv(1) or pytest.fail("closed without a reason")
    assert not service.handled


@pytest.mark.parametrize("liar", ["server", "client"])
def test_a_certificate_of_another_node_is_refused(signer, liar):
    """Any node of the run could have answered, or asked, in the name of any other."""
    third = MutualTls(*signer().certificate("node-c"), signer().file)
    error = refused(
        third if liar == "server" else signer().node(SERVER), third if liar == "client" else signer().node(CLIENT)
    )
    assert error.reason == "certificate name"


def test_the_names_of_certificates_that_count_can_be_listed(signer):
    signed = {node: signer().certificate("node", alternative=f"{node}.cluster") for node in (SERVER, CLIENT)}
    names = frozenset({"node-a.cluster", "node-b.cluster"})
    both = {node: MutualTls(*signed[node], signer().file, names=names) for node in signed}
    with serving(both[SERVER], Recorder()) as server, channel(server.address, both[CLIENT]) as wire:
        assert wire.call(b"ping", timeout_seconds=SECONDS).record == b"gnip"
    narrow = MutualTls(*signed[SERVER], signer().file, names=frozenset({"node-a.cluster", "node"}))
    assert refused(narrow, both[CLIENT]).reason == "certificate name"


def test_bulk_bytes_are_encrypted_only_where_that_is_asked_for(signer):
    for encrypt in (False, True):
        seen = bytearray()
        with serving(signer().node(SERVER, encrypt=encrypt), Recorder()) as server, Network(server.address) as network:
            network.fault = lambda direction: lambda data: seen.extend(data) or data  # noqa: B023
            with channel(network.address, signer().node(CLIENT, encrypt=encrypt)) as wire:
                incoming = memoryview(bytearray(99))
                wire.call(b"a record", outgoing=[memoryview(b"bulk bytes")], incoming=incoming, timeout_seconds=SECONDS)
        assert (b"bulk bytes" in seen) is not encrypt and b"a record" not in seen and RUN.encode() not in seen


def test_a_token_that_nobody_waits_for_joins_nothing(signer):
    with serving(signer().node(SERVER), Recorder()) as server, Stranger(server.address) as stranger:
        stranger.send(Join(b"t" * 32))
        assert stranger.received() == b""


def test_a_token_joins_one_connection_only(signer):
    """Whoever had seen a token on the network could have joined after its owner."""
    seen: list[bytes] = []
    with serving(signer().node(SERVER), Recorder()) as server, Network(server.address) as network:
        network.fault = lambda direction: lambda data: (direction == TO_SERVER and seen.append(data)) or data
        with channel(network.address, signer().node(CLIENT)) as wire:
            wire.call(b"ping", timeout_seconds=SECONDS)
            (join,) = [data for data in seen if data.startswith(b"LGWF")]
            with Stranger(server.address) as stranger:
                stranger.socket.sendall(join)
                assert stranger.received() == b""
            incoming = memoryview(bytearray(9))
            assert wire.call(b"", outgoing=[memoryview(b"x")], incoming=incoming, timeout_seconds=SECONDS).bulk


def test_a_bulk_connection_that_never_comes_ends_the_handshake(signer, monkeypatch):
    monkeypatch.setattr("lastgood.wire.session.Session.join", lambda *_: None)
    service = Recorder()
    with (
        serving(signer().node(SERVER), service, Bounds(handshake_seconds=0.3)) as server,
        channel(server.address, signer().node(CLIENT)) as wire,
        pytest.raises((PeerDown, TimedOut)),
    ):
        wire.call(b"ping", timeout_seconds=SECONDS)
    assert not service.handled


# ---- files and addresses -----------------------------------------------------------------------------------------


def test_a_connection_that_is_reset_before_tls_is_closed(signer):
    """Beside an agent that was killed Python left the socket open: `wrap_socket` loses it where it is not connected."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        stream = connect(server.getsockname(), Deadline(time.monotonic, 60.0, "a test"))
        other, _ = server.accept()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its close resets
        other.close()
    assert stream.waits(60_000)
    with contextlib.closing(stream), pytest.raises(PeerDown, match="ended"):
        signer().node(CLIENT).wrap(stream, Deadline(time.monotonic, 60.0, "a test"), server=False)
    gc.collect()  # pytest fails for a socket that nobody has closed


def test_a_private_key_that_others_can_read_is_refused(signer):
    certificate, key = signer().certificate("readable")
    node = MutualTls(certificate, key, signer().file)
    node.check_address(HOST)
    for mode in (0o640, 0o604, 0o660):
        os.chmod(key, mode)
        with pytest.raises(PeerRefused, match=f"mode 0{mode:o}") as error:
            node.check_address(HOST)
        assert f"chmod 600 {key}" in error.value.todo


def test_a_key_that_is_missing_or_short_is_refused(signer, tmp_path):
    with pytest.raises(PeerRefused, match="No such file"):
        MutualTls(signer().file, str(tmp_path / "none"), signer().file).check_address(HOST)
    with pytest.raises(Refused, match="the shared key has 31 bytes"):
        SharedKey(KEY[1:])
    assert KEY.hex() not in repr(SharedKey(KEY)) and repr(KEY) not in repr(SharedKey(KEY))
    with pytest.raises(Refused, match="digest='md5' is not one of"):
        Plain("md5")


def test_files_that_are_no_certificates_are_refused(tmp_path, signer):
    key = signer().certificate(SERVER)[1]
    broken = MutualTls(key, key, key)
    with (
        serving(signer().node(SERVER), Recorder()) as server,
        channel(server.address, broken) as wire,
        pytest.raises(PeerRefused, match="the certificates cannot be used"),
    ):
        wire.call(b"ping", timeout_seconds=SECONDS)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "8.8.8.8", "example.org", ""])
def test_without_authentication_nothing_listens_outside(host):
    with pytest.raises(Refused, match="is not a loopback or private address"):
        Server((host, 0), Peer(RUN, SERVER), Plain(), Recorder()).__enter__()
    SharedKey(KEY).check_address(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "10.1.2.3", "192.168.1.1", "fd00::1", "localhost"])
def test_without_authentication_inner_addresses_are_allowed(host):
    Plain().check_address(host)


def test_an_address_that_is_not_of_this_machine_is_an_error():
    with pytest.raises(PeerDown, match="cannot be listened at"):
        Server(("192.0.2.1", 0), Peer(RUN, SERVER), SharedKey(KEY), Recorder()).__enter__()

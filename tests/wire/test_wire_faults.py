"""A network that cuts, loses, repeats, reorders or changes bytes, or hangs: a call is right, or it is an error."""

from __future__ import annotations

import random
import threading

import pytest

from lastgood.errors import FrameInvalid, LastgoodError, PeerDown, TimedOut
from lastgood.wire.frames import HEADER
from lastgood.wire.security import Plain, SharedKey
from wired import (
    CLIENT,
    FAULTS,
    KEY,
    MODES,
    SECONDS,
    SERVER,
    TO_CLIENT,
    TO_SERVER,
    Network,
    Recorder,
    at_offset,
    await_news,
    channel,
    flipped,
    pattern,
    security,
    serving,
)

SHORT_SECONDS = 0.2
"""the timeout of a call that waits for bytes which were lost"""
DATA = pattern(20_000, 5)


def passing(direction: str):
    return lambda data: data


@pytest.mark.parametrize("direction", [TO_SERVER, TO_CLIENT])
def test_changed_bulk_bytes_are_found_and_dropped(direction):
    service = Recorder()
    with serving(Plain(), service) as server, Network(server.address) as network:
        network.fault = lambda way: at_offset(15_000, flipped) if way == direction else passing(way)
        with channel(network.address, Plain()) as wire:
            incoming = memoryview(bytearray(len(DATA)))
            with pytest.raises(FrameInvalid, match=r"20000 bulk bytes from .* do not have the digest") as error:
                wire.call(b"store", outgoing=[memoryview(DATA)], incoming=incoming, timeout_seconds=SECONDS)
            assert not wire._idle and (direction == TO_SERVER or error.value.reason == "digest")
    assert service.abandoned == ([b"store"] if direction == TO_SERVER else [])
    assert len(service.handled) == (direction == TO_CLIENT) and service.unused() == 0


def test_a_frame_that_is_sent_twice_is_handled_once():
    """A switch, or an attacker, repeats a request: it was handled a second time."""
    service = Recorder()
    with serving(SharedKey(KEY), service) as server, Network(server.address) as network:
        seen = []

        def twice(data: bytes) -> bytes:
            seen.append(data)
            return data + data if len(seen) == 3 else data

        network.fault = lambda way: twice if way == TO_SERVER else passing(way)
        with channel(network.address, SharedKey(KEY)) as wire:
            assert wire.call(b"add one", timeout_seconds=SECONDS).record == b"eno dda"
            await_news(wire)  # the server has closed the connection
            assert seen[2].startswith(b"LGWF") and len(seen[2]) > HEADER.size + len(b"add one")
            assert wire.call(b"ping", timeout_seconds=SECONDS)
    assert [request for _, request, _ in service.handled] == [b"add one", b"ping"]


def test_what_a_server_has_sent_is_not_taken_for_a_request():
    """Both directions had one key: what came from the server could be sent back to it."""
    answers = []
    service = Recorder()
    with serving(SharedKey(KEY), service) as server, Network(server.address) as network:
        network.fault = lambda way: (lambda data: answers.append(data) or data) if way == TO_CLIENT else passing(way)
        with channel(network.address, SharedKey(KEY)) as wire:
            wire.call(b"ping", timeout_seconds=SECONDS)
            session = wire._idle[0].session
            session._control.raw.sendall(answers[-1])
            assert session._control.raw.recv(1) == b"", "the server closes the connection"
    assert len(service.handled) == 1


@pytest.mark.parametrize("direction", [TO_SERVER, TO_CLIENT])
@pytest.mark.parametrize("offset", [0, 200, 15_000], ids=["at once", "in the handshake", "in bulk bytes"])
def test_a_peer_that_hangs_ends_a_call_with_a_timeout(direction, offset):
    service, released = Recorder(), threading.Event()

    def hang(data: bytes) -> bytes:
        released.wait(SECONDS)
        return data

    with serving(Plain(), service) as server, Network(server.address) as network:
        network.fault = lambda way: at_offset(offset, hang) if way == direction else passing(way)
        with channel(network.address, Plain()) as wire:
            incoming = memoryview(bytearray(len(DATA)))
            with pytest.raises(TimedOut, match=r"not done within 0\.2 s"):
                wire.call(b"store", outgoing=[memoryview(DATA)], incoming=incoming, timeout_seconds=0.2)
            assert not wire._idle
            network.fault = passing
            assert wire.call(b"ping", timeout_seconds=SECONDS).record == b"gnip"
            released.set()
    assert service.unused() == 0


@pytest.mark.usefixtures("either_wire")
def test_a_peer_that_takes_no_bytes_ends_a_call_with_a_timeout():
    stopped = threading.Event()
    with serving(Plain(), Recorder()) as server, Network(server.address) as network:
        network.fault = lambda way: at_offset(1000, lambda data: stopped.wait(SECONDS) and data)
        with channel(network.address, Plain()) as wire:
            big = memoryview(bytearray(64 << 20))
            with pytest.raises(TimedOut):
                wire.call(b"store", outgoing=[big], timeout_seconds=0.5)
        stopped.set()


@pytest.mark.usefixtures("either_wire")
def test_a_peer_that_is_not_there_is_down():
    with serving(Plain(), Recorder()) as server:
        address = server.address
    with channel(address, Plain()) as wire, pytest.raises(PeerDown, match="Connection refused"):
        wire.call(b"ping", timeout_seconds=SECONDS)


@pytest.mark.usefixtures("either_wire")
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("mode", MODES)
def test_a_fault_anywhere_gives_the_right_answer_or_an_error(mode, kind, signer):
    """The fault is at a random place of what one direction carries. The next call must be answered."""
    rng, service = random.Random(f"{mode} {kind}"), Recorder()
    sides = security(mode, SERVER, signer), security(mode, CLIENT, signer)
    with serving(sides[0], service) as server, Network(server.address) as network:
        for direction in (TO_SERVER, TO_CLIENT):
            offset = rng.choice([rng.randrange(1200), rng.randrange(23_000)])
            network.fault = lambda way: at_offset(offset, FAULTS[kind]) if way == direction else passing(way)  # noqa: B023
            incoming = memoryview(bytearray(len(DATA)))
            with channel(network.address, sides[1]) as wire:
                try:
                    answer = wire.call(
                        b"echo", outgoing=[memoryview(DATA)], incoming=incoming, timeout_seconds=SHORT_SECONDS
                    )
                    assert answer.record == b"ohce" and bytes(answer.bulk[0]) == DATA
                except LastgoodError as error:
                    assert error.todo, repr(error)
                    assert not wire._idle, "a connection that failed is not used again"
                else:  # less passes through the network with windows: the place of the fault may still come
                    network.cut()
                    await_news(wire)
                network.fault = passing
                assert wire.call(b"ping", timeout_seconds=SECONDS).record == b"gnip"
    assert {(record, bulk) for _, record, bulk in service.handled} <= {(b"echo", bytes(DATA)), (b"ping", b"")}
    assert service.unused() == 0

"""Calls over the wire, in every mode: what is asked is answered once, with the bytes that were sent."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from lastgood.errors import FrameInvalid, NoSpace, PeerDown, Refused, TimedOut
from lastgood.limits import WIRE_BULK_LIMIT_BYTES, WIRE_RECORD_LIMIT_BYTES, WIRE_REUSE_SECONDS
from lastgood.testing import Clock
from lastgood.wire.channel import Channel
from lastgood.wire.port import Answer, Peer
from lastgood.wire.security import Plain
from lastgood.wire.session import RECEIVE_BYTES
from wired import (
    CLIENT,
    MODES,
    RUN,
    SECONDS,
    SERVER,
    Network,
    Recorder,
    await_news,
    channel,
    pattern,
    security,
    serving,
)

pytestmark = pytest.mark.usefixtures("either_wire")
SIZES = [1, RECEIVE_BYTES, RECEIVE_BYTES + 1, 3 * RECEIVE_BYTES - 5]


@pytest.fixture(params=MODES)
def pair(request: pytest.FixtureRequest, signer: Callable[[], object]) -> Iterator[tuple[Channel, Recorder]]:
    """A channel to a server with a recorder, in one of the modes."""
    service = Recorder()
    with (
        serving(security(request.param, SERVER, signer), service) as server,
        channel(server.address, security(request.param, CLIENT, signer)) as wire,
    ):
        yield wire, service


@pytest.fixture
def plain() -> Iterator[tuple[Channel, Recorder]]:
    service = Recorder()
    with serving(Plain(), service) as server, channel(server.address, Plain()) as wire:
        yield wire, service


def test_bulk_bytes_of_any_length_arrive_in_the_callers_buffer(pair):
    wire, service = pair
    assert wire.call(b"ping", timeout_seconds=SECONDS) == Answer(b"gnip")
    for size in SIZES:
        data, incoming = pattern(size, size), bytearray(size + 9)
        parts = [memoryview(data)[: size // 3], memoryview(data)[size // 3 :]]
        answer = wire.call(b"echo", outgoing=parts, incoming=memoryview(incoming), timeout_seconds=SECONDS)
        assert bytes(answer.bulk[0]) == data == incoming[:size] and not any(incoming[size:])
        assert service.handled[-1] == (Peer(RUN, CLIENT), b"echo", data)
    assert len(service.handled) == 1 + len(SIZES) and service.unused() == 0


def test_many_threads_share_a_few_connections(pair):
    wire, service = pair

    def ask(number: int) -> bool:
        data = pattern(1000 + number, number)
        incoming = memoryview(bytearray(2000))
        answer = wire.call(b"%d" % number, outgoing=[memoryview(data)], incoming=incoming, timeout_seconds=SECONDS)
        return answer.record == (b"%d" % number)[::-1] and bytes(answer.bulk[0]) == data

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(ask, range(40)))
    assert len(service.handled) == 40 and len(wire._idle) <= 2


def test_an_error_of_the_service_has_its_class_at_the_caller(pair):
    wire, service = pair

    def full(peer, request, length=0):
        raise NoSpace("the memory of node-a is full", safe="Nothing was stored.", todo="Choose another peer.")

    service.buffer = full
    for _ in range(2):  # the connection goes on after the bulk bytes that nobody wanted
        with pytest.raises(NoSpace, match=r"is full\. Nothing was stored\. Choose another peer\."):
            wire.call(b"store", outgoing=[memoryview(pattern(RECEIVE_BYTES + 7))], timeout_seconds=SECONDS)
    assert wire.call(b"ping", timeout_seconds=SECONDS).record == b"gnip" and len(wire._idle) == 1
    service.handle = full
    with pytest.raises(NoSpace):
        wire.call(b"ping", timeout_seconds=SECONDS)


def test_what_exceeds_a_limit_is_refused_before_it_is_sent(plain):
    wire, service = plain
    with pytest.raises(Refused, match="the record: 262145 bytes"):
        wire.call(bytes(WIRE_RECORD_LIMIT_BYTES + 1), timeout_seconds=SECONDS)
    half = memoryview(bytes(WIRE_BULK_LIMIT_BYTES // 2))
    with pytest.raises(Refused, match="the bulk bytes: "):
        wire.call(b"", outgoing=[half, half, half[:1]], timeout_seconds=SECONDS)
    assert len(wire.call(bytes(WIRE_RECORD_LIMIT_BYTES), timeout_seconds=SECONDS).record) == WIRE_RECORD_LIMIT_BYTES
    assert len(service.handled) == 1


def test_an_answer_that_does_not_fit_the_callers_buffer_is_refused(plain):
    wire, _ = plain
    for room in (None, memoryview(bytearray(9))):
        with pytest.raises(Refused, match=r"the bulk bytes: 10 bytes, more than the limit of [09]"):
            wire.call(b"echo", outgoing=[memoryview(b"0123456789")], incoming=room, timeout_seconds=SECONDS)
    assert wire.call(b"ping", timeout_seconds=SECONDS).record == b"gnip"


def test_a_peer_that_sends_more_than_was_asked_for_writes_nothing(plain, monkeypatch):
    wire, _ = plain
    monkeypatch.setattr("lastgood.wire.serving.check_sizes", lambda *_: None)
    incoming = bytearray(9)
    with pytest.raises(FrameInvalid, match="sends 10 bulk bytes into a buffer of 9") as error:
        wire.call(b"", outgoing=[memoryview(b"x" * 10)], incoming=memoryview(incoming), timeout_seconds=SECONDS)
    assert error.value.reason == "length" and incoming == bytearray(9)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("call", ["buffer", "short buffer", "handle"])
def test_a_bug_of_the_service_ends_one_connection_with_its_text(plain, call):
    wire, service = plain

    def fails(peer, request, argument):
        raise ZeroDivisionError("a bug")

    if call == "short buffer":
        service.buffer = lambda peer, request, length: memoryview(bytearray(length - 1))
    else:
        setattr(service, call, fails)
    with pytest.raises(PeerDown, match=r"by a bug: (ZeroDivisionError: a bug|ValueError: buffer\(\) returned 2 bytes)"):
        wire.call(b"store", outgoing=[memoryview(b"abc")], timeout_seconds=SECONDS)
    service.__class__ = Recorder
    service.__dict__.pop("buffer", None)
    service.__dict__.pop("handle", None)
    assert wire.call(b"ping", timeout_seconds=SECONDS).record == b"gnip"
    assert service.abandoned == ([b"store"] if call == "short buffer" else [])


def test_a_late_answer_is_never_read_as_that_of_another_call(plain):
    """The connection of a call that timed out was used again: the next call would have read the late answer."""
    wire, service = plain
    released, first = threading.Event(), itertools.count()

    def slow(peer, request, bulk):
        if next(first) == 0:
            released.wait(SECONDS)
        return Answer(request)

    service.handle = slow
    with pytest.raises(TimedOut, match=r"a request to node-a at 127\.0\.0\.1: not done within 0\.05 s"):
        wire.call(b"one", timeout_seconds=0.05)
    assert not wire._idle
    released.set()
    for number in range(3):
        assert wire.call(b"%d" % number, timeout_seconds=SECONDS).record == b"%d" % number


def test_a_call_waits_for_a_connection_until_its_timeout(plain):
    wire, service = plain
    released, running = threading.Event(), threading.Semaphore(0)

    def slow(peer, request, bulk):
        running.release()
        released.wait(SECONDS)
        return Answer(request)

    service.handle = slow
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(wire.call, b"%d" % number, timeout_seconds=SECONDS) for number in range(2)]
        for _ in calls:
            running.acquire()
        with pytest.raises(TimedOut):
            wire.call(b"three", timeout_seconds=0.05)
        released.set()
        assert [one.result().record for one in calls] == [b"0", b"1"]


def test_a_connection_that_broke_while_it_was_idle_is_replaced():
    service = Recorder()
    with (
        serving(Plain(), service) as server,
        Network(server.address) as network,
        channel(network.address, Plain()) as wire,
    ):
        wire.call(b"one", timeout_seconds=SECONDS)
        network.cut()
        await_news(wire)
        assert wire.call(b"two", timeout_seconds=SECONDS).record == b"owt"
        assert network.connections == 2


def test_a_connection_that_was_idle_for_long_is_not_used_again(plain):
    clock, service = Clock(), Recorder()
    with (
        serving(Plain(), service) as server,
        Network(server.address) as network,
        channel(network.address, Plain(), clock=clock) as wire,
    ):
        wire.call(b"one", timeout_seconds=SECONDS)
        clock.advance(WIRE_REUSE_SECONDS - 1)
        wire.call(b"two", timeout_seconds=SECONDS)
        assert network.connections == 1
        clock.advance(WIRE_REUSE_SECONDS)
        wire.call(b"three", timeout_seconds=SECONDS)
        assert network.connections == 2

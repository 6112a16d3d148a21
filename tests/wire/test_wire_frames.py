"""Frames: what is no frame, not the next one, or not of this version has an error of its own. Keys: known answers."""

from __future__ import annotations

import hashlib
import hmac
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgood.errors import FrameInvalid, Refused, StateMismatch
from lastgood.limits import WIRE_BODY_LIMIT_BYTES
from lastgood.wire import messages
from lastgood.wire.frames import HEADER, MAGIC, PUBLIC_KEY, VERSION, FrameReader, FrameWriter
from lastgood.wire.keys import ConnectionKeys, derive, digest
from lastgood.wire.messages import Failure, Hello, Proof, Refusal, Reply, Request, error_of, failure_of

KEY = b"k" * 32
SAMPLES = [
    Hello("run", "node", "plain", b"n" * 32),
    Proof(b"p" * 32),
    Request(b"read chunk 3", 8 << 20),
    Reply(b"", 3, b"d" * 16),
    Refusal("run"),
    Failure("NoSpace", "full", "", ""),
]


def read(data: bytes, key: bytes = KEY, number: int = 0) -> object:
    reader = FrameReader(key, "node-7", number=number)
    header = data[: HEADER.size]
    rest = data[HEADER.size : HEADER.size + reader.rest_bytes(header)]
    return reader.decode(header, rest)


def tagged(body: bytes, number: int = 0, magic: bytes = MAGIC, version: int = VERSION) -> bytes:
    data = HEADER.pack(magic, version, len(body), number) + body
    return data + hmac.digest(KEY, data, "sha256")


def failure(data: bytes, **more: object) -> str:
    with pytest.raises(FrameInvalid) as error:
        read(data, **more)
    assert error.value.what.startswith("from node-7: ") and error.value.todo
    assert error.value.safe == "Nothing of it was used, and the connection is closed."
    return error.value.reason


@pytest.mark.parametrize("message", SAMPLES, ids=lambda one: type(one).__name__)
def test_a_message_comes_back_as_it_was(message):
    writer = FrameWriter(KEY)
    frames = [writer.encode(message) for _ in range(3)]
    assert [read(frame, number=number) for number, frame in enumerate(frames)] == [message] * 3


def test_each_kind_of_wrong_frame_has_a_reason_of_its_own():
    body = msgspec.msgpack.encode(SAMPLES[2])
    assert failure(b"GET / HTTP/1.1\r\n" + bytes(60)) == "magic"
    assert failure(tagged(body, version=VERSION + 1)) == failure(tagged(body, version=VERSION - 1)) == "version"
    with pytest.raises(FrameInvalid, match="a later version of lastgood"):
        read(tagged(body, version=VERSION + 1))
    with pytest.raises(FrameInvalid, match="an earlier version of lastgood"):
        read(tagged(body, version=0))
    assert failure(HEADER.pack(MAGIC, VERSION, WIRE_BODY_LIMIT_BYTES + 1, 0)) == "length"
    assert failure(tagged(body), key=b"o" * 32) == "tag"
    assert failure(tagged(body, number=7), number=8) == failure(tagged(body, number=9), number=8) == "number"
    with pytest.raises(FrameInvalid, match="frame 7 is repeated: frame 8 was expected"):
        read(tagged(body, number=7), number=8)
    with pytest.raises(FrameInvalid, match="frame 9 is out of order: frame 8 was expected"):
        read(tagged(body, number=9), number=8)
    assert failure(tagged(b"\xc1")) == failure(tagged(body + b"\x00")) == "message"


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "Request", "record": b"", "room": -1},
        {"type": "Request", "record": b"", "room": 2**40},
        {"type": "Request", "record": b"", "room": 0, "length": 2**63},
        {"type": "Request", "record": b"", "room": 0, "more": 1},
        {"type": "Request", "record": "text", "room": 0},
        {"type": "Request"},
        {"type": "Shutdown"},
        {"type": "Hello", "run": "", "node": "n", "mode": "m", "nonce": b"n" * 32},
        {"type": "Hello", "run": "r" * 257, "node": "n", "mode": "m", "nonce": b"n" * 32},
        {"type": "Hello", "run": "r", "node": "n", "mode": "m", "nonce": b"n" * 31},
        {"type": "Proof", "proof": b""},
        [[[[]]]],
    ],
)
def test_a_message_with_a_field_out_of_bounds_is_refused(fields):
    assert failure(tagged(msgspec.msgpack.encode(fields))) == "message"


def test_text_that_is_not_utf8_is_refused():
    """The decoder raises UnicodeDecodeError then, which no caller expected: a stranger could end a thread with it."""
    body = msgspec.msgpack.encode({"type": "Refusal", "reason": "reason"})
    assert failure(tagged(body[:-1] + b"\xff")) == "message"


def test_deeply_nested_bytes_are_refused():
    assert failure(tagged(b"\x91" * 200_000)) == "message"
    assert failure(tagged(b"\x81\xa4type" + b"\x91" * 200_000)) == "message"


@given(st.sampled_from(SAMPLES), st.data())
def test_a_changed_bit_anywhere_in_a_frame_is_found(message, data):
    frame = bytearray(FrameWriter(KEY).encode(message))
    at = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[at // 8] ^= 1 << at % 8
    with pytest.raises((FrameInvalid, struct.error)):
        read(bytes(frame))


@given(st.binary(max_size=300), st.binary(max_size=32))
def test_no_garbage_is_a_frame_and_nothing_else_is_raised(garbage, body):
    for data in (garbage, MAGIC + garbage, tagged(garbage)[: len(garbage)], tagged(body)):
        with pytest.raises((FrameInvalid, struct.error)):
            read(data)


def test_key_derivation_is_hkdf_with_sha256():
    """The first test case of RFC 5869, with its first 32 bytes of output."""
    secret, salt = bytes([0x0B] * 22), bytes(range(13))
    extracted = hmac.digest(salt, secret, "sha256")
    assert extracted.hex() == "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5"
    info = bytes(range(0xF0, 0xFA))
    expected = hmac.digest(extracted, info + b"\x01", "sha256")
    assert expected.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"
    assert derive(secret, salt, "a label") == hmac.digest(extracted, b"a label\x01", "sha256")


def test_every_use_and_every_handshake_has_a_key_of_its_own():
    one = ConnectionKeys.of(KEY, [b"hello", b"welcome"])
    others = [ConnectionKeys.of(KEY, [b"hellow", b"elcome"]), ConnectionKeys.of(b"o" * 32, [b"hello", b"welcome"])]
    keys = [key for found in (one, *others) for key in found]
    assert len(set(keys)) == len(keys) and PUBLIC_KEY not in keys
    assert one == ConnectionKeys.of(KEY, [b"hello", b"welcome"])


def test_only_the_key_of_a_connection_makes_a_blake3_digest():
    data = [memoryview(b"ab"), memoryview(b"c")]
    assert (
        digest("blake3", KEY, data) == digest("blake3", KEY, [memoryview(b"abc")]) != digest("blake3", b"o" * 32, data)
    )
    assert digest("xxh3_128", KEY, data) == digest("xxh3_128", b"", [memoryview(b"abc")])


def test_an_error_that_a_peer_names_is_made_of_texts_only():
    error = error_of(failure_of(Refused("what", safe="safe", todo="todo")))
    assert type(error) is Refused and (error.what, error.safe, error.todo) == ("what", "safe", "todo")
    assert type(error_of(failure_of(StateMismatch(3, ["a"], [], [])))).__name__ == "PeerDown"
    for kind in ("Exception", "annotations", "ClassVar", "_sentence", "LastgoodWarning", "NotInstalled", "no such"):
        assert type(error_of(Failure(kind, "", "", ""))).__name__ == "PeerDown"
    long = failure_of(ValueError("\udcff" * 9000))
    assert len(long.what) == messages.TEXT_LIMIT and read(FrameWriter(KEY).encode(long)) == long
    assert hashlib.sha256().digest_size == len(tagged(b"")) - HEADER.size

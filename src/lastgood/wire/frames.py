"""Frames: bytes <-> messages. Pure.

A frame is `header | body | tag`. The header has the magic, the version, the length of the body and the number of the
frame in its direction; the tag is the HMAC-SHA256 of header and body under the key of the direction. During the
handshake that key is public, so the tag finds accidents only. Bulk bytes follow a frame whose message has their
length and digest.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

import msgspec

from ..errors import FrameInvalid
from ..limits import WIRE_BODY_LIMIT_BYTES, WIRE_OVERHEAD_BYTES
from .messages import Message

MAGIC = b"LGWF"
VERSION = 2
"""of the messages, and of the calls of agents in them (run/peers.py). Nodes of two versions refuse each other."""
HEADER = struct.Struct(">4sHIQ")
TAG_BYTES = hashlib.sha256().digest_size
PUBLIC_KEY = b"lastgood: no key is agreed on yet"
"""of the frames of a handshake"""
HANDSHAKE_BODY_BYTES = WIRE_OVERHEAD_BYTES
SAFE = "Nothing of it was used, and the connection is closed."
REPEAT = "Repeat the request. If this happens again, check the network."
SAME_VERSION = "Install the same version on all nodes."

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Message)


class FrameWriter:
    """Messages -> the frames of one direction. `key`: of that direction. `number`: of the first frame. Default 0."""

    def __init__(self, key: bytes, number: int = 0) -> None:
        self._key, self._number = key, number

    def encode(self, message: Message) -> bytes:
        """The next frame of this direction."""
        body = _ENCODER.encode(message)
        data = HEADER.pack(MAGIC, VERSION, len(body), self._number) + body
        self._number += 1
        return data + hmac.digest(self._key, data, "sha256")


class FrameReader:
    """The frames of one direction -> messages.

    `key`: of that direction. `peer`: the other end, for errors. `limit_bytes`: the longest body. `number`: of the
    first frame. Default 0. After an error nothing more may be read.
    """

    def __init__(self, key: bytes, peer: str, limit_bytes: int = WIRE_BODY_LIMIT_BYTES, number: int = 0) -> None:
        self._key, self._peer, self._limit, self._number = key, peer, limit_bytes, number

    def rest_bytes(self, header: bytes) -> int:
        """How many bytes of the frame follow its header. Raises FrameInvalid."""
        magic, version, length, _ = HEADER.unpack(header)
        if magic != MAGIC:  # guard: wire-magic-checked
            raise self._invalid(
                "magic", f"what was sent begins with {magic!r}, which is no frame", "Something else uses this port."
            )
        if version != VERSION:  # guard: wire-version-checked
            age = "a later" if version > VERSION else "an earlier"
            what = f"the frame is of version {version}, this node speaks {VERSION}: {age} version of lastgood sent it"
            raise self._invalid("version", what, SAME_VERSION)
        if length > self._limit:  # guard: wire-body-bounded
            raise self._invalid("length", f"the frame announces {length} bytes, more than the limit of {self._limit}")
        return int(length) + TAG_BYTES

    def decode(self, header: bytes, rest: bytes) -> Message:
        """The message of a frame. Raises FrameInvalid."""
        body, tag = rest[:-TAG_BYTES], rest[-TAG_BYTES:]
        expected = hmac.digest(self._key, header + body, "sha256")
        if not hmac.compare_digest(tag, expected):  # guard: wire-tag-checked
            raise self._invalid("tag", "the frame was changed on its way, or is not from this connection")
        number = HEADER.unpack(header)[3]
        if number != self._number:  # guard: wire-number-checked
            fault = "repeated" if number < self._number else "out of order"
            raise self._invalid("number", f"frame {number} is {fault}: frame {self._number} was expected")
        self._number += 1
        try:
            message: Message = _DECODER.decode(body)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:  # guard: wire-any-body-refused
            what = f"the frame holds no message of this version: {error}"
            raise self._invalid("message", what, SAME_VERSION) from error
        return message

    def _invalid(self, reason: str, what: str, todo: str = REPEAT) -> FrameInvalid:
        return FrameInvalid(f"from {self._peer}: {what}", safe=SAFE, todo=todo, reason=reason)

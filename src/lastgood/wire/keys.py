"""Keys: derived from a secret and a handshake, and digests of bulk bytes under them. Pure but for `require_private`."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import blake3
import xxhash

from ..errors import PeerRefused, Refused

KEY_LEAST_BYTES = 32
"""The shortest shared key: a handshake can be recorded, and short keys could be tried against it."""
KEY_LIMIT_BYTES = 4096
DIGESTS = ("xxh3_128", "blake3")
KEYED_DIGESTS = ("blake3",)
"""those that find forgeries too"""


class Hasher(Protocol):
    def update(self, data: memoryview, /) -> object: ...
    def digest(self) -> bytes: ...


def hasher(algorithm: str, key: bytes) -> Hasher:
    """A digest of bulk bytes: one of DIGESTS. blake3 is keyed, so that only who has the key can make one."""
    if algorithm == "blake3":
        return blake3.blake3(key=key)  # guard: wire-blake3-keyed
    return xxhash.xxh3_128()


def digest(algorithm: str, key: bytes, buffers: Iterable[memoryview]) -> bytes:
    """The digest of these buffers, one after the other."""
    found = hasher(algorithm, key)
    for buffer in buffers:
        found.update(buffer)
    return found.digest()


def derive(secret: bytes, salt: bytes, label: str) -> bytes:
    """A key of 32 bytes from a secret: HKDF with SHA-256 (RFC 5869), for the use that `label` names."""
    extracted = hmac.digest(salt, secret, "sha256")
    return hmac.digest(extracted, label.encode() + b"\x01", "sha256")


class ConnectionKeys(NamedTuple):
    """The keys of one connection. Each direction has keys of its own, so nothing can be sent back to its sender."""

    server_proof: bytes
    client_proof: bytes
    frames_to_server: bytes
    frames_to_client: bytes
    bulk_to_server: bytes
    bulk_to_client: bytes
    token: bytes
    """joins a second connection, for bulk bytes"""

    @classmethod
    def of(cls, secret: bytes, handshake: Iterable[bytes]) -> ConnectionKeys:
        """The keys after a handshake of these frames, between two nodes that have this secret."""
        transcript = hashlib.sha256()
        for frame in handshake:
            transcript.update(len(frame).to_bytes(8, "big") + frame)
        salt = transcript.digest()  # guard: wire-keys-bound-to-handshake
        return cls(*(derive(secret, salt, f"lastgood wire 1: {name}") for name in cls._fields))


def require_private(path: str) -> None:
    """Refuse a file with a secret that other users can read or write. Raises PeerRefused."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise PeerRefused(
            f"{path}: {error.strerror}",
            safe="No connection was made.",
            todo="Name a file with a key.",
            reason="key file",
        ) from error
    if not stat.S_ISREG(mode) or stat.S_IMODE(mode) & 0o077:  # guard: wire-key-file-private
        raise PeerRefused(
            f"{path} is no file that only its owner can use (mode {stat.S_IMODE(mode):04o})",
            safe="No connection was made.",
            todo=f"Run: chmod 600 {path}. If other users may have read it, make a new key.",
            reason="key file",
        )


def checked_key(key: bytes) -> bytes:
    """A shared key of a length that is permitted. Raises Refused."""
    if not KEY_LEAST_BYTES <= len(key) <= KEY_LIMIT_BYTES:
        raise Refused(
            f"the shared key has {len(key)} bytes; it needs {KEY_LEAST_BYTES} to {KEY_LIMIT_BYTES}, all of them random",
            safe="No connection was made.",
            todo=f"Make one: os.urandom({KEY_LEAST_BYTES}).",
        )
    return key

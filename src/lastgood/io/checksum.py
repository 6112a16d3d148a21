"""Digests: one table of algorithms. What a mismatch means is decided by the callers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol

import blake3
import xxhash

from ..limits import DIGEST_LIMIT_CHARACTERS

Buffer = bytes | bytearray | memoryview


class Hasher(Protocol):
    def update(self, data: Buffer, /) -> object: ...
    def hexdigest(self) -> str: ...


# Each releases the GIL on large buffers. xxh3 detects accidental changes; blake3 and sha256 also detect forgery.
ALGORITHMS: dict[str, Callable[[], Hasher]] = {
    "xxh3_128": xxhash.xxh3_128,
    "blake3": blake3.blake3,
    "sha256": hashlib.sha256,
}
HEX_LENGTH = {"xxh3_128": 32, "blake3": 64, "sha256": 64}
assert max(HEX_LENGTH.values()) <= DIGEST_LIMIT_CHARACTERS


def digest(algorithm: str, *parts: Buffer) -> str:
    """The digest of the concatenated parts, in lower-case hexadecimal. `algorithm` is a key of ALGORITHMS."""
    hasher = ALGORITHMS[algorithm]()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()

"""Digests: one table of algorithms. Knows bytes only; decides nothing about what a mismatch means."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol

import blake3
import xxhash

Buffer = bytes | bytearray | memoryview


class Hasher(Protocol):
    def update(self, data: Buffer, /) -> object: ...
    def hexdigest(self) -> str: ...


# Each releases the GIL on large buffers. xxh3 finds accidents; blake3 and sha256 also resist intent.
ALGORITHMS: dict[str, Callable[[], Hasher]] = {
    "xxh3_128": xxhash.xxh3_128,
    "blake3": blake3.blake3,
    "sha256": hashlib.sha256,
}
HEX_LENGTH = {"xxh3_128": 32, "blake3": 64, "sha256": 64}


def digest(algorithm: str, *parts: Buffer) -> str:
    """Lower-case hex digest of the parts, one after the other."""
    hasher = ALGORITHMS[algorithm]()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()

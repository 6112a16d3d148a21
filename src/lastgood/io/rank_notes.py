"""What a rank notes at each step, in memory that outlives the process: two files beside its heartbeat page. Knows no
meaning, waits for nobody, and syncs nothing: the notes end with the attempt.

Invariant: of the two newest notes of a rank at least one is intact, at whatever instant the process is killed. A note
is written over the older one, and a digest in front of it shows a reader whether all of it is there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import xxhash

_DIGEST_BYTES = 16
_FILES = 2


class RankNotes:
    """The notes of one rank, as the rank writes them. `page`: path of its heartbeat page."""

    def __init__(self, page: str) -> None:
        self._page, self._written = page, 0

    def write(self, data: bytes) -> None:
        """Note `data` in place of the older of the last two notes. Raises OSError."""
        path = _path(self._page, self._written % _FILES)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            whole = memoryview(xxhash.xxh3_128_digest(data) + data)
            while whole:
                whole = whole[os.write(fd, whole) :]
            os.ftruncate(fd, _DIGEST_BYTES + len(data))
        finally:
            os.close(fd)
        self._written += 1


def read(page: str) -> Iterator[bytes]:
    """The intact notes of the rank with this heartbeat page, at most two, in no order."""
    for number in range(_FILES):
        try:
            with open(_path(page, number), "rb") as file:
                digest, data = file.read(_DIGEST_BYTES), file.read()
        except OSError:
            continue
        if digest == xxhash.xxh3_128_digest(data):  # guard: torn-note-not-read
            yield data


def _path(page: str, number: int) -> str:
    return f"{page}.note-{number}"

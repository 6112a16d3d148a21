"""What a rank notes at each step, in memory that outlives the process: two files beside its heartbeat page.

A third file is for what it has written once another rank has ended. Knows no meaning, waits for nobody, and syncs
nothing: the notes end with the attempt.

Invariant: of the two newest notes of a rank at least one is intact, at whatever instant the process is killed. A note
is written over the older one, and a digest in front of it shows a reader whether all of it is there.
"""

from __future__ import annotations

import contextlib
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
        _put(_path(self._page, self._written % _FILES), data)
        self._written += 1

    def remove(self) -> None:
        """Remove what was noted: it is not the state of the run any more."""
        for path in (*(_path(self._page, number) for number in range(_FILES)), _result_path(self._page)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def write_result(self, data: bytes) -> None:
        """Note what this rank has written. Raises OSError."""
        _put(_result_path(self._page), data)


def read(page: str) -> Iterator[bytes]:
    """The intact notes of the rank with this heartbeat page, at most two, in no order."""
    found = (_intact(_path(page, number)) for number in range(_FILES))
    yield from (one for one in found if one is not None)


def read_result(page: str) -> bytes | None:
    """What the rank with this heartbeat page has noted with `write_result`; None: nothing that is intact."""
    return _intact(_result_path(page))


def _put(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        whole = memoryview(xxhash.xxh3_128_digest(data) + data)
        while whole:
            whole = whole[os.write(fd, whole) :]
        os.ftruncate(fd, _DIGEST_BYTES + len(data))
    finally:
        os.close(fd)


def _intact(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            digest, data = file.read(_DIGEST_BYTES), file.read()
    except OSError:
        return None
    return data if digest == xxhash.xxh3_128_digest(data) else None  # guard: torn-note-not-read


def _path(page: str, number: int) -> str:
    return f"{page}.note-{number}"


def _result_path(page: str) -> str:
    return f"{page}.written"

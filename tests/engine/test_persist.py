"""The mover that writes a file from chunks: the order of its calls, and the state after one of them fails."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import pytest

from lastgood.engine import write_file
from lastgood.engine.arena import Arena
from lastgood.errors import NoSpace
from lastgood.format import layout
from lastgood.records import Blob, Piece

CHUNK_BYTES = 4096
IMAGE = layout.images([layout.Tensor("w", "uint8", (10 * CHUNK_BYTES - 100,))])[0]


class Upload:
    """Records the calls to it. The write numbered `fails` fails, and the other writes end only after that."""

    def __init__(self, operations: list[str], fails: int = -1) -> None:
        self.operations, self.fails, self.failed = operations, fails, threading.Event()
        self.written: dict[int, bytes] = {}

    def write_at(self, mv: memoryview, offset: int) -> None:
        self.written[offset] = bytes(mv)
        number = offset // CHUNK_BYTES
        if number == self.fails:
            self.failed.set()
            raise NoSpace("full")
        if self.fails >= 0:
            assert self.failed.wait(60)
        self.operations.append("write")

    def finish(self) -> None:
        self.operations.append("finish")

    def abort(self) -> None:
        self.operations.append("abort")


class Tier:
    def __init__(self, fails: int = -1, full: bool = False) -> None:
        self.operations: list[str] = []
        self.uploads: list[Upload] = []
        self._fails, self._full = fails, full

    def create(self, name: str, length: int) -> Upload:
        self.operations.append("create")
        if self._full:
            raise NoSpace("full")
        self.uploads.append(Upload(self.operations, self._fails))
        return self.uploads[-1]


def chunks(arena: Arena, operations: list[str], breaks: int = -1) -> Iterator[write_file.Chunk]:
    for number in range(100):
        if number == breaks:
            raise KeyError("the source broke")
        operations.append("chunk")
        lease = arena.take()
        assert lease is not None
        yield lease


def write(tier: Tier, arena: Arena, breaks: int = -1, alone: bool = False) -> tuple[Blob, list[Piece]]:
    """`alone`: the calling thread writes, piece by piece."""
    with ThreadPoolExecutor(3) as writers:
        return write_file.write(
            tier,
            "home",
            IMAGE,
            chunks(arena, tier.operations, breaks),
            chunk_bytes=CHUNK_BYTES,
            algorithm="xxh3_128",
            writers=None if alone else writers,
        )


class Later(Executor):
    """An executor that runs a job only when its result is requested."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        job: Future[Any] = Future()

        def result(timeout: float | None = None) -> Any:
            return fn(*args, **kwargs)

        job.result = result
        return job


def test_space_is_reserved_before_the_first_chunk_is_requested():
    tier = Tier(full=True)
    with pytest.raises(NoSpace):
        write(tier, Arena(4 * CHUNK_BYTES, CHUNK_BYTES))
    assert tier.operations == ["create"]


def test_every_chunk_is_written_before_the_file_is_finished():
    tier, arena = Tier(), Arena(11 * CHUNK_BYTES, CHUNK_BYTES)
    source = chunks(arena, tier.operations)
    write_file.write(tier, "home", IMAGE, source, chunk_bytes=CHUNK_BYTES, algorithm="xxh3_128", writers=Later())
    assert tier.operations.count("write") == tier.operations.count("chunk") == 11
    assert tier.operations[-1] == "finish" and arena.idle


@pytest.mark.parametrize(("fails", "alone"), [(0, False), (2, False), (0, True)])
def test_a_failed_write_aborts_after_all_other_writers_have_released(fails, alone):
    tier, arena = Tier(fails), Arena(11 * CHUNK_BYTES, CHUNK_BYTES)
    with pytest.raises(NoSpace):
        write(tier, arena, alone=alone)
    assert tier.operations[-1] == "abort" and tier.operations.count("abort") == 1
    assert arena.idle, "every chunk was released to the arena"


@pytest.mark.parametrize("alone", [False, True])
def test_a_failing_source_aborts_and_releases_every_chunk(alone):
    tier, arena = Tier(), Arena(4 * CHUNK_BYTES, CHUNK_BYTES)
    with pytest.raises(KeyError, match="the source broke"):
        write(tier, arena, breaks=5, alone=alone)
    assert tier.operations[-1] == "abort" and "finish" not in tier.operations and arena.idle


def test_a_chunk_that_no_writer_received_is_released():
    """When the interpreter ends, a pool accepts no more jobs: the chunk being submitted was never released to the
    arena."""
    tier, arena, writers = Tier(), Arena(4 * CHUNK_BYTES, CHUNK_BYTES), ThreadPoolExecutor(1)
    writers.shutdown()
    source = chunks(arena, tier.operations)
    with pytest.raises(RuntimeError):
        write_file.write(tier, "home", IMAGE, source, chunk_bytes=CHUNK_BYTES, algorithm="xxh3_128", writers=writers)
    assert tier.operations[-1] == "abort" and arena.idle


def test_one_thread_that_writes_piece_by_piece_writes_the_same_file(monkeypatch):
    found = []
    for alone, piece_bytes in ((False, 0), (True, 1024), (True, 1 << 20)):
        monkeypatch.setattr(write_file, "PIECE_BYTES", piece_bytes)
        tier, arena = Tier(), Arena(CHUNK_BYTES, CHUNK_BYTES)
        arena.memory()[:] = bytes(range(256)) * (CHUNK_BYTES // 256)
        record = write(tier, arena, alone=alone)
        written = tier.uploads[0].written
        found.append((record, b"".join(bytes(written[offset]) for offset in sorted(written))))
    assert found[0] == found[1] == found[2]


def test_the_last_page_is_padded_with_zeros_and_not_with_memory():
    tier, arena = Tier(), Arena(4 * CHUNK_BYTES, CHUNK_BYTES)
    leases = [arena.take() for _ in range(4)]
    for lease in leases:
        lease.buffer[:] = b"secret!!" * (CHUNK_BYTES // 8)
        lease.release()
    write(tier, arena)
    start, end = IMAGE.length // CHUNK_BYTES * CHUNK_BYTES, IMAGE.length % CHUNK_BYTES
    assert end and tier.uploads[0].written[start][end:] == bytes(CHUNK_BYTES - end)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems share the pages with a fork")
def test_a_forked_process_inherits_no_pages_of_an_arena():
    """A fork did not inherit the addresses either, mapped other memory there, and unmapped it when it dropped the
    inherited arena: forked savers ended by SIGSEGV."""
    arena = Arena(CHUNK_BYTES, CHUNK_BYTES)
    arena.memory()[0] = 7
    child = os.fork()
    if not child:
        os._exit(arena.memory()[0])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert arena.memory()[0] == 7

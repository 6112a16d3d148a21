"""Chunks that are read where their tensors are to be: from memory and from other nodes, in place of a buffer."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import force_setattr

import harness
from lastgood import errors
from lastgood.engine import read_file
from lastgood.engine.arena import Arena
from lastgood.engine.inline_executor import Inline
from lastgood.format import commit, layout
from lastgood.format.layout import Tensor
from lastgood.io.files import PosixFiles
from lastgood.io.memory_files import MemoryFiles
from lastgood.records import Manifest
from lastgood.run.writer import RunWriter
from lastgood.storage.directory import Disk

CHUNK_BYTES = 4096
LENGTHS = {"a": 10_000, **{f"small{number:02}": 100 for number in range(100)}, "b": 30_000}
STATE = {name: np.random.default_rng(length).bytes(length) for name, length in LENGTHS.items()}


class Arrays:
    """`read_file.Sink` in arrays. `closed`: the pieces into whose memory no reader may write."""

    def __init__(self, manifest: Manifest, closed: tuple[str, ...] = ()) -> None:
        self.memory = {one.key: bytearray(one.extent.length) for one in manifest.pieces}
        self.names = {one.key: one.name for one in manifest.pieces}
        self._closed = closed
        self.put_bytes = self.asked = 0
        self.done_with: list[str] = []

    def put(self, name: str, start: int, data: memoryview) -> None:
        self.put_bytes += len(data)
        self.memory[name][start : start + len(data)] = data

    def window(self, name: str, start: int, length: int) -> memoryview | None:
        self.asked += 1
        return None if self.names[name] in self._closed else memoryview(self.memory[name])[start : start + length]

    def done(self, name: str) -> None:
        self.done_with.append(self.names[name])

    def found(self) -> dict[str, bytes]:
        return {self.names[key]: bytes(one) for key, one in self.memory.items()}


@contextmanager
def saved(tmp_path: Path, in_memory: bool = True) -> Iterator[tuple[read_file.RankFiles, Path]]:
    """The files of a saved STATE, and the path of its tensor file."""
    tmp_path.mkdir(exist_ok=True)
    disk = Disk(MemoryFiles(str(tmp_path)) if in_memory else PosixFiles(), str(tmp_path))
    run = RunWriter(disk, Inline())
    run.begin(None)
    generation = harness.save(run, 1, STATE, chunk_bytes=CHUNK_BYTES)
    folder = layout.folder(generation.id)
    files = read_file.RankFiles(disk, folder, commit.read_manifest(disk, generation))
    yield files, tmp_path / folder / layout.blob_name(0)


def streamed(files: read_file.RankFiles, sink: Arrays, unfit: read_file.UnfitTensors | None = None) -> None:
    buffers = read_file.borrowed(Arena(4 * CHUNK_BYTES, CHUNK_BYTES), CHUNK_BYTES)
    with ThreadPoolExecutor(3) as readers, buffers as found:
        read_file.stream(files, found, readers, sink, unfit=unfit)


def header_bytes(files: read_file.RankFiles) -> int:
    return min(one.extent.offset for one in files.manifest.pieces)


def test_parts_are_read_where_they_are_to_be(tmp_path: Path) -> None:
    """Those of the first chunks, and of chunks with many tensors, go through a buffer."""
    with saved(tmp_path) as (files, _):
        sink = Arrays(files.manifest)
        streamed(files, sink)
    assert sink.found() == STATE and sorted(sink.done_with) == sorted(STATE)
    most = 100 * 100 + 6 * CHUNK_BYTES
    assert 0 < sink.put_bytes <= most < sum(LENGTHS.values()) - 2 * CHUNK_BYTES


def test_a_disk_and_closed_memory_get_buffers(tmp_path: Path) -> None:
    with saved(tmp_path / "disk", in_memory=False) as (files, _):
        sink = Arrays(files.manifest)
        streamed(files, sink)
    assert sink.found() == STATE and sink.put_bytes == sum(LENGTHS.values())
    with saved(tmp_path / "memory") as (files, _):
        sink = Arrays(files.manifest, closed=("a", "b"))
        streamed(files, sink)
    assert sink.found() == STATE and sink.put_bytes >= LENGTHS["a"] + LENGTHS["b"]


def test_a_load_that_reads_no_good_chunk_has_changed_nothing(tmp_path: Path) -> None:
    """A chunk had asked for its place before it was read: the state counted as half loaded, and no save was made."""
    with saved(tmp_path) as (files, path):
        for start in range(10, path.stat().st_size, CHUNK_BYTES):
            harness.flip(path, start)
        sink = Arrays(files.manifest)
        buffers = [memoryview(bytearray(CHUNK_BYTES)) for _ in range(4)]
        with pytest.raises(errors.SumMismatch):
            read_file.stream(files, buffers, Inline(), sink)  # reads one after another, as many as there are buffers
        assert not sink.asked and not sink.put_bytes


@pytest.mark.parametrize("name", ["a", "b"])
def test_damage_in_place_is_found_and_names_its_tensor(tmp_path: Path, name: str) -> None:
    with saved(tmp_path) as (files, path):
        (extent,) = [one.extent for one in files.manifest.pieces if one.name == name]
        harness.flip(path, extent.offset + extent.length // 2)
        with pytest.raises(errors.SumMismatch, match=rf"in chunk \d+ .*tensor {name}"):
            streamed(files, Arrays(files.manifest))


def test_a_content_digest_is_compared_in_place_too(tmp_path: Path) -> None:
    """The chunks agree with their digests: the memory had changed before they were written."""
    with saved(tmp_path) as (files, _):
        for piece in files.manifest.pieces:
            if piece.name == "b":
                force_setattr(piece, "digest", "0" * 32)
        with pytest.raises(errors.SumMismatch, match="content of tensor b differs"):
            streamed(files, Arrays(files.manifest))


def test_nan_is_found_in_place(tmp_path: Path) -> None:
    values = np.zeros(LENGTHS["b"], np.float32)
    values[LENGTHS["b"] - 2000] = np.nan
    disk = Disk(MemoryFiles(str(tmp_path)), str(tmp_path))
    run = RunWriter(disk, Inline())
    run.begin(None)
    tensors = [Tensor("w", "float32", values.shape, finite=True)]
    generation = harness.save(run, 1, {"w": values.tobytes()}, tensors=tensors, chunk_bytes=CHUNK_BYTES)
    manifest = commit.read_manifest(disk, generation)
    files, unfit = read_file.RankFiles(disk, layout.folder(generation.id), manifest), read_file.UnfitTensors(False)
    sink = Arrays(manifest)
    streamed(files, sink, unfit)
    assert unfit.names == {"w"} and sink.put_bytes < values.nbytes // 2

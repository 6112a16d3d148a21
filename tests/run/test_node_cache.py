"""The file in which the ranks of a machine share what they read from an object store."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lastgood
from lastgood.format import commit, layout, sealed
from lastgood.io import memory_files
from lastgood.io.files import PosixFiles
from lastgood.records import Extent
from lastgood.run import memory_place
from lastgood.run.node_cache import NodeCache
from lastgood.storage.directory import Disk
from training import Training


class Topic:
    """Two ranks of one machine that say the same; but whether they have opened the file only if `both` do."""

    def __init__(self, both: bool = True) -> None:
        self._both = both

    def agree(self, value: Any, decide: Callable[[Sequence[Any]], Any]) -> Any:
        return decide([value, value if self._both or value is not True else False])


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


class Store(Disk):
    """A store with a run of one save, of which both ranks want the first chunk of each file.

    `shared`: the folder for temporary files, in which the file must have no name when the store is read.
    """

    def __init__(self, run: Path, shared: Path) -> None:
        training = Training()
        training.step()
        lastgood.save(run, training.state, step=1)
        super().__init__(PosixFiles(), str(run))
        self._shared, self.read = shared, list[Extent]()
        (at,) = commit.survey(self).generations
        generation = commit.read_generation(self, at, None)
        manifest = sealed.sealed_record(self, generation, generation.commit.seals[0])
        self._content: Any = SimpleNamespace(generation=generation, manifests=[manifest])
        self._wanted = {blob.name: [0] for blob in manifest.blobs}
        self.read.clear()

    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
        assert not [*self._shared.glob("lastgood-*")]
        self.read.append(extent)
        super().read_into(extent, mv)

    def fetched(self, topic: Topic) -> int:
        """How many chunks this rank has fetched for both. One of them is read then, and must be what was saved."""
        ranks: Any = SimpleNamespace(opening="opening/0123", restore_count=1, rank=0)
        with contextlib.closing(NodeCache(self)) as cache:
            cache.fill(self._content, self._wanted, ranks, topic)  # type: ignore[arg-type]
            count = len(self.read)
            (manifest,) = self._content.manifests
            name = f"{layout.folder(self._content.generation.id)}/{manifest.blobs[0].name}"
            extent = Extent(blob=name, offset=0, length=layout.extent_of(manifest.blobs[0], 0).length)
            found, direct = bytearray(extent.length), bytearray(extent.length)
            cache.read_into(extent, memoryview(found))
            super().read_into(extent, memoryview(direct))
        assert found == direct
        return count


def test_a_rank_that_is_killed_while_it_reads_leaves_no_file(tmp_path: Path, shared: Path) -> None:
    """The file had its name until all was read: a kill left as much as the shared part of the state in /tmp."""
    store = Store(tmp_path / "run", shared)
    assert store.fetched(Topic()) == len(store.read) == 1


def test_a_rank_that_cannot_open_the_file_shares_nothing(tmp_path: Path, shared: Path) -> None:
    """Ranks with temporary folders of their own failed with FileNotFoundError, at each start."""
    store = Store(tmp_path / "run", shared)
    assert store.fetched(Topic(both=False)) == 0 and not [*shared.glob("lastgood-*")]


def test_nothing_is_shared_in_a_tmpfs_without_room(tmp_path: Path, shared: Path, monkeypatch) -> None:
    """A tmpfs may be larger than the memory that a container may take: the kernel ended the rank, at each start."""
    monkeypatch.setattr(memory_place, "in_memory", lambda folder: folder == str(shared))
    monkeypatch.setattr(memory_files, "free_bytes", lambda folder: 0)
    store = Store(tmp_path / "run", shared)
    monkeypatch.setattr(os, "posix_fallocate", None)  # not called
    assert store.fetched(Topic()) == 0

"""The file in which the ranks of a machine share what they read from an object store."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lastgood
from lastgood.format import commit, sealed
from lastgood.io.files import PosixFiles
from lastgood.records import Extent
from lastgood.run.node_cache import NodeCache
from lastgood.storage.directory import Disk
from training import Training


class Topic:
    """Two ranks of one machine that say the same."""

    def agree(self, value: Any, decide: Callable[[Sequence[Any]], Any]) -> Any:
        return decide([value, value])


def test_a_rank_that_is_killed_while_it_reads_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file had its name until all was read: a kill left as much as the shared part of the state in /tmp."""
    training, shared = Training(), tmp_path / "tmp"
    training.step()
    lastgood.save(tmp_path / "run", training.state, step=1)
    disk = Disk(PosixFiles(), str(tmp_path / "run"))
    (at,) = commit.survey(disk).generations
    generation = commit.read_generation(disk, at, None)
    manifest = sealed.sealed_record(disk, generation, generation.commit.seals[0])
    shared.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    read = list[Extent]()

    class Store(Disk):
        def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
            assert [*shared.iterdir()] == []
            read.append(extent)
            disk.read_into(extent, mv)

    content: Any = SimpleNamespace(generation=generation, manifests=[manifest])
    ranks: Any = SimpleNamespace(opening="opening/0123", restore_count=1, rank=0)
    wanted = {blob.name: [0] for blob in manifest.blobs}
    with contextlib.closing(NodeCache(Store(PosixFiles(), str(tmp_path / "run")))) as cache:
        cache.fill(content, wanted, ranks, Topic())  # type: ignore[arg-type]
        assert len(read) == 1
        found, direct = bytearray(read[0].length), bytearray(read[0].length)
        cache.read_into(read[0], memoryview(found))
        disk.read_into(read[0], memoryview(direct))
    assert found == direct and len(read) == 1

"""Runs of several ranks with a bucket behind their disk: the ranks of a node share a pack there."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import obstore
import pytest

import lastgood
from lastgood.storage import object_store
from lastgood_lab.campaigns.rank_jobs import whole
from lastgood_lab.worlds import world
from ranked_places import killed, on_nodes, restored, trained

pytestmark = pytest.mark.slow

ONE_NODE = {"pack-00000", "pack-00002", "COMMIT.json", "VERIFIED.json"}


@pytest.fixture
def environ(bucket: str) -> dict[str, str]:
    """What reaches the server from other processes."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def objects(bucket: str) -> dict[int, set[str]]:
    """Step -> the names of the objects of its generation."""
    store, found = object_store.opened(bucket, object_store.DEADLINES), dict[int, set[str]]()
    for batch in obstore.list(store, "gen/"):
        for one in batch:
            _, folder, name = one["path"].split("/")
            found.setdefault(int(folder.partition("-")[0]), set()).add(name)
    return found


def written_by(root: str | Path, step: int) -> Counter[str]:
    """How many files of each kind the generation has for a reader."""
    run = lastgood.open(root)
    (folder,) = [name for name in run.tier.tree("gen") if int(name.partition("-")[0]) == step]
    return Counter(name.partition(".")[2] for name in run.tier.list(f"gen/{folder}") if name[0] == "r")


def test_ranks_of_one_machine_copy_two_packs(bucket, tmp_path, environ):
    world(2, trained, tmp_path, bucket, 8, environ)
    assert objects(bucket) == {4: ONE_NODE, 8: ONE_NODE}
    assert whole(bucket, 8) == whole(tmp_path / "front", 8) and lastgood.open(bucket).verify(8).good
    assert written_by(bucket, 8) == {"safetensors": 2, "manifest.json": 2}


def test_each_node_copies_a_pack_and_any_number_of_ranks_restores_them(bucket, tmp_path, environ):
    world(4, on_nodes, tmp_path, bucket, 8, environ, ["a", "b", "a", "b"])
    assert objects(bucket)[8] == {"pack-00000", "pack-00001", "pack-00004", "COMMIT.json", "VERIFIED.json"}
    expected = whole(bucket, 8)
    assert expected == whole(tmp_path / "front", 8)
    kept, digests = tmp_path / "kept", set()
    shutil.copytree(tmp_path / "front", kept / "front")
    for root, source in ((kept, str(kept / "front")), (tmp_path, bucket)):
        for size in (1, 2, 4):
            if root == tmp_path:
                shutil.rmtree(root / "front")
            for one in world(size, restored, root, bucket, environ):
                assert (one["step"], one["sources"]) == (8, [source]), f"{size} ranks"
                digests.add(one["digest"])
    assert len(digests) == 1


def test_ranks_that_lost_their_disk_go_on_exactly_from_packs(bucket, tmp_path, environ):
    uninterrupted = world(2, trained, tmp_path / "whole", tmp_path / "other", 12)[0]["losses"]
    before = world(2, trained, tmp_path, bucket, 8, environ)
    shutil.rmtree(tmp_path / "front")
    after = world(2, trained, tmp_path, bucket, 12, environ)
    assert {tuple(one["sources"]) for one in after} == {(bucket,)}
    assert before[1]["losses"] + after[1]["losses"] == uninterrupted


def test_retention_deletes_packs(bucket, tmp_path, environ):
    world(2, trained, tmp_path, bucket, 20, environ, None, lastgood.Keep(last=2))
    kept = objects(bucket)  # a copy is given up where a newer save was committed first: the last but one may vary
    assert len(kept) == 2 and 20 in kept and all(names == ONE_NODE for names in kept.values())


def test_ranks_killed_between_packs_and_commit_leave_nothing_visible(bucket, tmp_path, environ):
    world(2, killed, tmp_path, bucket, environ, dies=(0, 1))
    assert objects(bucket) == {4: {"pack-00000", "pack-00002"}} and not lastgood.open(bucket).generations()
    world(2, trained, tmp_path, bucket, 8, environ)
    assert objects(bucket) == {4: ONE_NODE, 8: ONE_NODE}
    assert whole(bucket, 8) == whole(tmp_path / "front", 8)


def test_a_damaged_pack_is_stepped_over_by_all_ranks(bucket, tmp_path, environ):
    world(2, trained, tmp_path, bucket, 8, environ)
    (file,) = (tmp_path / "front").glob("gen/000000000008-*/r00001.safetensors")
    store, part = object_store.opened(bucket, object_store.DEADLINES), file.read_bytes()
    name = f"gen/{file.parent.name}/pack-00000"
    data = bytearray(bytes(obstore.get(store, name).bytes()))
    data[data.index(part) + len(part) - 5] ^= 1
    obstore.put(store, name, bytes(data))
    shutil.rmtree(tmp_path / "front")
    assert {one["step"] for one in world(2, restored, tmp_path, bucket, environ)} == {4}

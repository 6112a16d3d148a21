"""Copies of generations between places, and a damaged place that is made whole from another one."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest

import lastgood
from harness import digests, flip
from lastgood import errors
from lastgood.cli import app
from lastgood.engine.arena import Arena
from lastgood.format import commit, layout
from lastgood.limits import CHUNK_BYTES, WORKERS
from lastgood.run import access, copying


def saved(path: Path | str, steps: int = 3) -> None:
    for step in range(1, steps + 1):
        lastgood.save(str(path), {"w": np.arange(5000, dtype=np.float32) * step, "n": step}, step=step)


def folder_of(run: Path, step: int) -> Path:
    (found,) = (run / "gen").glob(f"{step:012d}-*")
    return found


def complete(run: Path, other: Path, step: int) -> list[str]:
    """Make a generation of `run` whole from `other`."""
    source = access.for_reading(other)
    generation = next(one for at, one in commit.survey(source).generations.items() if at.step == step)
    with access.for_writing(run, "atomic_dirsync") as tier, ThreadPoolExecutor(WORKERS) as workers:
        how = copying.Copying(Arena(4 * CHUNK_BYTES, CHUNK_BYTES), workers)
        return copying.complete(tier, [source], generation, how)


def files(run: Path) -> dict[str, bytes]:
    found = {str(one.relative_to(run)): one.read_bytes() for one in run.rglob("*") if one.is_file()}
    return {name: data for name, data in found.items() if name.startswith("gen")}


def test_a_copied_run_is_the_same_run_and_continues(tmp_path, call_json):
    saved(tmp_path / "a")
    code, data = call_json("copy", str(tmp_path / "a"), str(tmp_path / "b"))
    assert code == 0 and [row["step"] for row in data["copied"]] == [1, 2, 3]
    assert files(tmp_path / "b") == files(tmp_path / "a")
    assert digests(str(tmp_path / "b")) == digests(str(tmp_path / "a"))
    lastgood.save(tmp_path / "b", {"n": 4}, step=4)
    assert lastgood.load(tmp_path / "b")["n"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("way", ["in", "out", "within"])
def test_a_run_is_copied_into_a_bucket_out_of_it_and_within_it(tmp_path, bucket, way, call_json):
    source, target = {
        "in": (str(tmp_path / "a"), f"{bucket}/b"),
        "out": (f"{bucket}/a", str(tmp_path / "b")),
        "within": (f"{bucket}/a", f"{bucket}/b"),
    }[way]
    saved(source)
    assert call_json("copy", source, target)[0] == 0
    assert digests(target) == digests(source) and lastgood.open(target).verify().good
    code, data = call_json("copy", source, target)
    assert code == 0 and not data["copied"] and len(data["present"]) == 3
    lastgood.save(target, {"n": 4}, step=4)
    code, data = call_json("copy", target, source)
    assert code == 0 and [row["step"] for row in data["copied"]] == [4], "and back again"


def test_chosen_generations_are_copied_alone(tmp_path, call_json):
    saved(tmp_path / "a")
    assert call_json("copy", str(tmp_path / "a"), str(tmp_path / "b"), "2")[0] == 0
    assert [one.step for one in lastgood.open(tmp_path / "b").generations()] == [2]
    assert lastgood.load(tmp_path / "b")["n"] == 2
    code, data = call_json("copy", str(tmp_path / "a"), str(tmp_path / "b"), "7")
    assert code == 3 and data["error"] == "NoSuchStep"


def test_a_copy_that_was_interrupted_goes_on(tmp_path, call_json):
    saved(tmp_path / "a", 2)
    target = folder_of(tmp_path / "a", 1)
    copy = tmp_path / "b" / "gen" / target.name
    copy.mkdir(parents=True)
    (copy / "r00000.safetensors").write_bytes((target / "r00000.safetensors").read_bytes()[:-100])
    (tmp_path / "b" / "lastgood.json").write_bytes((tmp_path / "a" / "lastgood.json").read_bytes())
    assert call_json("copy", str(tmp_path / "a"), str(tmp_path / "b"))[0] == 0
    assert files(tmp_path / "b") == files(tmp_path / "a")


@pytest.mark.parametrize("gives_up", [True, False])
def test_two_copies_of_one_file_at_the_same_time_leave_it_whole(tmp_path, gives_up):
    """The coordinator of a job was killed while another rank copied a file. An agent took the lock, and copied the
    generation. The rank then gave up, and removed the file, which was committed."""
    saved(tmp_path / "a", 1)
    saved(tmp_path / "b", 2)
    shutil.rmtree(tmp_path / "b" / "gen")
    (tmp_path / "b" / layout.HEADER).write_bytes((tmp_path / "a" / layout.HEADER).read_bytes())
    source = access.for_reading(tmp_path / "a")
    (generation,) = commit.survey(source).generations.values()

    def overtaken() -> bool:
        with ThreadPoolExecutor(1) as other:
            other.submit(complete, tmp_path / "b", tmp_path / "a", 1).result()
        return gives_up

    with access.for_sharing(tmp_path / "b", "atomic_dirsync") as target, ThreadPoolExecutor(WORKERS) as workers:
        how = copying.Copying(Arena(4 * CHUNK_BYTES, CHUNK_BYTES), workers, stop=overtaken)
        with pytest.raises(errors.Cancelled) if gives_up else contextlib.nullcontext():
            copying.copy_files(target, [source], generation, None, how)
    assert files(tmp_path / "b") == files(tmp_path / "a")


def test_what_a_killed_copy_left_is_removed_by_the_next_opening(tmp_path):
    """Its successor is a process whose number and thread are the same."""
    saved(tmp_path / "a", 1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    blob = folder_of(tmp_path / "b", 1) / "r00000.safetensors"
    flip(blob)
    mine, others = (f"{blob}.{number}-{threading.get_ident()}.tmp" for number in (os.getpid(), 1))
    for one in (mine, others):
        Path(one).write_bytes(b"half of it")
    complete(tmp_path / "b", tmp_path / "a", 1)
    assert not os.path.exists(mine) and os.path.exists(others)
    lastgood.save(tmp_path / "b", {"n": 2}, step=2)
    assert not os.path.exists(others)


def test_a_place_of_another_run_is_refused_and_left_unchanged(tmp_path, call_json):
    saved(tmp_path / "a")
    saved(tmp_path / "b", 1)
    before = files(tmp_path / "b")
    code, data = call_json("copy", str(tmp_path / "a"), str(tmp_path / "b"))
    assert code == 3 and "another run" in data["message"] and files(tmp_path / "b") == before


def test_a_damaged_generation_is_not_copied_and_the_others_are(tmp_path, call_json):
    saved(tmp_path / "a")
    flip(folder_of(tmp_path / "a", 2) / "r00000.safetensors")
    code, data = call_json("copy", str(tmp_path / "a"), str(tmp_path / "b"))
    assert code == 4 and [row["step"] for row in data["failed"]] == [2]
    assert [one.step for one in lastgood.open(tmp_path / "b").generations()] == [1, 3]


DAMAGE = {
    "a flipped bit": lambda folder: flip(folder / "r00000.safetensors"),
    "a cut file": lambda folder: os.truncate(folder / "r00000.safetensors", 100),
    "a longer file": lambda folder: os.truncate(folder / "r00000.safetensors", 50_000),
    "a missing file": lambda folder: (folder / "r00000.safetensors").unlink(),
    "a missing manifest": lambda folder: (folder / "r00000.manifest.json").unlink(),
    "a damaged manifest": lambda folder: flip(folder / "r00000.manifest.json"),
    "a missing commit": lambda folder: (folder / "COMMIT.json").unlink(),
    "a damaged commit": lambda folder: flip(folder / "COMMIT.json"),
    "an empty commit": lambda folder: (folder / "COMMIT.json").write_bytes(b""),
    "an empty folder": lambda folder: [one.unlink() for one in folder.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_every_damage_is_repaired_from_another_place_bit_for_bit(tmp_path, damage):
    saved(tmp_path / "a")
    assert app.main(["copy", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    whole = files(tmp_path / "b")
    DAMAGE[damage](folder_of(tmp_path / "b", 2))
    written = complete(tmp_path / "b", tmp_path / "a", 2)
    assert written and files(tmp_path / "b") == whole
    assert not complete(tmp_path / "b", tmp_path / "a", 2), "nothing is written a second time"


def test_places_that_are_damaged_in_different_chunks_make_a_whole_one(tmp_path):
    big = {"w": np.random.default_rng(0).bytes(3 * CHUNK_BYTES)}
    lastgood.save(str(tmp_path / "a"), {"w": np.frombuffer(big["w"], np.uint8)}, step=1)
    assert app.main(["copy", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    whole = files(tmp_path / "b")
    flip(folder_of(tmp_path / "a", 1) / "r00000.safetensors", 2 * CHUNK_BYTES + 5)
    flip(folder_of(tmp_path / "b", 1) / "r00000.safetensors", CHUNK_BYTES + 5)
    complete(tmp_path / "b", tmp_path / "a", 1)
    assert files(tmp_path / "b") == whole
    flip(folder_of(tmp_path / "b", 1) / "r00000.safetensors", 2 * CHUNK_BYTES + 9)
    before = files(tmp_path / "b")
    with pytest.raises(errors.SumMismatch, match="chunk 2"):
        complete(tmp_path / "b", tmp_path / "a", 1)
    assert {name: data for name, data in files(tmp_path / "b").items() if "safetensors" in name} == {
        name: data for name, data in before.items() if "safetensors" in name
    }, "what cannot be repaired is left as it is"


class Unreachable:
    """A node that is listed, and cannot be read. Counts the readings."""

    newest_only, reads_at_once = False, 1

    def __init__(self, tier):
        self.place, self._tier, self.calls = "another node", tier, 0

    def list(self, folder):
        return self._tier.list(folder)

    def read_into(self, extent, mv, *, fresh=False):
        self.calls += 1
        raise errors.PeerDown("no route")


def test_a_node_that_cannot_be_reached_is_passed_over_in_a_copy(tmp_path):
    """It is asked once, and not for each chunk. What no other place can give is not there now: that is no damage."""
    for name in ("good", "bad"):
        saved(tmp_path / name, steps=1)
    good, bad = (access.for_reading(tmp_path / name) for name in ("good", "bad"))
    (generation,) = commit.survey(good).generations.values()
    shutil.rmtree(tmp_path / "bad")
    shutil.copytree(tmp_path / "good", tmp_path / "bad", symlinks=True)
    flip(next((tmp_path / "bad").glob("gen/*/*.safetensors")), -5)
    with access.for_writing(tmp_path / "new", "atomic_dirsync") as tier, ThreadPoolExecutor(WORKERS) as workers:
        how = copying.Copying(Arena(4 * CHUNK_BYTES, CHUNK_BYTES), workers)
        with pytest.raises(errors.PeerDown, match="no route"):
            copying.copy_files(tier, [Unreachable(good), bad], generation, None, how)
        node = Unreachable(good)
        assert copying.copy_files(tier, [node, good], generation, None, how) == ["r00000.safetensors"]
        assert node.calls == 2, "for the manifest, and for the first chunk"
    assert files(tmp_path / "new").items() <= files(tmp_path / "good").items()


def test_a_valid_commit_of_another_generation_is_never_replaced(tmp_path):
    saved(tmp_path / "a", 1)
    assert app.main(["copy", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    source = access.for_reading(tmp_path / "a")
    (generation,) = commit.survey(source).generations.values()
    target = folder_of(tmp_path / "b", 1) / layout.COMMIT
    record = layout.decode(target.read_bytes(), type(generation.commit), "")
    target.write_bytes(layout.encode(msgspec.structs.replace(record, created=1.0)))
    before = files(tmp_path / "b")
    with pytest.raises(errors.NameTaken):
        complete(tmp_path / "b", tmp_path / "a", 1)
    assert files(tmp_path / "b") == before


@pytest.mark.parametrize("kind", ["manifest", "COMMIT"])
def test_a_valid_record_with_other_content_is_taken_from_the_next_place(tmp_path, kind, call_json):
    """Its own digest is right, and it is not the record that was committed."""
    saved(tmp_path / "good", 1)
    assert call_json("copy", str(tmp_path / "good"), str(tmp_path / "other"))[0] == 0
    before = files(tmp_path / "good")
    source = access.for_reading(tmp_path / "good")
    (generation,) = commit.survey(source).generations.values()
    (name,) = [one for one in folder_of(tmp_path / "other", 1).iterdir() if kind in one.name]
    if kind == "manifest":
        manifest = commit.read_manifest(source, generation)
        data = layout.encode(msgspec.structs.replace(manifest, values={**manifest.values, "n": 7}), manifest.digest)
    else:
        data = layout.encode(msgspec.structs.replace(generation.commit, created=1.0), "xxh3_128")
    name.write_bytes(data)
    sources = [access.for_reading(tmp_path / "other"), source]
    with access.for_writing(tmp_path / "new", "atomic_dirsync") as tier, ThreadPoolExecutor(WORKERS) as workers:
        how = copying.Copying(Arena(4 * CHUNK_BYTES, CHUNK_BYTES), workers)
        copying.complete(tier, sources, generation, how)
    assert {name: data for name, data in files(tmp_path / "new").items() if "VERIFIED" not in name} == {
        name: data for name, data in before.items() if "VERIFIED" not in name
    }

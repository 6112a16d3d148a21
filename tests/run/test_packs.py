"""Packs: files of many ranks in one object of an object store, and readers that find them under their own names."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
from obstore.store import MemoryStore

from harness import digests, flip
from lastgood import errors
from lastgood.cli import app
from lastgood.engine.arena import Arena
from lastgood.engine.inline_executor import Inline
from lastgood.format import commit, layout, pack_layout
from lastgood.format.pack_layout import PackFiles, PackIndex
from lastgood.io.files import PosixFiles
from lastgood.limits import CHUNK_BYTES, WORKERS
from lastgood.ports import Tier
from lastgood.records import Finding, Generation, GenerationId
from lastgood.run import access, copying, packed
from lastgood.run.content import Content
from lastgood.run.packed import PackedTier
from lastgood.run.reader import read_all
from lastgood.run.writer import RunWriter
from lastgood.storage import object_store
from lastgood.storage.directory import Disk
from lastgood.storage.objects import Objects
from lastgood_lab.hostile import ROOT, HostileDisk
from lastgood_lab.plain import share

GOLDEN = Path(__file__).parents[1] / "golden" / "ranks"
"""a run of two ranks, with the steps 2 and 4"""
PACK, MANIFESTS = "pack-00000", "pack-00002"
"""of a copy by one process"""
RECORDS = {"COMMIT.json", "VERIFIED.json"}


@pytest.fixture
def front(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "front"))


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def bucketlike(store: MemoryStore) -> PackedTier:
    """A tier over an object store in memory."""
    return opened(store)


def opened(store: MemoryStore) -> PackedTier:
    return PackedTier(Objects(store, "memory"))


def generation_of(run: Path, step: int = 4) -> Generation:
    found = commit.survey(access.for_reading(run)).generations
    return next(one for at, one in found.items() if at.step == step)


class Nodes:
    """`copying.Others` where another process packs the files of some ranks, as on another node."""

    def __init__(self, mine: Collection[int], act: Callable[[], None]) -> None:
        self._mine, self._act = mine, act
        self._asked: copying.Task | None = None

    def own_part(self, generation: Generation) -> Collection[int] | None:
        return None

    def packed_part(self, generation: Generation) -> Collection[int] | None:
        return self._mine

    def ask(self, at: GenerationId, task: copying.Task, code: str = "") -> None:
        self._asked = task

    def answers(self) -> list[Finding]:
        if self._asked == "pack":
            self._act()
        return []

    def end(self) -> None:
        """Nobody waits."""


@contextlib.contextmanager
def how() -> Iterator[copying.Copying]:
    with ThreadPoolExecutor(WORKERS) as workers:
        yield copying.Copying(Arena(4 * CHUNK_BYTES, CHUNK_BYTES), workers)


def copy(front: Path, target: Tier, others: copying.Others | None = None, step: int = 4) -> Generation:
    one = generation_of(front, step)
    with how() as by:
        copying.complete(target, [access.for_reading(front)], one, by, others)  # type: ignore[arg-type]
    return one


def copied_by_two_nodes(front: Path, store: MemoryStore) -> Generation:
    """Each of two processes packs the files of one rank."""

    def other_node() -> None:
        source, one = access.for_reading(front), generation_of(front)
        with how() as by:
            copying.pack_files(opened(store), [source], one, [1], by)

    return copy(front, opened(store), Nodes([0], other_node))


def objects(store: object, one: Generation) -> dict[str, int]:
    """Name -> length of the objects of a generation."""
    found = [each for batch in obstore.list(store, layout.folder(one.id) + "/") for each in batch]  # type: ignore[arg-type]
    return {each["path"].rpartition("/")[2]: each["size"] for each in found}


def files(run: Path) -> dict[str, bytes]:
    found = {str(one.relative_to(run)): one.read_bytes() for one in run.rglob("*") if one.is_file()}
    return {name: data for name, data in found.items() if name.startswith("gen")}


def contents(tier: Tier, one: Generation) -> dict[str, bytes]:
    content = Content(tier, one)
    return {name: bytes(content.tensor(name)[1]) for name in content.names()}


def found_in(tier: Tier, one: Generation) -> list[Finding]:
    with ThreadPoolExecutor(WORKERS) as workers:
        return read_all(tier, one, Arena(4 * CHUNK_BYTES, CHUNK_BYTES), workers)


def change(store: MemoryStore, one: Generation, name: str, act: Callable[[bytearray], bytes | bytearray]) -> None:
    """Write an object again, with other bytes."""
    key = f"{layout.folder(one.id)}/{name}"
    data = bytearray(bytes(obstore.get(store, key).bytes()))
    obstore.put(store, key, bytes(act(data)))


def flip_in(store: MemoryStore, one: Generation, name: str, byte: int = 0) -> None:
    """Flip a bit of a file in whichever pack of a copy by one process it is."""
    pack = MANIFESTS if pack_layout.is_manifest(name) else PACK
    at = index_of(store, one, pack)[1].files[name][0] + byte
    change(store, one, pack, lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


def index_of(store: MemoryStore, one: Generation, pack: str = PACK) -> tuple[pack_layout.Footer, PackIndex]:
    data = bytes(obstore.get(store, f"{layout.folder(one.id)}/{pack}").bytes())
    at = pack_layout.decode_footer(data, len(data), pack)
    return at, pack_layout.decode_index(data[at.start : at.start + at.length], at, pack)


# ---- copies ----------------------------------------------------------------------------------------------------


def test_a_copy_of_two_ranks_is_two_packs_commit_and_mark(front, store, bucketlike):
    one = copy(front, bucketlike)
    assert objects(store, one).keys() == {PACK, MANIFESTS, *RECORDS}
    assert contents(opened(store), one) == contents(access.for_reading(front), one)
    assert not found_in(opened(store), one)


def test_a_listing_names_the_files_in_packs_and_their_bytes_once(front, store, bucketlike):
    one = copy(front, bucketlike)
    listing = opened(store).list(layout.folder(one.id))
    on_disk = {path.name: path.stat().st_size for path in (front / layout.folder(one.id)).iterdir()}
    assert {name: length for name, length in listing.items() if name[0] == "r"} == {
        name: length for name, length in on_disk.items() if name[0] == "r"
    }
    assert listing[PACK] == listing[MANIFESTS] == -1
    assert commit.read_generation(opened(store), one.id, None).bytes == sum(objects(store, one).values())


def test_every_file_of_a_pack_begins_at_a_page_and_equals_the_source(front, store, bucketlike):
    one = copy(front, bucketlike)
    for pack, kind in ((PACK, "safetensors"), (MANIFESTS, "manifest.json")):
        data = bytes(obstore.get(store, f"{layout.folder(one.id)}/{pack}").bytes())
        _, index = index_of(store, one, pack)
        assert sorted(index.files, key=index.files.__getitem__) == [f"r00000.{kind}", f"r00001.{kind}"]
        for name, (offset, length) in index.files.items():
            assert offset % 4096 == 0
            assert data[offset : offset + length] == (front / layout.folder(one.id) / name).read_bytes()


def test_a_generation_with_one_tensor_file_stays_two_plain_objects(store, bucketlike):
    front = Path(__file__).parents[1] / "golden" / "v1"
    one = copy(front, bucketlike, step=30)
    assert objects(store, one).keys() == {"r00000.safetensors", "r00000.manifest.json", "COMMIT.json", "VERIFIED.json"}


def test_sixty_four_ranks_are_four_objects(tmp_path, store, bucketlike):
    states = [{f"w{rank}": np.random.default_rng(rank).integers(0, 255, 9000, np.uint8)} for rank in range(64)]
    with access.for_writing(str(tmp_path / "many"), "atomic_dirsync") as tier:
        run = RunWriter(tier, Inline())
        parts = [share(tier, run.admit(4), rank, state) for rank, state in enumerate(states)]
        run.publish(run.admit(4), parts, False, False, {})
    one = copy(tmp_path / "many", bucketlike)
    assert objects(store, one).keys() == {PACK, "pack-00064", *RECORDS}
    assert contents(opened(store), one) == {name: bytes(data) for state in states for name, data in state.items()}


def test_two_nodes_write_one_pack_each_and_one_index_names_both(front, store):
    one = copied_by_two_nodes(front, store)
    assert objects(store, one).keys() == {PACK, "pack-00001", "pack-00002", *RECORDS}
    _, index = index_of(store, one, "pack-00002")
    assert index.files.keys() == {"r00000.manifest.json", "r00001.manifest.json"}
    assert index.others[PACK].files.keys() == {"r00000.safetensors"}
    assert index.others["pack-00001"].files.keys() == {"r00001.safetensors"}
    assert contents(opened(store), one) == contents(access.for_reading(front), one)


def test_nothing_is_committed_if_the_others_fail(front, store):
    def fail() -> None:
        raise errors.TierDown("the other node is down")

    with pytest.raises(errors.TierDown):
        copy(front, opened(store), Nodes([0], fail))
    assert objects(store, generation_of(front)).keys() == {PACK}
    one = copied_by_two_nodes(front, store)
    assert not found_in(opened(store), one)


def copy_without_commit(front, store, monkeypatch) -> None:
    """A copy that ends once its packs are written, before the records."""
    with monkeypatch.context() as patched:
        patched.setattr(commit, "copy_records", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            copy(front, opened(store))


def test_a_copy_that_ended_between_packs_and_commit_is_completed(front, store, monkeypatch):
    """The packs exist, the generation does not. The next copy reads them back and writes the records."""
    one = generation_of(front)
    copy_without_commit(front, store, monkeypatch)
    assert objects(store, one).keys() == {PACK, MANIFESTS} and not commit.survey(opened(store)).generations
    before = obstore.head(store, f"{layout.folder(one.id)}/{PACK}")["e_tag"]
    copy(front, opened(store))
    assert obstore.head(store, f"{layout.folder(one.id)}/{PACK}")["e_tag"] == before, "it was not written again"
    assert objects(store, one).keys() == {PACK, MANIFESTS, *RECORDS}


def test_a_pack_that_was_damaged_before_the_commit_is_never_committed_so(front, store, monkeypatch):
    one = generation_of(front)
    copy_without_commit(front, store, monkeypatch)
    flip_in(store, one, "r00001.safetensors")
    copy(front, opened(store))
    assert objects(store, one).keys() == {PACK, MANIFESTS, "r00001.safetensors", *RECORDS}
    assert contents(opened(store), one) == contents(access.for_reading(front), one)


# ---- damage ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [PACK, MANIFESTS])
def test_a_bit_flipped_anywhere_in_a_pack_is_found_or_changes_nothing(front, store, bucketlike, pack):
    one = copy(front, bucketlike)
    whole, good = objects(store, one)[pack], contents(bucketlike, one)
    index = index_of(store, one, pack)[1]
    held = [range(offset, offset + length) for offset, length in index.files.values()]
    for at in sorted({*range(0, whole, 613), *range(whole - 32, whole)}):
        change(store, one, pack, lambda data, at=at: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        tier = opened(store)
        if any(at in one for one in held):
            assert found_in(tier, one), f"byte {at:,}"
        try:
            assert contents(tier, one) == good, f"byte {at:,}"
        except errors.Damaged:
            assert found_in(tier, one)
        change(store, one, pack, lambda data, at=at: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    assert contents(opened(store), one) == good


def forged(index: PackIndex, at: pack_layout.Footer, data: bytearray) -> bytes:
    """The pack with another index, whose digest agrees."""
    length = len(data) - at.start
    made = layout.encode(index)
    footer = bytes(data[-pack_layout.FOOTER_BYTES : -8]) + len(made).to_bytes(8, "little")
    return bytes(data[: at.start]) + made + bytes(length - len(made) - pack_layout.FOOTER_BYTES) + footer


def moved(files: pack_layout.Places, name: str, offset: int, length: int | None = None) -> PackIndex:
    return PackIndex(format=1, files={**files, name: (offset, length or files[name][1])}, others={})


DAMAGE: dict[str, Callable[[pack_layout.Footer, PackIndex, bytearray], bytes]] = {
    "cut at its end": lambda at, index, data: bytes(data[:-1]),
    "cut in the middle": lambda at, index, data: bytes(data[: len(data) // 2]),
    "cut to less than a footer": lambda at, index, data: bytes(data[:7]),
    "empty": lambda at, index, data: b"",
    "of zeros": lambda at, index, data: bytes(len(data)),
    "an index of another record": lambda at, index, data: bytes(
        data[: at.start] + bytearray(layout.encode(PackFiles(length=1, files={}))).ljust(len(data) - at.start, b"\0")
    ),
    "a file outside": lambda at, index, data: forged(moved(index.files, max(index.files), 1 << 40), at, data),
    "a file at a negative offset": lambda at, index, data: forged(
        moved(index.files, max(index.files), -4096), at, data
    ),
    "a file longer than the pack": lambda at, index, data: forged(
        moved(index.files, max(index.files), 0, len(data)), at, data
    ),
    "a file where another one is": lambda at, index, data: forged(moved(index.files, max(index.files), 0), at, data),
    "a commit in the index": lambda at, index, data: forged(
        PackIndex(format=1, files={**index.files, "COMMIT.json": (0, 10)}, others={}), at, data
    ),
    "a footer that asks for terabytes": lambda at, index, data: bytes(
        data[:-24] + bytes(16) + (len(data) - 32).to_bytes(8, "little")
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_pack_of_manifests_loads_nothing_and_is_repaired(front, store, bucketlike, damage):
    one = copy(front, bucketlike)
    good, (at, index) = contents(bucketlike, one), index_of(store, one, MANIFESTS)
    change(store, one, MANIFESTS, lambda data: DAMAGE[damage](at, index, data))
    assert found_in(opened(store), one)
    with pytest.raises(errors.Damaged):
        contents(opened(store), one)
    copy(front, opened(store))
    assert not found_in(opened(store), one) and contents(opened(store), one) == good
    assert commit.read_generation(opened(store), one.id, None).verified


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_pack_of_tensors_loads_nothing_wrong_and_is_repaired(front, store, bucketlike, damage):
    """The index of the manifests names its files too, so that its own index is of no use while its length is right."""
    one = copy(front, bucketlike)
    good, (at, index) = contents(bucketlike, one), index_of(store, one)
    change(store, one, PACK, lambda data: DAMAGE[damage](at, index, data))
    with contextlib.suppress(errors.Damaged):
        assert contents(opened(store), one) == good
    copy(front, opened(store))
    assert not found_in(opened(store), one) and contents(opened(store), one) == good


def test_a_damaged_index_is_named_where_its_files_are_missing(front, store, bucketlike):
    one = copy(front, bucketlike)
    change(store, one, MANIFESTS, lambda data: data[:-9])
    with pytest.raises(errors.ManifestInvalid, match=f"{MANIFESTS} does not end as a pack does"):
        Content(opened(store), one)


def test_a_lost_pack_is_written_again_under_its_name(front, store):
    one = copied_by_two_nodes(front, store)
    good, names = contents(opened(store), one), objects(store, one).keys()
    for pack in (PACK, "pack-00001", "pack-00002"):
        obstore.delete(store, f"{layout.folder(one.id)}/{pack}")
        assert {each.kind for each in found_in(opened(store), one)} == {"MissingBlob"}
        copy(front, opened(store))
        assert objects(store, one).keys() == names
        assert contents(opened(store), one) == good


def test_files_of_other_packs_are_found_without_the_index_that_names_all(front, store):
    one = copied_by_two_nodes(front, store)
    change(store, one, "pack-00002", lambda data: data[:-9])
    listing = opened(store).list(layout.folder(one.id))
    assert {name for name in listing if name[0] == "r"} == {"r00000.safetensors", "r00001.safetensors"}
    copy(front, opened(store))
    assert not found_in(opened(store), one)


def test_an_earlier_layout_with_all_manifests_in_the_first_pack_is_read(front, store):
    """Until 2026-11 the pack of rank 0 held the manifests of all ranks, and its index named the files of the others."""
    one = generation_of(front)
    folder = front / layout.folder(one.id)

    def pack(names: list[str], others: dict[str, PackFiles]) -> tuple[bytes, pack_layout.Places]:
        places, end = pack_layout.placed([(name, (folder / name).stat().st_size) for name in names])
        data = b"".join((folder / name).read_bytes().ljust(-(-places[name][1] // 4096) * 4096, b"\0") for name in names)
        return data + pack_layout.encode_end(places, others, end), places

    second, files = pack(["r00001.safetensors"], {})
    named = {"pack-00001": PackFiles(length=len(second), files=files)}
    first, _ = pack(["r00000.safetensors", "r00000.manifest.json", "r00001.manifest.json"], named)
    records = ((name, (folder / name).read_bytes()) for name in sorted(RECORDS))
    for name, data in ((PACK, first), ("pack-00001", second), *records):
        obstore.put(store, f"{layout.folder(one.id)}/{name}", data)
    assert not found_in(opened(store), one)
    assert contents(opened(store), one) == contents(access.for_reading(front), one)


def test_one_damaged_file_is_mended_as_an_object_of_its_own(front, store, bucketlike):
    one = copy(front, bucketlike)
    pack = objects(store, one)[PACK]
    flip_in(store, one, "r00001.safetensors")
    with how() as by:
        names = copying.complete(opened(store), [access.for_reading(front)], one, by)
    assert names == ["r00001.safetensors"] and not found_in(opened(store), one)
    assert objects(store, one).keys() == {PACK, MANIFESTS, "r00001.safetensors", *RECORDS}
    assert objects(store, one)[PACK] == pack
    assert opened(store).list(layout.folder(one.id))["r00001.safetensors"] == objects(store, one)["r00001.safetensors"]


def test_a_missing_file_beside_a_usable_pack_leaves_that_pack(front, store, bucketlike):
    one = generation_of(front)
    folder = layout.folder(one.id)
    for name in ("r00000.safetensors", "r00001.safetensors"):
        obstore.put(store, f"{folder}/{name}", (front / folder / name).read_bytes())
    copy(front, bucketlike)
    assert objects(store, one).keys() == {MANIFESTS, "r00000.safetensors", "r00001.safetensors", *RECORDS}
    manifests = objects(store, one)[MANIFESTS]
    obstore.delete(store, f"{folder}/r00000.safetensors")
    copy(front, opened(store))
    assert objects(store, one)[MANIFESTS] == manifests and PACK in objects(store, one)
    assert not found_in(opened(store), one)


def test_a_pack_that_was_written_again_is_read_by_its_own_index(front, store):
    """The index of another pack still has the old offsets."""
    one = copied_by_two_nodes(front, store)
    good, folder = contents(opened(store), one), layout.folder(one.id)
    data = (front / folder / "r00001.safetensors").read_bytes()
    lengths = [("r00001.7.safetensors", 5), ("r00001.safetensors", len(data))]
    places, end = pack_layout.placed(lengths)
    tail = pack_layout.encode_end(places, {}, end)
    obstore.put(store, f"{folder}/pack-00001", bytes(4096) + data.ljust(end - 4096, b"\0") + tail)
    assert contents(opened(store), one) == good


def test_a_reader_sees_what_another_process_has_mended_since(front, store, bucketlike):
    one = copy(front, bucketlike)
    reader, good = opened(store), contents(bucketlike, one)
    change(store, one, MANIFESTS, lambda data: data[:-9])
    with pytest.raises(errors.Damaged):
        contents(reader, one)
    copy(front, opened(store))
    assert contents(reader, one) == good


def test_a_manifest_is_read_from_the_store_in_each_reading(front, store, bucketlike):
    """Nothing that was read in an earlier reading may vouch for what the store holds now."""
    one = copy(front, bucketlike)
    reader = opened(store)
    assert not found_in(reader, one) and not found_in(reader, one)
    flip_in(store, one, "r00001.manifest.json", 40)
    assert found_in(reader, one)


def test_manifests_of_an_earlier_listing_are_not_used_again(front, store, bucketlike):
    """A medium that changes bytes by itself gives the object no new version."""
    one = copy(front, bucketlike)
    inner = Objects(store, "memory")
    versions = inner.versions(layout.folder(one.id))
    inner.versions = lambda folder: versions  # type: ignore[method-assign]
    reader = PackedTier(inner)
    reader.list(layout.folder(one.id))
    flip_in(store, one, "r00001.manifest.json", 40)
    assert found_in(reader, one)


def test_no_footer_makes_a_reader_fetch_terabytes():
    footer = pack_layout.MAGIC + bytes(16) + (100).to_bytes(8, "little")
    with pytest.raises(errors.ManifestInvalid, match="has an index of"):
        pack_layout.decode_footer(footer, 1 << 42, PACK)


def test_a_scrub_repairs_a_pack_from_another_place(front, store, bucketlike):
    one = copy(front, bucketlike)
    flip_in(store, one, "r00000.safetensors")
    writer = RunWriter(opened(store), Inline())
    writer.mender.sources = [access.for_reading(front)]
    names = writer.mend(one.id, Arena(4 * CHUNK_BYTES, CHUNK_BYTES))
    assert names == ["r00000.safetensors"] and not found_in(opened(store), one)


def test_a_packed_file_is_rebuilt_from_parity(front, store, bucketlike):
    copy(front, bucketlike)
    writer = RunWriter(opened(store), Inline(), parity="2+2")
    one = generation_of(front)
    writer.verifier.protect(one, writer.verifier.code, Arena(4 * CHUNK_BYTES, CHUNK_BYTES), lambda: False)  # type: ignore[arg-type]
    assert len([name for name in objects(store, one) if "parity" in name]) == 8
    for name in ("r00001.safetensors", "r00000.manifest.json"):
        flip_in(store, one, name, 9)
        assert found_in(opened(store), one)
        mending = RunWriter(opened(store), Inline(), parity="2+2")
        assert mending.mend(one.id, Arena(4 * CHUNK_BYTES, CHUNK_BYTES)) == [name]
        assert not found_in(opened(store), one)


# ---- deletion, requests, commands ------------------------------------------------------------------------------


class Counted:
    """The objects, and the names that are deleted."""

    def __init__(self, store: MemoryStore) -> None:
        self.deleted: list[str] = []
        inner = Objects(store, "memory")
        real = inner.delete
        inner.delete = lambda name: (self.deleted.append(name.rpartition("/")[2]), real(name))[1]  # type: ignore[method-assign]
        self.tier = PackedTier(inner)


def test_a_packed_generation_is_deleted_with_a_request_for_each_object(front, store):
    one = copied_by_two_nodes(front, store)
    counted = Counted(store)
    commit.retire(counted.tier, one.id)
    assert not objects(store, one)
    assert sorted(counted.deleted) == sorted([*RECORDS, "GOING.json", PACK, "pack-00001", "pack-00002"])


def test_names_in_packs_are_taken(front, store, bucketlike):
    one = copy(front, bucketlike)
    folder = layout.folder(one.id)
    tier, manifest = opened(store), (front / folder / "r00001.manifest.json").read_bytes()
    tier.list(folder)
    before = objects(store, one)
    tier.put_new(f"{folder}/r00001.manifest.json", manifest)
    with pytest.raises(errors.NameTaken):
        tier.put_new(f"{folder}/r00001.manifest.json", manifest[:-1] + b" ")
    with pytest.raises(errors.NameTaken):
        tier.create(f"{folder}/r00001.safetensors", 100)
    assert objects(store, one) == before


@pytest.mark.parametrize("tail_bytes", [32, 300, 5000, 1 << 20])
def test_a_pack_is_read_whatever_its_first_read_has_fetched(front, store, monkeypatch, tail_bytes):
    one = copied_by_two_nodes(front, store)
    good = contents(access.for_reading(front), one)
    monkeypatch.setattr(packed, "PACK_TAIL_BYTES", tail_bytes)
    assert contents(opened(store), one) == good
    monkeypatch.setattr(packed, "PACK_END_LIMIT_BYTES", 1000)
    assert contents(opened(store), one) == good, "the manifests are read one by one"


def test_other_packs_are_left_out_of_an_index_that_became_too_long(monkeypatch):
    packs = {
        pack_layout.pack_name(rank): PackFiles(length=10**18, files={f"r{rank:05d}.safetensors": (0, 10**18 - 4096)})
        for rank in range(300)
    }
    own, end = pack_layout.placed([("r00000.manifest.json", 100)])
    found = list[int]()
    for limit in (1 << 20, 1 << 12):
        monkeypatch.setattr(pack_layout, "PACK_END_LIMIT_BYTES", limit)
        data = pack_layout.encode_end(own, packs, end)
        at = pack_layout.decode_footer(data, end + len(data), "pack")
        index = pack_layout.decode_index(data[: at.length], at, "pack")
        assert len(data) % 4096 == 0 and index.files == own
        found.append(len(index.others))
    assert found == [300, 0]


@pytest.mark.slow
def test_all_manifests_are_read_by_one_listing_and_one_range(front, bucket, proxy):
    assert app.main(["copy", str(front), bucket]) == 0
    one = generation_of(front)
    tier = access.for_reading(bucket)
    proxy.clear()
    assert len(commit.read_manifests(tier, one)) == 2
    sent = proxy.requests
    assert [each.method for each in sent] == ["GET", "GET"]
    assert "list-type" in sent[0].target and sent[1].target.partition("?")[0].endswith(MANIFESTS)
    proxy.clear()
    assert len(commit.read_manifests(tier, one)) == 2 and len(proxy.requests) == 2, "and again"


@pytest.mark.slow
def test_a_run_of_ranks_is_copied_into_a_bucket_and_back_byte_for_byte(front, bucket, tmp_path, call_json):
    assert call_json("copy", str(front), bucket)[0] == 0
    store = object_store.opened(bucket, object_store.DEADLINES)
    for step in (2, 4):
        assert objects(store, generation_of(front, step)).keys() == {PACK, MANIFESTS, *RECORDS}
    assert digests(bucket) == digests(str(front))
    assert call_json("verify", bucket)[0] == 0
    assert call_json("copy", bucket, str(tmp_path / "back"))[0] == 0
    names = {name for name in files(front) if not name.endswith("VERIFIED.json")}
    assert {name: files(tmp_path / "back")[name] for name in names} == {name: files(front)[name] for name in names}
    assert call_json("copy", bucket, f"{bucket}-other")[0] == 0
    assert digests(f"{bucket}-other") == digests(str(front)), "from pack to pack"


@pytest.mark.slow
def test_commands_repair_and_delete_packs_in_a_bucket(front, bucket, call_json):
    assert call_json("copy", str(front), bucket)[0] == 0
    one, store = generation_of(front), object_store.opened(bucket, object_store.DEADLINES)
    flip_in(store, one, "r00001.safetensors")
    assert call_json("verify", bucket, "4")[0] == 4
    assert call_json("repair", bucket, "--from", str(front))[0] == 0
    assert call_json("verify", bucket, "4")[0] == 0 and digests(bucket) == digests(str(front))
    assert call_json("gc", bucket, "--keep-last", "1")[0] == 0
    assert not objects(store, generation_of(front, 2)) and PACK in objects(store, one)


def test_a_flipped_bit_in_the_front_is_not_packed(front, store, bucketlike):
    one = generation_of(front)
    flip(front / layout.folder(one.id) / "r00001.safetensors")
    with pytest.raises(errors.SumMismatch):
        copy(front, bucketlike)
    assert not objects(store, one)


# ---- directories -----------------------------------------------------------------------------------------------


@pytest.fixture
def in_memory(memory: Path) -> Tier:
    """The run in memory."""
    shutil.copytree(GOLDEN, memory / "run")
    return access.for_reading(f"memory://{memory}/run")


@contextlib.contextmanager
def home(tmp_path: Path) -> Iterator[Tier]:
    with access.for_writing(str(tmp_path / "home"), "atomic_dirsync") as tier:
        yield tier


def copy_to(target: Tier, source: Tier) -> Generation:
    one = next(one for at, one in commit.survey(source).generations.items() if at.step == 4)
    with how() as by:
        copying.complete(target, [source], one, by)  # type: ignore[arg-type]
    return one


def names_in(tmp_path: Path, one: Generation) -> set[str]:
    return {path.name for path in (tmp_path / "home" / layout.folder(one.id)).iterdir()}


def test_what_memory_holds_of_several_ranks_is_two_files_in_a_directory(tmp_path, in_memory):
    with home(tmp_path) as target:
        one = copy_to(target, in_memory)
    assert names_in(tmp_path, one) == {PACK, MANIFESTS, *RECORDS}
    tier = access.for_reading(tmp_path / "home")
    assert contents(tier, one) == contents(in_memory, one) and not found_in(tier, one)
    assert app.main(["verify", str(tmp_path / "home")]) == 0


def test_a_copy_from_another_directory_keeps_its_files(front, tmp_path):
    with home(tmp_path) as target:
        one = copy_to(target, access.for_reading(front))
    assert {name for name in names_in(tmp_path, one) if name[0] == "r"} == {
        path.name for path in (front / layout.folder(one.id)).iterdir() if path.name[0] == "r"
    }


@pytest.mark.parametrize("pack", [PACK, MANIFESTS])
@pytest.mark.parametrize("damage", ["cut", "flipped", "lost", "of zeros"])
def test_a_damaged_pack_in_a_directory_is_mended_from_memory(tmp_path, in_memory, pack, damage):
    with home(tmp_path) as target:
        one = copy_to(target, in_memory)
    file = tmp_path / "home" / layout.folder(one.id) / pack
    data = file.read_bytes()
    if damage == "lost":
        file.unlink()
    else:
        file.write_bytes({"cut": data[:-9], "flipped": b"?" + data[1:], "of zeros": bytes(len(data))}[damage])
    assert found_in(access.for_reading(tmp_path / "home"), one)
    with home(tmp_path) as target:
        copy_to(target, in_memory)
    tier = access.for_reading(tmp_path / "home")
    assert not found_in(tier, one) and contents(tier, one) == contents(in_memory, one)
    assert not any(name.endswith(".tmp") for name in names_in(tmp_path, one))


def test_a_reader_of_a_directory_sees_a_pack_that_changed(tmp_path, in_memory):
    """No version tells that a file of a directory was written again."""
    with home(tmp_path) as target:
        one = copy_to(target, in_memory)
    reader = access.for_reading(tmp_path / "home")
    assert not found_in(reader, one)
    file = tmp_path / "home" / layout.folder(one.id) / MANIFESTS
    file.write_bytes(bytes(file.stat().st_size))
    assert found_in(reader, one)


def copied_beside(tmp_path, in_memory, monkeypatch, other: Callable[[Tier], object]) -> None:
    """A copy to the directory, before whose first pack gets its name `other` is done there by another process.

    A rank of a job whose coordinator has died may still pack the files of its node while an agent packs all.
    """
    real, home_folder = Disk.name_finished, tmp_path / "home"

    def late(disk: Disk, name: str, by: str) -> None:
        monkeypatch.setattr(Disk, "name_finished", real)
        tier = PackedTier(Disk(PosixFiles(), str(home_folder), shared=True))
        with ThreadPoolExecutor(1) as process:
            process.submit(other, tier).result()
        real(disk, name, by)

    monkeypatch.setattr(Disk, "name_finished", late)
    with home(tmp_path) as target:
        copy_to(target, in_memory)


def test_a_pack_never_replaces_that_of_another_process(tmp_path, in_memory, monkeypatch):
    one = next(one for at, one in commit.survey(in_memory).generations.items() if at.step == 4)

    def packs_a_part(target: Tier) -> None:
        with how() as by:
            copying.pack_files(target, [in_memory], one, [0], by)  # type: ignore[arg-type]

    copied_beside(tmp_path, in_memory, monkeypatch, packs_a_part)
    assert names_in(tmp_path, one) == {PACK, "pack-00001", MANIFESTS, *RECORDS}
    assert not found_in(access.for_reading(tmp_path / "home"), one)


def test_a_copy_that_another_process_has_made_meanwhile_is_left_whole(tmp_path, in_memory, monkeypatch):
    with pytest.raises(errors.TierDown, match="was removed: another process has made"):
        copied_beside(tmp_path, in_memory, monkeypatch, lambda target: copy_to(target, in_memory))
    one = next(one for at, one in commit.survey(in_memory).generations.items() if at.step == 4)
    assert names_in(tmp_path, one) == {PACK, MANIFESTS, *RECORDS}
    assert not found_in(access.for_reading(tmp_path / "home"), one)


def test_packs_that_a_killed_process_left_unfinished_are_removed(tmp_path, in_memory):
    one = next(one for at, one in commit.survey(in_memory).generations.items() if at.step == 4)
    folder = tmp_path / "home" / layout.folder(one.id)
    folder.mkdir(parents=True)
    (folder / "pack-00000.77-88.tmp").write_bytes(bytes(5000))
    with home(tmp_path) as target:
        copy_to(target, in_memory)
    assert names_in(tmp_path, one) == {PACK, MANIFESTS, *RECORDS}


def test_in_every_crash_state_a_committed_copy_has_its_packs(in_memory):
    """The record after the packs was COMMIT: after a power loss it could be there, and a pack not."""
    disk, chance, committed = HostileDisk(), random.Random(1), list[int]()

    def crash(call: str, path: str) -> None:
        for state in disk.crashes(chance, 100 if call == "sync_dir" else 2):  # before it most is not durable
            tier = PackedTier(Disk(state, ROOT))
            found = commit.survey(tier).generations.values()
            committed.append(len(found))
            for one in found:
                assert not found_in(tier, one), f"{one.id} after {call} of {path}"

    disk.watch = crash
    copy_to(PackedTier(Disk(disk, ROOT, shared=True)), in_memory)
    assert committed.count(0) > 50 and committed.count(1) > 5


def test_retention_removes_packs_from_a_directory(tmp_path, in_memory):
    with home(tmp_path) as target:
        one = copy_to(target, in_memory)
        commit.retire(target, one.id)
    assert not (tmp_path / "home" / layout.folder(one.id)).exists()


@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_a_file_created_after_the_newest_listing_is_deleted(tmp_path, bucketlike, kind):
    """It counted as a part of a pack, and stayed: a manifest that was created after its folder was listed."""
    folder = layout.folder(GenerationId(step=3, incarnation="0123abcd"))
    with home(tmp_path) as directory:
        tier = directory if kind == "directory" else bucketlike
        tier.list(folder)
        tier.put_new(f"{folder}/r00000.manifest.json", b"{}")
        tier.delete(f"{folder}/r00000.manifest.json")
        assert not tier.list(folder)


class Failing(Objects):
    """Objects of which one call fails, before or after its effect."""

    def __init__(self, store: MemoryStore, number: int, after: bool) -> None:
        super().__init__(store, "memory", pause=lambda _: None)
        self._left, self._after = number, after

    def _fails(self, act: Callable[[], Any]) -> Any:
        self._left -= 1
        if self._left == 0 and not self._after:
            raise errors.TierDown("on purpose, before")
        found = act()
        if self._left == 0:
            raise errors.TierDown("on purpose, after")
        return found

    def versions(self, folder):
        return self._fails(lambda: super(Failing, self).versions(folder))

    def read_into(self, extent, mv, *, fresh=False):
        self._fails(lambda: super(Failing, self).read_into(extent, mv, fresh=fresh))

    def create(self, name, length):
        return self._fails(lambda: super(Failing, self).create(name, length))

    def put(self, name, data):
        self._fails(lambda: super(Failing, self).put(name, data))

    def put_new(self, name, data):
        self._fails(lambda: super(Failing, self).put_new(name, data))

    def replace(self, name, by):
        self._fails(lambda: super(Failing, self).replace(name, by))

    def delete(self, name):
        self._fails(lambda: super(Failing, self).delete(name))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("damaged", [False, True], ids=["new", "damaged"])
def test_a_copy_that_fails_at_any_request_is_completed_by_the_next(front, after, damaged):
    good, number, failed = contents(access.for_reading(front), generation_of(front)), 1, True
    while failed:
        store = MemoryStore()
        if damaged:
            one = copied_by_two_nodes(front, store)
            change(store, one, PACK, lambda data: data[:-9])
        try:
            one = copy(front, PackedTier(Failing(store, number, after)))
            failed = False
        except errors.LastgoodError:
            one = generation_of(front)
        found = commit.survey(opened(store)).generations.get(one.id)
        if found is not None and not damaged:
            assert contents(opened(store), one) == good, f"request {number}: what is committed reads back"
        copy(front, opened(store))
        assert contents(opened(store), one) == good and not found_in(opened(store), one), f"request {number}"
        number += 1
    assert number > 12

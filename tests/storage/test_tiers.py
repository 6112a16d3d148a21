"""The contract of a tier (ports.Tier), row by row, for every tier, and the contract of the file system under it.

A new tier is added by a line in TIERS: a function that opens it in a folder. In the second part, for tiers over
ports.Files, single calls of the file system fail.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from lastgood.errors import CommitUnknown, MissingBlob, NameTaken, NoSpace, NotWritable, TierDown, Truncated
from lastgood.io import files as posix_files
from lastgood.io.files import Lock, PosixFiles, round_up, takes_direct
from lastgood.io.mapped import MappedFiles
from lastgood.io.memory_files import MemoryFiles
from lastgood.ports import Tier
from lastgood.records import Extent
from lastgood.run import access
from lastgood.run.packed import PackedTier
from lastgood.storage import object_store
from lastgood.storage.directory import Disk
from lastgood.storage.objects import Objects
from lastgood.storage.slots import Slots
from lastgood.testing import Call, Fault, FaultyFiles
from node_tier import NodeTier
from peer_tier import PeerTier

FOLDER = "gen/000000000001-0a0b0c0d"
BLOB = f"{FOLDER}/r00000.safetensors"
RECORD = f"{FOLDER}/COMMIT.json"


def disk(root: str, files: PosixFiles | None = None, **options) -> Disk:
    return Disk(files or PosixFiles(), root, **options)


TIERS: dict[str, Callable[[str], Tier]] = {
    "disk": disk,
    "disk direct": lambda root: disk(root, direct=takes_direct(root)),
    "disk nodirsync": lambda root: disk(root, mode="atomic_nodirsync"),
    "disk unsafe": lambda root: disk(root, mode="unsafe"),
    "disk in memory": lambda root: disk(root, MemoryFiles(root)),
    "disk in memory, spilled": lambda root: disk(root, MemoryFiles(root, f"{root}.spill/node", free=lambda *_: 0)),
    "slots": lambda root: access.slots(PosixFiles(), root),
    "slots direct": lambda root: access.slots(PosixFiles(), root, direct=takes_direct(root)),
    "slots mmap": lambda root: access.slots(MappedFiles(root), root, direct=takes_direct(root)),
}
OBJECTS: dict[str, Callable[[Objects], Tier]] = {"objects": lambda objects: objects, "packed": PackedTier}
"""opened in a folder of a real S3 server, not in a directory"""
OF_NODES: dict[str, Callable[[str], PeerTier | NodeTier]] = {
    "memory of another node": PeerTier,
    "disks of two nodes": NodeTier,
    "disks of two nodes, files of the other one": lambda root: NodeTier(root, writer=1),
}
"""opened with a server, which is closed at the end"""
MANY_WRITERS = [kind for kind in TIERS if kind.startswith("disk")]
"""slots have one, who holds the lock of the run: a second one would overwrite what the first one wrote"""


OVER_NIXL = "memory of another node over NIXL"


@pytest.fixture(
    params=[*TIERS, *OF_NODES, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (*OBJECTS, OVER_NIXL))]
)
def tier(request, tmp_path) -> Iterator[Tier]:
    if request.param == OVER_NIXL:
        with contextlib.closing(PeerTier(str(tmp_path), request.getfixturevalue("nixl"))) as tier:
            yield tier
        return
    if request.param in OBJECTS:
        url = request.getfixturevalue("bucket")
        yield OBJECTS[request.param](Objects(object_store.opened(url, object_store.DEADLINES), url))
        return
    tier = (TIERS | OF_NODES)[request.param](str(tmp_path))
    yield tier
    if isinstance(tier, Slots | PeerTier | NodeTier):
        tier.close()


def padded(data: bytes) -> memoryview:
    """The data in page-aligned memory, like an arena's; the tail is filled with bytes that must not reach the file."""
    page = mmap.mmap(-1, max(round_up(len(data)), 4096))
    page[:] = b"\xee" * len(page)
    page[: len(data)] = data
    return memoryview(page)[: round_up(len(data))]


def upload(tier: Tier, name: str, data: bytes, chunk_bytes: int = 8192) -> None:
    blob = tier.create(name, len(data))
    for at in range(0, len(data), chunk_bytes):
        blob.write_at(padded(data[at : at + chunk_bytes]), at)
    blob.finish()


def read(tier: Tier, name: str, length: int, offset: int = 0, room: int = 0, fresh: bool = False) -> bytes:
    mv = padded(bytes(max(room, length)))
    tier.read_into(Extent(blob=name, offset=offset, length=length), mv, fresh=fresh)
    return bytes(mv[:length])


def everything(root: Path) -> dict[str, bytes]:
    return {str(one.relative_to(root)): one.read_bytes() for one in root.rglob("*") if one.is_file()}


def pattern(length: int) -> bytes:
    return (b"0123456789abcdefghijklmnopqrstuvwxyzA" * (length // 37 + 1))[:length]


# ---- create, write_at, finish, abort ---------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 511, 4095, 4096, 4097, 8191, 8192, 20_001])
@pytest.mark.parametrize("fresh", [False, True], ids=["cached", "fresh"])
def test_a_finished_blob_reads_back_at_any_length(tier, length, fresh):
    data = pattern(length)
    upload(tier, BLOB, data)
    assert tier.list(FOLDER) == {"r00000.safetensors": length}, "neither padding nor temporary files remain"
    assert read(tier, BLOB, length, fresh=fresh) == data
    assert read(tier, BLOB, length, room=length + 9000, fresh=fresh) == data


def test_an_empty_record_reads_back(tier):
    """From an object store it was a ValueError: the reading of no byte began a pool of no thread."""
    tier.put_new(RECORD, b"")
    assert read(tier, RECORD, 0, fresh=True) == b"" and tier.list(FOLDER) == {"COMMIT.json": 0}


def test_a_fresh_read_of_whole_pages_fills_memory_that_is_not_aligned(tier):
    """Direct I/O refused it: a record whose length happened to be a multiple of 4096 could not be read at all."""
    upload(tier, BLOB, pattern(8192))
    into = memoryview(bytearray(8193))[1:]
    tier.read_into(Extent(blob=BLOB, offset=0, length=8192), into, fresh=True)
    assert into == pattern(8192)


def test_parts_of_a_blob_are_written_in_any_order_by_several_threads(tier):
    data = pattern(40_000)
    blob = tier.create(BLOB, len(data))

    def put(start: int) -> None:
        blob.write_at(padded(data[start : start + 4096]), start)

    threads = [threading.Thread(target=put, args=[start]) for start in reversed(range(0, len(data), 4096))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    blob.finish()
    assert read(tier, BLOB, len(data)) == data


def test_create_on_a_taken_name_is_refused_and_leaves_the_old_blob(tier):
    upload(tier, BLOB, b"old")
    with pytest.raises(NameTaken, match="untouched"):
        tier.create(BLOB, 9000)
    assert read(tier, BLOB, 3) == b"old" and tier.list(FOLDER) == {"r00000.safetensors": 3}


def test_an_aborted_upload_leaves_no_file_and_frees_its_name(tier):
    blob = tier.create(BLOB, 9000)
    blob.write_at(padded(pattern(4096)), 0)
    blob.abort()
    assert not tier.list(FOLDER) and not tier.list("gen")
    blob.abort()  # a second abort raises nothing
    upload(tier, BLOB, b"again")
    assert read(tier, BLOB, 5) == b"again"


def test_an_aborted_upload_deletes_no_other_blob(tier):
    upload(tier, BLOB, b"neighbour")
    tier.create(f"{FOLDER}/r00001.safetensors", 9000).abort()
    assert tier.list(FOLDER) == {"r00000.safetensors": 9}
    tier.create("top", 9000).abort()
    assert read(tier, BLOB, 9) == b"neighbour"


# ---- put_new ---------------------------------------------------------------------------------------------------


def test_a_record_is_complete_and_leaves_no_litter(tier):
    tier.put_new(RECORD, b"whole")
    assert tier.list(FOLDER) == {"COMMIT.json": 5} and read(tier, RECORD, 5) == b"whole"


def test_putting_the_same_bytes_again_changes_nothing(tier):
    tier.put_new(RECORD, b"same")
    tier.put_new(RECORD, b"same")
    assert tier.list(FOLDER) == {"COMMIT.json": 4}


@pytest.mark.parametrize("other", [b"", b"sam", b"sane", b"same and more"])
def test_putting_other_bytes_on_a_name_is_refused_and_keeps_the_old_blob(tier, other):
    # On several nodes a COMMIT is another matter: it raises CommitUnknown (tests/ranks/test_ranks_nodes.py).
    name = "VERIFIED.json" if isinstance(tier, NodeTier) else "COMMIT.json"
    tier.put_new(f"{FOLDER}/{name}", b"same")
    with pytest.raises(NameTaken):
        tier.put_new(f"{FOLDER}/{name}", other)
    assert read(tier, f"{FOLDER}/{name}", 4) == b"same" and tier.list(FOLDER) == {name: 4}


def race(tier: Tier, racer: int, rounds: int, start) -> list[tuple[int, int]]:
    """Put the same names as all other racers; returns the rounds that this one won. `start` is their barrier."""
    won = []
    for turn in range(rounds):
        start.wait(60)
        try:
            tier.put_new(f"{FOLDER}-{turn}/COMMIT.json", bytes([racer]) * 5000)
            won.append((turn, racer))
        except NameTaken:
            pass
        except BaseException:
            start.abort()
            raise
    return won


def _race_in_process(kind: str, root: str, racer: int, rounds: int, start, results) -> None:
    try:
        results.put(race(TIERS[kind](root), racer, rounds, start))
    except BaseException as error:
        results.put([("error", repr(error))])


@pytest.mark.parametrize("kind", TIERS)
def test_exactly_one_of_eight_threads_that_put_the_same_name_wins(kind, tmp_path):
    """The staged file of a record once had the same name for all writers: a thread could link a file that another
    was still writing."""
    tier, start = TIERS[kind](str(tmp_path)), threading.Barrier(8)
    with ThreadPoolExecutor(8) as pool:
        outcomes = [pool.submit(race, tier, racer, 20, start) for racer in range(8)]
    check_race(tier, [one for outcome in outcomes for one in outcome.result()], 20)


@pytest.mark.slow
def test_exactly_one_of_eight_threads_that_create_the_same_object_wins(bucket):
    tier, start = Objects(object_store.opened(bucket, object_store.DEADLINES), bucket), threading.Barrier(8)
    with ThreadPoolExecutor(8) as pool:
        outcomes = [pool.submit(race, tier, racer, 4, start) for racer in range(8)]
    check_race(tier, [one for outcome in outcomes for one in outcome.result()], 4)


@pytest.mark.parametrize("kind", MANY_WRITERS)
def test_exactly_one_of_eight_processes_that_put_the_same_name_wins(kind, tmp_path):
    context = get_context("fork")
    start, results = context.Barrier(8), context.Queue()
    racers = [
        context.Process(target=_race_in_process, args=(kind, str(tmp_path), racer, 10, start, results))
        for racer in range(8)
    ]
    for racer in racers:
        racer.start()
    outcomes = [one for _ in racers for one in results.get(timeout=60)]
    for racer in racers:
        racer.join()
    check_race(TIERS[kind](str(tmp_path)), outcomes, 10)


def check_race(tier: Tier, outcomes: list[tuple[int, int]], turns: int) -> None:
    assert sorted(turn for turn, _ in outcomes) == list(range(turns))
    wrote = {f"{FOLDER}-{turn}": bytes([racer]) * 5000 for turn, racer in outcomes}
    folders = {f"gen/{one}" for one in tier.list("gen")}
    assert (
        folders == wrote.keys()
        if not tier.newest_only
        else folders <= wrote.keys() and f"{FOLDER}-{turns - 1}" in folders
    )
    for folder in folders:
        assert tier.list(folder) == {"COMMIT.json": 5000} and read(tier, f"{folder}/COMMIT.json", 5000) == wrote[folder]


# ---- point, delete, list, read_into ----------------------------------------------------------------------------


def test_a_pointer_is_replaced(tier):
    tier.point("LASTGOOD.json", b"first", FOLDER)
    tier.point("LASTGOOD.json", b"second, longer", FOLDER)
    assert read(tier, "LASTGOOD.json", 14) == b"second, longer"
    assert not [name for name in tier.list("") if name.endswith(".tmp")]


def test_a_reader_of_a_pointer_reads_the_old_or_the_new_bytes(tier):
    tier.point("LASTGOOD.json", bytes(6000), FOLDER)
    done, seen = threading.Event(), set()

    def poll_pointer() -> None:
        while not done.is_set():
            seen.add(read(tier, "LASTGOOD.json", 6000))

    reader = threading.Thread(target=poll_pointer)
    reader.start()
    for turn in range(100):
        tier.point("LASTGOOD.json", bytes([turn % 7]) * 6000, FOLDER)
    done.set()
    reader.join()
    assert seen and all(one == one[:1] * 6000 for one in seen)


def test_deleting_is_idempotent_and_removes_an_empty_folder(tier):
    upload(tier, BLOB, b"bytes")
    tier.put_new(RECORD, b"record")
    tier.delete(BLOB)
    tier.delete(BLOB)
    assert tier.list(FOLDER) == {"COMMIT.json": 6}
    tier.delete(RECORD)
    tier.delete(RECORD)
    tier.delete(f"{FOLDER}/never.was")
    assert not any(tier.list(f"gen/{one}") for one in tier.list("gen"))  # an object store may list an empty folder
    tier.put_new(RECORD, b"anew")  # the folder is created again
    assert read(tier, RECORD, 4) == b"anew"


def test_listing_a_missing_folder_is_empty(tier):
    assert tier.list("gen") == {} and tier.list(FOLDER) == {}


def test_a_listing_gives_files_with_lengths_and_folders_without(tier):
    upload(tier, BLOB, pattern(5000))
    tier.put_new("lastgood.json", b"header")
    assert dict(tier.list("")) == {"gen": None, "lastgood.json": 6}
    assert dict(tier.list("gen")) == {FOLDER.removeprefix("gen/"): None}


@pytest.mark.parametrize("fresh", [False, True], ids=["cached", "fresh"])
@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 5000, 8191])
def test_a_blob_that_ends_before_the_extent_is_truncated(tier, length, fresh):
    """With direct I/O and a length that is no multiple of the block size, this once read the last block again for
    ever."""
    if length:
        upload(tier, BLOB, pattern(length))
    else:
        tier.put_new(BLOB, b"")
    with pytest.raises(Truncated, match="ends at") as caught:
        read(tier, BLOB, 8192, fresh=fresh)
    assert caught.value.offset == length and caught.value.blob == BLOB
    with pytest.raises(Truncated):
        read(tier, BLOB, 10, offset=1 << 40, fresh=fresh)


def test_reading_a_missing_blob_raises_missing(tier):
    with pytest.raises(MissingBlob):
        read(tier, BLOB, 1)


@pytest.mark.parametrize("fresh", [False, True], ids=["cached", "fresh"])
def test_any_part_of_a_blob_can_be_read_alone(tier, fresh):
    data = pattern(20_001)
    upload(tier, BLOB, data)
    for offset, length in [(0, 1), (4096, 4096), (4095, 2), (1, 20_000), (16_384, 3617), (20_000, 1), (7, 0)]:
        for room in (0, 9000):
            assert read(tier, BLOB, length, offset, room, fresh) == data[offset : offset + length]


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "gen/../../x", ".."])
def test_a_name_outside_of_the_tier_is_refused(tier, name):
    for call in (lambda: read(tier, name, 1), lambda: tier.put_new(name, b"x"), lambda: tier.delete(name)):
        with pytest.raises(MissingBlob, match=r"not a name inside|missing on every node"):
            call()


# ---- tiers over a file system whose calls fail -----------------------------------------------------------------


def test_a_link_whose_reply_was_lost_succeeds_if_the_bytes_exist(tmp_path):
    for number in (errno.EIO, errno.ETIMEDOUT, errno.EEXIST):
        tier = disk(str(tmp_path), FaultyFiles(Fault("link", errno=number, after=True)))
        name = f"{FOLDER}/{number}.json"
        tier.put_new(name, b"record")
        assert read(tier, name, 6) == b"record"
    assert len(everything(tmp_path)) == 3, "no temporary files remain"


def test_a_link_that_failed_without_a_trace_is_unknown_and_deletes_nothing(tmp_path):
    files = FaultyFiles(Fault("link"))
    for name, data in ((RECORD, b"record"), (f"{FOLDER}/empty.json", b"")):
        with pytest.raises(CommitUnknown, match="Nothing was deleted"):
            disk(str(tmp_path), files).put_new(name, data)
    assert sorted(everything(tmp_path).values()) == [b"", b"record"], "both records remain under their staged names"
    assert not any(call == "remove" and not path.endswith(".tmp") for call, path in files.changes())


def test_a_link_that_left_half_a_record_is_unknown_and_deletes_nothing(tmp_path):
    """Half a record appears at the name during the link; without EEXIST it is unknown who wrote it."""

    def half(call: Call) -> None:
        if call.operation == "link":
            Path(call.path).write_bytes(b"rec")

    tier = disk(str(tmp_path), FaultyFiles(Fault("link"), before=half))
    with pytest.raises(CommitUnknown):
        tier.put_new(RECORD, b"record")
    assert (tmp_path / RECORD).read_bytes() == b"rec"


def test_a_failed_folder_sync_after_a_link_is_unknown_and_deletes_nothing(tmp_path):
    files = FaultyFiles(Fault("sync_dir", "*0a0b0c0d*"))
    with pytest.raises(CommitUnknown, match="Nothing was deleted"):
        disk(str(tmp_path), files).put_new(RECORD, b"record")
    assert (tmp_path / RECORD).read_bytes() == b"record"


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def test_without_hard_links_a_record_is_created_exclusively(tmp_path, number):
    tier = disk(str(tmp_path), FaultyFiles(Fault("link", errno=number)))
    tier.put_new(RECORD, b"record")
    tier.put_new(RECORD, b"record")
    with pytest.raises(NameTaken, match="untouched"):
        tier.put_new(RECORD, b"others")
    assert everything(tmp_path) == {RECORD: b"record"}


@pytest.mark.parametrize("call", ["write", "sync"])
def test_without_hard_links_a_failed_write_is_unknown_and_deletes_nothing(tmp_path, call):
    files = FaultyFiles(Fault("link", errno=errno.EPERM), Fault(call, nth=2))  # the first call is for the staged file
    with pytest.raises(CommitUnknown):
        disk(str(tmp_path), files).put_new(RECORD, b"record")
    assert (tmp_path / RECORD).exists()


def test_identical_existing_bytes_are_synced_before_success(tmp_path):
    """Without links, a process that was killed between write and fsync left bytes that its successor read, took for
    durable, and lost in the next power failure."""
    (tmp_path / FOLDER).mkdir(parents=True)
    (tmp_path / RECORD).write_bytes(b"record")
    files = FaultyFiles(Fault("link", errno=errno.EPERM))
    disk(str(tmp_path), files).put_new(RECORD, b"record")
    assert ("sync", str(tmp_path / RECORD)) in files.changes()
    files.inject(Fault("sync", "*.json"))
    with pytest.raises(NameTaken):
        disk(str(tmp_path), files).put_new(RECORD, b"record")


PUT_CALLS = {"atomic_dirsync": ["open new", "write", "sync", "link"], "unsafe": ["open new", "write"]}
UPLOAD_CALLS = {"atomic_dirsync": ["open new", "reserve", "write", "sync"], "unsafe": ["open new", "reserve", "write"]}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize(("mode", "call"), [(mode, call) for mode, calls in PUT_CALLS.items() for call in calls])
def test_a_record_that_does_not_fit_is_named_and_leaves_no_litter(tmp_path, mode, call, number):
    with pytest.raises(NoSpace, match="Free space"):
        disk(str(tmp_path), FaultyFiles(Fault(call, errno=number)), mode=mode).put_new(RECORD, b"record")
    assert not everything(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize(("mode", "call"), [(mode, call) for mode, calls in UPLOAD_CALLS.items() for call in calls])
def test_a_blob_that_does_not_fit_is_named_and_leaves_no_litter(tmp_path, mode, call, number):
    with pytest.raises(NoSpace, match="Free space"):
        upload_or_abort(disk(str(tmp_path), FaultyFiles(Fault(call, errno=number)), mode=mode), pattern(9000))
    assert not everything(tmp_path)


def test_space_is_reserved_before_the_first_byte(tmp_path):
    files = FaultyFiles(Fault("reserve", errno=errno.ENOSPC))
    with pytest.raises(NoSpace):
        disk(str(tmp_path), files).create(BLOB, 9000)
    assert "write" not in [call for call, _ in files.changes()] and not everything(tmp_path)


def upload_or_abort(tier: Tier, data: bytes) -> None:
    """Upload like engine/write_file.py."""
    blob = tier.create(BLOB, len(data))
    try:
        blob.write_at(padded(data), 0)
        blob.finish()
    except BaseException:
        blob.abort()
        raise


def test_without_hard_links_a_full_disk_leaves_no_litter(tmp_path):
    files = FaultyFiles(Fault("link", errno=errno.EPERM), Fault("write", errno=errno.ENOSPC, nth=2))
    with pytest.raises(NoSpace):
        disk(str(tmp_path), files).put_new(RECORD, b"record")
    assert not everything(tmp_path)


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EIO, TierDown), (errno.EACCES, NotWritable), (errno.EROFS, NotWritable)]
)
@pytest.mark.parametrize("call", ["open new", "make_dir", "write", "sync"])
def test_a_disk_that_fails_before_the_link_leaves_no_record(tmp_path, call, number, kind):
    with pytest.raises(kind):
        disk(str(tmp_path), FaultyFiles(Fault(call, errno=number))).put_new(RECORD, b"record")
    assert not everything(tmp_path)


@pytest.mark.parametrize(
    ("direct", "most"),
    [(False, 1), (False, 1000), (False, 4096), (False, 5000), (True, 4096), (True, 4608), (True, 8191)],
)
def test_short_writes_and_reads_are_continued(tmp_path, direct, most):
    """`direct`: a call that was cut short is continued from the last whole block, because direct I/O needs aligned
    offsets."""
    files = FaultyFiles(most_bytes=most)
    tier = disk(str(tmp_path), files, direct=direct)
    data = pattern(20_001)
    upload(tier, BLOB, data)
    assert (tmp_path / BLOB).read_bytes() == data
    assert read(tier, BLOB, len(data), fresh=True) == data
    if direct:
        assert not any(call.offset % 4096 for call in files.calls if call.operation == "write")
    tier.put_new(RECORD, data)
    assert (tmp_path / RECORD).read_bytes() == data
    tier.put_new(RECORD, data)  # the record is read back by short reads as well, and is equal


def test_a_write_of_zero_bytes_is_an_error_and_not_a_loop(tmp_path):
    with pytest.raises(TierDown, match="accepts no more"):
        disk(str(tmp_path), FaultyFiles(most_bytes=0)).put_new(RECORD, b"record")


@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 50_000])
def test_direct_and_buffered_writes_give_the_same_file(tmp_path, length):
    if not takes_direct(str(tmp_path)):
        pytest.skip("this file system takes no direct I/O")
    for name, direct in (("direct", True), ("buffered", False)):
        upload(disk(str(tmp_path), direct=direct), f"gen/{name}/x", pattern(length))
    assert everything(tmp_path) == {f"gen/{name}/x": pattern(length) for name in ("direct", "buffered")}


def test_the_first_failed_fsync_of_a_file_is_final(tmp_path, monkeypatch):
    """On ext4, xfs and btrfs the second fsync reports success although the data is lost."""
    file = PosixFiles().open(str(tmp_path / "x"), "new")
    calls = []

    def fsync(fd):
        calls.append(fd)
        if len(calls) == 1:
            raise OSError(errno.EIO, "lost")

    monkeypatch.setattr(posix_files.os, "fsync", fsync)
    for _ in range(3):
        with pytest.raises(OSError) as caught:
            file.sync()
        assert caught.value.errno == errno.EIO
    assert len(calls) == (0 if posix_files._FULLFSYNC else 1)
    file.close()


def test_a_failed_sync_in_finish_is_an_error(tmp_path):
    tier = disk(str(tmp_path), FaultyFiles(Fault("sync")))
    with pytest.raises(TierDown):
        upload_or_abort(tier, pattern(100))
    assert not everything(tmp_path)


def test_a_folder_is_synced_through_its_own_descriptor(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(posix_files, "_flush", lambda fd: synced.append(os.fstat(fd).st_ino))
    PosixFiles().sync_dir(str(tmp_path))
    assert synced == [tmp_path.stat().st_ino]


def test_names_that_already_existed_are_synced_too(tmp_path):
    """The process that created the folder or the record may have died before the name was durable."""
    disk(str(tmp_path)).put_new(RECORD, b"record")
    files = FaultyFiles()
    disk(str(tmp_path), files).put_new(RECORD, b"record")
    assert [path for call, path in files.changes() if call == "sync_dir"] == [
        str(tmp_path),
        str(tmp_path / "gen"),
        str(tmp_path / FOLDER),
    ]


def test_content_is_synced_before_its_name_and_names_before_success(tmp_path):
    files = FaultyFiles()
    disk(str(tmp_path), files).put_new(RECORD, b"record")
    folder, gen, root = str(tmp_path / FOLDER), str(tmp_path / "gen"), str(tmp_path)
    calls = [
        (call, path if not path.endswith(".tmp") else "staged") for call, path in files.changes() if call != "remove"
    ]
    assert calls == [
        ("make_dir", gen),
        ("sync_dir", root),
        ("make_dir", folder),
        ("sync_dir", gen),
        ("open new", "staged"),
        ("write", "staged"),
        ("sync", "staged"),
        ("link", str(tmp_path / RECORD)),
        ("sync_dir", folder),
    ]
    files.calls.clear()
    disk(str(tmp_path), files).delete(RECORD)
    assert files.changes() == [
        ("remove", str(tmp_path / RECORD)),
        ("sync_dir", folder),
        ("remove", folder),
        ("sync_dir", gen),
    ]


def test_a_pointer_moves_only_after_its_bytes_are_durable(tmp_path):
    files = FaultyFiles()
    disk(str(tmp_path), files).point("LASTGOOD.json", b"pointer", FOLDER)
    calls = [call for call, _ in files.changes() if call != "remove"]
    assert calls == ["open new", "write", "sync", "rename", "symlink", "rename", "sync_dir"]


def test_the_latest_ok_link_leads_to_the_generation(tmp_path):
    tier = disk(str(tmp_path))
    upload(tier, BLOB, b"weights")
    tier.point("LASTGOOD.json", b"1", "gen/none")
    tier.point("LASTGOOD.json", b"2", FOLDER)
    assert os.readlink(tmp_path / "latest_ok") == FOLDER
    assert (tmp_path / "latest_ok" / "r00000.safetensors").read_bytes() == b"weights"


def test_without_symbolic_links_the_pointer_still_moves(tmp_path):
    disk(str(tmp_path), FaultyFiles(Fault("symlink", errno=errno.EPERM))).point("LASTGOOD.json", b"pointer", FOLDER)
    assert everything(tmp_path) == {"LASTGOOD.json": b"pointer"}


@pytest.mark.parametrize("call", ["rename", "sync", "write", "open new"])
def test_a_pointer_that_cannot_be_replaced_keeps_its_value(tmp_path, call):
    disk(str(tmp_path)).point("LASTGOOD.json", b"old", FOLDER)
    with pytest.raises(TierDown):
        disk(str(tmp_path), FaultyFiles(Fault(call))).point("LASTGOOD.json", b"new", FOLDER)
    assert (tmp_path / "LASTGOOD.json").read_bytes() == b"old"


def test_a_pointer_moves_again_after_a_link_that_could_not_be_renamed(tmp_path):
    """The staged link remained, and every later pointer of this process failed because its name was taken."""
    tier = disk(str(tmp_path), FaultyFiles(Fault("rename", nth=2)))
    with pytest.raises(TierDown):
        tier.point("LASTGOOD.json", b"1", "gen/none")
    tier.point("LASTGOOD.json", b"2", FOLDER)
    assert os.readlink(tmp_path / "latest_ok") == FOLDER


# ---- the file system -------------------------------------------------------------------------------------------


def odd_entries(root: Path) -> None:
    (root / "file").write_bytes(b"1234567")
    (root / "folder").mkdir()
    (root / "link").symlink_to("file")
    (root / "link to folder").symlink_to("folder")
    (root / "dangling").symlink_to("nowhere")
    os.mkfifo(root / "pipe")
    (root / "\udcff\n").write_bytes(b"")


def test_a_listing_distinguishes_files_folders_and_anything_else(tmp_path):
    odd_entries(tmp_path)
    assert PosixFiles().list(str(tmp_path)) == {
        "file": 7,
        "folder": None,
        "link": -1,
        "link to folder": -1,
        "dangling": -1,
        "pipe": -1,
        "\udcff\n": 0,
    }


def test_a_file_deleted_during_a_listing_hides_no_other_file(tmp_path, monkeypatch):
    """Beside a writer, a reader once got an empty listing, and so saw no COMMIT, when a staged record was deleted
    between the listing of the folder and the stat of the record."""
    (tmp_path / "COMMIT.json").write_bytes(b"record")
    (tmp_path / "a.tmp").write_bytes(b"")
    real = os.scandir

    def scandir(path):
        with real(path) as entries:
            found = list(entries)
        os.unlink(tmp_path / "a.tmp")
        return Entries(found)

    class Entries(list):
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(posix_files.os, "scandir", scandir)
    assert PosixFiles().list(str(tmp_path)) == {"COMMIT.json": 6}


@pytest.mark.parametrize("fresh", [False, True], ids=["cached", "fresh"])
@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
@pytest.mark.parametrize("name", ["link", "folder", "link to folder", "dangling", "pipe"])
def test_a_name_that_is_no_regular_file_reads_as_missing_at_once(tmp_path, name, direct, fresh):
    odd_entries(tmp_path)
    with pytest.raises((MissingBlob, TierDown)):
        read(disk(str(tmp_path), direct=direct), name, 1, fresh=fresh)


@pytest.mark.parametrize("name", ["file", "link", "folder", "dangling", "pipe"])
def test_creating_a_file_never_replaces_anything(tmp_path, name):
    odd_entries(tmp_path)
    for call in (
        lambda path: PosixFiles().open(path, "new"),
        lambda path: PosixFiles().make_dir(path),
        lambda path: PosixFiles().link(str(tmp_path / "file"), path),
        lambda path: PosixFiles().symlink("file", path),
    ):
        with pytest.raises(FileExistsError):
            call(str(tmp_path / name))
    assert not (tmp_path / "nowhere").exists()


def test_removing_a_link_keeps_its_target(tmp_path):
    odd_entries(tmp_path)
    for name in ("link", "link to folder", "dangling", "pipe", "folder"):
        PosixFiles().remove(str(tmp_path / name))
    assert set(os.listdir(tmp_path)) == {"file", os.fsdecode(b"\xff\n")}


def test_a_folder_that_is_not_empty_is_not_removed(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x").write_bytes(b"")
    with pytest.raises(OSError) as caught:
        PosixFiles().remove(str(tmp_path / "folder"))
    assert caught.value.errno in (errno.ENOTEMPTY, errno.EEXIST)


def test_reserve_sets_a_minimum_length_and_resize_the_exact_length(tmp_path):
    file = PosixFiles().open(str(tmp_path / "x"), "new")
    file.write_at(memoryview(b"abc"), 0)
    file.reserve(8192)
    assert file.size() >= 8192
    file.resize(5)
    assert file.size() == 5
    buffer = memoryview(bytearray(9))
    assert file.read_into(buffer, 0) == 5 and bytes(buffer[:5]) == b"abc\0\0" and file.read_into(buffer, 5) == 0
    file.close()


def test_the_probe_for_direct_io_leaves_nothing_behind(tmp_path):
    takes_direct(str(tmp_path))
    assert not os.listdir(tmp_path)
    with pytest.raises(OSError):
        takes_direct(str(tmp_path / "nowhere"))


def test_a_lock_whose_file_cannot_be_written_is_not_held(tmp_path: Path, monkeypatch) -> None:
    """An agent could not write its mark into the lock of a full tmpfs. It kept the lock all the same, and without the
    mark no job asked it to give way."""

    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = str(tmp_path / ".lock")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space"):
            Lock(path, b"agent")
    Lock(path).close()

"""Files in memory, and those that do not fit and lie in a folder on a disk instead. Directories stand for both."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from pathlib import Path

import pytest

from lastgood.errors import NoSpace
from lastgood.io import memory_files
from lastgood.io.files import PosixFile, PosixFiles
from lastgood.io.memory_files import MemoryFiles
from lastgood.storage.directory import Disk


def is_locked_by_another(folder: Path) -> bool:
    with open(folder / ".reserving.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


class Two:
    """A folder in memory with room for `free` bytes, and a spill folder beside it."""

    def __init__(self, root: Path, free: int, spills: bool = True) -> None:
        self.memory, self.disk, self.free = root / "memory", root / "home" / ".spill" / "node", free
        (root / "home").mkdir(exist_ok=True)
        self.memory.mkdir(exist_ok=True)
        self.files = MemoryFiles(
            str(self.memory), str(self.disk) if spills else None, free=lambda _, buffers: self.free - buffers
        )

    def path(self, name: str) -> str:
        return str(self.memory / name)

    def write(self, name: str, data: bytes) -> None:
        file = self.files.open(self.path(name), "new")
        try:
            file.reserve(len(data))
            assert file.write_at(memoryview(data), 0) == len(data) == file.size()
            file.sync()
        finally:
            file.close()

    def read(self, name: str) -> bytes:
        file = self.files.open(self.path(name), "read", direct=False, fresh=True)
        try:
            buffer = bytearray(file.size())
            file.read_into(memoryview(buffer), 0)
            return bytes(buffer)
        finally:
            file.close()


@pytest.fixture
def two(tmp_path: Path) -> Two:
    return Two(tmp_path, free=10)


def test_a_file_that_does_not_fit_is_written_to_the_disk(two: Two, caplog: pytest.LogCaptureFixture) -> None:
    two.write("small", b"12345")
    two.write("large", b"12345678901")
    assert {one.name for one in two.memory.iterdir()} == {"small"}
    assert {one.name for one in two.disk.iterdir()} == {"large"}
    assert two.files.list(str(two.memory)) == {"small": 5, "large": 11}
    assert two.read("small") == b"12345" and two.read("large") == b"12345678901"
    assert "memory is short" in caplog.text and str(two.disk) in caplog.text


def test_a_spill_folder_that_is_full_too_is_named_with_its_remedy(two: Two, monkeypatch) -> None:
    """The error named the folder in memory, and asked to free space on "this disk"."""

    def full(self: PosixFile, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(PosixFile, "reserve", full)
    with pytest.raises(NoSpace) as raised, Disk(two.files, str(two.memory)).create("large", 11) as file:
        file.write_at(memoryview(b"12345678901"), 0)
    assert f"{two.disk}, where it would be written instead, is full too" in raised.value.what
    assert raised.value.todo.startswith(f"Free space on the disk of {two.disk}.") and "/dev/shm" in raised.value.todo
    assert not [*two.disk.iterdir()] and not two.files.spilled


def test_the_first_and_each_doubled_number_of_spilled_files_is_reported(
    two: Two, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(9):
        two.write(str(number), b"12345678901")
    assert [line for line in caplog.text.splitlines() if "memory is short" in line].__len__() == 4, "1, 2, 4 and 8"


def test_without_a_disk_below_a_file_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    two = Two(tmp_path, free=10, spills=False)
    with pytest.raises(OSError, match="no disk of this machine below it"):
        two.write("large", b"12345678901")


def test_a_name_on_the_disk_is_taken_in_memory_too(two: Two) -> None:
    two.write("a", b"12345678901")
    two.write("b", b"1")
    with pytest.raises(FileExistsError):
        two.files.open(two.path("a"), "new")
    with pytest.raises(FileExistsError):
        two.files.link(two.path("b"), two.path("a"))
    assert two.read("a") == b"12345678901"


@pytest.mark.parametrize("before", [b"old", b"old, and too long"], ids=["in memory", "on the disk"])
@pytest.mark.parametrize("after", [b"new", b"new, and too long"], ids=["in memory", "on the disk"])
def test_a_renamed_file_replaces_one_in_either_folder(two: Two, before: bytes, after: bytes) -> None:
    two.write("name", before)
    two.write("by", after)
    two.files.rename(two.path("by"), two.path("name"))
    assert two.files.list(str(two.memory)) == {"name": len(after)} and two.read("name") == after


def test_a_folder_with_a_file_on_the_disk_is_not_removed(two: Two) -> None:
    two.files.make_dir(two.path("gen"))
    two.write("gen/large", b"12345678901")
    with pytest.raises(OSError, match="not empty"):
        two.files.remove(two.path("gen"))
    assert two.files.list(two.path("gen")) == {"large": 11}
    two.files.remove(two.path("gen/large"))
    two.files.remove(two.path("gen"))
    assert not [*two.memory.iterdir()] and not [*two.disk.iterdir()]


def test_what_a_machine_left_on_the_disk_before_it_restarted_is_listed(two: Two) -> None:
    """Memory is empty then, and what lies on the disk must be found to be removed."""
    two.files.make_dir(two.path("gen"))
    two.write("gen/large", b"12345678901")
    os.rmdir(two.path("gen"))
    assert two.files.list(str(two.memory)) == {"gen": None} and two.files.list(two.path("gen")) == {"large": 11}
    two.files.remove(two.path("gen/large"))
    two.files.remove(two.path("gen"))
    assert two.files.list(str(two.memory)) == {}


def test_a_missing_file_is_missing_in_both(two: Two) -> None:
    two.files.sync_dir(str(two.memory))
    for call in (two.files.remove, two.files.list, two.files.sync_dir):
        with pytest.raises(FileNotFoundError):
            call(two.path("nothing"))
    with pytest.raises(FileNotFoundError):
        two.files.rename(two.path("nothing"), two.path("name"))
    with pytest.raises(FileNotFoundError):
        two.files.open(two.path("nothing"), "read")


def test_memory_is_counted_and_taken_by_one_process_at_a_time(two: Two) -> None:
    """Eight ranks saw the same free memory, took eight times as much, and the container was killed."""
    with two.files.room_for(5):
        assert is_locked_by_another(two.memory.parent)
    assert not is_locked_by_another(two.memory.parent)


def test_a_generation_that_only_the_disk_has_is_deleted(two: Two) -> None:
    """Its folder was listed for ever, because the folder in memory did not exist."""
    disk = Disk(two.files, str(two.memory))
    (two.disk / "gen" / "a").mkdir(parents=True)
    (two.disk / "gen" / "a" / "large").write_bytes(b"1")
    disk.delete("gen/a/large")
    assert disk.list("gen") == {}


def test_a_moved_home_is_not_made_anew_for_files_that_do_not_fit(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    files = MemoryFiles(str(memory), str(tmp_path / "home" / ".spill" / "node"), free=lambda *_: 0)
    file = files.open(str(memory / "large"), "new")
    with pytest.raises(OSError, match="no disk"):
        file.reserve(1)
    file.close()
    assert not (tmp_path / "home").exists()


def without_inodes(monkeypatch: pytest.MonkeyPatch, memory: Path) -> None:
    """No further name can be made below `memory`, as in a tmpfs without inodes."""

    def refused(call):
        def checked(self, *paths, **options):
            new = paths[1] if call is PosixFiles.link else paths[0]
            makes = call is not PosixFiles.open or paths[1] == "new"
            if makes and new.startswith(f"{memory}/") and not os.path.lexists(new):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), new)
            return call(self, *paths, **options)

        return checked

    for name in ("open", "make_dir", "link"):
        monkeypatch.setattr(PosixFiles, name, refused(getattr(PosixFiles, name)))


def test_memory_without_inodes_sends_records_and_folders_to_the_disk(two: Two, monkeypatch, caplog) -> None:
    """Data-loader workers had filled /dev/shm with small files: every save was refused, though the disk had room."""
    disk, folder = Disk(two.files, str(two.memory)), "gen/a"
    two.files.make_dir(two.path("gen"))
    with monkeypatch.context() as full:
        without_inodes(full, two.memory)
        upload = disk.create(f"{folder}/large", 5)
        upload.write_at(memoryview(b"12345"), 0)
        upload.finish()
        disk.put_new(f"{folder}/COMMIT", b"{}")
        with pytest.raises(NoSpace):
            disk.put_new("AGENT.json", b"{}")  # an agent would not find it there
    assert not (two.memory / folder).exists() and caplog.text.count("(spilled file") == 2
    assert disk.list(folder) == {"large": 5, "COMMIT": 2} and two.read(f"{folder}/COMMIT") == b"{}"
    disk.put_new(f"{folder}/VERIFIED", b"{}")  # the folder is on the disk only
    for name in ("VERIFIED", "COMMIT", "large"):
        disk.delete(f"{folder}/{name}")
    assert disk.list("gen") == {} and not [*two.disk.rglob("a")]
    disk.put_new("gen/b/COMMIT", b"{}")
    assert (two.memory / "gen/b/COMMIT").exists(), "memory is used again once it has inodes"


def test_a_second_name_without_inodes_never_replaces_a_file(two: Two, monkeypatch) -> None:
    two.files.make_dir(two.path("gen"))
    two.write("gen/staged", b"new")
    two.write("gen/taken", b"old")
    with monkeypatch.context() as full:
        without_inodes(full, two.memory)
        with pytest.raises(FileExistsError):
            two.files.link(two.path("gen/staged"), two.path("gen/taken"))
        two.files.link(two.path("gen/staged"), two.path("gen/free"))
    assert two.read("gen/taken") == b"old" and two.read("gen/free") == b"new"


def test_a_record_goes_to_the_disk_if_others_have_filled_the_memory(two: Two, monkeypatch) -> None:
    """Files of tensors leave room for records, but another job took it."""
    two.files.make_dir(two.path("gen"))
    reserve = PosixFile.reserve

    def full(self: PosixFile, length: int) -> None:
        if self._path.startswith(str(two.memory)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(self, length)

    monkeypatch.setattr(PosixFile, "reserve", full)
    Disk(two.files, str(two.memory)).put_new("gen/COMMIT", b"{}")
    assert (two.disk / "gen/COMMIT").read_bytes() == b"{}" and not [*(two.memory / "gen").iterdir()]


def test_a_limit_on_the_length_of_files_is_named(tmp_path: Path) -> None:
    """`ulimit -f` was reported as a full disk, on which space was to be freed."""
    two, before = Two(tmp_path, free=1 << 30), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(NoSpace, match="longer than a file may be") as raised:
            Disk(two.files, str(two.memory)).create("large", 2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "ulimit -f" in raised.value.todo and not [*two.memory.iterdir()]


def test_a_late_write_reaches_no_other_file(tmp_path: Path) -> None:
    """A call of a drill that ended after its copies were removed could write to any file of the agent, which had taken
    the number of the closed descriptor."""
    late = PosixFiles().open(str(tmp_path / "a"), "new")
    late.close()
    other = PosixFiles().open(str(tmp_path / "b"), "new")
    for call in (lambda: late.write_at(memoryview(b"x"), 0), late.sync, late.unlock, late.size):
        with pytest.raises(OSError, match="Bad file descriptor"):
            call()
    late.close()
    assert other.size() == 0
    other.close()


def test_the_buffers_of_the_first_file_count_too(tmp_path: Path) -> None:
    """They were not yet in use when the file was compared with the limit of the group, and the process was killed."""
    two = Two(tmp_path, free=10)
    two.write("first", b"123456")
    assert [one.name for one in two.disk.iterdir()] == ["first"]
    two.free = 12
    two.write("second", b"123456")
    two.free = 6
    two.write("third", b"123456")
    assert {one.name for one in two.memory.iterdir()} == {"second", "third"}


def test_the_buffers_of_one_length_count_once_where_files_are_cut(tmp_path: Path) -> None:
    """A file of tensors reserves whole pages, and is cut to its length at the end. The shorter length was noted, so
    each file counted as the first one, and every save went to the disk although memory had room for it."""
    two = Two(tmp_path, free=20)
    for name in ("first", "second"):
        file = two.files.open(two.path(name), "new")
        file.reserve(10)
        file.write_at(memoryview(bytes(10)), 0)
        file.resize(7)
        file.close()
        two.free = 10
    assert {one.name for one in two.memory.iterdir()} == {"first", "second"}


def test_buffers_take_no_room_in_the_tmpfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small tmpfs on a machine with much memory: a save that just fits was written to the disk."""
    monkeypatch.setattr(memory_files.files, "free_bytes", lambda _: memory_files.RECORDS_BYTES + 10)
    monkeypatch.setattr(memory_files, "available_bytes", lambda: 20)
    assert memory_files.free_bytes(str(tmp_path), buffers=10) == 10
    assert memory_files.free_bytes(str(tmp_path), buffers=12) == 8


def test_a_full_tmpfs_has_a_remedy_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first opening ended with the remedy of a full disk: "keep fewer generations"."""
    two = Two(tmp_path, free=0)

    def full(file: PosixFile, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(PosixFile, "reserve", full)
    with pytest.raises(NoSpace) as raised:
        Disk(two.files, str(two.memory)).put_new("lastgood.json", b"header")
    assert "LASTGOOD_MEMORY" in raised.value.todo and "retention" not in raised.value.todo

"""Files in memory, and those that do not fit and lie in a folder on a disk instead. Directories stand for both."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from lastgood.errors import NoSpace
from lastgood.io.files import PosixFile
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
        self.files = MemoryFiles(str(self.memory), str(self.disk) if spills else None, free=lambda _: self.free)

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
    files = MemoryFiles(str(memory), str(tmp_path / "home" / ".spill" / "node"), free=lambda _: 0)
    file = files.open(str(memory / "large"), "new")
    with pytest.raises(OSError, match="no disk"):
        file.reserve(1)
    file.close()
    assert not (tmp_path / "home").exists()

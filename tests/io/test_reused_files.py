"""The memory of deleted files is used again for new ones, and nobody who still reads the old ones notices."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from lastgood.io.memory_files import MemoryFile, MemoryFiles
from lastgood.io.reused_files import FOLDER, GENERATIONS, LEAST_BYTES, LentFile

LENGTH = LEAST_BYTES + 100


class Folder:
    """A folder of memory with generations of one file each. A directory stands for the memory."""

    def __init__(self, root: Path) -> None:
        self.root, self.free = root, 1 << 40
        self.files = self.opened()

    def opened(self) -> MemoryFiles:
        """The folder as another process sees it, which shares nothing with this one."""
        return MemoryFiles(str(self.root), free=lambda _, buffers: self.free - buffers)

    def path(self, generation: str) -> str:
        return str(self.root / generation / "tensors")

    def write(self, generation: str, byte: bytes, length: int = LENGTH) -> int:
        """Returns the inode of the file."""
        (self.root / generation).mkdir()
        file = self.files.open(self.path(generation), "new")
        try:
            file.reserve(-(-length // 4096) * 4096)
            half = length // 2 // 4096 * 4096
            assert file.write_at(memoryview(bytearray(byte * half)), 0) == half
            assert file.write_at(memoryview(byte * (length - half)), half) == length - half, "bytes cannot be mapped"
            file.resize(length)
        finally:
            file.close()
        return os.stat(self.path(generation)).st_ino

    def lent(self, generation: str, byte: bytes) -> LentFile:
        """The memory of a deleted file, filled for the file of this generation."""
        lent = self.files.reused.lend(self.path(generation), LENGTH)
        assert lent is not None
        lent.memory[:] = byte * len(lent.memory)
        return lent

    def opened_new(self, generation: str) -> MemoryFile:
        (self.root / generation).mkdir()
        file = self.files.open(self.path(generation), "new")
        assert isinstance(file, MemoryFile)
        file.reserve(-(-LENGTH // 4096) * 4096)
        return file

    def make(self, generation: str, lent: LentFile) -> int:
        """Make the file of a generation from what was lent for it. Returns its inode."""
        file = self.opened_new(generation)
        try:
            assert file.write_at(memoryview(lent.memory), 0) == len(lent.memory)
            file.resize(LENGTH)
        finally:
            file.close()
        return os.stat(self.path(generation)).st_ino

    def read(self, generation: str) -> bytes:
        file = self.files.open(self.path(generation), "read")
        try:
            buffer = bytearray(file.size() + 1)
            return bytes(buffer[: file.read_into(memoryview(buffer), 0)])
        finally:
            file.close()

    def kept(self) -> list[str]:
        return sorted(os.listdir(self.root / FOLDER)) if (self.root / FOLDER).exists() else []


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_a_new_file_takes_the_memory_of_a_deleted_one(folder: Folder) -> None:
    inodes = {folder.write("1", b"a"), folder.write("2", b"b")}
    for number in range(3, 9):
        folder.files.remove(folder.path(str(number - 2)))
        assert folder.write(str(number), bytes([number])) in inodes
        assert folder.read(str(number)) == bytes([number]) * LENGTH and folder.read(str(number - 1)) != b""
        assert folder.kept() == []


def test_a_file_of_another_length_and_a_small_one_are_not_reused(folder: Folder) -> None:
    first = folder.write("1", b"a")
    folder.files.remove(folder.path("1"))
    assert folder.write("2", b"b", LENGTH + 8192) != first and folder.read("2") == b"b" * (LENGTH + 8192)
    folder.write("3", b"c", LEAST_BYTES - 1)
    folder.files.remove(folder.path("3"))
    assert folder.kept() == [f"1.{first}"]


def test_who_reads_a_deleted_file_never_sees_it_change(folder: Folder) -> None:
    folder.write("1", b"a")
    reader = folder.opened().open(folder.path("1"), "read")
    try:
        folder.files.remove(folder.path("1"))
        folder.write("2", b"b")
        buffer = bytearray(LENGTH)
        assert reader.read_into(memoryview(buffer), 0) == LENGTH and buffer == b"a" * LENGTH
    finally:
        reader.close()
    folder.write("3", b"c")
    assert folder.kept() == [], "it is free once it is not read any more"


def test_a_file_that_became_another_one_is_not_read(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the opening of the file and the lock, it was deleted, taken, and written as another one."""
    folder.write("1", b"a")
    reader = folder.opened()
    opened = reader._files.open

    def late(path: str, mode: str) -> object:
        file = opened(path, mode)  # type: ignore[arg-type]
        folder.files.remove(path)
        folder.write("2", b"b")
        return file

    monkeypatch.setattr(reader._files, "open", late)
    with pytest.raises(FileNotFoundError):
        reader.open(folder.path("1"), "read")


def test_memory_of_at_most_two_deleted_generations_is_kept(folder: Folder) -> None:
    inodes = [folder.write(f"{number}", b"a", LENGTH + number * 8192) for number in range(5)]
    for number in range(5):
        folder.files.remove(folder.path(f"{number}"))
    assert folder.kept() == [f"{number}.{inodes[number]}" for number in range(5)][-GENERATIONS:]


def test_memory_of_deleted_files_is_freed_before_a_file_is_refused(folder: Folder) -> None:
    folder.write("1", b"a")
    folder.files.remove(folder.path("1"))
    folder.free = 0
    with pytest.raises(OSError, match="not enough memory"):
        folder.write("2", b"b", LENGTH + 8192)
    assert folder.kept() == []


def test_memory_that_another_process_frees_is_not_held_by_a_mapping(folder: Folder) -> None:
    first = folder.write("1", b"a")
    folder.files.remove(folder.path("1"))
    assert folder.write("2", b"b") == first, "it is mapped now"
    folder.opened().reused.drop()
    os.unlink(folder.path("2"))
    folder.write("3", b"c")
    with open("/proc/self/maps") as maps:
        assert not [line for line in maps if str(folder.root) in line and "deleted" in line]


# ---- files that are filled before they have a name -------------------------------------------------------------


def test_a_lent_file_becomes_the_new_one_with_what_it_was_filled_with(folder: Folder) -> None:
    first = folder.write("1", b"a")
    folder.files.remove(folder.path("1"))
    lent = folder.lent("2", b"b")
    assert folder.make("2", lent) == first and folder.read("2") == b"b" * LENGTH
    lent.close()
    assert folder.read("2") == b"b" * LENGTH and folder.kept() == []


def test_bytes_of_elsewhere_are_written_into_a_lent_file_too(folder: Folder) -> None:
    first = folder.write("1", b"a")
    folder.files.remove(folder.path("1"))
    lent = folder.lent("2", b"b")
    assert folder.write("2", b"c") == first and folder.read("2") == b"c" * LENGTH
    lent.close()


def test_a_save_that_was_given_up_keeps_the_file_that_is_still_filled(folder: Folder) -> None:
    """A copier still wrote into a file that was deleted with its save, while the next save wrote into it."""
    first = folder.write("1", b"a")
    folder.files.remove(folder.path("1"))
    lent = folder.lent("2", b"b")
    file = folder.opened_new("2")
    file.close()
    folder.files.remove(folder.path("2"))
    assert folder.write("3", b"c") != first and folder.opened().reused.lend(folder.path("4"), LENGTH) is None
    lent.memory[:] = b"d" * len(lent.memory)
    assert folder.read("3") == b"c" * LENGTH
    lent.close()
    assert folder.write("4", b"e") == first, "it is free now"


def test_a_lent_file_whose_memory_was_freed_is_written_elsewhere(folder: Folder) -> None:
    first = folder.write("1", b"a")
    folder.files.remove(folder.path("1"))
    lent = folder.lent("2", b"b")
    os.unlink(folder.root / FOLDER / f"1.{first}")
    assert folder.make("2", lent) != first and folder.read("2") == b"b" * LENGTH
    lent.close()


def test_a_file_in_place_of_a_lent_one_needs_no_buffers(folder: Folder) -> None:
    """Its bytes lie in the lent memory, but room for buffers was asked for as well: the save failed."""
    first = folder.write("1", b"a")
    folder.files.remove(folder.path("1"))
    folder.files, folder.free = folder.opened(), LENGTH + 4096
    lent = folder.lent("2", b"b")
    os.unlink(folder.root / FOLDER / f"1.{first}")
    folder.make("2", lent)
    lent.close()
    assert folder.read("2") == b"b" * LENGTH


def test_a_file_that_is_being_filled_stays_where_memory_is_short(folder: Folder) -> None:
    """It was removed, which gave nothing back, and its save took as much memory once more."""
    first = folder.write("1", b"a")
    folder.files.remove(folder.path("1"))
    lent = folder.lent("2", b"b")
    folder.opened().reused.drop()
    assert folder.make("2", lent) == first
    lent.close()


def test_a_file_that_was_lent_for_a_save_that_never_began_is_free_again(folder: Folder) -> None:
    first = folder.write("1", b"a")
    folder.files.remove(folder.path("1"))
    folder.lent("2", b"b").close()
    assert folder.write("2", b"c") == first and folder.read("2") == b"c" * LENGTH


def test_a_file_that_another_process_has_just_taken_is_not_lent(folder: Folder, monkeypatch) -> None:
    """Between the opening of the deleted file and its lock, another process took it, wrote it and committed it."""
    folder.write("1", b"a")
    folder.files.remove(folder.path("1"))
    other, locked = folder.opened(), fcntl.flock

    def late(fd: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", locked)
        folder.files, mine = other, folder.files
        folder.write("2", b"b")
        folder.files = mine
        locked(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    assert folder.files.reused.lend(folder.path("3"), LENGTH) is None
    assert folder.read("2") == b"b" * LENGTH and os.stat(folder.path("2")).st_size == LENGTH


def test_a_forked_process_keeps_no_lock_of_a_file_of_another_length(folder: Folder, monkeypatch) -> None:
    """A worker that was forked meanwhile had a copy of the descriptor, and the file was not used until it ended."""
    first, copies, locked = folder.write("1", b"a"), list[int](), fcntl.flock
    folder.files.remove(folder.path("1"))

    def forked(fd: int, operation: int) -> None:
        copies.append(os.dup(fd))
        locked(fd, operation)

    with monkeypatch.context() as forking:
        forking.setattr(fcntl, "flock", forked)
        assert folder.files.reused.lend(folder.path("2"), 2 * LENGTH) is None
    assert folder.write("2", b"b") == first
    for one in copies:
        os.close(one)


@pytest.mark.parametrize("freed", [False, True])
def test_buffers_count_until_a_file_was_written_from_them(folder: Folder, freed: bool) -> None:
    """The first save of a process filled a file that an earlier one had left, or that was freed since; the next one
    took the memory for its buffers beyond the limit, because they were believed to exist."""
    folder.write("1", b"a")
    folder.files.remove(folder.path("1"))
    folder.files = folder.opened()
    lent = folder.lent("2", b"b")
    if freed:
        folder.opened().reused.drop()
    folder.make("2", lent)
    lent.close()
    folder.free = 2 * LENGTH - 1
    with pytest.raises(OSError, match="not enough memory"):
        folder.write("3", b"c")
    folder.free = 3 * LENGTH
    folder.write("4", b"c")

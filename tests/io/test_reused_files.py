"""The memory of deleted files is used again for new ones, and nobody who still reads the old ones notices."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lastgood.io.memory_files import MemoryFiles
from lastgood.io.reused_files import FOLDER, GENERATIONS, LEAST_BYTES

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

"""Files that move from memory to the disk while they are read, replaced, deleted, and while the mover is killed."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lastgood.io import memory_moves
from lastgood.io.files import PosixFile, PosixFiles
from lastgood.io.memory_files import MemoryFiles, still
from lastgood.io.memory_moves import STAGED, moved
from lastgood.io.os_errors import NoMemory
from lastgood.io.reused_files import FOLDER, LEAST_BYTES
from lastgood.run import memory_place
from mounts import small_tmpfs

LENGTH = 3 * LEAST_BYTES + 100
NAME = "gen/tensors"


class Both:
    """A folder of a run, which stands for memory, and its spill folder below `home`."""

    def __init__(self, root: Path, home: Path) -> None:
        self.memory, self.disk = root / "memory", home / ".spill" / "node"
        self.path, self.spilled = str(self.memory / NAME), self.disk / NAME
        (self.memory / "gen").mkdir(parents=True)
        home.mkdir(exist_ok=True)
        self.files = self.opened()
        self.data = os.urandom(LENGTH)
        self.write(NAME, self.data)

    def opened(self) -> MemoryFiles:
        """The two folders as another process sees them."""
        return MemoryFiles(str(self.memory), str(self.disk), free=lambda *_: 1 << 40)

    def write(self, name: str, data: bytes) -> None:
        file = self.files.open(str(self.memory / name), "new")
        file.reserve(len(data))
        file.write_at(memoryview(data), 0)
        file.close()

    def read(self) -> bytes:
        file = self.opened().open(self.path, "read")
        try:
            buffer = bytearray(file.size())
            file.read_into(memoryview(buffer), 0)
            return bytes(buffer)
        finally:
            file.close()

    def require_in_memory_only(self) -> None:
        assert self.read() == self.data and os.path.exists(self.path)
        assert not [one for one in self.disk.parent.rglob("*") if one.is_file()]


@pytest.fixture
def both(tmp_path: Path) -> Both:
    return Both(tmp_path, tmp_path / "home")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for 2 MiB."""
    with small_tmpfs(tmp_path / "small", "2m") as folder:
        yield folder


@pytest.mark.parametrize("direct", [True, False], ids=["past the cache", "through the cache"])
def test_a_moved_file_is_read_from_the_disk(both: Both, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    monkeypatch.setattr(memory_moves, "BUFFER_BYTES", LEAST_BYTES)
    monkeypatch.setattr(memory_moves, "CACHED_BYTES", LEAST_BYTES)
    if not direct:
        monkeypatch.setattr(memory_moves, "takes_direct", lambda folder: False)
    assert moved(both.files, both.path) == LENGTH
    assert not os.path.exists(both.path) and both.spilled.read_bytes() == both.data == both.read()
    assert both.files.list(str(both.memory / "gen")) == {"tensors": LENGTH}
    assert not both.disk.with_name(both.disk.name + STAGED).exists()
    both.files.remove(both.path)
    both.files.remove(str(both.memory / "gen"))
    assert both.files.list(str(both.memory)) == {} and not [*both.disk.iterdir()]


def is_cached(path: Path) -> bool:
    """Whether the last whole page of a file is in the page cache. It is not read: a read that may not wait (RWF_NOWAIT)
    reads ahead, so a fast disk had the page in the cache by then."""
    if memory_place.file_system(str(path)) in ("tmpfs", "ramfs", ""):
        pytest.skip("needs a temporary folder on a disk")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
        first = ctypes.c_char.from_buffer(memory)
        pages = (ctypes.c_ubyte * -(-LENGTH // mmap.PAGESIZE))()
        failed = ctypes.CDLL(None).mincore(ctypes.byref(first), ctypes.c_size_t(LENGTH), pages)
        del first  # it keeps the mapping from being closed
        assert not failed
        return bool(pages[LENGTH // mmap.PAGESIZE - 1] & 1)


@pytest.mark.parametrize("direct", [True, False], ids=["past the cache", "through the cache"])
def test_a_moved_file_takes_no_memory_on_the_disk(both: Both, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    """Its pages would count for the group that is short of memory, in place of those that were freed."""
    if not direct:
        monkeypatch.setattr(memory_moves, "takes_direct", lambda folder: False)
    assert moved(both.files, both.path) == LENGTH
    assert not is_cached(both.spilled)
    assert both.read() == both.data and is_cached(both.spilled)


def test_who_has_the_file_open_or_mapped_reads_on(both: Both) -> None:
    reader = both.opened().open(both.path, "read")
    with open(both.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        assert moved(both.files, both.path) == LENGTH
        assert memory[:] == both.data
    buffer = bytearray(LENGTH)
    assert reader.read_into(memoryview(buffer), 0) == LENGTH and buffer == both.data
    reader.close()


KILLED = """
import os, signal, sys
sys.path[:0] = sys.argv[1].split(os.pathsep)
from pathlib import Path
from test_memory_moves import Both, LENGTH, STAGED, moved

for last in range(1, 1000):
    folder = Path(sys.argv[2]) / str(last)
    folder.mkdir()
    both, events = Both(folder, folder / "home"), 0
    if (child := os.fork()) == 0:

        def count(event, arguments):
            global events
            if event.startswith(("os.", "fcntl.", "mmap.")) or event == "open":
                events += 1
                if events == last:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        moved(both.files, both.path)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert both.read() == both.data and both.files.list(str(folder / "memory" / "gen")) == {"tensors": LENGTH}, last
    if status == 0:
        break
    assert moved(both.opened(), both.path) in (0, LENGTH)
    assert both.spilled.read_bytes() == both.data == both.read() and not os.path.exists(both.path), last
    assert not both.disk.with_name(both.disk.name + STAGED).exists(), last
print(last)
"""


def test_a_mover_killed_at_any_step_leaves_the_file_whole(tmp_path: Path) -> None:
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    done = subprocess.run([sys.executable, "-c", KILLED, path, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 15, "it was killed before each of these calls"


def test_a_file_that_is_being_written_is_not_moved(both: Both) -> None:
    name = str(both.memory / "gen" / "other")
    file = both.files.open(name, "new")
    file.reserve(LENGTH)
    assert moved(both.opened(), name) == 0
    file.write_at(memoryview(both.data), 0)
    file.close()
    assert moved(both.opened(), name) == LENGTH and (both.disk / "gen" / "other").read_bytes() == both.data


def test_a_small_file_is_not_moved(both: Both) -> None:
    both.write("gen/record", b"{}")
    assert moved(both.files, str(both.memory / "gen" / "record")) == 0
    assert moved(both.files, str(both.memory / "gen" / "nothing")) == 0


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_what_happens_to_a_file_while_it_is_copied_counts(both: Both, how: str) -> None:
    other = both.opened()
    both.write("gen/by", b"new" * LEAST_BYTES)

    def meanwhile() -> bool:
        if how == "deleted":
            other.remove(both.path)
        elif os.path.exists(both.memory / "gen" / "by"):
            other.rename(str(both.memory / "gen" / "by"), both.path)
        return False

    assert moved(both.files, both.path, meanwhile) == 0
    if how == "replaced":
        assert both.read() == b"new" * LEAST_BYTES
    else:
        assert both.files.list(str(both.memory / "gen")).keys() == {"by"}
    assert not [one for one in both.disk.parent.rglob("*") if one.is_file()]


def test_a_deleted_file_is_not_overwritten_while_it_is_copied(both: Both) -> None:
    """Its memory would be used again for the next file, whose bytes would go to the disk under the old name."""
    other, taken = both.opened(), []

    def meanwhile() -> bool:
        other.remove(both.path)
        file = other.open(str(both.memory / "gen" / "next"), "new")
        file.reserve(LENGTH)
        taken.append(os.listdir(both.memory / FOLDER))
        file.close()
        return True

    assert moved(both.files, both.path, meanwhile) == 0
    assert taken == [os.listdir(both.memory / FOLDER)] and len(taken[0]) == 1


def test_a_move_that_is_stopped_changes_nothing(both: Both) -> None:
    assert moved(both.files, both.path, lambda: True) == 0
    both.require_in_memory_only()


def test_a_full_disk_leaves_the_file_in_memory(tmp_path: Path, small_disk: Path) -> None:
    both = Both(tmp_path, small_disk)
    with pytest.raises(NoMemory, match="full too") as raised:
        moved(both.files, both.path)
    assert raised.value.todo.startswith(f"Free space on the disk of {both.disk}.")
    both.require_in_memory_only()


def test_a_disk_that_fails_leaves_the_file_in_memory(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: PosixFile) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(PosixFile, "sync", failing)
        with pytest.raises(OSError, match="Input/output"):
            moved(both.files, both.path)
    both.require_in_memory_only()


def test_a_file_that_was_cut_while_it_was_copied_is_not_moved(both: Both) -> None:
    def meanwhile() -> bool:
        os.truncate(both.path, LEAST_BYTES)
        return False

    with pytest.raises(OSError, match="bytes were read"):
        moved(both.files, both.path, meanwhile)
    assert os.path.getsize(both.path) == LEAST_BYTES and not both.spilled.exists()


def test_without_a_spill_folder_nothing_is_moved(both: Both) -> None:
    files = MemoryFiles(str(both.memory))
    with pytest.raises(NoMemory, match="no disk of this machine below it"):
        moved(files, both.path)
    both.require_in_memory_only()


def is_held(folder: Path, operation: int) -> bool:
    """Whether a lock of the folder excludes this one."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def test_no_other_name_changes_while_one_moves(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deletion between the two steps of a move would bring the file back; a file of the same name would be lost."""
    held: dict[str, bool] = {}

    def noted(name: str, operation: int):
        call = getattr(PosixFiles, name)

        def performed(self, path: str, *others: str, **options: bool):
            if str(both.disk) in (path + str(others)) or str(both.memory) in path:
                held[name] = is_held(both.memory, operation)
            return call(self, path, *others, **options)

        monkeypatch.setattr(PosixFiles, name, performed)

    for name in ("rename", "remove", "link"):
        noted(name, fcntl.LOCK_EX)
    both.write("gen/a", b"1")
    both.files.link(str(both.memory / "gen/a"), str(both.memory / "gen/b"))
    both.files.rename(str(both.memory / "gen/a"), str(both.memory / "gen/c"))
    both.files.remove(str(both.memory / "gen/b"))
    assert held == {"link": True, "rename": True, "remove": True} and not is_held(both.memory, fcntl.LOCK_EX)
    held.clear()
    noted("rename", fcntl.LOCK_SH)
    noted("open", fcntl.LOCK_EX)
    assert moved(both.files, both.path) == LENGTH and held["rename"]
    both.write("gen/d", b"1")
    assert held["open"]


def test_a_process_forked_meanwhile_keeps_no_lock(both: Both) -> None:
    """A data-loader worker that was forked while a save took memory kept the lock: every later save waited for ever."""
    reader, writer = os.pipe()
    with still(str(both.memory)), both.files.room_for(1):
        if (child := os.fork()) == 0:
            os.close(writer)
            os.read(reader, 1)  # until the parent closes its end
            os._exit(0)
    try:
        with open(both.memory.parent / ".reserving.lock") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert not is_held(both.memory, fcntl.LOCK_EX)
    finally:
        os.close(writer)
        os.close(reader)
        os.waitpid(child, 0)


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_file_that_is_replaced_while_it_is_opened_is_found(both: Both, monkeypatch, on_disk: bool) -> None:
    """It was on the disk when memory was asked, and in memory again when the disk was: it counted as deleted."""
    other, new = both.opened(), os.urandom(LENGTH)
    both.write("gen/by", new)
    if on_disk:
        assert moved(other, both.path)
    opened = PosixFiles.open

    def meanwhile(self: PosixFiles, path: str, *args: object, **options: object) -> PosixFile:
        before = None if on_disk else opened(self, path, *args, **options)
        if path == (str(both.spilled) if on_disk else both.path) and os.path.exists(both.memory / "gen/by"):
            other.rename(str(both.memory / "gen/by"), both.path)
        return before or opened(self, path, *args, **options)

    monkeypatch.setattr(PosixFiles, "open", meanwhile)
    assert both.read() == new


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("back", [False, True], ids=["to the disk", "and replaced in memory"])
def test_a_file_that_moves_during_a_listing_is_listed(both: Both, monkeypatch, at: int, back: bool) -> None:
    """A listing without it would let a good generation count as damaged."""
    other, calls = both.opened(), iter(range(100))
    both.write("gen/by", both.data)
    if back:
        moved(other, both.path)
    listed = PosixFiles.list

    def meanwhile(self: PosixFiles, path: str) -> dict[str, int | None]:
        if next(calls) == at:
            if back:
                other.rename(str(both.memory / "gen/by"), both.path)
            else:
                moved(other, both.path)
        return listed(self, path)

    monkeypatch.setattr(PosixFiles, "list", meanwhile)
    assert "tensors" in both.files.list(str(both.memory / "gen"))

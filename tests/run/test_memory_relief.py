"""Memory that a job needs is given back: what lies there moves to the disk, and nothing of it is lost."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lastgood
from agents import agent, ended, until
from lastgood.agent.server import Server
from lastgood.format import layout
from lastgood.io import machine
from lastgood.io.files import Lock, PosixFiles
from lastgood.io.memory_files import MemoryFiles, still
from lastgood.io.memory_moves import STAGED, moved
from lastgood.io.reused_files import FOLDER, LEAST_BYTES
from lastgood.records import Extent
from lastgood.run import access, agent_link, memory_place, memory_relief
from lastgood.run.agent_messages import AgentSpec
from lastgood.run.memory_relief import LOCK, Relief
from lastgood.run.paths import Place
from lastgood.run.peers import DRILLS
from lastgood.storage.directory import Disk
from mounts import small_tmpfs

LENGTH = 2 * LEAST_BYTES


class Run:
    """A run in memory, and its spill folder. `lacking`: the bytes that it is to give back; a move gives back what it
    moves, unless `useless`."""

    def __init__(self, memory: Path, home: Path) -> None:
        self.memory, self.home, self.useless = memory / "run", home, False
        self.disk = home / ".spill" / "node"
        self.lacking = 0
        home.mkdir(exist_ok=True)
        (self.memory / "gen").mkdir(parents=True)
        self.files, self.relief = self.opened()

    def opened(self) -> tuple[MemoryFiles, Relief]:
        """The run as another process sees it."""
        files = MemoryFiles(str(self.memory), str(self.disk), free=lambda *_: 1 << 40)
        return files, Relief(lambda: files, str(self.memory), lacking=lambda _: self._lacks_now())

    @property
    def lacking(self) -> int:
        return self._lacking

    @lacking.setter
    def lacking(self, count: int) -> None:
        self._lacking, self._moved_before = count, self._on_disk()

    def _lacks_now(self) -> int:
        return max(0, self._lacking - (0 if self.useless else self._on_disk() - self._moved_before))

    def _on_disk(self) -> int:
        return sum(one.stat().st_size for one in self.disk.rglob("*.safetensors"))

    def save(self, step: int, committed: bool = True, *names: str) -> None:
        folder = f"gen/{step:012}-0000000a"
        self.files.make_dir(str(self.memory / folder))
        for name in names or ("r00000.safetensors",):
            file = self.files.open(str(self.memory / folder / name), "new")
            file.reserve(LENGTH)
            file.write_at(memoryview(bytes([step]) * LENGTH), 0)
            file.close()
        if committed:
            (self.memory / folder / layout.COMMIT).write_bytes(b"{}")

    def steps(self, folder: Path) -> list[int]:
        """The steps whose files of tensors lie in a folder."""
        return sorted(int(one.parent.name[:12]) for one in folder.rglob("*.safetensors"))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "memory", tmp_path / "home")


def test_moves_that_give_nothing_back_end(run: Run) -> None:
    """A forked worker of a data loader mapped every file, and all saves went to the disk, one after another."""
    for step in (1, 2, 3):
        run.save(step)
    run.useless, run.lacking = True, LENGTH
    assert run.relief.give_back() == LENGTH and run.relief.give_back() == 0
    assert run.steps(run.memory) == [2, 3]


def test_only_what_lacks_is_moved_and_the_newest_last(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    for step in (2, 10, 3):
        run.save(step)
    assert run.relief.give_back() == 0 and run.steps(run.memory) == [2, 3, 10]
    run.lacking = LENGTH + 1
    assert run.relief.give_back() == 2 * LENGTH
    assert run.steps(run.memory) == [10] and run.steps(run.disk) == [2, 3]
    assert caplog.text.count("was moved from memory to") == 2 and str(run.disk) in caplog.text
    run.lacking = 1
    assert run.relief.give_back() == LENGTH and run.steps(run.disk) == [2, 3, 10]
    run.lacking = 1
    assert run.relief.give_back() == 0, "nothing is left"


def test_records_and_unfinished_files_stay_in_memory(run: Run) -> None:
    run.save(1, True, "r00000.manifest.json", "r00001.safetensors.copy.tmp")
    run.save(2, False)
    run.lacking = 1 << 40
    assert run.relief.give_back() == 0 and not run.disk.exists()


def test_memory_of_deleted_files_is_freed_before_any_is_moved(run: Run) -> None:
    run.save(1)
    run.save(2)
    run.files.remove(str(run.memory / "gen/000000000001-0000000a/r00000.safetensors"))

    def lacking(root: str) -> int:
        return len(os.listdir(run.memory / FOLDER))

    relief = Relief(lambda: run.files, str(run.memory), lacking=lacking)
    assert relief.give_back() == 0 and run.steps(run.memory) == [2] and lacking("") == 0


def test_copies_of_a_drill_are_removed_before_any_save_is_moved(run: Run) -> None:
    """Copies of a drill of another node held memory that the job needed, and its saves went to the disk."""
    run.save(1)
    copies = run.memory / DRILLS / "drill-00000000"
    copies.mkdir(parents=True)
    assert run.relief.give_back() == 0 and copies.exists()
    relief = Relief(lambda: run.files, str(run.memory), lacking=lambda root: copies.exists())
    assert relief.give_back() == 0 and run.steps(run.memory) == [1] and not copies.exists()


def test_a_mapping_does_not_hold_what_another_process_moved(run: Run) -> None:
    """The agent moved a file, and its memory was not free: the training process had it mapped."""
    run.save(1)
    run.files.remove(str(run.memory / "gen/000000000001-0000000a/r00000.safetensors"))
    run.save(2)  # takes the memory of the first
    run.lacking = 1
    assert run.opened()[1].give_back() == LENGTH

    def mapped() -> list[str]:
        return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(run.memory) in line]

    assert mapped()
    run.lacking = 0
    assert run.relief.give_back() == 0 and not mapped()


def test_one_process_moves_files_at_a_time(run: Run) -> None:
    """Eight ranks saw the same shortage, and all saves left memory."""
    run.save(1)
    run.lacking = 1
    with open(run.memory.parent / LOCK, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert run.relief.give_back() == 0 and run.steps(run.memory) == [1]
    assert run.relief.give_back() == LENGTH


def test_what_cannot_be_moved_is_reported_once_and_kept(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.save(1)
    run.lacking = 1
    run.home.rename(run.home.with_name("unmounted"))
    assert [run.relief.give_back() for _ in range(9)] == [0] * 9
    assert run.steps(run.memory) == [1] and not run.home.exists()
    assert caplog.text.count("no disk of this machine below it") == 1 and "It is untouched" in caplog.text


def test_half_a_copy_of_a_killed_process_is_removed(run: Run) -> None:
    left = run.disk.with_name(run.disk.name + STAGED)
    left.parent.mkdir()
    left.write_bytes(b"half")
    run.relief.clear()
    run.relief.clear()
    assert not left.exists()


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 32 MiB."""
    with small_tmpfs(tmp_path / "small", "32m") as folder:
        yield folder


def test_a_full_tmpfs_gets_its_room_back(tmp_path: Path, small_memory: Path) -> None:
    """Data-loader workers share batches through /dev/shm, and die by SIGBUS where it is full."""
    run = Run(small_memory, tmp_path / "home")
    run.save(1)
    run.save(2)
    relief = Relief(lambda: run.files, str(run.memory))
    assert relief.give_back() == 0, "a machine with so little memory cannot run this test"
    with open(small_memory / "batches", "wb") as batches:
        os.posix_fallocate(batches.fileno(), 0, 24 << 20)
    assert relief.give_back() == 2 * LENGTH and run.steps(run.disk) == [1, 2]
    assert memory_relief.lacking_bytes(str(run.memory)) == 0


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of memory, which is empty again at the end of the test."""
    group = Path("/sys/fs/cgroup/memory") / f"lastgood-relief-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs root, and version 1 of control groups: {error}")
    try:
        yield group
    finally:
        until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


GROWS = """
import os, sys, zlib
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
import torch, lastgood
torch.manual_seed(7)
state = {"w": torch.zeros(int(sys.argv[3])), "n": 0}
tier = lastgood.Tier("memory://", cadence=lastgood.Every(steps=1), retention=lastgood.Keep(last=4))
ckpt = lastgood.Checkpointer(sys.argv[2], state, cadence=lastgood.Every(steps=100), tiers=[tier])
ckpt.restore()
for n in range(1, 5):
    torch.randn(state["w"].shape, out=state["w"])
    state["n"] = n
    ckpt.save(n).result()
data = []
for _ in range(int(sys.argv[4])):  # the job reads data, and keeps it
    data.append(os.urandom(1 << 20))
    zlib.compress(data[-1], 1)
print(sum(map(len, data)))
sys.stdout.flush()
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
@pytest.mark.parametrize("grows_mib", [0, pytest.param(430, marks=pytest.mark.long)])
def test_a_job_that_grows_into_the_memory_of_its_saves_lives(
    tmp_path: Path, memory: Path, group: Path, grows_mib: int
) -> None:
    """Four saves of 40 MB stayed in memory although the job needed it later, and the system killed the job."""
    numbers, home = 10_000_000, tmp_path / "home"
    # Python 3.13 with torch needs more than 3.11: without growth the memory must not be short under either.
    (group / "memory.limit_in_bytes").write_text("800000000" if grows_mib else "1200000000")
    command = [sys.executable, "-c", GROWS, str(group), str(home), str(numbers), str(grows_mib)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert int(done.stdout) == grows_mib << 20 and done.returncode == -signal.SIGKILL, done.stderr
        spilled = [*Path(memory_place.spill_folder(str(home))).rglob("*.safetensors")]
        assert len(spilled) == (4 if grows_mib else 0), "the newest one is read from there too"
        assert ("was moved from memory to" in done.stderr) == bool(grows_mib)
    finally:
        ended(memory_place.folder_of(home))
    torch.manual_seed(7)
    expected, state = torch.zeros(numbers), {"w": torch.zeros(numbers), "n": 0}
    for _ in range(4):
        torch.randn(expected.shape, out=expected)
    with lastgood.Checkpointer(home, state, tiers=[lastgood.Tier("memory://")]) as ckpt:
        found = ckpt.restore()
    assert found.step == state["n"] == 4 and torch.equal(state["w"], expected)
    assert [*found.sources] == [memory_place.url_of(home)]


@pytest.mark.slow
def test_an_agent_gives_memory_back_after_the_job(tmp_path: Path, memory: Path, group: Path, call, call_json) -> None:
    """What lies in memory is counted for the group of its container as long as the agent lives."""
    home, numbers = tmp_path / "home", 1_000_000
    state = {"w": torch.full((numbers,), 3.0)}
    with lastgood.Checkpointer(home, state, tiers=[lastgood.Tier("memory://")]) as ckpt:
        ckpt.restore()
        ckpt.save(1).result()
    folder, spilled = Path(memory_place.folder_of(home)), Path(memory_place.spill_folder(str(home)))
    ended(str(folder))
    assert [*folder.rglob("*.safetensors")] and not spilled.exists()
    with agent(folder) as process:
        (group / "cgroup.procs").write_text(str(process.pid))
        (group / "memory.limit_in_bytes").write_text(str(100 << 20))
        until(lambda: [*spilled.rglob("*.safetensors")] and not [*folder.rglob("*.safetensors")])
        code, data = call_json("agent", "status", str(home))
        (row,) = data["runs"]
        assert code == 0 and row["spill"] == str(spilled) and row["spilled"] >= 4 * numbers > row["bytes"]
        assert "4.01 MB of its saves lie in" in " ".join(call("agent", "status")[1].split())
    state["w"].zero_()
    with lastgood.Checkpointer(home, state, tiers=[lastgood.Tier("memory://")]) as ckpt:
        assert [*ckpt.restore().sources] == [memory_place.url_of(home)]
    assert torch.equal(state["w"], torch.full((numbers,), 3.0))


def test_who_reads_finds_what_is_moved_later(tmp_path: Path, memory: Path) -> None:
    """The spill folder did not exist when the reader opened the run, so the files counted as missing."""
    home, state = tmp_path / "home", {"w": torch.full((1_000_000,), 3.0)}
    with lastgood.Checkpointer(home, state, tiers=[lastgood.Tier("memory://")]) as ckpt:
        ckpt.restore()
        ckpt.save(1).result()
        folder = memory_place.folder_of(home)
        reader = access.for_reading(f"memory://{folder}")
        (path,) = Path(folder).rglob("*.safetensors")
        spill = memory_place.spill_folder(str(home))
        data = path.read_bytes()
        assert moved(MemoryFiles(folder, spill), str(path)) == len(data) and not path.exists()
        name, buffer = str(path.relative_to(folder)), memoryview(bytearray(len(data)))
        reader.read_into(Extent(blob=name, offset=0, length=len(data)), buffer)
        assert buffer == data and reader.list(os.path.dirname(name))[path.name] == len(data)


def waits_for(process: int, inode: int) -> bool:
    """Whether a process waits for the lock of a file."""
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return any("->" in line and str(process) in line and line[6].endswith(f":{inode}") for line in lines)


def test_memory_is_not_removed_while_a_file_moves(tmp_path: Path, memory: Path) -> None:
    """The agent removed the spill folder, and a move made it anew with a file that nothing removes any more."""
    home = tmp_path / "home"
    with lastgood.Checkpointer(home, {"n": 1}, tiers=[lastgood.Tier("memory://")]) as ckpt:
        ckpt.restore()
        ckpt.save(1).result()
    folder = memory_place.folder_of(home)
    ended(folder)
    inode = os.stat(folder).st_ino
    with agent(Path(folder), linger_seconds=0.1) as process:
        with still(folder, fcntl.LOCK_SH):
            until(lambda: waits_for(process.pid, inode))
            assert os.path.isdir(folder)
        assert process.wait(60) == 0
    assert not os.path.exists(folder)


def test_the_end_of_an_agent_leaves_the_files_of_the_next_job(memory: Path, tmp_path: Path, monkeypatch) -> None:
    """It let the next job in, and removed the spill folder then, into which that one had moved files already."""
    folder, spill = str(memory / "run"), tmp_path / "spill"
    os.mkdir(folder)
    (spill / "gen").mkdir(parents=True)
    agent_link.write_spec(
        Disk(PosixFiles(), folder), AgentSpec(format=layout.FORMAT, places=[], order=0, spill=str(spill))
    )
    lock = Lock(os.path.join(folder, agent_link.LOCK))
    rmtree, left = shutil.rmtree, tmp_path / "spill.removed"
    (left / "gen").mkdir(parents=True)

    def meanwhile(path: str, ignore_errors: bool) -> None:
        if not os.path.exists(folder):
            assert left.exists(), "an agent that was killed has left it, and no opening waits until it is removed"
            os.makedirs(folder)
            spill.mkdir(exist_ok=True)
            (spill / "moved").write_bytes(b"of the next job")
        rmtree(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", meanwhile)
    with open(memory / LOCK, "w") as moving:
        fcntl.flock(moving, fcntl.LOCK_EX)  # another process moves files, so the agent removes nothing at its start
        Server(Place(folder, "memory"), lock, agent_link.listening(folder), 0.0, 0.0).run()
    lock.close()
    assert (spill / "moved").read_bytes() == b"of the next job" and os.listdir(spill) == ["moved"]
    assert os.listdir(tmp_path) == ["spill"]


def test_no_file_moves_to_the_spill_folder_of_an_earlier_opening(run: Run, tmp_path: Path) -> None:
    """Another directory was the first one below: while the run was opened its agent moved a file, of which it had begun
    the copy, to the earlier folder, and the job used the later one."""
    run.save(1)
    root, later = str(run.memory), tmp_path / "b" / ".spill" / "node"
    spec = AgentSpec(format=layout.FORMAT, places=[], order=0, spill=str(run.disk))
    agent_link.write_spec(Disk(PosixFiles(), root), spec)
    assert memory_place.files_of(root).spill_folder == str(run.disk)
    assert memory_place.files_of(root, str(later)).spill_folder == str(later)
    assert memory_place.files_of(root).spill_folder == str(later)
    run.lacking = 1
    assert run.relief.give_back() == 0 and run.steps(run.memory) == [1] and not run.steps(run.disk)
    later.mkdir(parents=True)
    assert memory_place.files_of(root, str(run.disk)).spill_folder == str(later), "files may be there"


def test_hosts_of_one_name_have_a_spill_folder_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines of one name shared a directory: each removed the file that the other one was moving."""
    file = tmp_path / "machine-id"
    monkeypatch.setattr(machine, "MACHINE_ID", str(file))
    found = [memory_place.spill_folder("/home", {})]
    for text in ("a\n", "b\n", "b\n"):
        file.write_text(text)
        found.append(memory_place.spill_folder("/home", {}))
    assert len({*found}) == 3 and found[2] == found[3]


def test_the_agent_finds_what_another_first_directory_has(tmp_path: Path, memory: Path) -> None:
    """Files that had moved to the first directory below counted as missing once the job named another one."""
    home, state = tmp_path / "home", {"w": torch.full((1_000_000,), 3.0)}

    def opened(first: str) -> lastgood.Checkpointer:
        every = lastgood.Every(steps=100)
        tiers = [lastgood.Tier("memory://"), lastgood.Tier(tmp_path / first, cadence=every)]
        return lastgood.Checkpointer(home, state, cadence=every, tiers=tiers)

    with opened("a") as ckpt:
        ckpt.restore()
        ckpt.save(1).result()
        folder, spill = memory_place.folder_of(home), memory_place.spill_folder(str(tmp_path / "a"))
        (path,) = Path(folder).rglob("*.safetensors")
        assert moved(MemoryFiles(folder, spill), str(path))
    with opened("b") as ckpt:
        assert ckpt.restore().step == 1
        spec = agent_link.read_spec(folder)
        assert spec is not None and spec.spill == spill

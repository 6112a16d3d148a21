"""Opening a path as a run: every path that cannot be a run is refused by name and left unchanged."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import load, save
from lastgood.engine.inline_executor import Inline
from lastgood.errors import NameTaken, NotARun, NotRestored, NotWritable, Refused, RunLocked, UnknownFormat
from lastgood.format import commit, layout
from lastgood.format.commit import survey
from lastgood.io.checksum import digest
from lastgood.io.files import PosixFiles
from lastgood.run import access
from lastgood.run.reader import RunReader
from lastgood.run.writer import RunWriter
from lastgood.testing import Fault

STATE = {"weight": bytes(range(250))}
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount and to give up rights")


def write(path: Path, step: int = 10, state: dict[str, bytes] = STATE) -> None:
    with access.for_writing(path, "atomic_dirsync") as tier:
        writer = RunWriter(tier, Inline())
        newest = next(iter(writer.lineage()), None)
        writer.begin(newest.id if newest else None)
        save(writer, step, state)


def read(path: Path) -> dict[str, bytes]:
    return load(access.for_reading(path))[1]


def opening(path: Path, verb: str) -> None:
    if verb == "read":
        access.for_reading(path)
    else:
        with access.for_writing(path, "atomic_dirsync"):
            pass


def picture(path: Path) -> dict[str, tuple]:
    """Everything that a careless opening could change, including the modification times."""
    found = {}
    for one in [path, *path.rglob("*")] if path.is_dir() and not path.is_symlink() else [path]:
        status = one.lstat()
        content = one.read_bytes() if one.is_file() else None
        found[str(one)] = (status.st_mode, status.st_ino, status.st_mtime_ns, content)
    return found


def in_child(job: Callable[[], None], uid: int = 0) -> None:
    """Run the function in a forked process, with another user's rights if `user` is given; its failure fails the
    test."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if uid:
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            job()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


# ---- paths that are no run -------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["read", "write"])
def test_opening_a_regular_file_as_a_run_is_refused(tmp_path, verb):
    path = tmp_path / "model.pt"
    path.write_bytes(b"somebody's weights")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    for one, kind in ((path, "a file"), (tmp_path / "pipe", "a file"), (tmp_path / "nowhere", "a link to .*missing")):
        before = picture(tmp_path)
        with pytest.raises(NotARun, match=f"is {kind}"):
            opening(one, verb)
        assert picture(tmp_path) == before


@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("names", [["notes.txt"], ["a", "b", "c", "d"], ["latest"], ["LASTGOOD.json", "model.pt"]])
def test_a_foreign_directory_is_refused_and_left_unchanged(tmp_path, verb, names):
    for name in names:
        (tmp_path / name).write_bytes(b"theirs")
    before = picture(tmp_path)
    with pytest.raises(NotARun, match=r"lastgood\.json"):
        opening(tmp_path, verb)
    assert picture(tmp_path) == before


def test_reading_a_missing_path_is_refused(tmp_path):
    with pytest.raises(NotARun, match="there is nothing at"):
        access.for_reading(tmp_path / "missing" / "run")
    with pytest.raises(NotARun, match="is not a run"):
        access.for_reading(tmp_path)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("name", ["gen", "incarnations"])
@pytest.mark.parametrize("other", ["file", "link", "pipe"])
def test_a_run_with_symlinked_folders_is_refused_and_targets_are_unchanged(tmp_path, verb, name, other):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    write(run)
    (run / name).rename(elsewhere)
    if other == "file":
        (run / name).write_bytes(b"")
    elif other == "link":
        (run / name).symlink_to(elsewhere)
    else:
        os.mkfifo(run / name)
    before = picture(tmp_path)
    with pytest.raises(NotARun, match="not a directory of its own"):
        opening(run, verb)
    assert picture(tmp_path) == before


# ---- paths that are a run --------------------------------------------------------------------------------------


def test_a_new_run_creates_its_parent_folders(tmp_path):
    write(tmp_path / "deep" / "er" / "run")
    assert read(tmp_path / "deep" / "er" / "run") == STATE


def test_the_names_of_a_new_run_and_its_parent_folders_are_durable(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(PosixFiles, "sync_dir", lambda self, path: synced.append(path))
    with access.for_writing(tmp_path / "deep" / "run", "atomic_dirsync"):
        assert synced == [str(tmp_path), str(tmp_path / "deep")]
    synced.clear()
    with access.for_writing(tmp_path / "deep" / "run", "atomic_dirsync"):
        assert synced == [str(tmp_path / "deep")], (
            "the process that created it may have died before its name was durable"
        )


def test_an_empty_directory_or_an_interrupted_first_opening_becomes_a_run(tmp_path):
    for name in (".lock", ".probe-123", "lastgood.json.1-2.tmp"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "incarnations").mkdir()
    write(tmp_path)
    assert read(tmp_path) == STATE


def test_a_run_reached_through_a_link_or_a_relative_path_is_the_same_run(tmp_path, monkeypatch):
    write(tmp_path / "run")
    (tmp_path / "link").symlink_to("run")
    write(tmp_path / "link", 20, {"weight": b"second"})
    monkeypatch.chdir(tmp_path)
    assert read(Path("run")) == read(Path("link")) == {"weight": b"second"}


def test_foreign_files_in_a_run_are_kept_and_do_no_harm(tmp_path):
    write(tmp_path)
    (tmp_path / "train.log").write_bytes(b"theirs")
    (tmp_path / "gen" / "README").write_bytes(b"theirs")
    write(tmp_path, 20, {"weight": b"second"})
    assert read(tmp_path) == {"weight": b"second"}
    assert (tmp_path / "train.log").read_bytes() == (tmp_path / "gen" / "README").read_bytes() == b"theirs"


@pytest.mark.parametrize("harm", ["gone", "empty", "flipped", "link"])
def test_a_run_with_a_lost_or_damaged_header_opens_and_is_mended(tmp_path, harm):
    write(tmp_path)
    header = tmp_path / layout.HEADER
    good = header.read_bytes()
    header.unlink()
    if harm == "empty":
        header.write_bytes(b"")
    elif harm == "flipped":
        header.write_bytes(good[:30] + bytes([good[30] ^ 4]) + good[31:])
    elif harm == "link":
        (tmp_path / "elsewhere").write_bytes(good)
        header.symlink_to("elsewhere")
    assert read(tmp_path) == STATE, "reading needs no header, and does not write one"
    write(tmp_path, 20, {"weight": b"second"})
    assert header.read_bytes() == good and not header.is_symlink(), "the commits name the run"
    assert [one.step for one in RunReader(access.for_reading(tmp_path)).lineage()] == [20, 10]


def test_a_header_of_another_run_hides_the_generations_and_deletes_none(tmp_path):
    write(tmp_path / "a")
    write(tmp_path / "b")
    (tmp_path / "a" / layout.HEADER).write_bytes((tmp_path / "b" / layout.HEADER).read_bytes())
    found = survey(access.for_reading(tmp_path / "a"))
    assert not found.generations and len(found.broken) == 1
    assert "belongs to run" in str(next(iter(found.broken.values())))
    with access.for_writing(tmp_path / "a", "atomic_dirsync") as tier:
        RunWriter(tier, Inline())
    assert len(survey(access.for_reading(tmp_path / "a")).broken) == 1


@pytest.mark.parametrize(
    "name", [layout.HEADER, layout.POINTER, "gen/000000000010-{id}/COMMIT.json", "incarnations/000001-{id}.json"]
)
def test_a_run_of_a_newer_version_is_refused_and_left_unchanged(tmp_path, name):
    write(tmp_path)
    ident = next((tmp_path / "gen").iterdir()).name.split("-")[1]
    body = b'{"format":2,"news":[1,2,3]}'
    newer = b'{"digest":"xxh3_128:%s","record":%s}\n' % (digest("xxh3_128", body).encode(), body)
    (tmp_path / name.format(id=ident)).write_bytes(newer)
    before = picture(tmp_path)
    tier = access.for_reading(tmp_path)
    for attempt in (lambda: survey(tier), lambda: RunWriter(tier, Inline()), lambda: load(tier)):
        with pytest.raises(UnknownFormat, match="newer lastgood"):
            attempt()
    after = picture(tmp_path)
    assert {path: entry[3] for path, entry in after.items()} == {path: entry[3] for path, entry in before.items()}


# ---- locks -----------------------------------------------------------------------------------------------------


def test_a_run_has_one_writer_and_any_number_of_readers(tmp_path):
    write(tmp_path)
    with access.for_writing(tmp_path, "atomic_dirsync"):
        with pytest.raises(RunLocked, match="in this process already"), access.for_writing(tmp_path, "atomic_dirsync"):
            pass
        assert read(tmp_path) == STATE
    write(tmp_path, 20)


def test_the_lock_is_released_when_its_process_dies(tmp_path):
    write(tmp_path)
    code = (
        "import os, sys\nfrom lastgood.run import access\n"
        "context = access.for_writing(sys.argv[1], 'atomic_dirsync')\ncontext.__enter__()\n"
        "print('held', flush=True)\nos.read(0, 1)\nos._exit(9)\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ}
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(RunLocked), access.for_writing(tmp_path, "atomic_dirsync"):
            pass
        holder.communicate(b"x")
    finally:
        holder.kill()
        holder.wait()
    write(tmp_path, 20)


def test_a_forked_worker_that_outlives_the_writer_holds_no_lock(tmp_path):
    """flock belongs to the open file, which a data-loader worker inherits."""
    ready, done = os.pipe(), os.pipe()
    with access.for_writing(tmp_path, "atomic_dirsync"):
        worker = os.fork()
        if worker == 0:
            os.close(done[1])
            os.write(ready[1], b"x")
            os.read(done[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
    try:
        write(tmp_path)
    finally:
        for one in (*ready, *done):
            os.close(one)
        os.waitpid(worker, 0)


def test_a_symlinked_lock_file_is_not_followed(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "theirs").write_bytes(b"theirs")
    (tmp_path / "run" / access.LOCK).symlink_to("../theirs")
    with pytest.raises(NotWritable), access.for_writing(tmp_path / "run", "atomic_dirsync"):
        pass


# ---- rights ----------------------------------------------------------------------------------------------------


@pytest.fixture
def open_path(tmp_path) -> Iterator[Path]:
    """A folder that other users can reach; pytest creates its folders for their owner alone."""
    above = [one for one in (tmp_path, *tmp_path.parents) if one != Path("/") and not one.stat().st_mode & 0o001]
    modes = {one: one.stat().st_mode for one in above}
    for one in above:
        one.chmod(modes[one] | 0o711)
    yield tmp_path
    for one, mode in modes.items():
        if one.exists():
            one.chmod(mode)


@root_only
def test_a_run_of_another_user_can_be_read_and_refuses_a_writer(open_path):
    write(open_path / "run")
    before = picture(open_path / "run")

    def job() -> None:
        assert read(open_path / "run") == STATE
        with pytest.raises(NotWritable, match="Permission denied"):
            write(open_path / "run", 20)
        with pytest.raises(NotWritable, match="Permission denied"):
            write(open_path / "new", 20)

    in_child(job, uid=65534)
    assert picture(open_path / "run") == before and not (open_path / "new").exists()


@root_only
@pytest.mark.parametrize("folder", ["run", "run/gen", "above"])
def test_a_run_without_read_permission_is_reported_as_such(open_path, folder):
    write(open_path / "above" / "run")
    locked = open_path / "above" if folder == "above" else open_path / "above" / folder
    locked.chmod(0o700)

    def job() -> None:
        with pytest.raises(NotWritable, match=r"[Pp]ermi"):
            read(open_path / "above" / "run")
        with pytest.raises(NotWritable, match=r"[Pp]ermi"):
            write(open_path / "above" / "run", 20)

    in_child(job, uid=65534)


@root_only
def test_a_file_without_read_permission_is_not_reported_as_damage(open_path):
    """Rights can be restored; skipping a generation because of them would lose its progress without need."""
    write(open_path / "run")
    write(open_path / "run", 20, {"weight": b"second"})
    for name in ("COMMIT.json", "r00000.manifest.json", "r00000.safetensors"):
        (path,) = (open_path / "run").glob(f"gen/000000000020-*/{name}")
        path.chmod(0o600)

        def job() -> None:
            with pytest.raises(Refused, match="Permission denied"):
                read(open_path / "run")

        in_child(job, uid=65534)
        path.chmod(0o644)


@contextlib.contextmanager
def mounted(path: Path) -> Iterator[None]:
    """`path`, bind-mounted over itself and read-only."""
    subprocess.run(["mount", "--bind", str(path), str(path)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(path)], check=True)
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


@root_only
def test_a_read_only_mount_can_be_read_and_refuses_a_writer(tmp_path):
    run = tmp_path / "run"
    write(run)
    before = picture(run)
    try:
        with mounted(run):
            assert read(run) == STATE
            for path in (run, run / "new"):
                with pytest.raises(NotWritable, match="Read-only file system"):
                    write(path, 20)
    except (subprocess.CalledProcessError, FileNotFoundError):
        pytest.skip("needs the right to mount")
    assert picture(run) == before


def test_reading_a_run_changes_nothing_on_disk(tmp_path):
    write(tmp_path)
    before = picture(tmp_path)
    read(tmp_path)
    RunReader(access.for_reading(tmp_path)).verify()
    assert picture(tmp_path).keys() == before.keys()
    assert {path: entry[3] for path, entry in picture(tmp_path).items()} == {
        path: entry[3] for path, entry in before.items()
    }


def test_opening_deletes_the_remains_of_dead_writers_and_nothing_else(tmp_path):
    write(tmp_path)
    (generation,) = (tmp_path / "gen").iterdir()
    kept = {one for one in tmp_path.rglob("*") if not one.name.startswith(".probe-")}
    staged = ["LASTGOOD.json.1-2.tmp", "lastgood.json.1-2.tmp", "latest_ok.tmp", ".probe-7", "incarnations/x.1-2.tmp"]
    for name in [*staged, f"gen/{generation.name}/COMMIT.json.1-2.tmp", "notes.tmp"]:
        (tmp_path / name).write_bytes(b"half")
    with access.for_writing(tmp_path, "atomic_dirsync") as tier:
        RunWriter(tier, Inline())
    assert {*tmp_path.rglob("*")} == kept | {tmp_path / "notes.tmp"}


def test_a_save_deletes_nothing_that_exists_under_its_name(tmp_path):
    with access.for_writing(tmp_path, "atomic_dirsync") as tier:
        writer = RunWriter(tier, Inline())
        writer.begin(None)
        taken = tmp_path / layout.folder(writer.admit(10)) / layout.blob_name(0)
        taken.parent.mkdir(parents=True)
        taken.write_bytes(b"somebody's")
        with pytest.raises(NameTaken):
            save(writer, 10, STATE)
    assert taken.read_bytes() == b"somebody's"


def test_a_run_with_generations_refuses_a_save_that_names_no_parent(tmp_path):
    write(tmp_path)
    with access.for_writing(tmp_path, "atomic_dirsync") as tier:
        writer = RunWriter(tier, Inline())
        with pytest.raises(NotRestored):
            writer.admit(11)
    assert len([*(tmp_path / "incarnations").iterdir()]) == 1, "nothing was written"


def test_a_full_disk_deletes_a_generation_without_recording_the_reason(tmp_path, faulty_files):
    """Otherwise a full disk would stay full."""
    write(tmp_path, 10)
    write(tmp_path, 11)
    with access.for_writing(tmp_path, "atomic_dirsync") as tier:
        faulty_files.inject(Fault("open new", errno=errno.ENOSPC))
        commit.retire(tier, min(commit.survey(tier).generations))
    assert [at.step for at in commit.survey(access.for_reading(tmp_path)).generations] == [11]


# ---- the lock --------------------------------------------------------------------------------------------------

HOLDER = """
import os, sys, time
from lastgood.run import access
with access.for_writing(sys.argv[1], "atomic_dirsync"):
    if os.fork() == 0:  # what fork does in the child is done when it speaks
        os.write(1, b"%d\\n" % os.getpid())
    time.sleep(600)
"""


@pytest.fixture
def lock_holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of tmp_path/run and has forked a child."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            yield holder
        finally:
            holder.kill()
            os.kill(child, signal.SIGKILL)


def test_a_run_open_in_another_process_is_refused_and_left_unchanged(
    lock_holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    before = PosixFiles().list(str(tmp_path / "run"))
    with (
        pytest.raises(RunLocked, match=r"for writing in (process \d+|another process)"),
        access.for_writing(tmp_path / "run", "atomic_dirsync"),
    ):
        raise AssertionError("two writers")
    assert PosixFiles().list(str(tmp_path / "run")) == before


def test_the_lock_is_released_with_its_holder_while_a_forked_child_lives(
    lock_holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    """Data-loader workers are forked while the run is open, and flock belongs to the open file that they inherit: a
    worker that outlived its killed trainer kept the run locked for ever."""
    lock_holder.kill()
    lock_holder.wait()
    write(tmp_path / "run")


def test_a_child_process_being_started_does_not_keep_the_run_locked(tmp_path: Path) -> None:
    """Between fork and exec, a child that another thread starts has a copy of the lock's file, and no Python hook
    runs in it: a run that was closed and opened again in that instant was reported as open in another process."""
    run = tmp_path / "run"
    with access.for_writing(run, "atomic_dirsync"):
        files = [one for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
        (lock_fd,) = [int(one.name) for one in files if one.readlink() == run / ".lock"]
        copy = os.dup(lock_fd)
    try:
        write(run)
    finally:
        os.close(copy)

"""What the program of a rank may do besides training: fork, leave processes behind, and be a command or any script."""

from __future__ import annotations

import json
import os
import py_compile
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from agents import until
from lastgood.io import heartbeat
from lastgood.supervisor import error_files, watch
from lastgood.supervisor.rank_end import how_ended, reap_orphans
from lastgood.supervisor.watch import RankProcess
from several import FORKED

COMMAND = [str(Path(sys.executable).with_name("lastgood")), "run"]


def ran(folder: Path, script: str, *options: str, **settings: object) -> subprocess.CompletedProcess[str]:
    """Run a script that needs no torch, as one rank. Its first failure ends the job."""
    (folder / "train.py").write_text(textwrap.dedent(script))
    command = [*COMMAND, "--spawn", "--without-progress", "1", *options, "train.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60, **settings)  # type: ignore[call-overload, no-any-return]


def test_a_failed_attempt_leaves_no_named_memory_behind(tmp_path: Path) -> None:
    """Python's resource tracker removes what a program has left, also when that was killed. It was killed with the
    ranks, so that each attempt ended with FileExistsError."""
    script = f"""
        import os, signal, subprocess
        from multiprocessing.shared_memory import SharedMemory
        made = SharedMemory(name="lastgood-test-{os.getpid()}", create=True, size=4096)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            subprocess.Popen(["sleep", "1000"], close_fds=False)
            os.kill(os.getpid(), signal.SIGKILL)
        made.close()
        made.unlink()
    """
    left = Path(f"/dev/shm/lastgood-test-{os.getpid()}")
    try:
        (tmp_path / "train.py").write_text(textwrap.dedent(script))
        found = subprocess.run(
            [*COMMAND, "--spawn", "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert found.returncode == 0, found.stderr
        assert found.stderr.count("failed first: SIGKILL") == 1 and not left.exists()
    finally:
        left.unlink(missing_ok=True)


@pytest.mark.parametrize("end", ["raise ValueError('no display')", "sys.exit('nothing to clean')"])
@pytest.mark.parametrize("start", [[*COMMAND, "--spawn"], FORKED], ids=["new process", "forked"])
def test_a_failure_of_a_forked_child_is_none_of_its_rank(tmp_path: Path, end: str, start: list[str]) -> None:
    """It ended the rank, which trained on, or was named in place of what ended the rank later."""
    script = f"""
        import os, signal, sys
        if os.fork() == 0:
            {end}
        os.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    command = [*start, "--without-progress", "1", "train.py"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert found.returncode == 9 and "rank 0 failed first: SIGKILL" in found.stderr


def test_a_script_of_any_name_imports_what_lies_beside_it(tmp_path: Path) -> None:
    """`python train` does; `lastgood run train` found no module."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "beside.py").write_text("name = 'found'")
    (folder / "train").write_text("import beside, sys; print(beside.name, sys.argv[1:])")
    command = [*COMMAND, "--spawn", "project/train", "--fast"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout == "found ['--fast']\n"


def test_a_compiled_script_of_any_name_runs(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("name = 'found'")
    (tmp_path / "train.py").write_text("import beside; print(beside.name)")
    py_compile.compile(str(tmp_path / "train.py"), str(tmp_path / "tool"))
    found = subprocess.run([*COMMAND, "--spawn", "tool"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert found.stdout == "found\n", found.stderr


def test_orphans_of_a_rank_are_reaped_while_it_trains(tmp_path: Path) -> None:
    """They became children of the supervisor, and stayed zombies until the attempt ended: a script that starts uploads
    in the background used up the processes of its container."""
    script = """
        import os, pathlib, time
        for _ in range(5):
            os.system("true &")
        def zombies():
            found = [one.read_text().rpartition(")")[2].split() for one in pathlib.Path("/proc").glob("[0-9]*/stat")]
            return [one for one in found if one[0] == "Z" and int(one[1]) == os.getppid()]
        until = time.monotonic() + 30
        while zombies() and time.monotonic() < until:
            time.sleep(0.05)
        print(len(zombies()))
    """
    assert ran(tmp_path, script).stdout == "0\n"


def test_a_removed_folder_of_output_does_not_end_the_job(tmp_path: Path) -> None:
    """What cleans /tmp of old files had removed it in a long attempt, and the first failure after that ended the
    job."""
    script = """
        import os, pathlib, shutil, signal
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            for one in pathlib.Path(os.environ["TMPDIR"]).glob("lastgood-attempts-*"):
                shutil.rmtree(one)
            os.kill(os.getpid(), signal.SIGKILL)
        print("went on")
    """
    found = ran(tmp_path, script, "--without-progress", "2", env={**os.environ, "TMPDIR": str(tmp_path)})
    assert (found.returncode, found.stdout) == (0, "went on\n"), found.stderr


def test_closed_streams_take_no_output_of_ranks(tmp_path: Path) -> None:
    """The files of the output had the numbers of the closed streams, and were closed in the rank."""
    script = "import os; print('out', flush=True); os.write(2, b'err')"
    (tmp_path / "train.py").write_text(script)
    line = f"{shlex.join(FORKED)} --redirects 3 --log-dir logs train.py <&- >&- 2>&-"
    subprocess.run(["sh", "-c", line], cwd=tmp_path, check=True, timeout=60)
    (folder,) = tmp_path.glob("logs/*/attempt_0/0")
    assert [(folder / f"{name}.log").read_text() for name in ("stdout", "stderr")] == ["out\n", "err"]


def test_a_command_ends_by_a_pipe_that_nobody_reads(tmp_path: Path) -> None:
    """It had inherited that SIGPIPE is ignored, which Python sets: `yes | head -1` ran for ever."""
    command = [*COMMAND, "--no-python", "sh", "-c", "while :; do echo y; done 2>/dev/null | head -1"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (found.returncode, found.stdout) == (0, "y\n")


def test_a_warning_ends_no_command_and_reaches_its_handlers(tmp_path: Path) -> None:
    """SIGUSR1, by which Slurm warns, ended each process of the command, and counted as its failure."""
    line = "trap 'touch warned' USR1; sleep 1000 & touch begun; while [ ! -e warned ]; do sleep 0.05; done; "
    line += "kill -KILL $!; wait $!; echo $?"  # by which signal it has ended
    command = [*COMMAND, "--no-python", "sh", "-c", line]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as job:
        until((tmp_path / "begun").exists)
        job.send_signal(signal.SIGUSR1)
        assert job.communicate(timeout=60)[0] == f"{128 + signal.SIGKILL}\n" and job.returncode == 0


def test_a_command_that_has_no_handler_yet_gets_its_warning_later(tmp_path: Path) -> None:
    line = "touch begun; while [ ! -e sent ]; do sleep 0.05; done; trap 'touch warned' USR1; "
    line += "while [ ! -e warned ]; do sleep 0.05; done; echo warned"
    command = [*COMMAND, "--no-python", "sh", "-c", line]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as job:
        until((tmp_path / "begun").exists)
        job.send_signal(signal.SIGUSR1)
        (tmp_path / "sent").touch()
        assert job.communicate(timeout=60)[0] == "warned\n" and job.returncode == 0


def test_a_process_of_another_user_ends_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that sudo had started ignored the warning. That it may not be sent one ended the supervisor."""

    def refused(*_: object) -> None:
        raise PermissionError("not permitted")

    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        signal.sigwait([signal.SIGTERM])
        os._exit(0)
    try:
        until(lambda: os.getpgid(child) == child)
        monkeypatch.setattr(signal, "pidfd_send_signal", refused)
        monkeypatch.setattr(watch, "heeds", lambda *_: True)
        page = tmp_path / "page"
        assert watch.warn_groups([RankProcess(0, child, 0, tmp_path, page, heartbeat.read(str(page)))], 10) == []
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_rank_that_has_ended_stays_until_its_end_is_read(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os._exit(7)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    descriptor, page = os.pidfd_open(child), tmp_path / "page"
    try:
        one = RankProcess(0, child, descriptor, tmp_path, page, heartbeat.read(str(page)))
        reap_orphans([one])
        assert how_ended(one).code == 7
    finally:
        os.close(descriptor)
        os.waitpid(child, 0)


def left(folder: Path, content: object) -> error_files.ErrorLeft:
    (folder / "error.json").write_text(json.dumps(content))
    page = folder / "page"
    return error_files.left_by(RankProcess(0, 0, 0, folder, page, heartbeat.read(str(page))))


def test_a_long_error_loses_its_middle(tmp_path: Path) -> None:
    """It was searched for a minute, in which the supervisor heeded no signal."""
    text = "ValueError: " + "x" * 1_000_000 + " the end"
    found = left(tmp_path, {"message": {"message": text, "extraInfo": {"py_callstack": text, "monotonic": 5.0}}})
    for one in found[:2]:
        assert one.startswith("ValueError: xxx") and one.endswith(" the end")
        assert len(one) < error_files.TEXT_CHARACTERS + 100 and "characters left out" in one
    assert found.at_seconds == 5.0


@pytest.mark.parametrize(
    "content",
    [
        {"message": {"message": None, "extraInfo": {"py_callstack": ""}}},
        {"message": {"message": "x", "extraInfo": {"py_callstack": 7}}},
        {"message": {"message": "x", "extraInfo": None}},
        {"message": {"message": "x", "extraInfo": {"py_callstack": "", "monotonic": 10**400}}},
        {"message": 7},
        [7],
        7,
    ],
)
def test_an_error_file_of_another_form_counts_as_none(tmp_path: Path, content: object) -> None:
    """The supervisor ended with a traceback."""
    assert left(tmp_path, content) == ("", "", 0.0)
    (tmp_path / "error.json").write_text("[" * 100_000)
    page = tmp_path / "page"
    assert error_files.left_by(RankProcess(0, 0, 0, tmp_path, page, heartbeat.read(str(page)))).text == ""

"""Where the output of ranks goes, and what they get of the devices: as under torchrun."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lastgood.errors import Refused
from lastgood.policy.recovery import GAVE_UP
from lastgood.supervisor import devices
from lastgood.supervisor.outputs import STDERR, STDOUT, Outputs

pytestmark = pytest.mark.slow

SUPERVISOR = [str(Path(sys.executable).with_name("lastgood")), "run", "--spawn"]


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "print.py"
    path.write_text(
        "import os, sys\n"
        "print('1 %\\r2 %\\nlosses', os.environ['RANK'], end='')\n"
        "print('an apple', file=sys.stderr)\n"
        "print('a, pear', file=sys.stderr)\n"
    )
    return str(path)


def test_lines_of_a_tee_have_the_name_of_the_rank_and_go_to_a_file_too(tmp_path: Path, script: str) -> None:
    options = ["--nproc-per-node", "2", "--tee", "3", "--role", "job", "--log-dir", str(tmp_path / "logs")]
    filters = ["--duplicate-stderr-filters", "apple,none", "--duplicate-stdout-filters", "e,,s"]
    done = subprocess.run([*SUPERVISOR, *options, *filters, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    out = [f"[job{rank}]:{text}" for rank in (0, 1) for text in ("1 %", "2 %", f"losses {rank}")]
    assert sorted(done.stdout.splitlines()) == out
    assert sorted(done.stderr.splitlines()) == [
        f"[job{rank}]:a{text}" for rank in (0, 1) for text in (", pear", "n apple")
    ]
    (attempt,) = (tmp_path / "logs").glob("*/attempt_0")
    assert (attempt / "1/stdout.log").read_bytes() == b"1 %\r2 %\nlosses 1"
    assert sorted((attempt / "filtered_stderr.log").read_text().splitlines()) == ["[job0]:an apple", "[job1]:an apple"]
    assert (attempt / "filtered_stdout.log").read_text() == "", "the comma is a part of the text"


def test_the_console_gets_the_output_of_chosen_ranks_only(tmp_path: Path, script: str) -> None:
    options = [
        "--nproc-per-node",
        "2",
        "--tee",
        "0:1",
        "--local-ranks-filter",
        "1",
        "--log-dir",
        str(tmp_path / "logs"),
    ]
    done = subprocess.run([*SUPERVISOR, *options, script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1 %\n2 %\nlosses 1"), "without a name: it was not copied"
    assert done.stderr.count("an apple") == 1
    (file,) = (tmp_path / "logs").glob("*/attempt_0/0/stdout.log")
    assert file.read_bytes().endswith(b"losses 0")


def test_a_console_that_nobody_reads_does_not_hold_the_job(tmp_path: Path) -> None:
    script = tmp_path / "print.py"
    script.write_text("print('x' * 99 + '\\n' * 1, end='', flush=True)\nfor _ in range(9999): print('x' * 99)\n")
    options = ["--tee", "1", "--log-dir", str(tmp_path / "logs")]
    with subprocess.Popen([*SUPERVISOR, *options, str(script)], stdout=subprocess.PIPE) as job:
        assert job.wait(60) == 0
    (file,) = (tmp_path / "logs").glob("*/attempt_0/0/stdout.log")
    assert file.stat().st_size == 1_000_000


def test_a_line_of_the_supervisor_waits_for_no_reader(tmp_path: Path) -> None:
    """`lastgood run --tee 3 train.py 2>&1 | reader`, where the reader had stopped: the supervisor waited in the first
    line of its report for ever, and no rank was started again."""
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(1)")
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, bytes(4096))
    os.set_blocking(write, True)
    command = [*SUPERVISOR, "--without-progress", "1", "--tee", "3", "--log-dir", str(tmp_path / "logs"), str(script)]
    with subprocess.Popen(command, stdout=write, stderr=write) as job:
        try:
            assert job.wait(60) == GAVE_UP
        finally:
            job.kill()
    os.close(read)
    os.close(write)


def test_no_file_is_written_where_the_log_is_the_null_device(script: str) -> None:
    done = subprocess.run([*SUPERVISOR, "--log-dir", os.devnull, "-r", "3", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1 %\n2 %\nlosses 0")


def test_the_bits_of_an_option_choose_the_streams() -> None:
    outputs = Outputs(redirects={0: STDOUT}, tee={0: STDERR}, shown=frozenset({1}))
    assert outputs.to_file(0, STDOUT) and outputs.to_file(0, STDERR) and not outputs.to_file(1, STDOUT)
    assert outputs.to_console(1) and not outputs.to_console(0) and Outputs().to_console(0)


def test_a_rank_sees_its_own_device_as_number_0() -> None:
    assert devices.of_rank(1, [], True, {}) == {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "1"}
    assert devices.of_rank(1, [], True, {"CUDA_VISIBLE_DEVICES": "5, 7"})["CUDA_VISIBLE_DEVICES"] == "7"
    assert devices.of_rank(1, [[0], [2, 3]], False, {}) == {devices.CPUS: "2,3"}
    with pytest.raises(Refused, match="local rank 1 has no device"):
        devices.of_rank(1, [], True, {"CUDA_VISIBLE_DEVICES": "5"})


def test_a_rank_is_bound_to_processors_and_does_not_see_how(tmp_path: Path) -> None:
    (cpu, *_) = os.sched_getaffinity(0)
    script = tmp_path / "bound.py"
    script.write_text(f"import os; assert os.sched_getaffinity(0) == {{{cpu}}} and {devices.CPUS!r} not in os.environ")
    done = subprocess.run([*SUPERVISOR, str(script)], env={**os.environ, devices.CPUS: str(cpu)})
    assert done.returncode == 0


def test_the_number_of_gpus_is_that_of_torch() -> None:
    if torch.cuda.is_available():
        assert devices.count("gpu") == torch.cuda.device_count()
    else:
        with pytest.raises(Refused, match="--nproc-per-node gpu: ValueError: Cuda is not available"):
            devices.count("gpu")

"""`lastgood run`: a rank for which the others wait before the run is open."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lastgood.policy.recovery import GAVE_UP
from lastgood.supervisor.placement import free_port

pytestmark = pytest.mark.slow

LIMITS = ["--hang-timeout", "1", "--hang-long-timeout", "3", "--max-restarts", "0"]
COMMAND = [str(Path(sys.executable).with_name("lastgood")), "run", *LIMITS]
PREPARE = """
    import os, sys, time
    import torch, torch.distributed as dist

    rank = int(os.environ["RANK"])

    def download():
        time.sleep(1000)

    def compute():
        until = time.process_time() + 0.2
        while time.process_time() < until:
            torch.ones(64, 64) @ torch.ones(64, 64)
"""


def script(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(PREPARE) + textwrap.dedent(text))
    return str(path)


@pytest.mark.parametrize(
    ("late", "text"),
    [
        (
            2,
            """
            if rank == 2:
                download()
            dist.init_process_group("gloo")
            """,
        ),
        (
            0,
            """
            dist.init_process_group("gloo")
            if rank == 0:
                download()
            dist.barrier()
            """,
        ),
    ],
    ids=["process group", "barrier"],
)
def test_a_rank_that_never_comes_to_the_others_is_named(tmp_path: Path, late: int, text: str) -> None:
    """Only torch's own timeouts ended such a job: after half an hour under gloo, and three times."""
    done = subprocess.run([*COMMAND, "--nproc-per-node", "3", script(tmp_path, text)], capture_output=True, text=True)
    assert done.returncode == GAVE_UP
    report = done.stderr[done.stderr.index("lastgood: attempt 1") :].splitlines()
    assert f"rank {late} has not opened its run, at " in report[0] and "in download (others have waited" in report[0]
    assert "raise --hang-long-timeout" in report[0]
    assert "in download" in report[1] and "train.py" in report[2] and "in <module>" in report[2], (
        "the stack of the rank"
    )


def test_a_rank_of_another_node_that_never_comes_is_named(tmp_path: Path) -> None:
    path = script(tmp_path, 'download() if rank == 1 else dist.init_process_group("gloo")')
    port = str(free_port("127.0.0.1"))
    nodes = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    commands = [[*COMMAND, *nodes, "--node-rank", str(node), path] for node in range(2)]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    reports = [one.communicate()[1] for one in started]
    assert [one.returncode for one in started] == [GAVE_UP, GAVE_UP], reports
    assert "attempt 1: rank 1 has not opened its run, at " in reports[0] and "in download" in reports[0]


@pytest.mark.parametrize(
    "text",
    [
        """
        time.sleep(5)
        dist.init_process_group("gloo")
        """,
        """
        dist.init_process_group("gloo")
        for _ in range(12):
            time.sleep(0.4 if rank == 0 else 0.0)
            dist.barrier()
            compute()
        """,
        """
        if "AGAIN" not in os.environ:
            os.environ["AGAIN"] = "1"
            os.execv(sys.executable, [sys.executable, *sys.argv])
        time.sleep(3 if rank == 0 else 0)
        dist.init_process_group("gloo")
        """,
    ],
    ids=["all prepare", "they wait and compute by turns", "it becomes another process"],
)
def test_ranks_that_prepare_for_longer_than_the_limit_do_not_hang(tmp_path: Path, text: str) -> None:
    done = subprocess.run([*COMMAND, "--nproc-per-node", "3", script(tmp_path, text)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

"""The multi-rank examples under torchrun: unmodified, started a second time, and restarted after a kill."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lastgood

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def torchrun(processes, script, run, steps, *more, restarts=0):
    options = ["--standalone", "--nproc-per-node", str(processes), "--max-restarts", str(restarts)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, script, run, "--steps", str(steps), *more],
        # Otherwise gloo may wait for dead ranks (docs/ranks.md).
        env=os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and f"step {steps}, loss " in done.stdout, done.stderr


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tensor_parallel", "dcp_drop_in"])
def test_the_examples_run_unmodified_and_resume(tmp_path, name):
    for processes, steps in ((2, 40), (1, 60)):
        torchrun(processes, EXAMPLES / f"{name}.py", tmp_path / "run", steps)
    assert [one.step for one in lastgood.open(tmp_path / "run").generations()] == [20, 40, 60]


KILLED_ONCE = """
import os, runpy, signal, sys
import lastgood

step = lastgood.Checkpointer.step

def killed(self, n):
    step(self, n)
    if n == 45 and (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
        self.wait()
        os.kill(os.getpid(), signal.SIGKILL)

lastgood.Checkpointer.step = killed
runpy.run_path(sys.argv.pop(), run_name="__main__")
"""


def test_a_job_restarted_by_torchrun_after_a_killed_rank_resumes(tmp_path):
    (tmp_path / "killed.py").write_text(KILLED_ONCE)
    torchrun(2, tmp_path / "killed.py", tmp_path / "run", 60, EXAMPLES / "ddp.py", restarts=1)
    last = lastgood.open(tmp_path / "run").generations()[-1].commit
    assert (last.step, last.order, last.continues.step) == (60, 2, 40)

"""The multi-rank examples: unmodified, started a second time, and restarted by torchrun itself after a kill."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lastgood
from zygote import zygote_of

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
zygote = zygote_of("sklearn.datasets", "torch._dynamo", "torch.distributed.fsdp", "lastgood.loop.checkpointer")


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tensor_parallel", "dcp_drop_in"])
def test_the_examples_run_unmodified_and_resume(zygote, tmp_path, name):
    output = tmp_path / "output.txt"
    for ranks, steps in ((2, 40), (1, 60)):
        wishes = {"ranks": ranks, "arguments": ["--steps", str(steps)]}
        code = zygote.live(EXAMPLES / f"{name}.py", tmp_path / "run", output, **wishes)
        assert code == 0 and f"step {steps}, loss " in output.read_text(), output.read_text()
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
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", tmp_path / "killed.py", tmp_path / "run"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, "--steps", "60", EXAMPLES / "ddp.py"],
        # Otherwise gloo may wait for dead ranks (docs/ranks.md).
        env=os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "step 60, loss " in done.stdout, done.stderr
    last = lastgood.open(tmp_path / "run").generations()[-1].commit
    assert (last.step, last.order, last.continues.step) == (60, 2, 40)

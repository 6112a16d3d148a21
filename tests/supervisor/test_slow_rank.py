"""A slow rank of a job is named: measured steps on a clock of the test, and real ranks."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from commands import Call
from lastgood.io.heartbeat import Position, Progress
from lastgood.policy.slow import Pace
from lastgood.run import access
from lastgood.supervisor import attempt_log
from lastgood.supervisor.attempt_log import Slow
from lastgood.supervisor.slow_watch import SlowWatch
from lastgood.supervisor.watch import RankProcess

LOOK_SECONDS = 0.5


class Ranks:
    """Two ranks whose pages a test moves. No process belongs to them, so nothing is known of where they are."""

    def __init__(self, tmp_path: Path) -> None:
        shown = Progress(
            *(1.0, 1.0, 1.0, 0, "", 1.0, 1, 1.0, 0, "", 1.0, 0.1, "", None, None, None), position=Position(0, 0, 0)
        )
        self._ranks = [RankProcess(rank, 0, -1, tmp_path, tmp_path / "page", shown) for rank in (0, 1)]
        self._watch, self._now = SlowWatch(Pace(window_seconds=1.0)), 100.0

    def train(self, steps: int, seconds: float, phase: bool = False) -> list[Slow]:
        """Look on while steps take so long. Returns what was reported. `phase`: one is open all that time."""
        found = list[Slow]()
        for _ in range(steps):
            for _ in range(int(seconds / LOOK_SECONDS)):
                self._now += LOOK_SECONDS
                for one in self._ranks:
                    one.shown = one.shown._replace(phase_began=self._now if phase else None)
                found += self._watch.poll(self._ranks, self._now)
            for one in self._ranks:
                one.shown = one.shown._replace(step=one.shown.step + 1)
        return found


@pytest.mark.slow
def test_steps_that_take_longer_are_reported_once_and_are_usual_then(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    assert ranks.train(15, 1.0) == [] and ranks.train(2, 30.0) == [], "two long steps are no slow job"
    assert ranks.train(15, 1.0) == []
    (one,) = ranks.train(30, 3.0)
    assert (one.step_seconds, one.usual_step_seconds, one.ranks) == (3.0, 1.0, [])
    assert "no rank here differs" in one.what
    assert len(ranks.train(30, 9.0)) == 1, "slower than what has become usual"


def test_phases_do_not_make_a_job_slow(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    for _ in range(8):
        assert ranks.train(3, 1.0) == [] and ranks.train(3, 20.0, phase=True) == []


@pytest.mark.slow
def test_a_rank_that_becomes_slow_is_named_with_the_line(tmp_path: Path, call: Call) -> None:
    script, run = tmp_path / "train.py", tmp_path / "run"
    text = """
        import sys, time
        import torch, torch.distributed as dist
        import lastgood

        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))

        def load(n):
            time.sleep(0.1 if dist.get_rank() == 1 and n > 180 else 0.02)
            return torch.ones(2, 4)

        with lastgood.Checkpointer(sys.argv[1], {"model": model}, cadence=lastgood.Every(steps=1000)) as ckpt:
            for n in range(ckpt.restore().step + 1, 260):
                model(load(n)).sum().backward()
                ckpt.step(n)
    """
    script.write_text(textwrap.dedent(text))
    lastgood = str(Path(sys.executable).with_name("lastgood"))
    command = [lastgood, "run", "--nproc-per-node", "2", "--slow-window", "0.3", str(script), str(run)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (attempt,) = attempt_log.read(access.for_reading(str(run)))
    named = [(rank.rank, "train.py" in rank.at and "in load" in rank.at) for one in attempt.slow for rank in one.ranks]
    assert named == [(1, True)] and "rank 1 is slow" in done.stderr
    assert "rank 1 is slow" in " ".join(call("attempts", run)[1].split())

"""Where the time of an attempt went: the seconds of its phases, and of steps that were trained again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from commands import Call
from lastgood.io import heartbeat
from lastgood.io.heartbeat import Progress
from lastgood.supervisor import merged, reported
from lastgood.supervisor.attempt import Lived

TRAINING = """
import sys
import torch, lastgood

run, last, fails = sys.argv[1], int(sys.argv[2]), len(sys.argv) > 3
state = {"w": torch.zeros(4)}
with lastgood.Checkpointer(run, state, cadence=lastgood.Every(steps=4), save_on_exit=False) as ckpt:
    for n in range(ckpt.restore().step + 1, last + 1):
        if fails and n == last:
            raise ValueError("the last step fails")
        state["w"] += 1
        save = ckpt.step(n)
        if save is not None:
            save.committed()
"""


def shown(**changes: object) -> Progress:
    """The page of a rank that restored step 10 at 20.0 s, and completed 10 steps up to 50.0 s, the first in 12 s."""
    page = heartbeat.read("/no/such/page")
    known = {"begun": 1.0, "opened": 15.0, "restored": 20.0, "restored_step": 10, "first": 32.0, "step": 20}
    return page._replace(**known, beat=50.0)._replace(**changes)


@pytest.mark.parametrize(("replayed", "seconds"), [(1, 12.0), (4, 18.0), (10, 30.0), (15, 30.0)])
def test_steps_that_were_trained_again_take_their_share_of_the_time(replayed: int, seconds: float) -> None:
    """The first one may take longer. No more are trained again than are trained."""
    lived = Lived(0.0, started=0.5, progress=[shown()])
    assert reported.phases(lived, replayed)["replayed steps"] == seconds
    assert "replayed steps" not in reported.phases(lived, 0)


def test_an_attempt_that_trains_no_step_trains_none_again() -> None:
    lived = Lived(0.0, started=0.5, progress=[shown(first=None, beat=None, step=10)])
    assert "replayed steps" not in reported.phases(lived, 5)


def test_a_rendezvous_takes_as_long_as_the_last_node_waited() -> None:
    """A node in reserve may have waited for hours."""
    nodes = [Lived(0.0, rendezvous=seconds) for seconds in (7200.0, 1.5)]
    reports = {one: merged.decoded(merged.encoded("h", False, lived)) for one, lived in enumerate(nodes)}
    assert reported.phases(merged.merged(reports, None), 0)["rendezvous"] == 1.5
    assert "rendezvous" not in reported.phases(Lived(0.0), 0), "one node waits for no other"


@pytest.mark.parametrize("failed", [None, 58.0])
@pytest.mark.parametrize(
    "page", [{}, {"first": None, "beat": None}, dict.fromkeys(("begun", "opened", "restored", "first", "beat"))]
)
def test_the_phases_of_an_attempt_add_up_to_its_seconds(failed: float | None, page: dict[str, None]) -> None:
    """Of 12.0 s of an attempt, 4.3 s had a name: not the start of its processes, nor what came after the last step."""
    lived = Lived(0.25, started=0.5, failed=failed, over=60.0, progress=[shown(**page)])
    found = reported.phases(lived, 3)
    assert sum(found[name] for name in found if name != reported.REPLAYED) == 60.0 - 0.25
    assert found.keys() <= {*reported.PHASES}


@pytest.mark.slow
def test_a_new_job_shows_which_steps_of_the_last_one_it_trained_again(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lastgood attempts` had replayed=0 for each resume after a job that was ended."""
    script, run = tmp_path / "train.py", tmp_path / "run"
    script.write_text(TRAINING)
    command = [str(Path(sys.executable).with_name("lastgood")), "run", "--max-restarts", "0", str(script), str(run)]
    assert subprocess.run([*command, "8", "fails"], check=False).returncode == 9
    assert subprocess.run([*command, "8"], check=False).returncode == 0
    first, second = json.loads(call("attempts", "--json", run)[1])["attempts"]
    assert (first["last_step"], second["restored_step"], second["replayed_steps"]) == (7, 4, 3)
    assert 0 < second["phases"]["replayed steps"] <= second["phases"]["first step"] + second["phases"]["training"]
    monkeypatch.setenv("COLUMNS", "80")
    lines = [line.split() for line in call("attempts", run)[1].splitlines()]
    numbers = [f"{second['phases'][name]:.1f}" for name in reported.PHASES if name in second["phases"]]
    assert ["2", *numbers] in lines, "a row of phases for each attempt, on a narrow terminal too"

"""The benchmarks of restarts and of what watching costs, and the campaign of false alarms, judge and run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lastgood.supervisor.attempt_log import Attempt, Cause, Slow, SlowRank
from lastgood_lab import overhead, restart
from lastgood_lab.campaigns.false_alarms import judged
from lastgood_lab.restart_notes import FAULT, FAULT_STEP, MARKS, Note, restarted


def noted(at: dict[str, tuple[float, float]], step: int = FAULT_STEP) -> list[Note]:
    """The notes of two ranks: a fault at 10 s, and what each reached when in its second attempt."""
    first = [Note("began", 0, rank, 0, 1.0) for rank in (0, 1)]
    second = [Note(what, 1, rank, step, at[what][rank]) for what in MARKS for rank in (0, 1)]
    later = [Note("step", 1, rank, step + 1, 90.0) for rank in (0, 1)]
    return [*first, Note(FAULT, 0, 1, 0, 10.0), *second, *later]


TIMES = {
    "began": (11.0, 12.0),
    "imported": (13.0, 12.5),
    "joined": (14.0, 14.0),
    "restored": (15, 17),
    "step": (18, 20),
}


def test_a_restart_ends_when_the_last_rank_has_a_new_step() -> None:
    found = restarted(noted(TIMES))
    assert found.seconds == 10.0
    assert found.phases == [2.0, 1.0, 1.0, 3.0, 3.0]


def test_a_restart_that_repeats_steps_is_not_measured() -> None:
    with pytest.raises(ValueError, match="'step'"):
        restarted(noted(TIMES, step=FAULT_STEP - 1))
    with pytest.raises(ValueError, match="'joined'"):
        restarted([one for one in noted(TIMES) if one[:3] != ("joined", 1, 1)])


def test_causes_and_named_ranks_are_false_alarms_and_slow_times_are_not() -> None:
    rank = SlowRank(rank=2, samples=6, at="train.py")
    slow = [
        Slow(step=5, step_seconds=2.0, usual_step_seconds=1.0, ranks=ranks, what=what)
        for ranks, what in (([rank], "rank 2 is slow"), ([], "all are slower"))
    ]
    calm: dict[str, Any] = {"format": 1, "number": 1, "job": "a", "host": "h", "command": [], "ranks": 4, "phases": {}}
    calm |= {"began_at": 0.0, "seconds": 1.0, "restored_step": 0, "last_step": 9, "replayed_steps": 0, "answer": ""}
    hang = Cause(kind="hang", rank=3, code=-9, what="hangs")
    found = judged([Attempt(**calm, cause=hang), Attempt(**calm, cause=None, slow=slow)])
    assert found == (["rank 3: hangs"], ["rank 2 is slow"], ["all are slower"])


@pytest.mark.long
@pytest.mark.slow
def test_bench_restart_measures_a_crash_of_a_real_job(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart, "RANKS", 2)
    monkeypatch.setattr(restart, "FAULTS", (restart.CRASH,))
    monkeypatch.setattr(restart, "CONTENDERS", {"lastgood run, memory": restart.MEMORY})
    monkeypatch.setattr(restart, "OURS", restart.CONTENDERS)
    code, text, err = bench("restart", "--out", tmp_path, "--rounds", 1, "--json")
    assert code == 0, err
    (row,) = json.loads(text)["rows"]
    assert sum(row["phases"]) == pytest.approx(row["seconds"]) and row["start"] > 0 and row["tear_down"] > 0
    assert not list(tmp_path.glob("bench-*")), "the run is deleted"


@pytest.mark.slow
def test_bench_overhead_runs_small(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "WORLDS", (1,))
    code, text, err = bench("overhead", "--out", tmp_path, "--rounds", 1, "--blocks", 1, "--json")
    assert code == 0, err
    (row,) = json.loads(text)["rows"]
    assert [sorted(item) for item in row["segments"]] == [sorted(overhead.VARIANTS)] * overhead.SEGMENTS

"""The sizing formulas reproduce every figure of the two designs they come from, or state the correction."""

from __future__ import annotations

import itertools
import json
import math
import random

import pytest

from lastgood.cli.app import main
from lastgood.errors import Refused
from lastgood.policy import sizing
from lastgood.policy.sizing import Job

CHAPTER = Job(mtbf=sizing.mtbf_seconds(180, 2048), stall=120)
"""2,048 GPUs that fail every 180 days each; a checkpoint that takes two minutes of training"""


def planned(capsys, *arguments: str) -> dict[str, object]:
    assert main(["plan", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_trillion_parameters_take_14_tb_and_stall_8000_writers_for_70_ms(capsys):
    rates = ["--copy-rate", "25GB", "--write-rate", "500GB", "--restore-rate", "store=80GB"]
    found = planned(capsys, "--parameters", "1e12", "--ranks", "8000", *rates)
    assert found["state_bytes"] == 14e12 and found["shard_bytes"] == 1.75e9
    assert found["stall_seconds"] == pytest.approx(0.070) and found["write_seconds"] == pytest.approx(28)
    assert found["restore_seconds"] == {"store": 175.0}
    assert planned(capsys, "--state-bytes", "10TB", "--restore-rate", "store=80GB")["restore_seconds"] == {
        "store": 125.0
    }


def test_a_30_s_save_and_failures_every_30_minutes_give_5_5_minutes():
    assert Job(mtbf=1800, stall=30).young / 60 == pytest.approx(5.48, abs=0.01)


def test_the_example_cluster_fails_every_7593_s_and_saves_every_1350_s(capsys):
    assert CHAPTER.mtbf == pytest.approx(7593.75)
    assert CHAPTER.young == pytest.approx(1350)  # the design prints 1,351
    assert CHAPTER.wasted_first_order(1350) == pytest.approx(0.178, abs=5e-4)
    found = planned(capsys, "--device-days", "180", "--devices", "2048", "--stall-seconds", "120", "--run-days", "55")
    assert found["failures"] == pytest.approx(625.8, abs=0.1)  # the design prints 660
    assert found["young_seconds"] == pytest.approx(1350)


@pytest.mark.parametrize(
    ("minutes", "wasted", "useful", "breaks_down"),
    [
        (5, 0.4198, 0.6945, True),  # C is not small against tau
        (15, 0.1926, 0.8244, False),  # the design prints a different total
        (22.5, 0.1778, 0.8323, False),
        (60, 0.2704, 0.7500, False),
        (240, 0.9565, 0.3288, True),  # the design prints more than 100 %
    ],
)
def test_the_interval_table_marks_where_the_first_order_formula_fails(minutes, wasted, useful, breaks_down):
    interval = 60 * minutes
    assert CHAPTER.wasted_first_order(interval) == pytest.approx(wasted, abs=5e-4)
    assert CHAPTER.useful(interval) == pytest.approx(useful, abs=5e-4)
    assert CHAPTER.breaks_down(interval) is breaks_down


def test_the_last_row_is_negative_only_for_restarts_of_330_s_or_more():
    assert Job(CHAPTER.mtbf, 120, restart=329).wasted_first_order(14400) < 1
    assert Job(CHAPTER.mtbf, 120, restart=331).wasted_first_order(14400) > 1


def test_a_failure_per_180_days_and_gpu_is_one_per_16_minutes_on_16384():
    assert sizing.mtbf_seconds(180, 16384) / 60 == pytest.approx(15.8, abs=0.05)
    assert sizing.mtbf_seconds(5.8 * 365, 16384) / 3600 == pytest.approx(3.1, abs=0.05)


def test_a_short_stall_leaves_the_write_time_as_the_bound_of_the_interval():
    job = Job(mtbf=1800, stall=0.070, write=28)
    assert job.young == pytest.approx(15.9, abs=0.05) and job.shortest == 28 and job.best == 28
    assert Job(mtbf=1800, stall=0.070, write=28, in_flight=2).best == pytest.approx(15.9, rel=0.01)


def test_a_failure_loses_the_age_of_the_newest_durable_state():
    job = Job(mtbf=7200, stall=1, write=60, restart=30)
    alone = Job(mtbf=7200, stall=1)
    assert job.wasted_first_order(600) - alone.wasted_first_order(600) == pytest.approx(90 / 7200)
    assert job.wasted_first_order(600) == pytest.approx(1 / 600 + (300 + 60 + 30) / 7200)


@pytest.mark.parametrize(
    "job", [CHAPTER, Job(mtbf=1000, stall=10, write=120, in_flight=2, restart=60), Job(mtbf=300, stall=30, restart=200)]
)
def test_the_expected_loss_matches_simulated_failures(job):
    chance, interval = random.Random(1), 1.5 * job.young
    useful = wall = 0.0
    for _ in range(60_000):
        wall += (lived := chance.expovariate(1 / job.mtbf))
        useful += interval * max(0, math.floor((lived - job.write) / (interval + job.stall)))
        while (again := chance.expovariate(1 / job.mtbf)) < job.restart:
            wall += again
        wall += job.restart
    assert useful / wall == pytest.approx(job.useful(interval), rel=0.02)


@pytest.mark.parametrize("job", [CHAPTER, Job(mtbf=1000, stall=10), Job(mtbf=100, stall=90), Job(mtbf=1e6, stall=0.01)])
def test_the_best_interval_is_optimal_and_daly_is_nearer_to_it_than_young(job):
    best = job.useful(job.best)
    assert all(job.useful(job.best * share) <= best for share in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0))
    assert abs(job.daly - job.best) <= abs(job.young - job.best)


def test_a_hopelessly_long_interval_does_not_overflow():
    assert Job(mtbf=1, stall=1).useful(1e6) == 0
    assert Job(mtbf=1, stall=60).best == pytest.approx(1) and Job(mtbf=1, stall=60).daly == 1


@pytest.mark.parametrize(
    "wrong", [{"mtbf": 0}, {"stall": -1}, {"mtbf": math.inf}, {"write": -1}, {"restart": math.nan}, {"in_flight": 0}]
)
def test_impossible_job_sizes_are_refused(wrong):
    with pytest.raises(Refused):
        Job(**{"mtbf": 100, "stall": 1, **wrong})


def test_the_printed_table_names_its_doubtful_values(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", "--device-days=180", "--devices=2048", "--stall-seconds=120", "--minutes=5,240"]) == 0
    out = capsys.readouterr().out
    assert "1,350 s (22.5 min)" in out and "17.8 %" in out and "Young" in out
    assert [line.split()[0] for line in out.splitlines() if line.rstrip().endswith("~")] == ["300", "14,400"]
    assert "~ here the first order breaks down" in out
    assert main(["plan", "--mtbf-seconds=1800", "--stall-seconds=0.07", "--write-seconds=28", "--minutes=0.1"]) == 0
    assert "! below Tw / N: saves queue up" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "answer"),
    [
        ([], "--parameters"),
        (["--ranks=8"], "--mtbf-seconds"),
        (["--state-bytes=1GB", "--restore-rate=fast"], "NAME=SIZE"),
        (["--mtbf-seconds=9", "--minutes=x"], "not a number above zero"),
        (["--mtbf-seconds=9", "--minutes=5"], "--stall-seconds"),
    ],
)
def test_an_empty_or_invalid_plan_prints_how_to_call_it(wrong, answer, capsys):
    assert main(["plan", *wrong]) == 2
    assert answer in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["0", "-1", "nan", "inf", "1e300", "1e-300"])
def test_a_plan_takes_no_number_that_it_cannot_compute_with(wrong, capsys):
    """Very large and very small numbers ended in a ZeroDivisionError, or in JSON with an infinity."""
    assert main(["plan", "--mtbf-seconds=1e4", f"--stall-seconds={wrong}"]) == 2
    assert f"{wrong!r} is not a number above zero" in capsys.readouterr().err


def test_the_extreme_numbers_of_a_plan_can_be_computed_with(capsys):
    for given in itertools.product(("1e-9", "1e18"), repeat=5):
        names = ("--stall-seconds", "--mtbf-seconds", "--write-seconds", "--step-seconds", "--parameters")
        assert main(["plan", *(f"{name}={one}" for name, one in zip(names, given, strict=True)), "--json"]) == 0
    assert "Infinity" not in capsys.readouterr().out

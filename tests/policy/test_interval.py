"""The interval of cadence="auto": from the cost of a save, an expected time between failures, and those observed."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgood.errors import Refused
from lastgood.policy.failures import Failures, Life, observed
from lastgood.policy.interval import Rule
from lastgood.policy.sizing import Job

HOUR = 3600.0


def life(seconds: float = HOUR, last_step: int = 0, cause: str = "", ranks: int = 4, trained: bool = True) -> Life:
    return Life(seconds, ranks, trained, last_step, cause)


# ---- how often a job fails ---------------------------------------------------------------------------------------


def test_an_expectation_counts_as_much_as_one_observed_failure() -> None:
    assert Failures(mtbf=HOUR).mean_seconds == HOUR
    assert Failures(HOUR, seconds=3 * HOUR, count=1).mean_seconds == 2 * HOUR
    assert Failures(HOUR, seconds=9 * HOUR).mean_seconds == 10 * HOUR, "no failure in nine hours"
    assert Failures(HOUR, seconds=1000 * HOUR, count=100).mean_seconds == pytest.approx(9.9 * HOUR, rel=0.01)


def test_without_an_expectation_nothing_is_known_before_a_failure() -> None:
    assert Failures(seconds=9 * HOUR).mean_seconds is None
    assert Failures(seconds=9 * HOUR, count=3).mean_seconds == 3 * HOUR


@pytest.mark.parametrize(
    ("lives", "count", "hours"),
    [
        ([life(cause="signal SIGKILL", last_step=7), life(cause="signal SIGKILL", last_step=9)], 2, 2),
        ([life(cause="exception RuntimeError", last_step=7)] * 3 + [life(cause="hang", last_step=7)], 1, 4),
        ([life(cause="exception lastgood.errors.TrainingDiverged")], 0, 1),
        ([life(), life(cause="hang")], 1, 2),  # done, or preempted with a last save, is no failure
        ([life(cause="exit code 1", trained=False), life(cause="hang", last_step=3)], 1, 1),
        ([life(cause="hang", ranks=2)], 1, 0.5),  # an hour of two ranks is half an hour of four
        ([], 0, 0),
    ],
)
def test_only_failures_that_come_at_random_are_counted(lives: list[Life], count: int, hours: float) -> None:
    assert observed(lives, ranks=4) == Failures(None, hours * HOUR, count)


@pytest.mark.parametrize("wrong", [{"mtbf": 0}, {"mtbf": math.nan}, {"seconds": -1}, {"count": -1}])
def test_impossible_failures_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(Refused):
        Failures(**wrong)


# ---- the interval ------------------------------------------------------------------------------------------------

COSTS = st.floats(0, 100), st.floats(0.001, 1000), st.integers(1, 8)


@given(*COSTS, st.floats(1, 1e7))
def test_an_expected_mtbf_gives_the_interval_that_loses_least(c: float, tw: float, n: int, mtbf: float) -> None:
    found = Rule(Failures(mtbf)).interval(c, tw, n).seconds
    assert found == (Job(mtbf, c, tw, n).best if c else tw / n)


@given(*COSTS, st.none() | st.floats(1, 1e7), st.none() | st.floats(0.001, 0.9), st.integers(0, 5), st.floats(1, 1e6))
def test_no_interval_is_below_tw_by_n(
    c: float, tw: float, n: int, mtbf: float | None, overhead: float | None, count: int, longest: float
) -> None:
    rule = Rule(Failures(mtbf, 1000.0, count), overhead, longest)
    slowed = rule.interval(c, tw, n).seconds * (1 + (rule.allowed or 0))
    assert slowed >= tw / n * (1 - 1e-12)


def test_failures_only_shorten_the_interval_of_a_budget() -> None:
    seldom, often = Failures(seconds=100 * HOUR, count=1), Failures(seconds=HOUR, count=10)
    assert Rule().interval(3.0, 1.0, 1).seconds == pytest.approx(100), "3 % of 100 s"
    assert Rule(seldom).interval(3.0, 1.0, 1).seconds == pytest.approx(100)
    shorter = Rule(often).interval(3.0, 1.0, 1)
    assert shorter.seconds == Job(360.0, 3.0).best < 50 and shorter.why == "the least time is lost so"
    assert Rule(often, overhead=0.03).interval(3.0, 1.0, 1).seconds == pytest.approx(100), "this was demanded"


def test_a_demanded_overhead_bounds_what_an_mtbf_permits() -> None:
    often = Failures(mtbf=360.0)
    assert Rule(often, overhead=0.03).interval(3.0, 1.0, 1).seconds == pytest.approx(100)
    assert Rule(often, overhead=0.5).interval(3.0, 1.0, 1).seconds == Job(360.0, 3.0).best


def test_no_interval_outlasts_the_time_in_which_a_save_must_be_durable() -> None:
    seldom = Failures(mtbf=1e6)
    assert Rule(seldom).interval(30.0, 1.0, 1).seconds > 5000
    assert Rule(seldom, longest_seconds=1800.0).interval(30.0, 1.0, 1).seconds == 1800


# ---- what it is good for: simulated failures ---------------------------------------------------------------------


def useful(lives: list[float], interval_of, stall: float, write: float) -> float:
    """The part of all time that is training which no failure destroys. `interval_of`: lives so far -> the interval."""
    done = 0.0
    for number, lived in enumerate(lives):
        interval = interval_of(lives[:number])
        done += interval * max(0, math.floor((lived - write) / (interval + stall)))
    return done / sum(lives)


@pytest.mark.parametrize("mtbf", [600.0, 3600.0, 40_000.0])
def test_after_a_wrong_guess_little_time_is_lost_to_the_best_interval(mtbf: float) -> None:
    """The true mean is `mtbf`. A guess that is sixteen times too long or too short is corrected by 40 failures."""
    chance, stall, write = random.Random(20), 2.0, 15.0
    lives = [chance.expovariate(1 / mtbf) for _ in range(40)]

    def learned(guess: float | None):
        return lambda seen: Rule(Failures(guess, sum(seen), len(seen))).interval(stall, write, 1).seconds

    best = max(useful(lives, lambda _, tau=tau: tau, stall, write) for tau in (15 * 1.1**k for k in range(70)))
    for guess in (mtbf, 16 * mtbf, mtbf / 16):
        assert useful(lives, learned(guess), stall, write) > 0.98 * best
    stubborn = Rule(Failures(16 * mtbf)).interval(stall, write, 1).seconds
    assert useful(lives, lambda _: stubborn, stall, write) < useful(lives, learned(16 * mtbf), stall, write)

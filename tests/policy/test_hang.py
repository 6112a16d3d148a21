"""When ranks are taken for hung, and which one is behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lastgood.errors import Refused
from lastgood.policy.hang import FIRST_STEP, SAVE, START, STEP, Limits, Signs, Stuck, behind, described, silent

TRAINS = Signs(0, since=100.0, where=STEP, step=7, longest_seconds=10.0)
WAITS = ('File "/venv/torch/autograd/graph.py", line 865 in _engine_run_backward',)
OWN = ('File "/home/me/train.py", line 20 in batch',)


@pytest.mark.parametrize(
    ("one", "limit"),
    [
        (replace(TRAINS, longest_seconds=0.1), 60.0),
        (replace(TRAINS, longest_seconds=0.0), 3600.0),
        (TRAINS, 200.0),
        (replace(TRAINS, where=START), 3600.0),
        (replace(TRAINS, where=FIRST_STEP), 3600.0),
        (replace(TRAINS, where=SAVE), 3600.0),
        (replace(TRAINS, where="eval"), 3600.0),
        (replace(TRAINS, where="sampling"), 60.0),
        (replace(TRAINS, where="export"), 800.0),
    ],
)
def test_a_rank_hangs_after_a_multiple_of_what_it_has_needed_so_far(one: Signs, limit: float) -> None:
    completed = {"sampling": 1.0, "export": 40.0, SAVE: 1.0}
    assert silent([one], 100.0 + limit, Limits(), completed) is None
    found = silent([one], 100.1 + limit, Limits(), completed)
    assert found is not None and found.limit_seconds == limit


def test_a_rank_whose_run_is_not_open_or_is_closed_never_hangs() -> None:
    assert silent([replace(TRAINS, since=None)], 1e9, Limits(), {}) is None


def test_a_stopped_rank_hangs_after_the_shortest_limit() -> None:
    stopped = Signs(0, since=100.0, where=START, stopped=True)
    assert silent([stopped], 160.0, Limits(), {}) is None
    assert silent([stopped], 160.1, Limits(), {}) is not None
    assert silent([stopped], 1e9, Limits(least_seconds=0.0), {}) is None


def test_a_user_can_turn_the_search_for_hangs_off() -> None:
    assert silent([TRAINS], 1e9, Limits(least_seconds=0), {}) is None


@pytest.mark.parametrize("values", [{"least_seconds": -1}, {"times": float("nan")}, {"long_seconds": "1"}])
def test_limits_that_cannot_be_meant_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(Refused, match=next(iter(values))):
        Limits(**values)


@pytest.mark.parametrize(
    "guilty",
    [
        Stuck(replace(TRAINS, rank=2), state="T"),
        Stuck(replace(TRAINS, rank=2, step=6), stack=WAITS),
        Stuck(replace(TRAINS, rank=2), stack=OWN),
        Stuck(replace(TRAINS, rank=2, since=99.0), stack=WAITS),
    ],
)
def test_the_rank_for_which_the_others_wait_is_named(guilty: Stuck) -> None:
    others = [Stuck(replace(TRAINS, rank=rank), stack=WAITS) for rank in (0, 1, 3)]
    assert behind([*others, guilty]) is guilty


def test_a_report_names_the_place_where_the_rank_hangs() -> None:
    found = silent([TRAINS], 400.0, Limits(), {})
    assert found is not None
    text = described(Stuck(TRAINS, state="D", stack=OWN), found)
    assert text == (
        'hangs in the step after step 7, at "/home/me/train.py", line 20 in batch: it waits for a disk, or another '
        "device (no progress for 300.0 s; limit 200.0 s; name what takes long with ckpt.phase(), or raise "
        "--hang-timeout)"
    )


def test_a_rank_that_waits_for_an_evaluation_of_another_does_not_hang() -> None:
    """Only rank 0 evaluated, and the others waited for it: they were taken for hung after a minute."""
    evaluates = replace(TRAINS, rank=1, where="eval")
    assert silent([TRAINS, evaluates], 400.0, Limits(), {}) is None
    late = silent([TRAINS, evaluates], 4000.0, Limits(), {})
    assert late is not None and late.seconds == 3900.0
    assert silent([TRAINS, replace(evaluates, step=9)], 400.0, Limits(), {}) is not None, "it is a step ahead"


def test_the_second_step_has_as_long_as_the_first() -> None:
    """Nothing was known of the length of steps then: a job whose steps took 90 s was killed in its second one."""
    one = replace(TRAINS, longest_seconds=0.0)
    assert silent([one], 1000.0, Limits(), {}) is None and silent([one], 3800.0, Limits(), {}) is not None

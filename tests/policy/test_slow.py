"""When a job counts as slow, and which of its ranks is named."""

from __future__ import annotations

import pytest

from lastgood.errors import Refused
from lastgood.policy.hang import STEP, Signs, Stuck
from lastgood.policy.slow import (
    SAMPLES,
    Apart,
    Pace,
    described,
    first_pause_seconds,
    first_slow_ranks,
    is_over,
    is_slow,
    slow_ranks,
    usual_seconds,
)

BACKWARD = 'File "/venv/lib/python3.11/site-packages/torch/autograd/graph.py", line 865 in _engine_run_backward'
REDUCE = 'File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2 in all_reduce'
WRAPPED = 'File "/venv/lib/python3.11/site-packages/torch/nn/parallel/distributed.py", line 9 in forward'
LINEAR = 'File "/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 134 in forward'
READS = ('File "/usr/lib/python3.11/gzip.py", line 301 in read', 'File "/home/me/data.py", line 7 in load')
LINE = 'File "/home/me/train.py", line 20 in train'
WAITS = (BACKWARD, LINE)


def rank(number: int, *stack: str, state: str = "S") -> Stuck:
    return Stuck(Signs(number, 1.0, STEP, 7), state, stack)


def test_a_job_is_slow_after_three_windows_that_take_twice_as_long() -> None:
    usual = usual_seconds(None, [3.0, 1.0, 1.1] * 4)
    assert usual == 1.1 and usual_seconds(usual, [9.0] * 10) == 1.1, "it never grows"
    assert usual_seconds(None, [1.0] * 9) is None
    assert is_slow([1.0, 2.3, 2.3, 2.3], usual, Pace()) and not is_slow([1.0, 2.3, 2.3], usual, Pace())
    assert not is_slow([2.3, 2.3, 2.1, 2.3], usual, Pace()) and not is_slow([9.0] * 3, None, Pace())
    assert not is_slow([9.0] * 3, usual, Pace(factor=0))
    assert is_over([9.0, 2.1, 2.1, 2.1], usual, Pace()) and not is_over([2.3, 2.1, 2.1], usual, Pace())


@pytest.mark.parametrize(
    ("slow", "others", "at"),
    [
        (rank(1, *READS), WAITS, '"/home/me/data.py", line 7 in load'),
        (rank(1, *READS, BACKWARD, LINE), WAITS, '"/home/me/data.py", line 7 in load'),
        (rank(1, LINEAR, WRAPPED, LINE), (REDUCE, LINE), '"/home/me/train.py", line 20 in train'),
        (rank(1, *WAITS, state="R"), WAITS, '"/home/me/train.py", line 20 in train'),
        (rank(1, *WAITS, state="D"), WAITS, '"/home/me/train.py", line 20 in train'),
        (rank(1, *READS), (LINE,), '"/home/me/data.py", line 7 in load'),
    ],
    ids=["reads", "in a hook", "forward of DDP", "computes backward", "waits for a disk", "others wait for a device"],
)
def test_the_rank_for_which_the_others_wait_is_slow(slow: Stuck, others: tuple[str, ...], at: str) -> None:
    sample = [rank(0, *others), slow, rank(2, *others)]
    at_the_end = [rank(number, LINE) for number in range(3)]
    least = int(0.4 * SAMPLES)
    assert slow_ranks([sample] * least + [at_the_end] * (SAMPLES - least)) == [Apart(1, least, at)]
    assert slow_ranks([sample] * (least - 1) + [at_the_end] * (SAMPLES - least + 1)) == [], "that may be chance"


def test_no_rank_is_slow_where_each_is_elsewhere_at_times() -> None:
    """Ranks that are all slower are at different places too, each as often as the others."""
    turns = [[rank(one, *(READS if one == turn else WAITS)) for one in range(2)] for turn in (0, 1)]
    assert slow_ranks(turns * (SAMPLES // 2)) == []
    assert slow_ranks([[rank(one, *READS) for one in range(3)]] * SAMPLES) == []
    assert slow_ranks([[rank(one) for one in range(3)]] * SAMPLES) == [], "nothing is known"


def test_two_slow_ranks_of_many_are_both_named() -> None:
    sample = [rank(one, *(READS if one < 2 else WAITS)) for one in range(8)]
    assert [one.rank for one in slow_ranks([sample] * SAMPLES)] == [0, 1]


@pytest.mark.parametrize(("factor", "least"), [(2.0, 20), (4.0, 30), (1.1, 16)])
def test_the_factor_decides_when_a_first_slow_rank_is_named(factor: float, least: int) -> None:
    """Of a step that takes twice as long on one rank, the others wait for half."""
    apart, alike = [rank(0, *WAITS), rank(1, *READS), rank(2, *WAITS)], [rank(one, LINE) for one in range(3)]
    pace = Pace(factor=factor)
    assert [one.rank for one in first_slow_ranks([apart] * least + [alike] * (40 - least), pace)] == [1]
    assert first_slow_ranks([apart] * (least - 1) + [alike] * (41 - least), pace) == []


@pytest.mark.parametrize(
    "call",
    [
        'File "/venv/lib/python3.11/site-packages/torch/distributed/pipelining/schedules.py", line 7 in step',
        'File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 7 in recv',
        'File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 7 in batch_isend_irecv',
    ],
)
def test_the_stage_of_a_pipeline_with_most_work_is_not_slow(call: str) -> None:
    stages = [rank(0, call, LINE), rank(1, *READS), rank(2, call, LINE)]
    assert first_slow_ranks([stages] * 40, Pace()) == []


def test_the_first_samples_are_of_different_parts_of_a_step() -> None:
    at = [sum(first_pause_seconds(10.0, before) for before in range(one)) for one in range(40)]
    for step_seconds in (1.0, 2.5, 5.0, 10.0):
        parts = {int(8 * (one % step_seconds) / step_seconds) for one in at}
        assert len(parts) >= 6, "of eight"
    assert 90.0 < at[-1] < 110.0, "four in each of ten windows"


def test_a_report_names_the_rank_the_place_and_both_durations() -> None:
    slow = Apart(1, 9, '"data.py", line 7 in load')
    assert described(7, 2.5, 0.5, [slow], 20) == (
        "at step 7 a step takes 2.5 s and not 0.5 s as before: rank 1 is slow, the others wait for it in 9 of 20 "
        'samples (mostly at "data.py", line 7 in load)'
    )
    assert "all are slower" in described(7, 2.5, 0.5, [], 20)
    assert described(7, 2.5, None, [slow], 40).startswith(
        "at step 7 a step takes 2.5 s, and has from the first ones on: rank 1 is slow"
    )
    assert "could not be seen" in described(7, 2.5, 0.5, [], 0)


@pytest.mark.parametrize("values", [{"factor": 0.5}, {"factor": float("nan")}, {"window_seconds": 0}])
def test_a_pace_that_cannot_be_meant_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(Refused, match="slow-"):
        Pace(**values)

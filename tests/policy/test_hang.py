"""When ranks are taken for hung, and which one is behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lastgood.errors import Refused
from lastgood.policy.hang import (
    ARRIVED,
    END,
    FIRST_STEP,
    SAVE,
    START,
    STEP,
    Limits,
    Signs,
    Stuck,
    Wait,
    arrival_poll_seconds,
    behind,
    described,
    silent,
    waited,
    waits,
)

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


def test_a_rank_hangs_once_others_have_waited_for_an_hour_for_its_start() -> None:
    arrived, late = Signs(0, since=100.0, where=ARRIVED), Signs(1, since=None, where=START)
    assert silent([arrived, late], 3700.0, Limits(), {}) is None
    found = silent([arrived, late], 3700.1, Limits(), {})
    assert found is not None and (found.rank, found.limit_seconds) == (0, 3600.0)
    text = described(Stuck(late, stack=OWN), found)
    assert text.startswith('has not opened its run, at "/home/me/train.py", line 20 in batch (others have waited for ')
    assert text.endswith("if it prepares what they need, raise --hang-long-timeout)")
    assert silent([arrived, replace(arrived, rank=1)], 1e9, Limits(), {}) is None, "torch's own timeouts hold"
    assert silent([arrived], 1e9, Limits(), {}, all_known=False) is not None, "one of another node may be late"
    assert silent([late, replace(late, rank=0)], 1e9, Limits(), {}) is None, "all prepare"
    assert silent([arrived, late], 1e9, Limits(least_seconds=0.0), {}) is None


def test_a_hang_is_shown_where_the_program_waits() -> None:
    """It was shown at line 327 of threading.py."""
    inner = ('File "/usr/lib/python3.11/threading.py", line 327 in wait', 'File "<frozen importlib>", line 1 in load')
    for stack, at in (((*inner, *OWN), "train.py"), ((*inner, *WAITS), "graph.py"), (inner, "threading.py")):
        assert at in described(Stuck(TRAINS, stack=stack), None)


def test_a_rank_that_waits_for_a_lost_store_names_the_store() -> None:
    """The connections of torch's store were gone, and the report said that a rank hung in threading.py."""
    stack = (
        'File "/usr/lib/python3.11/threading.py", line 331 in wait',
        'File "/v/lastgood/ranks/torch_store.py", line 9',
    )
    text = described(Stuck(TRAINS, stack=stack), None)
    assert 'torch_store.py", line 9: the store of the process group does not answer it' in text


def test_a_save_that_waits_for_a_lost_store_names_the_store() -> None:
    """The store was lost in a save: the main thread waited for the lane, and only the line of that wait was shown."""
    inner, outer = (
        'File "/usr/lib/python3.11/threading.py", line 331 in wait',
        'File "/v/lastgood/run/pipeline.py", line 3',
    )
    lane = (inner, 'File "/v/lastgood/ranks/torch_store.py", line 9', 'File "/v/lastgood/run/lane.py", line 2')
    saves = replace(TRAINS, where=SAVE)
    text = described(Stuck(saves, stack=(inner, outer), threads=lane), None)
    assert 'pipeline.py", line 3: a thread of it waits for the store of the process group (' in text
    assert "store" not in described(Stuck(saves, stack=(inner, outer), threads=lane[::2]), None)
    assert "store" not in described(Stuck(TRAINS, stack=OWN, threads=lane), None), "a poll of its own, beside a step"


def test_a_phase_may_have_the_name_of_a_step() -> None:
    """Ranks that waited for one in `ckpt.phase("step")` were taken for hung: it protected nothing."""
    for name in ("eval", "step", "start", "first step"):
        waits, evaluates = replace(TRAINS, since=0.0), replace(TRAINS, rank=1, since=0.0, where=name)
        assert silent([waits, evaluates], 90.0, Limits(), {}) is None


def test_no_rank_is_late_while_others_train() -> None:
    """Ranks that only serve those that train never open a run, and wait for them in a barrier all the time."""
    serves, late = Signs(1, since=100.0, where=ARRIVED), Signs(2, since=None, where=START)
    assert silent([replace(TRAINS, since=4999.0), serves, late], 5000.0, Limits(), {}) is None
    for where in ("eval", SAVE, FIRST_STEP):
        assert silent([replace(TRAINS, since=4999.0, where=where), serves, late], 5000.0, Limits(), {}) is None
    assert silent([replace(TRAINS, since=None, where=END), serves, late], 5000.0, Limits(), {}) is None, "it has ended"
    found = silent([TRAINS, serves, late], 5000.0, Limits(), {})
    assert found is not None and found.rank == TRAINS.rank, "a rank that hangs comes before one that may be late"


def test_a_late_rank_without_a_stack_is_behind_those_that_wait() -> None:
    arrived, late = Signs(0, since=100.0, where=ARRIVED), Signs(1, since=None, where=START)
    waiting = ('File "/venv/torch/distributed/rendezvous.py", line 199 in _create_c10d_store', *OWN)
    assert behind([Stuck(arrived, stack=waiting), Stuck(late)]).signs is late


@pytest.mark.parametrize("where", [ARRIVED, START])
def test_a_hang_beside_a_rank_that_has_not_opened_its_run_is_found(where: str) -> None:
    """It was found after an hour, as if the other rank were in an evaluation."""
    starts = Signs(1, since=350.0 if where == ARRIVED else None, where=where)
    found = silent([TRAINS, starts], 400.0, Limits(), {})
    assert found is not None and found.rank == TRAINS.rank
    assert "no progress of another rank" in described(Stuck(replace(starts, where=START, since=None)), found)


def test_a_rank_waits_from_when_it_was_seen_to_until_it_computes() -> None:
    rank = Stuck(Signs(0, since=None, where=START), stack=('File "/venv/torch/distributed/rendezvous.py", line 9',))
    first = waited(None, rank, 100.0, 7.0)
    assert first == Wait(100.0, 100.0, 7.0)
    assert waited(first, rank, 130.0, 7.3) == Wait(100.0, 130.0, 7.3)
    assert waited(first, rank, 130.0, 7.4) == Wait(130.0, 130.0, 7.4)
    assert waited(first, replace(rank, stack=()), 130.0, 7.0) == first, "what was not seen does not count"
    assert waited(first, replace(rank, stack=OWN), 130.0, 7.0) is None
    assert arrival_poll_seconds(Limits()) == 30.0 and arrival_poll_seconds(Limits(long_seconds=3.0)) == 0.5


def test_who_waits_for_a_device_before_the_restore_is_behind() -> None:
    device = ('File "/venv/torch/cuda/__init__.py", line 7 in _lazy_init', *OWN)
    joins = ('File "/venv/torch/distributed/rendezvous.py", line 199 in _create_c10d_store', *OWN)
    starts, other = Signs(1, since=None, where=START), Signs(0, since=None, where=START)
    assert waits(Stuck(TRAINS, stack=device)) and not waits(Stuck(starts, stack=device))
    assert behind([Stuck(other, stack=joins), Stuck(starts, stack=device)]).signs is starts


def test_a_rank_that_serves_requests_of_others_waits_for_nobody() -> None:
    """Jobs of torch's RPC were ended: a rank that serves the others seemed to wait in a collective for them."""
    serves = ('File "/venv/torch/distributed/rpc/api.py", line 9 in shutdown', *OWN)
    for stack in (serves, (serves[0], 'File "/venv/torch/distributed/optim/optimizer.py", line 3 in step')):
        assert not waits(Stuck(TRAINS, stack=stack)) and not waits(Stuck(replace(TRAINS, where=START), stack=stack))


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
    stopped = described(Stuck(TRAINS, state="T"), found)
    assert stopped.endswith("it is stopped by a signal (no progress for 300.0 s; limit 200.0 s)"), "no phase is missing"


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

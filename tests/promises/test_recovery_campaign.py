"""A slice of the campaign of faults under `lastgood run` (lastgood_lab/campaigns/recovery.py), and its judge."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lastgood_lab.campaigns import recovery
from lastgood_lab.campaigns.recovery_faults import Attempt, Fault, Plan
from lastgood_lab.campaigns.recovery_judge import Note, Reported, compared, judged

PLAN = Plan(attempts=[Attempt(faults=[Fault(kind="kill", phase="step", rank=2)])], total=4, room="")


def notes(attempt: int, steps: range, restored: int, loss: str = "0x1p0") -> Iterator[Note]:
    yield {"what": "restored", "attempt": attempt, "rank": 2, "at": 0.0, "step": restored}
    for step in steps:
        yield {"what": "step", "attempt": attempt, "rank": 2, "at": float(step), "step": step, "loss": loss}


FAULT = {"what": "fault", "attempt": 0, "rank": 2, "at": 3.0, "kind": "kill", "phase": "step", "step": 3}
SAVED = {"what": "saved", "attempt": 0, "rank": 2, "at": 2.0, "step": 2}
END = {"what": "end", "attempt": 1, "rank": 2, "at": 9.0, "step": 4, "exact": True, "digest": "a", "skipped": []}
BEFORE = [*notes(0, range(1, 3), 0), SAVED, FAULT]
WHOLE = [*BEFORE, *notes(1, range(3, 5), 2), END]


def test_the_judge_finds_a_wrong_rank_a_lost_save_and_a_wrong_answer() -> None:
    right = Reported(2, "failed first: SIGKILL, at step 2", "restart")
    (good,) = judged(PLAN, WHOLE, {0: right})
    assert good.cause and not good.problems
    (other,) = judged(PLAN, WHOLE, {0: right._replace(rank=1)})
    assert other.cause is False
    (lost,) = judged(PLAN, [*BEFORE, *notes(1, range(1, 5), 0), END], {0: right})
    assert "step 2 was saved, and step 0 restored" in lost.problems
    for reports in ({0: right._replace(act="end")}, {}):
        (wrong,) = judged(PLAN, WHOLE, reports)
        assert wrong.problems


@pytest.mark.parametrize(("named", "right"), [((2,), True), ((1,), False), ((1, 2), False), ((), False)])
def test_the_judge_finds_a_slow_rank_that_is_not_named(named: tuple[int, ...], right: bool) -> None:
    """A slow rank counted as a fault that an attempt survives, whether or not it was named."""
    report = Reported(0, "failed first: exit code 90, at step 2", "restart", slow=named)
    for phase, cause in (("step", right), ("teardown", None)):
        plan = Plan(attempts=[Attempt(faults=[Fault(kind="slow", phase=phase, rank=2)])], total=4, room="")
        fault = {**FAULT, "kind": "slow", "phase": phase}
        (trial,) = judged(plan, [*BEFORE[:-1], fault, *WHOLE[len(BEFORE) :]], {0: report})
        assert trial.outcome == "went on" and trial.cause is cause


def test_the_judge_wants_the_lost_node_named_by_another_one() -> None:
    plan = Plan(attempts=[Attempt(faults=[Fault(kind="node", phase="step", rank=2)])], total=4, room="")
    lost = [{**one, "kind": "node", "node": "b"} if one is FAULT else one for one in WHOLE]
    for what, named in (("node 1 (b): no sign of life for 5 s", True), ("node 0 (a): no sign of life for 5 s", False)):
        (trial,) = judged(plan, lost, {0: Reported(-1, what, "restart")})
        assert trial.cause is named and not trial.problems
    (alone,) = judged(plan, [{**one, "node": ""} for one in lost], {0: Reported(-1, "no sign of life", "restart")})
    assert alone.problems, "a supervisor that was killed reports nothing"


@pytest.mark.parametrize(
    ("what", "errors", "named"),
    [
        ("not saved", ["NoSpace: full"], True),
        ("not saved", ["TimedOut: 5 s"], False),
        ("not saved", ["NoSpace: full", "TimedOut: 5 s"], False),
        ("saved", [""], None),
    ],
)
def test_the_judge_wants_a_full_disk_named_by_the_saves_that_it_stops(
    what: str, errors: list[str], named: bool | None
) -> None:
    """A full disk counted as survived, whatever error the saves had that it stopped."""
    report = Reported(0, "failed first: exit code 90, at step 4", "restart")
    plan = Plan(attempts=[Attempt(faults=[Fault(kind="full", phase="step", rank=2)])], total=4, room="")
    after = [{**SAVED, "what": what, "at": 4.0, "step": 4 + at, "error": error} for at, error in enumerate(errors)]
    lives = [*BEFORE[:-1], {**FAULT, "kind": "full"}, *after, *notes(1, range(5, 5), 4), END]
    (trial,) = judged(plan, lives, {0: report})
    assert trial.outcome == "went on" and trial.cause is named and not trial.problems


def test_the_judge_demands_what_was_saved_after_a_nan() -> None:
    """After the first NaN of a job nothing was demanded to its end: of 70 per cent of the faults."""
    plan = Plan(
        attempts=[
            Attempt(faults=[Fault(kind="nan", phase="step", rank=2)]),
            Attempt(faults=[Fault(kind="kill", phase="step", rank=2)]),
        ],
        total=9,
        room="",
    )
    nan = {**FAULT, "kind": "nan"}
    after = [{**one, "attempt": 1} for one in ({**SAVED, "step": 5}, {**FAULT, "step": 6})]
    reports = {at: Reported(2, "failed first: SIGKILL", "restart") for at in (0, 1)}
    for saved, restored, lost in ((after, 5, []), (after, 4, [5]), (after[1:], 2, []), (after[1:], 1, [2])):
        lives = [*BEFORE[:-1], nan, *notes(1, range(3, 6), 2), *saved, *notes(2, range(restored + 1, 10), restored)]
        _, trial = judged(plan, lives, reports)
        assert trial.problems == [f"step {one} was saved, and step {restored} restored" for one in lost]


def test_the_judge_wants_a_reason_for_batches_that_are_left_out() -> None:
    """The job without faults left out what the other one had left out, however much that was."""
    calm, skipped = [*notes(0, range(1, 5), 0), END], [[0, 1], [0, 2]]
    some = [*WHOLE[:-1], {**END, "skipped": skipped}]
    assert "2 batches are left out, where faults explain 0" in compared(PLAN, some, calm, 0)[0]
    nan = {**FAULT, "kind": "nan"}
    assert compared(PLAN, [*some, nan], calm, 0) == []
    assert compared(PLAN, [*some[:-1], {**END, "skipped": [*skipped, [0, 3]]}, nan], calm, 0)


@pytest.mark.parametrize(
    ("rank", "what", "named"),
    [(0, "exit code 1", True), (3, "DistNetworkError: recv", True), (3, "RuntimeError: Connection closed", False)],
)
def test_a_follower_of_a_lost_store_is_no_first_cause(rank: int, what: str, named: bool) -> None:
    plan = Plan(attempts=[Attempt(faults=[Fault(kind="store", phase="step", rank=0)])], total=4, room="")
    lost = [{**one, "kind": "store", "rank": 0} if one is FAULT else one for one in WHOLE]
    (trial,) = judged(plan, lost, {0: Reported(rank, what, "restart")})
    assert trial.cause is named


def test_a_job_that_hangs_is_a_violation_which_stays_in_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the campaign with a traceback. The next start knew nothing of it, and could pass."""

    def hangs(*_: object) -> None:
        raise subprocess.TimeoutExpired("lastgood run", 1200)

    monkeypatch.setattr(recovery, "tried", hangs)
    found = recovery._in_memory(0, 1)
    assert "timed out after 1200 seconds" in found["problems"][0] and found["trials"] == []


@pytest.mark.parametrize("change", [{"digest": "b"}, {"exact": False}, {"step": 3}, {"rank": 1}])
def test_the_judge_finds_a_job_that_ends_otherwise(change: dict[str, object]) -> None:
    calm = [*notes(0, range(1, 5), 0), END]
    assert compared(PLAN, WHOLE, calm, 0) == []
    assert compared(PLAN, [*WHOLE[:-1], {**END, **change}], calm, 0)
    assert compared(PLAN, WHOLE, [*notes(0, range(1, 5), 0, loss="0x2p0"), END], 0)
    assert compared(PLAN, WHOLE, calm, 9)


def test_each_kind_of_fault_is_tried_in_each_phase() -> None:
    plans = [recovery.plan_of(number, "") for number in (6, 7)]
    tried = [(one.kind, one.phase) for plan in plans for attempt in plan.attempts for one in attempt.faults]
    assert sorted(tried) == sorted(recovery.cells())


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a file system")
def test_a_job_comes_back_exactly_from_a_slice_of_the_faults(tmp_path: Path) -> None:
    kinds = [("kill", "start"), ("exception", "save"), ("nan", "step")]
    attempts = [Attempt(faults=[Fault(kind=kind, phase=phase, rank=1)]) for kind, phase in kinds]
    with recovery.mounted(tmp_path / "faults") as room:
        plan = Plan(attempts=attempts, total=40, room=room)
        found = recovery.lived(tmp_path / "faults", plan)
    skipped = [(epoch, window) for epoch, window in found.notes[-1]["skipped"]]
    with recovery.mounted(tmp_path / "calm") as room:
        calm = recovery.lived(tmp_path / "calm", Plan(attempts=[], total=40, room=room, skipped=skipped))
    trials = judged(plan, found.notes, found.reports)
    assert [(one.kind, one.phase) for one in trials] == kinds
    assert not any(one.problems or one.cause is False for one in trials), trials
    assert compared(plan, found.notes, calm.notes, found.code) == [] and not found.left

"""Attempts whose supervisor was killed, or whose machine was lost: nobody was left to record their end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

import lastgood
from agents import until
from commands import Call
from lastgood.format import commit
from lastgood.io import heartbeat, processes
from lastgood.policy.recovery import GAVE_UP, Budget, Outcome, answer, without_progress
from lastgood.run import access, side_records
from lastgood.supervisor import attempt_log, job_summary
from lastgood.supervisor.attempt_log import SUPERVISOR, Attempt, Begun, Cause
from lastgood.supervisor.attempt_records import AttemptRecords

COMMAND = [str(Path(sys.executable).with_name("lastgood")), "run"]
TRAINING = """
import os, sys, time
import torch, lastgood

run, last, waits = sys.argv[1], int(sys.argv[2]), len(sys.argv) > 3
state = {"w": torch.zeros(4)}
with lastgood.Checkpointer(run, state, cadence=lastgood.Every(steps=4)) as ckpt:
    for n in range(ckpt.restore().step + 1, last + 1):
        state["w"] += 1
        save = ckpt.step(n)
        if save is not None:
            save.committed()
    if waits:
        open(run + ".waits", "w").close()
        time.sleep(600)
"""
ELSEWHERE = "4e8f5e4c-boot-of-another-machine pid:[1] 17 2906"
"""a process of which this machine knows nothing"""


def beginning(job: str, began_at: float, process: str = ELSEWHERE, restored_step: int | None = 0) -> Begun:
    return Begun(
        format=1,
        job=job,
        process=process,
        host=f"host of {job}",
        command=[],
        ranks=2,
        nodes=1,
        began_at=began_at,
        restored_step=restored_step,
    )


def ending(job: str, restored_step: int = 0, last_step: int = 0, cause: Cause | None = None) -> Attempt:
    return Attempt(
        format=1,
        number=0,
        job=job,
        host="h",
        command=[],
        ranks=2,
        began_at=0.0,
        seconds=10.0,
        restored_step=restored_step,
        last_step=last_step,
        replayed_steps=0,
        phases={},
        cause=cause,
        answer="end: the job is done",
    )


@pytest.fixture
def run(tmp_path: Path) -> str:
    path = tmp_path / "run"
    lastgood.save(path, {"w": torch.zeros(1)}, step=7)
    return str(path)


@pytest.mark.slow
def test_a_killed_supervisor_leaves_an_attempt_that_the_next_one_ends(tmp_path: Path, call: Call) -> None:
    """After `kill -9` of `lastgood run` there was "no attempt was recorded", although step 4 was saved."""
    script, run, logs = tmp_path / "train.py", tmp_path / "run", tmp_path / "logs"
    script.write_text(TRAINING)
    with subprocess.Popen([*COMMAND, str(script), str(run), "6", "waits"]) as job:
        until((tmp_path / "run.waits").exists)
        until(lambda: running(call, run)["restored_step"] == 0)
        assert (running(call, run)["answer"], running(call, run)["last_step"]) == ("runs", 4)
        job.kill()
    (lost,) = shown(call, run)
    assert (lost["cause"]["kind"], lost["restored_step"], lost["last_step"]) == (SUPERVISOR, 0, 4)
    assert (lost["saved_step"], lost["incarnation"]) == (4, "")
    assert lost["seconds"] > 0, "until its last save"
    assert "or its machine, was lost" in lost["cause"]["what"]
    done = subprocess.run([*COMMAND, "--records", str(logs), str(script), str(run), "8"], check=False)
    assert done.returncode == 0
    first, second = attempt_log.history(access.for_reading(run)).ended
    assert first.cause is not None and (first.cause.kind, first.last_step) == (SUPERVISOR, 4)
    assert first.answer == "restart: the job was started again" and first.seconds == lost["seconds"]
    assert (second.cause, second.restored_step, second.last_step) == (None, 4, 8)
    taken = {at.incarnation for at in commit.survey(access.for_reading(run)).generations if at.step == 4}
    assert {second.incarnation} == taken and second.saved_step == 8
    assert attempt_log.failures([first, second], ranks=1, mtbf=None).of_nodes.count == 1
    assert [one.restored_step for one in job_summary.opened(logs).attempts] == [4], "of this supervisor only"


@pytest.mark.long
@pytest.mark.slow
def test_a_failure_before_and_after_a_lost_supervisor_counts_twice(tmp_path: Path) -> None:
    """The count began at zero with each start, so a job whose machines were taken away often failed for ever."""
    script, run, starts = tmp_path / "train.py", tmp_path / "run", tmp_path / "starts"
    fails = f'open({str(starts)!r}, "a").write("x") and open({str(starts)!r}).read() != "xx"'
    script.write_text(
        TRAINING.replace("state[", f"if n == 6 and {fails}: raise ValueError('a bad batch')\n        state[")
    )
    options = ["--without-progress", "2", "--remedies", "none", str(script), str(run), "6"]
    with subprocess.Popen([*COMMAND, *options, "waits"]) as job:
        until((tmp_path / "run.waits").exists)
        until(lambda: [one.restored_step for one in attempt_log.history(access.for_reading(run)).running] == [4])
        job.kill()
    done = subprocess.run([*COMMAND, *options], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == GAVE_UP and done.stderr.count("lastgood: attempt") == 1
    assert "2 attempts in a row failed after step 5 with the same cause" in done.stderr
    assert [one.job == two.job for one, two in pairwise(attempt_log.read(access.for_reading(run)))] == [True, False]


def test_a_job_on_machines_that_are_taken_away_is_not_given_up() -> None:
    fault, lost = (Cause(kind=kind, rank=0, code=-9, what="x") for kind in ("hang", SUPERVISOR))
    failed = Outcome(restored_step=0, last_step=5, code=-9, cause="hang")
    taken = [ending(job, cause=lost) for job in "abcd"]
    assert attempt_log.unfinished(taken) == []
    assert attempt_log.unfinished([ending("a", 0, 5, fault), ending("a", 0, 0, lost), *taken[1:]])[0] == failed
    assert answer([failed], Budget(), earlier=attempt_log.unfinished(taken)).restart
    assert answer([failed], Budget(restarts=1), earlier=[failed]).restart, "no restart of this job"


def test_lost_nodes_of_a_job_that_goes_on_are_failures_of_machines() -> None:
    """They were counted as those of the program where they came at one step, so that the interval became too long."""
    lost, gone = (Cause(kind=kind, rank=0, code=-9, what="x") for kind in ("node", SUPERVISOR))
    found = [replace(ending("a", 0, 5, lost), number=number) for number in (1, 2, 3)]
    assert attempt_log.failures(found, ranks=2, mtbf=100.0).of_nodes.count == 3
    assert attempt_log.unfinished([*found, replace(ending("a", 0, 5, gone), number=4)]) == []


def test_a_lost_attempt_that_has_saved_is_progress_of_its_job() -> None:
    fault, lost = (Cause(kind=kind, rank=0, code=-9, what="x") for kind in ("hang", SUPERVISOR))
    earlier = [ending("a", 0, 5, fault), ending("a", 0, 5, fault), ending("a", 0, 4, lost)]
    found = attempt_log.unfinished(earlier)
    assert [one.saved_step for one in found] == [4, 4]
    assert without_progress([*found, Outcome(restored_step=None, last_step=0, code=1)]) == 1


def test_what_an_attempt_with_a_lost_node_has_saved_is_progress() -> None:
    fault, node, lost = (Cause(kind=kind, rank=0, code=-9, what="x") for kind in ("hang", "node", SUPERVISOR))
    earlier = [ending("a", 0, 5, fault), replace(ending("a", 0, 5, node), saved_step=4), ending("a", 0, 0, lost)]
    assert [one.saved_step for one in attempt_log.unfinished(earlier)] == [4]


def test_the_saves_of_each_attempt_count_after_a_lost_supervisor_too() -> None:
    """A job whose Sentinel had left batches out, each time from the same step, counted as without progress."""
    fault, lost = (Cause(kind=kind, rank=0, code=-9, what="x") for kind in ("exception", SUPERVISOR))
    diverged = [replace(ending("a", 0, 5, fault), saved_step=5)] * 3
    found = attempt_log.unfinished([*diverged, ending("a", 0, 0, lost)])
    assert [one.saved_step for one in found] == [5, 5, 5] and without_progress(found) == 1


def test_the_failures_of_a_job_that_has_ended_do_not_count_for_the_next() -> None:
    """Somebody may have mended the script."""
    fault, lost = (Cause(kind=kind, rank=0, code=-9, what="x") for kind in ("hang", SUPERVISOR))
    assert attempt_log.unfinished([ending("a", cause=fault)]) == []
    assert (
        len(attempt_log.unfinished([ending("a", cause=fault), ending("b", cause=fault), ending("b", cause=lost)])) == 1
    )


def shown(call: Call, run: Path) -> list[dict[str, object]]:
    return json.loads(call("attempts", "--json", str(run))[1])["attempts"]  # type: ignore[no-any-return]


def running(call: Call, run: Path) -> dict[str, object]:
    (one,) = shown(call, run)
    return one


def test_an_attempt_on_another_machine_is_lost_once_its_run_is_opened_anew(run: str) -> None:
    with side_records.opened(run) as tier:
        attempt_log.append(tier, ending("a"), attempt_log.begin(tier, beginning("a", 1.0)))
        attempt_log.begin(tier, beginning("b", 2.0, restored_step=None))
        attempt_log.begin(tier, beginning("b", 2.0))
        ended, lost, running = attempt_log.history(tier)
        assert [one.job for one in ended] == ["a"] and not lost
        assert [(one.number, one.answer) for one in running] == [(2, "runs, or its supervisor on host of b was lost")]
        ended, lost, running = attempt_log.history(tier, opened=True)
        assert [(one.number, one.last_step) for one in lost] == [(2, 7)] and not running
        attempt_log.begin(tier, beginning("c", time.time() + 60, processes.identity()))
        ended, lost, running = attempt_log.history(tier)
        assert [[one.job for one in part] for part in (ended, lost, running)] == [["a"], ["b"], ["c"]]
        assert attempt_log.history(tier, opened=True).running == running, "this process lives"


def test_what_a_lost_attempt_has_saved_in_slots_counts(tmp_path: Path) -> None:
    """It counted as an attempt of 0 s that has saved nothing: commits of slots are in their table."""
    run = f"slots://{tmp_path}/run"
    with lastgood.Checkpointer(run, {"w": torch.zeros(1)}) as ckpt:
        ckpt.save(7).result()
    with side_records.opened(run) as tier:
        attempt_log.begin(tier, beginning("a", 1.0))
        (lost,) = attempt_log.read(tier, opened=True, run=run)
    assert (lost.saved_step, lost.last_step) == (7, 7) and lost.seconds > 0


def test_a_beginning_whose_end_could_not_be_written_is_no_lost_attempt(run: str) -> None:
    with side_records.opened(run) as tier:
        attempt_log.begin(tier, beginning("a", 1.0))
        attempt_log.begin(tier, beginning("a", 2.0))
        (only,) = attempt_log.history(tier, opened=True).lost
        assert only.began_at == 2.0, "the same supervisor went on after the first one"
        attempt_log.append(tier, ending("a"), begun=2)
        assert not attempt_log.history(tier, opened=True).lost


def test_an_attempt_that_was_taken_for_lost_may_end_later(run: str) -> None:
    with side_records.opened(run) as tier:
        begun = attempt_log.begin(tier, beginning("a", 1.0))
        (lost,) = attempt_log.history(tier, opened=True).lost
        attempt_log.append(tier, lost, begun)
        assert [one.cause for one in attempt_log.read(tier)] == [lost.cause]
        attempt_log.append(tier, ending("a"), begun)
        assert [one.cause for one in attempt_log.read(tier)] == [None]


def test_the_end_that_another_node_records_is_that_of_the_attempt(run: str) -> None:
    """The node that has recorded the beginning may be lost, and another one decides in its place."""
    records = AttemptRecords()
    records.begin(None, run)
    with side_records.opened(run) as tier:
        attempt_log.begin(tier, beginning("a", 1.0))
        records.done(int, lambda: None)
        records.end(run, ending("a"), lambda _: None, lambda: None)
        ended, lost, running = attempt_log.history(tier, opened=True)
    assert [one.cause for one in ended] == [None] and not lost and not running


def test_an_end_without_a_beginning_hides_no_lost_attempt(run: str) -> None:
    """The beginning may not have been written, because the place was away for a while."""
    records = AttemptRecords()
    records.begin(beginning("b", 2.0), run)
    with side_records.opened(run) as tier:
        attempt_log.begin(tier, beginning("a", 1.0))
        records.end(run, ending("b"), lambda _: None, lambda: None)
        assert [one.job for one in attempt_log.history(tier, opened=True).lost] == ["a"]


def shown_run(page: str, run: str) -> list[heartbeat.Progress]:
    """What a rank shows that has opened a run."""
    if not os.path.exists(page):
        heartbeat.create(page)
    heartbeat.Heartbeat(page).opened(run)
    return [heartbeat.read(page)]


def test_a_script_with_two_runs_leaves_no_lost_attempt(run: str, tmp_path: Path) -> None:
    """It closes the first one before it opens the second, in which alone the end was recorded."""
    second, page, records = str(tmp_path / "second"), str(tmp_path / "page"), AttemptRecords()
    lastgood.save(second, {"w": torch.zeros(1)}, step=9)
    records.begin(beginning("a", 1.0), "")
    records.shown(shown_run(page, run))
    records.done(int, lambda: None)
    with side_records.opened(second) as tier:
        attempt_log.begin(tier, beginning("lost", 0.5))
    records.end(second, ending("a"), lambda _: None, lambda: None)
    for place, lost in (run, []), (second, ["lost"]):
        found = attempt_log.history(access.for_reading(place), opened=True)
        assert [one.job for one in found.ended] == ["a"] and [one.job for one in found.lost] == lost


def test_ends_that_could_not_be_recorded_at_first_are_recorded_later(run: str, tmp_path: Path) -> None:
    """The place was away for a while; the beginning of the next attempt then hid the lost one for ever."""
    page, records = str(tmp_path / "page"), AttemptRecords()
    with side_records.opened(run) as tier:
        attempt_log.begin(tier, beginning("lost", 1.0))
    begun = Path(run, attempt_log.BEGUN)
    begun.rename(tmp_path / "aside")
    begun.touch()
    for began_at in 2.0, 3.0:
        records.begin(beginning("a", began_at, processes.identity()), "" if began_at == 2.0 else run)
        records.shown(shown_run(page, run))
        records.done(int, lambda: None)
        if began_at == 2.0:
            begun.unlink()
            (tmp_path / "aside").rename(begun)
        records.end(run, ending("a"), lambda _: None, lambda: None)
    found = attempt_log.history(access.for_reading(run), opened=True)
    assert [one.job for one in found.ended] == ["a", "lost", "a"] and not found.lost
    assert [one.job for one in records.earlier] == ["lost"]


def test_what_an_attempt_saves_is_not_that_of_the_lost_one(run: str, tmp_path: Path) -> None:
    """The end of the lost attempt is recorded beside the ranks, which may have saved step 7 already."""
    page = str(tmp_path / "page")
    heartbeat.create(page)
    heartbeat.Heartbeat(page).opened(run)
    with side_records.opened(run) as tier:
        attempt_log.begin(tier, beginning("a", 1.0))
        records = AttemptRecords()
        records.begin(beginning("b", 2.0, processes.identity()), "")
        records.shown([heartbeat.read(page)])
        records.done(int, lambda: None)
        (lost,) = attempt_log.read(tier)
    assert (lost.job, lost.last_step) == ("a", 0)


def test_records_of_runs_from_before_are_read(run: str) -> None:
    """A record of an attempt had no number of its beginning, and a run none of beginnings."""
    with side_records.opened(run) as tier:
        side_records.append(tier, attempt_log.FOLDER, ending("a", last_step=3))
        (only,) = attempt_log.read(tier)
    assert (only.number, only.last_step) == (1, 3)


def test_lost_attempts_at_one_step_are_failures_of_machines(run: str) -> None:
    """Failures in a row at the same step with the same cause are none of machines: the program comes to them. Of a
    lost attempt only the last saved step is known, which may well be the same."""
    with side_records.opened(run) as tier:
        for job in "abc":
            attempt_log.begin(tier, beginning(job, time.time()))
        found = attempt_log.failures(attempt_log.read(tier, opened=True), ranks=2, mtbf=100.0)
    assert found.of_nodes.count == found.all.count == 3


def test_an_attempt_that_was_asked_to_end_is_no_failure() -> None:
    """Its ranks could not save, and were killed by SIGTERM: `lastgood plan` counted that as a failure of the job."""
    killed = replace(ending("a"), cause=Cause(kind="signal", rank=0, code=-15, what="SIGTERM"))
    asked = replace(killed, answer="end: the job was asked to end; its node may fail")
    assert attempt_log.failures([killed], ranks=2, mtbf=None).all.count == 1
    assert attempt_log.failures([asked], ranks=2, mtbf=None).all.count == 0


def test_a_process_is_known_by_its_number_and_its_start() -> None:
    own = processes.identity()
    assert processes.lives(own) is True and processes.lives(ELSEWHERE) is None
    boot, _, *rest = own.split(" ")
    assert processes.lives(" ".join([boot, "", *rest])) is None, "its namespace was not shown"
    assert processes.lives(f"{own}0") is False, "another process with the number of one that has ended"
    with subprocess.Popen(["sleep", "600"]) as child:
        of_child = own.rpartition(f" {os.getpid()} ")[0] + f" {child.pid} {started(child.pid)}"
        assert processes.lives(of_child) is True
        child.kill()
        until(lambda: processes.lives(of_child) is False)  # a zombie, as long as nobody waits for it


def started(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]

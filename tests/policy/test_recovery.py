"""What a supervisor does after an attempt, and which rank it blames."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lastgood.errors import Refused
from lastgood.policy.blame import Ended, first_cause, had_waited, may_have_timed_out, timed_out
from lastgood.policy.recovery import (
    LOST_NODES,
    PREEMPTED,
    Answer,
    Budget,
    Outcome,
    answer,
    replayed_steps,
    without_progress,
)

CRASH = -9


def outcomes(*steps: int | None, code: int = CRASH) -> list[Outcome]:
    """Attempts that failed, each after it had restored one of these steps (None: before)."""
    return [Outcome(restored_step=one, last_step=one or 0, code=code) for one in steps]


@pytest.mark.parametrize(
    ("steps", "count"),
    [([0], 1), ([0, 0], 2), ([0, 10], 1), ([0, 10, 10], 2), ([None, None, None], 3), ([10, None, 10], 3), ([10, 5], 2)],
)
def test_attempts_without_progress_are_those_that_restore_no_newer_step(steps: list[int | None], count: int) -> None:
    assert without_progress(outcomes(*steps)) == count


def test_an_attempt_that_has_saved_something_newer_is_progress() -> None:
    """A job whose third attempt had come far was given up, because it had gone on from the same step as the others."""
    far = Outcome(restored_step=10, last_step=90, saved_step=80, code=CRASH)
    assert without_progress([*outcomes(10, 10), far]) == 1
    assert without_progress([*outcomes(10, 10), far, *outcomes(80)]) == 1
    assert without_progress([far, *outcomes(80, 80)]) == 2


def test_a_job_that_saves_something_newer_each_time_is_started_for_ever() -> None:
    assert answer(outcomes(*range(0, 1000, 10)), Budget()).restart


def test_a_job_that_fails_at_one_step_three_times_is_given_up() -> None:
    found = [answer(outcomes(*[10] * count), Budget()) for count in (1, 2, 3)]
    assert [one.restart for one in found] == [True, True, False]
    assert [one.pause_seconds for one in found] == [0.0, 1.0, 0.0]
    assert "after step 10" in found[-1].why


FAILS = Outcome(restored_step=10, last_step=12, code=1, cause="exception ValueError", batches_known=True)


def after(*followed: str, **changes: object) -> str:
    """What follows attempts that failed alike, after each of which this followed."""
    each = [replace(FAILS, **changes, followed=one) for one in followed]  # type: ignore[arg-type]
    return answer([*each, replace(FAILS, **changes)], Budget()).act  # type: ignore[arg-type]


def test_each_remedy_is_tried_once_against_a_failure_that_repeats() -> None:
    assert after("restart") == "restart"
    assert after("restart", "restart") == "back"
    assert after("restart", "restart", "back") == "skip"
    assert after("restart", "restart", "back", "skip") == "end"


def test_a_failure_of_another_kind_after_a_remedy_does_not_end_the_job() -> None:
    """The attempts before the remedy counted as attempts without progress of what came after it."""
    back = replace(FAILS, followed="back")
    assert answer([FAILS, FAILS, back, replace(FAILS, restored_step=5, last_step=7, cause="x")], Budget()).restart


def test_a_remedy_that_is_not_possible_is_passed_over() -> None:
    assert after("restart", "restart", restored_step=0) == "skip", "there is no generation to go back from"
    assert after("restart", "restart", "back", batches_known=False) == "end"
    assert after("restart", "restart", restored_step=0, batches_known=False) == "end"


def test_a_failure_before_any_step_leaves_out_no_batches() -> None:
    """A typo in a script, in the first step after a restore, took 30 samples from the training for good, and marked
    one generation after the other as suspect."""
    first = {"restored_step": 12}  # FAILS has completed step 12
    assert after("restart", "restart", **first) == "back"
    again = [replace(FAILS, restored_step=12, followed=one) for one in ("restart", "restart", "back")]
    found = answer([*again, replace(FAILS, restored_step=8, last_step=8)], Budget())
    assert found.act == "end" and found.withdraws, "it fails without the suspect generation too"
    assert "before a step was completed" in found.why
    assert answer([*again, FAILS], Budget()).act == "skip", "training came to the same step from the one before"


def test_a_failure_after_the_loop_makes_no_generation_suspect() -> None:
    """An export after the training that failed each time made the last generation suspect, for good, and its steps
    were trained again."""
    assert after("restart", "restart", after_loop=True, batches_known=False) == "end"


def test_a_hang_leaves_out_no_batches() -> None:
    """An evaluation without a name took longer than the limit, and 16 samples were left out for good."""
    hang = {"cause": "hang"}
    assert after("restart", "restart", **hang) == "back"
    assert after("restart", "restart", "back", **hang) == "end"


@pytest.mark.parametrize(
    "error",
    [
        "NoSpace: of rank 1",
        "TierDown: no answer",
        "OSError: [Errno 28] No space",
        "OSError: Caught OSError in DataLoader worker process 0.\nOriginal Traceback:\n[Errno 28] No space",
        "RuntimeError: unable to write to file </torch_1>: No space left on device (28)",
        "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534",
        "RuntimeError: basic_ios::clear: iostream error",
        "RuntimeError: PytorchStreamWriter failed writing file data/0: file write failed",
        "RuntimeError: [enforce fail at inline_container.cc:747] . open file failed: Read-only file system",
        "OSError: 2000000 requested and 131072 written",
        "OSError: [Errno 30] Read-only file system: '/mnt/x'",
    ],
)
def test_a_full_disk_blames_neither_the_state_nor_the_batches(error: str) -> None:
    """Where a script waits for its saves, a full disk made a generation suspect, and had 16 samples left out."""
    assert after("restart", error=error) == "restart"
    assert after("restart", "restart", error=error) == "end"


def test_a_state_that_is_kept_for_people_counts_as_no_save() -> None:
    """Of a job whose Sentinel had left out batches, the report said "it has saved step 12": no restore takes that."""
    one = replace(FAILS, cause="exception TrainingDiverged", error="TrainingDiverged: loss nan", saved_step=12)
    assert answer([one], Budget()).why == "its Sentinel leaves batches out; step 12 is kept for people only"
    assert answer([replace(one, saved_step=11)], Budget()).why == "it has saved step 11"
    assert answer([replace(FAILS, saved_step=12)], Budget()).why == "it has saved step 12"


def test_what_a_sentinel_has_judged_gets_no_remedy() -> None:
    """Once a Sentinel left out no more batches, the supervisor left out those of the step after the bad one, and took
    the job back from a generation that the Sentinel had found good."""
    diverged = {"error": "TrainingDiverged: training has diverged: step 13: loss nan", "batches_known": True}
    assert after("restart", **diverged) == "restart"
    assert after("restart", "restart", **diverged) == "end"


def test_batches_after_batches_may_be_left_out_at_one_comparison() -> None:
    """A long stretch of bad data failed at the same comparison three times, each time with other batches: the job was
    given up long before `Sentinel.at_most`."""
    error = "TrainingDiverged: training has diverged: step 23: loss nan"
    left_out = [replace(FAILS, cause="exception TrainingDiverged", error=error, saved_step=12) for _ in range(9)]
    assert answer(left_out, Budget()).restart
    stays = [replace(one, saved_step=0) for one in left_out[:3]]
    assert answer([*left_out, *stays], Budget()).act == "end", "no more batches are left out"


def test_a_full_disk_is_no_failure_like_another_of_its_class() -> None:
    """Two full disks and then an OSError of another kind, at the same step, made a generation suspect: only the last
    error was looked at."""
    full, other = "OSError: [Errno 28] No space", "OSError: [Errno 5] Input/output error"
    for errors in ([full, full, other], [other, other, full]):
        found = answer([replace(FAILS, cause="exception OSError", error=one) for one in errors], Budget())
        assert found.act == "end" and "the same cause" not in found.why


def test_a_cause_has_a_budget_of_its_own() -> None:
    budget = Budget(of_causes={"OutOfMemoryError": 1, "signal": 0, "hang": 2})
    memory = [Outcome(at, at + 5, 1, saved_step=at + 4, cause="exception torch.OutOfMemoryError") for at in (0, 10, 20)]
    lost = Outcome(30, 35, -9, saved_step=34, cause="node")
    assert answer([lost, memory[0]], budget).restart and answer([*memory[:1], lost, lost, lost], budget).restart
    found = answer([memory[0], lost, memory[1]], budget)
    assert found.act == "end"
    assert found.why == "of the restarts that --cause-restarts allows after OutOfMemoryError, 1, none is left"
    assert answer([replace(lost, cause="signal SIGBUS")], budget).act == "end"


def test_nodes_that_are_lost_one_after_the_other_do_not_end_the_job() -> None:
    """Three spot nodes were taken away within one interval between saves: the job was given up, and where that was in
    the first step, a good generation was made suspect before."""
    lost = [Outcome(100, 107, CRASH, cause="node", host=host) for host in "abcd"]
    for last_step in (100, 107):
        found = answer([replace(one, last_step=last_step) for one in lost], Budget())
        assert found == Answer("restart", "a node was lost (d), which says nothing about the program", 4.0)
    fault = replace(FAILS, restored_step=100, last_step=103)
    assert without_progress([lost[0], fault, lost[1], fault]) == 2, "what is no lost node counts"
    again = [replace(one, host="a", restored_step=None) for one in lost]
    assert [answer(again[:count], Budget()).act for count in (3, 4)] == ["restart", "end"], "one that always dies does"
    many = [replace(lost[0], host=f"pod-{number}") for number in range(LOST_NODES + 3)]
    assert answer(many[:-1], Budget()).restart and not answer(many, Budget()).restart, "each has a new name"


def test_a_store_that_is_lost_each_time_makes_no_generation_suspect() -> None:
    found = answer([Outcome(100, 100, CRASH, cause="store")] * 3, Budget())
    assert found.act == "end" and "with the same cause" in found.why


def test_kills_by_the_kernel_for_memory_count_as_sigkill() -> None:
    """The most frequent SIGKILL had no bound: its cause has words after the name."""
    killed = Outcome(0, 5, -9, saved_step=4, cause="signal SIGKILL: the kernel killed it for memory")
    assert answer([killed], Budget(of_causes={"SIGKILL": 0})).act == "end"
    assert answer([killed], Budget(of_causes={"SIGBUS": 0})).restart


def test_a_user_chooses_what_is_tried() -> None:
    alike = [FAILS] * 3
    assert answer(alike, Budget(remedies=("skip",))).act == "skip"
    assert answer(alike, Budget(remedies=())).act == "end"


@pytest.mark.parametrize("other", [{"last_step": 13}, {"cause": "signal SIGKILL"}, {"restored_step": None}])
def test_a_failure_elsewhere_or_of_another_kind_is_not_the_same(other: dict[str, object]) -> None:
    assert answer([FAILS, replace(FAILS, **other), FAILS], Budget(without_progress=4)).act == "restart"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "code", "act"),
    [
        ("ModuleNotFoundError: No module named 'apex'", 1, "end"),
        ("SyntaxError: invalid syntax", 1, "end"),
        ("NothingGood: no generation of the run is good", 1, "end"),
        ("NotRestored: /runs/gpt already holds step 6", 1, "end"),
        ("", 2, "end"),
        ("RunLocked: the run is open in process 5", 1, "restart"),
        ("ConnectionError: the name server does not answer", 1, "restart"),
        ("NamedTupleError: 5", 1, "restart"),
    ],
)
def test_what_would_fail_in_the_same_way_again_is_not_started_again(error: str, code: int, act: str) -> None:
    one = Outcome(restored_step=None, last_step=0, code=code, error=error)
    assert answer([one], Budget()).act == act
    assert answer([replace(one, restored_step=5)], Budget()).act == "restart", "it has worked before"


def test_steps_that_are_trained_again_are_counted() -> None:
    assert replayed_steps([FAILS]) == 0 == replayed_steps([FAILS, replace(FAILS, restored_step=None)])
    assert replayed_steps([FAILS, FAILS]) == 2
    assert replayed_steps([FAILS], before=11) == 1, "of an earlier job"
    far = replace(FAILS, last_step=90)
    assert [replayed_steps([far, FAILS]), replayed_steps([far, FAILS, far])] == [2, 80], "no more than it has trained"


def test_pauses_grow_to_a_bound() -> None:
    """The 1,026th failure in a row ended the supervisor with an OverflowError."""
    budget = Budget(without_progress=10**6)
    assert answer(outcomes(*[10] * 1100), budget).pause_seconds == 60.0
    assert [answer(outcomes(*[10] * count), budget).pause_seconds for count in (2, 3, 4, 20)] == [1.0, 2.0, 4.0, 60.0]


def test_a_number_of_restarts_that_the_user_gives_bounds_them() -> None:
    assert answer(outcomes(0, 10), Budget(restarts=2)).restart
    assert not answer(outcomes(0, 10, 20), Budget(restarts=2)).restart
    assert not answer(outcomes(0), Budget(restarts=0)).restart


@pytest.mark.parametrize(("code", "asked"), [(0, False), (PREEMPTED, False), (CRASH, True)])
def test_a_job_that_is_done_or_was_asked_to_end_is_not_started_again(code: int, asked: bool) -> None:
    assert not answer(outcomes(10, code=code), Budget(), asked).restart


@pytest.mark.parametrize(
    "values",
    [
        {"restarts": -1},
        {"restarts": 1.5},
        {"without_progress": 0},
        {"remedies": ("back", "back")},
        {"pause_seconds": float("nan")},
    ],
)
def test_a_budget_that_cannot_be_meant_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(Refused, match=next(iter(values))):
        Budget(**values)  # type: ignore[arg-type]


# ---- blame -----------------------------------------------------------------------------------------------------

RESET = "RuntimeError: [pair.cc:537] Read error [127.0.0.1]:1925: Connection reset by peer."
CLOSED = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:28084."
NCCL = "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1."
LASTGOOD = "RankFailed: rank 2 has sent no message for 30 s"
SILENT = "TimedOut: rank 2: posted nothing within 120 s."
STORE = "TierDown: the store of the process group cannot be reached: no answer in 30 s."
PAIR = "RuntimeError: Application timeout caused pair closure"


@pytest.mark.parametrize("follower", [RESET, CLOSED, NCCL, LASTGOOD, SILENT, STORE, PAIR])
@pytest.mark.parametrize("cause", [Ended(2, 5.0, -9), Ended(2, 5.0, 137), Ended(2, 5.0, 1, "ValueError: bad batch")])
def test_ranks_that_lost_their_connection_are_not_blamed(follower: str, cause: Ended) -> None:
    """A killed rank is noticed after the others, whose errors are printed while it is still being taken down."""
    others = [Ended(0, 4.9, 1, follower), Ended(1, 4.95, 1, follower)]
    assert first_cause([*others, cause]) == cause


def test_an_error_that_another_rank_has_posted_is_its_own() -> None:
    """All ranks raise what one of them has posted, and the one that ended first was named."""
    error = "NotWritable: rank 0: /run: Operation not permitted"
    assert first_cause([Ended(1, 1.0, 1, error), Ended(0, 1.1, 1, error)]) == Ended(0, 1.1, 1, error)


def test_the_earliest_failure_is_the_cause() -> None:
    early, late = Ended(3, 1.0, 1, "KeyError: 'x'"), Ended(0, 2.0, 1, "KeyError: 'x'")
    assert first_cause([late, early]) == early
    alone = Ended(1, 1.0, 1, CLOSED)
    assert first_cause([Ended(0, 0.5, 0), alone]) == alone


def test_a_rank_that_nccl_has_aborted_is_not_blamed() -> None:
    """The word "store" in the name of a folder made the first error look like that of a lost connection."""
    cause = Ended(0, 1.0, 1, "FileNotFoundError: [Errno 2] No such file or directory: '/mnt/datastore/x.bin'")
    assert first_cause([cause, Ended(1, 0.9, -6)]) == cause
    assert first_cause([Ended(1, 0.9, -6)]) == Ended(1, 0.9, -6)


def test_a_rank_that_has_waited_for_another_in_vain_has_timed_out() -> None:
    """What a rank says that has waited for a save of another one was no timeout: the report named it, not that one."""
    unopened = "RankFailed: rank 1 has not opened the run within 300 s."
    assert all(timed_out(Ended(0, 1.0, 1, error)) for error in (SILENT, unopened, LASTGOOD, PAIR))
    assert not timed_out(Ended(0, 1.0, 1, CLOSED))


def test_several_aborts_may_be_a_timeout_and_one_alone_is_none() -> None:
    """An assertion in C++ ends a rank by SIGABRT too, while the others are healthy: it is the cause then."""
    aborted = [Ended(0, 1.0, -6), Ended(1, 1.1, -6)]
    assert may_have_timed_out(aborted, []) and may_have_timed_out([*aborted, Ended(2, 1.0, 1, CLOSED)], [])
    assert not may_have_timed_out(aborted[:1], []) and not may_have_timed_out(
        [aborted[0], Ended(1, 1.0, 1, CLOSED)], []
    )
    assert not may_have_timed_out([*aborted, Ended(2, 1.2, -9)], [0, 1]), "the cause is known"
    assert not may_have_timed_out([Ended(0, 1.0, -6, "ValueError: bad batch"), Ended(1, 1.0, 134)], [0, 1])


def test_one_abort_is_a_timeout_where_its_steps_show_a_wait() -> None:
    alone = [Ended(0, 700.0, -6), Ended(1, 700.1, 1, CLOSED)]
    assert may_have_timed_out(alone, [0]) and not may_have_timed_out(alone, [1])
    assert had_waited(600.0, 2.0) and not had_waited(600.0, 0.0), "no step was measured"
    assert not had_waited(9.0, 2.0) and not had_waited(2.0, 0.001), "a step may take longer at times"


@pytest.mark.parametrize(
    ("error", "waited"),
    [
        (LASTGOOD, True),
        (STORE, True),
        (PAIR, True),
        ("torch.distributed.DistBackendError: Watchdog caught collective operation timeout", True),
        ("DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients joined.", True),
        ("ReadTimeout: HTTPSConnectionPool(host='data', port=443): Read timed out. (read timeout=10)", False),
        ("TimeoutExpired: Command 'gzip' timed out after 30 seconds", False),
        ("RuntimeError: DataLoader timed out after 30 seconds", False),
        ("TierDown: the disk failed: /nfs/run: Connection timed out", False),
    ],
)
def test_only_what_ranks_wait_for_is_a_wait_of_ranks(error: str, waited: bool) -> None:
    """A rank whose download had timed out made another one hang, in the line where that computed."""
    assert timed_out(Ended(0, 1.0, 1, error)) == waited


def test_regular_ends_are_no_failures() -> None:
    assert first_cause([Ended(0, 1.0, 0), Ended(1, 1.0, PREEMPTED)]) is None


def test_ranks_that_were_asked_to_end_for_another_node_are_no_failure() -> None:
    asked, killed = Outcome(None, 0, PREEMPTED), Outcome(None, 0, -9)
    assert answer([asked], Budget(), regrouped="one more node joins") == Answer("restart", "one more node joins")
    assert answer([asked, asked, killed], Budget(restarts=1)).restart
    assert answer([asked], Budget()).act == "end"

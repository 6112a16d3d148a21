"""When failures point to one machine, and what becomes of the job without it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lastgood.policy.membership import Next
from lastgood.policy.quarantine import kept, points_to_machine, suspect
from lastgood.policy.recovery import Budget, Outcome, answer, without_progress


def killed(step: int, host: str = "a", cause: str = "signal SIGKILL") -> Outcome:
    """An attempt that a signal has ended after this step."""
    return Outcome(restored_step=0, last_step=step, code=-9, cause=cause, host=host)


def host(*outcomes: Outcome, failures: int = 3) -> str:
    found = suspect(outcomes, failures)
    return "" if found is None else found.host


def test_a_host_on_which_failures_of_varying_steps_begin_is_suspect() -> None:
    found = suspect([killed(3), killed(8, cause="hang"), killed(5)], 3)
    assert found is not None and found.host == "a"
    assert "began on a (SIGKILL at step 3, hang at step 8, SIGKILL at step 5)" in found.why
    assert host(killed(3), killed(8)) == "" and host(killed(3), killed(8), failures=2) == "a"
    assert host(*map(killed, range(9)), failures=0) == ""


def test_failures_that_another_host_shares_clear_both() -> None:
    assert host(killed(1), killed(2, "b"), killed(3), killed(4)) == ""
    assert host(killed(1), killed(2, "b"), killed(3), killed(4), killed(5)) == "a"


def test_failures_at_one_step_with_one_cause_are_not_of_the_machine() -> None:
    assert host(killed(7), killed(7), killed(7)) == ""


def test_errors_of_the_program_neither_count_nor_clear_a_host() -> None:
    program = Outcome(
        restored_step=0, last_step=4, code=1, cause="exception ValueError", error="ValueError: x", host="b"
    )
    assert host(killed(1), program, killed(2), program, killed(3)) == "a"
    assert host(killed(1), killed(2), killed(3), program) == ""


@pytest.mark.parametrize(
    ("error", "points"),
    [
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", True),
        ("OSError: [Errno 5] Input/output error", True),
        ("torch.distributed.DistBackendError: NCCL error: ncclSystemError: System call failed", True),
        ("RuntimeError: CUDA error: device-side assert triggered", False),
        ("torch.OutOfMemoryError: CUDA out of memory", False),
    ],
)
def test_an_error_that_speaks_of_a_broken_device_points_to_it(error: str, points: bool) -> None:
    assert points_to_machine(Outcome(restored_step=0, last_step=4, code=1, cause="exception X", error=error)) == points


def test_a_process_killed_for_memory_does_not_point_to_the_machine() -> None:
    assert not points_to_machine(killed(1, cause="signal SIGKILL: the kernel killed it for memory"))


def test_a_job_without_its_broken_node_has_its_whole_budget_again() -> None:
    """A broken node used up the budget of the job, which was given up as soon as the node could have been named."""
    failures = [killed(1), killed(2), killed(3)]
    assert answer(failures, Budget()).act == "end"
    assert answer(failures, Budget(), left_out="a is left out").act == "restart"
    failures[-1] = replace(failures[-1], left_out="a")
    assert without_progress([*failures, killed(4, "b")]) == 1
    assert host(*failures, killed(4)) == "", "it was mended, perhaps"
    again = [*failures, killed(5), killed(6), replace(killed(7), left_out="a")]
    assert without_progress([*again, killed(8, "b")]) == 4, "a node that always comes back keeps no job alive"


def test_a_node_stays_that_nobody_can_replace_or_that_holds_the_store() -> None:
    assert kept(Next("join"), holds_store=False) == ""
    assert "no other node" in kept(Next("end"), holds_store=False)
    assert "store" in kept(Next("join"), holds_store=True)

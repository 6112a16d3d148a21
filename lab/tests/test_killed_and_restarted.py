"""The recovery that `lastgood bench interval` measures, with children that only print messages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lastgood_lab import interval, recovery
from lastgood_lab.journal import Journal
from lastgood_lab.policy import Settings

pytestmark = pytest.mark.slow

SPEC = recovery.Spec("gpt2-124m", 0.001, 0.001, "cpu", "PCcheck", 10, "unused", Settings())
LAST = 29
"""the last step after which a kill of a spec with this interval may come"""
STARTS = "ready 0 0.0\n"
TRAINS = f"{STARTS}loaded 0 0.5\n" + "".join(f"step {step} 0.0\n" for step in range(1, LAST + 1))
BACK_AT_ONCE = f"{STARTS}loaded {LAST} 0.5\n"
WAITS = "signal.pause()"
Life = tuple[str, str]
"""the messages of a child, which it sends at once, and the statement with which it goes on"""


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives the first and the second child."""

    def give(*children: Life) -> None:
        left = iter(children)

        def life(_: recovery.Spec) -> subprocess.Popen[bytes]:
            messages, then = next(left)
            program = f"import signal, sys; sys.stdout.write({messages!r}); sys.stdout.flush(); {then}"
            return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)

        monkeypatch.setattr(recovery, "_life", life)

    return give


@pytest.mark.parametrize(("second", "resumed"), [(TRAINS, 0), (BACK_AT_ONCE, LAST)])
def test_a_recovery_ends_when_the_last_step_is_reached_again(
    lives: Callable[..., None], second: str, resumed: int
) -> None:
    lives((TRAINS, WAITS), (second, WAITS))
    found = recovery.killed_and_restarted(SPEC, 0, 2.0)
    assert (found["killed_after"], found["resumed_from"], found["load_seconds"]) == (LAST, resumed, 0.5)


@pytest.mark.parametrize(
    ("children", "what"),
    [
        ([("", "sys.exit(3)")], r"PCcheck every 10: the first process ended before .* step 2\d.* exit code is 3"),
        ([(f"{STARTS}loaded 0 0.5\nstep 1 0.0\n", "pass")], "the first process .* exit code is 0"),
        ([(TRAINS, WAITS), ("", "sys.exit(4)")], f"the second process .* step {LAST}; its exit code is 4"),
        ([(TRAINS, WAITS), (f"{STARTS}loaded 10 0.5\n", "sys.exit(5)")], "the second process .* exit code is 5"),
    ],
)
def test_a_process_that_ends_by_itself_is_no_recovery(
    lives: Callable[..., None], children: list[Life], what: str
) -> None:
    """A child that failed, such as one of device cuda on a machine without CUDA, counted as a recovery in 0.0 s."""
    lives(*children)
    with pytest.raises(RuntimeError, match=what):
        recovery.killed_and_restarted(SPEC, 0, 2.0)


def test_a_failed_recovery_is_not_put_into_the_journal(lives: Callable[..., None], tmp_path: Path) -> None:
    lives(("", "sys.exit(1)"))
    options = interval.Options(tmp_path, policies=["PCcheck"], intervals=[10], kills=1)
    measured = {"kind": "throughput", "model": "gpt2-124m", "policy": "PCcheck", "interval": 10}
    measured |= {"save_seconds": 2, "plain_step_seconds": 1}
    with pytest.raises(RuntimeError, match="the first process"):
        interval._recovery(options, "gpt2-124m", Journal(tmp_path / "journal"), pytest.fail, [measured])
    assert not list(tmp_path.iterdir())

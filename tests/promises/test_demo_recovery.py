"""A shortened demo of recovery: one rank is killed, one loss is NaN. The demo itself detects what does not hold."""

from __future__ import annotations

import importlib
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

pytestmark = pytest.mark.slow

sys.path.insert(0, str(Path(__file__).parents[2] / "demo"))
recovery, recovery_story = importlib.import_module("recovery"), importlib.import_module("recovery_story")

PLAN = recovery.Plan((recovery_story.KILLED, recovery_story.NAN), save_every=4)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recovery")


@pytest.fixture(scope="module")
def demonstrated(out: Path):
    shutil.rmtree(out)
    return recovery.demo(out, PLAN, Console(quiet=True))


def failing(out: Path, calm, healed) -> list[str]:
    found = recovery_story.checks(calm, healed, out / "undisturbed/run", out / "faults/run", PLAN.steps)
    return [one.claim for one in found if not one.holds]


def test_two_nodes_come_back_from_a_kill_and_from_a_nan(demonstrated, out: Path) -> None:
    checks, healed = demonstrated
    assert [one for one in checks if not one.holds] == []
    assert [one.cause and one.cause.kind for one in healed.attempts] == ["signal", "exception", None]
    assert healed.finish.samples_left_out > 0
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_detects_one_bit_of_one_loss_and_a_wrong_cause(demonstrated, out: Path) -> None:
    _, healed = demonstrated
    folder = out / "undisturbed"
    calm = recovery_story.story(folder / "run", folder / "records", folder / "lives.jsonl", [])
    assert failing(out, calm, healed) == []
    last = healed.steps[2][-1]
    other = msgspec.structs.replace(last, loss=math.nextafter(last.loss, 1))
    changed = replace(healed, steps={**healed.steps, 2: [*healed.steps[2][:-1], other]})
    assert failing(out, calm, changed) == ["losses equal, bit for bit", "and those trained again"]
    killed, nan = healed.blows
    swapped = replace(healed, blows=[killed._replace(ranks=(3,)), nan._replace(ranks=(2,))])
    assert failing(out, calm, swapped) == ["the right first cause"]

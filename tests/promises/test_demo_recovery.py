"""A shortened demo of recovery, on two nodes: one loss is NaN. The demo itself detects what does not hold.

The undisturbed job is left out here: what was trained again is compared with what had been trained before.
"""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

pytestmark = pytest.mark.slow

sys.path.insert(0, str(Path(__file__).parents[2] / "demo"))
recovery, picture = importlib.import_module("recovery"), importlib.import_module("recovery_picture")
recovery_story = importlib.import_module("recovery_story")

PLAN = recovery.Plan([recovery_story.NAN], save_every=12)
"""With 4, four steps were left after the one at which the fault was due: a busy machine trained them before it came."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recovery") / "faults"


@pytest.fixture(scope="module")
def healed(folder: Path):
    return recovery.in_trouble(folder, PLAN, Console(quiet=True))


def failing(folder: Path, expected, healed) -> list[str]:
    found = recovery_story.checks(expected, healed, folder / "run", folder / "run", PLAN.steps)
    return [one.claim for one in found if not one.holds]


def test_two_nodes_come_back_from_a_nan_with_the_same_losses(healed, folder: Path) -> None:
    assert failing(folder, healed, healed) == []
    assert [one.cause and one.cause.kind for one in healed.attempts] == ["exception", None]
    assert healed.attempts[1].replayed_steps > 0
    picture.draw(folder / "timeline.png", healed, holds=True)
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_of_the_demo_has_the_whole_first_cause(healed) -> None:
    """It was cut off after 78 characters, in the middle of a word. A node with no sign of life for 5 s was noticed
    after 0.2 s, without a word about the ranks that had failed by then."""
    console = Console(width=140)
    with console.capture() as shown:
        console.print(recovery.costs(healed, plain=True))
    whole = healed.attempts[0].cause.what.splitlines()[0].split()
    found = iter(shown.get().split())
    assert all(word in found for word in whole), "each word, in this order"
    assert "first noticed: the first failure of any rank." in shown.get()


def test_the_demo_detects_one_bit_of_one_loss_and_a_wrong_cause(healed, folder: Path) -> None:
    last = healed.steps[2][-1]
    other = msgspec.structs.replace(last, loss=math.nextafter(last.loss, 1))
    changed = replace(healed, steps={**healed.steps, 2: [*healed.steps[2][:-1], other]})
    assert failing(folder, healed, changed) == ["losses equal, bit for bit", "and those trained again"]
    blamed = replace(healed, blows=[healed.blows[0]._replace(ranks=(2,))])
    assert failing(folder, healed, blamed) == ["the right first cause"]

"""Generations that a supervisor suspects, as a restore follows it: stepped over, and marked once that is proven."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

import lastgood
from harness import flip
from lastgood.cli import mending
from lastgood.errors import NothingGood
from lastgood.format import commit, layout
from lastgood.policy.recovery import Budget, Outcome, answer
from lastgood.records import Generation, GenerationId
from lastgood.run import access, advice, side_records
from lastgood.run.advice import Advice


def opened(run: Path, tiers: Sequence[lastgood.Tier] = (), parity: str | None = None) -> lastgood.Checkpointer:
    state, steps, kept = {"x": torch.ones(3)}, lastgood.Every(steps=1), lastgood.Keep(last=9)
    return lastgood.Checkpointer(run, state, cadence=steps, retention=kept, tiers=tiers, parity=parity)


def trained(run: Path, last: int, tiers: Sequence[lastgood.Tier] = (), parity: str | None = None) -> int:
    """Restore and train until step `last`, every step saved. Returns the restored step."""
    with opened(run, tiers, parity) as ckpt:
        start = ckpt.restore().step
        for n in range(start + 1, last + 1):
            ckpt.save(n).result()
    return start


def generations(run: Path) -> dict[GenerationId, Generation]:
    return dict(commit.survey(access.for_reading(run)).generations)


def suspected(run: Path, failed: int) -> Advice:
    """A supervisor suspects the newest generation: training fails after step `failed`."""
    made = Advice(format=layout.FORMAT, by="supervisor", at=0.0, step=failed, why="it failed three times")
    made = replace(made, suspect=max(generations(run)))
    with side_records.opened(str(run)) as tier:
        advice.append(tier, made)
    return made


def test_a_suspect_generation_is_marked_once_training_came_past_it(tmp_path: Path) -> None:
    """The newest generation was marked for good when a typo in the script had failed three times."""
    run = tmp_path / "run"
    trained(run, 4)
    suspect = suspected(run, failed=6).suspect
    assert suspect is not None and trained(run, 6) == 3
    assert not generations(run)[suspect].unfit, "nothing is proven yet"
    assert trained(run, 8) == 6 and not generations(run)[suspect].unfit
    assert trained(run, 8) == 8 and "it failed three times" in generations(run)[suspect].unfit[0].what


def test_a_suspect_that_is_withdrawn_is_restored_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(run, 4)
    made = suspected(run, failed=4)
    with opened(run) as ckpt:
        assert ckpt.restore().step == 3
    with side_records.opened(str(run)) as tier:
        advice.append(tier, replace(made, withdrawn=True))
    assert trained(run, 5) == 4


def test_a_suspect_from_which_training_went_on_is_not_marked(tmp_path: Path) -> None:
    """Somebody has mended the script, and has asked for the step."""
    run = tmp_path / "run"
    trained(run, 4)
    suspect = suspected(run, failed=4).suspect
    with opened(run) as ckpt:
        assert ckpt.restore(step=4).step == 4
        ckpt.save(5).result()
    assert trained(run, 6) == 5 and trained(run, 6) == 6
    assert suspect is not None and generations(run)[suspect].good


def test_a_suspect_from_which_training_went_on_is_not_deleted(tmp_path: Path) -> None:
    """It was the only good one, and so was restored again. The next start let it count as unfit: it was deleted."""
    run = tmp_path / "run"
    with opened(run) as ckpt:
        ckpt.restore()
        ckpt.save(4).result()
    suspect = suspected(run, failed=9).suspect
    assert trained(run, 5) == 4 and trained(run, 7) == 5
    assert suspect is not None and generations(run)[suspect].good


def test_of_two_suspects_the_newer_one_is_set_aside_first(tmp_path: Path) -> None:
    """The newer one descends from the older one, from which training had gone on."""
    run = tmp_path / "run"
    trained(run, 3)
    suspected(run, failed=9)
    with opened(run) as ckpt:
        ckpt.restore(step=3)
        ckpt.save(4).result()
    suspected(run, failed=9)
    with opened(run) as ckpt:
        assert ckpt.restore().step == 2


def test_a_suspect_is_restored_from_no_other_place_either(tmp_path: Path) -> None:
    """One that was in the first place and in the home was marked in the first place, and restored from the home."""
    run, tiers = tmp_path / "run", [lastgood.Tier(tmp_path / "first")]
    trained(run, 4, tiers)
    suspected(run, failed=4)
    with opened(run, tiers) as ckpt:
        assert ckpt.restore().step == 3


def test_a_scrub_does_not_acquit_a_suspect(tmp_path: Path) -> None:
    """Its bytes are whole, so the scrub marked it as verified: `lastgood.load` and latest_ok took a diverged state."""
    run = tmp_path / "run"
    trained(run, 4)
    made = suspected(run, failed=4)
    with side_records.opened(str(run)) as tier:
        advice.append(tier, replace(made, by="sentinel"))
    with opened(run) as ckpt:
        assert ckpt.restore().step == 3
    assert mending.scrubbed(str(run), float("inf"))["generations"][-1]["state"] == "not good"
    assert made.suspect is not None and generations(run)[made.suspect].unfit
    assert lastgood.load(run).restored.step == 3 and "000000000003" in str((run / layout.LINK).readlink())


def test_a_suspect_stays_one_while_an_older_save_is_repaired(tmp_path: Path) -> None:
    """The run was listed anew after the repair, and what only this process knew of the suspect was gone."""
    run = tmp_path / "run"
    for last in (3, 4):  # in two processes: parity of an older save is not written once a newer one has come
        trained(run, last, parity="2+1")
    suspected(run, failed=4)
    (broken,) = run.glob(f"gen/000000000003-*/{layout.COMMIT}")
    flip(broken)
    with opened(run, parity="2+1") as ckpt:
        found = ckpt.restore()
    assert found.step == 3 and [step for step, _ in found.repaired] == [3]


def test_a_suspect_is_restored_again_where_the_one_before_is_damaged(tmp_path: Path) -> None:
    """The damage shows in the restore that goes back, which fails: a supervisor gave the job up then."""
    run = tmp_path / "run"
    trained(run, 2)
    (data,) = run.glob("gen/000000000001-*/r00000.safetensors")
    flip(data)
    suspected(run, failed=5)
    with opened(run) as ckpt, pytest.raises(NothingGood) as raised:
        ckpt.restore()
    went_back = Outcome(restored_step=2, last_step=5, code=1, cause="exception ValueError", followed="back")
    failed = Outcome(restored_step=None, last_step=0, code=1, error=f"NothingGood: {raised.value}")
    assert answer([went_back, failed], Budget()).restart and trained(run, 3) == 2
    assert answer([went_back, failed, failed], Budget()).act == "end"

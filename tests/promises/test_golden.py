"""Golden runs stay readable: runs that earlier code wrote in slots, with parity and by several ranks can be
continued.

The run of one process in a directory, `v1`, is tested in test_layout.py and test_pointers.py.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lastgood
from harness import digests
from lastgood.cli import app
from lastgood.engine.arena import Arena
from lastgood.engine.inline_executor import Inline
from lastgood.io.files import PosixFiles
from lastgood.run.scrubber import Scrubber
from lastgood.run.writer import RunWriter
from lastgood.storage.directory import Disk

DATA = Path(__file__).parents[1] / "golden"
NEWEST = {"slots": 3, "parity": 3, "ranks": 4}
EXPECTED = json.loads((DATA / "golden.json").read_text())


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], str]:
    """The path of a copy of a golden run, so that a test cannot change the original."""

    def copy(name: str) -> str:
        shutil.copytree(DATA / name, tmp_path / name)
        return f"slots://{tmp_path}/{name}" if name == "slots" else str(tmp_path / name)

    return copy


def state_of_one_process() -> dict[str, object]:
    model = torch.nn.Linear(6, 3)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "losses": (), "note": ""}


@pytest.mark.parametrize("name", NEWEST)
def test_every_tensor_of_a_golden_run_is_unchanged(copied, name: str) -> None:
    path = copied(name)
    run = lastgood.open(path)
    assert run.generation().step == NEWEST[name] and run.verify().good
    assert digests(path) == EXPECTED[name]


@pytest.mark.parametrize("name", ["slots", "parity"])
def test_a_golden_run_of_one_process_is_restored_and_continues(copied, name: str) -> None:
    path, state = copied(name), state_of_one_process()
    with lastgood.Checkpointer(path, state) as ckpt:
        assert ckpt.restore().step == 3
        assert state["losses"] == (0.5, float("inf")) and state["note"] == "naïve ✓"
        ckpt.save(4).result()
    before, after = EXPECTED[name], digests(path)
    assert after == {**before, **{one: after[one] for one in before if one.startswith("rng.")}}


def test_a_golden_run_of_two_ranks_is_read_by_one_process(copied) -> None:
    loaded = lastgood.load(copied("ranks"))
    assert loaded.restored.step == 4 and loaded["net"]["up.weight"].shape == (32, 16)
    digest = hashlib.sha256(loaded["net"]["up.weight"].numpy().tobytes()).hexdigest()
    assert digest == EXPECTED["ranks"]["net.up.weight"]


def test_a_run_of_two_ranks_is_verified_and_scrubbed_with_parity(copied) -> None:
    """When one process continued the run and requested parity, both the verification and the scrub ended in
    `StopIteration`."""
    path = Path(copied("ranks"))
    marks = [*path.glob("gen/*/VERIFIED.json")]
    run, arena = RunWriter(Disk(PosixFiles(), str(path)), Inline(), parity="2+1"), Arena(3 * 8192, 8192)
    scrubbed = Scrubber(run.known, run.mender, lambda: arena)
    assert [one.generation.step for one in iter(scrubbed.scrub_next, None) if one.whole] == [2, 4]
    for mark in marks:
        mark.unlink()
    run = RunWriter(Disk(PosixFiles(), str(path)), Inline(), parity="2+1")
    run.begin(max(run.survey.generations, key=lambda one: one.step))
    run.verify(arena)
    assert run.known.newest_verified().step == 4
    assert {one.name for one in path.glob("gen/*04-*/*parity*")} == {
        f"r0000{rank}.parity-0{end}" for rank in (0, 1) for end in ("", ".json")
    }


def test_the_parity_of_a_golden_run_rebuilds_damage(copied) -> None:
    path = copied("parity")
    (file,) = Path(path).glob("gen/*03-*/r00000.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:5000] + bytes(100) + whole[5100:])
    assert not lastgood.open(path).verify(3).good
    assert app.main(["repair", path]) == 0
    assert file.read_bytes() == whole


def test_a_milestone_added_to_a_golden_run_is_kept(copied) -> None:
    path = copied("parity")
    with lastgood.Checkpointer(path, state_of_one_process(), retention=lastgood.Keep(last=1)) as ckpt:
        ckpt.restore()
        ckpt.save(4).result()
        ckpt.wait()
    kept = {one.step: one.commit for one in lastgood.open(path).generations()}
    assert [*kept] == [2, 4] and kept[2].milestone and kept[2].metrics == {"loss": 0.25}

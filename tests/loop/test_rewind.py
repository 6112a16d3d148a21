"""A restore of an older step changes the lineage of the run only with the first save after it."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest
import torch

import lastgood
from harness import reported, reports
from lastgood import errors
from lastgood.policy.retention import Keep
from lastgood.storage.directory import Disk
from lastgood.testing import Fault


def trained(path: Path) -> dict[str, torch.Tensor]:
    """Steps 1 to 5, each verified."""
    state = {"w": torch.zeros(3)}
    with lastgood.Checkpointer(path, state, retention=Keep(last=9)) as ckpt:
        for n in range(1, 6):
            state["w"].fill_(n)
            ckpt.save(n).result()
            ckpt.wait()
    return state


def contents(path: Path) -> dict[str, bytes]:
    return {str(one.relative_to(path)): one.read_bytes() for one in path.rglob("*") if one.is_file()}


def newest(path: Path) -> int:
    return lastgood.load(path, {"w": torch.zeros(3)}).step


def test_restoring_an_old_step_without_saving_leaves_the_run_unchanged(tmp_path: Path) -> None:
    """After restore(step=2) for an evaluation that saved nothing, the next session resumed at 2, and 3 to 5 were
    deleted later."""
    state = trained(tmp_path)
    before = contents(tmp_path)
    with lastgood.Checkpointer(tmp_path, state) as ckpt:
        assert ckpt.restore(step=2).step == 2 and state["w"].tolist() == [2, 2, 2]
        assert ckpt.latest() == 2, "this process continues from step 2"
        assert ckpt.restore().step == 2
    assert contents(tmp_path) == before
    assert newest(tmp_path) == 5


def test_the_first_save_after_a_rewind_makes_it_durable(tmp_path: Path) -> None:
    state = trained(tmp_path)
    with lastgood.Checkpointer(tmp_path, state, retention=Keep(last=9)) as ckpt:
        ckpt.restore(step=2)
        ckpt.save(3).result()
        ckpt.wait()
    assert newest(tmp_path) == 3
    assert (tmp_path / "latest_ok").resolve().name.startswith("000000000003")
    with lastgood.Checkpointer(tmp_path, state) as ckpt:
        assert ckpt.restore().step == 3
        steps = [one.step for one in ckpt._pipeline.run.lineage()]
    assert steps == [3, 2, 1], "the steps after step 2 are abandoned"


@pytest.mark.parametrize("blob", [".safetensors", "COMMIT"])
def test_an_uncommitted_first_save_leaves_the_old_lineage(tmp_path, faulty_files, blob) -> None:
    """The rewind takes effect with the COMMIT of that save, or not at all."""
    state = trained(tmp_path)
    with lastgood.Checkpointer(tmp_path, state, save_on_exit=False) as ckpt:
        ckpt.restore(step=2)
        faulty_files.inject(Fault("write", f"*{blob}*"))
        with pytest.raises(errors.TierDown):
            ckpt.save(3).result()
        faulty_files.clear()
    assert newest(tmp_path) == 5


def test_a_rewind_without_its_record_is_durable_with_its_first_save(tmp_path: Path, faulty_files) -> None:
    """The COMMIT of that save names the generation that it continues; the next save or session writes the record."""
    state = trained(tmp_path)
    with lastgood.Checkpointer(tmp_path, state, retention=Keep(last=9)) as ckpt:
        ckpt.restore(step=2)
        faulty_files.inject(Fault("write", "*/incarnations/*", errno.ENOSPC))
        ckpt.save(3).result()
        assert newest(tmp_path) == 3
        faulty_files.clear()
        assert len(list((tmp_path / "incarnations").iterdir())) == 1
        ckpt.save(4).result()
    assert len(list((tmp_path / "incarnations").iterdir())) == 2
    assert newest(tmp_path) == 4


def test_starting_over_becomes_durable_with_its_first_save(tmp_path: Path) -> None:
    state = trained(tmp_path)
    with lastgood.Checkpointer(tmp_path, state) as ckpt:
        assert ckpt.restore(step=0).step == 0
        assert ckpt.latest() is None
    assert newest(tmp_path) == 5
    with lastgood.Checkpointer(tmp_path, state, retention=Keep(last=9)) as ckpt:
        ckpt.restore(step=0)
        ckpt.save(1).result()
    assert newest(tmp_path) == 1


@pytest.mark.parametrize("moved", ["restored", "trained", "trained before a refused step"])
def test_a_state_that_has_moved_on_cannot_start_over(tmp_path: Path, moved: str) -> None:
    """restore(step=0) returned step 0 in a process that had trained or restored ten steps, and left its state as it
    was: the next save stored the weights of step 10 as those of step 0."""
    trained(tmp_path)
    state = {"w": torch.zeros(3)}
    with lastgood.Checkpointer(tmp_path, state, save_on_exit=False) as ckpt:
        if moved == "restored":
            ckpt.restore()
        elif moved == "trained":
            ckpt.restore(step=0)
            ckpt.step(1)
        else:
            state["w"].fill_(9)
            with pytest.raises(errors.NotRestored):
                ckpt.step(1)
        with pytest.raises(errors.Refused, match="cannot start over"):
            ckpt.restore(step=0)
    with lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}) as ckpt:
        assert ckpt.restore(step=0).step == 0


def test_a_trained_state_at_step_0_is_reported_before_the_first_save(tmp_path: Path) -> None:
    """A loop that caught an error before its first save restored step 0, with the weights that it had trained, without
    a word."""
    state = {"w": torch.zeros(3)}
    with lastgood.Checkpointer(tmp_path, state, cadence=lastgood.Every(steps=100), save_on_exit=False) as ckpt:
        assert ckpt.restore().step == ckpt.restore().step == 0
        state["w"].fill_(1)
        ckpt.step(1)
        with reported("has found nothing that was saved, .* and the state is that of step 1 or later", logging.ERROR):
            assert ckpt.restore().step == 0


def test_a_new_run_of_objects_that_were_trained_is_reported(tmp_path: Path) -> None:
    """A cell of a notebook that was run again, with another path, began its count of steps at 0 with the objects that
    the first one had trained, without a word."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for path, count in (("a", 0), ("b", 1)):
        with (
            reports(logging.WARNING) as texts,
            lastgood.Checkpointer(tmp_path / path, {"model": model, "optimizer": optimizer}) as ckpt,
        ):
            ckpt.restore()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            ckpt.step(1)
        assert sum("optimizers that have made steps: optimizer." in one for one in texts) == count


def test_nothing_is_deleted_for_a_rewind_that_is_not_durable(tmp_path: Path) -> None:
    state = trained(tmp_path)
    with lastgood.Checkpointer(tmp_path, state, retention=Keep(last=1)) as ckpt:
        ckpt.restore(step=2)
        ckpt._pipeline.run.clean()
    assert newest(tmp_path) == 5


def test_lineages_stay_distinct_after_their_commits_are_deleted(tmp_path: Path) -> None:
    """Each session saves once, so the newest generation is linked to the oldest only through the records of the
    sessions in between."""
    state = trained(tmp_path)
    keep = Keep(last=1, milestones=(1,))
    for n in (6, 7, 8):
        with lastgood.Checkpointer(tmp_path, state, retention=keep) as ckpt:
            ckpt.restore()
            ckpt.save(n).result()
            ckpt.wait()
    with lastgood.Checkpointer(tmp_path, state, retention=keep) as ckpt:
        assert [one.step for one in ckpt._pipeline.run.lineage()] == [8, 1]


def test_a_commit_is_kept_while_its_incarnation_record_cannot_be_written(tmp_path: Path, monkeypatch) -> None:
    """The record is a hint. A NotWritable from writing it deleted the COMMIT that had just been made, and blamed the
    disk."""
    put_new = Disk.put_new

    def refused(self: Disk, name: str, data: bytes) -> None:
        if name.startswith("incarnations/"):
            raise errors.NotWritable("incarnations/ belongs to root")
        put_new(self, name, data)

    monkeypatch.setattr(Disk, "put_new", refused)
    state = {"w": torch.ones(3)}
    with lastgood.Checkpointer(tmp_path, state) as ckpt:
        ckpt.save(1).result(60)
        ckpt.save(2).result(60)
    assert [one.step for one in lastgood.open(tmp_path).generations() if not one.damaged] == [1, 2]

"""Saving a step that is already saved adds milestones and metrics; nothing is written twice or dropped."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

import lastgood
from harness import reported, reports, steps
from lastgood import errors
from lastgood.format import commit, layout
from lastgood.format.layout import label_number
from lastgood.io.files import PosixFile
from lastgood.loop.metrics import numbers
from lastgood.loop.saver import Saver
from lastgood.policy.cadence import Every
from lastgood.policy.retention import Keep
from lastgood.records import GenerationId
from lastgood.run import access
from lastgood.run.writer import RunWriter
from lastgood.testing import Fault


def test_a_milestone_is_added_to_the_generation_of_the_cadence(tmp_path: Path) -> None:
    """A save(n, milestone=True) after step(n) had saved step n raised StepTaken, and ended the training."""
    options = {"cadence": Every(steps=1), "retention": Keep(last=1)}
    with lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}, **options) as ckpt:
        for n in range(1, 7):
            begun = ckpt.step(n)
            if n % 3 == 0:
                assert ckpt.save(n) is begun
                assert ckpt.save(n, milestone=True).result().commit.milestone
            ckpt.wait()
    assert steps(tmp_path) == [3, 6]
    with lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}, **options) as ckpt:
        ckpt.restore()
        ckpt.save(7).result()
        ckpt.wait()
    assert steps(tmp_path) == [3, 6, 7], "the next session reads the label"


def test_a_schedule_that_changed_after_the_step_was_saved_is_reported(tmp_path: Path) -> None:
    """The milestone of an epoch, saved after the schedule had been stepped, had the learning rate of before where the
    cadence had saved the step already, and the one of after where it had not."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "epoch": 0, "name": "a"}
    with lastgood.Checkpointer(tmp_path, state, cadence=Every(steps=1)) as ckpt:
        optimizer.step()
        ckpt.step(1)
        with reports(logging.WARNING) as texts:
            ckpt.save(1, metrics={"loss": 1.0})
        assert not texts
        schedule.step()
        state["epoch"] = 1
        with reported("step 1 was saved before optimizer, schedule, epoch changed"):
            ckpt.save(1, milestone=True)


def test_a_number_that_changed_after_the_last_save_is_reported_at_the_exit(tmp_path: Path) -> None:
    """Only save(n) compared: where the cadence had saved the last step, the exit reported nothing."""
    state = {"w": torch.zeros(2), "epoch": 0, "name": "a"}
    with reported("step 1 was saved before epoch changed"), lastgood.Checkpointer(tmp_path, state) as ckpt:
        ckpt.save(1)
        state["epoch"] = 1


def test_data_and_buffers_that_changed_after_the_last_save_are_reported(tmp_path: Path) -> None:
    """save(n) of a step that the cadence had saved dropped them without a word: numbers and schedules were compared,
    and nothing else. What draws random numbers or is iterated changes meanwhile, and is not reported."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    best, drawn = {"score": 0.0, "random": torch.Generator()}, torch.Generator()
    state = {"model": model, "best": best, "curve": [1.0], "mean": torch.zeros(2), "drawn": drawn}
    with lastgood.Checkpointer(tmp_path, state, cadence=Every(steps=1)) as ckpt:
        ckpt.step(1)
        torch.rand(1, generator=drawn)
        torch.rand(1, generator=best["random"])
        with reports(logging.WARNING) as texts:
            ckpt.save(1, metrics={"loss": 1.0})
        assert not texts
        best["score"] = 1.0
        state["curve"].append(2.0)
        with reported("step 1 was saved before best, curve changed"):
            ckpt.save(1, milestone=True)
        best["score"] = 0.0
        state["curve"].pop()
        state["mean"].add_(1.0)
        model(torch.ones(4, 2))
        with reported("step 1 was saved before mean, model.0.num_batches_tracked, model.0.running_mean and 1 more"):
            ckpt.save(1, milestone=True)


def test_a_save_after_a_list_of_tensors_was_emptied_is_reported(tmp_path: Path) -> None:
    """A list of tensors that was emptied between step(1) and save(1) ended the training with a KeyError."""
    model = torch.nn.Linear(2, 2)
    state = {"model": model, "recent": [torch.zeros(2)], "best": {"w": torch.zeros(2, 2)}}
    with lastgood.Checkpointer(tmp_path, state, cadence=Every(steps=1)) as ckpt:
        ckpt.step(1)
        state["recent"].clear()
        state["best"]["w"] = model.weight
        with reported("step 1 was saved before recent, best, best.w and 1 more changed"):
            ckpt.save(1, milestone=True).result()


def test_metrics_after_an_evaluation_feed_keep_best(tmp_path: Path) -> None:
    """step() accepted no metrics, so Keep(best=...) had no metric to rank by in a loop with a cadence."""
    options = {"cadence": Every(steps=1), "retention": Keep(last=1, best=("loss", "min", 1))}
    with lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}, **options) as ckpt:
        ckpt.step(1, metrics={"loss": 5.0})
        ckpt.step(2)
        ckpt.save(2, metrics={"loss": torch.tensor(1.0)})
        ckpt.wait()
        ckpt.step(3, metrics={"loss": numpy.float32(3)})
        ckpt.wait()
        ckpt.step(4)
    assert steps(tmp_path) == [2, 4]
    assert lastgood.open(tmp_path).generation(2).commit.metrics == {"loss": 1.0}


def test_labels_accumulate_and_damaged_or_foreign_ones_are_ignored(tmp_path: Path) -> None:
    with lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}) as ckpt:
        ckpt.save(1, metrics={"a": 1.0})
        ckpt.save(1, metrics={"a": 2.0, "b": 3.0})
        ckpt.save(1, metrics={"b": 3.0})
        ckpt.save(1, milestone=True)
        ckpt.wait()
    (folder,) = (tmp_path / "gen").iterdir()
    labels = sorted(one for one in folder.iterdir() if label_number(one.name))
    assert [one.name for one in labels] == ["LABEL-1.json", "LABEL-2.json"], (
        "a label that changes nothing is not written"
    )
    found = lastgood.open(tmp_path).generation(1)
    assert (found.commit.metrics, found.commit.milestone) == ({"a": 2.0, "b": 3.0}, True) and found.good
    labels[0].write_bytes(labels[0].read_bytes().replace(b"3.0", b"4.0"))
    other = labels[1].with_name("LABEL-3.json")
    other.write_bytes(labels[1].read_bytes())
    found = lastgood.open(tmp_path).generation(1)
    assert (found.commit.metrics, found.commit.milestone) == ({"a": 1.0}, True)
    (generation,) = commit.survey(access.for_reading(tmp_path)).generations.values()
    assert lastgood.open(tmp_path).verify(1).good and generation.root == found.root


def test_a_diverged_loss_is_left_out_of_the_saved_metrics(tmp_path: Path) -> None:
    """metrics={"loss": nan} raised an error, and ended the loop when the loss diverged."""
    with (
        reported("metrics left out: loss is nan, top1 is None", logging.INFO),
        lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}) as ckpt,
    ):
        ckpt.save(1, metrics={"loss": float("nan"), "top1": None, "top5": 0.5}).result()
    assert lastgood.open(tmp_path).generation(1).commit.metrics == {"top5": 0.5}


@pytest.mark.parametrize("value", ["0.5", torch.zeros(2), numpy.zeros(1), object(), 1j])
def test_a_metric_that_is_no_number_is_refused_by_name(value: object) -> None:
    with pytest.raises(errors.Refused, match="metric 'loss' is"):
        numbers({"loss": value})
    with pytest.raises(errors.Refused, match="metrics="):
        numbers([("loss", 1)])


def test_explicit_saves_are_never_overtaken(tmp_path: Path) -> None:
    """Of 300 explicit saves, 30 were dropped for newer ones without a warning."""
    with lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}, retention=Keep(last=100), in_flight=4) as ckpt:
        saves = [ckpt.save(n) for n in range(1, 41)]
    assert all(one.durable() for one in saves) and steps(tmp_path) == list(range(1, 41))


def test_a_due_save_that_is_then_requested_is_not_overtaken(tmp_path: Path, monkeypatch) -> None:
    release, sync = threading.Event(), PosixFile.sync

    def waiting(self: PosixFile) -> None:
        if "000000000001-" in self._path and self._path.endswith(".safetensors"):
            assert release.wait(60)
        sync(self)

    monkeypatch.setattr(PosixFile, "sync", waiting)
    monkeypatch.setattr(Saver, "_require_same_state", lambda *_: None)  # the comparison would wait for step 1
    with lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}, cadence=Every(steps=1), in_flight=2) as ckpt:
        older = ckpt.step(1)
        assert ckpt.save(1) is older
        ckpt.step(2).result(60)
        release.set()
        assert older.result(60).step == 1


def test_rerunning_a_finished_script_deletes_no_older_step(tmp_path: Path) -> None:
    """Each rerun ended with save(total): after three reruns, Keep(last=3) had deleted all other steps."""
    for _ in range(4):
        with lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}, cadence=Every(steps=10)) as ckpt:
            for n in range(ckpt.restore().step + 1, 41):
                ckpt.step(n)
                ckpt.wait()
            ckpt.save(40).result()
            ckpt.wait()
    assert steps(tmp_path) == [20, 30, 40]


def test_an_older_explicit_save_never_replaces_a_newer_one_in_slots(tmp_path: Path, monkeypatch) -> None:
    """Slots keep the newest generation only: a slow save(5), committed after save(6), replaced the acknowledged step
    6."""
    release, publish = threading.Event(), RunWriter.publish

    def slow(self: RunWriter, at: GenerationId, *args: object) -> object:
        if at.step == 5:
            assert release.wait(60)
        return publish(self, at, *args)

    monkeypatch.setattr(RunWriter, "publish", slow)
    with lastgood.Checkpointer(f"slots://{tmp_path}/run", {"w": torch.zeros(4)}, in_flight=2) as ckpt:
        ckpt.save(1).result(60)
        ckpt.wait()
        older, newer = ckpt.save(5), ckpt.save(6)
        assert newer.result(60).step == 6
        release.set()
        older.wait_ended()
        assert isinstance(older.error(), errors.Overtaken)
        ckpt.wait()
        assert ckpt.latest() == 6


def test_an_acknowledged_milestone_is_durable(tmp_path: Path, monkeypatch) -> None:
    """save(10, milestone=True).result() returned the generation of the cadence before the milestone was on the disk."""

    def refused(*_: object) -> None:
        raise errors.TierDown("the disk is gone")

    with (
        reported("the disk is gone"),
        lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}, cadence=Every(steps=1)) as ckpt,
    ):
        ckpt.step(1)
        assert ckpt.save(1, milestone=True).result(60).commit.milestone
        assert lastgood.open(tmp_path).generation(1).commit.milestone
        ckpt.step(2).result(60)
        monkeypatch.setattr(commit, "label", refused)
        with pytest.raises(errors.TierDown, match="the disk is gone"):
            ckpt.save(2, milestone=True).result(60)


@pytest.mark.parametrize("fused", [False, True])
def test_saving_a_step_twice_requires_the_same_state(tmp_path: Path, fused: bool) -> None:
    """A save(3) after an update outside of any step returned the earlier save of step 3 as a success."""
    torch.manual_seed(0)  # once in 256 times all outputs are dropped, and the update changes nothing
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    with lastgood.Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}, cadence=Every(steps=1)) as ckpt:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        ckpt.step(1)
        model(torch.ones(2, 4))  # an evaluation draws random numbers
        assert ckpt.save(1, milestone=True).result().commit.milestone
        optimizer.step()
        with pytest.raises(errors.StepTaken, match=r"the state has changed since: model\.0\."):
            ckpt.save(1, metrics={"loss": 1.0})
        ckpt.save(2)


@pytest.mark.parametrize("training", [True, False])
def test_saving_a_step_twice_compares_the_optimizer_state(tmp_path: Path, training: bool) -> None:
    """A warm-up begins with a learning rate of 0: a step changed only AdamW's moments, and save(1) returned the
    earlier save."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    with lastgood.Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}) as ckpt:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        first = ckpt.save(1)
        if not training:
            assert ckpt.save(1, milestone=True).result().id == first.result().id
            return
        optimizer.step()
        with pytest.raises(errors.StepTaken, match=r"the state has changed since: optimizer\.state\."):
            ckpt.save(1, milestone=True)


def trained_state() -> dict:
    """The model, optimizer and values of a loop that has made one step; bit for bit the same each time."""
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "epoch": 3}


def test_a_restored_step_gets_its_milestone_without_a_second_write(tmp_path: Path) -> None:
    """In an evaluation script, restore() and then save(n, metrics=...) wrote all of the state a second time."""
    with lastgood.Checkpointer(tmp_path, trained_state()) as ckpt:
        first = ckpt.save(3).result()
    with lastgood.Checkpointer(tmp_path, trained_state()) as ckpt:
        assert ckpt.restore().step == 3
        torch.rand(1)  # an evaluation draws random numbers
        assert ckpt.save(3).result().id == first.id
        assert ckpt.save(3, milestone=True, metrics={"loss": 1.0}).result().commit.milestone
    (found,) = lastgood.open(tmp_path).generations()
    assert found.id == first.id and found.commit.milestone and found.commit.metrics == {"loss": 1.0}
    with lastgood.Checkpointer(tmp_path, trained_state()) as ckpt:
        ckpt.restore()
        assert ckpt.save(4).result().step == 4, "training continues from the restored step"


def updated(state: dict) -> None:
    state["optimizer"].step()


def at_another_rate(state: dict) -> None:
    state["optimizer"].param_groups[0]["lr"] = 0.2


def with_one_more(state: dict) -> None:
    state["ema"] = torch.zeros(2)


def with_a_new_buffer(state: dict) -> None:
    state["model"].register_buffer("seen", torch.zeros(2))


def in_the_next_epoch(state: dict) -> None:
    state["epoch"] += 1


@pytest.mark.parametrize("change", [updated, at_another_rate, with_one_more, with_a_new_buffer, in_the_next_epoch])
def test_saving_a_changed_state_at_the_restored_step_writes_it(tmp_path: Path, change: Callable[[dict], None]) -> None:
    with lastgood.Checkpointer(tmp_path, trained_state()) as ckpt:
        first = ckpt.save(3).result()
    state = trained_state()
    with lastgood.Checkpointer(tmp_path, state) as ckpt:
        ckpt.restore()
        change(state)
        assert ckpt.save(3).result().id != first.id


def test_a_rewind_saved_at_once_is_durable(tmp_path: Path) -> None:
    """After restore(step=2), save(2), the generation of step 2 exists already, but the next process would have
    resumed at 3."""
    state = {"w": torch.zeros(3)}
    with lastgood.Checkpointer(tmp_path, state) as ckpt:
        ckpt.save(2)
        ckpt.save(3)
    with lastgood.Checkpointer(tmp_path, state) as ckpt:
        ckpt.restore(step=2)
        ckpt.save(2).result()
    with lastgood.Checkpointer(tmp_path, state) as ckpt:
        assert ckpt.restore().step == 2


@pytest.mark.parametrize("on_error", ["warn", "raise"])
@pytest.mark.parametrize("trouble", ["down", "moved"])
def test_a_saved_step_that_cannot_be_read_ends_no_loop(
    tmp_path: Path, faulty_files, on_error: str, trouble: str
) -> None:
    """save(n, milestone=True) after step(n) raised TierDown or MissingBlob in the loop, whatever on_error said: where a
    network file system was down for a moment, or the folder of the run was moved, the job ended."""
    run, state = tmp_path / "run", {"w": torch.zeros(3)}
    with lastgood.Checkpointer(run, state, cadence=Every(steps=1), on_error=on_error) as ckpt:
        ckpt.step(1)
        ckpt.wait()
        if trouble == "moved":
            run.rename(tmp_path / "elsewhere")
        else:
            faulty_files.inject(Fault("list", "*/gen/000000000001-*"))
        again = ckpt.save(1, milestone=True)
        assert isinstance(again.error(), (errors.TierDown, errors.MissingBlob)) and not again.durable()
        if trouble == "moved":
            (tmp_path / "elsewhere").rename(run)
        faulty_files.clear()
        if on_error == "raise":
            with pytest.raises((errors.TierDown, errors.MissingBlob)):
                ckpt.step(2)
        ckpt.step(3)
    assert not lastgood.open(run).generation(1).commit.milestone and steps(run)[-1] == 3


def test_a_restored_step_that_cannot_be_read_is_saved_again(tmp_path: Path, faulty_files) -> None:
    with lastgood.Checkpointer(tmp_path, trained_state()) as ckpt:
        first = ckpt.save(3).result()
    with lastgood.Checkpointer(tmp_path, trained_state()) as ckpt:
        ckpt.restore()
        faulty_files.inject(Fault("list", f"*/{layout.folder(first.id)}"))
        assert ckpt.save(3).result().id != first.id
        faulty_files.clear()

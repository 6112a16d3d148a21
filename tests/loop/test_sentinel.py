"""Training that diverges: noticed within a few steps, taken back, and its batches left out."""

from __future__ import annotations

import collections
import math
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import lastgood
from harness import reported, reports, steps
from lastgood.errors import NoSpace, NothingGood, Refused, RunReplaced, TierDown, TrainingDiverged
from lastgood.io import heartbeat
from lastgood.loop import sentinel
from lastgood.ranks import torch_store
from lastgood.run import access, advice
from lastgood.run.pipeline import Pipeline
from lastgood.run.places import Places
from lastgood.run.writer import RunWriter

SENTINEL = lastgood.Sentinel(every=5)


class Ids(Dataset[int]):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> int:
        return index


class Loop:
    """A loop whose loss is 1.0, but for the values that `losses` gives for the number of a batch of the order."""

    poisons = True
    """whether the loss enters the weights"""

    def __init__(
        self,
        run: Path | str,
        losses: dict[int, float],
        sentinel: lastgood.Sentinel = SENTINEL,
        every: int = 2,
        kept: int = 9,
    ) -> None:
        self.model, self.audit, self.losses = torch.nn.Linear(2, 2), lastgood.Audit(), losses
        self.sampler = lastgood.ResumableSampler(400, global_batch=8, seed=1)
        state = {"model": self.model, "sampler": self.sampler, "audit": self.audit}
        steps, keep = lastgood.Every(steps=every), lastgood.Keep(last=kept)
        self.ckpt = lastgood.Checkpointer(run, state, cadence=steps, sentinel=sentinel, retention=keep)

    def train(self, last: int) -> int:
        """Restore and train until step `last`. Returns the restored step."""
        start = n = self.ckpt.restore().step
        for ids in self.sampler.loader(Ids()):
            loss = torch.tensor(self.losses.get(self.sampler.position[1], 1.0))
            self.audit.observe(*self.sampler.position, ids)
            with torch.no_grad():
                self.model.weight += loss if self.poisons else 1.0
            n += 1
            save = self.ckpt.step(n, metrics={"loss": loss})
            if save is not None:
                self.ckpt.wait()  # an older one that is not verified yet may be deleted once a newer one is
            if n == last:
                break
        return start


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_takes_the_loop_back(tmp_path: Path, bad: float) -> None:
    loop = Loop(tmp_path, {6: bad})
    with loop.ckpt:
        with pytest.raises(TrainingDiverged, match=r"rank 0, step 7: loss (nan|inf)") as raised:
            loop.train(20)
        assert "Step 10 was saved as it is, for people" in raised.value.safe
        assert loop.train(20) == 6, "in the same process"
        report = loop.audit.report(loop.sampler)
        assert report.exact and loop.sampler.skipped == [(0, 6), (0, 7), (0, 8), (0, 9)]
        assert len(report.skipped) == 32 and torch.isfinite(loop.model.weight).all()
    kept = {one.step: one for one in lastgood.open(tmp_path).generations() if one.commit.milestone}
    assert [*kept] == [10] and kept[10].unfit, "it is there for people, and no restore takes it"
    named = [one.skip.samples for one in advice.read(access.for_reading(tmp_path)) if one.skip]
    assert named == loop.sampler.order(0)[6:10].tolist(), "the samples of each bad step"


def test_batches_of_another_order_are_not_left_out(tmp_path: Path) -> None:
    """They were left out by their number. With another global batch, which an epoch may begin with, other samples were
    left out, and the bad ones were trained again."""

    def trained(global_batch: int) -> lastgood.ResumableSampler:
        model, sampler = torch.nn.Linear(2, 2), lastgood.ResumableSampler(32, global_batch, seed=0)
        state = {"model": model, "sampler": sampler}
        with lastgood.Checkpointer(tmp_path, state, cadence=lastgood.Every(steps=8), sentinel=SENTINEL) as ckpt:
            n = ckpt.restore().step
            while sampler.position[0] < 2:
                for _ in sampler.loader(list(range(32))):
                    bad = global_batch == 4 and sampler.position == (1, 3)
                    with torch.no_grad():
                        model.weight += 1.0
                    n += 1
                    ckpt.step(n, metrics={"loss": math.nan if bad else 1.0})
        return sampler

    with pytest.raises(TrainingDiverged, match="step 12"):
        trained(4)
    with reports() as texts:
        assert trained(8).skipped == []
    assert sum("have other samples now" in one for one in texts) == 1


def test_a_generation_kept_for_people_names_its_batches_by_itself(tmp_path: Path, call) -> None:
    """Only the advice named them, which people delete once they have mended the cause."""
    loop = Loop(tmp_path, {6: math.nan})
    with loop.ckpt, reports() as texts:
        with pytest.raises(TrainingDiverged):
            loop.train(20)
        loop.train(20)
    shutil.rmtree(tmp_path / "advice")
    (kept,) = (one.id for one in lastgood.open(tmp_path).generations() if one.commit.milestone)
    code, out, err = call("show", tmp_path, f"10-{kept.incarnation}")
    assert code == 0, err
    for window, ids in zip(range(6, 10), loop.sampler.order(0)[6:10].tolist(), strict=True):
        batch = f"epoch 0, window {window}, samples {', '.join(map(str, ids))}"
        assert f"not good: batches of its steps: {batch}" in " ".join(out.split())
    assert "batches of its steps" not in "".join(texts), "reports are of one line"


def test_all_batches_of_a_step_over_two_epochs_are_left_out(tmp_path: Path) -> None:
    """Of a bad step whose gradients were accumulated over the end of an epoch, only the batches of one epoch were left
    out, so that training diverged again."""
    sampler = lastgood.ResumableSampler(400, global_batch=40, seed=1)
    every, batches = lastgood.Every(steps=1), 0
    with lastgood.Checkpointer(
        tmp_path, {"sampler": sampler}, cadence=every, sentinel=lastgood.Sentinel(every=1)
    ) as ckpt:
        with pytest.raises(TrainingDiverged, match="step 3: loss nan"):
            for _ in range(2):
                for _ in sampler.loader(Ids()):
                    batches += 1
                    if batches % 4 == 0:
                        ckpt.step(batches // 4, metrics={"loss": math.nan if batches == 12 else 1.0})
        assert ckpt.restore().step == 2
    assert sampler.skipped == [(0, 8), (0, 9), (1, 0), (1, 1)]


def test_an_end_of_an_epoch_that_is_left_out_is_reported(tmp_path: Path) -> None:
    """The last batch of an epoch was bad, and the one before it was saved: the loop went on in the next epoch, and its
    schedule lagged by one epoch for ever, without a word."""
    loop = Loop(tmp_path, {49: math.nan}, lastgood.Sentinel(every=1), every=1)
    with loop.ckpt:
        with pytest.raises(TrainingDiverged, match="step 50"):
            loop.train(50)
        with reported("all that was left of epoch 0 is left out"):
            assert loop.train(52) == 49
        assert loop.sampler.counted[0] == 1


def test_a_generation_after_the_spike_is_not_restored(tmp_path: Path) -> None:
    """Its tensors are finite, so the guard finds nothing. Of the samples that were left out one line was printed for
    each window, five times the same."""
    loop = Loop(tmp_path, {25: 50.0}, lastgood.Sentinel(every=10, spike=5))
    with pytest.raises(TrainingDiverged, match=r"step 26: loss 50 \(mean 1\)"), loop.ckpt:
        loop.train(40)
    again = Loop(tmp_path, {25: 50.0}, lastgood.Sentinel(every=10, spike=5))
    with reports() as texts, again.ckpt:
        assert again.train(40) == 24, "in another process"
        assert again.audit.report(again.sampler).exact
    (line,) = (one for one in texts if "left out" in one)
    assert line.startswith("40 samples are left out, from epoch 0: training diverged")


SPIKES = lastgood.Sentinel(every=10, spike=5)


@pytest.mark.parametrize("kept", [1, 3])
@pytest.mark.parametrize("every", [1, 2, 25])
def test_a_generation_from_before_the_spike_outlives_those_after_it(tmp_path: Path, kept: int, every: int) -> None:
    """Those after it are finite, so retention took them for good: with more than `last` saves between two comparisons
    it deleted the last one from before the spike, and the job went on from a state that had diverged."""
    loop = Loop(tmp_path, {31: 50.0}, SPIKES, every, kept)
    with loop.ckpt:
        with pytest.raises(TrainingDiverged, match="step 32: loss 50"), reported(rf"at most \({kept + 1} kept", 0):
            loop.train(60)
        loop.ckpt.wait()
        assert loop.train(60) == (25 if every == 25 else 30), "the newest one that was compared, or newer"
        assert loop.audit.report(loop.sampler).exact


def test_a_loop_that_diverges_before_the_first_comparison_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention had deleted the saves from before the bad step, of which none had been compared yet: the job went on
    from what had diverged. The oldest one is kept until then."""
    monkeypatch.setattr("lastgood.loop.sentinel.WARM_STEPS", 2)
    loop = Loop(tmp_path, {3: 50.0}, SPIKES, every=1, kept=3)
    with loop.ckpt, pytest.raises(TrainingDiverged, match=r"step 4: .* goes back to before step 4"):
        loop.train(20)
    again = Loop(tmp_path, {3: 50.0}, SPIKES, every=1, kept=3)
    with again.ckpt:
        assert again.train(20) == 1 and again.audit.report(again.sampler).exact


def test_a_restored_generation_is_kept_until_the_first_comparison_after_it(tmp_path: Path) -> None:
    """The job after a preemption took only the steps until the last multiple of `every` for compared, and deleted the
    generation from which it had gone on in favour of two that came after a spike."""
    first = Loop(tmp_path, {}, every=7, kept=1)
    with first.ckpt:
        first.train(7)
    again = Loop(tmp_path, {8: math.inf}, every=1, kept=1)
    again.poisons = False
    with again.ckpt:
        with pytest.raises(TrainingDiverged, match="step 9: loss inf"):
            again.train(20)
        assert again.ckpt.restore().step == 7, "its own steps were not compared yet"


def test_a_step_that_diverges_again_and_again_is_kept_once(tmp_path: Path) -> None:
    """It was kept for ever each time, ten whole states."""
    bad = dict.fromkeys(range(6, 400), math.nan)
    loop = Loop(tmp_path, bad, lastgood.Sentinel(every=5))
    with loop.ckpt:
        for _ in range(3):
            with pytest.raises(TrainingDiverged, match="step 7"):
                loop.train(20)
        loop.ckpt.wait()
    assert [one.step for one in lastgood.open(tmp_path).generations() if one.commit.milestone] == [10]


def test_a_label_that_finds_no_room_is_not_taken_for_a_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error said that the state was not saved, although it was, and was marked."""

    def full(*_: object) -> None:
        raise NoSpace("the disk is full")

    loop = Loop(tmp_path, {12: math.nan}, lastgood.Sentinel(every=100), every=7)
    with pytest.raises(TrainingDiverged) as raised, loop.ckpt:
        monkeypatch.setattr(RunWriter, "label", full)
        loop.train(14)
    assert "Step 14 had been saved already, and may be deleted (NoSpace: the disk is full)." in raised.value.safe


def test_what_cannot_be_marked_ends_the_loop_as_diverged_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several ranks rank 0 raised another error than the others."""

    def replaced(*_: object, **__: object) -> None:
        raise RunReplaced("another process has opened the run")

    loop = Loop(tmp_path, {8: math.nan})
    with loop.ckpt, reported("what has diverged has no mark"), pytest.raises(TrainingDiverged):
        monkeypatch.setattr(Places, "mark_suspect", replaced)
        loop.train(20)


def test_a_norm_that_is_never_finite_is_a_divergence(tmp_path: Path) -> None:
    """A backward pass that is NaN in each step trained nothing, and the Sentinel took it for the search of a scale."""
    state = {"w": torch.zeros(2), "scaler": torch.amp.GradScaler("cpu")}
    options = {"cadence": lastgood.Every(steps=500), "save_on_exit": False}
    sentinel = lastgood.Sentinel(grad_norm="norm")
    opened = lastgood.Checkpointer(tmp_path, state, sentinel=sentinel, **options)  # type: ignore[arg-type]
    with opened as ckpt, pytest.raises(TrainingDiverged, match="step 101: loss 1, norm nan"):
        for n in range(1, 200):
            ckpt.step(n, metrics={"loss": 1.0, "norm": math.nan})


def test_slots_are_compared_before_each_save(tmp_path: Path) -> None:
    """They keep the newest verified generation and no older one, so after the save of a step that had diverged nothing
    from before it was there."""
    loop = Loop(f"slots://{tmp_path}/run", {31: 50.0}, SPIKES)
    with loop.ckpt:
        with pytest.raises(TrainingDiverged, match="step 32: loss 50"):
            loop.train(60)
        assert loop.train(60) == 30


def test_what_has_diverged_counts_as_good_nowhere(tmp_path: Path) -> None:
    """Until the next restore `ls` and `load` took it for the newest good generation."""
    loop = Loop(tmp_path, {31: 50.0}, SPIKES)
    with loop.ckpt, pytest.raises(TrainingDiverged):
        loop.train(60)
    found = {one.step: one for one in lastgood.open(tmp_path).generations()}
    assert found[40].commit.milestone and found[40].unfit, "it is kept for people"
    assert lastgood.load(tmp_path, {"model": loop.model}, strict=False).step == 30


@pytest.mark.parametrize(("bad", "every"), [({0: math.nan}, 2), ({25: 50.0}, 100)])
def test_a_loop_that_has_saved_nothing_good_starts_over(tmp_path: Path, bad: dict[int, float], every: int) -> None:
    """The campaign of faults found a job that was given up: its first batch was bad, so that every generation was one
    that is kept for people, and restores found nothing good."""
    loop = Loop(tmp_path, bad, lastgood.Sentinel(every=5, spike=5), every)
    with loop.ckpt:
        with pytest.raises(TrainingDiverged, match="Start the process again"):
            loop.train(40)
        with pytest.raises(NothingGood, match="Start the process again"):
            loop.train(40)  # its state has diverged
    again = Loop(tmp_path, bad, lastgood.Sentinel(every=5, spike=5), every)
    with again.ckpt, reported("starts from the beginning"):
        assert again.train(40) == 0
        assert again.audit.report(again.sampler).exact and again.sampler.skipped[0] == (0, *bad)
        assert torch.isfinite(again.model.weight).all()
    assert lastgood.open(tmp_path).generations()[-1].step == 40


def test_a_loop_that_may_leave_out_no_more_does_not_start_over(tmp_path: Path) -> None:
    """It would diverge for ever."""
    for _ in range(2):
        loop = Loop(tmp_path, {0: math.nan, 5: math.nan}, lastgood.Sentinel(every=5, at_most=1))
        with loop.ckpt, pytest.raises(TrainingDiverged):
            loop.train(20)
    last = Loop(tmp_path, {}, lastgood.Sentinel(every=5, at_most=1))
    with last.ckpt, pytest.raises(NothingGood):
        last.train(20)


def test_a_save_in_flight_when_training_has_diverged_is_suspect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commit came after the advice, so that the next restore took it. Here it comes when it is waited for."""
    awaited, waits, wait, publish = threading.Event(), list[int](), Pipeline.wait, RunWriter.publish

    def waiting(pipeline: Pipeline, *arguments: Any, **more: Any) -> None:
        waits.append(1)
        if len(waits) > 1:  # the first one is that of restore()
            awaited.set()
        wait(pipeline, *arguments, **more)

    def late(run: RunWriter, *arguments: Any, **more: Any) -> Any:
        assert awaited.wait(30)
        return publish(run, *arguments, **more)

    monkeypatch.setattr(Pipeline, "wait", waiting)
    monkeypatch.setattr(RunWriter, "publish", late)
    loop = Loop(tmp_path, {7: 50.0}, lastgood.Sentinel(every=5, spike=5), every=8)
    loop.ckpt.wait = lambda: None  # type: ignore[method-assign]
    monkeypatch.setattr("lastgood.loop.sentinel.WARM_STEPS", 3)
    with loop.ckpt, pytest.raises(TrainingDiverged):
        loop.train(40)
    found = advice.read(access.for_reading(tmp_path))
    assert {one.suspect.step for one in found if one.suspect} == {8, 10}


@pytest.mark.parametrize("end", ["close", "save", "preempted"])
def test_a_comparison_under_way_is_read_before_a_save_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """What is on a device is read one step later. The last one was lost, or saved as good; here a value on the
    processor is read as late."""
    taken = sentinel._Seen.taken
    later = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(sentinel._Seen, "taken", lambda self: taken(self)._replace(copied=later))
    state = {"model": torch.nn.Linear(2, 2)}
    options = {"sentinel": SENTINEL, "cadence": lastgood.Every(steps=100), "save_on_exit": False}
    ckpt = lastgood.Checkpointer(tmp_path, state, preemption=lastgood.Preemption(), **options)
    for n in range(1, 5):
        ckpt.step(n, metrics={"loss": 1.0})
    if end == "preempted":
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(TrainingDiverged):
            ckpt.step(5, metrics={"loss": math.nan})
    else:
        ckpt.step(5, metrics={"loss": math.nan})
        with pytest.raises(TrainingDiverged):
            ckpt.close() if end == "close" else ckpt.save(5)
    ckpt.close()
    assert [one.suspect.step for one in advice.read(access.for_reading(tmp_path)) if one.suspect] == [5]


@pytest.mark.parametrize("every", [100, 2], ids=["not saved", "saved"])
def test_the_last_steps_of_a_run_are_compared_at_its_end(tmp_path: Path, every: int) -> None:
    """A loop of fewer steps than `Sentinel.every`, or with a bad loss in the steps after the last multiple of it, ended
    as if nothing were wrong, and its last generation counted as good."""
    loop = Loop(tmp_path, {12: math.nan}, every=every)
    with pytest.raises(TrainingDiverged, match="rank 0, step 13: loss nan") as raised, loop.ckpt:
        loop.train(14)
    assert "Step 14" in raised.value.safe
    again = Loop(tmp_path, {}, every=every)
    with again.ckpt:
        assert again.train(20) == (0 if every == 100 else 12)


def test_a_signal_does_not_hide_a_bad_step_before_it(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    options = {"sentinel": SENTINEL, "preemption": lastgood.Preemption()}
    with lastgood.Checkpointer(tmp_path, {"model": model}, **options) as ckpt:  # type: ignore[arg-type]
        ckpt.restore()
        ckpt.step(1, metrics={"loss": math.nan})
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(TrainingDiverged, match="step 1: loss nan"):
            ckpt.step(2, metrics={"loss": 1.0})


def test_a_device_that_has_failed_keeps_no_run_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA reports what a kernel did at the next wait for it, here that of close(): it raised before it had waited for
    the saves in flight, and the run stayed locked."""

    def synchronize() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    taken, failed = sentinel._Seen.taken, SimpleNamespace(synchronize=synchronize)
    monkeypatch.setattr(sentinel._Seen, "taken", lambda self: taken(self)._replace(copied=failed))
    state = {"model": torch.nn.Linear(2, 2)}
    ckpt = lastgood.Checkpointer(tmp_path, state, sentinel=SENTINEL, cadence=lastgood.Every(steps=3))
    for n in range(1, 6):
        ckpt.step(n, metrics={"loss": 1.0})
    with pytest.raises(RuntimeError, match="illegal memory access"):
        ckpt.close()
    with lastgood.Checkpointer(tmp_path, state) as again:
        assert again.restore().step == 3


def test_a_loop_whose_good_generation_was_deleted_does_not_start_over(tmp_path: Path) -> None:
    loop = Loop(tmp_path, {6: math.nan}, every=6)
    with loop.ckpt, pytest.raises(TrainingDiverged):
        loop.train(20)
    shutil.rmtree(next(tmp_path.glob("gen/*06-*")))
    again = Loop(tmp_path, {6: math.nan}, every=6)
    with again.ckpt, pytest.raises(NothingGood):
        again.train(20)


def test_a_norm_that_a_scaler_found_too_large_is_no_divergence(tmp_path: Path) -> None:
    """With fp16, a GradScaler finds its scale by norms that are infinite: training was taken back to its beginning ten
    times, each time without the batches of these steps."""
    scaler, every = torch.amp.GradScaler("cpu"), lastgood.Every(steps=4)
    state = {"w": torch.zeros(2), "scaler": scaler}
    sentinel = lastgood.Sentinel(every=2, grad_norm="norm", spike=3)
    norms = [math.inf, math.nan, *([1.0] * 20), math.inf, 1.0]
    with lastgood.Checkpointer(tmp_path / "run", state, cadence=every, sentinel=sentinel) as ckpt:
        for n, norm in enumerate(norms, 1):
            ckpt.step(n, metrics={"loss": 1.0, "norm": norm})
        with pytest.raises(TrainingDiverged, match=r"step 25: loss 1 \(mean 1\), norm 4 \(mean 1\)"):
            for n in (25, 26):
                ckpt.step(n, metrics={"loss": 1.0, "norm": 4.0})
    with lastgood.Checkpointer(tmp_path / "other", {"w": torch.zeros(2), "scaler": scaler}, sentinel=sentinel) as ckpt:
        ckpt.step(1, metrics={"loss": math.nan, "norm": 1.0})
        with pytest.raises(TrainingDiverged, match="step 1: loss nan"):
            ckpt.step(2, metrics={"loss": 1.0, "norm": 1.0})


def test_without_advice_what_has_diverged_is_not_restored_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A durable place that was down received no advice, and the state that was saved for people was restored."""

    def fails(*_: object) -> None:
        raise TierDown("the disk does not answer")

    loop = Loop(tmp_path, {31: 50.0}, SPIKES)
    with loop.ckpt:
        with monkeypatch.context() as patched, pytest.raises(TrainingDiverged, match="Restore a step before 32"):
            patched.setattr(advice, "append", fails)
            loop.train(60)
        assert loop.ckpt.restore().step == 30


def test_a_spike_within_the_first_steps_is_none(tmp_path: Path) -> None:
    loop = Loop(tmp_path, {3: 50.0}, lastgood.Sentinel(every=2, spike=5))
    with loop.ckpt:
        loop.train(10)


def test_batches_are_left_out_so_often_as_was_permitted(tmp_path: Path) -> None:
    loop = Loop(tmp_path, {3: math.nan, 13: math.nan}, lastgood.Sentinel(every=1, at_most=1))
    with loop.ckpt:
        with pytest.raises(TrainingDiverged):
            loop.train(20)
        with pytest.raises(TrainingDiverged, match="time 2 "):
            loop.train(20)
        assert len(loop.sampler.skipped) == 1
    found = advice.read(access.for_reading(tmp_path))
    assert {one.step for one in found if one.skip} == {4}
    assert {one.suspect.step for one in found if one.suspect} == {4, 13}, "no restore takes the state of either"


def test_a_state_after_which_no_more_is_left_out_is_kept_with_its_batches(tmp_path: Path) -> None:
    """That is when people have to look: the state was kept until the next saves, and its batches were named nowhere."""
    loop = Loop(tmp_path, {3: math.nan, 13: math.nan}, lastgood.Sentinel(every=1, at_most=1), every=1)
    with loop.ckpt:
        for _ in range(3):
            with pytest.raises(TrainingDiverged):
                loop.train(20)
    found = [one for one in lastgood.open(tmp_path).generations() if one.commit.milestone]
    assert [one.step for one in found] == [4, 13], "the same step is kept once, however often it fails"
    assert str(loop.sampler.order(0)[13].tolist())[1:-1] in found[1].unfit[-1].what


def test_a_bad_step_that_was_saved_already_is_kept_for_people(tmp_path: Path) -> None:
    """It was no milestone, and was deleted once the job had gone on."""
    loop = Loop(tmp_path, {12: 50.0}, lastgood.Sentinel(every=100, spike=5), every=7)
    with pytest.raises(TrainingDiverged, match="nan"), loop.ckpt:
        loop.losses[13] = math.nan
        loop.train(14)
    (kept,) = (one for one in lastgood.open(tmp_path).generations() if one.commit.milestone)
    assert kept.step == 14 and any(one.layer == "training" for one in kept.unfit)


@pytest.mark.parametrize(("every", "base"), [(2, 12), (5, 10)])
def test_a_diverged_step_is_no_progress_once_no_batches_are_left_out(
    tmp_path: Path, monkeypatch, every: int, base: int
) -> None:
    """It was saved for people, and `lastgood run` took that for progress: it started the job again without end, each
    time from the same step. Later the step before it was shown, which counted too where no save of it was there."""
    page = str(tmp_path / "page")
    heartbeat.create(page)
    monkeypatch.setenv(heartbeat.VARIABLE, page)
    loop = Loop(tmp_path / "run", {7: math.nan, 13: math.nan}, lastgood.Sentinel(every=1, at_most=1), every)
    with loop.ckpt:
        with pytest.raises(TrainingDiverged):
            loop.train(20)
        with pytest.raises(TrainingDiverged, match="no more batches are left out"):
            loop.train(20)
        loop.ckpt.wait()
    assert heartbeat.read(page).saved_step == base and steps(tmp_path / "run")[-1] == 13


def test_without_a_sampler_the_same_batches_are_trained_again(tmp_path: Path) -> None:
    """The error said that batches are left out, and `at_most` counted nothing, where the state holds no sampler."""
    options = {"sentinel": lastgood.Sentinel(every=1, at_most=1), "cadence": lastgood.Every(steps=1)}
    with lastgood.Checkpointer(tmp_path, {"w": torch.zeros(2)}, **options) as ckpt:
        for match in ("before step 2, and trains the same batches again, because the state does not hold", "time 2 "):
            ckpt.restore()
            ckpt.step(1, metrics={"loss": 1.0})
            with pytest.raises(TrainingDiverged, match=match):
                ckpt.step(2, metrics={"loss": math.nan})


def test_a_step_that_is_asked_for_is_restored_without_advice(tmp_path: Path) -> None:
    loop = Loop(tmp_path, {6: math.nan})
    with loop.ckpt as ckpt:
        with pytest.raises(TrainingDiverged):
            loop.train(20)
        assert ckpt.restore(step=6).step == 6 and loop.sampler.skipped == []
        assert ckpt.restore(step=10).step == 10


def test_a_metric_that_is_missing_is_refused_with_its_name(tmp_path: Path) -> None:
    """One that a mapping with a default lacked was taken for 0."""
    loop = Loop(tmp_path / "run", {}, lastgood.Sentinel(grad_norm="norm"))
    with loop.ckpt, pytest.raises(Refused, match="norm"):
        loop.train(1)
    state = {"weights": torch.ones(3)}
    sentinel, metrics = lastgood.Sentinel(), collections.defaultdict(float, other=1.0)
    opened = lastgood.Checkpointer(tmp_path / "other", state, sentinel=sentinel)
    with opened as ckpt, pytest.raises(Refused, match="loss"):
        ckpt.step(1, metrics=metrics)


@pytest.mark.parametrize("loss", [None, "0.5", torch.ones(2), torch.tensor(1j), torch.ones(2, device="meta"), [0.5]])
def test_a_metric_that_is_no_number_is_refused_with_its_name(tmp_path: Path, loss: object) -> None:
    """Some ended the loop with a raw TypeError or RuntimeError; of a complex one the imaginary part was ignored."""
    opened = lastgood.Checkpointer(tmp_path / "run", {"weights": torch.ones(3)}, sentinel=lastgood.Sentinel())
    with opened as ckpt:
        ckpt.step(1, metrics={"loss": 1.0})
        with pytest.raises(Refused, match="loss"):
            ckpt.step(2, metrics={"loss": loss})


@pytest.mark.parametrize(
    "values", [{"every": 0}, {"loss": None}, {"spike": 1.0}, {"spike": "10"}, {"at_most": 0}, {"loss": ""}]
)
def test_a_sentinel_that_cannot_be_meant_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(Refused, match="Sentinel"):
        lastgood.Sentinel(**values)  # type: ignore[arg-type]


def test_a_group_without_the_processor_compares_on_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of "cuda:nccl" was given a tensor of the processor, and the first comparison of a Sentinel failed."""

    class OfDevices:
        def _get_backend(self, device: torch.device) -> None:
            raise RuntimeError(f"No backend type associated with device type {device.type}")

    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_group", OfDevices)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert torch_store.device_of_group() == torch.device("cuda", 3)

"""A Lightning training that is killed at any point continues exactly with `trainer.fit(model)`."""

import contextlib
import logging
import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="lightning is not installed")

import lightning
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, GradientAccumulationScheduler, Timer
from lightning.pytorch.trainer.states import RunningStage
from torchmetrics import MeanMetric

import lastgood
from harness import reported
from lastgood.errors import LastgoodError, Refused, TrainingDiverged
from lastgood.integrations import lightning as lightning_saves
from lastgood.integrations.lightning import LastgoodCallback
from lastgood.io import heartbeat
from lastgood.loop.preemption import Preempted
from zygote import kill_and_compare, zygote_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),  # of a machine with Slurm
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_fit.py"
VALIDATING = Path(__file__).parents[1] / "support" / "scripts" / "lightning_validating.py"
DIGEST = (
    "[model.state_dict(), [one.state_dict() for one in trainer.optimizers],"
    " [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs], trainer.fit_loop.state_dict()]"
)
zygote = zygote_of("lightning", "lightning.pytorch.loggers", "lastgood.integrations.lightning")


@pytest.mark.long
def test_the_example_killed_many_times_has_equal_losses_and_weights(zygote, tmp_path):
    kill_and_compare(zygote, EXAMPLE, tmp_path, DIGEST)


def test_validation_schedules_means_and_callbacks_resume_exactly(zygote, tmp_path):
    """Lightning's own resume in mid-epoch skips the validation, restarts the means and returns the first samples
    again."""
    kill_and_compare(zygote, VALIDATING, tmp_path, f"[{DIGEST}, model.average, stopping.state_dict()]", kills=4)


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 1)
        self.seen = []

    def training_step(self, batch, index):
        self.seen += batch[1].tolist()
        return ((self.line(batch[0])[:, 0] - batch[1]) ** 2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class StopAt(lightning.Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop |= trainer.global_step == self.step


def fit(*callbacks, batch=2, samples=12, ckpt_path=None, net=None, **options):
    """Train on `samples` samples; returns the module."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(samples, 2), torch.arange(float(samples)))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    options = {"max_epochs": 2, "enable_checkpointing": False} | options
    trainer, net = lightning.Trainer(callbacks=list(callbacks), **quiet, **options), net or Net()
    trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=batch, shuffle=True), ckpt_path=ckpt_path)
    return net


def test_a_finished_training_is_saved_and_not_trained_again(tmp_path):
    first = fit(LastgoodCallback(tmp_path / "run", every_steps=5))
    assert max(one.step for one in lastgood.open(tmp_path / "run").generations()) == 12
    with reported("has ended with step 12"):
        again = fit(LastgoodCallback(tmp_path / "run", every_steps=5))
    assert not again.seen and torch.equal(again.line.weight, first.line.weight)


def test_an_epoch_that_ended_early_is_named_when_training_goes_on(tmp_path, caplog):
    """The rest of its batches was left out without a word."""
    first = fit(LastgoodCallback(tmp_path / "run"), max_epochs=-1, max_steps=8)
    assert "had ended an epoch" not in caplog.text
    again = fit(LastgoodCallback(tmp_path / "run"), max_epochs=-1, max_steps=14)
    assert caplog.text.count("ended an epoch after 2 of its 6 batches") == 1
    assert len(first.seen) == 16 and sorted(again.seen) == list(range(12)), "the next epoch, from its beginning"
    with reported("has ended with step 14"):
        fit(LastgoodCallback(tmp_path / "run"), max_epochs=-1, max_steps=14)


class Hooked(Net):
    """Uses Lightning's own entries of a checkpoint in both hooks, as it may in a `.ckpt` of Lightning's."""

    def __init__(self):
        super().__init__()
        self.save_hyperparameters({"width": 2})
        self.found = None

    def on_save_checkpoint(self, checkpoint):
        checkpoint.pop("optimizer_states")
        for key in list(checkpoint["state_dict"]):
            del checkpoint["state_dict"][key]
        names = ["pytorch-lightning_version", "loops", "lr_schedulers", "callbacks"]
        checkpoint["mine"] = [dict(checkpoint["hyper_parameters"]), [len(checkpoint[name]) > 0 for name in names]]

    def on_load_checkpoint(self, checkpoint):
        checkpoint["optimizer_states"] = checkpoint["optimizer_states"][:1]
        fit_loop = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["completed"]
        self.found = checkpoint["epoch"], checkpoint["global_step"], fit_loop, checkpoint["mine"]


def test_hooks_find_the_entries_of_a_lightning_checkpoint(tmp_path):
    """A hook that used "optimizer_states" or "hyper_parameters" ended the training with KeyError at the first save, and
    one that read "global_step" ended the resume."""
    first = fit(LastgoodCallback(tmp_path / "run", every_steps=4), net=Hooked())
    again = fit(LastgoodCallback(tmp_path / "run", every_steps=4), net=Hooked(), max_epochs=3)
    assert first.found is None and again.found == (2, 12, 2, [{"width": 2}, [True, True, False, False]])
    assert len(again.seen) == 12  # one more epoch
    added = lastgood.load(tmp_path / "run", step=12)["trainer"]["checkpoint"]["added"]
    assert list(added) == ["mine"]


@pytest.mark.parametrize("net", [Net, Hooked])
def test_entries_for_hooks_are_made_only_where_there_is_a_hook(tmp_path, monkeypatch, net):
    """Each save made the state_dict() of the module and of every optimizer, which no hook read."""
    made, real = [], lightning_saves._standard_entries
    monkeypatch.setattr(lightning_saves, "_standard_entries", lambda trainer: made.append(1) or real(trainer))
    fit(LastgoodCallback(tmp_path / "run", every_steps=4), net=net())
    assert bool(made) == (net is Hooked)


class Killed(lightning.Callback):
    """Ends the training at the beginning of a batch, as if the process were killed. `step`: of that batch."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == self.step:
            raise KeyError


def test_the_average_of_lightnings_own_callback_resumes_exactly(tmp_path):
    """Its hook puts the average in the place of "state_dict", and that was not saved: the weights of the moment became
    the average at each resume. At the end of the training the weights were saved after it had replaced them."""

    def averaged(run, *others):
        average = EMAWeightAveraging(decay=0.9)
        net = fit(*others, average, LastgoodCallback(run, every_steps=3))
        return net.line.weight

    whole = averaged(tmp_path / "whole")
    with pytest.raises(KeyError):
        averaged(tmp_path / "run", Killed(8))
    assert torch.equal(averaged(tmp_path / "run"), whole)
    last = Net()
    lastgood.load(tmp_path / "run", {"model": last}, strict=False)
    assert not torch.equal(last.line.weight, whole), "the weights that were trained, not their average"


class Anneal(lightning.Callback):
    def on_train_batch_start(self, trainer, module, *args):
        module.line.bias.data *= 0.9


def test_what_other_callbacks_do_when_a_batch_begins_is_done_once(tmp_path):
    """The save came after them if they stood before LastgoodCallback, and a resume did it again."""
    whole = fit(Anneal(), LastgoodCallback(tmp_path / "whole", every_steps=3))
    with pytest.raises(KeyError):
        fit(Anneal(), LastgoodCallback(tmp_path / "run", every_steps=3), Killed(8))
    resumed = fit(Anneal(), LastgoodCallback(tmp_path / "run", every_steps=3))
    assert torch.equal(resumed.line.bias, whole.line.bias)


class Broken(lightning.Callback):
    def on_train_batch_end(self, trainer, module, *args):
        if trainer.global_step == 4:
            module.line.weight.data.fill_(float("nan"))


def test_a_sentinel_sees_the_loss_of_each_step(tmp_path):
    """Lightning gave no metrics, so a Sentinel was refused, with a remedy that no module can follow."""
    callback = LastgoodCallback(tmp_path / "run", every_steps=1, sentinel=lastgood.Sentinel(every=1))
    with pytest.raises(TrainingDiverged, match="step 5"):
        fit(callback, Broken(), batch=1, accumulate_grad_batches=2)
    good = [one for one in lastgood.open(tmp_path / "run").generations() if one.restorable]
    assert good and all(one.commit.metrics["loss"] > 0.0 for one in good)


def test_the_last_save_has_the_loss_too(tmp_path):
    """It was given to `step`, which had nothing to save, and not to the `save` that followed: the last generation could
    be no best one."""
    fit(
        LastgoodCallback(tmp_path / "run", every_steps=4, retention=lastgood.Keep(best=("loss", "min", 1))),
        max_epochs=1,
    )
    found = {one.step: one.commit.metrics for one in lastgood.open(tmp_path / "run").generations()}
    assert found[6]["loss"] > 0.0


class Odd(Net):
    """Has a loss of None in the batch `skips`, and of NaN in `breaks`."""

    def __init__(self, skips=-1, breaks=-1):
        super().__init__()
        self._skips, self._breaks = skips, breaks

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        return None if index == self._skips else loss * (float("nan") if index == self._breaks else 1.0)


def test_a_sentinel_sees_the_loss_of_the_last_step_too(tmp_path):
    """A training whose last loss was NaN ended as a success."""
    callback = LastgoodCallback(tmp_path / "run", sentinel=lastgood.Sentinel())
    with pytest.raises(TrainingDiverged, match="step 6"):
        fit(callback, net=Odd(breaks=5), max_epochs=1)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("skips", [0, 2])
def test_a_batch_that_the_module_skips_ends_no_training_with_a_sentinel(tmp_path, skips):
    """The training ended with Refused, with a remedy that no module can follow, and again after each restart."""
    fit(LastgoodCallback(tmp_path / "run", sentinel=lastgood.Sentinel(every=1)), net=Odd(skips=skips), max_epochs=1)
    assert max(one.step for one in lastgood.open(tmp_path / "run").generations()) == 6


@pytest.mark.parametrize("fails", [False, True])
def test_validations_are_named_for_the_supervisor(tmp_path, monkeypatch, fails):
    """`lastgood run` took a validation that was much longer than a step for a hang. The limit of a later one follows
    the longest, so the few batches of the sanity check have another name."""
    page, seen = str(tmp_path / "page"), []
    heartbeat.create(page)
    monkeypatch.setenv(heartbeat.VARIABLE, page)

    class Noting(Net):
        def training_step(self, batch, index):
            assert not heartbeat.read(page).phase
            return super().training_step(batch, index)

        def validation_step(self, batch, index):
            seen.append(heartbeat.read(page).phase)
            if fails and seen[-1] == "validate":
                raise ZeroDivisionError

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4, 2), torch.arange(4.0)), 4)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    options = {"max_epochs": 2, "enable_checkpointing": False, "callbacks": [LastgoodCallback(tmp_path / "run")]}
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        lightning.Trainer(**options, **quiet).fit(Noting(), data, data)
    assert seen == ["sanity check", "validate"] + ["validate"] * (not fails)
    assert not heartbeat.read(page).phase_began


def test_more_epochs_continue_a_finished_training_exactly(tmp_path):
    whole = fit(LastgoodCallback(tmp_path / "whole"), max_epochs=4)
    fit(LastgoodCallback(tmp_path / "run"), max_epochs=2)
    with reported("goes on after step 12", logging.INFO):
        rest = fit(LastgoodCallback(tmp_path / "run"), max_epochs=4)
    assert rest.seen == whole.seen[24:] and torch.equal(rest.line.weight, whole.line.weight)


def test_an_early_stopped_training_stays_stopped(tmp_path):
    assert len(fit(LastgoodCallback(tmp_path / "run"), StopAt(7)).seen) == 14
    with reported("a callback had stopped this training"):
        assert not fit(LastgoodCallback(tmp_path / "run"), StopAt(7)).seen


def test_a_stopped_training_with_a_larger_minimum_is_reported_to_go_on(tmp_path):
    """It was reported as not continued, and Lightning trained it up to the minimum."""
    fit(LastgoodCallback(tmp_path / "run"), StopAt(7), max_epochs=4)
    with reported("goes on after step 7", logging.INFO):
        assert fit(LastgoodCallback(tmp_path / "run"), StopAt(7), max_epochs=4, min_steps=12).seen


def test_a_training_that_was_out_of_time_continues_with_more(tmp_path, caplog):
    """After `max_time`, a start with a longer one trained nothing, and gave no reason."""

    class Late(lightning.Callback):
        def on_train_batch_end(self, trainer, *args):
            timer._start_time[RunningStage.TRAINING] -= 100.0

    timer = Timer({"minutes": 1})
    fit(LastgoodCallback(tmp_path / "run"), timer, Late())
    assert not fit(LastgoodCallback(tmp_path / "run"), Timer({"minutes": 1})).seen
    assert "a callback had stopped this training" in caplog.text
    assert fit(LastgoodCallback(tmp_path / "run"), Timer({"hours": 1})).seen


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning:lightning")
def test_a_second_saver_of_the_same_state_is_refused(tmp_path):
    callback = LastgoodCallback(tmp_path / "run")
    with pytest.raises(Refused, match="2 LastgoodCallbacks"):
        fit(callback, LastgoodCallback(tmp_path / "other"))
    files = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path / "files")
    fit(callback, files, enable_checkpointing=True)
    with pytest.raises(Refused, match="which holds step 12, would be restored too"):
        fit(callback, ckpt_path=files.best_model_path)
    fit(LastgoodCallback(tmp_path / "new"), ckpt_path=files.best_model_path)


def test_another_batch_size_than_the_saved_one_is_refused(tmp_path):
    fit(LastgoodCallback(tmp_path / "run"))
    with pytest.raises(LastgoodError, match="batches_per_epoch 6 -> 3"):
        fit(LastgoodCallback(tmp_path / "run"), batch=4)


@pytest.mark.parametrize("other", [{"samples": 11}, {"samples": 18, "batch": 3}, {"accumulate_grad_batches": 2}])
def test_other_sizes_are_refused_in_mid_epoch_only(tmp_path, other):
    """With as many batches an epoch, another dataset or batch size was accepted: samples were trained twice, or
    never; another accumulation left gradients out."""
    with pytest.raises(KeyError):
        fit(LastgoodCallback(tmp_path / "run", every_steps=1), Killed(3))
    with pytest.raises(LastgoodError, match="in the middle of an epoch"):
        fit(LastgoodCallback(tmp_path / "run"), **other)
    fit(LastgoodCallback(tmp_path / "run"), max_epochs=1)
    assert fit(LastgoodCallback(tmp_path / "run"), **other).seen


class Listing(Net):
    """Makes a list where an epoch begins, and changes all that a hook can reach of the training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("heat", torch.ones(1))
        self.error, self.began = MeanMetric(), []

    def on_train_epoch_start(self):
        self.losses = []
        self.began.append((self.global_step, self.trainer.callback_metrics.get("began")))
        self.error.reset()
        self.heat *= 0.5
        self.line.bias.data.mul_(0.9)
        self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5
        self.log("began", float(self.global_step))
        torch.rand(1)

    def training_step(self, batch, index):
        loss = super().training_step(batch, index) * self.heat.sum() * (1 + torch.rand(()))
        self.losses.append(loss.detach())
        self.error.update(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.seen += [self.losses[-1].item(), self.error.compute().item()]


@pytest.mark.parametrize(("killed_at", "epochs_begun"), [(2, 3), (3, 2)])
def test_hooks_of_an_epochs_beginning_run_after_a_restart(tmp_path, caplog, killed_at, epochs_begun):
    """Lightning leaves `on_train_epoch_start` out when it restarts in mid-epoch: a module that makes a list there
    failed at each restart, and GradientAccumulationScheduler accumulated nothing for the rest of the epoch. What the
    hook changes of the restored state is in the save already, and is not done twice."""

    def trained(run, *others):
        torch.manual_seed(1)
        schedule = GradientAccumulationScheduler({0: 2, 1: 3})
        return fit(LastgoodCallback(tmp_path / run, every_steps=1), schedule, *others, net=Listing(), max_epochs=3)

    whole = trained("whole")
    with pytest.raises(KeyError):
        trained("run", Killed(killed_at))
    again = trained("run")
    assert len(again.began) == epochs_begun and again.began[-2:] == whole.began[-2:] == [(3, 0.0), (5, 3.0)]
    assert again.seen == whole.seen[-len(again.seen) :] and again.trainer.global_step == whole.trainer.global_step == 7
    assert torch.equal(again.line.weight, whole.line.weight) and torch.equal(again.heat, whole.heat)
    assert "logged before the restore but not after it" not in caplog.text


def test_include_leaves_out_nothing_that_the_integration_needs(tmp_path):
    """With the include that was documented for LoRA, each restart trained all steps again, on trained weights."""
    whole = fit(LastgoodCallback(tmp_path / "whole", every_steps=1))
    options = {"every_steps": 1, "include": ["*line*", "optimizers", "schedulers"]}
    with pytest.raises(KeyError):
        fit(LastgoodCallback(tmp_path / "run", **options), Killed(8))
    again = fit(LastgoodCallback(tmp_path / "run", **options))
    assert again.seen == whole.seen[16:] and torch.equal(again.line.weight, whole.line.weight)
    with pytest.raises(Refused, match=r"exclude=\['\*.order'\] leaves out trainer"):
        fit(LastgoodCallback(tmp_path / "run", exclude=["*.order"]))


def test_a_run_is_closed_when_training_fails(tmp_path):
    """The background threads of a run that was never closed kept the process from ending."""

    class Failing(lightning.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 3:
                raise KeyError("out of luck")

    with pytest.raises(KeyError, match="out of luck"):
        fit(LastgoodCallback(tmp_path / "run", every_steps=1), Failing())
    assert fit(LastgoodCallback(tmp_path / "run", every_steps=1)).seen


def test_a_preempted_training_makes_its_last_save(tmp_path):
    """Lightning's handler of SIGTERM ended the training first, without the last save, and with exit code 0: a job that
    was put off for another one was never started again."""

    class PutOff(lightning.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Preempted) as ended:
        fit(LastgoodCallback(tmp_path / "run", every_steps=100, preemption=lastgood.Preemption()), PutOff())
    assert ended.value.code == 75 and ended.value.durable == 3
    signal.signal(signal.SIGTERM, before)  # it stays replaced after a request
    assert max(one.step for one in lastgood.open(tmp_path / "run").generations()) == 3


def test_fast_dev_run_does_not_change_the_run(tmp_path):
    fit(LastgoodCallback(tmp_path / "run"), fast_dev_run=True)
    assert not (tmp_path / "run").exists()


def test_a_mistyped_argument_is_refused_when_the_callback_is_made():
    with pytest.raises(Refused, match="Did you mean retention"):
        LastgoodCallback("run", retentoin=lastgood.Keep(last=2))

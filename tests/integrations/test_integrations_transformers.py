"""A `transformers.Trainer` that is killed at any point continues exactly with `trainer.train()`."""

import signal
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

import lastgood
from harness import reported, reports
from lastgood.errors import LastgoodError, Refused, TrainingDiverged
from lastgood.integrations import transformers as saves
from lastgood.integrations.transformers import LastgoodCallback, LastgoodTrainerMixin
from lastgood.io import heartbeat
from zygote import kill_and_compare, zygote_of

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "transformers_trainer.py"
MASKING = Path(__file__).parents[1] / "support" / "scripts" / "trainer_masking.py"
DIGEST = (
    "[trainer.model.state_dict(), trainer.optimizer.state_dict(), trainer.lr_scheduler.state_dict(),"
    " [one for one in trainer.state.log_history if 'loss' in one]]"
)
zygote = zygote_of("transformers.trainer", "transformers.models.bert.modeling_bert", "lastgood.loop.oneshot")


@pytest.mark.long
def test_the_example_killed_many_times_has_equal_losses_and_weights(zygote, tmp_path):
    kill_and_compare(zygote, EXAMPLE, tmp_path, DIGEST)


def test_random_collators_running_losses_and_callbacks_resume_exactly(zygote, tmp_path):
    """A Trainer's own resume restores the random numbers only after the first batches were collated with other ones."""
    kill_and_compare(zygote, MASKING, tmp_path, DIGEST, kills=4)


def test_the_example_on_two_ranks_killed_resumes_exactly(zygote, tmp_path):
    kill_and_compare(zygote, EXAMPLE, tmp_path, DIGEST, kills=2, ranks=2)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 1)

    def forward(self, x, labels=None):
        return {"loss": ((self.line(x)[:, 0] - labels) ** 2).mean()}


class Resuming(LastgoodTrainerMixin, Trainer):
    pass


class Steps(TrainerCallback):
    def __init__(self, stop_at=None):
        self.seen, self.stop_at = [], stop_at

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append(state.global_step)
        control.should_training_stop |= state.global_step == self.stop_at


def trainer(tmp_path, *callbacks, kind=Resuming, batch=2, samples=12, **options):
    torch.manual_seed(0)
    data = [{"x": torch.randn(2), "labels": torch.tensor(float(n))} for n in range(samples)]
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no"}
    arguments = TrainingArguments(
        str(tmp_path / "out"), per_device_train_batch_size=batch, **quiet,
        **{"save_strategy": "no", "num_train_epochs": 2} | options,
    )  # fmt: skip
    return kind(Net(), arguments, train_dataset=data, eval_dataset=data, callbacks=list(callbacks))


def test_a_finished_training_is_saved_and_not_trained_again(tmp_path):
    """With every_steps=5, the last of 12 steps was not due, so the finished model was not in the run."""
    first = trainer(tmp_path, LastgoodCallback(tmp_path / "run", every_steps=5))
    first.train()
    assert max(one.step for one in lastgood.open(tmp_path / "run").generations()) == 12
    again, steps = trainer(tmp_path, LastgoodCallback(tmp_path / "run", every_steps=5)), Steps()
    again.add_callback(steps)
    with reported("has ended with step 12"):
        again.train()
    assert not steps.seen and again.state.global_step == 12
    assert torch.equal(again.model.line.weight, first.model.line.weight)


def test_a_training_that_ended_in_mid_epoch_is_not_trained_again(tmp_path):
    """Each start of the same script trained one step more, and pushed an older generation out."""
    for _ in range(2):
        one = trainer(tmp_path, LastgoodCallback(tmp_path / "run", every_steps=2), max_steps=5)
        one.train()
        assert one.state.global_step == 5
    more = trainer(tmp_path, LastgoodCallback(tmp_path / "run", every_steps=2), max_steps=7)
    more.train()
    assert more.state.global_step == 7


def test_a_training_that_a_callback_stopped_stays_stopped(tmp_path):
    trainer(tmp_path, LastgoodCallback(tmp_path / "run"), Steps(stop_at=7)).train()
    steps = Steps()
    with reported("a callback had stopped this training"):
        trainer(tmp_path, LastgoodCallback(tmp_path / "run"), steps).train()
    assert not steps.seen


def test_a_second_saver_of_the_same_state_is_refused(tmp_path):
    callback = LastgoodCallback(tmp_path / "run")
    with pytest.raises(Refused, match='save_strategy="no"'):
        trainer(tmp_path, callback, save_strategy="steps").train()
    with pytest.raises(Refused, match="2 LastgoodCallbacks"):
        trainer(tmp_path, callback, LastgoodCallback(tmp_path / "other")).train()
    trainer(tmp_path, callback).train()
    with pytest.raises(Refused, match="which holds step 12, would be restored too"):
        trainer(tmp_path, callback).train(resume_from_checkpoint=str(tmp_path / "somewhere"))


def test_a_search_for_hyperparameters_is_refused(tmp_path):
    """The second model of a search went on where the first one had ended: nothing was trained, with its results."""
    searching = trainer(tmp_path, LastgoodCallback(tmp_path / "run"))
    with pytest.raises(Refused, match="Search without LastgoodCallback"):
        searching.train(trial=object())
    searching.train()
    assert searching.state.global_step == 12


def test_a_trainer_that_stops_itself_at_sigterm_is_refused(tmp_path):
    """With enable_jit_checkpoint=True a preempted training was saved as stopped: its next start ended at once, done."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        stops = trainer(tmp_path, LastgoodCallback(tmp_path / "run"), enable_jit_checkpoint=True)
        with pytest.raises(Refused, match=r"preemption=lastgood.Preemption\(\)"):
            stops.train()
    finally:
        signal.signal(signal.SIGTERM, before)  # the Trainer replaces it when it is made


def test_model_only_checkpoints_are_written_beside_the_run(tmp_path):
    trainer(tmp_path, LastgoodCallback(tmp_path / "run"), save_strategy="epoch", save_only_model=True).train()
    assert {one.name for one in (tmp_path / "out").glob("checkpoint-*")} == {"checkpoint-6", "checkpoint-12"}


def test_evaluations_and_exports_are_named_for_the_supervisor(tmp_path, monkeypatch):
    """`lastgood run` took an evaluation that was much longer than a step for a hang, and started the job again."""
    page, seen = str(tmp_path / "page"), []
    heartbeat.create(page)
    monkeypatch.setenv(heartbeat.VARIABLE, page)

    class Noting(Resuming):
        def prediction_step(self, *args, **kwargs):
            seen.append(heartbeat.read(page).phase)
            return super().prediction_step(*args, **kwargs)

        def _save(self, *args, **kwargs):
            seen.append(heartbeat.read(page).phase)
            super()._save(*args, **kwargs)

        def training_step(self, *args, **kwargs):
            assert not heartbeat.read(page).phase
            return super().training_step(*args, **kwargs)

    options = {"kind": Noting, "batch": 6, "eval_strategy": "epoch", "save_strategy": "epoch", "save_only_model": True}
    one = trainer(tmp_path, LastgoodCallback(tmp_path / "run"), per_device_eval_batch_size=12, **options)
    one.train()
    one.evaluate()
    assert seen == [*["evaluate", "save_model"] * 2, ""], "the last evaluation is after the training"


class Anneal(TrainerCallback):
    """Changes the model when a step begins. `killed_at`: the step at whose beginning it ends the training."""

    def __init__(self, killed_at=None):
        self.killed_at = killed_at

    def on_step_begin(self, args, state, control, model, **kwargs):
        model.line.bias.data *= 0.9
        if state.global_step == self.killed_at:
            raise KeyError


def test_what_other_callbacks_do_when_a_step_begins_is_done_once(tmp_path):
    """The save came after them if they stood before LastgoodCallback, and a resume did it again."""

    def trained(run, killed_at=None):
        job = trainer(tmp_path, Anneal(killed_at), LastgoodCallback(tmp_path / run, every_steps=3))
        job.train()
        return job.model.line.bias

    whole = trained("whole")
    with pytest.raises(KeyError):
        trained("run", 8)
    assert torch.equal(trained("run"), whole)


class TrainedLoss(Resuming):
    """Its optimizer trains a loss too, which has the model inside: as that of sentence-transformers."""

    def create_optimizer(self, *args):
        self.loss = torch.nn.Linear(1, 1)
        self.loss.model = self.model
        optimizer = super().create_optimizer(*args)
        optimizer.add_param_group({"params": [self.loss.weight, self.loss.bias]})
        return optimizer

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.optimizer.zero_grad()  # the Trainer does so for the gradients of the model only
        return self.loss(model(**inputs)["loss"].reshape(1)).square().sum()


def test_a_loss_that_is_trained_beside_the_model_goes_on_exactly(tmp_path):
    """A restart made its parameters anew, although they were reported as trained and not in the state."""

    def trained(run, killed_at=None):
        saves = LastgoodCallback(tmp_path / run, every_steps=3)
        job = trainer(tmp_path, saves, Anneal(killed_at), kind=TrainedLoss)
        job.train()
        return [job.model.line.weight, job.loss.weight, job.loss.bias]

    whole = trained("whole")
    with pytest.raises(KeyError):
        trained("run", 8)
    with reports() as texts:
        assert all(map(torch.equal, trained("run"), whole))
    assert any("goes on after step 6" in one for one in texts)
    assert not any("trains" in one for one in texts), "nothing that is trained is reported as lacking"


def test_a_save_without_the_loss_that_is_trained_is_restored_with_a_report(tmp_path, monkeypatch):
    """As an earlier version has saved it."""
    with monkeypatch.context() as change, pytest.raises(KeyError):
        change.setattr(saves, "_trained_beside", lambda trainer: {})
        trainer(tmp_path, LastgoodCallback(tmp_path / "run", every_steps=3), Anneal(8), kind=TrainedLoss).train()
    again = trainer(tmp_path, LastgoodCallback(tmp_path / "run", every_steps=3), kind=TrainedLoss)
    with reported("lacks loss.weight, loss.bias in this shape"):
        again.train()
    assert again.state.global_step == 12


class Broken(TrainerCallback):
    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step == 4:
            model.line.weight.data.fill_(float("nan"))


def test_a_sentinel_sees_the_loss_of_each_step(tmp_path):
    """The Trainer gave no metrics, so a Sentinel was refused, with a remedy that no Trainer can follow."""
    callback = LastgoodCallback(tmp_path / "run", every_steps=1, sentinel=lastgood.Sentinel(every=1))
    with pytest.raises(TrainingDiverged, match="step 5"):
        trainer(tmp_path, callback, Broken(), gradient_accumulation_steps=2, batch=1).train()
    good = [one for one in lastgood.open(tmp_path / "run").generations() if one.restorable]
    assert good and all(one.commit.metrics["loss"] > 0.0 for one in good)


def test_the_last_save_has_the_loss_too(tmp_path):
    callback = LastgoodCallback(tmp_path / "run", every_steps=5, retention=lastgood.Keep(best=("loss", "min", 1)))
    trainer(tmp_path, callback).train()
    found = {one.step: one.commit.metrics for one in lastgood.open(tmp_path / "run").generations()}
    assert found[12]["loss"] > 0.0


class NotANumber(Resuming):
    def training_step(self, model, inputs, *args):
        if self.state.global_step == 11:
            inputs["labels"] = inputs["labels"] * float("nan")
        return super().training_step(model, inputs, *args)


def test_a_sentinel_sees_the_loss_of_the_last_step_too(tmp_path):
    """A training whose last loss was NaN ended as a success."""
    callback = LastgoodCallback(tmp_path / "run", sentinel=lastgood.Sentinel())
    with pytest.raises(TrainingDiverged, match="step 12"):
        trainer(tmp_path, callback, kind=NotANumber).train()


def test_a_trainer_without_the_mixin_is_refused_before_it_trains(tmp_path):
    steps = Steps()
    with pytest.raises(Refused, match="LastgoodTrainerMixin, Trainer"):
        trainer(tmp_path, LastgoodCallback(tmp_path / "run"), steps, kind=Trainer).train()
    assert not steps.seen


def test_the_mixin_without_the_callback_changes_nothing(tmp_path):
    plain, mixed = trainer(tmp_path, kind=Trainer), trainer(tmp_path)
    plain.train()
    mixed.train()
    assert torch.equal(plain.model.line.weight, mixed.model.line.weight)


def test_another_batch_size_than_the_saved_one_is_refused(tmp_path):
    trainer(tmp_path, LastgoodCallback(tmp_path / "run")).train()
    with pytest.raises(LastgoodError, match="steps_per_epoch 6 -> 3"):
        trainer(tmp_path, LastgoodCallback(tmp_path / "run"), batch=4).train()


@pytest.mark.parametrize("other", [{"samples": 11}, {"samples": 18, "batch": 3}])
def test_other_sizes_are_refused_in_mid_epoch_only(tmp_path, other):
    """With as many steps an epoch, another dataset or batch size was accepted: samples were trained twice, or never."""
    with pytest.raises(KeyError):
        trainer(tmp_path, LastgoodCallback(tmp_path / "run", every_steps=1), Anneal(killed_at=3)).train()
    with pytest.raises(LastgoodError, match="in the middle of an epoch"):
        trainer(tmp_path, LastgoodCallback(tmp_path / "run"), **other).train()
    trainer(tmp_path, LastgoodCallback(tmp_path / "run"), num_train_epochs=1).train()
    steps = Steps()
    trainer(tmp_path, LastgoodCallback(tmp_path / "run"), steps, **other).train()
    assert steps.seen == [7, 8, 9, 10, 11, 12]


def test_a_mistyped_argument_is_refused_when_the_callback_is_made():
    with pytest.raises(Refused, match="Did you mean every_steps"):
        LastgoodCallback("run", every_step=5)
    with pytest.raises(Refused, match="path=None"):
        LastgoodCallback(None)
    with pytest.raises(Refused, match="both define when"):
        LastgoodCallback("run", every_steps=5, cadence=lastgood.Every(steps=5))


def test_include_leaves_out_nothing_that_the_integration_needs(tmp_path):
    """With the include that was documented for LoRA, each restart trained all steps again, on trained weights."""
    options, steps = {"every_steps": 1, "include": ["*line*", "optimizer", "scheduler"]}, Steps()
    with pytest.raises(KeyError):
        trainer(tmp_path, LastgoodCallback(tmp_path / "run", **options), Anneal(killed_at=7)).train()
    trainer(tmp_path, LastgoodCallback(tmp_path / "run", **options), steps).train()
    assert steps.seen == [8, 9, 10, 11, 12]
    with pytest.raises(Refused, match=r"exclude=\['trainer.\*'\] leaves out trainer"):
        trainer(tmp_path, LastgoodCallback(tmp_path / "run", exclude=["trainer.*"])).train()


def test_a_generation_without_the_progress_is_refused_by_name(tmp_path, monkeypatch):
    """Saved by an earlier version with include, it was trained again from the first step, on trained weights."""
    options = {"every_steps": 4, "include": ["*line*", "optimizer"]}
    with monkeypatch.context() as earlier:
        earlier.setattr(saves, "with_own_entries", lambda options, own: options)
        trainer(tmp_path, LastgoodCallback(tmp_path / "run", **options)).train()
    with pytest.raises(Refused, match="the generation has no trainer, from which"):
        trainer(tmp_path, LastgoodCallback(tmp_path / "run", **options)).train()


class Counter(TrainerCallback, ExportableState):
    def __init__(self):
        self.steps = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1

    def state(self):
        return {"args": {}, "attributes": {"steps": self.steps}}


class Other(Counter):
    pass


def test_a_callback_is_restored_beside_a_new_one(tmp_path, caplog):
    """After a callback was added before an EarlyStoppingCallback, its patience began again at 0, and nothing
    reported it."""
    trainer(tmp_path, LastgoodCallback(tmp_path / "run"), Counter()).train()
    added, kept = Other(), Counter()
    trainer(tmp_path, LastgoodCallback(tmp_path / "run"), added, kept).train()
    assert (added.steps, kept.steps) == (0, 12) and "state of a callback" not in caplog.text
    trainer(tmp_path, LastgoodCallback(tmp_path / "run"), Other()).train()
    assert "the state of a callback Counter, which this Trainer does not have" in caplog.text

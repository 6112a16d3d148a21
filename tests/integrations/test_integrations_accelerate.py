"""Accelerate loops that are killed at any point continue exactly in the middle of an epoch."""

import itertools
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="accelerate is not installed")

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin

import lastgood
from lastgood.errors import LastgoodError, Refused
from lastgood.integrations import accelerate as accelerate_saves
from lastgood.integrations.accelerate import Checkpointer
from zygote import kill_and_compare, zygote_of

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate_loop.py"
DIGEST = "[model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), accelerator.step]"
zygote = zygote_of("accelerate", "torch._dynamo", "lastgood.integrations.accelerate")


def test_the_example_killed_many_times_has_equal_losses_and_weights(zygote, tmp_path):
    kill_and_compare(zygote, EXAMPLE, tmp_path, DIGEST)


def test_the_example_on_two_ranks_killed_resumes_exactly(zygote, tmp_path):
    kill_and_compare(zygote, EXAMPLE, tmp_path, DIGEST, kills=3, ranks=2)


class Job:
    """A training of 12 samples: the objects that a script makes before its loop."""

    def __init__(self, batch=2, seed=0, samples=12, accumulated=1, plugin=None):
        torch.manual_seed(seed)
        steps = {"gradient_accumulation_steps": accumulated} if plugin is None else {}
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin, **steps)
        net = torch.nn.Linear(2, 1)
        data = torch.utils.data.TensorDataset(torch.randn(samples, 2), torch.arange(float(samples)))
        loader = torch.utils.data.DataLoader(data, batch_size=batch, shuffle=True)
        prepared = self.accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-3), loader)
        self.net, self.optimizer, self.loader = prepared

    def train(self, path, stop_at=24, epochs=4, **options):
        """Train up to step `stop_at`; returns the samples that were trained."""
        seen = []
        with Checkpointer(self.accelerator, path, **{"every_steps": 1} | options) as ckpt:
            step = ckpt.restore().step
            for _ in range(ckpt.epoch, epochs):
                for x, y in self.loader:
                    self.accelerator.backward(((self.net(x)[:, 0] - y) ** 2).mean())
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    seen += y.tolist()
                    step += 1
                    ckpt.step(step)
                    if step == stop_at:
                        return seen
        return seen


@pytest.mark.parametrize("stop_at", [5, 6, 7, 10, 11, 12])
def test_a_batch_fetched_ahead_is_not_counted_as_consumed(tmp_path, stop_at):
    """accelerate fetches one batch ahead: a count of the batches that the loader returned skips one batch after a
    resume."""
    whole = Job().train(tmp_path / "whole")
    first = Job().train(tmp_path / "run", stop_at=stop_at)
    rest = Job(seed=1).train(tmp_path / "run")  # the order is that of the run, whatever seed the script sets later
    assert first + rest == whole and sorted(whole) == sorted([float(n) for n in range(12)] * 4)


def train_epochs_of(limit, path, stop_at=18):
    """Train epochs that `break` ends after `limit` of 6 batches, up to step `stop_at`; returns each step's samples."""
    job, seen = Job(), []
    with Checkpointer(job.accelerator, path, every_steps=1) as ckpt:
        step = ckpt.restore().step
        for epoch in range(ckpt.epoch, 3):
            for x, y in job.loader:
                if step == limit * (epoch + 1):
                    break
                job.accelerator.backward(((job.net(x)[:, 0] - y) ** 2).mean())
                job.optimizer.step()
                job.optimizer.zero_grad()
                seen.append(y.tolist())
                step += 1
                ckpt.step(step)
                if step == stop_at:
                    return seen
    return seen


@pytest.mark.parametrize("stop_at", [3, 4, 5, 8, 11])
def test_epochs_that_are_left_by_break_have_orders_of_their_own(tmp_path, stop_at):
    """accelerate counts an iteration at its end only. Each epoch that `break` had ended was trained again, with the
    same samples, and after a resume the loop began with the first of them once more."""
    whole = train_epochs_of(4, tmp_path / "whole")
    first = train_epochs_of(4, tmp_path / "run", stop_at)
    assert first + train_epochs_of(4, tmp_path / "run") == whole
    assert len(whole) == 12 and whole[:4] != whole[4:8] != whole[8:]


def test_an_epoch_left_at_its_last_batch_is_counted_once(tmp_path):
    job, seen = Job(), []
    with Checkpointer(job.accelerator, tmp_path / "run") as ckpt:
        step = ckpt.restore().step
        for left in (True, False, False):
            seen.append([])
            for _, y in itertools.islice(job.loader, 6 if left else None):
                seen[-1] += y.tolist()
                step += 1
                ckpt.step(step)
        assert ckpt.epoch == 2
    assert seen[0] != seen[1] != seen[2] and all(sorted(one) == [*range(12)] for one in seen)


def test_a_batch_taken_before_the_loop_is_no_epoch(tmp_path):
    """A look at the shapes of a batch was counted: after a resume the loop trained one epoch less."""
    job = Job()
    with Checkpointer(job.accelerator, tmp_path / "run") as ckpt:
        next(iter(job.loader))
        ckpt.restore()
        assert len([*job.loader]) == 6 and ckpt.epoch == 0


def test_an_epoch_that_the_script_sets_stays(tmp_path):
    job, seen = Job(), []
    with Checkpointer(job.accelerator, tmp_path / "run") as ckpt:
        ckpt.restore()
        for step in range(1, 4):
            job.loader.set_epoch(0)
            seen.append([y.tolist() for _, y in job.loader])
            ckpt.step(step)
    assert seen[0] == seen[1] == seen[2]


def evaluate_often(path, every_steps, stop_at=8):
    """Evaluate the first two batches of an evaluation loader at each step up to `stop_at`; returns their samples."""
    accelerator, net = Accelerator(cpu=True), torch.nn.Linear(2, 1)
    training = torch.utils.data.DataLoader(torch.zeros(8, 2), batch_size=2)
    evaluation = torch.utils.data.DataLoader(torch.arange(12.0), batch_size=2)
    _, training, evaluation = accelerator.prepare(net, training, evaluation)

    def evaluated():
        found = []
        for number, batch in enumerate(evaluation):
            found += batch.tolist()
            if number == 1:
                break
        return found

    with Checkpointer(accelerator, path, every_steps) as ckpt:
        step, found = ckpt.restore().step, []
        for _ in range(ckpt.epoch, 2):
            for _batch in training:
                step += 1
                found.append(evaluated())
                ckpt.step(step)
                found.append(evaluated())
                if step == stop_at:
                    return found
    return found


@pytest.mark.parametrize("every_steps", [1, 100], ids=["saved in step()", "saved on exit"])
def test_an_evaluation_left_by_break_starts_at_its_first_batch_again(tmp_path, every_steps):
    """After a resume, an evaluation of the first two batches evaluated the third and fourth batch."""
    assert evaluate_often(tmp_path / "run", every_steps, stop_at=3) == [[0, 1, 2, 3]] * 6
    assert evaluate_often(tmp_path / "run", every_steps) == [[0, 1, 2, 3]] * 10


@pytest.mark.parametrize("stop_at", [1, 7])
def test_a_training_loop_left_early_continues_after_the_step_saved_on_exit(tmp_path, stop_at):
    """The last save is made after the loop was left, and still holds the position at which it was left."""
    whole = Job().train(tmp_path / "whole")
    first = Job().train(tmp_path / "run", stop_at=stop_at, every_steps=5)
    assert first + Job(seed=1).train(tmp_path / "run") == whole


def test_a_second_checkpointer_or_reader_of_the_state_is_refused(tmp_path):
    job = Job()
    folder = job.accelerator.save_state(str(tmp_path / "folder"))
    with Checkpointer(job.accelerator, tmp_path / "run") as ckpt:
        with pytest.raises(Refused, match="has a Checkpointer already"):
            Checkpointer(job.accelerator, tmp_path / "other")
        ckpt.restore()
        job.accelerator.load_state(folder)  # a new run may start from another checkpoint
        ckpt.save(1).result()
        with pytest.raises(Refused, match="which holds step 1, would be restored too"):
            job.accelerator.load_state(folder)
        job.accelerator.save_state(folder)
    job.accelerator.load_state(folder)


def test_names_in_the_run_have_no_wrappers(tmp_path):
    job = Job()
    job.train(tmp_path / "run", stop_at=1)
    net = torch.nn.Linear(2, 1)
    lastgood.load(tmp_path / "run", {"model": net}, strict=False)
    assert torch.equal(net.weight, job.net.weight)


def test_include_leaves_out_nothing_that_the_integration_needs(tmp_path):
    """With an include, each restart began at the first batch of the epoch again, on weights that had it already."""
    whole = Job().train(tmp_path / "whole")
    first = Job().train(tmp_path / "run", stop_at=8, include=["model*", "optimizer"])
    assert first + Job(seed=1).train(tmp_path / "run", include=["model*", "optimizer"]) == whole
    for pattern, name in (("*loader*", "loader"), ("accelerator", "accelerator"), ("loader.seed", "loader")):
        with pytest.raises(Refused, match=f"leaves out {name}, from which"):
            Job().train(tmp_path / "other", exclude=[pattern])
    assert not (tmp_path / "other").exists()


def test_a_generation_of_a_plain_checkpointer_is_restored_if_asked(tmp_path):
    """It has no position in the data: refused by name, and restored without it with strict=False."""
    job = Job()
    lastgood.save(tmp_path / "run", {"model": job.net}, step=3)
    with Checkpointer(job.accelerator, tmp_path / "run", include=["model"]) as ckpt:
        with pytest.raises(Refused, match="the generation has no loader, accelerator, from which"):
            ckpt.restore()
        assert ckpt.restore(strict=False).step == 3


def test_a_prepared_loader_with_a_resumable_sampler_is_refused(tmp_path):
    """Registered for checkpointing, it was skipped twice after a restart: batches were never trained. Not registered,
    each epoch had the same order."""
    accelerator, sampler = Accelerator(cpu=True), lastgood.ResumableSampler(12, 2, 0)
    loader = torch.utils.data.DataLoader(torch.zeros(12), batch_sampler=sampler)
    accelerator.prepare(torch.nn.Linear(2, 1), loader)
    accelerator.register_for_checkpointing(sampler)
    with pytest.raises(Refused, match="has a ResumableSampler, and both it and this integration would skip"):
        Checkpointer(accelerator, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_another_batch_size_than_the_saved_one_is_refused(tmp_path):
    Job().train(tmp_path / "run", stop_at=3)
    with pytest.raises(LastgoodError, match="saved with 6 batches an epoch, and this loader has 3"):
        Job(batch=4).train(tmp_path / "run")


@pytest.mark.parametrize("other", [{"samples": 11}, {"samples": 18, "batch": 3}, {"accumulated": 2}])
def test_other_sizes_are_refused_in_mid_epoch_only(tmp_path, other):
    """With as many batches an epoch, another dataset or batch size was accepted: samples were trained twice, or
    never; another accumulation left gradients out."""
    Job().train(tmp_path / "run", stop_at=3)
    with pytest.raises(LastgoodError, match="in the middle of an epoch"):
        Job(**other).train(tmp_path / "run")
    Job().train(tmp_path / "run", epochs=1)
    assert Job(**other).train(tmp_path / "run", epochs=2)


def test_another_number_of_processes_is_refused_in_mid_epoch(tmp_path, monkeypatch):
    """Ten batches are two for each of six to nine processes, so the number of batches did not show it."""
    Job().train(tmp_path / "run", stop_at=3)
    job = Job()
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    with pytest.raises(LastgoodError, match="processes 1 -> 2"):
        job.train(tmp_path / "run")


def test_a_run_of_an_earlier_version_opens_without_sizes(tmp_path, monkeypatch):
    with monkeypatch.context() as earlier:
        earlier.setattr(accelerate_saves._Place, "_sizes", lambda self: {})
        Job().train(tmp_path / "run", stop_at=3)
    assert Job(samples=11).train(tmp_path / "run", stop_at=6)


def test_a_step_between_two_optimizer_steps_is_refused(tmp_path):
    """Without `if accelerator.sync_gradients`, a restart lost the gradients of the batches before it. At the end of an
    epoch accelerate makes a step of what is left, so the fifth of 5 batches is accepted."""
    for accumulated, accepted in ((2, [2, 4, 5]), (1, [1, 2, 3, 4, 5])):
        job, found = Job(accumulated=accumulated, samples=10), []
        with Checkpointer(job.accelerator, tmp_path / str(accumulated)) as ckpt:
            ckpt.restore()
            for batch, (x, _) in enumerate(job.loader, 1):
                with job.accelerator.accumulate(job.net):
                    job.accelerator.backward(job.net(x).mean())
                    job.optimizer.step()
                if batch in accepted:
                    ckpt.step(batch)
                else:
                    with pytest.raises(Refused, match=r"`if accelerator\.sync_gradients:` before"):
                        ckpt.step(batch)
                    with pytest.raises(Refused, match=rf"ckpt\.save\({batch}\) was called between two"):
                        ckpt.save(batch)
                    found.append(batch)
        assert found == [one for one in range(1, 6) if one not in accepted]


def test_a_refused_save_leaves_the_position_that_of_its_step(tmp_path):
    """Metrics in the place of `milestone` are refused, before the batches that were read since count as trained."""
    job = Job(samples=10)
    with Checkpointer(job.accelerator, tmp_path / "run") as ckpt:
        ckpt.restore()
        batches = iter(job.loader)
        next(batches)
        ckpt.step(1)
        next(batches)
        with pytest.raises(Refused, match=r"metrics by name: save\(n, metrics="):
            ckpt.save(2, {"loss": 0.5})
        assert ckpt._places[0].state_dict()["batches"] == 1


@pytest.mark.parametrize("held", [False, True])
def test_the_position_saved_on_exit_is_that_of_the_last_step(tmp_path, held):
    """Where the iteration was not closed (it had ended with half a step, or the script held it), the batches after the
    last step counted as trained, and each later step had other batches."""

    def trained(path, epochs, most=10):
        plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
        job, seen, held_open = Job(accumulated=2, samples=10, plugin=plugin), [], []
        with Checkpointer(job.accelerator, path, every_steps=100) as ckpt:
            step = ckpt.restore().step
            for _ in range(ckpt.epoch, epochs):
                held_open.append(iter(job.loader))
                for x, y in itertools.islice(held_open[-1] if held else job.loader, most):
                    with job.accelerator.accumulate(job.net):
                        job.accelerator.backward(((job.net(x)[:, 0] - y) ** 2).mean())
                        job.optimizer.step()
                        job.optimizer.zero_grad()
                    seen.append(y.tolist())
                    if job.accelerator.sync_gradients:
                        step += 1
                        ckpt.step(step)
        return seen

    whole = trained(tmp_path / "whole", 2)
    first = trained(tmp_path / "run", 1, 3 if held else 10)
    assert len(first) % 2 == 1, "half a step"
    assert first[:-1] + trained(tmp_path / "run", 2) == whole


def test_batches_after_the_last_step_are_accumulated_again(tmp_path):
    """A loop that `return` ended between two optimizer steps went on with the second batch of two, so that each later
    step had other batches."""

    def trained(path, most=8):
        job, seen = Job(accumulated=2, samples=16), []
        with Checkpointer(job.accelerator, path, every_steps=100) as ckpt:
            step = ckpt.restore().step
            for x, y in job.loader:
                if len(seen) == most:
                    return seen
                with job.accelerator.accumulate(job.net):
                    job.accelerator.backward(((job.net(x)[:, 0] - y) ** 2).mean())
                    job.optimizer.step()
                    job.optimizer.zero_grad()
                seen.append((y.tolist(), job.accelerator.sync_gradients))
                if job.accelerator.sync_gradients:
                    step += 1
                    ckpt.step(step)
        return seen

    whole = trained(tmp_path / "whole")
    assert [one for _, one in whole] == [False, True] * 4
    assert trained(tmp_path / "run", 3)[:2] + trained(tmp_path / "run") == whole


def test_wrong_arguments_are_refused_by_name(tmp_path):
    with pytest.raises(Refused, match="Did you mean every_steps"):
        Job().train(tmp_path, everysteps=3)
    with pytest.raises(Refused, match="no model is prepared yet"):
        Checkpointer(Accelerator(cpu=True), tmp_path)

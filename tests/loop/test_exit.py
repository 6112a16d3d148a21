"""The last state is saved when the loop ends, and the cadence skips no multiple."""

from __future__ import annotations

import contextlib
import errno
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import lastgood
from harness import reported, reports, steps
from lastgood import errors
from lastgood.policy.cadence import Every
from lastgood.records import GenerationId
from lastgood.run.writer import RunWriter
from lastgood.testing import Fault


def trained(path: Path, total: int, **options: object) -> torch.Tensor:
    state = {"w": torch.zeros(3)}
    with lastgood.Checkpointer(path, state, **{"in_flight": 1, **options}) as ckpt:
        for n in range(ckpt.restore().step + 1, total + 1):
            state["w"].fill_(n)
            ckpt.step(n)
    return state["w"]


def test_a_run_shorter_than_its_cadence_keeps_its_last_state(tmp_path: Path) -> None:
    """280 steps under the default cadence of 300 s saved nothing, and nothing was reported."""
    trained(tmp_path, 280)
    assert steps(tmp_path) == [280]
    assert trained(tmp_path, 280).tolist() == [280] * 3, "no step was made, so nothing more is saved"
    assert steps(tmp_path) == [280]


def test_the_last_step_is_saved_once(tmp_path: Path) -> None:
    trained(tmp_path, 20, cadence=Every(steps=10))
    assert steps(tmp_path) == [10, 20]


def test_without_a_save_on_exit_the_summary_names_the_unsaved_steps(tmp_path: Path) -> None:
    with reported("newest durable step 10 of 15; the state after it was not saved"):
        trained(tmp_path / "run", 15, cadence=Every(steps=10), save_on_exit=False)
    assert steps(tmp_path / "run") == [10]
    with reported("nothing is durable of 3 steps", logging.ERROR):
        trained(tmp_path / "none", 3, save_on_exit=False)


def test_an_exception_saves_nothing_and_the_summary_names_the_durable_step(tmp_path: Path) -> None:
    """The state at the time of an exception may be in the middle of a step."""
    with (
        reported("newest durable step 10 of 15"),
        pytest.raises(KeyboardInterrupt),
        lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}, cadence=Every(steps=10)) as ckpt,
    ):
        for n in range(1, 16):
            ckpt.step(n)
        raise KeyboardInterrupt
    assert steps(tmp_path) == [10]


def test_close_saves_nothing_and_reports_it(tmp_path: Path) -> None:
    """close() is also called in `finally:` clauses, where the state may be in the middle of a step."""
    ckpt = lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)})
    ckpt.save(1)
    ckpt.step(2)
    with reported("newest durable step 1 of 2; the state after it was not saved"):
        ckpt.close()
    assert steps(tmp_path) == [1]


def test_a_failed_last_save_is_repeated_at_exit(tmp_path: Path, faulty_files) -> None:
    faulty_files.inject(Fault("reserve", nth=1))
    with reports() as texts:
        trained(tmp_path, 10, cadence=Every(steps=10))
    assert steps(tmp_path) == [10]
    assert any("newest durable step 10 of 10; 1 save failed: TierDown" in one for one in texts)


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_failed_save_at_exit_is_reported_or_raised(tmp_path: Path, faulty_files, on_error: str) -> None:
    faulty_files.inject(Fault("reserve", errno=errno.ENOSPC))
    with reported("nothing is durable of 3 steps; 1 save failed: NoSpace", logging.ERROR):
        if on_error == "warn":
            trained(tmp_path, 3, on_error="warn")
        else:
            with pytest.raises(errors.NoSpace):
                trained(tmp_path, 3, on_error="raise")


def test_a_save_at_exit_waits_for_a_lane_under_every_when_full_option(tmp_path: Path) -> None:
    for when_full in ("skip", "raise"):
        trained(tmp_path / when_full, 5, cadence=Every(steps=4), in_flight=1, when_full=when_full)
        assert steps(tmp_path / when_full) == [4, 5]


def test_a_state_that_was_not_restored_is_not_saved_at_exit(tmp_path: Path) -> None:
    trained(tmp_path, 3)
    with lastgood.Checkpointer(tmp_path, {"w": torch.ones(3)}, cadence=Every(steps=100)) as ckpt:
        ckpt._progress.step = 5  # the loop has stepped before the checkpointer could compare any state
    assert steps(tmp_path) == [3]


def test_a_step_after_the_with_block_is_refused(tmp_path: Path) -> None:
    """Because of a wrong indentation, 99 steps ran after the `with` block, and nothing was reported until a save was
    due."""
    with lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}, cadence=Every(steps=100)) as ckpt:
        ckpt.step(1)
    with pytest.raises(errors.Refused, match="closed"):
        ckpt.step(2)


@pytest.mark.parametrize(
    ("every", "numbers", "saved"),
    [
        (10, range(5, 50, 10), [15, 25, 35, 45]),
        (10, range(1, 31), [10, 20, 30]),
        (10, [3, 3, 9, 10, 10, 11], [10]),
        (1000, range(48, 3000, 48), [1008, 2016]),
    ],
)
def test_a_save_is_due_when_a_multiple_of_the_interval_was_passed(tmp_path, every, numbers, saved) -> None:
    """Every(steps=10) with steps 5, 15, 25, ... never saved, and neither did most counts of tokens or samples."""
    options = {"cadence": Every(steps=every), "save_on_exit": False, "retention": lastgood.Keep(last=9)}
    with lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}, **options) as ckpt:
        for n in numbers:
            ckpt.step(n)
            ckpt.wait()
    assert steps(tmp_path) == saved


def test_nothing_is_due_at_a_step_that_is_given_again(tmp_path: Path) -> None:
    """A loop that accumulates gradients gives the number of its last step at each batch. Once enough seconds had
    passed, it was saved there, with the random numbers and the statistics of half an accumulation."""
    with lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}, cadence=Every(seconds=3600)) as ckpt:
        ckpt.step(1)
        ckpt._saver._cadence = ckpt._saver.schedule._cadence = Every(seconds=1e-9)
        assert ckpt.step(1) is None and ckpt.step(2) is not None


def test_a_multiple_that_was_saved_by_hand_or_restored_is_not_due_again(tmp_path: Path) -> None:
    options = {"cadence": Every(steps=10), "save_on_exit": False}
    state = {"w": torch.zeros(3)}
    with lastgood.Checkpointer(tmp_path, state, **options) as ckpt:
        ckpt.step(8)
        ckpt.save(12).result()
        assert ckpt.step(13) is None
    with lastgood.Checkpointer(tmp_path, state, **options) as ckpt:
        ckpt.restore()
        assert ckpt.step(19) is None and ckpt.step(21) is not None


def test_decreasing_step_numbers_are_refused_at_once(tmp_path: Path) -> None:
    """A loop that counted its steps from 1 in each epoch was stopped only by the first save that was due in the
    second epoch."""
    with lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}, cadence=Every(steps=1000)) as ckpt:
        ckpt.step(100)
        with pytest.raises(errors.StepTaken, match=r"step 1 cannot follow step 100.*over all epochs"):
            ckpt.step(1)


@pytest.mark.parametrize("given", [{"steps": 2.5}, {"steps": "10"}, {"steps": True}, {"seconds": "60"}])
def test_a_cadence_of_another_type_is_refused_by_name(given: dict) -> None:
    with pytest.raises(errors.Refused, match=next(iter(given))):
        Every(**given)


def test_an_unknown_outcome_of_the_last_save_ends_the_run_normally(tmp_path: Path, monkeypatch) -> None:
    """The exit saved the same step again, although its generation may exist: StepTaken, exit code 1."""
    publish = RunWriter.publish

    def unknown(self: RunWriter, at: GenerationId, *args: object) -> object:
        if at.step == 2:
            raise errors.CommitUnknown("step 2: EIO; it may or may not have become durable")
        return publish(self, at, *args)

    monkeypatch.setattr(RunWriter, "publish", unknown)
    with (
        reported("newest durable step 1 of 2; 1 save failed: CommitUnknown"),
        lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}, cadence=Every(steps=1)) as ckpt,
    ):
        ckpt.step(1).result(60)
        ckpt.step(2)


def test_the_closing_summary_is_reported_once(tmp_path: Path) -> None:
    with reports() as texts, lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}) as ckpt:
        ckpt.step(1)
        ckpt.close()
    assert sum("nothing is durable" in one for one in texts) == 1


# ---- neither step() nor save() ---------------------------------------------------------------------------------

UNUSED = r"nothing was saved: step\(\) and save\(\) were never called"


def build(**options: object) -> dict:
    model = torch.nn.Linear(3, 3)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), **options)}


def train(state: dict) -> None:
    state["model"](torch.ones(2, 3)).sum().backward()
    state["optimizer"].step()


@pytest.mark.parametrize("fused", [False, True])
def test_a_loop_that_never_calls_step_is_reported_at_the_exit(tmp_path: Path, fused: bool) -> None:
    """A training without a single step() or save() ended without a report, and with nothing on the disk."""
    state = build(fused=fused)
    with reported(f"{UNUSED}, and the parameters have changed"), lastgood.Checkpointer(tmp_path, state) as ckpt:
        ckpt.restore()
        train(state)
    lastgood.save(tmp_path, state, step=1)
    ckpt = lastgood.Checkpointer(tmp_path, state)
    ckpt.restore()
    train(state)
    with reported(f"{UNUSED}, and the parameters have changed"):
        ckpt.close()


class Interrupts(torch.optim.SGD):
    """Ctrl-C comes in the middle of each step."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        raise KeyboardInterrupt


@pytest.mark.parametrize("half", [False, True])
def test_an_update_after_the_last_step_is_not_saved_under_its_number(tmp_path: Path, half: bool) -> None:
    """Ctrl-C between optimizer.step() and step(3), caught inside of the `with`: the save at the exit stored the weights
    of step 3 as step 2, and the next process trained the batch of step 3 twice."""
    state = build()
    if half:
        state["optimizer"] = Interrupts(state["model"].parameters(), lr=0.1)
    with (
        reported("step 2 was not saved: Refused: an optimizer has stepped since step 2", logging.ERROR),
        lastgood.Checkpointer(tmp_path, state) as ckpt,
    ):
        ckpt.save(ckpt.restore().step + 1)
        ckpt.step(2)
        with contextlib.suppress(KeyboardInterrupt):
            train(state)
    assert steps(tmp_path) == [1]


def test_an_update_after_the_last_save_is_reported_at_the_exit(tmp_path: Path) -> None:
    """A loop that calls step(n) before the update of step n + 1 lost its last update, and nothing was reported."""
    state = build()
    with reported("an optimizer has stepped since step 1, and"), lastgood.Checkpointer(tmp_path, state) as ckpt:
        ckpt.save(1)
        train(state)


def test_a_save_of_a_step_that_an_optimizer_has_passed_is_reported(tmp_path: Path) -> None:
    """save(1) after the update of step 2 stored the weights of step 2 as step 1 where step 1 was not saved before, and
    nothing was reported. A second step(1) made the save at the exit do the same."""
    state = build()
    with lastgood.Checkpointer(tmp_path / "run", state) as ckpt:
        ckpt.step(1)
        train(state)
        with reported(r"save\(1\): an optimizer has stepped since step 1"):
            ckpt.save(1).result()
    with (
        reported("step 2 was not saved: Refused: an optimizer has stepped since step 2", logging.ERROR),
        lastgood.Checkpointer(tmp_path / "again", state) as ckpt,
    ):
        ckpt.step(2)
        train(state)
        ckpt.step(2)


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_a_loop_that_counts_from_the_step_before_is_reported(tmp_path: Path, resumed: bool, plain: bool) -> None:
    """`for i in range(start, total): ...; ckpt.step(i)` gave each state the number of the one before, and each restart
    trained a batch twice, without a word."""
    state = build()
    if plain:  # nothing in it shows its steps
        state["optimizer"] = torch.optim.SGD(state["model"].parameters(), lr=0.1)
    if resumed:
        train(state)
        lastgood.save(tmp_path, state, step=4)
    with lastgood.Checkpointer(tmp_path, state) as ckpt:
        start = ckpt.restore().step
        with reports(logging.WARNING) as texts:
            for i in range(start, start + 3):
                train(state)
                ckpt.step(i)
    found = [one for one in texts if f"step({start}): an optimizer has stepped" in one]
    assert len(found) == 1 and found == [one for one in texts if "an optimizer has stepped" in one]


def test_steps_that_are_given_again_are_not_reported(tmp_path: Path) -> None:
    """The number stays the same while gradients are accumulated, and weights may be loaded before the first save."""
    state = build()
    with reports(logging.WARNING) as texts, lastgood.Checkpointer(tmp_path, state) as ckpt:
        ckpt.restore()
        state["model"].load_state_dict(build()["model"].state_dict())
        ckpt.save(0)
        for n in (1, 2):
            train(state)
            ckpt.step(n)
            ckpt.step(n)
    assert not texts


def normalized() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_forward_pass_after_the_last_step_is_reported(tmp_path: Path, by_hand: bool) -> None:
    """A `break` or Ctrl-C in the next step, within the block, stored the running statistics of that step as those of
    the last one: what followed a resume was not what would have followed, and nothing was reported."""
    state = normalized()
    with (
        reports(logging.WARNING) as texts,
        lastgood.Checkpointer(tmp_path, state, cadence=Every(steps=5), save_on_exit=not by_hand) as ckpt,
    ):
        ckpt.restore()
        for n in (1, 2):
            state["model"](torch.ones(4, 2))
            ckpt.step(n)
        if by_hand:
            state["model"].eval()(torch.ones(4, 2))
            ckpt.save(2).result()  # an evaluation changes none
            ckpt.step(3)
        state["model"].train()(torch.ones(4, 2))
        if by_hand:
            ckpt.save(3).result()
    (text,) = texts
    assert text.startswith(f"step {2 + by_hand} is saved with")
    assert "is saved with buffers that have changed" in text and "model.1.num_batches_tracked" in text


@pytest.mark.parametrize(
    ("leaves", "reports_it"), [("before a step", True), ("after a step", False), ("at its end", False)]
)
def test_a_batch_that_no_step_has_trained_is_reported(tmp_path: Path, leaves: str, reports_it: bool) -> None:
    """`if n == total: break` at the begin of the loop's body came after the loader had yielded one batch more. The save
    at the exit counted it as trained, and a longer training that went on from there never had it."""
    loader, evaluated = (StatefulDataLoader(torch.arange(12), batch_size=2) for _ in range(2))
    state = {"w": torch.zeros(3), "loader": loader, "evaluated": evaluated}
    with (
        reports(logging.WARNING) as texts,
        lastgood.Checkpointer(tmp_path, state, cadence=Every(steps=100)) as ckpt,
    ):
        ckpt.restore()
        for n, _ in enumerate(loader, start=1):
            if n == 5 and leaves == "before a step":
                break
            ckpt.step(n)
            if n == 4 and leaves == "after a step":
                break
        assert len([*evaluated]) == 6
    assert [one.partition(" has")[0] for one in texts] == ["step 4 is saved after loader"] * reports_it


def test_running_statistics_of_a_bad_batch_are_not_saved_at_the_exit(tmp_path: Path) -> None:
    """A loop that ended at a loss of NaN had NaN in its running statistics, and the save at its exit had them too: each
    evaluation after a resume gave NaN."""
    state = normalized()
    with (
        reported(r"step 7 was not saved: Refused: a forward pass has brought NaN into model\.1\.", logging.ERROR),
        lastgood.Checkpointer(tmp_path, state, cadence=Every(steps=5)) as ckpt,
    ):
        ckpt.restore()
        for n in range(1, 8):
            state["model"](torch.ones(4, 2))
            ckpt.step(n)
        state["model"](torch.full((4, 2), torch.nan))
    assert steps(tmp_path) == [5]


def test_statistics_that_hold_nan_since_before_the_last_step_are_saved(tmp_path: Path) -> None:
    """A network that only runs in training mode does not read them: its run must not be lost to one bad batch."""
    state = normalized()
    with reports(logging.WARNING) as texts, lastgood.Checkpointer(tmp_path, state) as ckpt:
        ckpt.restore()
        state["model"](torch.full((4, 2), torch.nan))
        ckpt.step(1)
    assert steps(tmp_path) == [1] and not texts


def test_buffers_that_a_save_has_or_leaves_out_are_not_reported(tmp_path: Path) -> None:
    """The exit said of an average that save(2) had stored that it was saved before it changed."""
    state, options = normalized(), {"cadence": Every(steps=5), "exclude": ["model.1.queue"]}
    state["model"][1].register_buffer("queue", torch.zeros(2))
    with reports(logging.WARNING) as texts, lastgood.Checkpointer(tmp_path, state, **options) as ckpt:
        ckpt.restore()
        ckpt.step(1)
        state["model"][1].queue.add_(1.0)
        ckpt.step(2)
        state["model"](torch.ones(4, 2))
        ckpt.save(2).result()
        state["model"][1].queue.add_(1.0)
        mean = state["model"][1].running_mean
        mean.copy_(mean.clone())  # as what swaps averages in for an evaluation, and out
    assert len(texts) == 1 and "step 2 is saved with buffers" in texts[0]


class OwnGradients(torch.optim.SGD):
    """Has its gradients elsewhere."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for one in self.param_groups[0]["params"]:
            one.data.add_(1.0)


@pytest.mark.parametrize("own", [False, True])
def test_a_step_of_an_optimizer_without_gradients_is_no_update(tmp_path: Path, own: bool) -> None:
    """An optimizer.step() for what is left of an accumulation, where nothing was, made save(1) report a later state,
    and the exit refuse the save of step 2."""
    state = build()
    if own:
        state["optimizer"] = OwnGradients(state["model"].parameters(), lr=0.1)
    with reports(logging.WARNING) as texts, lastgood.Checkpointer(tmp_path, state) as ckpt:
        ckpt.step(1)
        state["optimizer"].zero_grad()
        state["optimizer"].step()
        ckpt.save(1).result()
        ckpt.step(2)
        state["optimizer"].step()
    assert steps(tmp_path) == ([1] if own else [1, 2]) and bool(texts) == own


def test_updates_before_the_last_step_do_not_prevent_its_save(tmp_path: Path) -> None:
    state = build()
    with reports(logging.WARNING) as texts, lastgood.Checkpointer(tmp_path, state) as ckpt:
        ckpt.step(1)
        train(state)
        train(state)
        ckpt.step(2)
    with lastgood.Checkpointer(tmp_path, state, cadence=Every(steps=3)) as ckpt:
        ckpt.restore()
        ckpt.step(3)
        train(state)
        ckpt.restore()
        ckpt.step(4)
    assert steps(tmp_path) == [2, 3, 4] and not texts


def test_an_opening_without_any_step_is_reported_neutrally(tmp_path: Path) -> None:
    with reported(f"{UNUSED}$"), lastgood.Checkpointer(tmp_path, build()):
        pass
    with reported(f"{UNUSED}$"), lastgood.Checkpointer(tmp_path, build()) as ckpt:
        assert ckpt.restore().generation is None, "an evaluation of a run that does not exist"


def test_a_restore_for_evaluation_reports_no_summary(tmp_path: Path) -> None:
    """A script that restores, evaluates and exits has nothing to save."""
    state = build()
    train(state)
    lastgood.save(tmp_path, state, step=1)
    with reports() as texts, lastgood.Checkpointer(tmp_path, build()) as ckpt:
        ckpt.restore()
        with torch.no_grad():
            ckpt._request.state["model"].eval()(torch.ones(2, 3))
    assert not any("nothing was saved" in one for one in texts)


def test_an_exception_before_the_first_step_reports_no_summary(tmp_path: Path) -> None:
    with reports() as texts, pytest.raises(ZeroDivisionError), lastgood.Checkpointer(tmp_path, build()):
        raise ZeroDivisionError
    assert not any("nothing was saved" in one for one in texts)


@pytest.mark.parametrize(("saved", "line"), [(0, "nothing is durable of 3 steps"), (2, "newest durable step 2 of 3")])
def test_an_unclosed_run_reports_its_summary_at_interpreter_exit(tmp_path: Path, saved: int, line: str) -> None:
    """In a notebook or a script without `with`, 280 steps under the default cadence saved nothing, and nothing was
    reported."""
    ckpt = lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)})
    for n in range(1, 4):
        ckpt.step(n)
        if n == saved:
            ckpt.save(n).result(60)
    with reports(logging.WARNING) as texts:
        ckpt._pipeline._unreported()  # the end of the process makes the same call
    assert "was never closed" in texts[0] and line in texts[-1]
    ckpt.close()


def test_an_interrupt_while_a_save_starts_ends_the_process(tmp_path: Path, monkeypatch) -> None:
    """An interrupt between the start of the writing thread and the start of the copy left a thread that waited for
    ever."""
    with (
        pytest.raises(KeyboardInterrupt),
        lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}, cadence=Every(steps=1)) as ckpt,
    ):
        ckpt.step(1).result(60)
        lanes = ckpt._pipeline._lanes
        submit = lanes.submit

        def interrupted(*args: object) -> None:
            submit(*args)
            raise KeyboardInterrupt

        monkeypatch.setattr(lanes, "submit", interrupted)
        ckpt.step(2)
    assert steps(tmp_path) == [1]


def test_a_half_loaded_state_cannot_start_over(tmp_path: Path) -> None:
    """restore(step=0) treated a state that was half of another step as a fresh start, and saved it as a new lineage."""
    with lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}) as ckpt:
        ckpt.restore()
        ckpt._saver.half_loaded = True
        with pytest.raises(errors.Refused, match="half of another step"):
            ckpt.restore(step=0)

"""A sampler in the state, and loops that do not read from it as they should.

Loops that only look wrong are tested too: none of them is refused.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from accelerate.data_loader import SkipBatchSampler
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import lastgood
from harness import place, reports
from lastgood import ResumableSampler
from lastgood.data.step_counting import count_step, report_missing_parts
from lastgood.errors import Refused
from lastgood_lab.worlds import world

DATA = torch.arange(40)


def make(**options) -> ResumableSampler:
    return ResumableSampler(40, 4, **{"seed": 7, **options})


# ---- loops that are refused or reported -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [(DataLoader, {}), (DataLoader, {"drop_last": True}), (DataLoader, {"num_workers": 1}), (StatefulDataLoader, {})],
)
def test_a_sampler_given_as_sampler_and_not_as_batch_sampler_is_refused(kind, options) -> None:
    """DataLoader(dataset, sampler=sampler, batch_size=4) returned four batches for each one that was counted: after
    a resume, these samples were trained a second time."""
    loader = kind(DATA, sampler=make(), batch_size=4, **options)
    with pytest.raises(Refused, match=r"as sampler=, with batch_size=4.*batch_sampler=sampler"):
        next(iter(loader))


def shuffled(_: ResumableSampler) -> DataLoader:
    return DataLoader(DATA, batch_size=4, shuffle=True)


def of_another_sampler(_: ResumableSampler) -> DataLoader:
    return DataLoader(DATA, batch_sampler=make())


def begun_and_left(sampler: ResumableSampler) -> DataLoader:
    iter(sampler.loader(DATA))
    return shuffled(sampler)


@pytest.mark.parametrize("loader_of", [shuffled, of_another_sampler, begun_and_left])
def test_a_loop_over_a_foreign_loader_is_reported_at_its_first_step(tmp_path: Path, loader_of, caplog, capsys) -> None:
    """The cursor of a sampler from which no batch was read advanced with each step without a report: a resume
    continued at a meaningless position in the data."""
    sampler = make()
    with lastgood.Checkpointer(tmp_path, {"w": torch.ones(1), "sampler": sampler}) as ckpt:
        for n, _ in enumerate(loader_of(sampler), 1):
            ckpt.step(n)
    assert caplog.text.count("step 1: no batch was read from a ResumableSampler in the state") == 1
    assert capsys.readouterr().err.count("no batch was read") == 1


@pytest.mark.parametrize(
    ("patterns", "count"),
    [({"include": ["w"]}, 1), ({"exclude": ["data.s*"]}, 0), ({"include": ["w", "data.*"]}, 0), ({}, 0)],
)
def test_a_sampler_that_is_read_and_not_saved_is_reported(tmp_path: Path, patterns, count, caplog) -> None:
    """With `include=` for an adapter the sampler was counted and not saved: a resume trained the samples again."""
    sampler, evaluation, unread = make(), make(), make()
    state = {"w": torch.ones(1), "data": {"sampler": sampler}, "eval": evaluation, "other": unread}
    assert len([*evaluation.loader(DATA)]) == 10, "before the training"
    with lastgood.Checkpointer(tmp_path, state, **patterns) as ckpt:
        for n, _ in enumerate(sampler.loader(DATA), 1):
            ckpt.step(n)
    assert caplog.text.count("batches are read from data.sampler, which include= leaves out") == count
    assert caplog.text.count("batches are read from") == count


@pytest.mark.parametrize(
    ("how", "count"),
    [("left out", 1), ("given", 0), ("given beside an evaluation", 0), ("counted by the loop", 0), ("read before", 0)],
)
def test_a_sampler_that_the_loop_reads_and_the_state_lacks_is_reported(tmp_path: Path, how, count, caplog) -> None:
    """Each resume began its epoch again, and trained the same samples twice, without a word."""
    sampler, weights = make(), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    state = {"w": weights, "optimizer": optimizer, **({"sampler": sampler} if "given" in how else {})}
    evaluation = iter(make(seed=8).loader(DATA)) if "evaluation" in how else iter([0])
    next(evaluation)
    batches = [*sampler.loader(DATA)] if how == "read before" else sampler.loader(DATA)
    with lastgood.Checkpointer(tmp_path, state, cadence=lastgood.Every(steps=3)) as ckpt:
        ckpt.restore()
        for n, _ in enumerate(batches, 1):
            weights.grad = torch.ones(1)
            optimizer.step()
            if how == "counted by the loop":
                sampler.consumed()
            ckpt.step(n)
    assert caplog.text.count("the state lacks ResumableSampler") == caplog.text.count("the state lacks") == count


def test_an_idle_sampler_on_rank_0_of_a_data_group_is_reported_once(capsys, caplog) -> None:
    sampler = make()
    for n in (1, 2, 3):
        count_step([sampler], n, n - 1, rank=0, ranks=2, first=n == 1)
    assert caplog.text.count("step 1: no batch was read from a ResumableSampler") == 1
    assert capsys.readouterr().err.count("no batch was read") == 1


def test_a_sampler_that_counted_this_step_already_leaves_others_idle(caplog) -> None:
    """Taken for idle beside another idle one, it would leave no sampler in use, and the step would count on both."""
    counted, idle = make(), make()
    counted.restart_after(4)
    counted.advance_to(5)
    count_step([counted, idle], 5, 4, first=True)
    assert place(counted) == (0, 1) and place(idle) == (0, 0)
    assert "no batch was read" not in caplog.text


def test_steps_with_the_batches_of_an_earlier_pass_are_reported(caplog) -> None:
    """`itertools.cycle(loader)` repeats the batches of its first pass. The cursor stood at the next epoch meanwhile, so
    a resume went on with other samples than the run without it."""
    sampler = make()
    for n, _ in zip(range(1, 15), itertools.cycle(sampler.loader(DATA)), strict=False):
        count_step([sampler], n, n - 1)
    assert [one.partition(":")[0] for one in caplog.messages] == ["step 12"]


def test_steps_with_batches_that_were_fetched_ahead_are_right(caplog) -> None:
    """A resume in the middle of an epoch, with two batches fetched ahead of each step, was reported in each epoch."""
    sampler = make(batches_per_step=1)
    sampler.load_state_dict(make().state_dict() | {"cursor_step": 4, "step": 4})
    ahead = list(sampler.loader(DATA))
    for n in range(5, 5 + len(ahead)):
        count_step([sampler], n, n - 1)
    assert len(ahead) == 6 and caplog.messages == []


@pytest.mark.parametrize("ends", ["one step more", "a second loader goes on"])
def test_steps_after_the_end_of_a_loader_may_be_right(caplog, ends: str) -> None:
    sampler, other = make(), make(seed=8)
    longer = itertools.repeat(0) if ends == "one step more" else iter(other.loader(DATA))
    for n, _ in enumerate(sampler.loader(DATA), start=1):
        if n == 5:
            next(longer)
        count_step([sampler, other], n, n - 1)
    for n in range(11, 12 if ends == "one step more" else 15):
        next(longer)
        count_step([sampler, other], n, n - 1)
    assert caplog.messages == []


def saved_by(rank: int, size: int, root: Path) -> list[str]:
    exact = make(world_size=size, rank=rank)
    of_sampler, left_out = StatefulDataLoader(DATA, batch_sampler=exact), StatefulDataLoader(DATA)
    state = {"loader": StatefulDataLoader(DATA), "sampler": exact, "of_sampler": of_sampler, "left_out": left_out}
    with reports(logging.ERROR) as texts, lastgood.Checkpointer(root, state, exclude=["left_out"]) as ckpt:
        step = ckpt.restore().step
        next(iter(of_sampler))
        ckpt.save(step + 1)
    return texts


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_keeps_its_position_beside_its_stateful_loader(tmp_path: Path, workers: int) -> None:
    """torchdata's loader has a copy of the state of its sampler, and loaded it at its next iteration: with workers,
    each resume trained the last batches again, and batches that a Sentinel had left out were trained."""
    options = {"num_workers": workers, "generator": torch.Generator()}
    trained = list[list[int]]()
    for life in range(2):
        sampler = make()
        loader = StatefulDataLoader(DATA, batch_sampler=sampler, **options)
        with lastgood.Checkpointer(tmp_path, {"sampler": sampler, "loader": loader}) as ckpt:
            n = ckpt.restore().step
            if life:
                sampler.skip(0, 3, 1)
            for batch in loader:
                trained.append(batch.tolist())
                n += 1
                ckpt.step(n)
                if n == 3:
                    break
    order = make().order(0).tolist()
    assert trained == order[:3] + order[4:]


def test_a_loader_restores_a_sampler_that_is_in_no_entry_of_the_state(tmp_path: Path) -> None:
    """The loop counted its steps by `consumed()`, and only the loader held the position. A restore began at epoch 0."""
    trained = list[list[int]]()
    for _ in range(2):
        sampler = make()
        loader = StatefulDataLoader(DATA, batch_sampler=sampler, generator=torch.Generator())
        with lastgood.Checkpointer(tmp_path, {"loader": loader}) as ckpt:
            n = ckpt.restore().step
            for batch in loader:
                trained.append(batch.tolist())
                sampler.consumed()
                n += 1
                ckpt.step(n)
                if n == 3:
                    break
    assert trained == make().order(0).tolist()


def test_a_sampler_that_only_its_stateful_loader_has_is_reported(tmp_path: Path) -> None:
    """Nothing counted its steps, so each resume began its epoch again, and each epoch had the order of the first."""
    loader = StatefulDataLoader(DATA, batch_sampler=make(), generator=torch.Generator())
    with reports(logging.WARNING) as texts, lastgood.Checkpointer(tmp_path, {"loader": loader}) as ckpt:
        ckpt.restore()
        batches = iter(loader)
        for n in (1, 2):
            next(batches)
            ckpt.step(n)
    assert (
        sum("loader.batch_sampler is a ResumableSampler that an object of the state holds" in one for one in texts) == 1
    )


def test_a_loader_whose_position_is_that_of_another_world_is_reported(tmp_path: Path) -> None:
    """After a change of the number of ranks the position of a StatefulDataLoader, which is that of one of them in its
    part of the data, was restored without a word: samples came twice or never."""
    assert world(2, saved_by, tmp_path) == [[], []]
    (text,) = saved_by(0, 1, tmp_path)
    assert "step 1: loader is a StatefulDataLoader, whose position is that of one of 2 ranks; now there are 1" in text
    assert saved_by(0, 1, tmp_path) == []


# ---- loops that are right -------------------------------------------------------------------------------------------


def in_accelerates_wrappers(sampler: ResumableSampler) -> DataLoader:
    return DataLoader(DATA, batch_sampler=SkipBatchSampler(sampler, skip_batches=0))


class Own(BatchSampler):
    """A wrapper of a batch sampler that does not call `super().__init__`."""

    def __init__(self, wrapped: ResumableSampler) -> None:
        self.wrapped = wrapped

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.wrapped)


def in_a_wrapper_of_their_own(sampler: ResumableSampler) -> DataLoader:
    return DataLoader(DATA, batch_sampler=Own(sampler))


@pytest.mark.parametrize("loader_of", [in_accelerates_wrappers, in_a_wrapper_of_their_own])
def test_a_batch_sampler_that_wraps_the_sampler_reads_from_it(tmp_path: Path, loader_of, caplog) -> None:
    """A wrapper that does not call torch's constructor ended in an AttributeError."""
    sampler = make()
    with lastgood.Checkpointer(tmp_path, {"sampler": sampler}) as ckpt:
        for n, _ in enumerate(loader_of(sampler), 1):
            ckpt.step(n)
    assert n == 10 and place(sampler) == (1, 0) and "no batch was read" not in caplog.text


class Streamed(IterableDataset):
    """A dataset that reads its windows from a sampler."""

    def __init__(self, sampler: ResumableSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (DATA[window] for window in self.sampler)


def test_a_sampler_that_a_worker_process_reads_is_counted(tmp_path: Path) -> None:
    """No batch was read from it in the process that counts, so the first step was refused."""
    sampler = make()
    with lastgood.Checkpointer(tmp_path, {"sampler": sampler}) as ckpt:
        for n, _ in zip((1, 2, 3), DataLoader(Streamed(sampler), batch_size=None, num_workers=1), strict=False):
            ckpt.step(n)
    assert place(sampler) == (0, 3)


@pytest.mark.parametrize("batch_size", [None, 1])
def test_a_loader_that_draws_single_batches_counts_each(tmp_path: Path, batch_size) -> None:
    """With `sampler=sampler, batch_size=None`, the dataset receives each list of ids and makes a batch of it."""
    sampler, seen = make(), list[list[int]]()
    with lastgood.Checkpointer(tmp_path, {"sampler": sampler}) as ckpt:
        for n, batch in enumerate(DataLoader(DATA, sampler=sampler, batch_size=batch_size), 1):
            seen.append(batch.flatten().tolist())
            ckpt.step(n)
            assert place(sampler) == divmod(n, 10)
    assert seen == make().order(0).tolist()


def test_an_evaluation_sampler_does_not_move_until_it_is_read(tmp_path: Path) -> None:
    """Each training step advanced the evaluation sampler too: the first evaluation began in the middle of an epoch."""
    train, evaluation = make(), make(seed=8)
    state = {"train": train, "evaluation": evaluation}
    with lastgood.Checkpointer(tmp_path, state) as ckpt:
        for n, _ in enumerate(train.loader(DATA), 1):
            ckpt.step(n)
            if n in (5, 7):
                assert len(list(evaluation.loader(DATA))) == 10
    assert place(train) == (1, 0) and place(evaluation) == (2, 0)


def test_a_following_training_phase_starts_at_its_first_batch(tmp_path: Path) -> None:
    first, second = make(), make(seed=8)
    with lastgood.Checkpointer(tmp_path, {"phases": [first, second]}) as ckpt:
        for n, _ in enumerate(first.loader(DATA), 1):
            ckpt.step(n)
        for n, _ in zip(range(11, 14), DataLoader(DATA, batch_sampler=second), strict=False):
            ckpt.step(n)
    assert (place(first), place(second)) == ((1, 0), (0, 3))


def test_a_loop_that_reads_the_order_directly_is_counted(tmp_path: Path) -> None:
    sampler = make()
    with lastgood.Checkpointer(tmp_path, {"sampler": sampler}) as ckpt:
        for n in range(1, 13):
            epoch, window = sampler.position
            DATA[torch.from_numpy(sampler.order(epoch)[window].copy())]
            ckpt.step(n)
    assert place(sampler) == (1, 2)


def test_a_restored_step_is_saved_into_a_second_run_without_reading(tmp_path: Path) -> None:
    """To continue a run in a second one, a loop restores from the first and saves the same step into the second."""
    sampler = make()
    with lastgood.Checkpointer(tmp_path / "a", {"sampler": sampler}) as ckpt:
        for n, _ in zip((1, 2, 3), sampler.loader(DATA), strict=False):
            ckpt.save(n)
    again = make()
    a, b = (lastgood.Checkpointer(tmp_path / name, {"sampler": again}) for name in "ab")
    with a, b:
        b.save(a.restore().step)
    assert place(again) == (0, 3)


def test_ranks_that_receive_batches_from_another_rank_count_them(caplog) -> None:
    """With tensor and pipeline parallelism, one rank reads the batches and distributes them."""
    sampler = make()
    for n in (1, 2, 3):
        count_step([sampler], n, n - 1, rank=1, ranks=2, first=n == 1)
    assert place(sampler) == (0, 3) and not caplog.text


# ---- samplers of several ranks --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "missing"),
    [
        ([(2, 0), (2, 0)], "1"),
        ([(4, 0), (4, 1), (4, 1), (4, 1)], "2, 3"),
        ([(2, 0), (2, 0), (2, 1), (2, 1)], ""),  # two tensor-parallel groups
        ([(1, 0), (1, 0)], ""),  # one of them, or datasets that differ from rank to rank
        ([(2, 0), (1, 0)], ""),
        ([(4, 0), (4, 1)], ""),
        ([(2, 0), None], ""),  # the other rank keeps its sampler elsewhere
    ],
)
def test_a_part_of_the_windows_that_no_rank_has_is_reported(ranks, missing: str, caplog) -> None:
    """Samplers that were made with the same `rank=` on all ranks trained the same samples, without a report."""
    report_missing_parts([{} if one is None else {"sampler": one} for one in ranks])
    assert (f"none of them has rank={missing}:" in caplog.text) == bool(missing) == bool(caplog.text)


def texts_at_restore(rank: int, ranks: int, root: Path) -> list[str]:
    with reports(logging.WARNING) as texts, lastgood.Checkpointer(root, {"sampler": make(world_size=ranks)}) as ckpt:
        ckpt.restore()
    return [one for one in texts if "ResumableSampler" in one]


@pytest.mark.slow
def test_rank_0_reports_the_missing_part_at_the_restore(tmp_path: Path) -> None:
    (one,), others = world(2, texts_at_restore, tmp_path)
    assert one.startswith("sampler: all ranks have a ResumableSampler with world_size=2") and not others


# ---- where in the state the sampler is ------------------------------------------------------------------------------


@dataclass
class Training:
    sampler: object


@pytest.mark.parametrize("container", [Training, lambda one: deque([one])])
def test_a_sampler_in_a_dataclass_or_deque_is_counted(tmp_path: Path, container) -> None:
    """A save stored such a sampler, but no step counted on it: each resume began the epoch again, without a report."""
    sampler, again = make(), make()
    with lastgood.Checkpointer(tmp_path, {"train": container(sampler)}) as ckpt:
        for n, _ in zip((1, 2, 3), sampler.loader(DATA), strict=False):
            ckpt.step(n)
        ckpt.save(3)
    with lastgood.Checkpointer(tmp_path, {"train": container(again)}) as ckpt:
        ckpt.restore()
        assert place(again) == (0, 3)


class Trainer:
    """An object of the user's own, whose state has that of its sampler."""

    def __init__(self, counts: bool) -> None:
        self.sampler, self.counts = make(), counts

    def state_dict(self) -> dict[str, object]:
        return {"sampler": self.sampler.state_dict()}

    def load_state_dict(self, state: dict[str, dict[str, object]]) -> None:
        self.sampler.load_state_dict(state["sampler"])

    def train(self, ckpt: lastgood.Checkpointer, steps: int) -> None:
        for n, _ in zip(range(1, steps + 1), self.sampler.loader(DATA), strict=False):
            if self.counts:
                self.sampler.consumed()
            ckpt.step(n)


@pytest.mark.parametrize("where", ["inside", "inside, and counted there", "beside it"])
def test_a_sampler_inside_of_an_object_is_reported_if_nothing_counts_it(tmp_path: Path, where: str, caplog) -> None:
    """Nothing counted steps on a sampler whose state only an object's own `state_dict()` returned: each resume began
    the epoch again, without a report."""
    trainer = Trainer(counts=where == "inside, and counted there")
    beside = {"sampler": trainer.sampler} if where == "beside it" else {}
    with lastgood.Checkpointer(tmp_path, {"trainer": trainer, **beside}) as ckpt:
        trainer.train(ckpt, 3)
    reported = "step 1: trainer.sampler is a ResumableSampler that an object of the state holds" in caplog.text
    assert reported == (where == "inside") == (place(trainer.sampler) == (0, 0))


def test_a_step_calls_nothing_for_each_number_of_a_list(tmp_path: Path) -> None:
    """Each step looked for samplers in every number of a list: 1.4 s a step beside a history of a million losses."""
    calls = list[str]()
    history = [0.5] * 10_000
    with lastgood.Checkpointer(tmp_path, {"history": {"loss": history}}, save_on_exit=False) as ckpt:
        ckpt.step(1)
        sys.setprofile(lambda frame, event, _: calls.append(event))
        try:
            ckpt.step(2)
        finally:
            sys.setprofile(None)
    assert 0 < calls.count("call") < len(history)


@pytest.mark.parametrize("held", [False, True])
def test_only_the_first_step_looks_for_samplers_in_long_lists(tmp_path: Path, held: bool) -> None:
    """Each step entered every record of a history: 54 ms a step beside 20,000 dicts, when no save was due."""
    calls, sampler = list[str](), make()
    history: list[object] = [{"loss": 0.5, "of": []} for _ in range(2000)]
    state = {"w": torch.ones(1), "sampler": sampler, "history": history}
    if held:
        history.append(state.pop("sampler"))
    with lastgood.Checkpointer(tmp_path, state, save_on_exit=False) as ckpt:
        for n, _ in enumerate(sampler.loader(DATA), 1):
            sys.setprofile((lambda frame, event, _: calls.append(event)) if n == 2 else None)
            try:
                ckpt.step(n)
            finally:
                sys.setprofile(None)
    assert (calls.count("call") > len(history)) == held and place(sampler) == (1, 0)


# ---- what is done once an epoch -------------------------------------------------------------------------------------


def test_the_last_batch_of_an_epoch_is_known_before_its_step(tmp_path: Path) -> None:
    """A save at the last step of an epoch resumed in the next one, and did not run what the loop did after its `for`: a
    scheduler that steps once an epoch stayed behind."""
    ends = list[int]()
    for total in (4, 10, 25):  # two resumes: in the middle of an epoch, and at its end
        sampler, epochs = make(), [0]
        loader = sampler.loader(DATA)
        assert not loader.completes_epoch
        sampler.skip(1, 9, 1)
        with lastgood.Checkpointer(tmp_path, {"sampler": sampler, "epochs": epochs}) as ckpt:
            n = ckpt.restore().step
            while n < total:
                for _ in loader:
                    n += 1
                    if loader.completes_epoch:
                        epochs[0] += 1
                        ends.append(n)
                    ckpt.step(n)
                    if n == total:
                        break
    assert ends == [10, 19] and epochs == [2]


class Accumulating:
    """A training in which each step has the gradients of four batches; an epoch has ten.

    `discards`: whether an epoch that ends in the middle of a step drops the gradients of that step. Else the next epoch
    completes it.
    """

    def __init__(self, root: Path, discards: bool) -> None:
        self.root, self.discards = root, discards
        self.weights, self.sampler = torch.zeros(40), make()

    def run(self, epochs: int) -> None:
        """Train until so many epochs are over; leaving the `with` saves."""
        state = {"weights": self.weights, "sampler": self.sampler}
        gradient, batches = torch.zeros(40), 0
        with lastgood.Checkpointer(self.root, state, cadence=lastgood.Every(steps=100)) as ckpt:
            n = ckpt.restore().step
            while self.sampler.position[0] < epochs:
                for ids in self.sampler.loader(DATA):
                    gradient[ids] += 1 + n
                    batches += 1
                    if batches % 4 == 0:
                        n += 1
                        self.weights += gradient
                        gradient.zero_()
                        ckpt.step(n)
                if self.discards:
                    gradient.zero_()
                    batches = 0


@pytest.mark.parametrize("discards", [False, True])
def test_batches_without_a_step_at_an_epochs_end_come_again(tmp_path: Path, discards: bool) -> None:
    """An epoch ended in the middle of gradient accumulation, and counted as trained: a resume from a save at its end
    left its last batches out, although no step had trained them."""
    one = Accumulating(tmp_path / "one", discards)
    one.run(3)
    for epochs in (1, 2, 3):
        other = Accumulating(tmp_path / "other", discards)
        other.run(epochs)
    assert torch.equal(one.weights, other.weights) and place(one.sampler) == place(other.sampler)


def test_a_sampler_beside_a_growing_history_is_counted_to_the_end(tmp_path: Path, monkeypatch) -> None:
    """Each step looks into short dicts only. Once the dict with the sampler had more entries than that, the sampler was
    counted no more, without a word, and a resume trained the same batches again."""
    monkeypatch.setattr("lastgood.loop.progress.ENTRIES_SEARCHED", 10)
    loop: dict[str, object] = {"sampler": (sampler := make())}
    with lastgood.Checkpointer(tmp_path / "run", {"w": torch.zeros(1), "loop": loop}) as ckpt:
        ckpt.restore()
        for n in range(1, 21):
            loop[f"loss{n}"] = 1.0
            ckpt.step(n)
        assert place(sampler) == (2, 0)


def test_a_default_device_of_torch_leaves_the_order_alone() -> None:
    """With torch.set_default_device("cuda") the first batch raised an error about the generator of the loader."""
    expected = next(iter(make().loader(DATA)))
    torch.set_default_device("meta")
    try:
        found = next(iter(make().loader(DATA)))
    finally:
        torch.set_default_device(None)
    assert torch.equal(found, expected)

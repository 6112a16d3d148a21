"""The sampler between sessions: the states that it continues, and the batches that a step has counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import lastgood
from harness import place
from lastgood import Audit, ResumableSampler
from lastgood.errors import Refused, StateMismatch


def make(size: int = 40, batch: int = 4, **options) -> ResumableSampler:
    return ResumableSampler(size, batch, **{"seed": 7, **options})


def own_loader(sampler: ResumableSampler, num_workers: int = 0) -> DataLoader:
    """A DataLoader as a user constructs it. A sample is its id."""
    return DataLoader(range(sampler.dataset_size), batch_sampler=sampler, num_workers=num_workers)


def scheduled(batches: int) -> list[list[int]]:
    """The first batches of a run without interruption."""
    sampler = make()
    return [ids for epoch in range(batches // 10 + 1) for ids in sampler.order(epoch).tolist()][:batches]


def counted(steps: int, options: dict, **changes) -> tuple[ResumableSampler, ResumableSampler]:
    """A sampler after this number of steps, and a new one made with the changed arguments."""
    sampler = make(**options)
    sampler.advance_to(steps)
    return sampler, make(**{**options, **changes})


# ---- arguments that a state must agree with --------------------------------------------------------------------

CHANGES = [{"batch": 8}, {"size": 50}, {"shuffle": False}, {"seed": 8}]
NAMES = {"batch": "global_batch", "size": "dataset_size"}


@pytest.mark.parametrize("change", CHANGES)
def test_another_order_in_mid_epoch_is_refused_before_anything_is_loaded(tmp_path: Path, change: dict) -> None:
    """A change of the batch size from 4 to 8 was accepted without a report: 200 of 800 samples were never trained."""
    (name,) = change
    sampler = make()
    with lastgood.Checkpointer(tmp_path, {"w": torch.ones(3), "sampler": sampler}) as ckpt:
        for n, _ in zip((1, 2, 3), own_loader(sampler), strict=False):
            ckpt.save(n)
    state = {"w": torch.zeros(3), "sampler": make(**change)}
    with pytest.raises(StateMismatch, match=rf"sampler: .*{NAMES.get(name, name)} \w+ in the state, \w+ here"):
        lastgood.load(tmp_path, state)
    assert not state["w"].any() and place(state["sampler"]) == (0, 0)
    same = {"w": torch.zeros(3), "sampler": make()}
    assert lastgood.load(tmp_path, same).step == 3 and place(same["sampler"]) == (0, 3)


@pytest.mark.parametrize("change", CHANGES[:3])
def test_another_order_may_begin_where_an_epoch_begins(change: dict) -> None:
    """A refusal there too would leave no way to resume a run whose data has grown, or whose batch size grows between
    two epochs."""
    saved, again = counted(20, {}, **change)
    audit = Audit()
    for epoch in (0, 1):
        for step, ids in enumerate(saved.order(epoch)):
            audit.observe(epoch, step, ids)
    again.load_state_dict(saved.state_dict())
    assert place(again) == (2, 0) and again.order(0).tolist() == saved.order(0).tolist()
    for ids in again:
        audit.observe(*again.position, ids)
        again.consumed()
    assert audit.report(again).exact
    later = make(**change)  # the states that follow contain the change as well
    later.load_state_dict(again.state_dict())
    assert audit.report(later).exact and place(later) == (3, 0)


def test_another_seed_is_refused_where_an_epoch_begins_too() -> None:
    """The seed is changed only by mistake, and whether the mistake shows would depend on the step of the save."""
    saved, again = counted(20, {}, seed=8)
    with pytest.raises(Refused, match="seed 7 in the state, 8 here"):
        again.load_state_dict(saved.state_dict())
    assert place(again) == (0, 0)


def test_a_state_of_an_earlier_version_continues_and_its_seed_is_checked() -> None:
    old = {"epoch": 1, "cursor_step": 3, "seed": 7}
    sampler = make()
    sampler.load_state_dict(old)
    assert place(sampler) == (1, 3)
    with pytest.raises(Refused, match="seed 7 in the state, 8 here"):
        make(seed=8).load_state_dict(old)
    sampler.advance_to(14)  # the state does not contain the step number: the next step counts as one
    assert place(sampler) == (1, 4)


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"global_batch": 0}, "malformed"),
        ({"shuffle": 1}, "malformed"),
        ({"dataset_size": "40"}, "dataset_size of the sampler's state is '40'"),
        ({"step": -1}, "step of the sampler's state is -1"),
        ({"earlier": [[1, 40, 80, True]]}, "malformed"),
        ({"earlier": [[1, 40]]}, "malformed"),
    ],
)
def test_a_sampler_state_of_unknown_form_is_refused(change: dict, shown: str) -> None:
    sampler = make()
    with pytest.raises(Refused, match=shown):
        sampler.load_state_dict({**make().state_dict(), **change})
    assert place(sampler) == (0, 0)


# ---- the batches that a step counts ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_steps_that_are_reported_every_fifth_time_count_five_batches(tmp_path: Path, num_workers: int) -> None:
    """With a user's own DataLoader, ckpt.step(5) and step(10) left the cursor at 2 after ten batches."""
    sampler = make(80)
    seen = []
    with lastgood.Checkpointer(tmp_path, {"sampler": sampler}) as ckpt:
        for n, batch in enumerate(own_loader(sampler, num_workers), 1):
            seen.append(batch.tolist())
            if n in (5, 10):
                ckpt.step(n)
                assert place(sampler) == (0, n)
            if n == 10:
                ckpt.save(n)
                break
    again = make(80)
    with lastgood.Checkpointer(tmp_path, {"sampler": again}) as ckpt:
        assert ckpt.restore().step == 10
        for n, batch in enumerate(own_loader(again, num_workers), 11):
            seen.append(batch.tolist())
            if n in (15, 20):
                ckpt.step(n)
    assert place(again) == (1, 0)
    assert seen == make(80).order(0).tolist()


def test_two_checkpointers_on_one_sampler_count_each_step_once(tmp_path: Path) -> None:
    """Of two checkpointers, one to a directory and one to slots, each advanced the cursor, which moved twice as fast
    as the training."""
    sampler = make()
    state = {"sampler": sampler}
    disk, slots = (lastgood.Checkpointer(path, state) for path in (tmp_path / "disk", f"slots://{tmp_path}/slots"))
    with disk, slots:
        for n, _ in enumerate(own_loader(sampler), 1):
            disk.step(n)
            slots.step(n)
            assert place(sampler) == divmod(n, 10)
            if n == 4:
                disk.save(n).result()
        slots.restore()  # the slots hold no generation; the restore that finds one comes last
        disk.restore()
        assert place(sampler) == (0, 4)
        for n, _ in enumerate(own_loader(sampler), 5):
            slots.step(n)
            disk.step(n)
            assert place(sampler) == divmod(n, 10)


def test_a_second_empty_run_does_not_renumber_the_steps_of_the_first(tmp_path: Path) -> None:
    """Its restore() found no generation and set the step number to 0: the next step of the first run counted eleven
    batches."""
    sampler = make()
    first, second = (lastgood.Checkpointer(tmp_path / name, {"sampler": sampler}) for name in ("first", "second"))
    with first, second:
        batches = iter(sampler.loader(list(range(sampler.dataset_size)), num_workers=0))
        for n in (1, 2, 3):
            next(batches)
            first.step(n)
        second.restore()
        next(batches)
        first.step(4)
        assert place(sampler) == (0, 4)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_token_counts_are_refused_where_steps_select_batches(num_workers: int) -> None:
    """`step(n)` with n += 4097 does not determine how many batches a user's DataLoader has yielded."""
    sampler = make()
    batches = iter(own_loader(sampler, num_workers))
    next(batches)
    with pytest.raises(Refused, match="4097 optimizer steps were completed since"):
        sampler.advance_to(4097)
    assert place(sampler) == (0, 0)
    sampler.advance_to(1)
    assert place(sampler) == (0, 1)


def test_token_counts_are_accepted_with_the_loader_of_the_sampler() -> None:
    sampler = make()
    for count, _ in enumerate(sampler.loader(range(40)), 1):
        sampler.advance_to(4097 * count)
        assert place(sampler) == divmod(count, 10)


@settings(max_examples=60, deadline=None)
@given(size=st.integers(4, 24), reports=st.sets(st.integers(1, 30)))
def test_a_report_counts_exactly_the_trained_batches_or_is_refused(size: int, reports: set[int]) -> None:
    """This holds for any reported steps of a loop over many epochs. A loop that began an epoch before it had
    reported the last steps of the previous one received those batches again without a report."""
    sampler = make(size, 4)
    loader, trained = own_loader(sampler), list[list[int]]()
    while len(trained) < 30:
        for batch in loader:
            trained.append(batch.tolist())
            if len(trained) in reports:
                try:
                    sampler.advance_to(len(trained))
                except Refused:
                    return
                epoch, cursor = place(sampler)
                order = [ids for one in range(epoch + 1) for ids in sampler.order(one).tolist()]
                assert trained == order[: epoch * (size // 4) + cursor]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_fetched_but_untrained_batch_is_not_counted(num_workers: int) -> None:
    sampler = make()
    next(iter(own_loader(sampler, num_workers)))
    seen = []
    for n, batch in enumerate(own_loader(sampler, num_workers), 1):
        seen.append(batch.tolist())
        sampler.advance_to(n)
    assert seen == scheduled(10) and place(sampler) == (1, 0)


def test_steps_across_two_iterations_are_refused_where_workers_fetch_ahead() -> None:
    """A loop that leaves its iteration early receives the batches that were not counted a second time."""
    sampler = make()
    loader = DataLoader(range(40), batch_sampler=sampler, num_workers=1, prefetch_factor=8)
    for trained in (3, 2):
        for _, _ in zip(range(trained), loader, strict=False):
            pass
    with pytest.raises(Refused, match="5 optimizer steps"):
        sampler.advance_to(5)
    assert place(sampler) == (0, 0)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("steps", "repeated"), [([4, 8], 8), ([*range(1, 11)], 0), ([], 0)])
def test_batches_that_come_again_in_the_next_epoch_are_reported(num_workers, steps, repeated, caplog) -> None:
    """With gradient accumulation and a DataLoader of the user's own, each epoch yielded the last batches of the one
    before again, without a report. A loop with a step for each batch, and an evaluation, are not reported."""
    sampler = make()
    for n, _ in enumerate(own_loader(sampler, num_workers), 1):
        if n in steps:
            sampler.consumed()
    assert len(list(own_loader(sampler, num_workers))) == (repeated or 10)
    assert (f"{repeated} of them belong to no step" in caplog.text) == bool(repeated)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loop_that_is_left_before_its_end_is_not_reported(num_workers: int, caplog) -> None:
    """A loop over a part of an epoch, with a step for each batch, got a warning that batches come again, because its
    workers had fetched them. It had not received them."""
    sampler = make()
    for n, _ in enumerate(own_loader(sampler, num_workers), 1):
        sampler.consumed()
        if n == 8:
            break
    assert len(list(own_loader(sampler, num_workers))) == 2 and not caplog.text


def test_a_counted_step_excludes_batches_fetched_after_it() -> None:
    """A second Checkpointer reports the step when the loop already holds the next batch."""
    sampler = make()
    batches = iter(sampler.loader(range(40)))
    next(batches)
    sampler.advance_to(1)
    next(batches)
    sampler.advance_to(1)
    assert place(sampler) == (0, 1)


# ---- frameworks ------------------------------------------------------------------------------------------------


def one_ahead(loader):
    """(batch, whether it is the last one), fetched one batch ahead as Accelerate, Transformers and Lightning do."""
    batches = iter(loader)
    batch = next(batches)
    for following in batches:
        yield batch, False
        batch = following
    yield batch, True


def framework_loop(sampler: ResumableSampler, first: int, last: int) -> list[list[int]]:
    """Steps `first` to `last`, each of `batches_per_step` batches, with a step at the end of each epoch. Returns the
    batches that each step was trained with, without those whose step was not made."""
    loader, trained, n = sampler.loader(range(sampler.dataset_size)), list[list[int]](), first
    while True:
        gathered = list[list[int]]()
        for batch, ends in one_ahead(loader):
            gathered.append(batch.tolist())
            if ends or len(gathered) == sampler.batches_per_step:
                sampler.advance_to(n)
                trained += gathered
                gathered, n = [], n + 1
                if n > last:
                    return trained


@pytest.mark.parametrize("batches_per_step", [1, 3, 4, 12])
@pytest.mark.parametrize("stop", [1, 2, 5])
def test_batches_prefetched_by_a_framework_are_not_counted(stop: int, batches_per_step: int) -> None:
    """Four samples had been trained and eight fetched, and the cursor was at eight; with accumulation, it was at 12
    in place of 8."""
    sampler = make(batches_per_step=batches_per_step)
    first = framework_loop(sampler, 1, stop)
    assert len(first) == place(sampler)[0] * 10 + place(sampler)[1]
    again = make(batches_per_step=batches_per_step)
    again.load_state_dict(sampler.state_dict())
    both = first + framework_loop(again, stop + 1, stop + 8)
    assert both == scheduled(len(both))


def test_an_epoch_that_ends_with_uncounted_batches_is_reported() -> None:
    """When Lightning resumed without its own progress, it made no step for the last batch of an epoch, and received
    it again in every epoch that followed."""
    sampler = make(batches_per_step=3)
    loader = sampler.loader(range(40))
    for count, _ in enumerate(loader, 1):
        if count % 3 == 0:
            sampler.advance_to(count // 3)
    with pytest.raises(Refused, match="epoch 0 has ended, and 1 of its batches belong to no step"):
        iter(loader)
    sampler.advance_to(4)
    assert len(list(loader)) == 10 and place(sampler) == (1, 0)


@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize("fetch", [one_ahead, lambda loader: ((batch, False) for batch in loader)])
def test_a_loader_that_counts_batches_reports_prefetching(each: int, fetch, caplog) -> None:
    """Without `batches_per_step` the cursor is then one batch ahead, and a resume skips that batch."""
    sampler = make()
    loader, batches = sampler.loader(range(40)), 0
    for _ in range(3):  # epochs
        for _ in fetch(loader):
            batches += 1
            if batches % each == 0:
                sampler.advance_to(batches // each)
    assert ("give the sampler batches_per_step" in caplog.text) == (fetch is one_ahead)


def test_a_shorter_last_step_of_an_epoch_is_not_taken_for_prefetching(caplog) -> None:
    """A resume with three batches left of the epoch, with two batches for each step and a step at its end, was reported
    as one that fetches ahead."""
    sampler = make()
    sampler.advance_to(7)
    loader = sampler.loader(range(40))
    for count, _ in enumerate(loader, 1):
        if count == 2 or loader.completes_epoch:
            sampler.advance_to(7 + count)
    assert place(sampler) == (1, 0) and not caplog.text


def test_step_numbers_start_over_after_a_restore_that_found_nothing(tmp_path: Path) -> None:
    """A sampler may be used again for the next run of a sweep: its cursor must not wait until n reaches the earlier
    run's step."""
    sampler = make()
    for run in ("first", "second"):
        with lastgood.Checkpointer(tmp_path / run, {"sampler": sampler}) as ckpt:
            assert ckpt.restore().step == 0
            for n, _ in enumerate(own_loader(sampler), 1):
                if n in (5, 10):
                    ckpt.step(n)
    assert place(sampler) == (2, 0)


def test_the_length_of_a_resumed_loader_is_that_of_an_epoch() -> None:
    """Lightning used the five remaining batches as the length of every epoch, and ended at step 10 of 20."""
    saved, sampler = counted(15, {})
    loader = sampler.loader(range(40))
    sampler.load_state_dict(saved.state_dict())
    assert (len(loader), len(own_loader(sampler)), len(sampler)) == (10, 10, 10)
    assert loader.remaining == sampler.remaining == 5 == len(list(loader))
    assert (len(loader), loader.remaining) == (10, 10)


def test_an_iterator_older_than_the_restore_raises_with_the_remedy() -> None:
    saved, sampler = counted(5, {})
    batches = iter(sampler.loader(range(40)))
    sampler.load_state_dict(saved.state_dict())
    with pytest.raises(
        Refused, match=r"a state was loaded into the sampler.*Restore before the loop makes its iterator"
    ):
        next(batches)
    assert place(sampler) == (0, 5)

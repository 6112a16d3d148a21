"""The promises of the resumable order, its loader and the exactly-once audit."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from harness import place
from lastgood.data.audit import Audit
from lastgood.data.sampler import ResumableSampler
from lastgood.errors import Refused


class Plain(Dataset):
    """A sample is its id, and one draw of each global generator, as an augmentation would draw."""

    def __init__(self, size: int) -> None:
        self.size, self.offset = size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> tuple[int, torch.Tensor]:
        draws = [random.random(), float(np.random.random()), float(torch.rand((), dtype=torch.float64))]
        return i + self.offset, torch.tensor(draws, dtype=torch.float64)


class Batched(Plain):
    """The same samples, fetched as Hugging Face datasets fetch them: several ids in one call."""

    __getitem__ = None

    def __getitems__(self, ids: list[int]) -> list[tuple[int, torch.Tensor]]:
        return [Plain.__getitem__(self, i) for i in ids]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class StopsEarly(Plain):
    def __getitem__(self, i: int) -> tuple[int, torch.Tensor]:
        if i == 7:
            raise StopIteration
        return super().__getitem__(i)


def offset_by_worker_seed(worker_id: int) -> None:
    """A worker_init_fn as in torch's documentation: it changes the worker's copy of the dataset."""
    get_worker_info().dataset.offset = get_worker_info().seed % 2**40


def masking_collate(samples: list) -> list:
    """A collate_fn that draws random numbers, as masked-language-model collators do."""
    return [*default_collate(samples), torch.rand(len(samples))]


def make(size: int = 40, batch: int = 4, seed: int = 7, **world) -> ResumableSampler:
    return ResumableSampler(size, batch, seed, **world)


def resumed(sampler: ResumableSampler, **world) -> ResumableSampler:
    """The sampler of a new process: constructed with the same arguments, with the saved state loaded."""
    saved = sampler.state_dict()
    again = ResumableSampler(sampler.dataset_size, sampler.global_batch, saved["seed"], **world)
    again.load_state_dict(saved)
    return again


def ids_of(batches) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


def train(sampler: ResumableSampler, steps: int, loader) -> list:
    """Train one batch per step over as many epochs as needed, and report the steps as a Checkpointer does."""
    batches = []
    while True:
        for batch in loader:
            batches.append(batch)
            sampler.consumed()
            if len(batches) == steps:
                return batches


def windows(sampler: ResumableSampler, steps: int) -> list[list[int]]:
    """The rank's parts of the next windows, read without a loader."""
    return train(sampler, steps, sampler)


def same(left: list, right: list) -> bool:
    return len(left) == len(right) and all(
        all(torch.equal(a, b) for a, b in zip(one, two, strict=True)) for one, two in zip(left, right, strict=True)
    )


worlds = st.sampled_from([1, 2, 3, 4, 6, 12])


# ---- the order -------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(size=st.integers(12, 80), share=st.integers(1, 2), world=worlds, seed=st.integers(0, 2**63 - 1))
def test_every_scheduled_sample_comes_exactly_once_an_epoch(size, share, world, seed):
    batch = share * world
    if size < batch:
        size += batch
    ranks = [ResumableSampler(size, batch, seed, rank, world) for rank in range(world)]
    steps = size // batch
    for _ in range(2):
        assert all(len(rank) == steps for rank in ranks)
        seen = [i for rank in ranks for ids in windows(rank, steps) for i in ids]
        assert len(seen) == len(set(seen)) == steps * batch
        assert set(seen) <= set(range(size))
    assert all(place(rank) == (2, 0) for rank in ranks)


@settings(max_examples=60, deadline=None)
@given(size=st.integers(12, 100), before=worlds, after=worlds, stop=st.integers(0, 20))
def test_a_new_world_size_in_mid_epoch_keeps_every_scheduled_window(size, before, after, stop):
    old = [ResumableSampler(size, 12, 5, rank, before) for rank in range(before)]
    first = [windows(rank, stop) for rank in old] if stop else [[] for _ in old]
    new = [resumed(old[0], rank=rank, world_size=after) for rank in range(after)]
    second = [windows(rank, 20) for rank in new]

    alone = ResumableSampler(size, 12, 5)
    joined = [[i for ids in shares for i in ids] for part in (first, second) for shares in zip(*part, strict=True)]
    assert joined == windows(alone, stop + 20)


def test_the_order_depends_on_seed_and_epoch_only():
    reference = make().order(3)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    walked = make(rank=1, world_size=2)
    windows(walked, 3 * walked.steps_per_epoch)
    assert np.array_equal(walked.order(3), reference)
    assert not np.array_equal(make(seed=8).order(3), reference)
    assert not np.array_equal(make().order(4), reference)
    # the generator is seeded with the pair (seed, epoch) and not with their sum
    assert not np.array_equal(make(seed=8).order(2), reference)


def test_the_order_of_a_seed_never_changes_between_releases():
    order = make(10, 5, 3).order(1)
    assert order.tolist() == [[2, 4, 0, 5, 8], [1, 3, 9, 7, 6]]
    with pytest.raises(ValueError, match="read-only"):
        order[0, 0] = 3  # nor can a caller change it


def test_without_shuffle_samples_keep_the_dataset_order():
    sampler = make(10, 3, shuffle=False)
    assert windows(sampler, 4) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 1, 2]]


# ---- resume ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [1, 6, 10, 13])
def test_prefetching_workers_resume_without_loss_or_repetition(stop):
    workers = {"num_workers": 2, "prefetch_factor": 4}
    sampler = make()
    first = ids_of(train(sampler, stop, sampler.loader(Plain(40), **workers)))
    assert place(sampler) == divmod(stop, 10)
    again = resumed(sampler)
    second = ids_of(train(again, 20 - stop, again.loader(Plain(40), **workers)))
    assert first + second == windows(make(), 20)


def test_gradient_accumulation_counts_every_batch_that_was_handed_out():
    sampler, seen = make(), []
    loader = sampler.loader(Plain(40))
    for count, batch in enumerate(loader, 1):
        seen.append(batch[0].tolist())
        assert sampler.position == (0, count - 1)
        if count % 3 == 0:
            sampler.consumed()
            assert sampler.position == (0, count)
        else:
            assert sampler.state_dict()["cursor_step"] == count // 3 * 3
        if count == 8:  # killed with two batches whose gradients had not reached a weight
            break
    again = resumed(sampler)
    assert again.remaining == 4
    assert seen[:6] + ids_of(again.loader(Plain(40))) == windows(make(), 10)


def test_accumulated_steps_may_span_epochs():
    sampler, taken, states = make(), [], []
    loader = sampler.loader(Plain(40))
    for _ in range(2):
        for batch in loader:
            taken.append(batch[0].tolist())
            if len(taken) % 4 == 0:
                sampler.consumed()
                states.append(place(sampler))
    assert states == [(0, 4), (0, 8), (1, 2), (1, 6), (2, 0)]
    assert taken == windows(make(), 20)


def test_a_loop_that_reports_no_step_still_walks_through_the_epochs():
    sampler = make()
    loader = sampler.loader(Plain(40))
    assert ids_of(loader) + ids_of(loader) == windows(make(), 20)
    assert sampler.state_dict()["epoch"] == 2


def test_an_epochs_last_step_may_be_reported_before_or_after_its_loop():
    sampler = make()
    train(sampler, 10, loader := sampler.loader(Plain(40)))
    assert place(sampler) == (1, 0)
    list(loader)
    sampler.consumed()  # the optimizer step for batches left over from accumulation
    sampler.consumed()
    assert place(sampler) == (2, 0)


def test_a_loop_left_by_break_starts_again_at_the_cursor():
    sampler = make()
    loader = sampler.loader(Plain(40), num_workers=2, persistent_workers=True)
    for count, _ in enumerate(loader):
        if count == 4:  # two batches were returned whose step was not made
            break
        if count < 3:
            sampler.consumed()
    assert (len(loader), loader.remaining) == (10, 7)
    anew = iter(loader)
    assert sampler.position == (0, 3)
    assert ids_of(anew) == windows(make(), 10)[3:]
    assert (len(loader), loader.remaining) == (10, 10)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_user_dataloader_advances_one_window_per_step(num_workers):
    sampler = make()
    first = ids_of(train(sampler, 6, DataLoader(Plain(40), batch_sampler=sampler, num_workers=num_workers)))
    assert place(sampler) == (0, 6)
    assert sampler.position == (0, 6)
    again = resumed(sampler)
    loader = DataLoader(Plain(40), batch_sampler=again, num_workers=num_workers)
    assert (len(loader), again.remaining) == (10, 4)
    assert first + ids_of(train(again, 14, loader)) == windows(make(), 20)


# ---- iterations that have ended ---------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "persistent_workers": True}])
def test_an_iterator_older_than_a_load_raises_and_moves_nothing(options):
    sampler = make()
    loader = sampler.loader(Plain(40), **options)
    old = iter(loader)
    next(old), next(old)
    sampler.load_state_dict({"epoch": 4, "cursor_step": 8, "seed": 7})
    sampler.consumed()
    assert sampler.position == (4, 8)
    new = iter(loader)
    with pytest.raises(Refused, match="is over"):
        next(old)
    assert ids_of(new) == make().order(4)[8:].tolist()
    assert sampler.position == (5, 0)
    sampler.load_state_dict({"epoch": 4, "cursor_step": 8, "seed": 7})
    not_begun = iter(loader)
    sampler.load_state_dict({"epoch": 4, "cursor_step": 8, "seed": 7})
    with pytest.raises(Refused, match="is over"):
        next(not_begun)


def test_a_user_dataloader_older_than_a_load_raises_and_moves_nothing():
    sampler = make()
    old = iter(DataLoader(Plain(40), batch_sampler=sampler))
    next(old)
    sampler.load_state_dict({"epoch": 4, "cursor_step": 8, "seed": 7})
    sampler.consumed()
    assert sampler.position == (4, 8)
    with pytest.raises(Refused, match="is over"):
        next(old)


def test_a_second_iteration_ends_the_first_one():
    """Peeking at a batch inside the loop is a second iteration: if both counted, each would count half of the
    batches."""
    sampler = make()
    loader = sampler.loader(Plain(40))
    first = iter(loader)
    next(first), sampler.consumed()
    next(iter(loader))
    with pytest.raises(Refused, match="is over"):
        next(first)
    assert sampler.state_dict()["cursor_step"] == 1


def test_an_epoch_shortened_by_the_dataset_is_an_error():
    """A StopIteration raised in `__getitem__` ends a plain DataLoader as if the epoch were over: samples are lost
    without a report."""
    sampler = make(shuffle=False)
    loader = sampler.loader(StopsEarly(40))
    with pytest.raises(Refused, match="step 1 of epoch 0: a StopIteration"):
        for _ in loader:
            sampler.consumed()
    assert sampler.state_dict()["cursor_step"] == 1


# ---- randomness -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", [Plain, Batched])
def test_augmentation_is_equal_for_any_worker_count_and_after_a_resume(dataset):
    def batches(sampler, steps, **options):
        random.seed(), np.random.seed(), torch.seed()  # the state of the loop's own generators must not matter
        return train(sampler, steps, sampler.loader(dataset(40), collate_fn=masking_collate, **options))

    whole = batches(make(), 20)
    workers = {"num_workers": 2, "persistent_workers": True}
    assert same(batches(make(), 20, **workers), whole)
    stopped = make()
    first = batches(stopped, 13, **workers)
    assert same(first + batches(resumed(stopped), 7), whole)

    both = whole + batches(make(seed=8), 20)
    draws = torch.cat([torch.cat([batch[1].flatten(), batch[2].double()]) for batch in both])
    assert len(draws.unique()) == len(draws)  # samples, epochs, seeds and generators all draw different numbers


def test_augmentation_of_a_sample_is_equal_in_any_world_size():
    def drawn(world):
        ranks = [make(rank=rank, world_size=world) for rank in range(world)]
        batches = [batch for rank in ranks for batch in train(rank, 10, rank.loader(Plain(40)))]
        return {i: draws for ids, rows in batches for i, draws in zip(ids.tolist(), rows.tolist(), strict=True)}

    assert drawn(1) == drawn(4)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_sampler_never_draws_from_the_global_generators(num_workers):
    """`iter(DataLoader)` draws a base seed from torch's global RNG once per epoch. After a stop in mid-epoch there
    is one iteration more than without it, so dropout differed from there on, although every state was restored bit
    for bit."""

    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2:], torch.get_rng_state()

    sampler = make()
    loader = sampler.loader(Plain(40), num_workers=num_workers, collate_fn=masking_collate)
    *before, cpu_before = states()
    train(sampler, 12, loader)
    *after, cpu_after = states()
    assert before == after
    assert torch.equal(cpu_before, cpu_after)


def test_a_failing_dataset_leaves_the_global_generators_unchanged():
    sampler = make(shuffle=False)
    before = torch.get_rng_state()
    with pytest.raises(Refused):
        list(sampler.loader(StopsEarly(40)))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_with_dropout_continues_bit_for_bit_in_mid_epoch():
    def run(sampler, weight, steps):
        losses = []
        for batch in train_with(sampler, steps):
            loss = torch.nn.functional.dropout(batch[1].float() @ weight, 0.5).square().sum()
            losses.append(loss.item())
            weight = weight - 0.01 * torch.autograd.grad(loss, weight)[0]
            weight = weight.detach().requires_grad_()
            sampler.consumed()
        return losses, weight

    def train_with(sampler, steps):
        loader, given = sampler.loader(Plain(40)), 0
        while given < steps:
            for batch in loader:
                yield batch
                given += 1
                if given == steps:
                    return

    start = torch.ones(3, requires_grad=True)
    torch.manual_seed(0)
    straight, _ = run(make(), start, 25)
    torch.manual_seed(0)
    stopped = make()
    first, weight = run(stopped, start, 14)
    dice = torch.get_rng_state()
    torch.manual_seed(12345)
    again = resumed(stopped)
    torch.set_rng_state(dice)
    assert first + run(again, weight, 11)[0] == straight


def test_worker_init_fn_gets_the_dataset_and_the_same_seed_after_a_resume():
    workers = {"num_workers": 1, "worker_init_fn": offset_by_worker_seed}
    whole, stopped = make(shuffle=False), make(shuffle=False)
    batches = ids_of(whole.loader(Plain(40), **workers))
    assert batches[0][0] >= 40
    train(stopped, 6, stopped.loader(Plain(40), **workers))
    again = resumed(stopped, shuffle=False)
    assert ids_of(again.loader(Plain(40), **workers)) == batches[6:]
    assert ids_of(again.loader(Plain(40), **workers))[0] != batches[0]


# ---- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset_size": 3}, "dataset_size 3 does not fill one global_batch of 4"),
        ({"dataset_size": 0}, r"dataset_size is 0, outside \[1,"),
        ({"dataset_size": 40.0}, "dataset_size is 40.0, which is not an integer"),
        ({"global_batch": True}, "global_batch is True, which is not an integer"),
        ({"global_batch": 0}, "global_batch is 0"),
        ({"world_size": 3}, "global_batch 4 cannot be divided equally by world_size 3"),
        ({"world_size": 0}, "world_size is 0"),
        ({"rank": 2, "world_size": 2}, "rank 2 is outside a world of 2"),
        ({"rank": -1}, "rank is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "seed is"),
        ({"seed": None}, "seed is None"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_at_construction(arguments, message):
    with pytest.raises(Refused, match=message):
        ResumableSampler(**{"dataset_size": 40, "global_batch": 4, "seed": 7, **arguments})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"cursor_step": 10},
            r"step 10 of epoch 2, and an epoch has 10 steps here \(dataset_size 40, global_batch 4\)",
        ),
        ({"cursor_step": -1}, "cursor_step of the sampler's state is -1"),
        ({"epoch": 1.0}, "epoch of the sampler's state is 1.0"),
        ({"seed": "7"}, "seed of the sampler's state is '7'"),
        ({"step": 3}, "has cursor_step, dataset_size, earlier, epoch, global_batch, seed, shuffle, step; this one"),
        (None, "this one is NoneType"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_moves(change, message):
    sampler = make()
    it = iter(sampler.loader(Plain(40)))
    next(it), sampler.consumed()
    good = {"epoch": 2, "cursor_step": 3, "seed": 7}
    with pytest.raises(Refused, match=message):
        sampler.load_state_dict(None if change is None else {**good, **change})
    assert place(sampler) == (0, 1)
    next(it), sampler.consumed()
    assert sampler.position == (0, 2)


@pytest.mark.parametrize(
    "option",
    [
        {"batch_size": 4},
        {"shuffle": True},
        {"sampler": [0]},
        {"batch_sampler": [[0]]},
        {"drop_last": True},
        {"generator": torch.Generator()},
        {"in_order": False},
    ],
)
def test_options_that_contradict_the_order_are_refused(option):
    with pytest.raises(Refused, match=f"{next(iter(option))} cannot be given"):
        make().loader(Plain(40), **option)


def test_datasets_that_cannot_follow_the_order_are_refused():
    with pytest.raises(Refused, match="IterableDataset"):
        make().loader(Stream())
    with pytest.raises(Refused, match="the dataset has 41 samples and the sampler was made for 40"):
        make().loader(Plain(41))


# ---- the audit --------------------------------------------------------------------------------------------------


def audited(world: int = 1, steps: int = 13) -> tuple[list[Audit], ResumableSampler]:
    """The audit of a good run: one epoch of ten windows of four, and three windows of the next epoch."""
    audits, sampler = [], make()
    for rank in range(world):
        sampler, audit = make(rank=rank, world_size=world), Audit()
        audits.append(audit)
        loader = sampler.loader(Plain(40))
        while sampler.position != divmod(steps, 10):
            ids, _ = next(iter(loader))
            audit.observe(*sampler.position, ids)
            ids.zero_()  # as a loader that reuses its buffers would do
            sampler.consumed()
    return audits, sampler


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_audit_of_a_good_run_is_exact(world):
    audits, sampler = audited(world)
    report = Audit.merge(audits).report(sampler)
    assert report.exact
    assert (report.scheduled, report.observed, report.differing) == (52, 52, ())


def test_the_audit_misses_the_samples_of_ranks_that_were_not_merged():
    audits, sampler = audited(2)
    for merged, missing in ((audits[:1], 26), ([], 52)):
        report = Audit.merge(merged).report(sampler)
        assert (report.exact, report.observed, report.missing, report.extra) == (False, 52 - missing, missing, 0)
        assert report.differing == tuple(divmod(step, 10) for step in range(13))


def altered(change) -> tuple[Audit, ResumableSampler]:
    """The audit of the good run, with the ids of step 2 of epoch 1 changed."""
    audit, sampler = Audit(), audited()[1]
    for epoch, steps in ((0, 10), (1, 3)):
        for step, ids in reversed(list(enumerate(sampler.order(epoch)[:steps].tolist()))):
            audit.observe(epoch, step, change(ids) if (epoch, step) == (1, 2) else ids)
    return audit, sampler


def elsewhere(count: int) -> list[int]:
    return make().order(1)[7, :count].tolist()


@pytest.mark.parametrize(
    ("change", "duplicates", "missing", "extra"),
    [
        (lambda ids: ids, 0, 0, 0),
        (lambda ids: ids[::-1], 0, 0, 0),
        (lambda ids: [*ids, ids[1]], 1, 0, 0),
        (lambda ids: [*ids, *ids, ids[0]], 5, 0, 0),
        (lambda ids: ids[1:], 0, 1, 0),
        (lambda ids: [*ids, *elsewhere(1) * 2], 0, 0, 2),
        (lambda ids: [*ids, 0x61C8864680B583EB], 0, 0, 1),  # an id whose hash is 0: only the count shows it
        (lambda ids: [ids[0], *ids[:3]], 1, 1, 0),
        (lambda ids: [*elsewhere(2), *ids[2:]], 0, 2, 2),
        (lambda ids: [*ids[:3], -5], 0, 1, 1),
    ],
)
def test_the_audit_finds_a_duplicated_a_missing_and_an_extra_sample(change, duplicates, missing, extra):
    audit, sampler = altered(change)
    report = audit.report(sampler)
    assert (report.duplicates, report.missing, report.extra) == (duplicates, missing, extra)
    assert report.exact == (duplicates == missing == extra == 0)
    assert report.observed == report.scheduled - missing + duplicates + extra
    assert report.differing == (() if report.exact else ((1, 2),))


def test_the_audit_finds_two_swapped_windows():
    audit, sampler = Audit(), make()
    sampler.load_state_dict({"epoch": 0, "cursor_step": 3, "seed": 7})
    for step, trained in ((0, 0), (1, 2), (2, 1)):
        audit.observe(0, step, sampler.order(0)[trained])
    report = audit.report(sampler)
    assert (report.missing, report.extra, report.differing) == (8, 8, ((0, 1), (0, 2)))


@pytest.mark.parametrize("place", [(0, 10), (1, 3), (2, 0)])
def test_the_audit_finds_a_window_from_beyond_the_current_step(place):
    (audit,), sampler = audited()
    audit.observe(*place, [1, 2, 3, 4])
    report = audit.report(sampler)
    assert (report.duplicates, report.missing, report.extra, report.differing) == (0, 0, 4, (place,))


def test_the_audit_is_rolled_back_with_the_weights():
    (audit,), sampler = audited(steps=7)
    saved, place = audit.state_dict(), sampler.state_dict()
    audit.observe(0, 7, sampler.order(0)[7])
    audit.observe(0, 8, sampler.order(0)[7])
    again, resumed_sampler = Audit(), make()
    again.observe(5, 5, [5])
    again.load_state_dict(saved)
    resumed_sampler.load_state_dict(place)
    assert again.report(resumed_sampler).exact
    for step in (7, 8, 9):
        again.observe(0, step, sampler.order(0)[step])
    resumed_sampler.load_state_dict({**place, "epoch": 1, "cursor_step": 0})
    assert again.report(resumed_sampler).exact


@pytest.mark.parametrize("ids", [[1.0, 2.0], torch.zeros(2, 2, dtype=torch.int64), [True, False], 3, ["a"]])
def test_ids_that_are_not_integers_are_refused(ids):
    audit = Audit()
    with pytest.raises(Refused, match="ids are"):
        audit.observe(0, 0, ids)
    assert audit.state_dict() == Audit().state_dict()


@pytest.mark.parametrize(
    "epochs",
    [
        None,
        {"0": 3},
        {"0": {"ids": torch.tensor([1])}},
        {"x": {"windows": torch.tensor([[0, 1]]), "ids": torch.tensor([1])}},
        {"0": {"windows": torch.tensor([[0, 2]]), "ids": torch.tensor([1])}},
        {"0": {"windows": torch.tensor([[0, -1], [0, 2]]), "ids": torch.tensor([1])}},
        {"0": {"windows": torch.tensor([[0, 1]]), "ids": torch.tensor([1.0])}},
        {"0": {"windows": torch.tensor([[0, 1, 1]]), "ids": torch.tensor([1])}},
        {"0": {"windows": torch.tensor([1]), "ids": torch.tensor([1])}},
        {"0": {"windows": torch.tensor([[0, 1]]), "ids": torch.tensor([[1]])}},
    ],
)
def test_an_inconsistent_audit_state_is_refused(epochs):
    (audit,), sampler = audited()
    with pytest.raises(Refused, match="audit"):
        audit.load_state_dict({"epochs": epochs})
    assert audit.report(sampler).exact

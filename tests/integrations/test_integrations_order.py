"""The loader of the integrations: a batch depends only on the seed, the epoch and its number."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

from lastgood import ResumableSampler
from lastgood.errors import Refused
from lastgood.integrations.order import OrderedLoader


class Noisy(Dataset):
    """A dataset of 20 samples, each with a draw from every global generator."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()).item(), np.random.rand(), random.random()], dtype=torch.float64)


def masked(samples):
    return torch.stack(samples) * (torch.rand(4) > 0.3)


def loaders():
    yield DataLoader(Noisy(), batch_size=4, shuffle=True)
    yield DataLoader(Noisy(), batch_size=3, shuffle=True, collate_fn=masked, generator=torch.Generator())
    yield DataLoader(Noisy(), batch_size=4, sampler=WeightedRandomSampler([1.0] * 20, 20))
    yield DataLoader(Noisy(), batch_size=None, sampler=RandomSampler(Noisy()))


def epoch_of(loader, epoch, first=0):
    loader.load_state_dict({"seed": 7, "epoch": epoch, "batches": first})
    return list(loader)


def same(some, others):
    return len(some) == len(others) and all(map(torch.equal, some, others))


@pytest.mark.parametrize("kind", range(4))
def test_an_epoch_continues_after_any_batch_despite_earlier_draws(kind):
    loader = OrderedLoader(list(loaders())[kind], 7)
    whole = epoch_of(loader, 2)
    other = OrderedLoader(list(loaders())[kind], 99)
    for first in range(len(whole)):
        torch.rand(first + 1)
        assert same(epoch_of(other, 2, first), whole[first:])
    assert len(other) == len(whole)  # frameworks use it as the length of the epoch
    assert not same(epoch_of(other, 3), whole)


def test_workers_produce_the_same_batches_as_the_main_process():
    alone = epoch_of(OrderedLoader(DataLoader(Noisy(), batch_size=4, shuffle=True), 7), 1)
    shared = OrderedLoader(DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2), 7)
    assert same(epoch_of(shared, 1, first=3), alone[3:])


def test_fetching_draws_nothing_from_the_loops_random_numbers():
    loader = OrderedLoader(DataLoader(Noisy(), batch_size=4, shuffle=True, collate_fn=masked), 7)
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    expected = torch.rand(3), np.random.rand(), random.random()
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    for _ in loader:
        pass
    found = torch.rand(3), np.random.rand(), random.random()
    assert torch.equal(found[0], expected[0]) and found[1:] == expected[1:]


def test_the_state_is_the_position_after_the_last_yielded_batch():
    loader = OrderedLoader(DataLoader(Noisy(), batch_size=4, shuffle=True), 7)
    batches = iter(loader)
    next(batches), next(batches)
    assert loader.state_dict() == {"seed": 7, "epoch": 0, "batches": 2}
    rest, other = list(batches), OrderedLoader(DataLoader(Noisy(), batch_size=4), 0)
    assert loader.state_dict()["batches"] == 5
    other.load_state_dict(loader.state_dict())
    assert (other.order.epoch, other.order.first) == (1, 0) and len(rest) == 3


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


class Own(DataLoader):
    def __iter__(self):
        return iter([])


def test_loaders_whose_order_cannot_be_continued_are_refused():
    for loader, why in (
        (DataLoader(Stream()), "an order of its own"),
        (DataLoader(Noisy(), num_workers=1, in_order=False), "in_order=False"),
        (Own(Noisy()), "Own iterates in its own way"),
        (DataLoader(Noisy(), batch_sampler=ResumableSampler(20, 4, 0)), "has a ResumableSampler"),
        (DataLoader(Noisy(), sampler=ResumableSampler(20, 4, 0), batch_size=None), "has a ResumableSampler"),
    ):
        with pytest.raises(Refused, match=why):
            OrderedLoader(loader, 0)


class Growing(BatchSampler):
    """Its batches grow with the epochs."""

    def set_epoch(self, epoch):
        self.batch_size = 2 + epoch


def test_a_batch_size_that_depends_on_the_epoch_is_no_size_of_the_run():
    """A restart with an unchanged script was refused: it had the batch size of another epoch."""
    usual, growing = (kind(range(12), 2, drop_last=False) for kind in (BatchSampler, Growing))
    assert OrderedLoader(DataLoader(range(12), batch_sampler=usual), 0).sizes == {"samples": 12, "batch_size": 2}
    assert OrderedLoader(DataLoader(range(12), batch_sampler=growing), 0).sizes == {"samples": 12}


def test_ranks_draw_different_numbers_for_indices_of_numpy():
    """With a sampler over np.random.permutation, every rank drew the same augmentation: its indices were not
    counted."""

    def draws(indices):
        loader = OrderedLoader(DataLoader(Noisy(), batch_sampler=[list(np.array(indices))]), 7)
        return epoch_of(loader, 0)[0][:, 1]

    assert not torch.equal(draws([0, 1]), draws([2, 3]))

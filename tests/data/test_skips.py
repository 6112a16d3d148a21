"""Windows that are left out of the order, for good: what comes after them, in which numbers of ranks, and the audit."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from lastgood import Audit, ResumableSampler
from lastgood.errors import Refused


class Ids(Dataset[int]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        return index


def sampler(world_size: int = 1, rank: int = 0, **options: int) -> ResumableSampler:
    return ResumableSampler(24, 4, seed=1, world_size=world_size, rank=rank, **options)


def test_windows_are_left_out_of_their_own_order_only() -> None:
    """With another global batch, which an epoch may begin with, windows of the same numbers were left out: samples
    that nobody had found bad, and of a shorter epoch all, so that whole epochs were passed over."""
    before = ResumableSampler(40, 4, seed=0, shuffle=False)
    before.skip(0, 3, 1)
    before.skip(1, 2, 8)
    for step in range(1, 10):
        before.advance_to(step)
    after = ResumableSampler(40, 20, seed=0, shuffle=False)
    after.load_state_dict(before.state_dict())
    assert after.skipped == [(0, 3)], "those of an epoch that is over stay, for the audit"
    assert after.position == (1, 0) and after.remaining == 2


def trained(one: ResumableSampler, epochs: int, start: int = 0) -> list[tuple[tuple[int, int], list[int]]]:
    """The position and the sample ids of each step until so many epochs are over."""
    found = []
    step = start
    while one.position[0] < epochs:
        for ids in one.loader(Ids()):
            found.append((one.position, ids.tolist()))
            step += 1
            one.advance_to(step)
    return found


@given(st.sets(st.tuples(st.integers(0, 1), st.integers(0, 5)), max_size=11))
def test_every_window_that_is_not_left_out_is_trained_once_in_order(skipped: set[tuple[int, int]]) -> None:
    one = sampler()
    for epoch, window in skipped:
        one.skip(epoch, window, 1)
    every = [(epoch, window) for epoch, window in itertools.product(range(2), range(6))]
    assert [at for at, _ in trained(one, 2)] == [at for at in every if at not in skipped]
    assert one.skipped == sorted(skipped)


def test_what_is_left_out_is_stored_with_the_position() -> None:
    one = sampler()
    one.skip(0, 2, 2)
    (batches, rest) = trained(one, 1), sampler(world_size=2, rank=1)
    other = sampler()
    other.skip(0, 2, 2)
    for ids in itertools.islice(other.loader(Ids()), 2):
        del ids
        other.consumed()
    assert other.position == (0, 4), "the cursor is never at a window that is left out"
    rest.load_state_dict(other.state_dict())
    assert rest.position == (0, 4) and rest.remaining == 2 and rest.skipped == [(0, 2), (0, 3)]
    assert [at for at, _ in trained(rest, 1)] == [at for at, _ in batches][2:]
    assert "skipped" not in sampler().state_dict(), "earlier versions read a state without any"


@pytest.mark.parametrize("each", [1, 2])
def test_steps_of_several_batches_pass_what_is_left_out(each: int) -> None:
    one = sampler(batches_per_step=each)
    one.skip(0, 1, 2)
    for number, _ in enumerate(itertools.islice(one, each - 1, None, each), start=1):
        one.advance_to(number)
    assert one.position == (1, 0) and one.state_dict()["step"] == 4 // each


def test_windows_that_are_trained_already_are_not_left_out() -> None:
    one = sampler()
    for _ in itertools.islice(one.loader(Ids()), 3):
        one.consumed()
    assert one.skip(0, 0, 3) == [] and one.skipped == []
    assert one.skip(0, 2, 2) == one.order(0)[3].tolist() and one.skipped == [(0, 3)]
    assert one.skip(0, 2, 2) == []


def test_batches_whose_step_comes_in_the_next_epoch_can_be_left_out() -> None:
    one = sampler()
    for number, _ in enumerate(one.loader(Ids())):
        if number == 3:
            one.consumed()
    assert (one.counted, one.position, one.remaining) == ((0, 4), (1, 0), 6)
    assert one.skip(0, 3, 3) == one.order(0)[4:].reshape(-1).tolist()
    assert one.counted == one.position == (1, 0)


def test_an_iteration_that_has_begun_is_over() -> None:
    one = sampler()
    batches = iter(one.loader(Ids()))
    next(batches)
    one.skip(0, 3, 1)
    with pytest.raises(Refused, match="left out of the order"):
        next(batches)


def test_the_windows_of_a_step_are_those_that_it_has_trained() -> None:
    """With several batches for each step only the last one counted, so that another batch was left out."""
    one = sampler()
    batches = iter(one.loader(Ids()))
    next(batches), next(batches)
    assert one.position == (0, 1) and one.counted == (0, 0)
    one.advance_to(1)
    assert one.counted == (0, 2)


def test_the_audit_lists_what_was_left_out_and_misses_nothing() -> None:
    one, audit = sampler(), Audit()
    one.skip(0, 1, 2)
    for number, (at, ids) in enumerate(trained(one, 1)):
        assert number < 4
        audit.observe(*at, torch.tensor(ids))
    report = audit.report(one)
    assert report.exact and report.scheduled == 16
    assert report.skipped == tuple(one.order(0)[1:3].reshape(-1).tolist())
    audit.observe(0, 1, one.order(0)[1])
    assert audit.report(one).extra == 4, "it was trained although it was to be left out"


@pytest.mark.parametrize("fields", [5, [1], [[0]], [[0, 1]], [[0, ["x"]]], [[-1, [0]]]])
def test_a_malformed_list_of_windows_is_refused(fields: object) -> None:
    one = sampler()
    with pytest.raises(Refused):
        one.load_state_dict({**one.state_dict(), "skipped": fields})

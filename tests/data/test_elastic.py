"""One global batch in any number of ranks: how a window is divided, how each batch counts, and when a step is due."""

from __future__ import annotations

import itertools
import math
import runpy
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import lastgood
from lastgood import Audit, ResumableSampler
from lastgood.errors import Refused
from lastgood_lab.worlds import world

SIZE, BATCH = 60, 13  # four windows an epoch; no world but 1 and 13 divides them equally


class Noisy(Dataset[tuple[torch.Tensor, int]]):
    """Samples with random augmentation, and their ids."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return index / SIZE + torch.randn(4, dtype=torch.float64), index


def sampler(rank: int = 0, ranks: int = 1, largest: int = 5, batch: int = BATCH) -> ResumableSampler:
    return ResumableSampler(SIZE, batch, 3, rank, ranks, largest_batch=largest)


# ---- how a window is divided ----------------------------------------------------------------------------------------


@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 70))
def test_every_sample_counts_once_and_equally_in_any_division(batch: int, ranks: int, largest: int) -> None:
    window = range(100, 100 + batch)
    try:
        worlds = [ResumableSampler(70, batch, 0, rank, ranks, largest_batch=largest)._division for rank in range(ranks)]
    except Refused:
        assert ranks > batch or (largest == 1 and batch % ranks)
        return
    parts = [[window[one] for one in rank.slices] for rank in worlds]
    assert [i for part in parts for one in part for i in one] == list(window)
    assert {len(part) for part in parts} == {math.ceil(math.ceil(batch / ranks) / largest)}, "as few as fit"
    assert all(0 < len(one) <= largest for part in parts for one in part)
    for rank, part in zip(worlds, parts, strict=True):
        for number, one in enumerate(part):
            assert rank.weight(number) / ranks / len(one) == pytest.approx(1 / batch, rel=1e-15)


def test_64_samples_on_three_ranks_are_22_and_21_and_21() -> None:
    def sizes(ranks: int, largest: int) -> list[list[int]]:
        loaders = [ResumableSampler(64, 64, 0, r, ranks, largest_batch=largest).loader(range(64)) for r in range(ranks)]
        return [[len(batch) for batch in loader] for loader in loaders]

    assert sizes(3, 22) == [[22], [21], [21]]
    assert sizes(3, 16) == [[11, 11], [11, 10], [11, 10]]
    assert sizes(4, 16) == [[16]] * 4 and sizes(2, 16) == [[16, 16]] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"largest_batch": 0}, r"largest_batch is 0, outside \[1"),
        ({"largest_batch": 2.5}, "largest_batch is 2.5, which is not an integer"),
        ({"largest_batch": 4, "batches_per_step": 2}, "exclude each other"),
        ({"largest_batch": 4, "world_size": 9}, r"fewer samples than there are ranks \(9\)"),
        ({"largest_batch": 1, "world_size": 3}, "some ranks have 3 samples, and others 2"),
    ],
)
def test_a_division_that_cannot_be_is_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(Refused, match=message):
        ResumableSampler(64, 8, 0, **options)


# ---- loops ----------------------------------------------------------------------------------------------------------


def test_a_step_in_the_middle_of_a_window_is_refused() -> None:
    """A loop that calls step(n) for every batch would count a window that it has trained in part."""
    one = sampler()
    loader = one.loader(Noisy())
    for _ in loader:
        assert loader.weight == 5 / 13 and not loader.completes_step
        with pytest.raises(Refused, match="after 1 batches of this iteration, in the middle of a window"):
            one.advance_to(1)
        break
    assert one.counted == (0, 0)


@pytest.mark.parametrize("read", ["weight", "completes_step", ""])
def test_a_loop_that_would_be_wrong_in_another_world_is_refused(read: str) -> None:
    """Such a loop is right where each rank has one batch of weight 1, and wrong after a rank was lost."""
    one = sampler(largest=13)
    loader = one.loader(Noisy())
    with pytest.raises(Refused, match="no batch was yielded yet"):
        _ = loader.weight
    next(iter(loader))
    if read:
        getattr(loader, read)
    with pytest.raises(
        Refused, match="the loop has not read " + ("completes_step" if read != "completes_step" else "weight")
    ):
        one.consumed()
    assert one.counted == (0, 0)


def test_what_has_no_weights_is_refused_with_the_way_to_get_them() -> None:
    with pytest.raises(Refused, match=r"largest_batch cannot be iterated by a DataLoader of your own"):
        torch.utils.data.DataLoader(Noisy(), batch_sampler=sampler())._get_iterator().__next__()
    plain = ResumableSampler(SIZE, 12, 3).loader(Noisy())
    next(iter(plain))
    with pytest.raises(Refused, match="its sampler has no largest_batch"):
        _ = plain.completes_step


def test_lengths_and_what_remains_are_counted_in_batches() -> None:
    one = sampler()
    one.skip(0, 2, 1)
    loader = one.loader(Noisy())
    assert len(loader) == len(one) == 4 * 3 and loader.remaining == 3 * 3
    for number, _ in enumerate(loader):
        assert one.position == (0, [0, 1, 3][number // 3])
        if loader.completes_step and loader.weight:
            one.consumed()
            assert loader.remaining == [6, 3, 12][number // 3]
    assert one.counted == (1, 0) and number == 8


def test_evaluation_needs_neither_weights_nor_steps() -> None:
    one = sampler(largest=4)
    assert sum(len(ids) for _, ids in one.loader(Noisy())) == 52 and one.counted == (1, 0)
    one.advance_to(1)  # of a training beside it: it was refused, as one that had not read the weights of its batches
    assert one.counted == (1, 0)


# ---- histories of worlds --------------------------------------------------------------------------------------------

lives = st.lists(
    st.tuples(st.integers(1, 7), st.integers(2, 14), st.integers(0, 6), st.integers(0, 3)), min_size=1, max_size=5
)


@settings(max_examples=25, deadline=None)
@given(lives, st.sets(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=4))
def test_any_history_of_worlds_trains_the_same_sequence(
    lives: list[tuple[int, int, int, int]], skipped: set[tuple[int, int]]
) -> None:
    """A life has so many ranks, a largest batch and steps; in the end it trains some batches that no step counts."""
    reference, step = sampler(largest=13), 0
    trained, audits = list[list[int]](), list[Audit]()
    for epoch, window in skipped:
        reference.skip(epoch, window, 1)
    state = reference.state_dict()
    for ranks, largest, steps, torn in lives:
        before, step = step, step + steps
        samplers, audit = [sampler(rank, ranks, largest) for rank in range(ranks)], Audit()
        parts = []
        for one in samplers:
            one.load_state_dict(state)
            parts.append(trained_by(one, before, step, torn, audit))
        trained += [sorted(i for part in window for i in part) for window in zip(*parts, strict=True)]
        assert all(one.state_dict() == samplers[0].state_dict() for one in samplers)
        state = samplers[0].state_dict()
        audits.append(audit)
    order = [(e, w) for e, w in itertools.product(range(step + 2), range(4)) if (e, w) not in skipped][:step]
    assert trained == [sorted(reference.order(epoch)[window].tolist()) for epoch, window in order]
    found = Audit.merge(audits).report(samplers[0])
    assert found.exact and found.scheduled == step * BATCH


def trained_by(one: ResumableSampler, step: int, until: int, torn: int, audit: Audit) -> list[list[int]]:
    """The ids of each step of this rank. In the end it begins another window, which no step counts."""
    found: list[list[int]] = []
    loader, began = one.loader(range(SIZE)), list[int]()
    while step < until:
        for ids in loader:
            began += ids.tolist()
            audit.observe(*one.position, ids)
            if loader.completes_step and loader.weight:
                step += 1
                found.append(began)
                began = []
                one.advance_to(step)
            if step == until:
                break
    for _ in itertools.islice(loader, min(torn, one._division.batches - 1)):
        pass
    return found


# ---- real ranks -----------------------------------------------------------------------------------------------------

WORLDS = [(4, 2), (3, 5), (2, 4)]  # ranks, largest batch: two, one and two batches a step
STEPS_EACH = 3


def life(rank: int, ranks: int, root: Path, largest: int, until: int) -> tuple[list[float], list[list[float]], Audit]:
    """Restore, train until a step and save. Returns the losses, the weights, and the audit of this rank."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    if ranks > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    one, audit, losses = sampler(rank, ranks, largest), Audit(), list[float]()
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "sampler": one, "audit": audit}
    loader = one.loader(Noisy())
    with lastgood.Checkpointer(root, state) as ckpt:
        n = ckpt.restore().step
        while n < until:
            loss_of_step = torch.zeros((), dtype=torch.float64)
            for inputs, ids in loader:
                audit.observe(*one.position, ids)
                with nullcontext() if loader.completes_step or ranks == 1 else model.no_sync():
                    loss = ((model(inputs).squeeze(1) - ids / SIZE) ** 2).mean() * loader.weight
                    loss.backward()
                loss_of_step += loss.detach()
                if loader.completes_step:
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
                    if ranks > 1:
                        torch.distributed.all_reduce(loss_of_step)
                    losses.append(loss_of_step.item() / ranks)
                    loss_of_step.zero_()
                    n += 1
                    ckpt.step(n)
                    if n == until:
                        break
        ckpt.save(n).result(60)
    return losses, [one.flatten().tolist() for one in model.parameters()], audit


@pytest.mark.slow
def test_four_then_three_then_two_ranks_train_as_one_does(tmp_path: Path) -> None:
    """The losses and weights are those of one rank and whole windows, but for the order of sums in float64."""
    losses, audits = [], []
    for number, (ranks, largest) in enumerate(WORLDS, 1):
        results = world(ranks, life, tmp_path / "elastic", largest, number * STEPS_EACH)
        assert all(result[0] == results[0][0] for result in results)
        losses += results[0][0]
        audits = [audit for *_, audit in results]
    alone, weights, _ = life(0, 1, tmp_path / "alone", 13, len(WORLDS) * STEPS_EACH)
    torch.testing.assert_close(losses, alone, rtol=1e-12, atol=0)
    torch.testing.assert_close(results[0][1], weights, rtol=1e-11, atol=1e-13)
    one = sampler()
    lastgood.load(tmp_path / "elastic", {"sampler": one}, strict=False)
    found = Audit.merge(audits).report(one)
    assert found.exact and found.scheduled == len(losses) * BATCH


def example(rank: int, ranks: int, root: Path, steps: int) -> None:
    """The training script of the example, as `lastgood run` starts it."""
    path = Path(__file__).resolve().parents[2] / "examples/elastic.py"
    runpy.run_path(str(path), run_name="elastic")["train"](str(root), steps)


@pytest.mark.slow
def test_the_elastic_example_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    for ranks, steps in ((3, 10), (2, 20)):
        world(ranks, example, tmp_path, steps)
    assert [one.step for one in lastgood.open(tmp_path).generations()][-1] == 20
    one, audit = ResumableSampler(1797, 64, 0, largest_batch=64), Audit()
    lastgood.load(tmp_path, {"sampler": one, "audit": audit}, strict=False)
    found = audit.report(one)
    assert found.exact and found.scheduled == 20 * 64

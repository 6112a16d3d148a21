"""The differences of two replays of a step, in the order of cause, and what the hint claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import lastgood
from lastgood.cli.compare import compared
from lastgood.cli.replay_causes import by_group, usual_cause
from lastgood.format import commit
from lastgood.run import access
from lastgood.run.content import Content


class Shuffled:
    """A sampler that draws an order without a seed. `order`: of this epoch."""

    def __init__(self, order: Sequence[int]) -> None:
        self.order = torch.tensor([*order])

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.order = state["order"]


IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)


def trained(
    order: Sequence[int] = IN_ORDER, dropout_seed: int = 1, draws: int = 0, best: float = 0.0
) -> dict[str, Any]:
    """The state after one step. `order`: of the samples. `dropout_seed`: of a generator that is not in the state.
    `draws`: so many random numbers are drawn from the one that is. `best`: a value of the script."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    kept = torch.rand(8, 2, generator=torch.Generator().manual_seed(dropout_seed)) > 0.5
    torch.rand(draws)
    (model(torch.arange(32.0).reshape(8, 4)[[*order]] / 32) * kept).pow(2).mean().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "train": Shuffled(order), "best": {"loss": best}}


@pytest.fixture
def differing(tmp_path: Path):
    """Group -> the names in which the state of a training differs from that of another one, with these arguments."""

    def found(**arguments: Any) -> dict[str, list[str]]:
        contents = list[Content]()
        for one in ({}, arguments):
            run = tmp_path / str(len(contents))
            lastgood.save(run, trained(**one), step=1)
            tier = access.for_reading(str(run))
            contents += [Content(tier, one) for one in commit.survey(tier).generations.values()]
        return by_group(compared(*contents), *contents)

    return found


def test_a_shuffle_without_a_seed_comes_before_what_it_has_changed(differing) -> None:
    """The parameters of that step differ too, and come first in the alphabet: arithmetic was given as the cause."""
    groups = differing(order=(7, 1, 2, 3, 3, 5, 6, 0))
    assert list(groups) == ["order of samples", "buffers", "parameters", "optimizer"]
    assert groups["order of samples"] == ["train.order"] and "model.0.running_mean" in groups["buffers"]
    assert "shuffle without a seed" in usual_cause(groups) and "deterministic" not in usual_cause(groups)


def test_random_numbers_come_before_what_they_have_changed(differing) -> None:
    groups = differing(dropout_seed=2, draws=3)
    assert list(groups) == ["random numbers", "parameters", "optimizer"] and groups["random numbers"] == ["rng.torch"]
    assert "generator" in usual_cause(groups) and "deterministic" not in usual_cause(groups)


def test_dropout_of_a_generator_outside_the_state_is_not_called_arithmetic(differing) -> None:
    """Only parameters differ then, as after sums in another order: the state cannot show which of the two it was."""
    groups = differing(dropout_seed=2)
    assert list(groups) == ["parameters", "optimizer"]
    cause = usual_cause(groups)
    assert cause.startswith("either of two") and "not in the state" in cause and "deterministic" in cause


def test_a_value_that_follows_the_loss_does_not_hide_the_next_hint(differing) -> None:
    groups = differing(dropout_seed=2, best=1.0)
    assert list(groups) == ["values", "parameters", "optimizer"] and groups["values"] == ["best.loss"]
    assert "follows the loss" in usual_cause(groups) and "either of two" in usual_cause(groups)


def test_a_metric_alone_points_to_what_is_outside_the_state(differing) -> None:
    assert differing() == {}
    assert "metric" in usual_cause({}) and "The state of this step is the same" in usual_cause({})


def test_a_difference_on_another_rank_is_found_and_the_rank_named() -> None:
    """Values and random numbers of rank 0 alone were compared: another sample order on rank 1 was called the same."""
    tier = access.for_reading(Path(__file__).parents[1] / "golden" / "ranks")
    generation = max(commit.survey(tier).generations.values(), key=lambda one: one.id)
    first, second = Content(tier, generation), Content(tier, generation)
    assert compared(first, second)["same"]
    second.tensors()["rng.numpy.state.key"].own.clear()  # as if rank 1 drew like rank 0
    other = msgspec.structs.replace(second.manifests[1], values={**second.values(1), "cursor": 7})
    second.manifests[1] = other
    data = compared(first, second)
    assert not data["same"]
    groups = by_group(data, first, second)
    assert groups == {"order of samples": ["cursor on rank 1"], "random numbers": ["rng.numpy.state.key on rank 1"]}
    second.manifests[0] = msgspec.structs.replace(first.manifests[0], values={**first.values(0), "cursor": 7})
    assert [one for one in compared(first, second)["values"] if one["path"] == "cursor"] == [
        {"path": "cursor", "second": 7}
    ]

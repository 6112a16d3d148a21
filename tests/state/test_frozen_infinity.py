"""NaN and infinity that are no sign of diverged training: in weights that do not train, or that held them from the
start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import lastgood
from lastgood.errors import NotFinite, NothingGood

INFINITE = float("-inf")


class Masked(nn.Module):
    """A linear layer, and a parameter that is a mask of -inf."""

    def __init__(self, trains: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.mask = nn.Parameter(torch.full((4,), INFINITE), requires_grad=trains)


def trained(
    root: Path, model: nn.Module, steps: range, poison: int | None = None, to: float = float("nan"), **options: object
) -> None:
    """Train only the layer, and save each step; at step `poison`, its weight becomes NaN, or the value `to`."""
    optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1, momentum=0.9)
    with lastgood.Checkpointer(root, {"model": model, "optimizer": optimizer}, **options) as ckpt:
        ckpt.restore()
        for step in steps:
            model.layer(torch.ones(4)).sum().backward()
            optimizer.step()
            if step == poison:
                model.layer.weight.data.fill_(to)
            ckpt.save(step)
            ckpt.wait()


def good(root: Path) -> dict[int, bool]:
    return {one.step: one.good for one in lastgood.open(root).generations()}


@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "not finite from the start"])
def test_a_mask_that_is_a_parameter_does_not_make_a_save_unfit(tmp_path, trains):
    """Every save of the run was "not good", older ones were deleted, and no generation could be restored."""
    trained(tmp_path, Masked(trains), range(1, 4))
    assert good(tmp_path) == {1: True, 2: True, 3: True}
    trained(tmp_path, Masked(trains), range(4, 6))  # and in the next session
    assert good(tmp_path) == {3: True, 4: True, 5: True}


def test_weights_that_diverge_later_are_unfit_beside_an_exempt_mask(tmp_path):
    trained(tmp_path, Masked(trains=True), range(1, 4), poison=3)
    assert good(tmp_path) == {1: True, 2: True, 3: False}


@pytest.mark.parametrize("to", [float("nan"), float("inf")])
def test_a_restore_of_diverged_weights_does_not_exempt_them(tmp_path, to):
    """Otherwise the first save after restore(step=3) would accept the NaN or infinity that it restored as good."""
    trained(tmp_path, Masked(), range(1, 4), poison=3, to=to)
    model = Masked()
    optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1, momentum=0.9)
    with lastgood.Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}) as ckpt:
        ckpt.restore(step=3)
        ckpt.save(4).result(60)
        ckpt.wait()
    assert not good(tmp_path)[4]


def test_a_pattern_can_require_untrained_weights_to_be_finite(tmp_path):
    trained(tmp_path, Masked(), range(1, 2), finite_also=["model.mask"])
    assert good(tmp_path) == {1: False}


def test_a_tied_parameter_counts_as_trained_if_any_of_its_names_is(tmp_path):
    model = Masked()
    model.again = nn.Module()
    model.again.weight = model.layer.weight
    trained(tmp_path, model, range(1, 3), poison=2)
    assert good(tmp_path) == {1: True, 2: False}


def test_weights_stepped_without_autograd_must_be_finite(tmp_path):
    """Such weights require no gradient, so NaN in weights that are trained by hand would be accepted as a mask."""
    model = nn.Linear(3, 1).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # this optimizer has no state, which would be NaN too
    with lastgood.Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}) as ckpt:
        for step, gradient in (1, 1.0), (2, float("nan")):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, gradient)
            optimizer.step()
            ckpt.save(step)
            ckpt.wait()
    assert good(tmp_path) == {1: True, 2: False}


def test_a_frozen_mask_is_good_in_a_single_save_without_a_loop(tmp_path):
    lastgood.save(tmp_path / "run", {"model": Masked()}, 1)
    assert good(tmp_path / "run") == {1: True}


def test_patterns_decide_which_tensors_of_one_save_must_be_finite(tmp_path):
    """A mask that is trained was refused, and the error named finite_except=, which lastgood.save did not have."""
    model = Masked(trains=True)
    with pytest.raises(NotFinite, match=r'save with finite_except=\["model.mask"\]'):
        lastgood.save(tmp_path / "run", {"model": model}, 1)
    lastgood.save(tmp_path / "run", {"model": model}, 2, finite_except=["model.mask"])
    assert good(tmp_path / "run") == {1: False, 2: True}
    with pytest.raises(NotFinite):
        lastgood.save(tmp_path / "other", {"model": Masked()}, 1, finite_also=["model.mask"])


def test_the_errors_name_the_exempting_pattern_and_the_step_to_request(tmp_path):
    model = Masked()
    model.layer.weight.data.fill_(float("nan"))
    with pytest.raises(lastgood.errors.NotFinite, match=r'finite_except=\["model.layer.weight"\]') as found:
        lastgood.save(tmp_path / "run", {"model": model}, 5)
    assert "restore(step=5)" in str(found.value)
    with pytest.raises(NothingGood, match=r'finite_except=\["model.layer.weight"\]') as nothing:
        lastgood.load(tmp_path / "run", {"model": Masked()})
    assert "restore(step=5)" in str(nothing.value)
    (mark,) = (tmp_path / "run").glob("gen/*/UNFIT.json")
    mark.unlink()  # no process has read the mark yet; the restore finds the same by itself
    with pytest.raises(NothingGood, match=r'finite_except=\["model.layer.weight"\]'):
        lastgood.load(tmp_path / "run", {"model": Masked()})


def test_weights_that_are_nan_before_the_first_step_are_never_exempt(tmp_path):
    """Without a restore(), the first check came after the first update, and called a run that had diverged by then
    "good"."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lastgood.Checkpointer(tmp_path / "run", {"model": model, "optimizer": optimizer}) as ckpt:
        model.weight.data.fill_(float("nan"))
        ckpt.save(1).result()
    with lastgood.Checkpointer(tmp_path / "other", {"model": model}) as ckpt:
        ckpt.save(1).result()
    assert good(tmp_path / "run") == {1: False} and good(tmp_path / "other") == {1: False}


def test_a_parameter_that_begins_to_train_must_be_finite(tmp_path):
    """The parameters that do not train were determined at the first save and never again: one that was frozen then
    could become NaN later and still be called "good"."""
    model = nn.Linear(3, 1).requires_grad_(False)
    with lastgood.Checkpointer(tmp_path, {"model": model}) as ckpt:
        ckpt.save(1).result()
        model.requires_grad_(True)
        ckpt.save(2).result()
        ckpt.wait()
        model.weight.data.fill_(float("nan"))
        ckpt.save(3).result()
    found = good(tmp_path)
    assert found[2] and not found[3]

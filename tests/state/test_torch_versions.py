"""A dtype that the installed torch lacks is refused by name where it is needed, and affects nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lastgood
from lastgood.errors import Refused
from lastgood.state import tensors


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that contains a float8 tensor, opened in a process whose torch lacks float8."""
    state = {"weights": torch.ones(4), "scales": torch.ones(4).to(torch.float8_e5m2)}
    lastgood.save(tmp_path / "run", state)
    monkeypatch.delitem(tensors.TORCH_DTYPES, "float8_e5m2")
    return tmp_path / "run"


def test_a_dtype_that_this_torch_lacks_is_refused_before_any_change(run: Path) -> None:
    state = {"weights": torch.zeros(4), "scales": torch.zeros(4)}
    with pytest.raises(Refused, match=r"float8_e5m2, which torch .* does not have"):
        lastgood.load(run, state)
    assert not state["weights"].any()
    with pytest.raises(Refused, match="float8_e5m2"):
        lastgood.open(run).tensor("scales")


def test_tensors_of_other_dtypes_in_that_generation_still_load(run: Path) -> None:
    assert torch.equal(lastgood.open(run).tensor("weights"), torch.ones(4))
    state = {"weights": torch.zeros(4), "scales": None}
    with lastgood.Checkpointer(run, state, exclude=["scales"]) as ckpt:
        ckpt.restore()
    assert torch.equal(state["weights"], torch.ones(4))

"""The promises on a GPU, where a side stream copies. `make gpu` runs these tests; without a GPU they are skipped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lastgood
from harness import reported
from lastgood.snapshot import staging

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; `make gpu` runs it"),
]


def build(width: int = 512, depth: int = 8) -> dict[str, object]:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)), nn.Dropout(0.1)).cuda()
    return {"net": net, "opt": torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)}


def train(state: dict[str, object]) -> None:
    net, opt = state["net"], state["opt"]
    net(torch.randn(64, net[0].in_features, device="cuda")).square().mean().backward()
    opt.step()
    opt.zero_grad()


def picture(state: dict[str, object]) -> dict[str, torch.Tensor]:
    return {name: one.cpu().clone() for name, one in lastgood.state.rules.capture(state).tensors.items()}


@pytest.mark.parametrize("memory", [None, 2 << 20])
def test_every_save_holds_the_state_at_its_step_while_training_continues(tmp_path, memory):
    state, pictures = build(), {}
    with lastgood.Checkpointer(tmp_path, state, memory=memory, in_flight=3) as ckpt:
        for n in range(1, 13):
            train(state)
            pictures[n] = picture(state)
            ckpt.save(n, milestone=True)
    run = lastgood.open(tmp_path)
    for step, expected in pictures.items():
        for name, one in expected.items():
            assert torch.equal(run.tensor(name, step), one), (step, name)


def test_the_host_does_not_wait_for_a_copy_that_fits_the_arena(tmp_path):
    """The stream waits in place of the host: when the step returns, the copy of the last chunk need not have ended."""
    state = build(2048, 16)
    train(state)
    with lastgood.Checkpointer(tmp_path, state) as ckpt:
        ckpt.save(1).result()
        train(state)
        expected = picture(state)
        save = ckpt.save(2)
        for _ in range(3):
            train(state)
        assert save.result(60).step == 2
    assert all(torch.equal(lastgood.open(tmp_path).tensor(name, 2), one) for name, one in expected.items())


def test_a_restart_on_a_gpu_continues_bit_for_bit(tmp_path):
    whole = build()
    for _ in range(6):
        train(whole)
    first = build()
    with lastgood.Checkpointer(tmp_path, first) as ckpt:
        for n in range(1, 4):
            train(first)
            ckpt.save(n)
    torch.cuda.manual_seed_all(99)
    second = build()
    torch.manual_seed(123)
    with lastgood.Checkpointer(tmp_path, second) as ckpt:
        assert ckpt.restore().step == 3
        for _ in range(3):
            train(second)
    for name, one in picture(whole).items():
        if not name.startswith("rng."):
            assert torch.equal(picture(second)[name], one), name


def test_a_change_behind_the_fence_is_found_on_a_gpu(tmp_path):
    state = build()
    train(state)
    with (
        reported("TornSnapshot"),
        lastgood.Checkpointer(tmp_path, state) as ckpt,
    ):
        ckpt.save(1)
        state["net"][0].weight.data = state["net"][0].weight.data + 1
    assert lastgood.open(tmp_path).generations() == []


def test_the_arena_is_pinned(tmp_path):
    state = build()
    train(state)
    with lastgood.Checkpointer(tmp_path, state) as ckpt:
        ckpt.save(1).result()
        assert isinstance(ckpt._planner._pin, staging.Pin) and ckpt._planner._pin._held

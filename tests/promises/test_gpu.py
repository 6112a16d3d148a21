"""The promises on a GPU, where a side stream copies. `make gpu` runs these tests; without a GPU they are skipped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lastgood
from harness import reported
from lastgood.errors import TrainingDiverged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; `make gpu` runs it"),
]

NEVER = lastgood.Every(steps=10**6)


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
    """The memory for copies holds a hundredth of the state: most of it is not copied yet when it changes."""
    state = build(2048, 16)
    train(state)
    with (
        reported("TornSnapshot"),
        lastgood.Checkpointer(tmp_path, state, memory=2 << 20, save_on_exit=False) as ckpt,
    ):
        ckpt.save(1)
        state["net"][15].weight.data = state["net"][15].weight.data + 1
    assert lastgood.open(tmp_path).generations() == []


def test_the_arena_is_pinned(tmp_path):
    state = build()
    train(state)
    with lastgood.Checkpointer(tmp_path, state) as ckpt:
        ckpt.save(1).result()
        lease = ckpt._planner._arena.take_now()
        assert torch.frombuffer(lease.buffer, dtype=torch.uint8).is_pinned()
        lease.release()


def test_between_comparisons_the_sentinel_waits_for_no_device(tmp_path):
    state = build()
    with lastgood.Checkpointer(tmp_path, state, sentinel=lastgood.Sentinel(every=5), cadence=NEVER) as ckpt:
        train(state)
        ckpt.step(1, metrics={"loss": torch.ones((), device="cuda")})
        torch.cuda.set_sync_debug_mode("error")
        try:
            for n in range(2, 30):
                ckpt.step(n, metrics={"loss": torch.ones((), device="cuda", requires_grad=True) * n})
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("last", "found"), [(10, 11), (9, 11), (1, 6)])
def test_a_loss_on_a_gpu_that_is_no_number_is_found_a_step_late(tmp_path, last, found):
    """`last` before the comparison of step 5 or 10; the loop learns of it at the next step."""
    state = build()
    train(state)
    loss = torch.ones((), device="cuda")
    with lastgood.Checkpointer(tmp_path, state, sentinel=lastgood.Sentinel(every=5), cadence=NEVER) as ckpt:
        for n in range(1, found):
            ckpt.step(n, metrics={"loss": loss * float("nan") if n == last else loss})
        with pytest.raises(TrainingDiverged, match=f"step {last}: loss nan"):
            ckpt.step(found, metrics={"loss": loss})


def test_a_save_waits_for_the_comparison_on_a_gpu(tmp_path):
    state = build()
    train(state)
    with lastgood.Checkpointer(tmp_path, state, sentinel=lastgood.Sentinel(every=5), cadence=NEVER) as ckpt:
        for n in range(1, 5):
            ckpt.step(n, metrics={"loss": torch.ones((), device="cuda")})
        ckpt.step(5, metrics={"loss": torch.full((), float("nan"), device="cuda")})
        with pytest.raises(TrainingDiverged):
            ckpt.save(5)

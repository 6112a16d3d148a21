"""The audit in the state lists every sample once, in whatever world sizes the run was trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lastgood
from lastgood import Audit, ResumableSampler
from lastgood.format.values import decode, encode
from lastgood.policy.merge_values import merged
from lastgood.state.rules import capture
from lastgood_lab.worlds import world

SIZE, BATCH = 64, 12  # five windows per epoch, for 1, 2, 3, 4, 6 or 12 ranks


def made(rank: int, ranks: int) -> dict[str, Any]:
    """The state of a rank, with the audit inside a list, where a state may contain it too."""
    return {"sampler": ResumableSampler(SIZE, BATCH, 7, rank, ranks), "kept": [{"audit": Audit()}, 1]}


def train(state: dict[str, Any], steps: int) -> None:
    for _ in range(steps):
        sampler = state["sampler"]
        state["kept"][0]["audit"].observe(*sampler.position, next(iter(sampler)))
        sampler.consumed()


def report(states: Sequence[dict[str, Any]]) -> lastgood.data.audit.AuditReport:
    return Audit.merge(state["kept"][0]["audit"] for state in states).report(states[0]["sampler"])


def reloaded(states: Sequence[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """The states of `size` new ranks after they have restored a generation of these ranks."""
    manifests = [SimpleNamespace(values=capture(state).values) for state in states]
    new = [made(rank, ranks) for rank in range(ranks)]
    for rank, state in enumerate(new):
        values = merged(manifests, rank, ranks)
        data = {name: decode(values[name], lambda tag, body, inner: inner(body)) for name in state}
        state["sampler"].load_state_dict(data["sampler"])
        state["kept"][0]["audit"].load_state_dict(data["kept"][0]["audit"])
    return new


lives = st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.integers(0, 7)), min_size=1, max_size=6)


@settings(max_examples=50, deadline=None)
@given(lives)
def test_every_sample_is_audited_once_over_any_sequence_of_worlds(lives: list[tuple[int, int]]) -> None:
    """After a change from 2 ranks to 1, 16 of 64 samples were reported as missing, and from 1 to 2 there were 32
    duplicates, although each sample had been trained once."""
    states = [made(0, 1)]
    for ranks, steps in lives:
        states = reloaded(states, ranks)
        for state in states:
            train(state, steps)
    found = report(states)
    assert found.exact and found.scheduled == sum(steps for _, steps in lives) * BATCH
    assert report(reloaded(states, 1)) == found


def test_a_sample_trained_by_two_ranks_stays_a_duplicate_in_any_world() -> None:
    """Two ranks that were given the samples of one: the merge must not remove the duplicates that an audit exists to
    find."""
    states = [made(0, 2), made(0, 2)]
    for state in states:
        train(state, 3)
    for ranks in (2, 1, 3):
        found = report(reloaded(states, ranks))
        assert (found.duplicates, found.missing, found.extra) == (18, 18, 0)


def test_the_same_world_size_restores_the_audit_of_each_rank() -> None:
    states = reloaded([made(rank, 2) for rank in range(2)], 2)
    train(states[0], 2)
    train(states[1], 1)
    again = reloaded(states, 2)
    assert [one["kept"][0]["audit"].state_dict() for one in again] == [
        one["kept"][0]["audit"].state_dict() for one in states
    ]


@pytest.mark.parametrize("last", [3, 300, 70_000, 2**40, -5])
def test_ids_of_any_size_round_trip(last: int) -> None:
    audit, again = Audit(), Audit()
    for step, ids in enumerate([[1, 2], [last, 0], [], [4]]):
        audit.observe(0, step, torch.tensor(ids, dtype=torch.int64))
    again.load_state_dict(decode(encode(audit.state_dict(), "audit")))
    assert again._seen(0)[1].tolist() == [1, 2, last, 0, 4]
    assert again._seen(0)[0].tolist() == [0, 0, 1, 1, 3]


def test_the_state_of_an_audit_of_an_earlier_version_is_loaded() -> None:
    audit, sampler = Audit(), ResumableSampler(SIZE, BATCH, 7)
    sampler.load_state_dict({"epoch": 0, "cursor_step": 2, "seed": 7})
    windows, ids = torch.tensor([[0, 12], [1, 12]]), torch.from_numpy(sampler.order(0)[:2].reshape(-1).copy())
    audit.load_state_dict({"epochs": {"0": {"windows": windows, "ids": ids}}})
    assert audit.report(sampler).exact


def life(rank: int, ranks: int, root: Path, upto: int) -> dict[str, Any]:
    """Restore on these ranks, train three steps and save; returns the audit's state of this rank."""
    state = made(rank, ranks)
    with lastgood.Checkpointer(root, state) as ckpt:
        assert ckpt.restore().step == upto - 3
        for n in range(upto - 2, upto + 1):
            audit, sampler = state["kept"][0]["audit"], state["sampler"]
            audit.observe(*sampler.position, next(iter(sampler)))
            ckpt.step(n)
        ckpt.save(upto).result(60)
    return state["kept"][0]["audit"].state_dict()


@pytest.mark.slow
def test_two_then_one_then_three_ranks_audit_every_sample_once(tmp_path: Path) -> None:
    """The same with real ranks and real files: the audit was saved in tensors, and each rank restored only its own
    tensor."""
    for number, ranks in enumerate([2, 1, 3], 1):
        kept = world(ranks, life, tmp_path, 3 * number)
    state = made(0, 1)
    assert lastgood.load(tmp_path, state).step == 9
    found = report([state])
    assert found.exact and found.scheduled == 9 * BATCH
    audits = [Audit() for _ in kept]
    for audit, saved in zip(audits, kept, strict=True):
        audit.load_state_dict(saved)
    assert Audit.merge(audits).report(state["sampler"]) == found

"""Functions that the ranks of tests/ranks/test_ranks_faults.py run."""

from __future__ import annotations

import logging
import math
import signal
import threading
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import lastgood
from harness import reports
from lastgood.errors import TrainingDiverged
from lastgood.format import layout
from lastgood.ranks.replica_check import Replicas
from lastgood.run import advice, side_records
from lastgood.run.advice import Advice, Skip
from lastgood.testing import Fault, FaultyFiles
from lastgood_lab.campaigns.rank_jobs import PATIENCE, made, outcome_of
from ranked import LIMIT_SECONDS, opened


def saved_again(rank: int, size: int, kind: str, root: Path, changed_ranks: tuple[int, ...]) -> tuple[bool, str, str]:
    """Save a step, save it again after an evaluation, change the parameters on the ranks `changed_ranks`, and save
    it a third time, then save the next step. Returns whether the second save returned the first one's generation,
    and the outcomes of the last two."""
    loop = made(kind, size)
    with opened(root, loop.state) as ckpt:
        loop.step(1)
        first = ckpt.save(1).result()
        torch.rand(1)
        second = ckpt.save(1, milestone=True, metrics={"loss": 1.0}).result()
        originals = [one.clone() for one in loop.net.parameters()]
        if rank in changed_ranks:
            for one in loop.net.parameters():
                one.data.add_(1)
        third = outcome_of(lambda: ckpt.save(1, metrics={"loss": 2.0}))
        for one, original in zip(loop.net.parameters(), originals, strict=True):
            one.data.copy_(original)
        fourth = outcome_of(lambda: ckpt.save(2).result())
    return first.id == second.id, third, fourth


def unread_when_saved_again(rank: int, size: int, root: Path) -> tuple[str, str]:
    """Save a step, save it again while rank 1 cannot read its manifest, and save the next step. Returns the error of
    the second save, and the outcome of the third."""
    loop = made("plain", size)
    with FaultyFiles().installed() as files, opened(root, loop.state) as ckpt:
        loop.step(1)
        ckpt.save(1).result(LIMIT_SECONDS)
        ckpt.wait()
        if rank == 1:
            files.inject(Fault("open read", f"*/{layout.manifest_name(1)}"))
        second = ckpt.save(1, milestone=True)
        files.clear()
        loop.step(2)
        return type(second.error()).__name__, outcome_of(lambda: ckpt.save(2).result(LIMIT_SECONDS))


def updated_at_the_end(rank: int, size: int, root: Path) -> list[str]:
    """Leave the `with` after step 2, once rank 1 alone has made another update. Returns the reports of this rank."""
    loop = made("plain", size)
    options = {"cadence": lastgood.Every(steps=1000), "patience": PATIENCE}
    with reports(logging.ERROR) as texts, lastgood.Checkpointer(root, loop.state, **options) as ckpt:
        ckpt.save(1).result(LIMIT_SECONDS)
        loop.step(2)
        ckpt.step(2)
        if rank == 1:
            loop.step(3)
    return texts


def ended_after_a_bad_loss(rank: int, size: int, root: Path, preempted: bool) -> str:
    """Step with a loss that is NaN at step 5 on rank 1, which receives a signal then. Returns how it ends.

    `preempted`: otherwise the loop ends after that step by itself, and nothing is saved at the exit.
    """
    loop = made("ddp", size)
    options = {"sentinel": lastgood.Sentinel(every=10**6), "patience": PATIENCE, "save_on_exit": preempted}
    options |= {"preemption": lastgood.Preemption()} if preempted else {}
    try:
        with lastgood.Checkpointer(root, loop.state, cadence=lastgood.Every(steps=10**6), **options) as ckpt:
            ckpt.save(1).result(LIMIT_SECONDS)
            for n in range(2, 10**5 if preempted else 6):
                if n == 5 and rank == 1 and preempted:
                    signal.raise_signal(signal.SIGTERM)
                loop.step(n)
                ckpt.step(n, metrics={"loss": math.nan if n == 5 and rank == 1 else 1.0})
    except (lastgood.Preempted, TrainingDiverged) as end:
        return type(end).__name__
    return "no end"


def leaving_windows_out(rank: int, size: int, root: Path) -> tuple[int, list[tuple[int, int]], list[str]]:
    """Train three steps; a supervisor then advises to leave two windows out, and rank 0 restores with the sampler of an
    evaluation in its state. Returns the restored step, what is left out, and what was reported."""

    def opened_again() -> tuple[lastgood.Checkpointer, lastgood.ResumableSampler]:
        sampler = lastgood.ResumableSampler(40, 4, seed=0, rank=rank, world_size=size)
        state = {"weights": torch.ones(3), "sampler": sampler}
        if rank == 0:
            state["evaluation"] = lastgood.ResumableSampler(8, 4, seed=0)
        return lastgood.Checkpointer(root, state, cadence=lastgood.Every(steps=1)), sampler

    ckpt, sampler = opened_again()
    with ckpt:
        n = ckpt.restore().step
        for _ in sampler.loader(list(range(40))):
            n += 1
            ckpt.step(n)
            if n == 3:
                break
    skip = Skip(epoch=0, first=5, count=2)
    if rank == 0:
        with side_records.opened(str(root)) as tier:
            made = Advice(format=layout.FORMAT, by="supervisor", at=0.0, step=5, why="it failed", skip=skip)
            advice.append(tier, made)
    dist.barrier()
    ckpt, sampler = opened_again()
    with reports() as texts, ckpt:
        step = ckpt.restore().step
    return step, sampler.skipped, [one for one in texts if "left out" in one]


def learning_late(rank: int, size: int, root: Path, steps: list[int]) -> list[str]:
    """Saves at `steps`, of a state that differs between the ranks from the fourth one on. Returns their outcomes.

    When rank 1 plans the fifth one it does not know yet what the fourth one has found, and rank 0 knows it.
    """
    state = {"weights": torch.arange(4000.0), "seen": torch.zeros(3)}
    learned, planned, note = threading.Event(), threading.Event(), Replicas.note_own

    def noted(self: Replicas, names: Collection[str], step: int) -> None:
        if rank == 1:
            assert planned.wait(LIMIT_SECONDS)
        note(self, names, step)
        learned.set()

    with pytest.MonkeyPatch.context() as patched, opened(root, state) as ckpt:
        patched.setattr(Replicas, "note_own", noted)
        ckpt.restore()
        outcomes = [outcome_of(lambda n=n: ckpt.save(n).result(LIMIT_SECONDS)) for n in steps[:3]]
        state["seen"].fill_(float(rank))
        fourth = ckpt.save(steps[3])
        if rank == 0:
            assert learned.wait(LIMIT_SECONDS)
        fifth = ckpt.save(steps[4])
        planned.set()
        outcomes += [outcome_of(lambda one=one: one.result(LIMIT_SECONDS)) for one in (fourth, fifth)]
        return outcomes + [outcome_of(lambda n=n: ckpt.save(n).result(LIMIT_SECONDS)) for n in steps[5:]]

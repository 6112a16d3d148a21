"""A seeded slice of the campaign that kills training processes in memory and their agents (memory_kills.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgood.format import layout
from lastgood.records import GenerationId
from lastgood_lab.campaigns import memory_kills
from lastgood_lab.campaigns.memory_kills import Run

LIVES = 2


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_life_restores_what_the_one_before_has_sealed(tmp_path: Path, memory: Path, ranks: int) -> None:
    run = memory_kills.series(tmp_path, memory, 1 + ranks, LIVES)
    assert run.problems == []
    assert run.ends["training processes"] == ranks * LIVES and run.committed > 0


def test_an_older_step_than_was_sealed_is_a_violation(tmp_path: Path, memory: Path) -> None:
    run = Run(tmp_path, memory, 1)
    run.committed, run.sealed = 7, 8
    receiver, sender = memory_kills.CONTEXT.Pipe(duplex=False)
    for step, same in ((7, True), (8, True), (8, False), (10, True)):
        sender.send(("restored", step, same))
    run._receive(receiver, 4)
    assert [one.split(": ")[1] for one in run.problems] == [
        "restored step 7, and 7 was committed, 8 sealed",
        "step 8 was restored with other bytes",
        "restored step 10, and 8 was committed, 8 sealed",
    ]


def test_ranks_that_restore_different_steps_are_a_violation(tmp_path: Path, memory: Path) -> None:
    """Each of them may be right by itself: the last committed save, and the one that was under way."""
    run = Run(tmp_path, memory, 1, ranks=2)
    run.committed = 7
    pipes = [memory_kills.CONTEXT.Pipe(duplex=False) for _ in range(2)]
    for (_, sender), step in zip(pipes, (7, 8), strict=True):
        sender.send(("restored", step, True))
    run._receive_restored([receiver for receiver, _ in pipes])
    assert [one.split(": ")[1] for one in run.problems] == ["the ranks have restored the steps [7, 8]"]


def test_a_save_counts_as_sealed_once_all_ranks_have_sealed_it(tmp_path: Path) -> None:
    """Or a restore of an older step would be called a violation while no reader could take the newer one."""
    for step, ranks in ((1, (0, 1)), (2, (1,))):
        folder = tmp_path / layout.folder(GenerationId(step=step, incarnation="0" * 8))
        folder.mkdir(parents=True)
        for rank in ranks:
            (folder / layout.manifest_name(rank)).touch()
    assert memory_kills.newest_sealed(tmp_path, ranks=2) == (1, True)
    assert memory_kills.newest_sealed(tmp_path, ranks=1) == (1, True)

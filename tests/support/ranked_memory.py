"""The functions that ranks run whose first tier is memory. Names of nodes stand for machines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lastgood
from lastgood.run import memory_place
from lastgood_lab.campaigns.rank_jobs import PATIENCE, Loop


def opened(loop: Loop, node: str, memory: Path, home: Path, **options: Any) -> lastgood.Checkpointer:
    """A run on the node of this name, which saves every step to memory and every fourth at home."""
    os.environ |= {"LASTGOOD_NODE": node, memory_place.VARIABLE: str(memory)}
    tiers = [lastgood.Tier("memory://", cadence=lastgood.Every(steps=1))]
    settings = {"cadence": lastgood.Every(steps=4), "patience": PATIENCE, "tiers": tiers, **options}
    return lastgood.Checkpointer(home, loop.state, **settings)


def trained(
    rank: int, size: int, nodes: Sequence[str], memory: Path, home: Path, upto: int, killed: bool = False
) -> dict[str, Any]:
    """Restore and train; returns the restored step, the losses, and what the last save survives on this rank.

    `nodes`: the node of each rank. `killed`: the process is killed after the last save is committed.
    """
    loop = Loop("fsdp" if size > 1 else "plain", size)
    with opened(loop, nodes[rank], memory, home) as ckpt:
        found = ckpt.restore()
        losses = []
        for n in range(found.step + 1, upto + 1):
            losses.append(loop.step(n))
            save = ckpt.step(n)
            assert save is not None
            save.committed()
        if killed:
            os._exit(9)
        survives = [save.durable("process"), save.durable()] if losses else []
        labelled = ckpt.save(upto, metrics={"loss": 1.0}) if losses else None
        if labelled is not None:
            labelled.committed()
            survives.append(labelled.durable("process"))
    return {"step": found.step, "sources": [*found.sources], "losses": losses, "survives": survives}

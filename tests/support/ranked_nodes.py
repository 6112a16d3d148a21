"""The functions that ranks run whose nodes have disks of their own: directories of this machine stand for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lastgood
from harness import reports
from lastgood.format import layout
from lastgood.run import lower_place
from lastgood.run.writer import RunWriter
from lastgood.storage.directory import Disk
from lastgood.storage.slots import Slots
from lastgood_lab.campaigns.rank_jobs import PATIENCE, Loop

EVERY_SECOND = lastgood.Every(steps=2)


def opened(
    loop: Loop, disk: str | Path, last: str | Path, last_every: int = 4, in_slots: bool = False, **options: Any
) -> lastgood.Checkpointer:
    """A run whose front is the disk of this node, or slots of this rank, and saves every second step."""
    front = lastgood.Tier(disk, cadence=EVERY_SECOND, retention=lastgood.Keep(last=2), shared=in_slots)
    settings = {"cadence": lastgood.Every(steps=last_every), "retention": lastgood.Keep(last=9), "patience": PATIENCE}
    return lastgood.Checkpointer(last, loop.state, tiers=[front], **{**settings, **options})


def trained(
    rank: int,
    size: int,
    disks: Sequence[str | Path],
    last: str | Path,
    upto: int,
    kind: str = "fsdp",
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Restore and train; returns what was restored, from where, and the losses.

    `disks`: that of each rank's node. `options`: further ones of the run; `nothing_below`: no generation is copied to
    the place below; `unsaved`: how many steps are trained at the end with the run closed.
    """
    options = dict(options or {})
    if options.pop("nothing_below", False):
        lower_place.LowerPlace.catch_up = lambda self: None
        options |= {"last_every": 99, "save_on_exit": False}
    restored_step, unsaved = options.pop("restored_step", None), options.pop("unsaved", 0)
    loop = Loop(kind if size > 1 else "plain", size)
    events: list[str] = []
    with opened(loop, disks[rank], last, on_event=lambda event: events.append(event.kind), **options) as ckpt:
        found = ckpt.restore(restored_step)
        losses = []
        for n in range(found.step + 1, upto + 1):
            losses.append(loop.step(n))
            ckpt.step(n)
            ckpt.wait()
    losses += [loop.step(n) for n in range(upto + 1, upto + unsaved + 1)]
    sources = {place: one.bytes for place, one in found.sources.items()}
    stepped_over = [step for step, _ in found.stepped_over]
    return {"step": found.step, "sources": sources, "losses": losses, "stepped_over": stepped_over, "events": events}


def committed(save: lastgood.Save) -> str:
    """Wait for the commit of a save. Returns "durable", or the name of its error."""
    try:
        save.committed()
    except lastgood.errors.LastgoodError as error:
        return type(error).__name__
    return "durable"


def refused_commit(rank: int, size: int, disks: Sequence[Path], last: Path, faulty_rank: int) -> list[str]:
    """Save steps 1 to 3. The COMMIT of step 2 cannot be written on the node of one rank. Returns the outcomes."""
    real = Disk.put_new

    def faulty(disk: Disk, name: str, data: bytes) -> None:
        if rank == faulty_rank and name.startswith(f"gen/{2:012d}") and name.endswith(layout.COMMIT):
            raise lastgood.errors.NotWritable("this node refuses the record on purpose")
        real(disk, name, data)

    Disk.put_new = faulty
    lower_place.LowerPlace.catch_up = lambda self: None
    loop, outcomes = Loop("fsdp", size), []
    with reports(), opened(loop, disks[rank], last, last_every=99, save_on_exit=False) as ckpt:
        ckpt.restore()
        for n in (1, 2, 3):
            loop.step(n)
            outcomes.append(committed(ckpt.save(n)))
    return outcomes


def in_slots(
    rank: int,
    size: int,
    path: str,
    upto: int,
    refused_step: int = 0,
    faulty_rank: int = 0,
    verified: bool = True,
    refused_steps: Sequence[int] = (),
) -> dict[str, Any]:
    """Train in slots, a save every second step. Returns as `trained`, and outcomes.

    The COMMIT of `refused_step` (0: none) cannot be written by `faulty_rank`, and training ends after that step; only
    step 2 is verified then. `verified`: whether anything is. `refused_steps`: refused too, and training goes on.
    """
    if not verified:
        RunWriter.verify = lambda self, arena, stop=None: None
    real = Slots.put_new

    def faulty(slots: Slots, name: str, data: bytes) -> None:
        refused = any(name.startswith(f"gen/{step:012d}") for step in refused_steps or [refused_step])
        if refused and name.endswith(layout.COMMIT):
            raise lastgood.errors.NotWritable("this rank refuses the record on purpose")
        real(slots, name, data)

    if rank == faulty_rank and refused_step:
        Slots.put_new = faulty
    loop, losses, outcomes = Loop("fsdp" if size > 1 else "plain", size), [], []
    settings = {"cadence": lastgood.Every(steps=10**6), "save_on_exit": False, "patience": PATIENCE}
    with reports(), lastgood.Checkpointer(path, loop.state, **settings) as ckpt:
        found = ckpt.restore()
        for n in range(found.step + 1, upto + 1):
            losses.append(loop.step(n))
            if n % 2 == 0:
                outcomes.append(committed(ckpt.save(n)))
            if n == 2 and refused_step and not refused_steps:
                ckpt.wait()
                RunWriter.verify = lambda self, arena, stop=None: None
            if n == refused_step and not refused_steps:
                break
    return {"step": found.step, "losses": losses, "outcomes": outcomes, "sources": list(found.sources)}

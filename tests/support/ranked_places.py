"""The functions that the ranks of tests with several places run, in worlds of real processes."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

import lastgood
from harness import reports
from lastgood.format import commit
from lastgood.run import lower_place, node_cache, part_copies
from lastgood_lab.campaigns.rank_jobs import PATIENCE, Loop

PLACES: dict[str, Any] = {"cadence": lastgood.Every(steps=4), "retention": lastgood.Keep(last=9), "patience": 60.0}


def opened(loop: Loop, root: Path, last: str | Path, **options: Any) -> lastgood.Checkpointer:
    """A run with its front in `root`/front, which saves every second step, and its last place in `last`."""
    front = lastgood.Tier(root / "front", cadence=lastgood.Every(steps=2), retention=lastgood.Keep(last=2))
    return lastgood.Checkpointer(last, loop.state, **{**PLACES, "tiers": [front], **options})


def trained(
    rank: int,
    size: int,
    root: Path,
    last: str | Path,
    upto: int,
    environ: Mapping[str, str] | None = None,
    parity: str | None = None,
    keep: lastgood.Keep = PLACES["retention"],
) -> dict[str, Any]:
    """Restore and train; returns the step that was restored, from where, what was mended, and the losses."""
    os.environ.update(environ or {})
    loop = Loop("fsdp" if size > 1 else "plain", size)
    events: list[str] = []
    options = {"parity": parity, "retention": keep}
    with opened(loop, root, last, **options, on_event=lambda event: events.append(event.kind)) as ckpt:
        found = ckpt.restore()
        losses = []
        for n in range(found.step + 1, upto + 1):
            losses.append(loop.step(n))
            ckpt.step(n)
    sources = {place: one.bytes for place, one in found.sources.items()}
    return {"step": found.step, "sources": sources, "losses": losses, "repaired": found.repaired, "events": events}


def copied_by(rank: int, size: int, root: Path, last: str | Path) -> list[str]:
    """Train with a last place; returns the files that this rank has copied there."""
    copied: list[str] = []
    real = part_copies.copying._complete_blob

    def noted(target: Any, sources: Any, at: Any, manifest: Any, blob: Any, copying: Any) -> bool:
        copied.append(blob.name)
        return real(target, sources, at, manifest, blob, copying)

    part_copies.copying._complete_blob = noted
    trained(rank, size, root, last, 4)
    return copied


def failing(rank: int, size: int, root: Path, last: Path, faulty_rank: int) -> dict[str, Any]:
    """As `trained`; the first copies of one rank fail."""
    real, failures = part_copies.copying._complete_blob, [2 if rank == faulty_rank else 0]

    def faulty(*arguments: Any) -> bool:
        if failures[0]:
            failures[0] -= 1
            raise lastgood.errors.TierDown("the place is down on purpose")
        return real(*arguments)

    part_copies.copying._complete_blob = faulty
    lower_place.PAUSES_SECONDS = (0.05,)
    return trained(rank, size, root, last, 8)


def interrupted(rank: int, size: int, root: Path, last: Path, faulty_rank: int) -> None:
    """One rank raises in its loop, and notes the seconds that leaving takes; the other one goes on until then."""
    loop, left = Loop("ddp", size), root / "left"
    try:
        with opened(loop, root, last) as ckpt:
            ckpt.restore()
            for n in range(1, 6):
                loop.step(n)
                ckpt.step(n)
            if rank == faulty_rank:
                begun = time.monotonic()
                raise ArithmeticError("the loop fails")
            while not left.exists():
                time.sleep(0.05)
            os._exit(0)
    except ArithmeticError:
        (root / "left.tmp").write_text(str(time.monotonic() - begun))
        (root / "left.tmp").rename(left)


def preempted(rank: int, size: int, root: Path, last: Path) -> int:
    """Rank 0 receives a signal; returns the exit code."""
    loop = Loop("ddp", size)
    try:
        with opened(loop, root, last, preemption=lastgood.Preemption(grace_seconds=60)) as ckpt:
            ckpt.restore()
            for n in range(1, 10_000):
                loop.step(n)
                ckpt.step(n)
                time.sleep(0.01)
                if n == 5 and rank == 0:
                    signal.raise_signal(signal.SIGTERM)
    except SystemExit as end:
        dist.barrier()
        return int(end.code or 0)
    return 0


def protected(rank: int, size: int, root: Path, upto: int, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Train in one place with parity; each save is verified and protected before the next begins; as `trained`."""
    loop, losses, events = Loop("fsdp" if size > 1 else "plain", size), [], list[str]()
    settings = {"cadence": lastgood.Every(steps=2), "parity": "3+1", "patience": PATIENCE, **(options or {})}
    with lastgood.Checkpointer(root, loop.state, on_event=lambda one: events.append(one.kind), **settings) as ckpt:
        found = ckpt.restore()
        for n in range(found.step + 1, upto + 1):
            losses.append(loop.step(n))
            ckpt.step(n)
            ckpt.wait()
    return {"step": found.step, "losses": losses, "repaired": found.repaired, "events": events}


def scrubbed(rank: int, size: int, root: Path, upto: int) -> list[str]:
    """Train and scrub: each round of upkeep has ended before the next save begins. Returns the events."""
    loop, events = Loop("fsdp", size), list[str]()
    options = {"parity": "3+1", "scrub": lastgood.Scrub(seconds=0.0), "retention": lastgood.Keep(last=99)}
    with lastgood.Checkpointer(root, loop.state, on_event=lambda one: events.append(one.kind), **options) as ckpt:
        for n in range(ckpt.restore().step + 1, upto + 1):
            loop.step(n)
            ckpt.save(n).result()
            for _ in range(2):
                ckpt._pipeline._upkeep_thread.submit(int).result()
            dist.barrier()
            with reports():  # the damage that the scrub has found
                ckpt.step(n)
    return events


def on_nodes(
    rank: int, size: int, root: Path, last: str, upto: int, environ: Mapping[str, str], nodes: Sequence[str]
) -> dict[str, Any]:
    """As `trained`, on the node of this rank (its name in `nodes`)."""
    return trained(rank, size, root, last, upto, {**environ, "LASTGOOD_NODE": nodes[rank]})


def restored(rank: int, size: int, root: Path, last: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Restore; returns the step, from where, and a digest of all parameters and of the optimizer's state."""
    os.environ.update(environ)
    loop = Loop("fsdp" if size > 1 else "plain", size)
    with opened(loop, root, last) as ckpt:
        found = ckpt.restore()
    seen = hashlib.sha256()
    for one in loop.net.parameters():
        for tensor in (one, *(loop.optimizer.state[one][name] for name in ("exp_avg", "exp_avg_sq"))):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            seen.update(whole.detach().numpy().tobytes())
    return {"step": found.step, "sources": list(found.sources), "digest": seen.hexdigest()}


def killed(rank: int, size: int, root: Path, last: str, environ: Mapping[str, str]) -> None:
    """As `trained`; all ranks are killed between the pack of the first copy and its COMMIT."""
    packed = root / "packed"

    def kill(*_: Any) -> None:
        packed.touch()
        os._exit(9)

    def follow() -> None:
        while not packed.exists():
            time.sleep(0.02)
        os._exit(9)

    if rank == 0:
        commit.copy_records = kill
    else:
        threading.Thread(target=follow).start()
    trained(rank, size, root, last, 4, environ)


def replicas_restored(
    rank: int, size: int, url: str, upto: int, environ: Mapping[str, str], room: bool = True
) -> dict[str, Any]:
    """Restore and train under DDP in one place; returns the step, the bytes of each source, and the losses.

    `room`: whether this machine has room for a file that its ranks share.
    """
    os.environ.update(environ)
    if not room:
        node_cache._made = lambda path, length: False
    loop = Loop("ddp" if size > 1 else "plain", size)
    with lastgood.Checkpointer(url, loop.state, cadence=lastgood.Every(steps=2), patience=PATIENCE) as ckpt:
        found = ckpt.restore()
        losses = []
        for n in range(found.step + 1, upto + 1):
            losses.append(loop.step(n))
            ckpt.step(n)
    return {"step": found.step, "sources": {name: one.bytes for name, one in found.sources.items()}, "losses": losses}

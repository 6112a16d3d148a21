"""Loading: the newest good generation -> the live state. Checks that it fits before anything is touched."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..engine.arena import Arena
from ..errors import Damaged, HalfLoaded, Unavailable
from ..format.commit import Survey
from ..ports import Tier
from ..rawio.files import round_up
from ..records import Finding, Generation, Manifest
from ..run import reader
from .state import Stored, from_bytes, match


@dataclass(frozen=True)
class Restored:
    """What a restore did. `step` is 0 and `generation` None when there was nothing to restore."""

    step: int
    generation: Generation | None
    seconds: float
    bytes: int
    stepped_over: list[tuple[int, str]] = field(default_factory=list)
    """(step, reason) of what is newer and not good"""
    skipped: list[str] = field(default_factory=list)
    """with strict=False: what did not fit"""


@dataclass(frozen=True)
class Request:
    """How a generation is to meet the live state; see `Checkpointer.restore`."""

    state: MutableMapping[str, Any]
    strict: bool = True
    rename: Mapping[str, str] | None = None
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()


def _half_of_memory_bytes() -> int:
    """What a restore takes at the most; a generation that is larger, or claims to be, is read twice, in parts."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # "max", or no such limit here
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return memory // 2


def load_into(
    request: Request,
    tier: Tier,
    survey: Survey,
    step: int | None,
    arena_for: Callable[[int, int], Arena],
    workers: Executor,
    examine: Callable[[Generation], list[Finding]],
    mark: Callable[[Generation, list[Finding]], None] = lambda *_: None,
) -> Restored:
    """Load the newest good generation of the lineage (or `step`) into the live state.

    `arena_for(image bytes, chunk bytes)` lends the memory. Raises StateMismatch, NoSuchStep, NothingGood, Unavailable,
    each before the live state is touched; HalfLoaded when it is not.
    """
    begun = time.monotonic()
    skipped: list[str] = []
    touched: list[int] = []

    def load(generation: Generation, manifest: Manifest) -> None:
        pieces = {piece.name: piece for piece in manifest.pieces}
        shapes = {name: (piece.dtype, tuple(piece.shape)) for name, piece in pieces.items()}
        shapes |= {alias: shapes[name] for alias, name in manifest.aliases.items()}
        fit = match(
            request.state,
            Stored(step=manifest.step, tensors=shapes, aliases=manifest.aliases, values=manifest.values),
            strict=request.strict,
            rename=request.rename,
            include=request.include,
            exclude=request.exclude,
        )
        size = min(sum(round_up(blob.length, blob.chunk_bytes) for blob in manifest.blobs), _half_of_memory_bytes())
        arena = arena_for(size, max((blob.chunk_bytes for blob in manifest.blobs), default=1))
        fetch = reader.opened(tier, generation, manifest, arena, workers)

        def fetched(name: str) -> torch.Tensor:
            data = fetch(name)
            raw = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
            return from_bytes(raw, *shapes[name])

        touched.append(manifest.step)
        fit.apply(fetched)
        touched.clear()
        skipped[:] = fit.skipped

    try:
        found = reader.newest_good(tier, survey, step, load, examine, mark)
    except (Damaged, Unavailable) as error:
        if not touched:
            raise
        raise HalfLoaded(
            f"{error.what}; loading step {touched[-1]} had begun",
            safe="\nThe generations are untouched. The live state is part of that step: do not train on it.",
            todo="Build the state anew and restore again, or ask for another step.",
        ) from error
    return Restored(
        step=found.generation.step if found.generation else 0,
        generation=found.generation,
        seconds=time.monotonic() - begun,
        bytes=found.generation.bytes if found.generation else 0,
        stepped_over=found.stepped_over,
        skipped=skipped,
    )

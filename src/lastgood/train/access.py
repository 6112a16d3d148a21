"""A run without a training loop: open it to read, save once, load once."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ..engine.arena import Arena
from ..format import commit, layout
from ..records import Finding, Generation
from ..run import places
from ..run.reader import WORKERS, RunReader, read_all
from ..run.writer import RunWriter
from . import staging
from .capture import finite
from .exempt import untrained
from .loading import Request, Restored, load_into, report
from .state import capture
from .tensors import from_buffer


class Run(RunReader):
    """A run, for reading only; see `lastgood.open`."""

    def tensor(self, name: str, step: int | None = None) -> torch.Tensor:
        """One tensor by its stored name, from the newest undamaged generation or from `step`.

        Reads its bytes only and checks them against its digest. CPU tensor. Raises NoSuchStep, NoSuchTensor, Damaged.
        """
        tensor, data = self.bytes_of(name, step)
        return from_buffer(data, tensor.dtype, tensor.shape)


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open a run for reading; changes nothing and needs no lock. Raises NotARun, NotWritable."""
    return Run(places.for_reading(path))


def save_once(path: str | os.PathLike[str], state: MutableMapping[str, Any], step: int = 0) -> Generation:
    """Save a state as a new generation of the run at `path` (made if need be) and wait until it is durable.

    It continues the newest generation that is there; nothing is deleted. Raises what a Checkpointer raises.
    """
    captured = capture(state)  # refuses before anything is made
    with places.for_writing(path, "atomic_dirsync") as disk, ThreadPoolExecutor(WORKERS, "lastgood-write") as workers:
        run = RunWriter(disk, workers)
        newest = next(iter(run.lineage()), None)
        run.begin(newest.id if newest else None)
        tensors = captured.tensors
        images = staging.lay_out(tensors, finite(captured, exempt=untrained(state, captured)))
        arena = Arena(2 * WORKERS * layout.CHUNK_BYTES, layout.CHUNK_BYTES)
        chunks = staging.in_chunks(images, arena.chunk_bytes)
        generation = run.save(
            run.admit(step),
            images,
            staging.Snapshot(chunks, tensors, staging.devices(tensors), arena).fill(),
            aliases=captured.aliases,
            values=captured.values,
        )
        run.verify(arena)
        return generation


def load_once(
    path: str | os.PathLike[str],
    state: MutableMapping[str, Any],
    step: int | None = None,
    strict: bool = True,
    rename: Mapping[str, str] | None = None,
) -> Restored:
    """Load the newest good generation (or `step`) into a live state; the run itself is not changed or locked.

    Raises NotARun, StateMismatch, NoSuchStep, Damaged, NothingGood; the live state is untouched then. HalfLoaded when
    it is not.
    """
    tier = places.for_reading(path)

    with ThreadPoolExecutor(WORKERS, "lastgood-read") as workers:
        small = Arena(3 * layout.CHUNK_BYTES, layout.CHUNK_BYTES)

        def examine(generation: Generation) -> list[Finding]:
            return read_all(tier, generation, small, workers)

        found = load_into(Request(state, strict, rename), tier, commit.survey(tier), step, Arena, workers, examine)
    report(found, "loaded")
    return found

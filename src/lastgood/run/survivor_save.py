"""A generation of all ranks, written and committed by one of them after another one has died.

Invariants
  1. It is written by a new opening of the run, under the lock of the run: no other process commits meanwhile, and what
     the dead attempt has left unfinished is settled first.
  2. Nothing is committed if anything was committed since the state that is to be saved (`Origin.is_superseded`).
  3. The commit protocol is that of every save (save.py): until COMMIT exists there is no generation, and every earlier
     one stays as it is.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from ..engine.write_file import Chunk
from ..errors import CommitUnknown, NameTaken
from ..format.layout import Image
from ..limits import WORKERS
from ..policy.retention import Keep
from ..records import Generation, GenerationId, Incarnation
from ..storage.directory import WriteMode
from . import access
from .save import ReadyChunks, SaveRequest, write_part
from .writer import RunWriter


@dataclass(frozen=True, kw_only=True)
class RankContent:
    """What the manifest of one rank holds. `chunks`: yields the bytes of `images`, in their order."""

    images: Sequence[Image]
    chunks: Iterator[Chunk]
    chunk_bytes: int
    aliases: Mapping[str, str]
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """From what the state descends. `incarnation`: in which the attempt has saved, or would have; None: in none yet."""

    step: int
    incarnation: Incarnation | None

    def parent(self, generations: Sequence[Generation]) -> GenerationId | None:
        """The generation that a save of the state continues; None: it starts from scratch.

        Of `generations`: the newest of the attempt, else the one that the attempt has continued.
        """
        mine = self.incarnation
        if mine is None:
            return None
        return max((one.id for one in generations if one.id.incarnation == mine.id), default=mine.parent)

    def is_superseded(self, generations: Sequence[Generation]) -> bool:
        """Whether one of `generations` holds this step or a later one, or was saved by a later opening of the run."""
        order = self.incarnation.order if self.incarnation is not None else 0
        own = self.incarnation.id if self.incarnation is not None else ""
        return any(
            one.step >= self.step if one.id.incarnation == own else one.commit.order >= order for one in generations
        )


def save_for_all(
    path: str | os.PathLike[str],
    origin: Origin,
    ranks: Sequence[RankContent],
    *,
    mode: WriteMode,
    algorithm: str,
    keep: Keep,
) -> Generation | None:
    """Save the state of all `ranks` as one generation, durable on return. None: a generation of this step exists.

    `path`: the directory of the run. `mode`, `algorithm`, `keep`: as the attempt has saved. Raises RunLocked while
    another process has the run open, and what a save raises: no generation exists then, except after CommitUnknown,
    where it may.
    """
    with access.for_writing(path, mode) as tier, ThreadPoolExecutor(WORKERS, "lastgood-write") as workers:
        run = RunWriter(tier, workers, keep=keep, algorithm=algorithm)
        generations = [*run.survey.generations.values()]
        if origin.is_superseded(generations):  # guard: newer-generation-not-shadowed
            return None
        run.begin(origin.parent(generations))
        at = run.admit(origin.step)
        with _cleared_on_failure(run, at):
            parts = []
            for rank, content in enumerate(ranks):
                request = SaveRequest(
                    at=at,
                    images=content.images,
                    chunks=ReadyChunks(content.chunks),
                    chunk_bytes=content.chunk_bytes,
                    aliases=content.aliases,
                    values=content.values,
                )
                parts.append(write_part(request, replace(run.rank_writer(workers), rank=rank)))
            return run.publish(at, parts, pinned=False, milestone=False, metrics={})


@contextlib.contextmanager
def _cleared_on_failure(run: RunWriter, at: GenerationId) -> Iterator[None]:
    """Remove the files of a save that fails in the block, unless its generation may exist."""
    try:
        yield
    except (CommitUnknown, NameTaken):
        raise
    except BaseException:
        run.clear(at)
        raise

"""What the ranks of an attempt have left for a just-in-time save, and its commit once no rank is left.

    watch    whether the survivors have written all of a step, so that the attempt may end
    end      what the ranks of this node have left in memory is read, before that memory is freed
    decide   the node that decides commits it, from what all nodes report

The ranks and this process never wait for each other (loop/just_in_time.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .. import reporting
from ..errors import LastgoodError
from ..io import os_errors, rank_notes
from ..policy import survival
from ..run.survivor_notes import Note, Written, decoded
from ..run.survivor_save import commit_for_all
from .watch import RankProcess


@dataclass
class Left:
    """What ranks have left. `notes`: rank -> its newest notes, two at most. `written`: of survivors, one each."""

    notes: dict[int, list[bytes]] = field(default_factory=dict)
    written: list[bytes] = field(default_factory=list)


def left_by(ranks: Sequence[RankProcess]) -> Left:
    """What these ranks, which have ended, have left in the memory of this node."""
    found = Left()
    for one in ranks:
        notes, result = [*rank_notes.read(str(one.page))], rank_notes.read_result(str(one.page))
        if notes:
            found.notes[one.rank] = notes
        if result is not None:
            found.written.append(result)
    return found


def merged(several: Sequence[Left]) -> Left:
    """What the ranks of several nodes have left."""
    notes = {rank: notes for one in several for rank, notes in one.notes.items()}
    return Left(notes, [result for one in several for result in one.written])


def is_complete(left: Left, ranks: int) -> bool:
    """Whether the survivors have written all of a step. `ranks`: of the job."""
    return _decoded(left).chosen(ranks).step is not None


def committed(left: Left, ranks: int, run: str, lost: str = "") -> int | None:
    """Commit the newest step that survivors have written, and report it. Returns the step; None: nothing is committed,
    and why is reported, unless no survivor has written anything.

    `ranks`: of the job. `run`: the last place of the run. `lost`: a text about nodes that are lost with what their
    ranks have noted; empty: none is.
    """
    found = _decoded(left)
    beside = f" ({lost})" if lost else ""
    if not found.written and not (lost and found.notes):
        return None
    chosen = found.chosen(ranks)
    if chosen.step is None:
        reporting.warning(f"{run}: no just-in-time save: {chosen.why}{beside}")
        return None
    step, began = chosen.step, time.monotonic()
    written = [one for one in found.written if one.step == step]
    notes = [found.notes[rank][step] for rank in range(ranks)]
    try:
        with os_errors.threads(run, "What was committed before is safe."):
            generation = commit_for_all(notes, written, run)
    except LastgoodError as error:
        reporting.threat(f"{run}: the just-in-time save of step {step} failed: {error}")
        return None
    if generation is None:
        return None
    by, seconds = survival.listed([one.rank for one in written]), time.monotonic() - began
    reporting.warning(f"{run}: {by} saved step {step} for all ranks, committed in {seconds:.1f} s")
    return step


@dataclass(frozen=True)
class _Decoded:
    """What was left in the newest opening of the run. `notes`: rank -> step -> note."""

    notes: Mapping[int, Mapping[int, Note]]
    written: Sequence[Written]

    def chosen(self, ranks: int) -> survival.Choice:
        """As the policy chooses."""
        noted = {rank: {step: one.noted for step, one in steps.items()} for rank, steps in self.notes.items()}
        written = dict[int, set[survival.Holders]]()
        for one in self.written:
            written.setdefault(one.step, set()).update(tuple(held) for held in one.held)
        return survival.choose(ranks, noted, written)


def _decoded(left: Left) -> _Decoded:
    results = [one for data in left.written if (one := decoded(data, Written)) is not None]
    notes = {
        rank: [note for data in several if (note := decoded(data, Note)) is not None]
        for rank, several in left.notes.items()
    }
    newest = max(results, key=lambda one: one.step, default=None)
    opening = None if newest is None else newest.opening
    return _Decoded(
        {rank: {one.step: one for one in several if opening in (None, one.opening)} for rank, several in notes.items()},
        [one for one in results if one.opening == opening],
    )

"""The notes of the job that `lastgood bench restart` runs, and the times between them.

Imports nothing that takes long: a rank notes when its script begins, before it imports torch.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FAULT_RANK, FAULT_STEP, LAST_STEP = 1, 12, 14
GROUP_SECONDS = 10.0
"""timeout of the process group"""
NOTES, RUN = "notes.jsonl", "run"
MARKS = ("began", "imported", "joined", "restored", "step")
"""the notes of an attempt, in their order"""
FAULT = "fault"
PHASES = ("until the scripts begin", "imports", "process group, model", "restore", "first step")
"""The times between the notes. The first one begins with the fault."""


class Note(NamedTuple):
    """One line of the notes. `step`: 0 where none was completed. `at`: seconds of the system-wide monotonic clock."""

    what: str
    attempt: int
    rank: int
    step: int
    at: float


class Restarted(NamedTuple):
    """From the fault to the first new step. `phases`: seconds, in the order of PHASES."""

    seconds: float
    phases: list[float]


def attempt() -> int:
    """The number of the attempt of this rank, from 0."""
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def write(folder: Path, what: str, step: int = 0) -> None:
    """Append a note of this rank, in one write."""
    line = json.dumps(Note(what, attempt(), int(os.environ["RANK"]), step, time.monotonic()))
    with open(folder / NOTES, "ab", buffering=0) as file:
        file.write(line.encode() + b"\n")


def read(folder: Path) -> list[Note]:
    """All notes of a job, in the order in which they were written."""
    return [Note(*json.loads(line)) for line in (folder / NOTES).read_text().splitlines()]


def restarted(notes: Sequence[Note]) -> Restarted:
    """How long it took from the fault in the first attempt until all ranks had completed a new step in the second one.

    A mark is reached when the last rank reaches it. Raises ValueError if there is not one fault, or if the second
    attempt does not begin with the step of the fault on all ranks.
    """
    (failed_at,) = (one.at for one in notes if one.what == FAULT)
    ranks = {one.rank for one in notes}
    reached = [failed_at]
    for mark in MARKS:
        found = [one for one in notes if one.attempt == 1 and one.what == mark]
        first = {one.rank: one for one in reversed(found)}
        if set(first) != ranks or (mark == "step" and {one.step for one in first.values()} != {FAULT_STEP}):
            raise ValueError(f"not every rank has noted {mark!r} of step {FAULT_STEP} in its second attempt: {found}")
        reached.append(max(one.at for one in first.values()))
    phases = [end - begin for begin, end in itertools.pairwise(reached)]
    return Restarted(reached[-1] - failed_at, phases)

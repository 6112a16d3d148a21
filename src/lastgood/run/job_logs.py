"""Logs of a job under `lastgood run --records DIR`: a line for each step of each rank, and for each save of rank 0.

    rank_0000.jsonl          a StepLine for each step of this rank
    checkpoint_rank0.jsonl   a SaveLine for each save of rank 0 that has ended, each restore, and each end

They are there for people and programs that study a run; nothing is decided by them. Attempts add to the same files.

Invariant: each line is one write, so that a kill of the process neither loses a line nor leaves a part of one.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TypeVar

import msgspec

from .. import reporting
from ..records import Record

T = TypeVar("T", bound=Record)
VARIABLE = "LASTGOOD_RECORDS"
"""in the environment of a rank: the directory of the logs"""
SAVES = "checkpoint_rank0.jsonl"


class StepLine(Record, frozen=True, kw_only=True):
    """One step of one rank. The four fields of the samples are None if the state does not have exactly one sampler."""

    attempt: int
    """TORCHELASTIC_RESTART_COUNT: 0 for the first attempt"""
    global_step: int
    epoch: int | None
    cursor_step: int | None
    """the first window of the epoch that the step has trained"""
    sample_ids_hash: str | None
    """of the ids that this rank has trained: the sum of their hashes (data/trained.py), so that the sum over the ranks,
    modulo 2**64, is the hash of the windows"""
    sample_ids_count: int | None
    world_size: int
    rank: int
    loss: float | None
    """`metrics["loss"]` of the step; None without it, and for NaN and infinity"""
    at_seconds: float
    """of the monotonic clock of this machine"""
    stall_seconds: float
    """how long this rank has waited for saves since it opened the run"""


class SaveLine(Record, frozen=True, kw_only=True):
    """A save, as rank 0 sees it. `kind`: an event that ends a save (events.py), "restored", or "closed"."""

    kind: str
    attempt: int
    step: int
    at_seconds: float
    stall_seconds: float
    """how long the loop has waited for saves since it opened the run"""
    seconds: float = 0.0
    """of the event: for "durable" from the first write to the commit; for "restored", of the restore"""
    enqueue_seconds: float = 0.0
    """that the call took which began the save, without the wait for a place in flight"""
    backpressure_seconds: float = 0.0
    """that the loop waited for a place in flight"""
    fence_seconds: float = 0.0
    """that the loop waited, before an update, until the state was copied"""
    snapshot_seconds: float = 0.0
    """that copying the state took, as a rule behind the loop"""
    write_seconds: float = 0.0
    """that writing this rank's part took, as a rule behind the loop"""
    bytes: int = 0
    """of the files of the generation"""


class Lines:
    """The lines of one log. `path`: of its file, which is made if it does not exist.

    A failure is reported once, and the log ends with it: training does not depend on it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            self._give_up(str(error))

    def add(self, line: Record) -> None:
        """Append a line. Raises nothing."""
        if self._descriptor is None:
            return
        data = msgspec.json.encode(line) + b"\n"
        try:
            if os.write(self._descriptor, data) != len(data):
                self._give_up("a line was written in part")
        except OSError as error:
            self._give_up(str(error))

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _give_up(self, why: str) -> None:
        reporting.warning(f"{self._path} ends here ({why}); training goes on")
        self.close()


def rank_log(rank: int) -> str:
    """The name of the log of a rank."""
    return f"rank_{rank:04d}.jsonl"


def steps(folder: str | os.PathLike[str], rank: int) -> list[StepLine]:
    """The steps of a rank, of all attempts, in the order in which they were trained. Damaged lines are left out."""
    return _read(Path(folder, rank_log(rank)), StepLine)


def saves(folder: str | os.PathLike[str]) -> list[SaveLine]:
    """The saves of rank 0, of all attempts. Damaged lines are left out."""
    return _read(Path(folder, SAVES), SaveLine)


def _read(path: Path, kind: type[T]) -> list[T]:
    found = list[T]()
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with contextlib.suppress(msgspec.DecodeError):  # cut off by a full disk
            found.append(msgspec.json.decode(line, type=kind))
    return found

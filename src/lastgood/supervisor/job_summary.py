"""The summary of a job under `lastgood run --records DIR`: supervisor.json, written anew when an attempt has ended."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from .. import reporting
from ..errors import Refused
from ..records import Record
from .attempt_log import Attempt

NAME = "supervisor.json"


class Summary(Record, frozen=True, kw_only=True):
    """The attempts so far; those of several supervisors, one after another, if they were given the same directory."""

    attempts: list[Attempt] = msgspec.field(default_factory=list)
    restarts: int = 0
    """attempts that were followed by another one"""
    end: str = ""
    """why no further attempt followed; empty while the job goes on"""


def opened(folder: Path) -> Summary:
    """Make the directory of the logs. Returns the summary of the jobs that had their logs there before.

    Raises Refused where that cannot be.
    """
    path = folder / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return msgspec.json.decode(path.read_bytes(), type=Summary) if path.exists() else Summary()
    except msgspec.DecodeError as error:
        todo = f"Move {NAME} away if it is damaged, or give a new directory."
        raise Refused(f"--records {path}: {error}", safe="Nothing was started.", todo=todo) from error
    except OSError as error:
        todo = "Give a new directory that can be written."
        raise Refused(f"--records {folder}: {error}", safe="Nothing was started.", todo=todo) from error


def added(summary: Summary, attempt: Attempt, restarts: bool) -> Summary:
    """The summary with one more attempt. `restarts`: whether another one follows."""
    numbered = msgspec.structs.replace(attempt, number=len(summary.attempts) + 1)
    end = "" if restarts else attempt.answer
    return Summary(attempts=[*summary.attempts, numbered], restarts=summary.restarts + restarts, end=end)


def add(folder: Path, attempt: Attempt, restarts: bool) -> None:
    """Add one more attempt to the file. A failure is reported: the job does not depend on it.

    The file is read each time: with several nodes, another one may have decided about the attempt before.
    """
    draft = folder / f"{NAME}.tmp"
    try:
        data = msgspec.json.format(msgspec.json.encode(added(opened(folder), attempt, restarts)))
        with open(draft, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # or a power loss may leave an empty file under the name
        os.replace(draft, folder / NAME)
    except (OSError, Refused) as error:
        reporting.warning(f"{folder / NAME} was not written: {error}")

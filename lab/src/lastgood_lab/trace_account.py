"""What the notes of a training show that was killed at known times: steps, time without steps, steps trained twice.

Pure.

goodput       = completed steps x seconds of a step without saves / seconds of the replay
of ideal      = completed steps / those that saves would permit which cost nothing and lose nothing; the time until
                training goes on again is the same
uncompressed  = the goodput if the same costs came at the times of the trace itself: a machine takes as long to be
                replaced, however the time between two failures is compressed
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

Note = Mapping[str, Any]


class Account(NamedTuple):
    """One replay. `seconds`: of the replay. `trace_seconds`: of the part of the trace that it replays."""

    seconds: float
    trace_seconds: float
    plain_seconds: float
    """of a step without saves and failures"""
    steps: int
    """completed at the end, since the one with which the time begins"""
    redone: list[int]
    """for each failure: steps that were trained again"""
    down: list[float]
    """for each failure: seconds until training was where a step begins again"""
    step_seconds: float
    """mean time from one step to the next one, saves included"""
    save_seconds: float
    """median of a save"""

    @property
    def goodput(self) -> float:
        return self.steps * self.plain_seconds / self.seconds

    @property
    def of_ideal(self) -> float:
        return self.steps * self.plain_seconds / (self.seconds - sum(self.down))

    @property
    def uncompressed(self) -> float:
        lost = sum(self.down) + sum(self.redone) * self.step_seconds
        return (1 - lost / self.trace_seconds) * self.plain_seconds / self.step_seconds


def account(
    notes: Sequence[Note], failures: Sequence[float], begun: float, ended: float, trace_seconds: float, plain: float
) -> Account:
    """Account for a replay. `failures`: their times, `begun` and `ended`: of the same clock as the notes.

    The time begins when a step has ended. `plain`: seconds of a step without saves and failures.
    """
    lines = sorted((one for one in notes if begun <= one["at"] <= ended), key=lambda one: one["at"])
    trained = [one for one in lines if one["what"] in ("restored", "step")]
    lives = _lives(trained)
    redone, down = list[int](), list[float]()
    for failed, until in pairwise([*failures, ended]):
        # A rank that was not killed may complete a step after the failure: that still belongs to the life before.
        at, after = next(
            ((at, one) for at, one in enumerate(lives) if failed < one[0]["at"] < until and len(one) > 1), (0, None)
        )
        trained_before = [life[-1]["step"] for life in lives[:at] if life[-1]["what"] == "step"]
        redone.append(trained_before[-1] - after[0]["step"] if after and trained_before else 0)
        down.append(max(0.0, after[1]["at"] - after[1]["seconds"] - failed) if after else until - failed)
    gaps = [b["at"] - a["at"] for life in lives for a, b in pairwise(life[1:])]
    saves = [one for one in lines if one["what"] == "saved"]
    return Account(
        seconds=ended - begun,
        trace_seconds=trace_seconds,
        plain_seconds=plain,
        steps=max(0, _kept(trained, saves, failures[-1] if failures else begun) - _first(trained)),
        redone=redone,
        down=down,
        step_seconds=statistics.fmean(gaps) if gaps else plain,
        save_seconds=statistics.median(one["seconds"] for one in saves) if saves else 0.0,
    )


def _kept(trained: Sequence[Note], saves: Sequence[Note], failed: float) -> int:
    """The step that counts at the end: the newest one; if nothing came back after the last failure, what was saved."""
    if not trained:
        return 0
    if trained[-1]["what"] == "restored" or trained[-1]["at"] > failed:
        return int(trained[-1]["step"])
    return max((int(one["step"]) for one in saves if one["at"] <= failed), default=0)


def _first(trained: Sequence[Note]) -> int:
    """The step with whose end the time begins."""
    return int(trained[0]["step"]) if trained else 0


def _lives(trained: Sequence[Note]) -> list[list[Note]]:
    """The notes of each start: what was restored, then its steps. Those of the first one may begin with a step."""
    found = list[list[Note]]()
    for one in trained:
        if one["what"] == "restored" or not found:
            found.append([])
        found[-1].append(one)
    return found

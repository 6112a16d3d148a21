"""What happened in demo/recovery.py, read from its files: lives of ranks, attempts, faults, and the checks.

It reads the attempts in the run, the logs of `lastgood run --records`, and the notes of the ranks. It starts nothing,
and judges only what is in these files. Times are seconds of the monotonic clock, which processes of a machine share.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from proof import Check
from recovery_train import BATCH

import lastgood
from lastgood.run import job_logs, side_records
from lastgood.run.job_logs import StepLine
from lastgood.supervisor import attempt_log
from lastgood.supervisor.attempt_log import Attempt

RANKS = 4


class Kind(NamedTuple):
    """A kind of fault. `name`, `short`: for people. `cause`: kind and text of the first cause that must be named."""

    name: str
    short: str
    cause: tuple[str, str]
    lost: bool = False
    """whether processes are lost by it"""


KILLED = Kind("a rank is killed (SIGKILL)", "rank killed", ("signal", "SIGKILL"), lost=True)
HUNG = Kind("a rank hangs (SIGSTOP)", "rank hangs", ("hang", "it is stopped"))
NAN = Kind("a loss is NaN", "loss is NaN", ("exception", "TrainingDiverged"))
NODE = Kind("a node is lost", "node lost", ("node", "no sign of life"), lost=True)


class Life(NamedTuple):
    """A rank in an attempt. `local`: its number on its node. `restored`: when; None: never."""

    attempt: int
    rank: int
    node: str
    local: int
    pid: int
    opened: float
    restored: float | None


class Blow(NamedTuple):
    """A fault as it was made. `ranks`: that it has hit, of `node`. `saved`: step of the newest good save before it."""

    kind: Kind
    at: float
    ranks: tuple[int, ...]
    node: str
    saved: int


class Finish(NamedTuple):
    """What rank 0 has noted at the end, of the samples of all ranks."""

    at: float
    scheduled: int
    observed: int
    exact: bool
    left_out: list[list[int]]
    samples_left_out: int


@dataclass(frozen=True)
class Story:
    """A job from its start to its end, as its files have it. `steps`: rank -> its steps in all attempts, in order."""

    attempts: list[Attempt]
    lives: list[Life]
    steps: dict[int, list[StepLine]]
    finish: Finish | None
    blows: list[Blow]
    reserve: tuple[str, float] | None
    """the node in reserve, and when it was started"""
    monotonic_offset: float
    """from the time of day to the monotonic clock"""

    def began(self, number: int) -> float:
        return self.attempts[number].began_at + self.monotonic_offset

    def over(self, number: int) -> float:
        """When no process of an attempt was left."""
        return self.began(number) + self.attempts[number].seconds

    def noticed(self, number: int) -> float:
        """When the first failure of an attempt was noticed; its end, if there was none."""
        return self.over(number) - self.attempts[number].phases.get("tear down", 0.0)

    def reached(self, number: int) -> int:
        """The newest step of rank 0 in an attempt and those before."""
        return max((one.global_step for one in self.steps[0] if one.attempt <= number), default=0)

    def back(self, number: int) -> float | None:
        """When the job had again trained the step that attempt `number` had reached; None: never."""
        later = [one for one in self.steps[0] if one.attempt > number and one.global_step >= self.reached(number)]
        return later[0].at_seconds if later else None


def lives(notes: Path) -> list[Life]:
    """The ranks that have opened the run, in that order, from their notes."""
    found = dict[tuple[int, int], Life]()
    for one in _noted(notes):
        at = one["attempt"], one["rank"]
        if one["what"] == "opened":
            found[at] = Life(*at, one["node"], one["local"], one["pid"], one["at"], None)
        elif one["what"] == "restored":
            found[at] = found[at]._replace(restored=one["at"])
    return [*found.values()]


def story(run: Path, records: Path, notes: Path, blows: list[Blow], reserve: tuple[str, float] | None = None) -> Story:
    """Read all files of a job that has ended."""
    with side_records.opened(str(run)) as tier:
        attempts = attempt_log.read(tier)
    finish = next((one for one in _noted(notes) if one["what"] == "finished"), None)
    return Story(
        attempts=attempts,
        lives=lives(notes),
        steps={rank: job_logs.steps(records, rank) for rank in range(RANKS)},
        finish=None if finish is None else Finish(*(finish[name] for name in Finish._fields)),
        blows=blows,
        reserve=reserve,
        monotonic_offset=time.monotonic() - time.time(),
    )


def _noted(notes: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []


# ---- the checks --------------------------------------------------------------------------------------------------


def checks(calm: Story, healed: Story, calm_run: Path, run: Path, total: int) -> list[Check]:
    """Hold a job with faults against one without them that has left out the same batches."""
    return [*_recovered(healed), *_same(calm, healed, calm_run, run, total)]


def _recovered(healed: Story) -> list[Check]:
    blows, attempts = healed.blows, healed.attempts
    named = [named_right(blow, attempt) for blow, attempt in zip(blows, attempts, strict=False)]
    kinds = ", ".join(blow.kind.short for blow in blows)
    one_each = len(attempts) == len(blows) + 1 and attempts[-1].cause is None
    pairs = [*zip(blows, attempts[1:], strict=False)]
    newest = [after.restored_step is not None and after.restored_step >= blow.saved for blow, after in pairs]
    again = sum(one.replayed_steps for one in attempts)
    return [
        Check("a restart for each fault", f"{len(attempts)} attempts for {len(blows)}: {kinds}", one_each),
        Check("the right first cause", f"{sum(named)} of {len(blows)} named", len(named) == len(blows) and all(named)),
        Check(
            "newest good save restored",
            f"{sum(newest)} of {len(blows)} restarts; {again} steps trained again",
            len(newest) == len(blows) and all(newest),
        ),
        *([_replaced(healed)] if any(blow.kind is NODE for blow in blows) else []),
    ]


def named_right(blow: Blow, attempt: Attempt) -> bool:
    """Whether the record of an attempt has the fault that was made as its first cause."""
    kind, text = blow.kind.cause
    cause = attempt.cause
    if cause is None or cause.kind != kind or text not in cause.what:
        return False
    if blow.kind is NODE:
        return blow.node in cause.what and cause.rank == min(blow.ranks)
    if blow.kind is NAN:  # all ranks raise at the same step; the text names the one whose loss it was
        return any(f"rank {rank}," in cause.what for rank in blow.ranks)
    return cause.rank in blow.ranks


def _replaced(healed: Story) -> Check:
    assert healed.reserve is not None
    last = [one.node for one in healed.lives if one.attempt == len(healed.attempts) - 1]
    lost = next(blow.node for blow in healed.blows if blow.kind is NODE)
    nodes = " and ".join(sorted({*last}))
    return Check(
        "the reserve takes its place",
        f"{lost} lost; at the end {nodes}",
        healed.reserve[0] in last and lost not in last,
    )


def _same(calm: Story, healed: Story, calm_run: Path, run: Path, total: int) -> list[Check]:
    expected = {(rank, one.global_step): one for rank in calm.steps for one in calm.steps[rank]}
    final = {(rank, one.global_step): one for rank in healed.steps for one in healed.steps[rank]}
    equal = sum(
        _loss_and_samples(expected[at]) == _loss_and_samples(final[at]) for at in expected.keys() & final.keys()
    )
    whole = expected.keys() == final.keys() and len(expected) == RANKS * total
    end = healed.finish
    left_out = [] if end is None else end.left_out
    kept = [one for lines in healed.steps.values() for one in lines if [one.epoch, one.cursor_step] not in left_out]
    same = sum(_loss_and_samples(one) == _loss_and_samples(expected[one.rank, one.global_step]) for one in kept)
    reference, victim = tensors(calm_run), tensors(run)
    weights = reference.keys() == victim.keys() and all(map(torch.equal, reference.values(), victim.values()))
    numbers = sum(one.numel() for one in victim.values())
    return [
        Check(
            "losses equal, bit for bit", f"{equal} of {RANKS * total} (steps x ranks)", whole and equal == len(expected)
        ),
        Check("and those trained again", f"{same} of {len(kept)} logged on the way", same == len(kept) > 0),
        Check("all tensors equal", f"{len(victim)} tensors, {numbers:,} numbers", weights and bool(victim)),
        _audited(calm, healed),
    ]


def _loss_and_samples(one: StepLine) -> tuple[object, ...]:
    return one.loss, one.epoch, one.cursor_step, one.sample_ids_hash


def _audited(calm: Story, healed: Story) -> Check:
    end, other = healed.finish, calm.finish
    if end is None or other is None:
        return Check("samples exactly once", "a job has not finished", False)
    nan = any(blow.kind is NAN for blow in healed.blows)
    listed = end.samples_left_out == BATCH * len(end.left_out) and bool(end.left_out) == nan
    holds = end.exact and other.exact and end[1:] == other[1:] and listed
    found = f"{end.observed:,} of {end.scheduled:,}; {end.samples_left_out} left out after a NaN, and listed"
    return Check("samples exactly once", found, holds)


def tensors(run: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest generation of a run, of all ranks."""
    opened = lastgood.open(run)
    return {name: opened.tensor(name) for name in sorted(opened.content().tensors())}

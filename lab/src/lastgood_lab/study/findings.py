"""What the logs of a unit show: committed steps, the parts of the wall time, and whether they fit together. Pure.

    goodput = committed logical steps / wall time
    wall    = launch + compute + snapshot + write + sync + recovery + end        all of rank 0, in seconds

`snapshot`: the loop was in the call that begins a save. `write`: it waited for a save to end, or for a place in flight.
`sync`: it waited before an update until the state was copied. `recovery`: from the last line of an attempt that failed
until the next one has restored and has trained its last step again, without the waits for saves in these steps.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count, pairwise

import msgspec

import lastgood
from lastgood.data.trained import multiset_hash
from lastgood.run.job_logs import SaveLine, StepLine
from lastgood.supervisor.attempt_log import Attempt

from .conditions import Expected
from .environment import Environment
from .unit import Unit

NOT_CHECKED = "not checked, because the target was not reached"


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is known of a unit that has ended. Times: of the monotonic clock, in seconds."""

    code: int
    begun: float
    ended: float
    steps: list[list[StepLine]]
    """of each rank"""
    saves: list[SaveLine]
    attempts: list[Attempt]
    """of supervisor.json"""
    recorded: list[Attempt]
    """in the run"""
    order: lastgood.ResumableSampler
    left_out: list[tuple[int, int]] = msgspec.field(default_factory=list)
    """epoch and window of the batches that the newest generation has left out"""
    audit: str
    """what the audit in the newest generation finds; empty if every sample was trained exactly once"""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of a unit, and its gates. Each gate is empty where it passes, else says what is wrong."""

    unit: Unit
    wall: float = 0.0
    goodput: float = 0.0
    restarts: int = 0
    replayed: int = 0
    """steps that were trained again"""
    lost: int = 0
    """saves that had begun before a failure, and from which the next attempt could not go on"""
    stall: float = 0.0
    """how long the loop of rank 0 has waited for saves"""
    parts: dict[str, float] = msgspec.field(default_factory=dict)
    saves: int = 0
    losses: list[float | None] = msgspec.field(default_factory=list)
    """means over the ranks, of each committed step; None where the loss of a rank was no number, or was not logged"""
    environment: Environment | None = None
    """None: it was not recorded, like the two fields that follow"""
    date: str = ""
    """on which the unit ended, as YYYY-MM-DD"""
    load: tuple[float, float] | None = None
    """of the machine, as the mean of a minute: when the command began that has run the unit, and when the unit ended"""
    reached: str = ""
    checked: str = ""
    agreed: str = ""


def found(unit: Unit, seen: Seen) -> Found:
    """What a unit was."""
    reached = _reached(unit, seen)
    if reached:
        wall = seen.ended - seen.begun
        return Found(unit=unit, reached=reached, checked=NOT_CHECKED, agreed=NOT_CHECKED, wall=wall)
    committed = _committed(seen)
    wall, parts = seen.ended - seen.begun, _parts(seen)
    return Found(
        unit=unit,
        wall=wall,
        goodput=len(committed) / wall,
        restarts=len(seen.attempts) - 1,
        replayed=sum(one.replayed_steps for one in seen.attempts),
        lost=_lost(unit, seen),
        stall=parts["snapshot"] + parts["write"] + parts["sync"],
        parts=parts,
        saves=sum(one.kind == "durable" for one in seen.saves),
        losses=[_loss(lines) for lines in committed],
        checked=_checked(unit, seen, committed),
        agreed=_agreed(unit, seen),
    )


def _loss(lines: Sequence[StepLine]) -> float | None:
    losses = [one.loss for one in lines if one.loss is not None]
    return statistics.fmean(losses) if len(losses) == len(lines) else None


def _reached(unit: Unit, seen: Seen) -> str:
    """Gate 1: the target is reached on each rank, after as many failures as were planned."""
    last = {max((one.global_step for one in lines), default=0) for lines in seen.steps}
    if seen.code != 0 or last != {unit.target}:
        return f"exit code {seen.code}, last steps {sorted(last)} of {unit.target}"
    return ""


def _committed(seen: Seen) -> list[list[StepLine]]:
    """The lines of the steps that the final state descends from, step by step, those of all ranks."""
    restored = [one.restored_step or 0 for one in seen.attempts]
    by_step = defaultdict[int, list[StepLine]](list)
    for lines in seen.steps:
        for one in lines:
            if one.global_step <= min(restored[one.attempt + 1 :], default=one.global_step):
                by_step[one.global_step].append(one)
    return [by_step[step] for step in sorted(by_step)]


def _windows(unit: Unit, order: lastgood.ResumableSampler) -> Iterator[tuple[int, int]]:
    """Epoch and window of each step."""
    left_out = unit.left_out(order.steps_per_epoch)
    every = (divmod(at, order.steps_per_epoch) for at in count())
    return (one for one in every if one not in left_out)


def _checked(unit: Unit, seen: Seen, committed: Sequence[Sequence[StepLine]]) -> str:
    """Gate 2: each window was trained once, by all ranks together, as the order has it; and the audit agrees."""
    for step, (lines, (epoch, window)) in enumerate(zip(committed, _windows(unit, seen.order), strict=False), 1):
        merged = sum(int(one.sample_ids_hash or "0", 16) for one in lines) % 2**64
        places = {(one.global_step, one.epoch, one.cursor_step) for one in lines}
        samples = sum(one.sample_ids_count or 0 for one in lines)
        if sorted(one.rank for one in lines) != [*range(lines[0].world_size)]:
            return f"step {step}: trained by the ranks {sorted(one.rank for one in lines)} of {lines[0].world_size}"
        if places != {(step, epoch, window)} or samples != unit.size.global_batch:
            return f"step {step}: {sorted(places, key=str)}, {samples} samples"
        if merged != multiset_hash(seen.order.order(epoch)[window]):
            return f"step {step}: other samples than those of window {window} of epoch {epoch}"
    if len(committed) != unit.target:
        return f"{len(committed)} committed steps, and not {unit.target}"
    if seen.left_out != unit.left_out(seen.order.steps_per_epoch):
        return f"left out were the batches {seen.left_out}"
    return seen.audit


def _lost(unit: Unit, seen: Seen) -> int:
    """How many saves that had begun before a failure were lost by it: they are newer than what was restored."""
    every, restored = unit.save_every, [one.restored_step or 0 for one in seen.attempts[1:]]
    return sum(failed // every - found // every for failed, found in zip(unit.failures, restored, strict=False))


def _agreed(unit: Unit, seen: Seen) -> str:
    """Gate 4: the records of supervisor and checkpoints agree, and a restart loses nothing that was durable."""
    if [(one.restored_step, one.last_step) for one in seen.attempts] != [
        (one.restored_step, one.last_step) for one in seen.recorded
    ]:
        return "supervisor.json and the attempts in the run differ"
    failed = [one for one in seen.attempts if one.cause is not None]
    steps = [one.last_step for one in failed]
    causes = [(one.cause.kind, one.cause.rank, one.cause.what) for one in failed if one.cause is not None]
    planned = [step + unit.rules.poisons for step in unit.failures]  # NaN comes in the next step
    if steps != planned or not all(_is_expected(unit.rules.expected(at), *one) for at, one in enumerate(causes)):
        return f"failures after the steps {steps}: {causes}"
    for attempt, one in enumerate(seen.attempts):
        mine = [line.step for line in seen.saves if line.attempt == attempt and line.kind == "restored"]
        before = [line.step for line in seen.saves if line.attempt < attempt and line.kind == "durable"]
        # After a NaN the state is saved for people, and is never restored.
        durable = [step for step in before if not unit.rules.poisons or step not in planned]
        if mine != [one.restored_step]:
            return f"attempt {attempt} restored {mine}, and step {one.restored_step} for the supervisor"
        if unit.keeps_durable and mine[0] < max(durable, default=0):
            return f"attempt {attempt} restored step {mine[0]}, although step {max(durable)} was durable"
        failed_saves = [line for line in seen.saves if line.attempt == attempt and line.kind == "failed"]
        if unit.condition == "errors" and unit.failures and not failed_saves:
            return f"attempt {attempt}: no write of a save has failed, which is what the condition is about"
    return ""


def _is_expected(expected: Expected, kind: str, rank: int, what: str) -> bool:
    """Whether the supervisor has named the cause that was to be expected."""
    return kind == expected.kind and expected.rank in (None, rank) and expected.what in what


def _parts(seen: Seen) -> dict[str, float]:
    """The parts of the wall time."""
    lines: list[StepLine | SaveLine] = [*seen.steps[0], *seen.saves]
    # An attempt in which rank 0 ended before it opened the run has no line; `_agreed` says so.
    attempts = sorted({one.attempt for one in lines})
    stall = sum(max(one.stall_seconds for one in lines if one.attempt == at) for at in attempts)
    snapshot, sync = (sum(getattr(one, f"{name}_seconds") for one in seen.saves) for name in ("enqueue", "fence"))
    recovery = 0.0
    for before, after in pairwise(attempts):
        reached = max((one.global_step for one in seen.steps[0] if one.attempt == before), default=0)
        again = [one for one in seen.steps[0] if one.attempt == after and one.global_step <= reached]
        begun = min(one.at_seconds for one in lines if one.attempt == after)
        over = max((one.at_seconds for one in again), default=begun)
        recovery += over - max(one.at_seconds for one in lines if one.attempt == before)
        recovery -= max((one.stall_seconds for one in again), default=0.0)  # which `write` and the others count
    found = {
        "launch": min(one.at_seconds for one in lines) - seen.begun,
        "snapshot": snapshot,
        "write": max(0.0, stall - snapshot - sync),
        "sync": sync,
        "recovery": recovery,
        "end": seen.ended - max(one.at_seconds for one in lines),
    }
    return {**found, "compute": seen.ended - seen.begun - sum(found.values())}

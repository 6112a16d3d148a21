"""The proof of the demo: what is stored of two runs, and what their trainers told, held against each other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from train import BATCH, Digits

import lastgood
from lastgood.data.audit import AuditReport

if TYPE_CHECKING:
    from run import Attempt, Blow


class Check(NamedTuple):
    claim: str
    found: str
    holds: bool


class Stored:
    """The newest generation of a run, read from disk as anybody can read it."""

    def __init__(self, path: Path) -> None:
        self._path, self._run = path, lastgood.open(path)
        self._manifest = self._run.manifest(self._run.generation())

    def tensor(self, name: str) -> torch.Tensor:
        return self._run.tensor(name)

    def tensors(self, belongs: Callable[[str], bool]) -> tuple[str, str]:
        """What is there by names that `belongs`, and SHA-256 over their names, dtypes, shapes and bytes."""
        hasher, count, numbers = hashlib.sha256(), 0, 0
        for name in sorted(piece.name for piece in self._manifest.pieces if belongs(piece.name)):
            tensor = self.tensor(name)
            hasher.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
            hasher.update(tensor.reshape(-1).view(torch.uint8).numpy())
            count, numbers = count + 1, numbers + tensor.numel()
        assert count, "equal to nothing is no proof"
        return f"{count} tensors, {numbers:,} numbers", hasher.hexdigest()

    def values(self) -> tuple[str, str]:
        """What is there that is no tensor, and its SHA-256."""
        values = self._manifest.values
        return f"{len(values)} entries", hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def audit(self, sampler: lastgood.ResumableSampler) -> AuditReport:
        """Which samples these weights have seen, held against the order that was scheduled. Moves the sampler."""
        audit = lastgood.Audit()
        lastgood.load(self._path, {"sampler": sampler, "audit": audit}, strict=False)
        return audit.report(sampler)


def compare(
    reference: Stored, victim: Stored, peace: Attempt, attempts: Sequence[Attempt], blows: Sequence[Blow]
) -> list[Check]:
    """Hold what is stored of the two runs, and what their trainers told, against each other."""
    sampler = lastgood.ResumableSampler(len(Digits()), BATCH, seed=0)
    return [*_endured(attempts, blows, sampler.steps_per_epoch), *_equal(reference, victim, peace, attempts, sampler)]


def _endured(attempts: Sequence[Attempt], blows: Sequence[Blow], steps_per_epoch: int) -> list[Check]:
    kills, restarts = attempts[:-1], attempts[1:]
    in_a_save = sum(bool(one.half_a_save) for one in kills)
    mid_epoch = sum(one.reached % steps_per_epoch != 0 for one in kills)
    damaged = [one.damage.step for one in kills if one.damage]
    noticed = [step for one in restarts for step, _ in one.stepped_over]
    resumed = sum(one.resumed == one.expected for one in restarts)
    again = sum(before.reached - after.resumed for before, after in pairwise(attempts))
    return [
        Check(
            "killed by SIGKILL",
            f"{len(kills)} times: {in_a_save} inside a save, {mid_epoch} in mid-epoch",
            in_a_save >= sum(blow.in_a_save for blow in blows),
        ),
        Check(
            "damage stepped over",
            f"steps {_listed(noticed)}; damaged were {_listed(damaged)}",
            damaged == noticed,
        ),
        Check(
            "newest good resumed",
            f"{resumed} of {len(restarts)} restarts; {again} steps done again",
            resumed == len(restarts),
        ),
    ]


def _listed(steps: Sequence[int]) -> str:
    return " and ".join(map(str, steps)) or "none"


def _equal(
    reference: Stored,
    victim: Stored,
    peace: Attempt,
    attempts: Sequence[Attempt],
    sampler: lastgood.ResumableSampler,
) -> list[Check]:
    def same(claim: str, mine: tuple[str, str], theirs: tuple[str, str]) -> Check:
        (what, digest), (_, other) = mine, theirs
        digests = f"both {digest[:8]}" if digest == other else f"{digest[:8]} and {other[:8]}"
        return Check(claim, f"{what}, {digests}", digest == other)

    def tensors(claim: str, belongs: Callable[[str], bool]) -> Check:
        return same(claim, reference.tensors(belongs), victim.tensors(belongs))

    curve, other = reference.tensor("losses"), victim.tensor("losses")
    logged = [(step, loss) for one in (peace, *attempts) for step, loss in one.losses.items()]
    equal = int((curve == other).sum())
    equal_logged = sum(loss == curve[step - 1].item() for step, loss in logged)
    seen = victim.audit(sampler)
    return [
        tensors("weights equal", lambda name: name.startswith("model.")),
        tensors("AdamW state equal", lambda name: name.startswith("optimizer.")),
        tensors("other tensors equal", lambda name: not name.startswith(("model.", "optimizer."))),
        same("schedule, RNG equal", reference.values(), victim.values()),
        Check(
            "loss curve equal",
            f"{equal} of {len(curve)}; {equal_logged} of {len(logged)} logged on the way",
            equal == len(curve) and equal_logged == len(logged),
        ),
        Check(
            "samples exactly once",
            f"{seen.observed:,} of {seen.scheduled:,}; "
            f"{seen.duplicates} double, {seen.missing} missing, {seen.extra} extra",
            seen.exact and seen.scheduled == peace.reached * BATCH,
        ),
    ]

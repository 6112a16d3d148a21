"""Runs one unit under the real `lastgood run`, and keeps what was found of it in its folder.

    SUITE/VARIANT-seedN/    rank_*.jsonl, checkpoint_rank0.jsonl, supervisor.json, stderr.log    logs of the unit
                            found.json                              written last: the unit is completed

A unit without found.json was interrupted, and is begun anew. The runs themselves are deleted when a suite is compared.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

import lastgood
from lastgood.loop.opened import Run
from lastgood.records import Generation
from lastgood.run import access, job_logs
from lastgood.run.content import Content
from lastgood.run.job_logs import SaveLine, StepLine
from lastgood.supervisor import attempt_log, job_summary

from . import environment, findings, images
from .findings import Found, Seen
from .unit import Unit

FOUND = "found.json"
HANG_SECONDS = 5
PRELOAD = "lastgood_lab.study.networks,lastgood.loop.checkpointer,torch.nn.parallel,torch._dynamo"


def completed(unit: Unit, out: Path) -> Found | None:
    """What was found of a unit that is completed; None otherwise."""
    path = folder(unit, out) / FOUND
    return msgspec.json.decode(path.read_bytes(), type=Found) if path.exists() else None


def folder(unit: Unit, out: Path) -> Path:
    """The folder of a unit."""
    return out / unit.suite / unit.name


def run_of(unit: Unit, out: Path) -> Path:
    """Where the unit saves."""
    return out / "runs" / f"{unit.suite}-{unit.name}"


def lived(unit: Unit, out: Path, cifar: Path | None = None) -> Found:
    """Run a unit from its beginning to its end. `cifar`: the folder of CIFAR's files, for its datasets."""
    logs, run, data = folder(unit, out), run_of(unit, out), out / "runs" / f"{unit.dataset}-{unit.size.side}.npz"
    for path in (logs, run):
        shutil.rmtree(path, ignore_errors=True)
    logs.mkdir(parents=True)
    data.parent.mkdir(exist_ok=True)
    if not data.exists():
        images.write(unit.dataset, unit.size.side, data, cifar)
    command = [sys.executable, "-m", "lastgood", "run", "--nproc-per-node", str(unit.size.ranks), "--records"]
    if unit.condition == "hang":
        command[-1:] = ["--hang-timeout", str(HANG_SECONDS), "--records"]
    command += [str(logs), "--preload", PRELOAD, "-m", "lastgood_lab.study.trainer"]
    begun = time.monotonic()
    with open(logs / "stderr.log", "wb") as errors:
        done = subprocess.run(
            [*command, msgspec.json.encode(unit).decode(), str(data), str(run)], stderr=errors, check=False
        )
    seen = _seen(unit, logs, run, done.returncode, begun, time.monotonic())
    found = msgspec.structs.replace(findings.found(unit, seen), environment=environment.here())
    draft = logs / "found.json.tmp"
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    draft.rename(logs / FOUND)
    return found


def _seen(unit: Unit, logs: Path, run: Path, code: int, begun: float, ended: float) -> Seen:
    steps: list[list[StepLine]] = [job_logs.steps(logs, rank) for rank in range(unit.size.ranks)]
    saves: list[SaveLine] = job_logs.saves(logs)
    dataset = _length(logs.parent.parent / "runs" / f"{unit.dataset}-{unit.size.side}.npz")
    sampler = lastgood.ResumableSampler(dataset, unit.size.global_batch, unit.seed)
    audit = lastgood.Audit()
    differs = "the run has no generation"
    if (run / "attempts").exists() and code == 0:
        lastgood.load(run, {"sampler": sampler, "audit": audit}, strict=False)
        report = audit.report(sampler)
        differs = "" if report.exact else str(report)
    recorded = attempt_log.read(access.for_reading(run)) if run.exists() else []
    return Seen(
        code=code,
        begun=begun,
        ended=ended,
        steps=steps,
        saves=saves,
        attempts=job_summary.opened(logs).attempts,
        recorded=recorded,
        order=sampler,
        audit=differs,
    )


def _length(path: Path) -> int:
    return len(images.read(path)[1])


def distances(unit: Unit, reference: Unit, out: Path) -> dict[int, float]:
    """Saved step -> L2 distance of the model's parameters from those of the reference's generation.

    0.0 exactly where all digests are equal; then nothing is read. A generation that only one has is left out.
    """
    found = {}
    for (mine, one), (theirs, other) in _pairs(unit, reference, out):
        here, there = Content(mine.tier, one), Content(theirs.tier, other)
        total = 0.0
        for name in sorted(name for name in here.names() if name.startswith("model.") and not _is_of_rank(name)):
            if here.digest(name) != there.digest(name):  # also where ranks have divided a tensor in another way
                difference = mine.tensor(name, one.step).double() - theirs.tensor(name, one.step).double()
                total += float(difference.square().sum())
        found[one.step] = total**0.5
    return found


def differing_buffers(unit: Unit, reference: Unit, out: Path) -> int:
    """In how many generations, ranks and names a buffer that each rank has for itself differs from the reference's."""
    return sum(
        len(_buffers(mine, one) ^ _buffers(theirs, other))
        for (mine, one), (theirs, other) in _pairs(unit, reference, out)
    )


def _pairs(unit: Unit, reference: Unit, out: Path) -> Iterator[tuple[tuple[Run, Generation], tuple[Run, Generation]]]:
    """Generations of the same step in both runs."""
    mine, theirs = (lastgood.open(run_of(one, out)) for one in (unit, reference))
    other = {one.step: one for one in theirs.generations()}
    return (((mine, one), (theirs, other[one.step])) for one in mine.generations() if one.step in other)


def _buffers(run: Run, generation: Generation) -> set[tuple[int, str, str]]:
    """Rank, name and digest of each buffer that ranks have for themselves."""
    return {
        (manifest.rank, one.name, one.digest)
        for manifest in Content(run.tier, generation).manifests
        for one in manifest.pieces
        if _is_of_rank(one.name)
    }


def _is_of_rank(name: str) -> bool:
    return name.startswith("model.") and name.endswith(("running_mean", "running_var"))

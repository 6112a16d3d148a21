"""Runs one unit under the real `lastgood run`, and keeps what was found of it in its folder.

    SUITE/VARIANT-seedN/    rank_*.jsonl, checkpoint_rank0.jsonl, supervisor.json, *.log         logs of the unit
                            found.json                              written last: the unit is completed

A unit without found.json was interrupted, and is begun anew. The runs themselves are deleted when a suite is compared.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

import lastgood
from lastgood.errors import NotARun
from lastgood.loop.opened import Run
from lastgood.records import Generation
from lastgood.run import access, job_logs
from lastgood.run.content import Content
from lastgood.run.job_logs import SaveLine, StepLine
from lastgood.state.tensors import from_buffer
from lastgood.supervisor import attempt_log, job_summary
from lastgood.supervisor.attempt_log import Attempt

from ..report import today
from . import environment, findings, images, nodes, storages
from .findings import Found, Seen
from .unit import Unit

FOUND = "found.json"
OF_RANK = ("running_mean", "running_var")
"""ends of the names of buffers that each rank has for itself"""


def completed(unit: Unit, out: Path) -> Found | None:
    """What was found of a unit that is completed; None otherwise."""
    path = folder(unit, out) / FOUND
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
        return msgspec.json.decode(path.read_bytes(), type=Found)
    return None


def folder(unit: Unit, out: Path) -> Path:
    """The folder of a unit."""
    return out / unit.suite / unit.name


def run_of(unit: Unit, out: Path) -> Path:
    """The run of the unit, once it has ended."""
    return out / "runs" / f"{unit.suite}-{unit.name}"


def lived(unit: Unit, out: Path, cifar: Path | None = None, load_before: float = 0.0) -> Found:
    """Run a unit from its beginning to its end. `cifar`: the folder of CIFAR's files, for its datasets. `load_before`:
    of the machine, when the command began."""
    logs, run, data = folder(unit, out), run_of(unit, out), _images(unit, out)
    for path in (logs, run):
        shutil.rmtree(path, ignore_errors=True)
    logs.mkdir(parents=True)
    data.parent.mkdir(exist_ok=True)
    if not data.exists():
        images.write(unit.dataset, unit.size.side, data, cifar)
    with storages.opened(unit, run) as storage:
        begun = time.monotonic()
        script = ["lastgood_lab.study.trainer", msgspec.json.encode(unit).decode(), str(data), storage.url]
        code = nodes.lived(unit, logs, script, storage.memory, storage.environment)
        ended, recorded = time.monotonic(), _recorded(storage.url)
    seen = _seen(unit, logs, run, code, (begun, ended), recorded)
    found = msgspec.structs.replace(
        findings.found(unit, seen),
        environment=environment.here(),
        date=today(),
        load=(load_before, os.getloadavg()[0]),
    )
    draft = logs / "found.json.tmp"
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    draft.rename(logs / FOUND)
    return found


def _recorded(url: str) -> list[Attempt]:
    """The attempts that the run has records of."""
    try:
        return attempt_log.read(access.for_reading(url))
    except NotARun:
        return []


def _seen(unit: Unit, logs: Path, run: Path, code: int, times: tuple[float, float], recorded: list[Attempt]) -> Seen:
    steps: list[list[StepLine]] = [job_logs.steps(logs, rank) for rank in range(unit.size.ranks)]
    saves: list[SaveLine] = job_logs.saves(logs)
    samples = len(images.read(_images(unit, logs.parent.parent))[1])
    sampler = lastgood.ResumableSampler(samples, unit.size.global_batch, unit.seed)
    audit = lastgood.Audit()
    differs = "the run has no generation"
    if run.exists() and code == 0:
        lastgood.load(run, {"sampler": sampler, "audit": audit}, strict=False)
        report = audit.report(sampler)
        differs = "" if report.exact else str(report)
    return Seen(
        code=code,
        begun=times[0],
        ended=times[1],
        steps=steps,
        saves=saves,
        attempts=job_summary.opened(logs).attempts,
        recorded=recorded,
        order=sampler,
        left_out=sampler.skipped,
        audit=differs,
    )


def _images(unit: Unit, out: Path) -> Path:
    """The file with the images of a unit."""
    return out / "runs" / f"{unit.dataset}-{unit.size.side}{unit.images and '-' + unit.images}.npz"


def distances(unit: Unit, reference: Unit, out: Path) -> dict[int, float]:
    """Saved step -> L2 distance of the model's parameters from those of the reference's generation.

    0.0 exactly where all digests are equal; then nothing is read. A generation that only one has is left out. The
    counts of batches in batch norms are compared too, unless the number of batches of a step changes with that of the
    ranks.
    """
    apart = (*OF_RANK, "num_batches_tracked") if unit.rules.tolerance else OF_RANK
    found = {}
    for (mine, one), (theirs, other) in _pairs(unit, reference, out):
        here, there = Content(mine.tier, one), Content(theirs.tier, other)
        total = 0.0
        for name in sorted(name for name in here.names() if name.startswith("model.") and not name.endswith(apart)):
            if here.digest(name) != there.digest(name):  # also where ranks have divided a tensor in another way
                total += float((_read(here, name) - _read(there, name)).square().sum())
        found[one.step] = total**0.5
    return found


def _read(content: Content, name: str) -> torch.Tensor:
    tensor, data = content.tensor(name)
    return from_buffer(data, tensor.dtype, tensor.shape).double()


def differing_buffers(unit: Unit, reference: Unit, out: Path) -> int:
    """In how many generations, ranks and names a buffer that each rank has for itself differs from the reference's."""
    return sum(
        len(_buffers(mine, one) ^ _buffers(theirs, other))
        for (mine, one), (theirs, other) in _pairs(unit, reference, out)
    )


def _pairs(unit: Unit, reference: Unit, out: Path) -> Iterator[tuple[tuple[Run, Generation], tuple[Run, Generation]]]:
    """Generations of the same step in both runs, of those from which the newest ones descend."""
    mine, theirs = (lastgood.open(run_of(one, out)) for one in (unit, reference))
    other = {one.step: one for one in theirs.lineage()}
    return (((mine, one), (theirs, other[one.step])) for one in mine.lineage() if one.step in other)


def _buffers(run: Run, generation: Generation) -> set[tuple[int, str, str]]:
    """Rank, name and digest of each buffer that ranks have for themselves."""
    return {
        (manifest.rank, one.name, one.digest)
        for manifest in Content(run.tier, generation).manifests
        for one in manifest.pieces
        if one.name.startswith("model.") and one.name.endswith(OF_RANK)
    }

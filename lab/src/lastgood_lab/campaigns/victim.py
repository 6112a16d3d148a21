"""A process without torch that restores a run and saves to it until it is killed: the victim of the campaigns.

`python -m lastgood_lab.campaigns.victim RUN --saves 3 --seed 7` is one life. Before and after every operation it prints
one line of this protocol:

    opening | unread G why | stepped_over STEP why | restored G | beginning G | began G | saving G | durable G
    verified G | retiring G | error NAME STEP what | done           (G: the folder of a generation, `-` for none)

A life continues after a failed save, as training does, and ends with the exit code of its first error. The content of
a save follows from its seed and step, so victim_ledger.py can check the contents of the disk exactly. This module does
not import torch, so that a life takes only a quarter of a second.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import logging
import os
import random
import resource
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Literal

from lastgood import reporting
from lastgood.engine.arena import Arena
from lastgood.engine.inline_executor import Inline
from lastgood.errors import Damaged, LastgoodError, NotFinite
from lastgood.events import Event
from lastgood.format import commit, layout
from lastgood.io.files import PosixFile, PosixFiles, round_up
from lastgood.limits import DIRECT_IO_BYTES
from lastgood.policy.retention import Keep
from lastgood.ports import OpenMode, Tier
from lastgood.records import Generation, GenerationId, Manifest
from lastgood.run import access, paths
from lastgood.run.candidates import Candidates, Found
from lastgood.run.known import Environment
from lastgood.run.retire import DISK_FULL
from lastgood.run.writer import RunWriter
from lastgood.storage.directory import Disk
from lastgood_lab.plain import State, read_rank, save

TIERS = ("directory", "slots", "mmap", "memory")
"""how a run may be stored at its path; mmap: in slots that are written through a memory mapping; memory: its path is in
a tmpfs"""
DIRECTORIES = ("directory", "memory")
"""those that keep as many generations as their retention says"""
CHUNK_BYTES = 8192
SIZES = {"w": 20_000, "b": 5, "empty": 0, "m.v": 12_345}
"""with the header five chunks, of which the last does not end at a block boundary"""


def content(seed: int, step: int) -> State:
    """The state that a life with this seed saves at this step."""
    return {name: hashlib.shake_256(f"{seed} {step} {name}".encode()).digest(size) for name, size in SIZES.items()}


class Watched:
    """A tier that reports each COMMIT before it deletes it."""

    def __init__(self, tier: Tier, write_line: Callable[[str], None]) -> None:
        self._tier, self._write_line = tier, write_line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def delete(self, name: str) -> None:
        if name.endswith(f"/{layout.COMMIT}"):
            self._write_line(f"retiring {name.split('/')[1]}")
        self._tier.delete(name)


class ShortFiles(PosixFiles):
    """Files whose reads and writes transfer a random part of the bytes; a direct write transfers at least one block."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def open(self, path: str, mode: OpenMode, *, direct: bool = False, fresh: bool = False) -> Any:
        return ShortFile(super().open(path, mode, direct=direct, fresh=fresh), direct, self._chance)


class ShortFile:
    """A file of ShortFiles."""

    def __init__(self, file: PosixFile, direct: bool, chance: random.Random) -> None:
        self._file, self._direct, self._chance = file, direct, chance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read_into(self, mv: memoryview, offset: int) -> int:
        return self._file.read_into(self._some(mv), offset)

    def write_at(self, mv: memoryview, offset: int) -> int:
        count = self._file.write_at(self._some(mv), offset)
        return self._chance.randint(min(count, DIRECT_IO_BYTES), count) if self._direct else count

    def _some(self, mv: memoryview) -> memoryview:
        length = self._chance.randint(1, len(mv))
        return mv[: round_up(length) if self._direct else length]


def live(argv: list[str], write_line: Callable[[str], None]) -> int:
    """One life; returns its exit code. Raises only exceptions that are no LastgoodError."""
    options = _parser().parse_args(argv)
    if options.file_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (options.file_limit, options.file_limit))
    codes: list[int] = []

    @contextlib.contextmanager
    def reporting_errors(step: int | str) -> Iterator[None]:
        try:
            yield
        except LastgoodError as error:
            write_line(f"error {type(error).__name__} {step} {' '.join(str(error).split())}")
            codes.append(error.exit_code)

    pool: Executor = ThreadPoolExecutor(options.threads) if options.threads else Inline()
    with pool, warnings_to(write_line), reporting_errors("-"):
        if options.mode == "restore":
            tier = access.for_reading(path(options.run, options.tier))
            restored(tier, commit.survey(tier), pool, write_line)
        else:
            persist: Literal["direct", "mmap"] = "mmap" if options.tier == "mmap" else "direct"
            with access.for_writing(path(options.run, options.tier), "atomic_dirsync", persist=persist) as tier:
                _write(tier, pool, options, write_line, reporting_errors)
    write_line("done")
    return codes[0] if codes else 0


@contextlib.contextmanager
def warnings_to(write_line: Callable[[str], None]) -> Iterator[None]:
    """Write a line for each report that lastgood logs, until the end of the block."""
    handler = logging.Handler()
    handler.emit = lambda record: write_line(f"warned {record.getMessage()}")  # type: ignore[method-assign]
    reporting.LOGGER.addHandler(handler)
    try:
        yield
    finally:
        reporting.LOGGER.removeHandler(handler)


def path(run: str, tier: str) -> str:
    """The path of a run as lastgood takes it, with the scheme of its tier."""
    scheme = {"directory": "", "memory": paths.MEMORY}.get(tier, paths.SLOTS)
    return f"{scheme}{os.path.abspath(run)}" if scheme else run


def _write(
    tier: Tier, pool: Executor, options: argparse.Namespace, write_line: Callable[[str], None], reporting_errors: Any
) -> None:
    write_line("opening")
    if options.buffered or options.short:
        files = ShortFiles(random.Random(options.seed)) if options.short else PosixFiles()
        kind = Disk if options.tier in DIRECTORIES else access.slots
        tier = kind(files, os.path.abspath(options.run), direct=options.short and not options.buffered)
    names = (hashlib.sha256(f"{options.seed} {count}".encode()).hexdigest()[:8] for count in range(100))

    def report_event(event: Event) -> None:
        if event.kind == "deleted" and event.detail == DISK_FULL:
            write_line(f"pressed {event.step}")
        if event.kind == "verified" and (newest := run.known.newest_verified()):
            write_line(f"verified {place(newest.id)}")

    run = RunWriter(
        Watched(tier, write_line),
        pool,
        keep=Keep(last=options.last),
        environment=Environment(new_id=lambda: next(names), emit=report_event),
    )
    found = restored(tier, run.survey, pool, write_line)
    parent = found.generation.id if found.generation else None
    write_line(f"beginning {place(parent)}")
    run.begin(parent)
    write_line(f"began {place(parent)}")
    if found.generation:
        run.conclude(found.generation, [])
        write_line(f"verified {place(parent)}")
    arena = Arena(4 * CHUNK_BYTES, CHUNK_BYTES)
    first = parent.step + 1 if parent else 1
    for step in range(first, first + options.saves):
        with reporting_errors(step):
            write_line(f"saving {place(run.admit(step))}")
            generation = save(
                run, step, content(options.seed, step), chunk_bytes=CHUNK_BYTES, values={"seed": options.seed}
            )
            write_line(f"durable {place(generation.id)}")
        with reporting_errors("-"):
            run.verify(arena)
        with reporting_errors("-"):
            run.clean()
    if options.mode == "gc":
        run.clean()


def restored(tier: Tier, survey: commit.Survey, pool: Executor, write_line: Callable[[str], None]) -> Found:
    """Restore the newest good generation, compare every byte with the saved one, and write a line for each result."""
    for at, error in survey.broken.items():
        write_line(f"unread {place(at)} {' '.join(str(error).split())}")
    candidates, loaded = Candidates(survey), None
    for generation in candidates:
        try:
            (manifest,) = commit.read_manifests(tier, generation)
            state = bytes_of(tier, generation, manifest, pool)
        except (Damaged, NotFinite) as error:
            candidates.failed(error)
            continue
        if problem := differs(generation, manifest, state):
            write_line(f"wrong {problem}")
        loaded = generation
        break
    found = candidates.found(loaded)
    for step, reason in found.stepped_over:
        write_line(f"stepped_over {step} {' '.join(reason.split())}")
    write_line(f"restored {place(found.generation.id if found.generation else None)}")
    return found


def place(at: GenerationId | None) -> str:
    """The folder of a generation within `gen/`, or "-" for none."""
    return layout.folder(at).partition("/")[2] if at else "-"


def differs(generation: Generation, manifest: Manifest, state: State) -> str:
    """The differences between a loaded state and the saved one; empty if they are equal."""
    expected = content(manifest.values["seed"], generation.step)
    wrong = sorted(name for name in expected.keys() | state.keys() if expected.get(name) != state.get(name))
    return f"{place(generation.id)} holds other bytes in {', '.join(wrong)}" if wrong else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the path of the run")
    parser.add_argument("--mode", choices=("save", "restore", "gc"), default="save", help="restore: only read the run")
    parser.add_argument("--tier", choices=TIERS, default="directory", help="how the run is stored")
    parser.add_argument("--saves", type=int, default=3, help="how many saves to make")
    parser.add_argument("--seed", type=int, default=0, help="determines the contents and the names of incarnations")
    parser.add_argument("--last", type=int, default=2, help="how many verified generations to keep")
    parser.add_argument(
        "--threads", type=int, default=0, help="threads for I/O; 0: all I/O in the main thread, in a fixed order"
    )
    parser.add_argument("--buffered", action="store_true", help="no direct I/O, even if the file system supports it")
    parser.add_argument("--short", action="store_true", help="reads and writes that transfer only a part of the bytes")
    parser.add_argument(
        "--file-limit", type=int, default=0, help="RLIMIT_FSIZE in bytes: writes beyond it are cut short; 0: no limit"
    )
    return parser


def bytes_of(tier: Tier, generation: Generation, manifest: Manifest, pool: Executor) -> State:
    """The tensors of a generation of one rank, read and verified."""
    arena = Arena(sum(round_up(blob.length, blob.chunk_bytes) for blob in manifest.blobs), CHUNK_BYTES)
    found = read_rank(tier, generation, manifest, arena, pool)
    return {piece.name: bytes(found[piece.name]) for piece in manifest.pieces}


def main() -> int:
    def write_line(line: str) -> None:
        os.write(1, f"{line}\n".encode())

    return live(sys.argv[1:], write_line)


if __name__ == "__main__":
    sys.exit(main())

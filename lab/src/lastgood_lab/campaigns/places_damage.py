"""Every kind of damage in one of the two places of a run, while the other place is whole: is it repaired from there?

    python -m lastgood_lab.campaigns.places_damage [--trials 5] [--seed 0] [--jobs 2]

One trial: a run of three generations in two places is copied, the newest generation (or a record of the run) is damaged
in one of them, and the run is opened and restored as after any restart. It must load the newest step, bit for bit. Then
`lastgood scrub` reads that place, and every file of its generations must have its old bytes again.

Three cases are judged otherwise. A place in slots cannot be mended: the restart counts, and a save that follows must
read back in both places. Generations that are gone without a trace look like those that retention has
deleted: the newest must be in both places again, below after the restart and in front after the next save. Where the
table of the slots is lost as a whole, the opening is refused with an error, because the slots may hold a step that no
other place has; once the slots are moved away, the restart must succeed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import obstore
import torch

import lastgood
from lastgood import reporting
from lastgood.cli import app
from lastgood.errors import Damaged, LastgoodError
from lastgood.format import layout
from lastgood.storage import object_store
from lastgood_lab import corrupt, provenance, trials
from lastgood_lab.campaigns.reports import PROVED, REPORTS, report
from lastgood_lab.campaigns.trials import in_memory
from lastgood_lab.corrupt import advance, group, tensors_of
from lastgood_lab.journal import Journal
from lastgood_lab.object_server import ObjectServer, make_bucket, weed
from lastgood_lab.trials import Row

STEPS = (corrupt.OLDER, corrupt.NEWER, 30)
NEWEST = STEPS[-1]
Damage = Callable[[Path, random.Random], None]
"""Damages the newest generation, in the folder that it is given, or a record of the run above that folder."""


def _some_file(folder: Path, chance: random.Random) -> None:
    """A flipped bit in each of several files at once."""
    for name in chance.sample(sorted(one.name for one in folder.iterdir()), 3):
        corrupt._in(name, corrupt._bitflip)(folder, chance)


def _swap_files(folder: Path, _: random.Random) -> None:
    """Two generations have each other's tensor files."""
    (older,) = folder.parent.glob(f"{STEPS[1]:012d}-*")
    one, two = folder / corrupt.DATA, older / corrupt.DATA
    held = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(held)


def _all_generations(folder: Path, chance: random.Random) -> None:
    for one in sorted(folder.parent.iterdir()):
        corrupt._in(corrupt.DATA, corrupt._bitflip)(one, chance)


def _in_run(name: str, how: Callable[[bytearray, random.Random], None]) -> Damage:
    return corrupt._in(f"../../{name}", how)


def _lose_manifest_and_commit(folder: Path, _: random.Random) -> None:
    for name in (corrupt.MANIFEST, layout.COMMIT):
        (folder / name).unlink()


def _incarnation(folder: Path, chance: random.Random) -> None:
    for one in (folder.parent.parent / "incarnations").iterdir():
        one.unlink()


WITHOUT_TRACE: dict[str, Damage] = {
    "lost folder": lambda folder, _: shutil.rmtree(folder),
    "all generations lost": lambda folder, _: shutil.rmtree(folder.parent),
}
IN_FILES: dict[str, Damage] = {
    **{kind: how for kind, how in corrupt.KINDS.items() if kind != "none"},
    "swapped files": _swap_files,
    "bitflip in three files": _some_file,
    "bitflip in every generation": _all_generations,
    "torn commit": corrupt._in(layout.COMMIT, corrupt._truncate),
    "lost mark": corrupt._lose(layout.VERIFIED),
    "bitflip in mark": corrupt._in(layout.VERIFIED, corrupt._bitflip),
    "lost manifest and commit": _lose_manifest_and_commit,
    **WITHOUT_TRACE,
    "lost pointer": lambda folder, _: (folder.parent.parent / layout.POINTER).unlink(),
    "lost header": lambda folder, _: (folder.parent.parent / layout.HEADER).unlink(),
    "bitflip in header": _in_run(layout.HEADER, corrupt._bitflip),
    "torn header": _in_run(layout.HEADER, corrupt._truncate),
    "lost incarnations": _incarnation,
    "lost list of places": lambda folder, _: (folder.parent.parent / layout.PLACES).unlink(),
}
"""damage of a directory, and of a bucket, whose objects have the names of a directory's files"""


def _of_slots(how: Callable[[bytearray, random.Random], None], table: bool) -> Damage:
    """Damage of the slot files, or of their table. `folder`: the directory of the slots."""

    def damage(folder: Path, chance: random.Random) -> None:
        for one in sorted((folder / "slots").iterdir()):
            if (one.name == "table") == table and one.stat().st_size:
                data = bytearray(one.read_bytes())
                how(data, chance)
                one.write_bytes(data)

    return damage


def _zero_half(data: bytearray, chance: random.Random) -> None:
    """Of the table, one of its two records; the other one tells what the slots hold."""
    start = chance.choice((0, len(data) // 2))
    data[start : start + len(data) // 2] = bytes(len(data) // 2)


def _lose_half(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data) // 2, len(data)) :]


def _whole_table(folder: Path, chance: random.Random) -> None:
    table = folder / "slots/table"
    table.write_bytes(chance.randbytes(table.stat().st_size))


REFUSED: dict[str, Damage] = {
    "whole table garbage": _whole_table,
    "lost table": lambda folder, _: (folder / "slots/table").unlink(),
}
"""damage after which nothing tells what the slots hold"""
IN_SLOTS: dict[str, Damage] = {
    **REFUSED,
    "bitflip in slots": _of_slots(corrupt._bitflip, table=False),
    "half of each slot zero": _of_slots(_zero_half, table=False),
    "garbage page in slots": _of_slots(corrupt._garbage, table=False),
    "truncated slots": _of_slots(corrupt._truncate, table=False),
    "bitflip in table": _of_slots(corrupt._bitflip, table=True),
    "half of the table zero": _of_slots(_zero_half, table=True),
    "truncated table": _of_slots(_lose_half, table=True),
    "lost slots": lambda folder, _: shutil.rmtree(folder / "slots"),
}


class Kind(NamedTuple):
    """A place that is damaged, in a pair of places."""

    pair: str
    """"directories", "slots" (in front of a directory), or "bucket" (below a directory)"""
    damaged: str
    """"front" or "below" """
    kind: str


def kinds(bucket: bool = True) -> list[Kind]:
    """Every kind of damage in every place. `bucket`: whether there is an object store."""
    pairs = ("directories", "slots", *(("bucket",) if bucket else ()))
    found = [
        Kind(pair, damaged, kind)
        for pair in pairs
        for damaged in ("front", "below")
        for kind in (IN_SLOTS if (pair, damaged) == ("slots", "front") else IN_FILES)
    ]
    # Slots hold the newest generation only, so the older ones below have no other place.
    return [one for one in found if one != ("slots", "below", "bitflip in every generation")]


# ---- the places ----------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """The two places of one run."""

    front: str
    below: str

    def opened(self, state: dict[str, Any]) -> lastgood.Checkpointer:
        keep = lastgood.Keep(last=9)
        tier = lastgood.Tier(self.front, retention=keep)  # of slots, no retention keeps more than the newest
        return lastgood.Checkpointer(self.below, state, retention=keep, tiers=[tier], save_on_exit=False)


@contextlib.contextmanager
def files_of(place: str, folder: Path) -> Iterator[Path]:
    """The files of a place as a directory. Changes that are made in the block are made to the place."""
    if "://" not in place or place.startswith("slots:"):
        yield Path(place.removeprefix("slots://"))
        return
    store = object_store.opened(place, object_store.DEADLINES)
    before: dict[str, bytes] = {}
    for batch in obstore.list(store):
        for one in batch:
            before[one["path"]] = bytes(obstore.get(store, one["path"]).bytes())
    root = folder / "objects"
    for name, data in before.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    yield root
    after = {str(one.relative_to(root)): one.read_bytes() for one in root.rglob("*") if one.is_file()}
    for name in before.keys() - after.keys():
        obstore.delete(store, name)
    for name, data in after.items():
        if before.get(name) != data:
            obstore.put(store, name, data, use_multipart=False)
    shutil.rmtree(root)


def generations(root: Path) -> dict[str, bytes]:
    """The files of all generations of a place."""
    return {str(one.relative_to(root)): one.read_bytes() for one in sorted(root.glob("gen/*/*"))}


class _Base:
    """A run in each pair of places, which the trials of this process copy, and the tensors that were saved."""

    def __init__(self, root: Path, bucket: bool) -> None:
        self.root, self.saved, self._bucket = root, dict[str, list[torch.Tensor]](), bucket
        for pair in ("directories", "slots", *(("bucket",) if bucket else ())):
            state = group(0)
            with self.pair(pair, root / pair, "base").opened(state) as ckpt:
                for step in STEPS:
                    advance(state)
                    ckpt.save(step).result()
                    ckpt.wait()
            self.saved[pair] = [one.detach().clone() for one in tensors_of(state)]

    def pair(self, pair: str, at: Path, name: str) -> Pair:
        front = f"slots://{at}/front" if pair == "slots" else f"{at}/front"
        return Pair(front, f"s3://damage/{os.getpid()}/{name}" if pair == "bucket" else f"{at}/below")

    def copied(self, pair: str, at: Path) -> Pair:
        """A copy of the run in new places below `at`."""
        shutil.copytree(self.root / pair, at, symlinks=True)
        copy = self.pair(pair, at, at.parent.name)
        if pair == "bucket":
            source = object_store.opened(self.pair(pair, at, "base").below, object_store.DEADLINES)
            target = object_store.opened(copy.below, object_store.DEADLINES)
            for batch in obstore.list(source):
                for one in batch:
                    data = bytes(obstore.get(source, one["path"]).bytes())
                    obstore.put(target, one["path"], data, use_multipart=False)
        return copy


_base: list[_Base] = []
"""The runs that the trials of this process copy; `begin` adds them before the first trial."""


def begin(root: Path, bucket: bool) -> None:
    """Make the runs that the trials of this process copy. `bucket`: whether the environment names an object store."""
    _base.append(_Base(Path(tempfile.mkdtemp(dir=root)), bucket))


def _begin_process(root: Path, bucket: bool) -> None:
    torch.set_num_threads(1)
    reporting.LOGGER.setLevel("CRITICAL")  # each trial reports what it repairs
    begin(root, bucket)


# ---- one trial -----------------------------------------------------------------------------------------------


def one(key: Row) -> Row:
    """Make one trial. Returns what happened; `problems` is empty if everything was repaired."""
    base, chance, problems = _base[-1], random.Random(str(sorted(key.items()))), list[str]()
    in_slots = (key["pair"], key["damaged"]) == ("slots", "front")
    without_trace = key["kind"] in WITHOUT_TRACE
    with tempfile.TemporaryDirectory(dir=base.root) as working:
        folder = Path(working)
        pair = base.copied(key["pair"], folder / "run")
        place = pair.front if key["damaged"] == "front" else pair.below
        with files_of(place, folder) as root:
            before = generations(root)
            if in_slots:
                IN_SLOTS[key["kind"]](root, chance)
            else:
                (newest,) = root.glob(f"gen/{NEWEST:012d}-*")
                IN_FILES[key["kind"]](newest, chance)
            changed = generations(root) != before
        state = group(1)
        if in_slots and key["kind"] in REFUSED:
            problems += _not_refused(pair)
        try:
            with pair.opened(state) as ckpt:
                found = ckpt.restore()
                if found.step != NEWEST or not all(map(torch.equal, tensors_of(state), base.saved[key["pair"]])):
                    problems.append(f"restored step {found.step}, or other bytes")
                if in_slots or without_trace:
                    advance(state)
                    ckpt.save(NEWEST + 1).result()
                    ckpt.wait()
        except LastgoodError as error:
            problems.append(f"the restart failed: {type(error).__name__}: {error.what}")
        if in_slots or without_trace:
            problems += _unlike_saved(pair, state)
            if without_trace and key["damaged"] == "below":
                with files_of(place, folder) as root:
                    again = generations(root)
                problems += [
                    name for name, data in before.items() if f"{NEWEST:012d}-" in name and again.get(name) != data
                ]
            return {"changed": True, "repaired_by": "restart", "problems": problems}
        with files_of(place, folder) as root:
            whole = before.items() <= generations(root).items()
        code = _command("scrub", place)
        with files_of(place, folder) as root:
            if not before.items() <= (after := generations(root)).items():
                problems.append(f"differs: {sorted(name for name in before if after.get(name) != before[name])}")
        if code or _command("verify", place):
            problems.append(f"scrub ended with {code}, or verify has found damage")
        return {"changed": changed, "repaired_by": "restart" if whole else "scrub", "problems": problems}


def _not_refused(pair: Pair) -> list[str]:
    """Open the run, which must be refused; then move the slots away. Returns what is wrong."""
    slots = Path(pair.front.removeprefix("slots://")) / "slots"
    before = [one.read_bytes() for one in sorted(slots.iterdir())]
    try:
        pair.opened(group(1)).close()
    except Damaged as error:
        changed = [one.read_bytes() for one in sorted(slots.iterdir())] != before
        slots.rename(slots.with_name("moved"))
        return (
            [f"the refusal changed the slots, or has no remedy: {error}"] if changed or "move" not in error.todo else []
        )
    return ["a place whose table is lost was opened"]


def _unlike_saved(pair: Pair, state: dict[str, Any]) -> list[str]:
    """What is wrong with the step that was saved after the restart, read from each place alone."""
    problems = []
    for place in pair:
        again = group(2)
        lastgood.load(place, again)
        if not all(map(torch.equal, tensors_of(again), tensors_of(state))):
            problems.append(f"{place} returns other bytes of the next save")
    return problems


def _command(name: str, place: str) -> int:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return app.main([name, place])


# ---- all trials ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(at: Path) -> Iterator[bool]:
    """A server for the buckets, and its environment, until the end of the block. False if none is installed."""
    if weed() is None:
        yield False
        return
    before = dict(os.environ)
    with ObjectServer(at / "server") as found:
        os.environ.update(found.environment())
        make_bucket("s3://damage/x")
        try:
            yield True
        finally:
            os.environ.clear()
            os.environ.update(before)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--trials", type=int, default=5, help="of each kind of damage in each place")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--jobs", type=int, default=2)
    args = options.parse_args()
    path = REPORTS / "places_damage.journal.jsonl"
    journal = Journal(path, {"sources": provenance.digest(PROVED["places_damage"])})
    with in_memory() as at, server(at) as bucket:
        keys = [
            {**kind._asdict(), "trial": trial, "seed": args.seed}
            for trial in range(args.trials)
            for kind in kinds(bucket)
        ]
        rows = trials.run(
            keys, one, journal, args.jobs, lambda line: print(line, flush=True), _begin_process, (at, bucket)
        )
    wrong = [
        f"{row['pair']}, {row['damaged']}, {row['kind']}, trial {row['trial']}: {problem}"
        for row in rows
        for problem in row["problems"]
    ]
    lines = []
    for pair, damaged, kind in kinds(bucket):
        mine = [row for row in rows if (row["pair"], row["damaged"], row["kind"]) == (pair, damaged, kind)]
        by = Counter(row["repaired_by"] for row in mine if not row["problems"])
        counts = [sum(by.values()), by["restart"], by["scrub"], sum(bool(row["problems"]) for row in mine)]
        lines.append(f"| {pair} | {damaged} | {kind} | {len(mine)} | " + " | ".join(map(str, counts)) + " |")
    table = "| places | damaged | damage | trials | repaired | by the restart | by scrub | violations |\n"
    facts = {"trials": len(rows), "seed": args.seed, "violations": len(wrong), "problems": wrong}
    report(
        "places_damage",
        "Damage in one of two places",
        facts,
        [table + "|---" * 8 + "|\n" + "\n".join(lines), *("\n".join(f"- {one}" for one in wrong) for _ in wrong[:1])],
    )
    path.unlink()
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The crash model: the real code that saves, verifies, deletes and restores, in every state that a crash can leave.

- `hostile.py` is the disk. It keeps in memory what readers see and what was synced. A *crash state* is another such
  disk, with the content and the names that one power loss (each unsynced sector, length and name is lost independently)
  or one kill would leave.
- `ledger.py` records what the run was given and what it promised; `labels.py` does so for labels.
- `promises.py` checks one crash state against the ledger.
- A `World` (here) drives one run over the disk, process after process, and keeps the ledger. Before every call that
  changes the disk, its `Judge` draws the crash states of that instant. Each is counted once, by its digest, and judged
  once for each ledger. For some of them the next process is played: it opens, restores, saves, and may crash again.
- `scenarios.py` has the histories that are played; `prove/crash_model.py` plays them until a million states are judged.
"""

from __future__ import annotations

import contextlib
import errno
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lastgood.engine.arena import Arena
from lastgood.errors import CommitUnknown, LastgoodError, NothingGood, Overtaken
from lastgood.format import layout
from lastgood.ports import Upload
from lastgood.records import GenerationId
from lastgood.run.known import Environment
from lastgood.run.writer import RunWriter
from lastgood.storage.slots import Slots

from .hostile import ROOT, STAGED, Fault, Folder, HostileDisk, Inode
from .labels import LOSS
from .ledger import Ledger, Violation, must, named, payload
from .plain import State, load, save, share
from .promises import CHUNK_BYTES, INLINE, at_of, hold, hold_weakly, opened, survived

UPKEEP = Arena(3 * CHUNK_BYTES, CHUNK_BYTES)


@dataclass
class Judge:
    """Looks at crash states: counts the distinct ones, and demands of each what the ledger promises.

    `samples` states are drawn at each call; of the new ones the share `carry_on` is opened and saved to again, and
    there the share `nest` of the calls is crashed once more, down to `depth` levels.
    """

    rng: random.Random
    samples: int = 16
    carry_on: float = 0.06
    nest: float = 0.005
    depth: int = 3
    states: set[int] = field(default_factory=set)
    judged: set[int] = field(default_factory=set)
    by_step: Counter[str] = field(default_factory=Counter)
    """of those: how many a crash right before such a call leaves"""
    violation: Violation | None = None
    """the first; cleaning up after it is not judged"""
    lost: int = 0
    """of the weaker write modes: states in which something acknowledged is gone"""

    def crash(self, world: World, step: str = "at the end") -> None:
        """Every power loss (or so many of them) and the kill, at this instant: before the call that `step` tells."""
        if world.depth and self.rng.random() > self.nest:
            return
        for state in world.disk.crashes(self.rng, self.samples):
            self.see(state, world.ledger, world.depth, step)
        if self.rng.random() < self.carry_on and world.depth < self.depth:
            World(world.disk.copied(), world.ledger.copied(), self, world.depth + 1).carry_on()

    def see(self, disk: HostileDisk, ledger: Ledger, depth: int, step: str) -> None:
        digest = disk.digest()
        self.states.add(digest)
        if (key := hash((digest, ledger.key()))) in self.judged:
            return
        self.judged.add(key)
        self.by_step[step] += 1
        if ledger.mode == "atomic_dirsync":
            hold(disk, ledger)
            if depth < self.depth and self.rng.random() < self.carry_on:
                World(disk, survived(disk, ledger), self, depth + 1).carry_on()
        else:
            self.lost += not hold_weakly(disk, ledger)


def step_of(call: str, path: str) -> str:
    """A call by what it is in the protocol, whatever the run: "link gen/*/COMMIT.json"."""
    name = STAGED.sub("", path.removeprefix(ROOT).removeprefix("/"))
    name = re.sub(r"^gen/[^/]+", "gen/*", name)
    return f"{call} {re.sub(r'[0-9a-f-]*[0-9]{2}[0-9a-f-]*(?![a-z])', '*', name) or 'the run'}"


class World:
    """One process after another over one disk, as a training loop would drive them."""

    def __init__(self, disk: HostileDisk, ledger: Ledger, judge: Judge, depth: int = 0) -> None:
        self.disk, self.ledger, self.judge, self.depth = disk, ledger, judge, depth
        self.disk.fault = None
        self.disk.watch = self._watch
        self.past: list[str] = []

    @property
    def tier(self) -> Any:
        tier = opened(self.disk, self.ledger)
        return Noted(tier, self) if isinstance(tier, Slots) else tier

    def _watch(self, call: str, path: str) -> None:
        folder, _, name = path.removeprefix(f"{ROOT}/").rpartition("/")
        at = layout.parse_folder(folder.removeprefix("gen/"))
        self.past.append(f"{call} {path}")
        if self.judge.violation:
            return
        try:
            self.judge.crash(self, step_of(call, path))
            if at is not None and call == "open" and name.startswith(layout.GOING):
                self.ledger.end(at)
            # On a full disk a generation goes without its reason; half a COMMIT, made in place, is none.
            going = at in self.ledger.acknowledged and (call, name) == ("remove", layout.COMMIT)
            if at and going and layout.COMMIT in self.disk.root.names["gen"].names.get(folder[4:], Folder()).names:
                self.ledger.end(at)
            if at is not None and call == "open" and name.startswith(layout.DAMAGED) and at not in self.ledger.rotten:
                must(self.disk.fault and self.disk.fault.fired, f"{at} is good, and marked as damaged")
                self.ledger.doubted.add(at)
            if at is not None and name == layout.COMMIT and call in ("link", "rename", "open"):
                self._seal(at, self.disk._find(f"{ROOT}/{folder}").names)
        except Exception as error:
            reason = str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}"
            self.judge.violation = Violation(f"{reason}\n  level {self.depth}: {'; '.join(self.past[-8:])}")
            raise self.judge.violation from error

    def _seal(self, at: GenerationId, names: dict[str, Inode]) -> None:
        if layout.COMMIT not in names:
            staged = {one: layout.COMMIT for one in names if one.startswith(f"{layout.COMMIT}.")}
            sealed = {staged.get(one, one): node for one, node in names.items() if one in staged or one[-4:] != ".tmp"}
            self.ledger.sealed[at] = {one: node.digest() for one, node in sealed.items()}

    def _ident(self) -> str:
        self.ledger.idents += 1
        return f"{self.ledger.idents:08x}"

    def _note_verified(self) -> None:
        self.ledger.verified |= {at for at, one in self.run.survey.generations.items() if one.verified}

    # ---- what a loop does ----------------------------------------------------------------------------------

    def start(self) -> None:
        """A new process: open the run for writing."""
        self.run = RunWriter(
            self.tier,
            INLINE,
            keep=self.ledger.keep,
            parity=self.ledger.parity,
            environment=Environment(new_id=self._ident, wall_seconds=lambda: 0.0, monotonic_seconds=lambda: 0.0),
        )
        self._note_verified()
        if self.disk.fault is None:
            self.ledger.labels.settle(self.run.survey.generations.values())
        if not self.ledger.disturbed:
            # A torn COMMIT, made in place, may have named anything before it: that stays.
            unsure = max((at.step for at in self.run.survey.broken), default=0)
            for name, folder in self.disk.root.names.get("gen", Folder()).names.items():
                stays = layout.COMMIT in folder.names or named(name).step < unsure
                must(stays, f"{name} is left behind for ever: {sorted(folder.names)}")

    def open(self, parent_step: int | None = None) -> None:
        """A new process: open the run, restore the newest (or a step of the lineage), continue from there."""
        self.start()
        try:
            found, _ = load(self.tier, parent_step, INLINE)
        except NothingGood:
            # Made in place, the first commit of all may be torn, and nobody can tell that from damage: restore(step=0).
            nothing_owed = any(oldest is None for _, oldest in self.ledger.choices())
            in_place = not self.disk.links or self.ledger.mode == "unsafe"
            must(in_place and nothing_owed, "nothing good, and the user is asked to start over")
            self.begin(None)
            return
        if (at := at_of(found)) and at in self.ledger.mending:
            self._mended(at)
        self.begin(at_of(found))
        if found.generation and not found.generation.verified:
            self.run.conclude(found.generation, [])
            self.ledger.verified.add(found.generation.id)
        self.run.marks.point()

    def begin(self, parent: GenerationId | None) -> None:
        ledger = self.ledger
        ident = f"{ledger.idents + 1:08x}"
        ledger.orders[ident] = 1 + max((one.order for one in self.run.survey.incarnations.values()), default=0)
        ledger.parents[ident] = parent
        self.run.begin(parent)

    def save(self, step: int, meanwhile: Callable[[], object] = lambda: None) -> bool:
        """One save; whether it was acknowledged. An error of the tree is an answer, any other is not.

        `meanwhile` is done when its first chunk is under way.
        """
        ledger = self.ledger
        at = self.run.admit(step)
        ledger.attempts += ledger.disturbed
        ledger.given[at] = payload(at, ledger.attempts if ledger.disturbed else 0, ledger.weight)
        if at.incarnation != ledger.current:
            ledger.opening.add(at.incarnation)
        others = Others(self, at, meanwhile)
        topic: Any = others if ledger.ranks > 1 else None
        try:
            save(self.run, step, others.part(0), chunk_bytes=CHUNK_BYTES, meanwhile=others.begin, topic=topic)
        except CommitUnknown:
            return False
        except Overtaken:
            ledger.given.pop(at)
            newer = [one for one in ledger.acknowledged if one.incarnation == at.incarnation and one.step > step]
            must(newer, f"{at} was given up for a newer one, and there is none")
            return False
        except LastgoodError:
            ledger.given.pop(at)
            must(ledger.disturbed, "a save failed without a fault")
            if not any(one.incarnation == at.incarnation for one in ledger.given):
                ledger.opening.discard(at.incarnation)
            return False
        ledger.acknowledged.add(at)
        ledger.current = at.incarnation
        ledger.opening.clear()
        self.forget()
        must(not ledger.in_flight or all(at in table for table in ledger.tables), f"{at} is durable, they say")
        return True

    def label(self, step: int, loss: float, milestone: bool = False) -> bool:
        """Add a metric, and with `milestone` that too, to a generation; whether that was acknowledged."""
        labels, at = self.ledger.labels, self.ledger.newest(step)
        labels.ask(at, loss, milestone)
        try:
            self.run.label(at, milestone, {LOSS: loss})
        except LastgoodError:
            must(self.ledger.disturbed, "a label failed without a fault")
            return False
        labels.acknowledge(at, loss, milestone)
        return True

    def forget(self) -> None:
        """What the tier let go by itself is no more of the writer's."""
        if self.ledger.in_flight:
            there = {named(name) for name in self.run.tier.list("gen")}
            for at in self.run.survey.generations.keys() - there:
                del self.run.survey.generations[at]

    def upkeep(self) -> None:
        """Verify and clean, as behind the training loop."""
        try:
            try:
                self.run.verify(UPKEEP)
            finally:
                self._note_verified()
            self.run.clean()
        except LastgoodError:
            must(self.ledger.disturbed or self.ledger.rotten, "upkeep failed without a fault")

    def steps(self, *steps: int) -> None:
        for step in steps:
            self.save(step)
            self.upkeep()

    def fault(self, at: int, code: int, sticky: bool = False, applied: bool = False) -> None:
        self.disk.fault = Fault(at, code, sticky, applied)
        self.ledger.disturbed = True
        self.ledger.full = code == errno.ENOSPC

    def heal(self) -> None:
        self.disk.fault = None
        self.ledger.full = False

    def carry_on(self) -> None:
        """What the next process does after a crash: all of it must work, and hold."""
        self.open()
        newest = max((at.step for at in self.ledger.given), default=0)
        self.steps(newest + 1)
        found, state = load(self.tier, workers=INLINE)
        at = at_of(found)
        must(at is not None and at.step == newest + 1, f"saved step {newest + 1}, and {at} is found")
        must(at is not None and state == self.ledger.given[at], f"{at} is not as it was saved")

    def mend(self, step: int) -> None:
        """Read a generation again, and rebuild it from its parity."""
        at = self.ledger.newest(step)
        self.ledger.mending.add(at)
        try:
            generation = self.run.survey.generations[at]
            _, done = self.run.mender.read_again(generation, UPKEEP, self.run.mender.reading(generation, UPKEEP))
        except LastgoodError:
            done = False
        must(done or self.ledger.disturbed, f"{at} could not be rebuilt")
        if done:
            self._mended(at)

    def _mended(self, at: GenerationId) -> None:
        self.ledger.rotten.discard(at)
        self.ledger.mending.discard(at)

    def rewind(self, step: int) -> None:
        found, _ = load(self.tier, step, INLINE)
        self.begin(at_of(found))
        self.run.marks.point()

    def rot(self, step: int, name: str = layout.blob_name(0), offset: int = 5000) -> None:
        """One bit of a committed file goes bad on the medium."""
        at = self.ledger.newest(step)
        self.ledger.rotten.add(at)
        path = f"{ROOT}/{layout.folder(at)}/{name}"
        if self.ledger.in_flight:
            if name == layout.COMMIT:  # in the table: tests/storage/test_slots.py
                name = layout.manifest_name(0)
            slot, start, _ = self.tier._find(f"{layout.folder(at)}/{name}")
            path, offset = f"{ROOT}/slots/{slot:02d}", start + offset
        self.disk.rot(path, offset)


class Noted:
    """A tier over slots that writes into the ledger, before each call, what a crash may bring up until it returned."""

    def __init__(self, tier: Slots, world: World) -> None:
        self._tier, self._world, self._owned = tier, world, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def create(self, name: str, length: int) -> Upload:
        return self._noting(lambda: self._tier.create(name, length), self._there())

    def put_new(self, name: str, data: bytes) -> None:
        folder, _, file = name.removeprefix("gen/").rpartition("/")
        at, kept = layout.parse_folder(folder), self._there()
        if at is not None and file == layout.COMMIT and at not in kept:
            spare = [one for one, marks in kept.items() if layout.VERIFIED in marks and layout.DAMAGED not in marks]
            spare = spare or [one for one, marks in kept.items() if layout.DAMAGED not in marks]
            kept = {**{one: kept[one] for one in spare[-1:]}, at: {}}
        if at is not None and file == layout.DAMAGED and at not in self._world.ledger.rotten:
            disk = self._world.disk
            must(disk.fault and disk.fault.fired, f"{at} is good, and marked as damaged")
            self._world.ledger.doubted.add(at)
        sure = at is not None and file in (layout.COMMIT, layout.VERIFIED, layout.DAMAGED, layout.GOING)
        self._noting(lambda: self._tier.put_new(name, data), kept, sure)

    def delete(self, name: str) -> None:
        folder, _, file = name.removeprefix("gen/").rpartition("/")
        kept = self._there()
        if file == layout.COMMIT:
            kept.pop(named(folder), None)
        self._noting(lambda: self._tier.delete(name), kept, name.startswith("gen/"))

    def _there(self) -> dict[GenerationId, Mapping[str, int | None]]:
        """What is committed, in the order in which it was."""
        found = {named(name): self._tier.list(f"gen/{name}") for name in self._tier.list("gen")}
        return {at: names for at, names in found.items() if layout.COMMIT in names}

    def _noting(self, call: Callable[[], Any], after: Iterable[GenerationId], sure: bool = False) -> Any:
        """`sure`: once it has returned, only this can be there."""
        ledger, then = self._world.ledger, frozenset(after)
        if then not in ledger.tables:
            ledger.tables = (*ledger.tables, then)
        result = call()
        if sure:
            ledger.tables = (then,)
        return result


class Others:
    """The ranks that write a generation with the first one, as its `Topic`: some beside it, some when it has sealed."""

    again, failing = False, staticmethod(contextlib.nullcontext)

    def __init__(self, world: World, at: GenerationId, meanwhile: Callable[[], object]) -> None:
        self._world, self._at, self._ranks, self._meanwhile = world, at, world.ledger.ranks, meanwhile
        self._parts: dict[int, Any] = {}

    def part(self, rank: int) -> State:
        """What this rank writes of the state."""
        whole = self._world.ledger.given[self._at]
        return {name: whole[name] for number, name in enumerate(whole) if number % self._ranks == rank}

    def begin(self) -> None:
        """The first chunk of the first rank is under way."""
        self._meanwhile()
        for rank in range(1, self._ranks, 2):
            self._share(rank)

    def agree(self, mine: Any, decide: Callable[[list[Any]], Any]) -> Any:
        for rank in range(1, self._ranks):
            self._share(rank)
        failed = [one for one in self._parts.values() if isinstance(one, LastgoodError)]
        if failed:
            raise failed[0]
        folder, first = mine
        return decide([(folder, one) for _, one in sorted({0: first, **self._parts}.items())])

    def fail(self, error: BaseException) -> None:
        """They hear of it, and have written what they have written."""

    def _share(self, rank: int) -> None:
        if rank not in self._parts:
            try:
                part = share(self._world.tier, self._at, rank, self.part(rank), chunk_bytes=CHUNK_BYTES)
                self._parts[rank] = msgspec.to_builtins(part)
            except LastgoodError as error:
                self._parts[rank] = error

"""The crash model runs the real code for saves, verification, deletion and restores in the states that crashes leave.

- `hostile.py` is the disk. It keeps in memory both the content that readers see and the content that was synced. A
  *crash state* is another such disk, with the content and the names that one power loss (each unsynced sector, length
  and name is lost independently) or one kill would leave.
- `ledger.py` records the saves of a run and what must be kept of them; `labels.py` does so for labels.
- `promises.py` checks one crash state against the ledger.
- A `World` (in this module) drives one run on the disk, one process after the other, and keeps the ledger. Before every
  call that changes the disk, its `Judge` (judge.py) draws crash states of that instant. Each distinct state is counted
  once, and checked once for each ledger. In some states the next process is played: it opens, restores and saves, and
  may crash.
- `two_places.py` plays a run in two places, each a `World` of its own, with copies and repairs between them.
- `scenarios.py` and `place_scenarios.py` define the histories, which `campaigns/crash_model.py` plays until a million
  states are checked.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from lastgood.engine.arena import Arena
from lastgood.errors import CommitUnknown, LastgoodError, NothingGood, Overtaken
from lastgood.format import layout
from lastgood.policy.retention import Keep
from lastgood.ports import Upload
from lastgood.records import GenerationId
from lastgood.run.known import Environment
from lastgood.run.writer import RunWriter
from lastgood.storage.slots import Slots

from .hostile import Fault, Folder, HostileDisk, Inode
from .judge import Deputy, Judge, step_of
from .labels import LOSS
from .ledger import Ledger, Violation, must, named, payload
from .plain import State, load, save, share
from .promises import CHUNK_BYTES, INLINE, at_of, hold, hold_weakly, opened, survived

KEEPS = [Keep(last=1), Keep(last=2), Keep(last=1, every=2)]
PARTS = [(layout.blob_name(0), 5000), (layout.blob_name(0), 40), (layout.manifest_name(0), 60), (layout.COMMIT, 60)]
"""Files of a generation, and the offset of the byte to damage in each."""


class World:
    """Several processes, one after the other, on one disk; each is driven as a training loop would drive it."""

    def __init__(self, disk: HostileDisk, ledger: Ledger, judge: Judge | Deputy, depth: int = 0) -> None:
        self.disk, self.ledger, self.depth = disk, ledger, depth
        self.judge: Judge | Deputy = judge
        self.disk.fault = None
        self.disk.watch = self._watch
        self.past: list[str] = []
        self.arena = Arena(3 * CHUNK_BYTES, CHUNK_BYTES)
        """the memory in which generations are verified and mended"""
        self.continues = ledger.mode == "atomic_dirsync"

    # ---- what the judge asks -----------------------------------------------------------------------------------------

    def crashes(self, most: int) -> Iterable[HostileDisk]:
        return self.disk.crashes(self.judge.rng, most)

    def key(self) -> int:
        return self.ledger.key()

    def hold(self, state: HostileDisk) -> bool:
        if self.ledger.mode != "atomic_dirsync":
            return hold_weakly(state, self.ledger)
        hold(state, self.ledger)
        return True

    def killed(self) -> World:
        return World(self.disk.copied(), self.ledger.copied(), self.judge, self.depth + 1)

    def next(self, state: HostileDisk) -> World:
        return World(state, survived(state, self.ledger), self.judge, self.depth + 1)

    # ---- what the disk reports ---------------------------------------------------------------------------------------

    @property
    def tier(self) -> Any:
        tier = opened(self.disk, self.ledger)
        return Noted(tier, self) if isinstance(tier, Slots) else tier

    def _watch(self, call: str, path: str) -> None:
        path = path.removeprefix(self.disk.path).removeprefix("/")
        folder, _, name = path.rpartition("/")
        at = layout.parse_folder(folder.removeprefix("gen/"))
        self.past.append(f"{call} {path}")
        if self.judge.violation:
            return
        try:
            self.judge.crash(self, step_of(call, path))
            if at is not None and call == "open" and name.startswith(layout.GOING):
                self.ledger.end(at)
            # On a full disk a generation is deleted without a record that says so. A torn COMMIT, which can exist if
            # it was created in place, is no commit.
            going = at in self.ledger.acknowledged - self.ledger.mending and (call, name) == ("remove", layout.COMMIT)
            if at and going and layout.COMMIT in self.disk.root.names["gen"].names.get(folder[4:], Folder()).names:
                self.ledger.end(at)
            if at is not None and call == "open" and name.startswith(layout.DAMAGED):
                self.mark_damaged(at)
            if at is not None and name == layout.COMMIT and call in ("link", "rename", "open"):
                self._seal(at, self.disk._find(f"{self.disk.path}/{folder}").names)
        except Exception as error:
            reason = str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}"
            self.judge.violation = Violation(f"{reason}\n  level {self.depth}: {'; '.join(self.past[-8:])}")
            raise self.judge.violation from error

    def mark_damaged(self, at: GenerationId) -> None:
        """Record that a generation is being marked as damaged. Without damage, a read must have failed before."""
        if at in self.ledger.rotten:
            self.ledger.found.add(at)
            return
        must(self.disk.fault and self.disk.fault.fired, f"{at} is being marked as damaged although it is good")
        self.ledger.doubted.add(at)

    def _seal(self, at: GenerationId, names: dict[str, Inode]) -> None:
        if layout.COMMIT not in names and not self.ledger.receives_copies and at not in self.ledger.mending:
            staged = {one: layout.COMMIT for one in names if one.startswith(f"{layout.COMMIT}.")}
            sealed = {staged.get(one, one): node for one, node in names.items() if one in staged or one[-4:] != ".tmp"}
            self.ledger.sealed[at] = {one: node.digest() for one, node in sealed.items()}

    def _ident(self) -> str:
        self.ledger.idents += 1
        return f"{self.ledger.idents:08x}"

    def _note_verified(self) -> None:
        self.ledger.verified |= {at for at, one in self.run.survey.generations.items() if one.verified}

    # ---- actions of a training loop ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a new process, which opens the run for writing."""
        self.run = RunWriter(
            self.tier,
            INLINE,
            keep=self.ledger.keep,
            parity=self.ledger.parity,
            environment=Environment(new_id=self._ident, wall_seconds=lambda: 0.0, monotonic_seconds=lambda: 0.0),
        )
        self._note_verified()
        known = self.run.survey.generations
        # A new process knows of damage only by a durable mark, or if the COMMIT itself cannot be read.
        self.ledger.found = {at for at in self.ledger.rotten if at not in known or known[at].damaged}
        if self.disk.fault is None:
            self.ledger.labels.settle(self.run.survey.generations.values())
        if not self.ledger.receives_copies:
            self.hold_settled()

    def hold_settled(self) -> None:
        """Check that the opening has removed what was never committed."""
        if not self.ledger.disturbed:
            # A torn COMMIT, which was created in place, may name any older parent: the writer keeps older folders.
            unsure = max((at.step for at in self.run.survey.broken), default=0)
            for name, folder in self.disk.root.names.get("gen", Folder()).names.items():
                stays = layout.COMMIT in folder.names or named(name).step < unsure or named(name) in self.ledger.rotten
                must(stays, f"opening did not delete {name}, which has no COMMIT: {sorted(folder.names)}")

    def open(self, parent_step: int | None = None) -> None:
        """Start a new process: open the run, restore the newest generation (or a step), and continue from it."""
        self.start()
        try:
            found, _ = load(self.tier, parent_step, INLINE)
        except NothingGood:
            # The first COMMIT may be torn if it was created in place, which looks like damage: the user then calls
            # restore(step=0).
            nothing_owed = any(oldest is None for _, oldest in self.ledger.choices())
            in_place = not self.disk.links or self.ledger.mode == "unsafe"
            must(in_place and nothing_owed, "a restore finds nothing good although a generation must exist")
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
        incarnations = self.run.known.everywhere.incarnations.values()
        ledger.orders[ident] = 1 + max((one.order for one in incarnations), default=0)
        ledger.parents[ident] = parent
        self.run.begin(parent)

    def save(self, step: int, meanwhile: Callable[[], object] = lambda: None) -> bool:
        """Save once; returns whether the save was acknowledged. A LastgoodError is allowed if a fault was injected.

        `meanwhile` is called after the first chunk was consumed.
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
            must(newer, f"{at} was given up for a newer save although none is acknowledged")
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
        must(
            not ledger.in_flight or all(at in table for table in ledger.tables),
            f"{at} was acknowledged, but a crash may leave a table without it",
        )
        return True

    def label(self, step: int, loss: float, milestone: bool = False) -> bool:
        """Label a generation with a metric and, if `milestone`, as one; returns whether the label was acknowledged."""
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
        """Remove generations from the writer's survey that a commit in slots has deleted."""
        if self.ledger.in_flight:
            existing = {named(name) for name in self.run.tier.list("gen")}
            for at in self.run.survey.generations.keys() - existing:
                del self.run.survey.generations[at]

    def upkeep(self) -> None:
        """Verify and delete, as the upkeep thread does between saves."""
        try:
            try:
                self.run.verify(self.arena)
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
        """Play the next process after a crash: it opens, restores and saves, each of which must succeed."""
        self.open()
        newest = max((at.step for at in self.ledger.given), default=0)
        self.steps(newest + 1)
        found, state = load(self.tier, workers=INLINE)
        at = at_of(found)
        must(at is not None and at.step == newest + 1, f"step {newest + 1} was saved, but a restore finds {at}")
        must(at is not None and state == self.ledger.given[at], f"the loaded bytes of {at} differ from the saved ones")

    def mend(self, step: int) -> None:
        """Read a generation again and rebuild it from its parity."""
        at = self.ledger.newest(step)
        self.ledger.mending.add(at)
        try:
            generation = self.run.survey.generations[at]
            begun = self.run.mender.reading(generation, self.arena)
            _, done = self.run.mender.read_again(generation, self.arena, begun)
        except LastgoodError:
            done = False
        must(done or self.ledger.disturbed, f"{at} could not be rebuilt")
        if done:
            self._mended(at)

    def _mended(self, at: GenerationId) -> None:
        self.ledger.rotten.discard(at)
        self.ledger.found.discard(at)
        self.ledger.mending.discard(at)

    def rewind(self, step: int) -> None:
        found, _ = load(self.tier, step, INLINE)
        self.begin(at_of(found))
        self.run.marks.point()

    def rot(self, step: int, name: str = layout.blob_name(0), offset: int = 5000) -> None:
        """Flip one bit of a committed file on the medium."""
        at = self.ledger.newest(step)
        self.ledger.rotten.add(at)
        path = f"{self.disk.path}/{layout.folder(at)}/{name}"
        if self.ledger.in_flight:
            if name == layout.COMMIT:  # part of the table, whose damage tests/storage/test_slots.py tests
                name = layout.manifest_name(0)
            slot, start, _ = self.tier._find(f"{layout.folder(at)}/{name}")
            path, offset = f"{self.disk.path}/slots/{slot:02d}", start + offset
        self.disk.rot(path, offset)


class Noted:
    """A tier in slots that records in the ledger, before each call, which tables a crash during the call may leave."""

    def __init__(self, tier: Slots, world: World) -> None:
        self._tier, self._world, self._owned = tier, world, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def create(self, name: str, length: int) -> Upload:
        return self._noting(lambda: self._tier.create(name, length), self._committed())

    def put_new(self, name: str, data: bytes) -> None:
        folder, _, file = name.removeprefix("gen/").rpartition("/")
        at, kept = layout.parse_folder(folder), self._committed()
        if at is not None and file == layout.COMMIT and at not in kept:
            spare = [one for one, marks in kept.items() if layout.VERIFIED in marks and layout.DAMAGED not in marks]
            spare = spare or [one for one, marks in kept.items() if layout.DAMAGED not in marks]
            kept = {**{one: kept[one] for one in spare[-1:]}, at: {}}
        if at is not None and file == layout.DAMAGED:
            self._world.mark_damaged(at)
        sure = at is not None and file in (layout.COMMIT, layout.VERIFIED, layout.DAMAGED, layout.GOING)
        self._noting(lambda: self._tier.put_new(name, data), kept, sure)

    def delete(self, name: str) -> None:
        folder, _, file = name.removeprefix("gen/").rpartition("/")
        kept = self._committed()
        if file == layout.COMMIT:
            kept.pop(named(folder), None)
        self._noting(lambda: self._tier.delete(name), kept, name.startswith("gen/"))

    def _committed(self) -> dict[GenerationId, Mapping[str, int | None]]:
        """The committed generations and the files of each, in the order of their commits."""
        found = {named(name): self._tier.list(f"gen/{name}") for name in self._tier.list("gen")}
        return {at: names for at, names in found.items() if layout.COMMIT in names}

    def _noting(self, call: Callable[[], Any], after: Iterable[GenerationId], sure: bool = False) -> Any:
        """Make a call after which the table may hold `after`. If `sure`, it must hold it once the call has returned."""
        ledger, then = self._world.ledger, frozenset(after)
        if then not in ledger.tables:
            ledger.tables = (*ledger.tables, then)
        result = call()
        if sure:
            ledger.tables = (then,)
        return result


class Others:
    """The other ranks of a save, as the `Topic` of rank 0. Odd ranks write while rank 0 does, even ones after it."""

    is_retry, failing = False, staticmethod(contextlib.nullcontext)

    def __init__(self, world: World, at: GenerationId, meanwhile: Callable[[], object]) -> None:
        self._world, self._at, self._ranks, self._meanwhile = world, at, world.ledger.ranks, meanwhile
        self._parts: dict[int, Any] = {}

    def part(self, rank: int) -> State:
        """The part of the state that this rank writes."""
        whole = self._world.ledger.given[self._at]
        return {name: whole[name] for number, name in enumerate(whole) if number % self._ranks == rank}

    def begin(self) -> None:
        """Write the parts of the odd ranks; called after the first chunk of rank 0 was consumed."""
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
        """Do nothing: the files that the other ranks have written stay."""

    def _share(self, rank: int) -> None:
        if rank not in self._parts:
            try:
                part = share(self._world.tier, self._at, rank, self.part(rank), chunk_bytes=CHUNK_BYTES)
                self._parts[rank] = msgspec.to_builtins(part)
            except LastgoodError as error:
                self._parts[rank] = error

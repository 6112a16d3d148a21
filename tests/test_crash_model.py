"""Promises 1 to 3 in every state that a crash can leave, by the real code on a disk that loses what was not synced.

A `World` drives one run over a `HostileDisk` and writes into its `Ledger` what was promised. Before every call that
changes the disk, a `Judge` looks at what a power loss or a kill would leave at that instant: each state is loaded, held
against the ledger, and opened again for writing, where it may crash anew. prove/crash_model.py runs the same for hours.
"""

from __future__ import annotations

import errno
import functools
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from crash_disk import ROOT, Fault, Folder, HostileDisk, Inode
from harness import State, load, save
from lastgood.engine.arena import Arena
from lastgood.engine.inline import Inline
from lastgood.errors import CommitUnknown, Damaged, LastgoodError, NothingGood, Overtaken, StepTaken
from lastgood.format import layout
from lastgood.format.commit import read_manifest, survey
from lastgood.plan.retention import Keep
from lastgood.ports import Tier, Upload
from lastgood.rawio.files import round_up
from lastgood.records import Generation, GenerationId, Mark, Pointer
from lastgood.run import places, reader
from lastgood.run.writer import RunWriter
from lastgood.tiers.disk import Disk, WriteMode
from lastgood.tiers.slots import Slots

INLINE = Inline()
CHUNK_BYTES = 4096
UPKEEP = Arena(3 * CHUNK_BYTES, CHUNK_BYTES)


class Violation(AssertionError):
    """A promise that did not hold, with the way to it."""


@functools.lru_cache(4096)
def payload(at: GenerationId, attempt: int, weight: int) -> State:
    """A state that no other save has."""
    rng = random.Random(f"{at} {attempt}")
    return {"w": rng.randbytes(weight), "b": rng.randbytes(40), "none": b""}


@functools.lru_cache(4096)
def decoded(data: bytes, kind: type) -> object:
    """The record in these bytes, or None."""
    try:
        return layout.decode(data, kind, "")
    except Damaged:
        return None


# ---- what was promised -------------------------------------------------------------------------------------------


@dataclass
class Ledger:
    """What the run was given, what it promised, and what may have gone since."""

    keep: Keep = field(default_factory=Keep)
    mode: WriteMode = "atomic_dirsync"
    direct: bool = False
    given: dict[GenerationId, State] = field(default_factory=dict)
    """each state whose save has begun and has not failed"""
    sealed: dict[GenerationId, dict[str, int]] = field(default_factory=dict)
    """digests of the files beside a COMMIT, from when it was about to be created"""
    acknowledged: set[GenerationId] = field(default_factory=set)
    verified: set[GenerationId] = field(default_factory=set)
    ending: set[GenerationId] = field(default_factory=set)
    """retention has begun to delete them"""
    rotten: set[GenerationId] = field(default_factory=set)
    mending: set[GenerationId] = field(default_factory=set)
    """of the rotten ones: being rebuilt from parity, so that they may be good again"""
    doubted: set[GenerationId] = field(default_factory=set)
    """marked as damaged after a read failed: good, and given up"""
    orders: dict[str, int] = field(default_factory=dict)
    parents: dict[str, GenerationId | None] = field(default_factory=dict)
    current: str | None = None
    opening: set[str] = field(default_factory=set)
    """incarnations newer than `current` whose record may or may not be there"""
    idents: int = 0
    attempts: int = 0
    parity: str | None = None
    weight: int = 4700
    """bytes of the largest tensor of a save"""
    disturbed: bool = False
    """an error was injected, so litter and stale hints are no violation"""
    in_flight: int = 0
    """how many uploads the slots were announced; 0: the run lives in directories"""
    tables: tuple[frozenset[GenerationId], ...] = (frozenset(),)
    """of slots: all that a crash may bring up, each in full: what was durable last, and what nobody can say of"""

    def copied(self) -> Ledger:
        fresh = {name: type(value)(value) for name, value in vars(self).items() if isinstance(value, (dict, set))}
        return replace(self, **fresh)

    def rank(self, at: GenerationId) -> tuple[int, int]:
        return self.orders[at.incarnation], at.step

    def line(self, incarnation: str | None) -> list[GenerationId]:
        """Everything given on the way back from an incarnation, newest first."""
        found: list[GenerationId] = []
        bound = layout.STEP_LIMIT
        while incarnation is not None:
            mine = [at for at in self.given if at.incarnation == incarnation and at.step <= bound]
            found += sorted(mine, reverse=True)
            parent = self.parents[incarnation]
            incarnation, bound = (parent.incarnation, parent.step) if parent else (None, 0)
        return found

    def owed(self) -> set[GenerationId]:
        """What must be there, to the bit."""
        return self.acknowledged - self.ending - self.rotten - self.doubted

    def choices(self) -> list[tuple[set[GenerationId], GenerationId | None]]:
        """For each incarnation that may be the newest: what a restore may choose, and the oldest it may choose."""
        owed = self.owed()
        found = []
        for incarnation in {self.current, *self.opening}:
            line = self.line(incarnation)
            found.append((set(line) - (self.rotten - self.mending), next((at for at in line if at in owed), None)))
        return found

    def end(self, at: GenerationId) -> None:
        """Retention begins to delete `at`: only what newer, verified generations make needless may go."""
        if at in self.ending:
            return
        line = self.line(self.current)
        good = self.verified - self.ending - self.rotten - self.doubted
        newer = [one for one in line if one in good and self.rank(one) > self.rank(at)]
        need = self.keep.last if at in good or at not in line else 1
        _must(len(newer) >= need, f"{at} is deleted while {len(newer)} newer ones are verified, of {need}")
        pinned = self.keep.every is not None and at.step % self.keep.every == 0 and at in good
        _must(not pinned, f"{at} is deleted, and was to be kept")
        self.ending.add(at)

    def key(self) -> int:
        """Two ledgers of one key ask the same of a state."""
        owed = frozenset(self.tables) if self.in_flight else frozenset(self.owed())
        return hash((owed, frozenset(self.given), frozenset(self.rotten), self.current, *self.opening))


# ---- the judge -----------------------------------------------------------------------------------------------------


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
    violation: Violation | None = None
    """the first; cleaning up after it is not judged"""
    lost: int = 0
    """of the weaker write modes: states in which something acknowledged is gone"""

    def crash(self, world: World) -> None:
        """Every power loss (or so many of them) and the kill, at this instant."""
        if world.depth and self.rng.random() > self.nest:
            return
        for state in world.disk.crashes(self.rng, self.samples):
            self.see(state, world.ledger, world.depth)
        if self.rng.random() < self.carry_on and world.depth < self.depth:
            World(world.disk.copied(), world.ledger.copied(), self, world.depth + 1).carry_on()

    def see(self, disk: HostileDisk, ledger: Ledger, depth: int) -> None:
        digest = disk.digest()
        self.states.add(digest)
        if (key := hash((digest, ledger.key()))) in self.judged:
            return
        self.judged.add(key)
        if ledger.mode == "atomic_dirsync":
            hold(disk, ledger)
            if depth < self.depth and self.rng.random() < self.carry_on:
                World(disk, survived(disk, ledger), self, depth + 1).carry_on()
        else:
            self.lost += not hold_weakly(disk, ledger)


def opened(disk: HostileDisk, ledger: Ledger) -> Tier:
    """As another process opens the run, or the next one."""
    if ledger.in_flight:
        return places.slots(disk, ROOT, in_flight=ledger.in_flight, direct=ledger.direct)
    return Disk(disk, ROOT, mode=ledger.mode, direct=ledger.direct)


def hold(disk: HostileDisk, ledger: Ledger) -> None:
    """Promises 1 to 3 in one state, in which everything is durable."""
    if ledger.in_flight:
        hold_in_slots(disk, ledger)
        return
    folders = disk.root.names.get("gen", Folder()).names
    for name, folder in folders.items():
        at = layout.parse_folder(name)
        _must(isinstance(folder, Folder) and at is not None, f"{name} lies in gen/")
        _whole(disk, ledger, at, folder.names)
    for at in ledger.owed():
        names = folders[layout.folder(at)[4:]].names if layout.folder(at)[4:] in folders else {}
        _must(layout.COMMIT in names, f"{at} was acknowledged, and is gone")
    _hints(disk, ledger, folders)
    choices = ledger.choices()
    try:
        found, state = load(Disk(disk, ROOT, direct=ledger.direct), workers=INLINE)
    except NothingGood as error:
        _must(any(oldest is None for _, oldest in choices), f"nothing good, they say: {error}")
        return
    at = found.generation and found.generation.id
    if at is None:
        _must(any(oldest is None for _, oldest in choices), "nothing is there, they say")
        return
    _must(at in ledger.given, f"{at} was never saved")
    _must(state == ledger.given[at], f"{at} is not as it was saved")
    _must(
        any(at in line and (oldest is None or ledger.rank(at) >= ledger.rank(oldest)) for line, oldest in choices),
        f"{at} is chosen, which is abandoned, or older than {[str(oldest) for _, oldest in choices]}",
    )


def hold_in_slots(disk: HostileDisk, ledger: Ledger) -> None:
    """The same where a table says all: one of those that may be there is there, to the bit, and its newest loads."""
    tier = opened(disk, ledger)
    seen = survey(tier)
    _must(not seen.broken and not seen.incomplete and not seen.going, f"half of {[*seen.broken, *seen.incomplete]}")
    tables = " or ".join(str(sorted(map(str, table))) for table in ledger.tables)
    _must(seen.generations.keys() in ledger.tables, f"{sorted(map(str, seen.generations))} is there, and not {tables}")
    for at, generation in seen.generations.items():
        if at not in ledger.rotten:
            _must(bits(tier, generation) == ledger.given.get(at), f"{at} is not as it was saved")
        _must(at not in ledger.rotten - ledger.verified or not generation.verified, f"{at} is damaged, and verified")
    if seen.pointer and not ledger.rotten and not ledger.disturbed:
        at = GenerationId(step=seen.pointer.step, incarnation=seen.pointer.incarnation)
        _must(at in seen.generations and seen.generations[at].verified, f"the pointer names {at}")
    good = {at for at, one in seen.generations.items() if at not in ledger.rotten and not one.damaged}
    newest = [next((at for at in ledger.line(one) if at in good), None) for one in {ledger.current, *ledger.opening}]
    try:
        found = reader.newest_good(tier, seen, None, lambda generation, _: bits(tier, generation) and None)
    except NothingGood as error:
        _must(None in newest, f"nothing good, they say: {error}")
        return
    at = found.generation and found.generation.id
    _must(at in newest, f"{at} is chosen, and not {[str(one) for one in newest]}")


def bits(tier: Tier, generation: Generation) -> State:
    manifest = read_manifest(tier, generation)
    size = sum(round_up(blob.length, blob.chunk_bytes) for blob in manifest.blobs)
    fetch = reader.opened(tier, generation, manifest, Arena(size, CHUNK_BYTES), INLINE)
    return {piece.name: bytes(fetch(piece.name)) for piece in manifest.pieces}


def _whole(disk: HostileDisk, ledger: Ledger, at: GenerationId, names: dict[str, object]) -> None:
    """All of it or none of it: a COMMIT that can be believed stands beside exactly what it was made for."""
    node = names.get(layout.COMMIT)
    if node is None or at in ledger.rotten:
        return
    sealed = ledger.sealed.get(at)
    _must(sealed is not None, f"{at} has a COMMIT, and never came to one")
    if disk.links:
        _must(node.digest() == sealed[layout.COMMIT], f"the COMMIT of {at} is torn, or replaced")
    elif decoded(bytes(node.data), layout.Commit) is None:
        _must(at not in ledger.owed(), f"the COMMIT of {at} is torn")
        return
    for name, digest in sealed.items():
        if name != layout.COMMIT:
            _must(name in names, f"{at} has a COMMIT, and its {name} is gone")
            _must(names[name].digest() == digest, f"{at} has a COMMIT, and its {name} is not as it was written")


def _hints(disk: HostileDisk, ledger: Ledger, folders: dict[str, Folder]) -> None:
    """Pointer and marks may be old, never wrong."""

    def verified(at: GenerationId) -> bool:
        names = folders[layout.folder(at)[4:]].names if layout.folder(at)[4:] in folders else {}
        node = names.get(layout.VERIFIED)
        # Made in place, a mark that a killed process wrote is seen before it is durable: the pointer may outlive it.
        return layout.COMMIT in names and (not disk.links or (node and decoded(bytes(node.data), Mark)) is not None)

    for at in ledger.rotten - ledger.verified:
        _must(not (disk.links and verified(at)), f"{at} is damaged, and marked as verified")
    if ledger.rotten or ledger.disturbed:
        return
    node = disk.root.names.get(layout.POINTER)
    if node is not None:
        pointer = decoded(bytes(node.data), Pointer)
        _must(pointer is not None, "the pointer is torn")
        at = GenerationId(step=pointer.step, incarnation=pointer.incarnation)
        _must(verified(at), f"the pointer names {at}, which is not there, or not verified")
    link = disk.root.names.get("latest_ok")
    if link is not None:
        at = layout.parse_folder(link.removeprefix("gen/"))
        _must(at is not None and verified(at), f"latest_ok names {link}, which is not there, or not verified")


def hold_weakly(disk: HostileDisk, ledger: Ledger) -> bool:
    """Promise 1 only: what loads is what was saved. Returns whether all that was acknowledged would still be found."""
    choices = ledger.choices()
    try:
        found, state = load(Disk(disk, ROOT, direct=ledger.direct), workers=INLINE)
    except NothingGood:
        return not ledger.owed()
    at = found.generation and found.generation.id
    if at is None:
        return not ledger.owed()
    _must(at in ledger.given and state == ledger.given[at], f"{at} is not as it was saved")
    return any(at in line and (not oldest or ledger.rank(at) >= ledger.rank(oldest)) for line, oldest in choices)


def survived(disk: HostileDisk, ledger: Ledger) -> Ledger:
    """What the next process owes after a power loss: whatever it finds committed is durable now."""
    after = ledger.copied()
    if after.in_flight:
        there = survey(opened(disk, ledger)).generations.keys()
        after.tables = (frozenset(there),)
        after.acknowledged |= there
    for name, folder in disk.root.names.get("gen", Folder()).names.items():
        at = layout.parse_folder(name)
        if layout.COMMIT in folder.names and decoded(bytes(folder.names[layout.COMMIT].data), layout.Commit):
            after.acknowledged.add(at)
    records = disk.root.names.get("incarnations", Folder()).names
    for ident in sorted(after.opening, key=after.orders.__getitem__):
        if any(name.startswith(f"{after.orders[ident]:06d}-{ident}") and name.endswith(".json") for name in records):
            after.current = ident
    after.opening.clear()
    return after


def _must(holds: object, otherwise: str) -> None:
    if not holds:
        raise Violation(otherwise)


# ---- the world -----------------------------------------------------------------------------------------------------


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
            _must(disk.fault and disk.fault.fired, f"{at} is good, and marked as damaged")
            self._world.ledger.doubted.add(at)
        sure = at is not None and file in (layout.COMMIT, layout.VERIFIED, layout.DAMAGED, layout.GOING)
        self._noting(lambda: self._tier.put_new(name, data), kept, sure)

    def delete(self, name: str) -> None:
        folder, _, file = name.removeprefix("gen/").rpartition("/")
        kept = self._there()
        if file == layout.COMMIT:
            kept.pop(layout.parse_folder(folder), None)
        self._noting(lambda: self._tier.delete(name), kept, name.startswith("gen/"))

    def _there(self) -> dict[GenerationId, Mapping[str, int | None]]:
        """What is committed, in the order in which it was."""
        found = {layout.parse_folder(name): self._tier.list(f"gen/{name}") for name in self._tier.list("gen")}
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
            self.judge.crash(self)
            if at is not None and call == "open" and name.startswith(layout.GOING):
                self.ledger.end(at)
            # On a full disk a generation goes without its reason; half a COMMIT, made in place, is none.
            going = at in self.ledger.acknowledged and (call, name) == ("remove", layout.COMMIT)
            if going and layout.COMMIT in self.disk.root.names["gen"].names.get(folder[4:], Folder()).names:
                self.ledger.end(at)
            if at is not None and call == "open" and name.startswith(layout.DAMAGED) and at not in self.ledger.rotten:
                _must(self.disk.fault and self.disk.fault.fired, f"{at} is good, and marked as damaged")
                self.ledger.doubted.add(at)
            if at is not None and name == layout.COMMIT and call in ("link", "rename", "open"):
                self._seal(at, self.disk._find(f"{ROOT}/{folder}").names)
        except Exception as error:
            told = str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}"
            self.judge.violation = Violation(f"{told}\n  level {self.depth}: {'; '.join(self.past[-8:])}")
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
            new_id=self._ident,
            wall_seconds=lambda: 0.0,
            monotonic_seconds=lambda: 0.0,
        )
        self._note_verified()
        if not self.ledger.disturbed:
            # A torn COMMIT, made in place, may have named anything before it: that stays.
            unsure = max((at.step for at in self.run.survey.broken), default=0)
            for name, folder in self.disk.root.names.get("gen", Folder()).names.items():
                stays = layout.COMMIT in folder.names or layout.parse_folder(name).step < unsure
                _must(stays, f"{name} is left behind for ever: {sorted(folder.names)}")

    def open(self, parent_step: int | None = None) -> None:
        """A new process: open the run, restore the newest (or a step of the lineage), continue from there."""
        self.start()
        try:
            found, _ = load(self.tier, parent_step, INLINE)
        except NothingGood:
            # Made in place, the first commit of all may be torn, and nobody can tell that from damage: restore(step=0).
            nothing_owed = any(oldest is None for _, oldest in self.ledger.choices())
            in_place = not self.disk.links or self.ledger.mode == "unsafe"
            _must(in_place and nothing_owed, "nothing good, and the user is asked to start over")
            self.begin(None)
            return
        if found.generation and found.generation.id in self.ledger.mending:
            self._mended(found.generation.id)
        self.begin(found.generation and found.generation.id)
        if found.generation and not found.generation.verified:
            self.run.conclude(found.generation, [])
            self.ledger.verified.add(found.generation.id)
        self.run.point()

    def begin(self, parent: GenerationId | None) -> None:
        ledger = self.ledger
        ident = f"{ledger.idents + 1:08x}"
        ledger.orders[ident] = 1 + max((one.order for one in self.run.survey.incarnations.values()), default=0)
        ledger.parents[ident] = parent
        ledger.opening.add(ident)
        self.run.begin(parent)
        ledger.current = ident
        ledger.opening.clear()

    def save(self, step: int, meanwhile: Callable[[], object] = lambda: None) -> bool:
        """One save; whether it was acknowledged. An error of the tree is an answer, any other is not.

        `meanwhile` is done when its first chunk is under way.
        """
        ledger = self.ledger
        at = self.run.admit(step)
        ledger.attempts += ledger.disturbed
        ledger.given[at] = payload(at, ledger.attempts if ledger.disturbed else 0, ledger.weight)
        try:
            save(self.run, step, ledger.given[at], chunk_bytes=CHUNK_BYTES, meanwhile=meanwhile)
        except CommitUnknown:
            return False
        except Overtaken:
            ledger.given.pop(at)
            newer = [one for one in ledger.acknowledged if one.incarnation == at.incarnation and one.step > step]
            _must(newer, f"{at} was given up for a newer one, and there is none")
            return False
        except LastgoodError:
            ledger.given.pop(at)
            _must(ledger.disturbed, "a save failed without a fault")
            return False
        ledger.acknowledged.add(at)
        self.forget()
        _must(not ledger.in_flight or all(at in table for table in ledger.tables), f"{at} is durable, they say")
        return True

    def forget(self) -> None:
        """What the tier let go by itself is no more of the writer's."""
        if self.ledger.in_flight:
            there = {layout.parse_folder(name) for name in self.run.tier.list("gen")}
            for at in self.run.survey.generations.keys() - there:
                del self.run.survey.generations[at]

    def look_after(self) -> None:
        """Verify and clean, as behind the training loop."""
        try:
            try:
                self.run.verify(UPKEEP)
            finally:
                self._note_verified()
            self.run.clean()
        except LastgoodError:
            _must(self.ledger.disturbed or self.ledger.rotten, "upkeep failed without a fault")

    def steps(self, *steps: int) -> None:
        for step in steps:
            self.save(step)
            self.look_after()

    def fault(self, at: int, code: int, sticky: bool = False, applied: bool = False) -> None:
        self.disk.fault = Fault(at, code, sticky, applied)
        self.ledger.disturbed = True

    def heal(self) -> None:
        self.disk.fault = None

    def carry_on(self) -> None:
        """What the next process does after a crash: all of it must work, and hold."""
        self.open()
        newest = max((at.step for at in self.ledger.given), default=0)
        self.steps(newest + 1)
        found, state = load(self.tier, workers=INLINE)
        at = found.generation and found.generation.id
        _must(at is not None and at.step == newest + 1, f"saved step {newest + 1}, and {at} is found")
        _must(state == self.ledger.given[at], f"{at} is not as it was saved")

    def mend(self, step: int) -> None:
        """Read a generation again, and rebuild it from its parity."""
        at = next(at for at in self.ledger.line(self.ledger.current) if at.step == step)
        self.ledger.mending.add(at)
        try:
            _, done = self.run.read_again(self.run.survey.generations[at], UPKEEP)
        except LastgoodError:
            done = []
        _must(done or self.ledger.disturbed, f"{at} could not be rebuilt")
        if done:
            self._mended(at)

    def _mended(self, at: GenerationId) -> None:
        self.ledger.rotten.discard(at)
        self.ledger.mending.discard(at)

    def rewind(self, step: int) -> None:
        found, _ = load(self.tier, step, INLINE)
        self.begin(found.generation and found.generation.id)
        self.run.point()

    def rot(self, step: int, name: str = layout.blob_name(0), offset: int = 5000) -> None:
        """One bit of a committed file goes bad on the medium."""
        at = next(at for at in self.ledger.line(self.ledger.current) if at.step == step)
        self.ledger.rotten.add(at)
        path = f"{ROOT}/{layout.folder(at)}/{name}"
        if self.ledger.in_flight:
            if name == layout.COMMIT:  # in the table: tests/test_slots.py
                name = layout.manifest_name(0)
            slot, start, _ = self.tier._find(f"{layout.folder(at)}/{name}")
            path, offset = f"{ROOT}/slots/{slot:02d}", start + offset
        self.disk.rot(path, offset)


# ---- scenarios -----------------------------------------------------------------------------------------------------

Scenario = Callable[[World], None]


def first_save(world: World) -> None:
    world.open()
    world.steps(1)


def saves_and_retention(world: World) -> None:
    world.open()
    world.steps(1, 2, 3, 4, 5)


def verification_falls_behind(world: World) -> None:
    world.open()
    world.steps(1)
    for burst in (2, 3, 4), (5, 6):
        for step in burst:
            world.save(step)
        world.look_after()


def restarts(world: World) -> None:
    for step in (1, 2, 3, 4):
        world.open()
        world.steps(step)


def rewind_in_place(world: World) -> None:
    world.open()
    world.steps(1, 2)
    world.save(3)
    world.rewind(2)
    world.steps(3, 4, 5)


def rewind_after_restart(world: World) -> None:
    world.open()
    world.steps(1, 2)
    world.save(3)
    world.open(parent_step=2)
    world.steps(3, 4, 5)


def start_over(world: World) -> None:
    world.open()
    world.steps(1, 2)
    world.begin(None)
    world.steps(1, 2, 3)


def failing_calls(world: World) -> None:
    rng = world.judge.rng
    world.open()
    world.steps(1, 2)
    for step in (3, 4, 5):
        code = rng.choice([errno.EIO, errno.ENOSPC])
        world.fault(rng.randrange(60), code, rng.random() < 0.4, code == errno.EIO and rng.random() < 0.5)
        world.steps(step)
        world.heal()
    world.steps(6)


def failing_recovery(world: World) -> None:
    rng = world.judge.rng
    world.open()
    world.steps(1, 2)
    world.save(3)
    for _ in range(2):
        world.fault(rng.randrange(40), rng.choice([errno.EIO, errno.ENOSPC]), rng.random() < 0.4, rng.random() < 0.5)
        try:
            world.open()
        except LastgoodError:
            continue
        finally:
            world.heal()
    world.open()
    world.steps(4)


def damage_before_verification(world: World) -> None:
    world.open()
    world.steps(1)
    world.save(2)
    world.save(3)
    world.rot(3, *world.judge.rng.choice(_PARTS))
    world.look_after()
    world.steps(4, 5)


def damage_after_verification(world: World) -> None:
    world.ledger.keep = Keep(last=2)
    world.open()
    world.steps(1, 2, 3)
    world.rot(3)
    world.open()
    world.steps(4, 5)


def saves_in_flight(world: World) -> None:
    """The inner save ends first; then the outer one is the newest. One more is under way, and never ends."""
    world.open()
    world.steps(1)
    world.run.tier.create("gen/000000000009-00000009/r00000.safetensors", 9000)
    world.save(3, meanwhile=lambda: world.save(2))
    world.look_after()
    world.save(6, meanwhile=lambda: world.save(5, meanwhile=lambda: world.save(4)))
    world.look_after()
    world.steps(7)


def overtaken_saves(world: World) -> None:
    """The inner save ends first, and is newer: the outer one is given up, unless retention wants it for itself."""
    world.open()
    world.steps(1)
    for older in (2, 5):
        world.save(older, meanwhile=lambda step=older: world.save(step + 1))
        world.save(older + 2)
        world.look_after()
    world.steps(8)


def commits_that_nobody_knows_of(world: World) -> None:
    world.open()
    world.steps(1, 2)
    for step in (3, 4, 5, 6):
        world.disk.watch = functools.partial(_fail_at, world, "table", world.judge.rng.random() < 0.5)
        world.save(step)
        world.disk.watch = world._watch
        world.heal()
        world.look_after()
    world.steps(7)


def _fail_at(world: World, name: str, applied: bool, call: str, path: str) -> None:
    if path.endswith(name) and call in ("write", "sync", "rename") and not world.disk.fault:
        world.fault(world.judge.rng.randrange(2), errno.EIO, applied=applied)
    world._watch(call, path)


def rebuilding_from_parity(world: World) -> None:
    world.ledger.parity, world.ledger.keep = "2+2", Keep(last=2)
    world.open()
    world.steps(1, 2)
    for name, offset in _PARTS:
        world.rot(2, name, offset)
    world.mend(2)
    world.steps(3)
    world.open()
    world.steps(4)


def failing_rebuilding(world: World) -> None:
    rng = world.judge.rng
    world.ledger.parity, world.ledger.keep = "2+2", Keep(last=2)
    world.open()
    world.steps(1, 2)
    world.rot(2, *rng.choice(_PARTS))
    for _ in range(2):
        world.fault(rng.randrange(60), rng.choice([errno.EIO, errno.ENOSPC]), rng.random() < 0.4, rng.random() < 0.5)
        world.mend(2)
        world.heal()
    world.steps(3)
    world.open()
    world.steps(4)


_PARTS = [(layout.blob_name(0), 5000), (layout.blob_name(0), 40), (layout.manifest_name(0), 60), (layout.COMMIT, 60)]
"""of a generation, and a place in them"""


def growing_states(world: World) -> None:
    world.open()
    for step in range(1, 7):
        world.ledger.weight = step * 1500
        world.steps(step)


def on_slots(scenario: Scenario, in_flight: int = 1) -> Scenario:
    """The same, where the run lives in slots."""

    @functools.wraps(scenario)
    def played(world: World) -> None:
        scenario(world)

    played.__name__ += "_on_slots"
    played.in_flight = in_flight
    return played


SCENARIOS: list[Scenario] = [
    first_save,
    saves_and_retention,
    verification_falls_behind,
    restarts,
    rewind_in_place,
    rewind_after_restart,
    start_over,
    failing_calls,
    failing_recovery,
    damage_before_verification,
    damage_after_verification,
]
SCENARIOS += [
    *map(on_slots, SCENARIOS),
    overtaken_saves,
    rebuilding_from_parity,
    failing_rebuilding,
    on_slots(overtaken_saves, in_flight=2),
    on_slots(saves_in_flight, in_flight=4),
    on_slots(commits_that_nobody_knows_of),
    on_slots(growing_states, in_flight=2),
]
KEEPS = [Keep(last=1), Keep(last=2), Keep(last=1, every=2)]


def play(scenario: Scenario, judge: Judge, mode: WriteMode = "atomic_dirsync") -> None:
    """One run of a scenario, its variant drawn from the judge's seed. Raises Violation."""
    rng = judge.rng
    disk = HostileDisk(links=rng.random() < 0.8, most_bytes=rng.choice([1 << 30, 1 << 30, 5000, 700]))
    direct = disk.most_bytes != 700 and rng.random() < 0.3
    ledger = Ledger(keep=rng.choice(KEEPS), mode=mode, direct=direct, in_flight=getattr(scenario, "in_flight", 0))
    if ledger.in_flight and mode != "atomic_dirsync":
        return  # slots know one way to write
    world = World(disk, ledger, judge)
    scenario(world)
    judge.crash(world)


# ---- the promises --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["atomic_nodirsync", "unsafe"])
def test_the_weaker_modes_lose_what_was_acknowledged_and_load_nothing_that_was_not_saved(mode):
    judge = Judge(random.Random(0))
    for scenario in (saves_and_retention, rewind_in_place):
        play(scenario, judge, mode)
    assert judge.lost > 0


def begun(links: bool = True, verified: bool = True) -> World:
    """A run that keeps one generation: step 1, verified or not, and step 2 after it. Only kills are looked at."""
    world = World(HostileDisk(links=links), Ledger(keep=Keep(last=1)), Judge(random.Random(0), samples=0, carry_on=0))
    world.open()
    world.save(1)
    if verified:
        world.look_after()
    world.save(2)
    return world


class Killed(BaseException):
    """Stands for SIGKILL."""


def killed_after(world: World, call: str, name: str, do: Callable[[], object]) -> World:
    """The world that the next process finds when this one dies right after a call on a path that ends so."""
    reached: list[str] = []

    def watch(what: str, path: str) -> None:
        if reached:
            raise Killed
        world._watch(what, path)
        if what == call and path.endswith(name):
            reached.append(path)

    world.disk.watch = watch
    with pytest.raises(Killed):
        do()
    return World(world.disk.copied(), world.ledger.copied(), world.judge)


def kept_only_what_was_synced(world: World) -> HostileDisk:
    return world.disk.crashed(lambda kind, ways: ways - 1)


def steps_on(disk: HostileDisk) -> list[int]:
    return [at.step for at in map(layout.parse_folder, sorted(disk.root.names["gen"].names)) if at]


@pytest.mark.parametrize(("links", "call"), [(True, "link"), (False, "sync")])
def test_what_a_killed_process_published_is_durable_before_it_is_continued(links, call):
    """Story: a process died between the link of COMMIT and the sync of its folder. The next one could see the
    generation, continued it and named it as its parent; then the power failed, and a generation was lost for ever."""
    world = killed_after(before := begun(links), call, layout.COMMIT, lambda: before.save(3))
    world.start()
    found, _ = load(world.tier, workers=INLINE)
    assert found.generation and found.generation.step == 3
    world.begin(found.generation.id)
    after, _ = load(Disk(kept_only_what_was_synced(world), ROOT), workers=INLINE)
    assert after == found


@pytest.mark.parametrize("verified", [True, False])  # else its mark would be the first to go, which harms nobody
def test_a_deletion_that_was_cut_short_goes_on_only_once_the_commit_is_durably_gone(verified):
    """Story: a process died between the removal of COMMIT and the sync of its folder. The next one found no COMMIT and
    removed the tensors; then the power failed, and COMMIT was back beside nothing, with its mark of verification."""
    before = begun(verified=verified)
    before.run.verify(UPKEEP)
    before._note_verified()
    world = killed_after(before, "remove", f"1-00000002/{layout.COMMIT}", before.run.clean)
    world.judge = Judge(random.Random(0), samples=64, carry_on=0)
    world.start()
    assert steps_on(world.disk) == [2]


def test_without_links_a_deletion_that_died_over_its_reason_is_done_anew():
    """Story: GOING was created in place and the process died before its bytes. Every later deletion found the name
    taken by other bytes and was refused; the disk filled up."""
    before = begun(links=False)
    before.run.verify(UPKEEP)
    before._note_verified()
    world = killed_after(before, "open", layout.GOING, before.run.clean)
    world.open()
    world.steps(3)
    assert steps_on(world.disk) == [3]


def test_the_empty_folder_of_a_deleted_generation_is_not_taken_for_a_loss():
    """Story: a process died between the last removal and that of the folder. The generation was named as a parent, so
    its empty folder was reported as a lost COMMIT at every restore, and stayed."""
    before = begun()
    before.run.verify(UPKEEP)
    before._note_verified()
    world = killed_after(before, "remove", f"1-00000002/{layout.GOING}", before.run.clean)
    assert load(world.tier, workers=INLINE)[0].stepped_over == []
    world.start()
    assert steps_on(world.disk) == [2]


@pytest.mark.parametrize("name", [layout.blob_name(0), layout.manifest_name(0), layout.COMMIT])
def test_verification_sees_what_the_medium_has_and_not_what_the_cache_shows(name):
    """Story: tensors were read past the cache, the manifest through it and COMMIT not at all; a bit gone bad
    in those was marked as verified, and retention deleted the generation before it."""
    world = begun()
    world.rot(2, name, 60)
    world.look_after()
    assert world.run.newest_verified().step == 1
    assert steps_on(world.disk) == [1, 2]


def test_a_save_whose_commit_is_unknown_is_not_repeated_and_nothing_of_it_is_deleted():
    world = begun()

    def watch(call: str, path: str) -> None:
        if call == "link" and path.endswith(layout.COMMIT):
            world.fault(0, errno.EIO)

    world.disk.watch = watch
    assert not world.save(3)
    with pytest.raises(StepTaken):
        world.run.admit(3)
    assert not world.disk.root.names["gen"].names["000000000003-00000002"].names.keys() & {layout.COMMIT}
    came_true = world.disk.crashed(lambda kind, ways: ways - 1 if kind == "data" else 0)
    assert load(Disk(came_true, ROOT), workers=INLINE)[0].generation.step == 2
    came_true.root.names["gen"].names["000000000003-00000002"].put(layout.COMMIT, _staged(came_true, 3))
    found, state = load(Disk(came_true, ROOT), workers=INLINE)
    assert found.generation.step == 3 and state == world.ledger.given[found.generation.id]


def _staged(disk: HostileDisk, step: int) -> Inode:
    names = disk.root.names["gen"].names[f"{step:012d}-00000002"].names
    return next(node for name, node in names.items() if name.startswith(f"{layout.COMMIT}."))


# ---- the disk itself -----------------------------------------------------------------------------------------------


def test_the_disk_keeps_exactly_what_was_synced():
    disk = HostileDisk()
    for name in ("both", "content", "name", "none"):
        file = disk.open(f"{ROOT}/{name}", "new")
        file.write_at(memoryview(name.encode()), 0)
        if name in ("both", "content"):
            file.sync()
        if name == "both":
            disk.sync_dir(ROOT)
    disk.root.was.pop("name")
    seen: dict[str, set[bytes | None]] = {name: set() for name in ("both", "content", "name", "none")}
    for state in disk.crashes(random.Random(0), 4000):
        for name, found in seen.items():
            node = state.root.names.get(name)
            found.add(None if node is None else bytes(node.data))
    assert seen["both"] == {b"both"}
    assert seen["content"] == {b"content", None}
    assert {b"", b"name", bytes(4)} <= seen["name"] and None not in seen["name"]
    assert {None, b"", b"none"} <= seen["none"]


# ---- all of it ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_promises_1_to_3_hold_in_every_state_that_a_crash_leaves(scenario):
    on_slots = hasattr(scenario, "in_flight")  # these take long; the campaign plays them with every seed
    judge = Judge(random.Random(0), samples=8 if on_slots else 16)
    for seed in range(2 if on_slots else 4):
        judge.rng = random.Random(f"{scenario.__name__} {seed}")
        play(scenario, judge)
    assert len(judge.states) > 100

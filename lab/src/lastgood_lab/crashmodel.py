"""Promises 1 to 3 in every state that a crash can leave, by the real code on a disk that loses what was not synced.

A `World` drives one run over a `HostileDisk` and writes into its `Ledger` what was promised. Before every call that
changes the disk, a `Judge` looks at what a power loss or a kill would leave at that instant: each state is loaded, held
against the ledger, and opened again for writing, where it may crash anew. Scenarios: `scenarios.py`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from lastgood.engine.arena import Arena
from lastgood.engine.inline_executor import Inline
from lastgood.errors import CommitUnknown, Damaged, LastgoodError, NotFinite, NothingGood, Overtaken
from lastgood.format import layout
from lastgood.format.commit import read_manifests, survey
from lastgood.io.files import round_up
from lastgood.limits import STEP_LIMIT
from lastgood.policy.retention import Keep
from lastgood.ports import Tier, Upload
from lastgood.records import Commit, Generation, GenerationId, Mark, Pointer
from lastgood.run import access
from lastgood.run.candidates import Candidates, Found
from lastgood.run.content import read_rank
from lastgood.run.known import Environment
from lastgood.run.writer import RunWriter
from lastgood.storage.directory import Disk, WriteMode
from lastgood.storage.slots import Slots

from .hostile import ROOT, STAGED, Fault, Folder, HostileDisk, Inode
from .labels import LOSS, Labels
from .plain import State, load, save, share

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


Kind = TypeVar("Kind", Commit, Mark, Pointer)


def decoded(data: bytes, kind: type[Kind]) -> Kind | None:
    """The record in these bytes, or None."""
    found = _decoded(data, kind)
    return found if isinstance(found, kind) else None


@functools.lru_cache(4096)
def _decoded(data: bytes, kind: type[Kind]) -> Kind | None:
    try:
        return layout.decode(data, kind, "")
    except Damaged:
        return None


def at_of(found: Found) -> GenerationId | None:
    return found.generation.id if found.generation else None


def named(folder: str) -> GenerationId:
    """The generation of a folder."""
    at = layout.parse_folder(folder)
    if at is None:
        raise Violation(f"{folder} lies in gen/")
    return at


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
    labels: Labels = field(default_factory=Labels)
    """what was added to generations after their commit"""
    orders: dict[str, int] = field(default_factory=dict)
    parents: dict[str, GenerationId | None] = field(default_factory=dict)
    current: str | None = None
    opening: set[str] = field(default_factory=set)
    """incarnations newer than `current` of which the first COMMIT may or may not be there"""
    idents: int = 0
    attempts: int = 0
    parity: str | None = None
    weight: int = 4700
    """bytes of the largest tensor of a save"""
    disturbed: bool = False
    """an error was injected, so litter and stale hints are no violation"""
    full: bool = False
    """the disk is full: only the newest verified generation and pinned ones are owed"""
    ranks: int = 1
    """how many write a generation together"""
    in_flight: int = 0
    """how many uploads the slots were announced; 0: the run lives in directories"""
    tables: tuple[frozenset[GenerationId], ...] = (frozenset(),)
    """of slots: all that a crash may bring up, each in full: what was durable last, and what nobody can say of"""

    def copied(self) -> Ledger:
        fresh: dict[str, Any] = {
            name: type(value)(value) for name, value in vars(self).items() if isinstance(value, (dict, set))
        }
        return replace(self, labels=self.labels.copied(), **fresh)

    def rank(self, at: GenerationId) -> tuple[int, int]:
        return self.orders[at.incarnation], at.step

    def line(self, incarnation: str | None) -> list[GenerationId]:
        """Everything given on the way back from an incarnation, newest first."""
        found: list[GenerationId] = []
        bound = STEP_LIMIT
        while incarnation is not None:
            mine = [at for at in self.given if at.incarnation == incarnation and at.step <= bound]
            found += sorted(mine, reverse=True)
            parent = self.parents[incarnation]
            incarnation, bound = (parent.incarnation, parent.step) if parent else (None, 0)
        return found

    def newest(self, step: int) -> GenerationId:
        """The newest save of `step` in the current line."""
        return next(at for at in self.line(self.current) if at.step == step)

    def owed(self) -> set[GenerationId]:
        """What must be there, to the bit."""
        return self.acknowledged - self.ending - self.rotten - self.doubted

    def choices(self) -> list[tuple[set[GenerationId], GenerationId | None]]:
        """For each incarnation that may be the newest: what a restore may choose, and the oldest it may choose.

        An incarnation is nothing without a COMMIT: of one that may have none, only what it saved itself is chosen.
        """
        owed = self.owed()
        found = []
        for incarnation in {self.current, *self.opening}:
            line = self.line(incarnation)
            mine = [at for at in line if incarnation == self.current or at.incarnation == incarnation]
            found.append((set(mine) - (self.rotten - self.mending), next((at for at in line if at in owed), None)))
        return found

    def end(self, at: GenerationId) -> None:
        """Retention begins to delete `at`: only what newer, verified generations make needless may go."""
        if at in self.ending:
            return
        line = self.line(self.current)
        good = self.verified - self.ending - self.rotten - self.doubted
        newer = [one for one in line if one in good and self.rank(one) > self.rank(at)]
        need = self.keep.last if (at in good or at not in line) and not self.full else 1
        _must(
            len(newer) >= need or any(one.step == at.step for one in newer),
            f"{at} is deleted while {len(newer)} newer ones are verified, of {need}",
        )
        pinned = self.keep.every is not None and at.step % self.keep.every == 0 and at in good
        _must(not pinned, f"{at} is deleted, and was to be kept")
        _must(not self.labels.milestones.get(at), f"{at} is deleted, and a durable label makes it a milestone")
        if self.keep.best is not None and at in good and at in line:
            rivals = [one for one in line if one in good and one not in self.ending and one != at]
            _must(self.labels.beaten(at, rivals), f"{at} is deleted, and no other has a metric as good")
        self.ending.add(at)

    def key(self) -> int:
        """Two ledgers of one key ask the same of a state."""
        owed = frozenset(self.tables) if self.in_flight else frozenset(self.owed())
        labels = self.labels.key()
        return hash((owed, frozenset(self.given), frozenset(self.rotten), self.current, *self.opening, labels))


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


def opened(disk: HostileDisk, ledger: Ledger) -> Tier:
    """As another process opens the run, or the next one."""
    if ledger.in_flight:
        return access.slots(disk, ROOT, in_flight=ledger.in_flight, direct=ledger.direct)
    return Disk(disk, ROOT, mode=ledger.mode, direct=ledger.direct)


def hold(disk: HostileDisk, ledger: Ledger) -> None:
    """Promises 1 to 3 in one state, in which everything is durable."""
    if ledger.in_flight:
        hold_in_slots(disk, ledger)
        return
    folders = disk.root.names.get("gen", Folder()).names
    for name, folder in folders.items():
        _must(isinstance(folder, Folder), f"{name} lies in gen/")
        _whole(disk, ledger, named(name), folder.names)
    for owed in ledger.owed():
        names = folders[layout.folder(owed)[4:]].names if layout.folder(owed)[4:] in folders else {}
        _must(layout.COMMIT in names, f"{owed} was acknowledged, and is gone")
    _hints(disk, ledger, folders)
    if ledger.labels.asked:
        generations = survey(Disk(disk, ROOT, direct=ledger.direct)).generations
        for owed in ledger.owed() & ledger.labels.asked:
            _must(owed in generations, f"{owed} has a label, and cannot be read")
        _labelled(ledger, generations)
    choices = ledger.choices()
    try:
        found, state = load(Disk(disk, ROOT, direct=ledger.direct), workers=INLINE)
    except NothingGood as error:
        _must(any(oldest is None for _, oldest in choices), f"nothing good, they say: {error}")
        return
    at = at_of(found)
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
    _labelled(ledger, seen.generations)
    for at, generation in seen.generations.items():
        if at not in ledger.rotten:
            _must(bits(tier, generation) == ledger.given.get(at), f"{at} is not as it was saved")
        _must(at not in ledger.rotten - ledger.verified or not generation.verified, f"{at} is damaged, and verified")
    if seen.pointer and not ledger.rotten and not ledger.disturbed:
        at = GenerationId(step=seen.pointer.step, incarnation=seen.pointer.incarnation)
        _must(at in seen.generations and seen.generations[at].verified, f"the pointer names {at}")
    good = {at for at, one in seen.generations.items() if at not in ledger.rotten and not one.damaged}
    newest = [next((at for at in ledger.line(one) if at in good), None) for one in {ledger.current, *ledger.opening}]

    found, candidates = None, Candidates(seen)
    try:
        for generation in candidates:
            try:
                bits(tier, generation)
                found = generation.id
                break
            except (Damaged, NotFinite) as error:
                candidates.failed(error)
    except NothingGood as error:
        _must(None in newest, f"nothing good, they say: {error}")
        return
    _must(found in newest, f"{found} is chosen, and not {[str(one) for one in newest]}")


def bits(tier: Tier, generation: Generation) -> State:
    (manifest,) = read_manifests(tier, generation)
    size = sum(round_up(blob.length, blob.chunk_bytes) for blob in manifest.blobs)
    found = read_rank(tier, generation, manifest, Arena(size, CHUNK_BYTES), INLINE)
    return {piece.name: bytes(found[piece.name]) for piece in manifest.pieces}


def _whole(disk: HostileDisk, ledger: Ledger, at: GenerationId, names: dict[str, Any]) -> None:
    """All of it or none of it: a COMMIT that can be believed stands beside exactly what it was made for."""
    node = names.get(layout.COMMIT)
    if node is None or at in ledger.rotten:
        return
    _must(at in ledger.sealed, f"{at} has a COMMIT, and never came to one")
    sealed = ledger.sealed[at]
    if disk.links:
        _must(node.digest() == sealed[layout.COMMIT], f"the COMMIT of {at} is torn, or replaced")
    elif decoded(bytes(node.data), Commit) is None:
        _must(at not in ledger.owed(), f"the COMMIT of {at} is torn")
        return
    for name, digest in sealed.items():
        if name != layout.COMMIT:
            _must(name in names, f"{at} has a COMMIT, and its {name} is gone")
            _must(names[name].digest() == digest, f"{at} has a COMMIT, and its {name} is not as it was written")


def _labelled(ledger: Ledger, generations: Mapping[GenerationId, Generation]) -> None:
    """Labels that were acknowledged are there, whole, and none that was never given."""
    for at, generation in generations.items():
        problem = ledger.labels.problem(generation)
        _must(not problem, f"{at} {problem}")


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
        if pointer is None:
            raise Violation("the pointer is torn")
        at = GenerationId(step=pointer.step, incarnation=pointer.incarnation)
        _must(verified(at), f"the pointer names {at}, which is not there, or not verified")
    link = disk.root.names.get("latest_ok")
    if link is not None:
        at = named(link.removeprefix("gen/"))
        _must(verified(at), f"latest_ok names {link}, which is not there, or not verified")


def hold_weakly(disk: HostileDisk, ledger: Ledger) -> bool:
    """Promise 1 only: what loads is what was saved. Returns whether all that was acknowledged would still be found."""
    choices = ledger.choices()
    try:
        found, state = load(Disk(disk, ROOT, direct=ledger.direct), workers=INLINE)
    except NothingGood:
        return not ledger.owed()
    at = at_of(found)
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
        if layout.COMMIT in folder.names and decoded(bytes(folder.names[layout.COMMIT].data), Commit):
            after.acknowledged.add(named(name))
    for ident in sorted(after.opening, key=after.orders.__getitem__):
        if any(at.incarnation == ident for at in after.acknowledged):
            after.current = ident
    after.opening.clear()
    return after


def step_of(call: str, path: str) -> str:
    """A call by what it is in the protocol, whatever the run: "link gen/*/COMMIT.json"."""
    name = STAGED.sub("", path.removeprefix(ROOT).removeprefix("/"))
    name = re.sub(r"^gen/[^/]+", "gen/*", name)
    return f"{call} {re.sub(r'[0-9a-f-]*[0-9]{2}[0-9a-f-]*(?![a-z])', '*', name) or 'the run'}"


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
        self._told: dict[int, Any] = {}

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
        failed = [one for one in self._told.values() if isinstance(one, LastgoodError)]
        if failed:
            raise failed[0]
        folder, first = mine
        return decide([(folder, one) for _, one in sorted({0: first, **self._told}.items())])

    def fail(self, error: BaseException) -> None:
        """They hear of it, and have written what they have written."""

    def _share(self, rank: int) -> None:
        if rank not in self._told:
            try:
                told = share(self._world.tier, self._at, rank, self.part(rank), chunk_bytes=CHUNK_BYTES)
                self._told[rank] = msgspec.to_builtins(told)
            except LastgoodError as error:
                self._told[rank] = error


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
            _must(newer, f"{at} was given up for a newer one, and there is none")
            return False
        except LastgoodError:
            ledger.given.pop(at)
            _must(ledger.disturbed, "a save failed without a fault")
            if not any(one.incarnation == at.incarnation for one in ledger.given):
                ledger.opening.discard(at.incarnation)
            return False
        ledger.acknowledged.add(at)
        ledger.current = at.incarnation
        ledger.opening.clear()
        self.forget()
        _must(not ledger.in_flight or all(at in table for table in ledger.tables), f"{at} is durable, they say")
        return True

    def label(self, step: int, loss: float, milestone: bool = False) -> bool:
        """Add a metric, and with `milestone` that too, to a generation; whether that was acknowledged."""
        labels, at = self.ledger.labels, self.ledger.newest(step)
        labels.ask(at, loss, milestone)
        try:
            self.run.label(at, milestone, {LOSS: loss})
        except LastgoodError:
            _must(self.ledger.disturbed, "a label failed without a fault")
            return False
        labels.acknowledge(at, loss, milestone)
        return True

    def forget(self) -> None:
        """What the tier let go by itself is no more of the writer's."""
        if self.ledger.in_flight:
            there = {named(name) for name in self.run.tier.list("gen")}
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
        _must(at is not None and at.step == newest + 1, f"saved step {newest + 1}, and {at} is found")
        _must(at is not None and state == self.ledger.given[at], f"{at} is not as it was saved")

    def mend(self, step: int) -> None:
        """Read a generation again, and rebuild it from its parity."""
        at = self.ledger.newest(step)
        self.ledger.mending.add(at)
        try:
            generation = self.run.survey.generations[at]
            _, done = self.run.mender.read_again(generation, UPKEEP, self.run.mender.reading(generation, UPKEEP))
        except LastgoodError:
            done = False
        _must(done or self.ledger.disturbed, f"{at} could not be rebuilt")
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

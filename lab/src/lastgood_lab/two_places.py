"""A run in two places in the crash model: a front that is written first, and a place below that receives copies.

Each place is a `World` with a disk and a ledger of its own. One crash takes both at the same instant, and each loses
what it had not synced, independently of the other; or one of the two is lost whole, as with a node and its disk.
Copies, retention in each place, repairs from the other place and the opening of both are the real code (run/places.py).
Only the thread that copies is left out: the model calls `LowerPlace.copy_next` itself, in one thread.

A crash state is checked like those of one place, in each place by itself. And a restore from all places together must
load the newest generation that any of the places owes which the crash has left.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from lastgood.coordination.single_rank import AnyTopic, SingleRank
from lastgood.engine.arena import Arena
from lastgood.engine.inline_executor import Inline
from lastgood.errors import Damaged, NothingGood, Overtaken
from lastgood.format.commit import Survey, survey
from lastgood.policy.places import holder, merged
from lastgood.ports import Tier
from lastgood.records import Finding, Generation, GenerationId
from lastgood.run.candidates import Candidates
from lastgood.run.content import Content
from lastgood.run.known import Environment
from lastgood.run.lower_place import LowerPlace
from lastgood.run.outcomes import Outcomes
from lastgood.run.places import Places, unite
from lastgood.run.reader import read_all

from .crashmodel import World
from .hostile import ROOT, Folder, HostileDisk
from .judge import Judge
from .ledger import Ledger, Violation, must
from .plain import State, bytes_of, load, load_first
from .promises import INLINE, at_of, hold_files, hold_restored, newest_incarnation, note_whole, opened, survived

BELOW = "/below"
"""the path of the second place"""
LOST_SHARE = 0.12
"""the share of crashes that take one of the two places with them"""


@dataclass(frozen=True)
class Disks:
    """A crash state of both places. `lost`: the place that the crash has taken whole, "front" or "below"; or empty."""

    front: HostileDisk
    below: HostileDisk
    digests: tuple[int, int]
    """those of `front` and of `below`"""
    lost: str = ""

    def digest(self) -> int:
        return hash(self.digests)

    def without(self, lost: str) -> Disks:
        """The same state with one of the two places empty."""
        front = self.front.holding(Folder()) if lost == "front" else self.front
        below = self.below.holding(Folder()) if lost == "below" else self.below
        return Disks(front, below, (front.digest(), below.digest()), lost)


@dataclass
class Checked:
    """What was read of one place in crash states with equal content, so that it is read and checked once."""

    held: set[int] = field(default_factory=set)
    surveys: dict[int, Survey] = field(default_factory=dict)
    bytes: dict[tuple[int, GenerationId], State | None] = field(default_factory=dict)
    """(digest of the place, generation) -> its bytes; None where they are damaged"""


class RestorableFromPlaces:
    """`run.candidates.RestorableRun` of all places, as `loop.restore.RestoringRun` with one rank."""

    workers = Inline()

    def __init__(self, places: Places, examined_in: Arena) -> None:
        self._places, self._examined_in = places, examined_in

    @property
    def survey(self) -> Survey:
        return self._places.front.known.view

    def place_of(self, generation: Generation, topic: AnyTopic | None = None) -> Tier:
        return self._places.writer_of(generation.id).tier

    def gather(self, content: Content, wanted: Mapping[str, Sequence[int]], topic: AnyTopic) -> None:
        """Every file is readable: one process sees all of a place."""

    def arena(self, total_bytes: int, chunk_bytes: int) -> Arena:
        return Arena(total_bytes, chunk_bytes)

    def examine(self, generation: Generation, topic: AnyTopic | None = None) -> list[Finding]:
        return read_all(self.place_of(generation), generation, self._examined_in, INLINE)

    def mark(self, generation: Generation, findings: list[Finding]) -> None:
        self._places.mark(generation, findings)

    def mend(self, generation: Generation) -> bool:
        return self._places.mend(generation, self._examined_in)


class TwoPlaces:
    """Several processes, one after the other, that write one run in two places.

    It is the judge of its two worlds: what happens in one of them is a crash state of both. `every`: each so many steps
    a copy is due.
    """

    continues = True

    def __init__(self, front: World, below: World, judge: Judge, every: int, checked: Checked) -> None:
        self.front, self.below, self.judge, self.depth, self.every = front, below, judge, front.depth, every
        front.judge = below.judge = self
        self.checked = checked
        self.copies: dict[GenerationId, Future[None]] = {}
        self.meanwhile: Callable[[str, str], object] | None = None
        """called before each change of the place below"""
        front.disk.watch, below.disk.watch = self._watch_front, self._watch_below

    # ---- the judge of the two worlds ---------------------------------------------------------------------------------

    @property
    def rng(self) -> random.Random:
        return self.judge.rng

    @property
    def violation(self) -> Violation | None:
        return self.judge.violation

    @violation.setter
    def violation(self, found: Violation | None) -> None:
        self.judge.violation = found

    def crash(self, world: World, step: str) -> None:
        self.judge.crash(self, f"{step} below" if world is self.below else step)

    def _watch_front(self, call: str, path: str) -> None:
        note_whole(self.front.ledger, self.front.disk)
        self.front._watch(call, path)

    def _watch_below(self, call: str, path: str) -> None:
        if hasattr(self.below, "run"):
            self.below._note_verified()
        note_whole(self.below.ledger, self.below.disk)
        # A copy may make an incarnation durable below whose COMMIT in the front is visible only.
        orders, copied = self.front.ledger.orders, (at.incarnation for at in self.below.ledger.verified)
        newest = filter(None, [self.front.ledger.current, *copied])
        self.below.ledger.current = max(newest, key=orders.__getitem__, default=None)
        self.below._watch(call, path)
        if self.meanwhile is not None:
            try:
                self.meanwhile(call, path)
            except Violation as error:  # the copy that is under way would take it for an error of its own
                self.judge.violation = self.judge.violation or error
                raise

    # ---- what the judge asks -----------------------------------------------------------------------------------------

    def crashes(self, most: int) -> Iterator[Disks]:
        rng = self.rng
        fronts, belows = (
            [(disk, disk.digest()) for disk in one.disk.crashes(rng, most)] for one in (self.front, self.below)
        )
        pairs = list(itertools.product(fronts, belows))
        for front, below in [pairs[0], *(pairs[1:] if len(pairs) <= most else rng.sample(pairs, most))]:
            disks = Disks(front[0], below[0], (front[1], below[1]))
            yield disks.without(rng.choice(["front", "below"])) if rng.random() < LOST_SHARE else disks

    def key(self) -> int:
        return hash((self.front.ledger.key(), self.below.ledger.key()))

    def hold(self, state: Disks) -> bool:
        front, below = self.front.ledger, self.below.ledger
        names = [name for name in ("front", "below") if name != state.lost]
        left = {"front": (state.front, state.digests[0], front), "below": (state.below, state.digests[1], below)}
        for name in names:
            disk, digest, ledger = left[name]
            if (key := hash((name, digest, ledger.key()))) not in self.checked.held:
                hold_files(disk, ledger)
                self.checked.held.add(key)
        owed = {at for name in names for at in left[name][2].owed()}
        if state.lost == "front":
            newest = newest_incarnation(state.below, below)
            choices = replace(below, current=newest, opening=set()).choices(owed, set())
        else:
            choices = front.choices(owed, set())
        try:
            at, found = self._restored([left[name][:2] for name in names])
        except NothingGood as error:
            hold_restored(front, choices, None, {}, str(error))
        else:
            hold_restored(front, choices, at, found)
        return True

    def _restored(self, places: Sequence[tuple[HostileDisk, int]]) -> tuple[GenerationId | None, State]:
        """What a restore from these disks loads, without repairs: each generation from the first place that has it.

        `places`: each disk and its digest.
        """
        surveys = [self._survey(disk, digest) for disk, digest in places]
        candidates = Candidates(merged(surveys))
        for generation in candidates:
            at = generation.id
            first = holder([one.generations for one in surveys], at) or 0
            order = sorted(range(len(places)), key=lambda index: index != first)
            for index in order:
                if at in surveys[index].generations:
                    found = self._bytes(*places[index], surveys[index].generations[at])
                    if found is not None:
                        return at, found
            candidates.failed(Damaged(f"{at} is damaged in every place"))
        return None, {}

    def _survey(self, disk: HostileDisk, digest: int) -> Survey:
        if (key := hash((disk.path, digest))) not in self.checked.surveys:
            self.checked.surveys[key] = survey(self._tier(disk))
        return self.checked.surveys[key]

    def _bytes(self, disk: HostileDisk, digest: int, generation: Generation) -> State | None:
        key = hash((disk.path, digest)), generation.id
        if key not in self.checked.bytes:
            try:
                self.checked.bytes[key] = bytes_of(self._tier(disk), generation, INLINE)
            except Damaged:
                self.checked.bytes[key] = None
        return self.checked.bytes[key]

    def _tier(self, disk: HostileDisk) -> Tier:
        return opened(disk, self.front.ledger if disk.path == ROOT else self.below.ledger)

    def killed(self) -> TwoPlaces:
        disks = self.front.disk.copied(), self.below.disk.copied()
        return self._successor(*disks, self.front.ledger.copied(), self.below.ledger.copied())

    def next(self, state: Disks) -> TwoPlaces:
        front = self.front.ledger.emptied() if state.lost == "front" else survived(state.front, self.front.ledger)
        below = self.below.ledger.emptied() if state.lost == "below" else survived(state.below, self.below.ledger)
        if state.lost == "front":
            front.current = newest_incarnation(state.below, below)
        else:
            # A COMMIT that a killed process has left may be lost in the front after it was copied.
            committed = {at.incarnation for at in front.acknowledged | below.acknowledged}
            newest = [one for one in self.front.ledger.opening & committed or [front.current] if one is not None]
            front.current = max(newest, key=front.orders.__getitem__, default=None)
        front.opening = set()
        disks = state.front.crashed(_as_seen), state.below.crashed(_as_seen)
        return self._successor(*disks, front.copied(), below.copied())

    def without(self, lost: str) -> TwoPlaces:
        """A process after this one was killed, all its changes were synced, and one of the two places was lost whole.

        The judge sees it as it sees this one: not as a process after a crash, of which it judges few calls.
        """
        front, below = self.front.disk.crashed(_as_seen), self.below.disk.crashed(_as_seen)
        return self.replaced_by(self.next(Disks(front, below, (0, 0)).without(lost)))

    def replaced_by(self, after: TwoPlaces) -> TwoPlaces:
        """Go on with the next process in the place of this one, which makes no further change that counts."""
        self.front.disk.watch = self.below.disk.watch = lambda call, path: None
        after.depth = self.depth
        return after

    def _successor(self, disk: HostileDisk, disk_below: HostileDisk, front: Ledger, below: Ledger) -> TwoPlaces:
        below = replace(below, given=front.given, sealed=front.sealed, orders=front.orders, parents=front.parents)
        front.held = set()
        first = World(disk, front, self.judge, self.depth + 1)
        second = World(disk_below, below, self.judge, self.depth + 1)
        return TwoPlaces(first, second, self.judge, self.every, self.checked)

    # ---- actions of a training loop ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a new process, which opens both places for writing."""
        front, below = self.front, self.below
        environment = Environment(new_id=front._ident, wall_seconds=lambda: 0.0, monotonic_seconds=lambda: 0.0)
        for one in (front, below):
            one.ledger.mending |= one.ledger.rotten
        self.copies, front.ledger.held = {}, set()
        unite([front.tier, below.tier], environment)
        front.start()
        below.start()
        for at in front.ledger.labels.asked:
            below.ledger.labels.expect_copy(front.ledger.labels, at)
        lower = LowerPlace(below.run, front.run.known, INLINE, Outcomes(ROOT), SingleRank(), 0)
        self.places = Places(front.run, [lower])
        below.hold_settled()
        self._note_copies()

    @property
    def lower(self) -> LowerPlace:
        (lower,) = self.places.below
        return lower

    def open(self, step: int | None = None) -> None:
        """Start a new process: open both places, restore the newest generation (or a step), and continue from it.

        What waits for its copy is copied first, as `Checkpointer.restore` does.
        """
        self.start()
        self.drain()
        self.restore(step)

    def restore(self, step: int | None) -> None:
        front = self.front
        self.places.mend_known(step, front.arena)
        run = RestorableFromPlaces(self.places, front.arena)
        owed = front.ledger.owed() | self.below.ledger.owed()
        choices = front.ledger.choices(owed, set())
        try:
            found, state = load_first(Candidates(run.survey, step, run), run.place_of, INLINE)
        except NothingGood as error:
            hold_restored(front.ledger, choices, None, {}, str(error))
            front.begin(None)
            return
        at = at_of(found)
        if step is None:
            hold_restored(front.ledger, choices, at, state)
        self._note_mended()
        front.begin(at)
        if found.generation and not found.generation.verified:
            self.places.mark(found.generation, [])
        for one in (front, self.below):
            one._note_verified()
        front.run.marks.point()

    def _note_mended(self) -> None:
        for one in (self.front, self.below):
            for at in one.run.mender.mended.keys() & one.ledger.rotten:
                one._mended(at)

    def save(self, step: int, meanwhile: Callable[[], object] = lambda: None) -> bool:
        """Save once, as `World.save`, and offer what was committed to the place below."""
        if step % self.every == 0:
            self.places.owe(0, step)
        done = self.front.save(step, meanwhile)
        if done:
            at = self.front.ledger.newest(step)
            self.places.offer(self.front.run.survey.generations[at], False)
            self._note_copies()
        return done

    def steps(self, *steps: int) -> None:
        """Save, delete in the front, and copy, once for each step."""
        for step in steps:
            self.save(step)
            self.front.upkeep()
            self.drain()

    def label(self, step: int, loss: float, milestone: bool = False) -> None:
        """Label a generation in the front, and copy it with its labels to the place below."""
        at = self.front.ledger.newest(step)
        self.below.ledger.labels.ask(at, loss, milestone)
        self.front.label(step, loss, milestone)
        self.places.add(at)
        self._note_copies()

    def drain(self) -> None:
        """Copy what waits, as the thread of the place below does, until an attempt has failed."""
        lower = self.lower
        while lower.waiting():
            failed = lower._failed_attempts
            lower.copy_next()
            if self.judge.violation:
                raise self.judge.violation
            self._note_copies()
            if lower._failed_attempts > failed:
                must(self._disturbed, "a copy failed without a fault")
                return

    @property
    def _disturbed(self) -> bool:
        return self.front.ledger.disturbed or self.below.ledger.disturbed

    def _note_copies(self) -> None:
        """Record what waits for its copy, and which copies were reported as done."""
        front, below = self.front.ledger, self.below.ledger
        self.copies |= {at: one.ended for at, one in self.lower._waiting.items()}
        for at, copied in list(self.copies.items()):
            if not copied.done():
                continue
            del self.copies[at]
            error = copied.exception()
            if error is None:
                below.acknowledged.add(at)
                if at in below.rotten:
                    self.below._mended(at)
                below.labels.receive(front.labels, at)
            elif not isinstance(error, Overtaken):
                rotten = at in front.rotten | below.rotten
                must(rotten or self._disturbed, f"{at} was not copied: {type(error).__name__}: {error}")
        front.held = set(self.copies)
        if hasattr(self.below, "run"):
            self.below._note_verified()

    def carry_on(self) -> None:
        """Play the next process after a crash: it opens both places, copies what is missing, restores and saves."""
        self.open()
        self._hold_caught_up()
        newest = max((at.step for at in self.front.ledger.given), default=0)
        newest += self.every - newest % self.every
        self.steps(newest)
        at, state = self._restored([(one.disk, one.disk.digest()) for one in (self.front, self.below)])
        self._hold_newest(at, state, newest, "both places")
        for one in (self.front, self.below):
            found, state = load(one.tier, workers=INLINE)
            self._hold_newest(at_of(found), state, newest, one.disk.path)

    def _hold_caught_up(self) -> None:
        """Check that the opening has brought to the place below what it promises: milestones, and the restored
        generation, unless it was restored only because a newer one was found to be damaged."""
        incarnation, copies = self.front.run.known.incarnation, self.below.run.survey.generations
        restored = incarnation.parent if incarnation else None
        must(
            restored is None or self.front.ledger.rotten or (restored in copies and copies[restored].verified),
            f"{restored} was restored, and no verified copy of it has come to the place below",
        )
        for one in self.front.run.known.durable_lineage():
            must(
                not one.commit.milestone or (one.id in copies and copies[one.id].commit.milestone),
                f"{one.id} is a milestone in the front only",
            )

    def _hold_newest(self, at: GenerationId | None, state: State, step: int, place: str) -> None:
        must(at is not None and at.step == step, f"step {step} was saved, but a restore from {place} finds {at}")
        must(
            at is not None and state == self.front.ledger.given[at],
            f"the bytes of {at} loaded from {place} differ from the saved ones",
        )


def _as_seen(_: str, __: int) -> int:
    """A `hostile.Pick` of what readers see now."""
    return 0

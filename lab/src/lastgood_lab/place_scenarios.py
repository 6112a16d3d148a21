"""The scenarios of the crash model with a run in two places: copies, retention, lost places and repairs.

Each is a history as those of `scenarios.py`, whose faults and variants are drawn from a seed. It returns the world of
its last process.
"""

from __future__ import annotations

import errno
import functools
import itertools
from collections.abc import Callable

from lastgood.errors import LastgoodError
from lastgood.format import layout
from lastgood.policy.retention import Keep

from .crashmodel import KEEPS, PARTS, World
from .hostile import ROOT, HostileDisk
from .judge import Judge
from .ledger import Ledger
from .two_places import BELOW, Checked, TwoPlaces


def copies_and_retention(world: TwoPlaces) -> TwoPlaces:
    world.open()
    world.steps(1, 2, 3, 4)
    return world


def copies_fall_behind(world: TwoPlaces) -> TwoPlaces:
    """Several saves wait for their copies: the newest is copied first, and no more wait than the place would keep."""
    world.open()
    world.steps(1)
    for burst in (2, 3, 4), (5, 6):
        for step in burst:
            world.save(step)
            world.front.upkeep()
        world.drain()
    return world


def saves_during_a_copy(world: TwoPlaces) -> TwoPlaces:
    """At some call of a copy, the front saves, verifies and deletes; in a save, everything that waits is copied."""
    world.open()
    world.steps(1)

    def save_at_call(number: int, step: int, calls: itertools.count[int], call: str, path: str) -> None:
        if next(calls) == number:
            world.save(step)
            world.front.upkeep()

    for step in (2, 4):
        world.save(step)
        world.front.upkeep()
        world.meanwhile = functools.partial(save_at_call, world.rng.randrange(40), step + 1, itertools.count())
        world.drain()
        world.meanwhile = None
    world.save(6)
    world.save(7, meanwhile=world.drain)
    world.front.upkeep()
    world.drain()
    return world


def saves_committed_out_of_order(world: TwoPlaces) -> TwoPlaces:
    """The inner save is newer and ends first. The outer one is given up, unless retention keeps its step: then it gets
    a copy of its own."""
    world.open()
    world.steps(1)
    for older in (2, 5):
        world.save(older, meanwhile=functools.partial(world.save, older + 1))
        if world.rng.random() < 0.5:
            world.front.upkeep()
        world.drain()
        world.save(older + 2)
        world.front.upkeep()
        world.drain()
    world.steps(8)
    return world


class Killed(BaseException):
    """Raised in place of SIGKILL."""


def _crash_in(world: TwoPlaces, action: Callable[[], object], most_calls: int) -> TwoPlaces:
    """The world of the next process after a kill, or a power loss, at some call below during `action`."""
    number, calls, after = world.rng.randrange(most_calls), itertools.count(), list[TwoPlaces]()

    def kill(call: str, path: str) -> None:
        if next(calls) == number:
            states = list(world.crashes(1))
            after.append(world.next(states[-1]) if world.rng.random() < 0.5 else world.killed())
            raise Killed

    world.meanwhile = kill
    try:
        action()
    except Killed:
        return world.replaced_by(after[0])
    finally:
        world.meanwhile = None
    return world


def crashes_in_copies(world: TwoPlaces) -> TwoPlaces:
    """The process dies in a copy, the next one is to go on with it, and dies again."""
    world.open()
    world.steps(1, 2)
    for step in (3, 5):
        world.save(step)
        world.save(step + 1)
        world.front.upkeep()
        world = _crash_in(world, world.drain, 60)
        world = _crash_in(world, world.open, 60)
        world.open()
    world.steps(7, 8)
    return world


def lost_front(world: TwoPlaces) -> TwoPlaces:
    """The front is lost, sometimes before its newest save was copied; the next process begins with an empty one."""
    world.open()
    world.steps(1, 2)
    world.save(3)
    if world.rng.random() < 0.5:
        world.drain()
    world = world.without("front")
    world.open()
    world.steps(4, 5)
    world = world.without("front")
    world.open()
    world.steps(6)
    return world


def lost_place_below(world: TwoPlaces) -> TwoPlaces:
    world.open()
    world.steps(1, 2)
    world.save(3)
    world = world.without("below")
    world.open()
    world.steps(4, 5)
    return world


def one_place_after_the_other_lost(world: TwoPlaces) -> TwoPlaces:
    """A run goes on although each of its disks was replaced: the other one had everything by then."""
    world.open()
    world.steps(1, 2)
    for lost, step in (("below", 3), ("front", 4), ("below", 5)):
        world = world.without(lost)
        world.open()
        world.steps(step)
    return world


def damage_found_by_a_scrub(world: TwoPlaces) -> TwoPlaces:
    """Damage in one place is repaired from the other; damage in different chunks of both copies, from both."""
    world.every = 1
    world.open()
    world.steps(1, 2)
    for damaged in world.rng.choice([[world.front], [world.below], [world.front, world.below]]):
        parts = PARTS[:1] if damaged is world.below else world.rng.sample(PARTS[1:], 2)
        for name, offset in parts:
            damaged.rot(2, name, offset)
    for one in (world.front, world.below):
        if one.ledger.rotten:
            one.mend(2)
    world.steps(3)
    world.open()
    world.steps(4)
    return world


def damage_found_by_an_opening(world: TwoPlaces) -> TwoPlaces:
    """The next process finds damage in one place, marked or not, and repairs it from the other."""
    world.every = 1
    world.open()
    world.steps(1, 2)
    damaged = world.rng.choice([world.front, world.below])
    damaged.rot(2, *world.rng.choice(PARTS))
    world.open()
    world.steps(3)
    world = _crash_in(world, world.open, 20)
    world.open()
    world.steps(4, 5)
    return world


def failing_repairs(world: TwoPlaces) -> TwoPlaces:
    rng = world.rng
    world.every = 1
    world.open()
    world.steps(1, 2)
    damaged = rng.choice([world.front, world.below])
    damaged.rot(2, *rng.choice(PARTS))
    for _ in range(2):
        damaged.fault(rng.randrange(60), rng.choice([errno.EIO, errno.ENOSPC]), rng.random() < 0.4, rng.random() < 0.5)
        damaged.mend(2)
        damaged.heal()
    world.steps(3)
    world.open()
    world.steps(4)
    return world


def damaged_copies(world: TwoPlaces) -> TwoPlaces:
    """The disk of the place below damages a copy before it is read back: it does not count, and is repaired later."""
    world.every = 1
    world.open()
    world.steps(1)
    for step in (2, 3):
        name, offset = world.rng.choice(PARTS[:3])

        def damage(call: str, path: str, name: str = name, offset: int = offset, step: int = step) -> None:
            at = world.front.ledger.newest(step)
            committed = f"{BELOW}/{layout.folder(at)}/{layout.COMMIT}"
            if call in ("link", "open") and path == committed and at not in world.below.ledger.rotten:
                world.below.rot(step, name, offset)

        world.save(step)
        world.front.upkeep()
        world.meanwhile = damage
        world.drain()
        world.meanwhile = None
    world.open()
    world.steps(4)
    return world


def failing_copies(world: TwoPlaces) -> TwoPlaces:
    """Calls below fail while copies are made, or the disk there is full. What waits is copied once it has recovered."""
    rng = world.rng
    world.open()
    world.steps(1)
    for step in (2, 3, 4):
        code = rng.choice([errno.EIO, errno.ENOSPC])
        world.below.fault(rng.randrange(60), code, rng.random() < 0.5, code == errno.EIO and rng.random() < 0.5)
        world.steps(step)
        world.below.heal()
        if rng.random() < 0.5:
            world.drain()
    world.drain()
    world.open()
    world.steps(5)
    return world


def full_place_below(world: TwoPlaces) -> TwoPlaces:
    """The place below is full for several saves in a row, and the front keeps what waits."""
    world.open()
    world.steps(1, 2)
    world.below.fault(world.rng.randrange(20), errno.ENOSPC, sticky=True)
    world.steps(3, 4, 5)
    world.below.heal()
    world.drain()
    world.open()
    world.steps(6)
    return world


def failing_openings(world: TwoPlaces) -> TwoPlaces:
    """Calls in one of the places fail while both are opened."""
    rng = world.rng
    world.open()
    world.steps(1, 2)
    world.save(3)
    for _ in range(2):
        one = rng.choice([world.front, world.below])
        one.fault(rng.randrange(40), rng.choice([errno.EIO, errno.ENOSPC]), rng.random() < 0.4, rng.random() < 0.5)
        try:
            world.open()
        except LastgoodError:
            continue
        finally:
            one.heal()
    world.open()
    world.steps(4)
    return world


def labels_in_both(world: TwoPlaces) -> TwoPlaces:
    """Milestones and metrics, some added after the copy was made, reach the place below and are kept there."""
    rng = world.rng
    world.open()
    for step in (1, 2, 3):
        world.save(step)
        if rng.random() < 0.5:
            world.drain()
        world.label(step, rng.random(), milestone=rng.random() < 0.5)
        world.front.upkeep()
        world.drain()
    world.label(3, rng.random(), milestone=True)
    if rng.random() < 0.5:
        world.drain()
    world.open()
    world.steps(4, 5)
    return world


def rewinds_in_both(world: TwoPlaces) -> TwoPlaces:
    """A rewind abandons steps in both places, in one process or after a restart, before they are copied or after."""
    rng = world.rng
    world.front.ledger.keep = world.below.ledger.keep = Keep(last=2)
    world.every = 1
    world.open()
    world.steps(1, 2)
    world.save(3)
    if rng.random() < 0.5:
        world.drain()
    if rng.random() < 0.5:
        world.restore(2)
    else:
        world.open(2)
    world.steps(3, 4)
    if rng.random() < 0.5:
        world = world.without("front")
    world.open()
    world.steps(5)
    return world


LIVES = [
    copies_and_retention,
    copies_fall_behind,
    saves_during_a_copy,
    saves_committed_out_of_order,
    crashes_in_copies,
    lost_front,
    lost_place_below,
    one_place_after_the_other_lost,
    damage_found_by_a_scrub,
    damage_found_by_an_opening,
    failing_repairs,
    damaged_copies,
    failing_copies,
    full_place_below,
    failing_openings,
    labels_in_both,
    rewinds_in_both,
]


def play(live: Callable[[TwoPlaces], TwoPlaces], judge: Judge) -> None:
    """Play a history in two places once, in a variant that is drawn from the judge's generator. Raises Violation."""
    rng = judge.rng

    def place(path: str, receives_copies: bool) -> World:
        disk = HostileDisk(links=rng.random() < 0.8, most_bytes=rng.choice([1 << 30, 1 << 30, 5000, 700]), path=path)
        direct = disk.most_bytes != 700 and rng.random() < 0.3
        return World(disk, Ledger(keep=rng.choice(KEEPS), direct=direct, receives_copies=receives_copies), judge)

    front, below = place(ROOT, False), place(BELOW, True)
    shared = front.ledger
    below.ledger.given, below.ledger.sealed = shared.given, shared.sealed
    below.ledger.orders, below.ledger.parents = shared.orders, shared.parents
    last = live(TwoPlaces(front, below, judge, rng.choice([1, 1, 2]), Checked()))
    judge.crash(last)

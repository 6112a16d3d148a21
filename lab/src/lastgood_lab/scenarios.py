"""The scenarios of the crash model: histories of a run, whose faults and variants are drawn from a seed.

`SCENARIOS` contains the histories in `LIVES` for directories, for slots, and for three ranks that write each
generation. Further scenarios have a full disk, rebuilding from parity, labels and several saves in flight. Parity is
played only in directories that one rank writes. Those with a run in two places are in `place_scenarios.py`.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from lastgood.errors import LastgoodError
from lastgood.format import layout
from lastgood.policy.retention import Keep
from lastgood.storage.directory import WriteMode

from . import place_scenarios
from .crashmodel import KEEPS, PARTS, World
from .hostile import HostileDisk
from .judge import Judge
from .labels import LOSS
from .ledger import Ledger


class Scenario(NamedTuple):
    live: Callable[[Any], Any]
    in_flight: int = 0
    """saves in flight of a run in slots; 0: the run is in directories"""
    ranks: int = 1
    """how many ranks write each generation"""
    places: int = 1
    """in how many places the run is"""

    @property
    def name(self) -> str:
        kinds = {"_on_slots": self.in_flight, "_by_several_ranks": self.ranks > 1, "_in_two_places": self.places > 1}
        return self.live.__name__ + "".join(kind for kind, given in kinds.items() if given)

    @property
    def only_durable(self) -> bool:
        """Whether it is played in one write mode only: slots have no other, and places below always sync."""
        return self.in_flight > 0 or self.places > 1


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
        world.upkeep()


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
    world.rot(3, *world.judge.rng.choice(PARTS))
    world.upkeep()
    world.steps(4, 5)


def damage_after_verification(world: World) -> None:
    world.ledger.keep = Keep(last=2)
    world.open()
    world.steps(1, 2, 3)
    world.rot(3)
    world.open()
    world.steps(4, 5)


def saves_in_flight(world: World) -> None:
    """The inner save ends first, then the outer one, which is newer. A third save has begun and never ends."""
    world.open()
    world.steps(1)
    world.run.tier.create("gen/000000000009-00000009/r00000.safetensors", 9000)
    world.save(3, meanwhile=lambda: world.save(2))
    world.upkeep()
    world.save(6, meanwhile=lambda: world.save(5, meanwhile=lambda: world.save(4)))
    world.upkeep()
    world.steps(7)


def overtaken_saves(world: World) -> None:
    """The inner save ends first and is newer: the outer one is given up, unless retention has to keep its step."""
    world.open()
    world.steps(1)
    for older in (2, 5):
        world.save(older, meanwhile=functools.partial(world.save, older + 1))
        world.save(older + 2)
        world.upkeep()
    world.steps(8)


def commits_that_nobody_knows_of(world: World) -> None:
    world.open()
    world.steps(1, 2)
    for step in (3, 4, 5, 6):
        world.disk.watch = functools.partial(_fail_at, world, "table", world.judge.rng.random() < 0.5)
        world.save(step)
        world.disk.watch = world._watch
        world.heal()
        world.upkeep()
    world.steps(7)


def full_disk(world: World) -> None:
    """Space for a tensor file is refused once or twice in each save: older verified generations make room for it."""
    world.ledger.keep = Keep(last=3)
    world.open()
    world.steps(1, 2, 3)
    for step in (4, 5, 6):
        refusals = [errno.ENOSPC] * world.judge.rng.randint(1, 2)
        world.disk.watch = functools.partial(_refuse_space, world, refusals, layout.blob_name(0))
        world.save(step)
        world.disk.watch = world._watch
        world.upkeep()
        world.heal()
    world.open()
    world.steps(7, 8)


def _refuse_space(world: World, refusals: list[int], name: str, call: str, path: str) -> None:
    if refusals and call == "open" and name in path:
        world.fault(0, refusals.pop())
    world._watch(call, path)


def _fail_at(world: World, name: str, applied: bool, call: str, path: str) -> None:
    if path.endswith(name) and call in ("write", "sync", "rename") and not world.disk.fault:
        world.fault(world.judge.rng.randrange(2), errno.EIO, applied=applied)
    world._watch(call, path)


_BEST: tuple[str, Literal["min"], int] = (LOSS, "min", 1)
"""The `best` of `Keep` with which retention keeps the generation with the lowest loss, too."""


def labels(world: World) -> None:
    """Each generation is labelled with a metric before its verification, and some again, as milestones, after it."""
    rng = world.judge.rng
    world.ledger.keep = Keep(last=1, best=_BEST)
    world.open()
    for step in (1, 2, 3, 4):
        world.save(step)
        world.label(step, rng.random())
        world.upkeep()
        if rng.random() < 0.5:
            world.label(step, rng.random(), milestone=True)
    world.open()
    world.label(4, rng.random(), milestone=True)
    world.save(5)
    world.rewind(4)
    world.steps(5, 6)


def two_labels(world: World) -> None:
    """Labels in slots, each of which is a write of the table. The history is shorter than `labels`."""
    world.open()
    world.steps(1)
    world.label(1, 0.5, milestone=True)
    world.save(2)
    world.label(2, 0.25)
    world.open()
    world.steps(3)


def labels_on_a_full_disk(world: World) -> None:
    """Space for a label is refused once or twice: older verified generations are deleted to make room for it."""
    rng = world.judge.rng
    world.ledger.keep = Keep(last=3, best=_BEST)
    world.open()
    for step in (1, 2, 3):
        world.steps(step)
        world.label(step, rng.random(), milestone=rng.random() < 0.3)
    for step in (4, 5):
        world.save(step)
        refusals = [errno.ENOSPC] * rng.randint(1, 2)
        world.disk.watch = functools.partial(_refuse_space, world, refusals, "LABEL-")
        world.label(rng.choice([step, step - 3]), rng.random(), milestone=True)
        world.disk.watch = world._watch
        world.heal()
        world.upkeep()
    world.open()
    world.steps(6)


def failing_labels(world: World) -> None:
    """A call fails while a label is written, and some labels are requested again. Then one fails during an opening."""
    rng = world.judge.rng
    world.ledger.keep = Keep(last=1, best=_BEST)
    world.open()
    for step in (1, 2, 3):
        world.steps(step)
        code, loss = rng.choice([errno.EIO, errno.ENOSPC]), rng.random()
        world.fault(rng.randrange(9), code, rng.random() < 0.4, code == errno.EIO and rng.random() < 0.5)
        world.label(step, loss, milestone=rng.random() < 0.5)
        world.heal()
        if rng.random() < 0.5:
            world.label(step, loss, milestone=True)
    world.fault(rng.randrange(60), errno.EIO, rng.random() < 0.4)
    try:
        world.open()
    except LastgoodError:
        pass
    else:
        world.upkeep()
    finally:
        world.heal()
    world.open()
    world.steps(4, 5)


def rebuilding_from_parity(world: World) -> None:
    world.ledger.parity, world.ledger.keep = "2+2", Keep(last=2)
    world.open()
    world.steps(1, 2)
    for name, offset in PARTS:
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
    world.rot(2, *rng.choice(PARTS))
    for _ in range(2):
        world.fault(rng.randrange(60), rng.choice([errno.EIO, errno.ENOSPC]), rng.random() < 0.4, rng.random() < 0.5)
        world.mend(2)
        world.heal()
    world.steps(3)
    world.open()
    world.steps(4)


def growing_states(world: World) -> None:
    world.open()
    for step in range(1, 7):
        world.ledger.weight = step * 1500
        world.steps(step)


LIVES = [
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
SCENARIOS = [
    *(Scenario(life) for life in LIVES),
    *(Scenario(life, in_flight=1) for life in LIVES),
    *(Scenario(life, ranks=3) for life in [*LIVES, overtaken_saves]),
    Scenario(overtaken_saves),
    Scenario(rebuilding_from_parity),
    Scenario(failing_rebuilding),
    Scenario(full_disk),
    Scenario(labels),
    Scenario(labels_on_a_full_disk),
    Scenario(failing_labels),
    Scenario(two_labels, in_flight=1),
    Scenario(overtaken_saves, in_flight=2),
    Scenario(saves_in_flight, in_flight=4),
    Scenario(commits_that_nobody_knows_of, in_flight=1),
    Scenario(growing_states, in_flight=2),
    *(Scenario(life, places=2) for life in place_scenarios.LIVES),
]


def play(scenario: Scenario, judge: Judge, mode: WriteMode = "atomic_dirsync") -> None:
    """Play a scenario once, in a variant that is drawn from the judge's generator. Raises Violation."""
    if scenario.only_durable and mode != "atomic_dirsync":
        return
    if scenario.places > 1:
        place_scenarios.play(scenario.live, judge)
        return
    rng = judge.rng
    disk = HostileDisk(links=rng.random() < 0.8, most_bytes=rng.choice([1 << 30, 1 << 30, 5000, 700]))
    direct = disk.most_bytes != 700 and rng.random() < 0.3
    keep = rng.choice(KEEPS)
    ledger = Ledger(keep=keep, mode=mode, direct=direct, in_flight=scenario.in_flight, ranks=scenario.ranks)
    world = World(disk, ledger, judge)
    scenario.live(world)
    judge.crash(world)

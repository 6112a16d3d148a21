"""The end of a schedule: what the next opening of the run would restore from what is left."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from lastgood.format import layout, stripe_layout
from lastgood.records import Generation, GenerationId
from lastgood.run import node_opening
from lastgood.run.known import Environment, KnownRun
from lastgood.run.node_disks import FileRequest, NodeDisks, NodeFiles, Nodes
from lastgood.run.planned_save import RunOptions

from .node_job import Job, Saves, restored
from .node_ledger import Ledger
from .node_world import World
from .plain import State

WATCH_POINTS = 5
"""So many points lie between two looks at what a job has done."""
REST_POINTS = 150
"""Agents go on for up to so many points after a job."""


def opened(world: World, ledger: Ledger) -> tuple[Generation | None, State]:
    """What the next job would restore, by the code of its opening. Nothing is rebuilt, and nothing is changed."""
    nodes = ledger.nodes
    disks = [world.memory(node, shared=True) for node in nodes]
    leaders = Nodes(tuple(range(len(nodes))))
    tier = NodeDisks(disks[0], leaders, _Asked(disks[1:]) if disks[1:] else None)  # type: ignore[arg-type]
    environment = Environment(wall_seconds=lambda: 0.0, monotonic_seconds=lambda: 0.0)
    front, below = KnownRun(tier, environment), KnownRun(world.home(), environment)
    front.below = [below]
    node_opening.note_lost_parts(front)
    return restored([front, below])


class _Asked:
    """Stands for `Requests` at the end of a schedule: the disks of the others answer at once."""

    def __init__(self, disks: Sequence[Any]) -> None:
        self._served = [NodeFiles(one) for one in disks]
        self._request = FileRequest(call="list")

    def ask(self, request: FileRequest) -> None:
        self._request = request

    def answers(self, least_seconds: float = 0.0) -> list[object]:
        return [one.served(self._request, lambda: False) for one in self._served]


def reopened(world: World, ledger: Ledger, options: RunOptions, best: GenerationId | None) -> list[str]:
    """Let a job open the run to which nothing happens: it rebuilds, restores, protects and saves nothing.

    `best`: what it must find. Returns what is wrong with it; the rules of the ledger hold for it too. World and ledger
    are in another schedule then.
    """
    after, nodes = ledger.continued(world), ledger.nodes
    world.begin(random.Random(len(nodes)), {top: files.copied() for top, files in world.files.items()}, after, (0, 0))
    make_folders(world, nodes)
    job = Job(world, "c", range(len(nodes)), [*nodes], Saves(), options)
    until_ended(world, job)
    problems = [*world.scheduler.problems]
    if job.errors and (best is not None or not job.errors[0].startswith("NothingGood")):
        problems.append(f"{best} can be restored, and the next opening fails: {job.errors[0]}")
    elif job.offered is not None and not job.protected:
        problems.append(f"the next opening restores {job.restored}, and it stays without copies or parity")
    return problems + _left_behind(world, nodes)


def _left_behind(world: World, nodes: Sequence[int]) -> list[str]:
    """Parity of generations that do not exist: no opening removes it, where a newer generation names its generation."""
    return [
        f"{path} has files of parity, and no COMMIT"
        for node in nodes
        for path, names in world.files[f"m{node}"].folders.items()
        if any(map(stripe_layout.is_stripe_file, names)) and not {layout.COMMIT, layout.GOING} & names.keys()
    ]


def make_folders(world: World, nodes: Sequence[int]) -> None:
    """Make the folder of the run in the memory of these nodes, where an agent has removed it."""
    for node in nodes:
        folders = world.files[f"m{node}"].folders
        folders.setdefault(f"/m{node}/run", {})
        folders[f"/m{node}"].setdefault("run", None)


def until_ended(world: World, job: Job, points: int = REST_POINTS, rest_seconds: float = 0.0) -> None:
    """Play a job to its end; its agents then go on for up to so many points, and as long as that by the clock."""
    scheduler, ended_at = world.scheduler, [0.0]

    def abort() -> None:
        scheduler.aborted = True

    def watch() -> None:
        """Find out at each few points whether the job has ended."""
        if job.alive:
            scheduler.later(WATCH_POINTS, watch)
        else:
            scheduler.later(scheduler.chance.randrange(points), abort)

    def over(until: float) -> bool:
        if job.alive:
            ended_at[0] = scheduler.now
        return not job.alive and until >= ended_at[0] + rest_seconds

    scheduler.later(0, watch)
    scheduler.over = over
    job.start()
    scheduler.run()

"""Schedules of the commit on several nodes: a job that saves and dies, its agents, a job that follows, and the checks.

One schedule has two acts. In the first a job saves to the memory of its nodes, with deaths and disturbed messages; it
ends with the last process of the job. In the second, agents that are started anew copy what is left to the home, with
deaths, and perhaps with a job that follows. Every first act is continued by several second ones.

Where nodes share parity, a job follows more often, which rebuilds what lost nodes had, and at the end another one, to
which nothing happens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from lastgood.errors import LastgoodError, NothingGood
from lastgood.format import layout, stripe_layout
from lastgood.records import GenerationId
from lastgood.run.agent_messages import AgentSpec, CopyTo
from lastgood.run.planned_save import RunOptions

from .interleaving import Process
from .node_endings import WATCH_POINTS, make_folders, opened, reopened, until_ended
from .node_job import KEEP_HOME, Job, Saves, nodes_of, saved
from .node_ledger import Ledger
from .node_world import HOME_URL, World, start_agent
from .shared_files import Content, Folders

SPEC = AgentSpec(format=layout.FORMAT, places=[CopyTo(url=HOME_URL, keep=KEEP_HOME)], order=0, spill=None)
QUIET_SECONDS = 8.0
"""Nothing goes wrong for so long before a schedule ends: time for three attempts of every agent."""
PATIENCE_SECONDS = 300.0
"""The same while the agents have all that they need for the newest generation: they disturb each other at times."""
NOISE = ((0.0, 0.0), (0.0, 0.0), (0.03, 0.0), (0.1, 0.0), (0.0, 0.1), (0.0, 0.3), (0.04, 0.1))
"""The shares of messages that something happens to: in the store of the job, between agents."""
EVENT_POINTS, FOLLOWED_POINTS = 250, 1800
"""Deaths and the job that follows come before this point of a second act; deaths with parity before the other one."""
SEALED_POINTS = 8, 20, 60
"""Parts of a save between the last seal and the end of the commit."""
LATE_POINTS = 2000
"""Agents that may commit late go on for up to so long after a first act: those of the second one do not listen."""
COMMITTED_POINTS = 300
"""The part of a job that follows a commit: deletions, and parity."""
DEATHS = "all", "coordinator", "rank", "agent", "node", "node of the coordinator", "all", "agent"
PARITY_DEATHS = *DEATHS, "node", "damage"
FIRST = GenerationId(step=10, incarnation="a" * 8)


class Shape(NamedTuple):
    """`leaders`: for each rank the lowest rank of its node. `copies`: on how many nodes each file is to lie. `parity`:
    among the nodes, in place of copies, as "2+1"; None: there is none. `late`: whether agents commit late together.
    `in_flight`: whether saves are in flight at the same time, and may be committed in any order."""

    leaders: tuple[int, ...]
    copies: int = 1
    parity: str | None = None
    late: bool = False
    in_flight: bool = False

    @property
    def machines(self) -> list[int]:
        order = sorted(set(self.leaders))
        return [order.index(one) for one in self.leaders]

    @property
    def options(self) -> RunOptions:
        return RunOptions(copies=self.copies, node_parity=self.parity)

    @property
    def spec(self) -> AgentSpec:
        """What the agents of the job know."""
        return msgspec.structs.replace(SPEC, nodes=nodes_of(self.leaders, self.machines) if self.late else [])


SHAPES = (
    Shape((0, 1)),
    Shape((0, 1), 2),
    Shape((0, 1)),
    Shape((0, 1), 2),
    Shape((0, 1, 1)),
    Shape((0, 0, 2), 2),
    Shape((0, 1, 2)),
    Shape((0, 1, 2), 2),
)
PARITY_SHAPES = (
    Shape((0, 1, 2), parity="2+1"),
    Shape((0, 1, 1, 3), parity="2+1"),
    Shape((0, 1, 2, 3), parity="2+1"),
    Shape((0, 1, 2, 3), parity="2+2"),
)
"""The least that shares parity; parts of different lengths; more nodes than a stripe has cells; two losses."""
IN_FLIGHT_SHAPES = (
    Shape((0, 1), in_flight=True),
    Shape((0, 1), 2, in_flight=True),
    Shape((0, 1), 2, in_flight=True, late=True),
    Shape((0, 0, 2), 2, in_flight=True),
    Shape((0, 1, 2), 2, in_flight=True),
    Shape((0, 1, 2), parity="2+1", in_flight=True),
)
LATE_SHAPES = (
    Shape((0, 1), 2, late=True),
    Shape((0, 1, 1), 2, late=True),
    Shape((0, 0, 2), 2, late=True),
    Shape((0, 1, 2), 2, late=True),
)


@dataclass
class Scene:
    """What is left between two acts: names and contents of all file systems, and the ledger."""

    shape: Shape
    folders: dict[str, Folders]
    ledger: Ledger
    digest: int
    points: int
    problems: list[str]
    """of the act that led here"""
    story: tuple[str, ...] = ()


class Finished(NamedTuple):
    """One schedule. `digest`: of what happened in it."""

    digest: int
    problems: list[str]
    outcome: str
    """what became of the newest generation"""
    story: str


class Explorer:
    """Plays schedules. `world` is explored (node_explored.py). `shapes`: of the jobs."""

    def __init__(self, world: World, shapes: Sequence[Shape] = SHAPES) -> None:
        self._world, self._shapes = world, shapes
        self._scenes: dict[Shape, Scene] = {}
        self._ends: dict[int, list[str]] = {}
        self._story = list[str]()

    # ---- the beginning -------------------------------------------------------------------------------------

    def scene(self, shape: Shape) -> Scene:
        """A run whose first generation is everywhere, made by a job that nothing happens to."""
        if shape not in self._scenes:
            machines = shape.machines
            folders: dict[str, Folders] = {f"m{node}": _empty(f"/m{node}") for node in set(machines)}
            folders["home"] = _empty("/home")
            ledger = Ledger(self._world, sorted(set(machines)), shape.spec, 1000.0, orders={"none": 0})
            ledger.losses = max(shape.options.copies_among_nodes - 1, 1)
            self._world.begin(random.Random(1), folders, ledger, (0.0, 0.0))
            job = Job(self._world, "a", shape.leaders, machines, Saves([FIRST.step]), shape.options, below=True)
            until_ended(self._world, job)
            self._scenes[shape] = self._left(shape, ledger)
            if not (ledger.in_home(FIRST) and ledger.in_memory(FIRST)):
                self._scenes[shape].problems.append("a job to which nothing happens does not save")
        return self._scenes[shape]

    # ---- the first act -------------------------------------------------------------------------------------

    def first_act(self, seed: int) -> Scene:
        chance = random.Random(seed)
        shape = chance.choice(self._shapes)
        before = self.scene(shape)
        if before.problems:
            return before
        world, ledger = self._world, before.ledger.continued(self._world)
        ledger.linger_seconds = chance.choice((0.0, 1000.0, 1000.0))
        steps = chance.choice(([20, 30], [20, 30, 40]) if shape.in_flight else ([20], [20, 30]))
        world.begin(chance, _copied(before.folders), ledger, chance.choice(NOISE))
        ledger.agents = [start_agent(world, node, ledger.linger_seconds) for node in ledger.nodes]
        below = chance.random() < 0.25
        saves = Saves(steps, shape.in_flight, [one for one in steps if shape.in_flight and chance.random() < 0.5])
        job = Job(world, "a", shape.leaders, shape.machines, saves, shape.options, resumes=FIRST, below=below)
        self._story = [f"{shape}, {saves}, below {below}"]
        most = len(steps) * before.points // (1 if shape.in_flight else 2)
        deaths = [
            (chance.randrange(most), self._death(chance, [job], shape))
            for _ in range(chance.choice((0, 1, 1, 1, 2, 3)))
        ]
        world.scheduler.events = sorted(deaths, key=lambda one: one[0])
        if shape.late and chance.random() < 0.7:
            self._die_after_seal(job)
        until_ended(world, job, *((LATE_POINTS, QUIET_SECONDS) if shape.late else ()))
        return self._left(shape, ledger)

    def _die_after_seal(self, job: Job) -> None:
        """Kill all ranks of a job, or the coordinator, soon after some or all ranks have sealed: often before the
        commit."""
        ledger, scheduler = self._world.ledger, self._world.scheduler
        chance, files = scheduler.chance, 2 * len(job.processes)
        enough = len(ledger.sealed) + chance.choice((1, files, files, files))
        ranks = job.processes if chance.random() < 0.7 else job.processes[:1]

        def strike() -> None:
            self._story.append(f"{len(ranks)} ranks at point {scheduler.count}, after a seal")
            for one in ranks:
                self._world.kill(one)

        def watch() -> None:
            if len(ledger.sealed) >= enough:
                scheduler.later(chance.randrange(chance.choice(SEALED_POINTS)), strike)
            elif job.alive:
                scheduler.later(WATCH_POINTS, watch)

        scheduler.later(WATCH_POINTS, watch)

    def _left(self, shape: Shape, ledger: Ledger) -> Scene:
        world, scheduler = self._world, self._world.scheduler
        folders = {top: files.copied() for top, files in world.files.items()}
        return Scene(shape, folders, ledger, scheduler.digest, scheduler.count, scheduler.problems, tuple(self._story))

    # ---- deaths --------------------------------------------------------------------------------------------

    def _death(self, chance: random.Random, jobs: list[Job], shape: Shape) -> Callable[[], None]:
        kind = chance.choice(DEATHS if shape.parity is None else PARITY_DEATHS)
        pick = chance.random()

        def strike() -> None:
            world, ledger = self._world, self._world.ledger
            processes = [one for job in jobs for one in job.processes if one.alive]
            self._story.append(f"{kind} at point {world.scheduler.count}")
            if kind == "agent":
                alive = [one for one in ledger.agents if one.alive]
                if alive:
                    self._restart(alive[int(pick * len(alive))], bool(processes) and chance.random() < 0.5)
            elif kind.startswith("node"):
                leads = kind != "node" and bool(jobs)
                self.lose_node(jobs[-1].processes[0].node if leads else ledger.nodes[int(pick * len(ledger.nodes))])
            elif kind == "damage":
                self._damage(pick, chance.random())
            elif processes:
                chosen = {"all": processes, "coordinator": processes[:1]}.get(kind)
                for one in chosen or [processes[int(pick * len(processes))]]:
                    world.kill(one)

        return strike

    def _restart(self, agent: Process, attended: bool) -> None:
        """Kill an agent. A service manager starts another one, unless training processes are to do so (`attended`)."""
        world, ledger = self._world, self._world.ledger
        world.kill(agent)
        if not attended:
            ledger.agents.append(start_agent(world, agent.node, ledger.linger_seconds))

    def _damage(self, pick: float, place: float) -> None:
        """Flip a bit in a file of parity: of a cell, of a copy of a manifest, or of the record."""
        world = self._world
        folders = {
            path: names
            for node in world.ledger.nodes
            for path, names in sorted(world.files[f"m{node}"].folders.items())
            if any(map(stripe_layout.is_record, names))
        }
        files = [(path, name) for path, names in folders.items() for name in sorted(names) if _is_parity(name, names)]
        if files:
            path, name = files[int(pick * len(files))]
            before, at = folders[path][name], layout.parse_folder(path.rpartition("/")[2])
            assert before is not None and at is not None
            after = Content(bytes(before.data))  # acts share the contents of files
            after.data[int(place * len(after.data))] ^= 1
            folders[path][name] = after
            self._story.append(f"{path}/{name} is damaged")
            world.ledger.damage(at)

    def lose_node(self, node: int) -> None:
        """A machine dies with its memory and all its processes. Its place is empty then."""
        world = self._world
        if f"m{node}" not in world.files:
            return
        for actor in world.scheduler.actors:
            if actor.process.node == node:
                world.kill(actor.process)
        before = world.ledger.best(every=True)
        world.files[f"m{node}"].folders = _empty(f"/m{node}")
        world.ledger.lose(node, before)

    # ---- the second act ------------------------------------------------------------------------------------

    def second_act(self, scene: Scene, seed: int) -> Finished:
        chance = random.Random(seed)
        world, ledger = self._world, scene.ledger.continued(self._world)
        world.begin(chance, _copied(scene.folders), ledger, chance.choice(NOISE))
        scheduler, self._story = world.scheduler, [*scene.story, "then"]
        ledger.linger_seconds = chance.choice((0.0, 1000.0))
        ledger.agents = [start_agent(world, node, ledger.linger_seconds) for node in ledger.nodes]
        jobs, shape = list[Job](), scene.shape
        events, quiet = self._events(chance, shape, jobs), [0.0]

        def timed(event: Callable[[], None]) -> Callable[[], None]:
            def happens() -> None:
                event()
                quiet[0] = scheduler.now

            return happens

        scheduler.events = sorted(((at, timed(event)) for at, event in events), key=lambda one: one[0])

        def over(until: float) -> bool:
            if any(job.alive for job in jobs):
                quiet[0] = until
                return False
            if until <= quiet[0] + QUIET_SECONDS:
                return False
            best = ledger.best()
            waits = best is not None and not ledger.in_home(best) and self._must_be_home(ledger, best)
            return not waits or until > quiet[0] + PATIENCE_SECONDS

        scheduler.over = over
        scheduler.run()
        problems = [*scheduler.problems]
        digest, outcome = hash((scene.digest, scheduler.digest)), "violation"
        if not problems:
            problems, outcome = self._judged(shape, ledger)
        return Finished(digest, problems, outcome, "; ".join(self._story))

    def _events(self, chance: random.Random, shape: Shape, jobs: list[Job]) -> list[tuple[int, Callable[[], None]]]:
        """Deaths of a second act, and the job that follows. Where nodes share parity one is often lost before it."""
        points, follows = (EVENT_POINTS, 0.2) if shape.parity is None else (FOLLOWED_POINTS, 0.7)
        deaths = range(chance.choice((0, 0, 1, 1, 2)))
        events = [(chance.randrange(points), self._death(chance, jobs, shape)) for _ in deaths]
        if chance.random() < follows:
            events.append((chance.randrange(EVENT_POINTS), lambda: self._follows(shape, jobs)))
        if shape.parity is not None and chance.random() < 0.5:
            node = chance.choice(self._world.ledger.nodes)
            events.append((0, lambda: self._lose(node, "first")))
        if shape.parity is not None and chance.random() < 0.3:
            pick, place = chance.random(), chance.random()
            events.append((0, lambda: self._damage(pick, place)))
        return events

    def _lose(self, node: int, when: str) -> None:
        self._story.append(f"node {node} is lost {when}")
        self.lose_node(node)

    def _follows(self, shape: Shape, jobs: list[Job]) -> None:
        """A job opens the run: on all machines, or on all but one, whose agent goes on."""
        world, ledger, chance = self._world, self._world.ledger, self._world.scheduler.chance
        if len(ledger.nodes) > 1 and chance.random() < 0.3:
            ledger.nodes.remove(chance.choice(ledger.nodes))
            ledger.died += 1  # for this job: it does not see that memory
            self._story.append(f"without another node than {ledger.nodes}")
        self._story.append(f"a job follows at point {world.scheduler.count}")
        make_folders(world, ledger.nodes)
        step = 10 + max(at.step for at in ledger.commits)
        options = shape.options if shape.parity else RunOptions(copies=chance.choice((1, 2)))
        job = Job(world, "b", range(len(ledger.nodes)), [*ledger.nodes], Saves([step]), options)
        jobs.append(job)
        job.start()
        if shape.parity is not None and chance.random() < 0.3:
            self._lose_after_commit(job)

    def _lose_after_commit(self, job: Job) -> None:
        """Lose a node soon after the next commit of a job: before its parity is made, while it is, or after it."""
        ledger, scheduler = self._world.ledger, self._world.scheduler
        chance, before = scheduler.chance, len(ledger.commits)

        def strike() -> None:
            if job.alive:
                self._lose(chance.choice(ledger.nodes), f"at point {scheduler.count}, after a commit")

        def watch() -> None:
            if len(ledger.commits) > before:
                scheduler.later(chance.randrange(COMMITTED_POINTS), strike)
            elif job.alive:
                scheduler.later(WATCH_POINTS, watch)

        scheduler.later(WATCH_POINTS, watch)

    # ---- the end -------------------------------------------------------------------------------------------

    def _judged(self, shape: Shape, ledger: Ledger) -> tuple[list[str], str]:
        """What is wrong at the end of a schedule, and what became of the newest generation."""
        best, world = ledger.best(), self._world
        drained = best is not None and ledger.in_home(best)
        newest = max(ledger.reported, key=ledger.rank_of, default=FIRST)
        lost = best is None or ledger.rank_of(best) < ledger.rank_of(newest)
        outcome = "lost with its nodes" if lost else "in the home" if drained else "in memory only"
        outcome = f"the newest that a save returned (step {newest.step}) is {outcome}"
        key = hash((shape.parity, _state(world), best, drained, *ledger.nodes))
        if key not in self._ends:
            world.scheduler.quiet, world.scheduler.aborted = True, False
            problems = list[str]()
            if best is not None and not drained and self._must_be_home(ledger, best):
                problems.append(f"{best} is in memory, and its agents leave it there")
            if shape.parity is None:
                problems += self._wrong_at_end(ledger, best)
            else:
                problems += reopened(world, ledger, shape.options, best)
            self._ends[key] = problems
        return self._ends[key], outcome

    def _wrong_at_end(self, ledger: Ledger, best: GenerationId | None) -> list[str]:
        """What is wrong with what the next opening finds."""
        try:
            generation, state = opened(self._world, ledger)
        except NothingGood as error:
            return [f"{best} can be restored, and a restore says: {error}"] if best else []
        except LastgoodError as error:
            return [f"{best} can be restored, and a restore fails: {type(error).__name__}: {error}"]
        problems = list[str]()
        if best is not None and (generation is None or ledger.rank_of(generation.id) < ledger.rank_of(best)):
            problems.append(f"{best} can be restored, and a restore finds {generation and generation.id}")
        if generation is not None and state != saved(generation):
            problems.append(f"{generation.id} is restored with other bytes than were saved")
        return problems

    def _must_be_home(self, ledger: Ledger, best: GenerationId) -> bool:
        """Whether the agents have all they need: a node with each part has an agent, and COMMIT, which that reads.

        A node without COMMIT, because its coordinator died while it wrote them, copies nothing before the next opening.
        """
        attended = {one.node for one in ledger.agents if one.alive}
        places = [there for node, there in ledger.folders_of(best).items() if node in attended]
        return all(
            any(
                layout.COMMIT in there and ledger._whole(best, manifest, there) and ledger._whole(best, blob, there)
                for there in places
            )
            for manifest, blob in ledger.parts_of(best)
        )


def _empty(top: str) -> Folders:
    return {top: {"run": None}, f"{top}/run": {}}


def _is_parity(name: str, names: Mapping[str, Content | None]) -> bool:
    """Whether a file is one of parity that is complete, or the record of one."""
    return stripe_layout.is_record(name) or stripe_layout.record_name(name) in names


def _copied(folders: dict[str, Folders]) -> dict[str, Folders]:
    return {top: {path: dict(names) for path, names in one.items()} for top, one in folders.items()}


def _state(world: World) -> int:
    """A digest of all names, and of the contents by their identity."""
    return hash(
        tuple(
            (path, name, 0 if content is None else hash(bytes(content.data)))
            for top in sorted(world.files)
            for path, names in sorted(world.files[top].folders.items())
            for name, content in sorted(names.items())
        )
    )

"""A deterministic scheduler of actors: threads of which one runs at a time, and which change over at chosen points.

Code that is explored calls `point` before each step that others can see, and `wait` where it would block. The clock
moves only when nobody can go on. What a schedule did is one number: `Scheduler.digest`. Knows no file and no message.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

CHANGED_PRIORITIES = 0.03
"""The share of choices before which an actor gets another priority."""
POINTS_LIMIT = 40_000
"""A schedule with more points is one that does not end."""


class Killed(BaseException):
    """Raised in an actor whose process has died: it unwinds, and nothing that it does then has an effect."""


class Process:
    """What dies at once: all its actors, and the locks of files that it holds. `node`: the number of its machine."""

    def __init__(self, name: str, node: int) -> None:
        self.name, self.node, self.alive = name, node, True


class Actor:
    """One thread of a process. `number`: names it in the digest. `ready`: None, or the condition that it waits for."""

    def __init__(self, number: int, process: Process, body: Callable[[], object]) -> None:
        self.number, self.process, self.body = number, process, body
        self.ready: Callable[[], Any] | None = None
        self.until: float | None = None
        self.carrier: _Carrier | None = None
        self.priority = 0.0
        self.done = False


class _Carrier(threading.Thread):
    """A thread that carries one actor after another."""

    def __init__(self, crew: Crew) -> None:
        super().__init__(name="carrier")
        self.gate = threading.Lock()
        self.gate.acquire()
        self.job: tuple[Scheduler, Actor] | None = None
        self._crew = crew
        self.start()

    def run(self) -> None:
        while True:
            self.gate.acquire()
            if self.job is None:
                return
            scheduler, actor = self.job
            scheduler._carry(actor)
            self._crew.free.append(self)
            scheduler._leave(actor)


class Crew:
    """The threads that schedules share. `close` ends them."""

    def __init__(self) -> None:
        self.free: list[_Carrier] = []

    def carrier(self) -> _Carrier:
        return self.free.pop() if self.free else _Carrier(self)

    def close(self) -> None:
        for one in self.free:
            one.job = None
            one.gate.release()
            one.join()


class Scheduler:
    """Runs actors until all have ended, or `over` is true. Every decision comes from `chance`.

    `events`: (the number of a point, what happens there), in ascending order: deaths, above all.
    """

    def __init__(self, crew: Crew, chance: random.Random) -> None:
        self.chance, self.now, self.digest, self.count = chance, 0.0, 0, 0
        self.current: Actor | None = None
        self.quiet = self.aborted = False
        """quiet: nothing that is called changes over; aborted: every actor unwinds"""
        self.events: list[tuple[int, Callable[[], object]]] = []
        self.over: Callable[[float], bool] = lambda until: False
        """called with the next time when nobody can go on: whether this is the end"""
        self.problems: list[str] = []
        self.actors = list[Actor]()
        self._crew, self._numbers = crew, 0
        self._density = chance.choice((0.5, 0.25, 0.1, 0.04, 0.015))
        self._has_priorities = chance.random() < 0.5
        """whether the one of the highest priority goes on, so that others are held up for long; else any of them"""
        self._next_switch = 0
        self._ended = threading.Lock()
        self._ended.acquire()

    def spawn(self, process: Process, body: Callable[[], object]) -> Actor:
        actor = Actor(self._numbers, process, body)
        actor.priority = self.chance.random()
        self._numbers += 1
        self.actors.append(actor)
        return actor

    def later(self, points: int, event: Callable[[], object]) -> None:
        """Let something happen after so many points."""
        self.events.append((self.count + points, event))
        self.events.sort(key=lambda one: one[0])

    def run(self) -> None:
        """Let the actors run. Returns when none is left."""
        if self.actors:
            self._hand_over(self._picked())
            self._ended.acquire()
        self.current = None

    def note(self, *what: object) -> None:
        """Add something that happened to the digest."""
        self.digest = hash((self.digest, self.current.number if self.current else -1, *what))

    def point(self) -> None:
        """A step of the current actor comes next. Others may come before it; its process may die before it."""
        me = self.current
        if self.quiet or me is None:
            return
        if self.aborted or not me.process.alive:
            raise Killed
        self.count += 1
        if self.events and self.count >= self.events[0][0]:
            self.events.pop(0)[1]()
        if self.count >= self._next_switch:
            p = self._density
            self._next_switch = self.count + 1 + int(math.log(1.0 - self.chance.random()) / math.log(1.0 - p))
            self._change_over(me)
        if self.count > POINTS_LIMIT and not self.aborted:
            self.fail("it does not end")
        if self.aborted or not me.process.alive:
            raise Killed

    def wait(self, ready: Callable[[], Any], seconds: float | None = None) -> bool:
        """Wait until `ready()`. Returns False once `seconds` (None: no limit) have passed before."""
        me = self.current
        if self.quiet or me is None:
            return bool(ready())
        if self.aborted or not me.process.alive:
            raise Killed
        if self._asked(ready):
            return True
        me.ready, me.until = ready, None if seconds is None else self.now + max(seconds, 0.0)
        self._change_over(me)
        me.ready = None
        if self.aborted or not me.process.alive:
            raise Killed
        return self._asked(ready)

    def fail(self, problem: str) -> None:
        """Note a violation, and end the schedule."""
        self.problems.append(problem)
        self.aborted = True

    def kill(self, process: Process) -> None:
        process.alive = False
        self.note("dies", process.name)

    # ---- steps ---------------------------------------------------------------------------------------------

    def _asked(self, ready: Callable[[], Any]) -> bool:
        before, self.quiet = self.quiet, True
        try:
            return bool(ready())
        finally:
            self.quiet = before

    def _change_over(self, me: Actor) -> None:
        following = self._picked()
        if following is me:
            return
        carrier = me.carrier
        assert carrier is not None
        self._hand_over(following)
        carrier.gate.acquire()
        self.current = me

    def _hand_over(self, actor: Actor) -> None:
        self.current = actor
        if actor.carrier is None:
            actor.carrier = self._crew.carrier()
            actor.carrier.job = self, actor
        actor.carrier.gate.release()

    def _picked(self) -> Actor:
        """The actor that goes on. If none can, the clock moves to the next time that one waits for."""
        while True:
            able = [
                one
                for one in self.actors
                if self.aborted
                or one.ready is None
                or not one.process.alive
                or (one.until is not None and one.until <= self.now)
                or self._asked(one.ready)
            ]
            if able:
                return able[0] if len(able) == 1 or self.aborted else self._chosen(able)
            times = [one.until for one in self.actors if one.until is not None and one.ready is not None]
            if not times or self.over(min(times)):
                self.aborted = True
            else:
                self.now = min(times)

    def _chosen(self, able: list[Actor]) -> Actor:
        if not self._has_priorities:
            return self.chance.choice(able)
        if self.chance.random() < CHANGED_PRIORITIES:
            self.chance.choice(able).priority = self.chance.random()
        return max(able, key=lambda one: one.priority)

    def _carry(self, actor: Actor) -> None:
        try:
            if not self.aborted and actor.process.alive:
                actor.body()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - an error that nothing handles is a finding
            if not self.aborted:
                self.fail(f"{actor.process.name} raises {type(error).__name__}: {error}")
        actor.done = True

    def _leave(self, actor: Actor) -> None:
        self.actors.remove(actor)
        if self.actors:
            self._hand_over(self._picked())
        else:
            self._ended.release()


# ---- what stands for `threading`, `time` and executors in the explored modules -----------------------------------


class Threads:
    """Stands for the module `threading`: locks, conditions and threads of actors. `world` has the present scheduler."""

    def __init__(self, world: Any) -> None:
        self._world = world

    def Thread(self, target: Callable[[], object], name: str = "") -> _Thread:
        return _Thread(self._world.scheduler, target)

    def Lock(self) -> _Lock:
        return _Lock(self._world.scheduler)

    RLock = Lock

    def Condition(self) -> _Condition:
        return _Condition(self._world.scheduler)

    def Event(self) -> _Event:
        return _Event(self._world.scheduler)

    def get_ident(self) -> int:
        """The same in each play of a schedule: names of files are made of it."""
        actor = self._world.scheduler.current
        return 0 if actor is None else 1 + int(actor.number)


class _Thread:
    def __init__(self, scheduler: Scheduler, target: Callable[[], object]) -> None:
        self._scheduler, self._target = scheduler, target
        self._actor: Actor | None = None

    def start(self) -> None:
        assert self._scheduler.current is not None
        self._actor = self._scheduler.spawn(self._scheduler.current.process, self._target)

    def join(self) -> None:
        actor = self._actor
        if actor is not None:
            self._scheduler.wait(lambda: actor.done)


class _Lock:
    """A lock that an actor may hold across a point. The same actor may take it again."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owner: Actor | None = None
        self._depth = 0

    def acquire(self) -> None:
        me = self._scheduler.current
        if self._owner is not None and self._owner is not me:
            self._scheduler.wait(lambda: self._owner is None)
        self._owner = me
        self._depth += 1

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Condition(_Lock):
    def wait_for(self, ready: Callable[[], Any], timeout: float | None = None) -> bool:
        self.release()
        try:
            return self._scheduler.wait(lambda: ready() and self._owner is None, timeout)
        finally:
            self.acquire()

    def wait(self, timeout: float | None = None) -> bool:
        self._notified = False
        return self.wait_for(lambda: self._notified, timeout)

    def notify_all(self) -> None:
        self._notified = True


class _Event:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._set = scheduler, False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        return self._scheduler.wait(lambda: self._set, timeout)


class Clock:
    """Stands for the module `time`."""

    def __init__(self, world: Any) -> None:
        self._world = world

    def monotonic(self) -> float:
        return float(self._world.scheduler.now)

    time = monotonic


class ActorExecutor:
    """Stands for ThreadPoolExecutor: each job is an actor of the process that submits it."""

    def __init__(self, world: Any) -> None:
        self._scheduler: Scheduler = world.scheduler
        self._actors: list[Actor] = []

    def __enter__(self) -> ActorExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def submit(self, job: Callable[..., Any], *args: Any) -> Future[Any]:
        future = Future[Any]()

        def body() -> None:
            try:
                result = job(*args)
            except Exception as error:  # noqa: BLE001 - as an executor does
                future.set_exception(error)
            else:
                future.set_result(result)

        assert self._scheduler.current is not None
        self._actors.append(self._scheduler.spawn(self._scheduler.current.process, body))
        return future

    def shutdown(self) -> None:
        self._scheduler.wait(lambda: all(one.done for one in self._actors))

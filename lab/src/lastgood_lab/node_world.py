"""Machines of a schedule: their memory, their agents, the wire between them, and the directory that all of them see.

What the operating system does is modelled here, and nothing else of the protocol: file systems in memory, locks that
end with their process, sockets, and messages that are lost, late or handled twice. `explored` puts it in the place of
the operating system in the modules of lastgood.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

from lastgood.agent import server
from lastgood.engine.arena import Arena
from lastgood.errors import LastgoodError, NotARun, PeerDown, RunLocked, TierDown, TimedOut
from lastgood.ports import Store
from lastgood.run.access import AGENTS_MARK, LOCK, YIELD_SECONDS
from lastgood.run.lower_place import PAUSES_SECONDS
from lastgood.run.paths import MEMORY
from lastgood.storage.directory import Disk

from .interleaving import Crew, Process, Scheduler
from .node_sockets import Listener
from .shared_files import Folders, SharedFiles

HOME = "/home/run"
HOME_URL = f"file://{HOME}"
LISTEN_PORT = 7000
DELAYS_SECONDS = (0.0, 0.0, PAUSES_SECONDS[0], PAUSES_SECONDS[0], PAUSES_SECONDS[1] + PAUSES_SECONDS[0])
"""How late a message may be: as late as the next attempt of who has sent it, for the clock moves only when all wait."""
CHUNK_BYTES = 4096
BURST_POINTS = 400
"""Bursts of disturbed messages begin before this point of a schedule, and last a quarter of it."""
COPY_SECONDS = (0.0, 0.0, 0.3, 2.0)
"""How long an agent copies, by the clock of a schedule."""


def memory_of(node: int) -> str:
    """The folder of the run in the memory of a node."""
    return f"/m{node}/run"


class Arenas:
    """Arenas that were made once: to make one costs as much as a tenth of a schedule."""

    def __init__(self) -> None:
        self._all: list[Arena] = []
        self._used = 0

    def begin(self) -> None:
        self._used = 0

    def __call__(self, total_bytes: int, chunk_bytes: int) -> Arena:
        if self._used == len(self._all):
            self._all.append(Arena(8 * CHUNK_BYTES, CHUNK_BYTES))
        arena = self._all[self._used]
        arena._free, arena._untouched = [], 0
        self._used += 1
        return arena


class World:
    """What the machines of the present schedule have. `begin` starts another one.

    `ledger`: judges each change. `noise`: the shares of messages that something happens to, in the store of a job and
    on the wire between agents.
    """

    def __init__(self) -> None:
        self.crew, self.arenas = Crew(), Arenas()
        self.ledger: Any = None
        self.outside = Process("network", -1)

    def begin(
        self, chance: random.Random, folders: dict[str, Folders], ledger: Any, noise: tuple[float, float]
    ) -> None:
        self.scheduler, self.ledger, self.noise = Scheduler(self.crew, chance), ledger, noise
        self.files = {top: SharedFiles(self, ledger.changed, one) for top, one in folders.items()}
        self.locks: dict[str, tuple[Process, bytes]] = {}
        self.wanted: set[str] = set()
        self.listeners: dict[str, Listener] = {}
        self.wire: dict[str, tuple[Process, Any, Any]] = {}
        self.stores: dict[str, dict[str, bytes]] = {}
        start = chance.randrange(BURST_POINTS)
        self._burst = range(start, start + BURST_POINTS // 4) if chance.random() < 0.5 else None
        """while a burst lasts, half of the messages are disturbed, and no others"""
        self.arenas.begin()

    def at(self, path: str) -> SharedFiles:
        """The file system of a path."""
        return self.files[path.split("/", 2)[1]]

    def me(self) -> Process:
        current = self.scheduler.current
        return current.process if current is not None else self.outside

    def memory(self, node: int, shared: bool = False) -> Disk:
        root = memory_of(node)
        return Disk(self.at(root), root, shared=shared, place=f"memory://{root}")

    def home(self, shared: bool = False) -> Disk:
        return Disk(self.at(HOME), HOME, shared=shared)

    def kill(self, process: Process) -> None:
        if process.alive:
            self.scheduler.kill(process)

    # ---- messages ------------------------------------------------------------------------------------------

    def fate(self, on_wire: bool) -> str:
        """What happens to the next message: mostly nothing, ""."""
        chance, share = self.scheduler.chance, self.noise[on_wire]
        if share and self._burst is not None:
            share = 0.5 if self.scheduler.count in self._burst else 0.0
        if not share or chance.random() >= share:
            return ""
        fate = chance.choice(("lost", "unanswered", "late", "twice"))
        self.scheduler.note(fate)
        return fate

    def later(self, job: Callable[[], object]) -> None:
        """Schedule an action at any later instant, which also runs if its actor has died by then."""

        delay = self.scheduler.chance.choice(DELAYS_SECONDS)

        def arrives() -> None:
            self.scheduler.wait(lambda: not delay, delay)
            with contextlib.suppress(LastgoodError):  # nobody waits for the answer
                job()

        self.scheduler.spawn(self.outside, arrives)


class JobStore(Store):
    """The store of a job, as one of its processes sees it."""

    def __init__(self, world: World, job: str) -> None:
        self._world, self._data = world, world.stores.setdefault(job, {})

    def set(self, values: Any) -> None:
        scheduler = self._world.scheduler
        scheduler.point()
        fate = self._world.fate(on_wire=False)
        scheduler.note("set", next(iter(values)).rpartition("/")[2])
        if fate in ("", "unanswered", "twice"):
            self._data.update(values)
        if fate in ("late", "twice"):
            self._world.later(lambda: self._arrives(dict(values)))
        if fate in ("lost", "unanswered", "late"):
            raise TierDown("the store cannot be reached")

    def _arrives(self, values: dict[str, bytes]) -> None:
        self._world.scheduler.point()
        self._world.scheduler.note("late set")
        self._data.update(values)

    def has(self, keys: Any) -> bool:
        self._world.scheduler.point()
        return all(one in self._data for one in keys)

    def get(
        self,
        keys: Any,
        timeout_seconds: float,
        cancelled: Callable[[], bool] = lambda: False,
        poll_seconds: float | None = None,
    ) -> list[bytes]:
        data = self._data
        self._world.scheduler.point()
        self._world.scheduler.wait(lambda: all(one in data for one in keys) or cancelled(), timeout_seconds)
        if all(one in data for one in keys):
            return [data[one] for one in keys]
        raise TimedOut("no message")

    def delete(self, keys: Any) -> None:
        self._world.scheduler.point()
        for one in keys:
            self._data.pop(one, None)


class WireServer:
    """Stands for wire.serving.Server: the agent of a node that listens for others."""

    def __init__(self, world: World, address: tuple[str, int], security: Any, service: Any) -> None:
        self._world, self._host, self._security, self._service = world, address[0], security, service
        self.address = (address[0], LISTEN_PORT)

    def __enter__(self) -> WireServer:
        self._world.wire[self._host] = self._world.me(), self._service, self._security
        return self

    def __exit__(self, *_: object) -> None:
        if self._world.wire.get(self._host, (None, None))[1] is self._service:
            del self._world.wire[self._host]


class WireChannel:
    """Stands for wire.channel.Channel: one request of an agent to that of another node.

    The service handles it in the thread of the caller, as a step of its own process: the caller waits in any case.
    """

    def __init__(self, world: World, address: tuple[str, int], security: Any) -> None:
        self._world, self._host, self._security = world, address[0], security

    def close(self) -> None:
        """Nothing is open between two calls."""

    def call(self, request: bytes, *, outgoing: Any = (), incoming: Any = None, **_: Any) -> Any:
        world = self._world
        world.scheduler.point()
        fate = world.fate(on_wire=True)
        bulk = b"".join(map(bytes, outgoing))
        if fate in ("late", "twice"):
            world.later(lambda: self._handled(request, bulk))
        if fate in ("lost", "late"):
            raise PeerDown(f"{self._host} cannot be reached")
        answer = self._handled(request, bulk)
        if fate == "unanswered":
            raise PeerDown(f"{self._host} does not answer")
        if incoming is not None:
            for one in answer.bulk:
                incoming[: len(one)] = one
        return answer

    def _handled(self, request: bytes, bulk: bytes) -> Any:
        world = self._world
        process, service, security = world.wire.get(self._host, (world.outside, None, None))
        actor = world.scheduler.current
        assert actor is not None
        if service is None or not process.alive or security != self._security:
            raise PeerDown(f"{self._host} cannot be reached")
        caller, accepted = actor.process, world.ledger.asked(process.node, request)
        actor.process = process
        try:
            room = memoryview(b"")
            if bulk:
                room = service.buffer(None, request, len(bulk))
                room[:] = bulk
            answer = service.handle(None, request, room)
            accepted()
        finally:
            died = not process.alive and not world.scheduler.aborted
            actor.process = caller
            if died:
                raise PeerDown(f"{self._host} has died")
        world.scheduler.point()  # the caller may have died meanwhile
        return answer


class FileLock:
    """Stands for io.files.Lock: ends with the process that holds it."""

    def __init__(self, world: World, path: str, mark: bytes = b"") -> None:
        self._world, self._path = world, path
        world.scheduler.point()
        if path.rpartition("/")[0] not in world.at(path).folders:
            raise FileNotFoundError(path)
        holder = world.locks.get(path)
        if holder is not None and holder[0].alive:
            raise BlockingIOError(path)
        world.scheduler.note("locks", path)
        self._mine = world.locks[path] = (world.me(), mark)

    def is_at(self, path: str) -> bool:
        return path.rpartition("/")[0] in self._world.at(path).folders

    def close(self) -> None:
        if self._world.locks.get(self._path) is self._mine:
            del self._world.locks[self._path]


class Access:
    """Stands for run.access, for the directory that all nodes see: its lock, and an agent that gives way."""

    def __init__(self, world: World) -> None:
        self._world = world

    def for_reading(self, url: str) -> Disk:
        if HOME not in self._world.at(HOME).folders:
            raise NotARun(f"there is nothing at {HOME}")
        return self._world.home()

    @contextlib.contextmanager
    def for_writing(self, url: str, mode: str, *, take_over: bool = True, agent_order: int | None = None) -> Any:
        world, path = self._world, f"{HOME}/{LOCK}"
        until = world.scheduler.now + YIELD_SECONDS
        while True:
            try:
                lock = FileLock(world, path, AGENTS_MARK if agent_order is not None else b"")
                break
            except BlockingIOError as error:
                held = world.locks.get(path)
                of_agent = held is not None and held[1] == AGENTS_MARK
                if agent_order is not None or not of_agent or world.scheduler.now >= until:
                    raise RunLocked(f"{HOME} is open for writing in another process") from error
                world.wanted.add(HOME)
                world.scheduler.wait(lambda: _is_free(world, path), until - world.scheduler.now)
        world.wanted.discard(HOME)
        try:
            yield world.home()
            if agent_order is not None:  # without it all agents would try again in the same instant, for ever
                world.scheduler.wait(lambda: False, world.scheduler.chance.choice(COPY_SECONDS))
        finally:
            lock.close()

    @contextlib.contextmanager
    def for_sharing(self, url: str, mode: str) -> Any:
        yield self._world.home(shared=True)

    def Wanted(self, root: str) -> Callable[[], bool]:
        return lambda: root in self._world.wanted


def _is_free(world: World, path: str) -> bool:
    held = world.locks.get(path)
    return held is None or not held[0].alive


def start_agent(world: World, node: int, linger_seconds: float) -> Process:
    """Start the agent of a node, as agent/__main__.py does."""
    process = Process(f"agent {node}", node)

    def body() -> None:
        with contextlib.suppress(FileNotFoundError):  # the memory was removed
            server.serve(f"{MEMORY}{memory_of(node)}", linger_seconds, 0.0)
        process.alive = False

    world.scheduler.spawn(process, body)
    return process

"""Puts a world (node_world.py) in the place of the operating system, in the modules of lastgood that are explored."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from lastgood.agent import drain, nodes, parity_files, peer_files, server, works
from lastgood.coordination import rounds
from lastgood.engine import stripes
from lastgood.engine.inline_executor import Inline
from lastgood.run import (
    agent_link,
    agent_work,
    copying,
    known,
    late_commit,
    node_copies,
    node_disks,
    pack_copies,
    part_copies,
    paths,
    peers,
    rank_requests,
    rebuilding,
)
from lastgood.storage import directory

from . import plain
from .interleaving import ActorExecutor, Clock, Threads
from .node_sockets import Listener, Poll, Selector, Socket, socketpair
from .node_world import CHUNK_BYTES, Access, FileLock, WireChannel, WireServer, World, start_agent

Names = dict[Any, dict[str, Any]]
"""module -> what stands for its names"""
SILENT = SimpleNamespace(warning=lambda text: None, info=lambda text: None, is_reported=lambda count: True)


class _Os:
    """The module `os` without what outlives a schedule."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    @staticmethod
    def register_at_fork(**_: object) -> None:
        """An explored process is no process that forks."""


class _Signals:
    SIGTERM, SIGINT = 15, 2

    @staticmethod
    def signal(number: int, handler: object) -> None:
        """No signals come."""

    @staticmethod
    def set_wakeup_fd(fd: int, warn_on_full_buffer: bool = True) -> int:
        return -1


@contextlib.contextmanager
def explored(world: World) -> Iterator[None]:
    """In the block, the modules of agents and of the commit run in the world."""
    made = {**_of_a_run(world), **_of_agents(world), **_of_sockets(world)}
    before = {module: {name: vars(module)[name] for name in names} for module, names in made.items()}
    for module, names in made.items():
        vars(module).update(names)
    try:
        yield
    finally:
        for module, names in before.items():
            vars(module).update(names)


def _of_a_run(world: World) -> Names:
    threads, clock = Threads(world), Clock(world)
    return {
        rounds: {"threading": threads, "time": clock},
        known: {"threading": threads},
        directory: {"threading": threads},
        copying: {"threading": threads},
        pack_copies: {"threading": threads},
        node_disks: {"threading": threads},
        node_copies: {"threading": threads, "time": clock},
        rank_requests: {"threading": threads, "time": clock},
        peers: {
            "Channel": lambda address, node, me, security, **_: WireChannel(world, address, security),
            "CHUNK_BYTES": CHUNK_BYTES,
            "ThreadPoolExecutor": lambda count, name: ActorExecutor(world),
        },
        part_copies: {"Arena": world.arenas},
        plain: {"Arena": world.arenas},
    }


def _of_agents(world: World) -> Names:
    def executor(count: int, name: str) -> ActorExecutor:
        return ActorExecutor(world)

    return {
        nodes: {
            "ThreadPoolExecutor": executor,
            "Server": lambda address, me, security, service, **_: WireServer(world, address, security, service),
        },
        drain: {"access": Access(world), "Arena": world.arenas, "ThreadPoolExecutor": _inline},
        parity_files: {"ThreadPoolExecutor": _inline},
        rebuilding: {"Arena": world.arenas, "ThreadPoolExecutor": _inline},
        stripes: {"Arena": world.arenas, "ThreadPoolExecutor": _inline},
        works: {
            "access": Access(world),
            "Arena": world.arenas,
            "ThreadPoolExecutor": lambda count, name: (_inline if "read" in name else executor)(count, name),
        },
        agent_work: {"reporting": SILENT},
    }


def _of_sockets(world: World) -> Names:
    clock = Clock(world)
    return {
        agent_link: {
            "os": _Os(),
            "threading": Threads(world),
            "time": clock,
            "reporting": SILENT,
            "select": SimpleNamespace(poll=lambda: Poll(world), POLLIN=1),
            "connected": lambda folder: _connected(world, folder),
            "kill": lambda connection: world.kill(connection.peer.process),
            "started": lambda url: _started(world, paths.parsed(url).root),
        },
        late_commit: {"Lock": lambda path, mark=b"": FileLock(world, path, mark)},
        peer_files: {"Lock": lambda path, mark=b"": FileLock(world, path, mark)},
        server: {
            "time": clock,
            "random": SimpleNamespace(uniform=lambda least, most: world.scheduler.chance.uniform(least, most)),
            "reporting": SILENT,
            "signal": _Signals(),
            "socket": SimpleNamespace(socket=Socket, socketpair=lambda: socketpair(world)),
            "selectors": SimpleNamespace(DefaultSelector=lambda: Selector(world), EVENT_READ=1),
            "ThreadPoolExecutor": lambda count, name: ActorExecutor(world),
            "Lock": lambda path, mark=b"": FileLock(world, path, mark),
            "PosixFiles": lambda: SimpleNamespace(rename=lambda old, new: world.at(old).rename(old, new)),
            "MemoryFiles": lambda folder, spill, buffered: world.at(folder),
            "still": lambda folder: contextlib.nullcontext(),
            "memory_relief": SimpleNamespace(watched=lambda *_: contextlib.nullcontext(), AGENT_INTERVAL_SECONDS=0.0),
            "shutil": SimpleNamespace(rmtree=lambda path, ignore_errors: world.at(path).remove_tree(path)),
            "read_spec": lambda folder: world.ledger.spec if folder in world.at(folder).folders else None,
            "user_of": lambda connection: os.geteuid(),
            "listening": lambda folder: world.listeners.setdefault(folder, Listener(world)).renewed(),
        },
    }


def _inline(count: int, name: str) -> contextlib.nullcontext[Inline]:
    return contextlib.nullcontext(Inline())


def _connected(world: World, folder: str) -> Socket:
    world.scheduler.point()
    listener = world.listeners.get(folder)
    if listener is None or not listener.listens():
        raise ConnectionRefusedError(folder)
    return listener.connect()


def _started(world: World, folder: str) -> str:
    process = start_agent(world, int(folder[2 : folder.index("/", 2)]), world.ledger.linger_seconds)
    process.name += "'"
    world.ledger.agents.append(process)
    listener = world.listeners.setdefault(folder, Listener(world))
    world.scheduler.wait(lambda: listener.listens() or not process.alive, 60.0)
    return ""

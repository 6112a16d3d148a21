"""The process that holds a node's membership: how it joins, what it asks of torch, and how long it waits."""

from __future__ import annotations

import os
import socket
import sys
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from lastgood.errors import TierDown
from lastgood.io import processes
from lastgood.ranks import membership
from lastgood.supervisor import framed, program
from lastgood.supervisor.membership import (
    Answer,
    Connected,
    Drop,
    Join,
    Joined,
    Membership,
    Put,
    Read,
    Request,
    Settings,
    Values,
    Where,
)
from lastgood.supervisor.signals import Signals

SETTINGS = Settings(
    endpoint="h:1", run_id="r", least=1, most=1, local_address="", configuration={}, silent_seconds=0.0, stores=()
)


class Member:
    """In the place of the membership itself, which needs torch's store."""

    def __init__(self, *_: object) -> None:
        pass

    def answer(self, request: object) -> Answer:
        return Connected(store=0, id="here")


class Handler:
    """torch's handler of a node that has waited in reserve, was stopped, and is in no list of torch's any more.
    `nodes`: how many the round has."""

    def __init__(self, nodes: int) -> None:
        state = SimpleNamespace(complete=True, participants=dict.fromkeys(range(nodes)))
        self._state_holder, self.waited = SimpleNamespace(state=state), 0

    def is_closed(self) -> bool:
        return False

    def next_rendezvous(self) -> Any:
        self.waited += 1
        if self.waited == 1:
            raise RendezvousTimeoutError
        return SimpleNamespace(rank=0, world_size=1, store=HashStore())


def member(nodes: int, **settings: str) -> membership.Member:
    """A membership with that handler, and a store in this process."""
    made = membership.Member.__new__(membership.Member)
    made._settings = msgspec.structs.replace(SETTINGS, **settings)
    made._handler, made._store, made._watch, made._holds_store = Handler(nodes), HashStore(), None, False
    return made


def test_a_node_in_reserve_that_was_stopped_for_long_waits_on() -> None:
    """After ten minutes in reserve, a stop of 10 s ended it with exit code 5: torch had forgotten it, and the time of
    `join_timeout` had passed."""
    one = member(nodes=1, local_address="10.0.0.1")
    assert one.answer(Join(waited=False)) == Joined(node=0, nodes=1, address="10.0.0.1", order=1)
    assert one._handler.waited == 2
    with pytest.raises(RendezvousTimeoutError):
        member(nodes=0).answer(Join(waited=False))


def test_keys_of_a_round_are_deleted_where_they_are_set() -> None:
    one = member(nodes=1, local_address="10.0.0.1")
    one.answer(Join(waited=False))
    one.answer(Put(values={"a": "1", "b": "2"}))
    one.answer(Drop(keys=["a", "not there"]))
    assert one.answer(Read(keys=["a", "b"])) == Values(values=[None, "2"])


@pytest.mark.parametrize(
    ("endpoint", "at", "address"),
    [
        ("node0:29400", "127.0.1.1", "node0"),
        ("localhost:29400", "127.0.0.1", "127.0.0.1"),
        ("127.0.0.1:29400", "127.0.0.1", "127.0.0.1"),
    ],
)
def test_the_address_of_a_node_is_one_that_others_reach(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, at: str, address: str
) -> None:
    """The hosts file of Debian gives a machine 127.0.1.1 for its own name: ranks of all nodes had a loopback address as
    MASTER_ADDR, and those of the other nodes found nobody there."""
    found = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (at, 29400))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert member(nodes=1, endpoint=endpoint)._address() == address


def test_an_answer_that_comes_too_late_is_not_that_of_the_next_request() -> None:
    """The store had not answered in time. Each later request had the answer to the one before it."""
    ours, theirs = socket.socketpair()
    one = Membership.__new__(Membership)
    one._settings, one._signals, one._socket, one._lost, one._losses = SETTINGS, Signals([]), ours, None, 0
    with ours, theirs:
        with pytest.raises(TierDown, match="no answer in 0 s"):
            one._asked(Read(keys=["first"]), 0.0)
        assert msgspec.json.decode(framed.receive(theirs), type=Request) == Read(keys=["first"])
        framed.send(theirs, msgspec.json.encode(Values(values=["of the first"])))
        with pytest.raises(TierDown, match="no answer in 0 s"):
            one.read(["second"])
    one._signals.close()


def test_a_supervisor_that_imports_for_long_keeps_its_membership(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node ended with 5 at its start, because `--preload` of a slow file system took longer than half a minute."""
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(membership, "Member", Member)
    monkeypatch.setattr(processes, "die_with", lambda parent: None)
    monkeypatch.setattr(processes, "outlive_signals", lambda: None)  # this is a thread of the test
    monkeypatch.setattr(program, "forget_current_folder", lambda: None)
    monkeypatch.setattr(sys, "argv", ["", str(theirs.detach()), str(os.getpid())])
    process = threading.Thread(target=membership.main)
    process.start()
    framed.send(ours, msgspec.json.encode(SETTINGS))
    process.join(0.1)
    with ours:
        framed.send(ours, msgspec.json.encode(Where()))
        assert msgspec.json.decode(framed.receive(ours), type=Answer) == Connected(store=0, id="here")
        process.join(60.0)
        assert not process.is_alive(), "a supervisor that has joined, and is stopped, keeps no place in the job"

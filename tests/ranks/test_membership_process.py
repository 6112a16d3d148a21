"""The process that holds a node's membership: how long it waits for its supervisor."""

from __future__ import annotations

import os
import socket
import sys
import threading

import msgspec
import pytest

from lastgood.io import processes
from lastgood.ranks import membership
from lastgood.supervisor import framed, program
from lastgood.supervisor.membership import Answer, Connected, Settings, Where

SETTINGS = Settings(
    endpoint="h:1", run_id="r", least=1, most=1, local_address="", configuration={}, silent_seconds=0.0, stores=()
)


class Member:
    """In the place of the membership itself, which needs torch's store."""

    def __init__(self, *_: object) -> None:
        pass

    def answer(self, request: object) -> Answer:
        return Connected(store=0, id="here")


def test_a_supervisor_that_imports_for_long_keeps_its_membership(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node ended with 5 at its start, because `--preload` of a slow file system took longer than half a minute."""
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(membership, "Member", Member)
    monkeypatch.setattr(processes, "die_with", lambda parent: None)
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

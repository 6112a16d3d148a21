"""Which store a node joins, with torch's stores in this process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from lastgood.policy.membership import Past, Round, Seen
from lastgood.ranks import store_list
from lastgood.ranks.store_list import Stores, Watch, found, of_job
from lastgood.ranks.store_server import ID
from lastgood.supervisor.membership import ACTIVE, Known, Settings, active_text
from lastgood.supervisor.placement import free_port

LAST = Round(store=0, id="lost", order=4, nodes=3)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_list, "LOST_SECONDS", -1.0)
    monkeypatch.setattr(store_list, "WATCH_SECONDS", 0.01)


def served(id: str) -> Any:
    from torch.distributed import TCPStore

    made = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made.set(ID, id)
    return made


def settings(ports: Sequence[int], known: Known) -> Settings:
    return Settings(
        endpoint="",
        run_id="job",
        least=1,
        most=3,
        local_address="",
        configuration={},
        silent_seconds=60.0,
        stores=tuple(f"127.0.0.1:{one}" for one in ports),
        known=known,
    )


def test_a_node_that_comes_to_a_store_twice_counts_once() -> None:
    """It was counted each time, so that one of three nodes made a store the one of the job."""
    second = served("b")
    ports = [free_port("127.0.0.1"), second.port]
    for node, active in (("one", None), ("one", None), ("another", (0, 4))):
        chosen = settings(ports, Known(past=Past(node=node, last=LAST)))
        assert found(chosen, Stores(chosen))[:2] == (1, "b")
        assert Stores(chosen).seen() == [None, Seen(id="b", active=active)]


def test_a_node_that_waits_comes_back_to_an_earlier_store() -> None:
    """It looked at later stores only, so that it waited for ever beside the others."""
    second, third = served("b"), served("c")
    chosen = settings([free_port("127.0.0.1"), second.port, third.port], Known(at=2))
    of_job(second, "job").set(ACTIVE, active_text(LAST))
    moved = threading.Event()
    Watch(Stores(chosen), 2, moved.set, threading.Lock()).begin(Past(last=LAST))
    assert moved.wait(20)


def test_a_store_that_is_stopped_is_asked_once_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread for each question was left, one more each five seconds, as long as the store was stopped."""
    monkeypatch.setattr(store_list, "PROBE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        stores = Stores(settings([stopped.getsockname()[1]], Known()))
        assert [stores.seen(), stores.seen()] == [[None], [None]]
        asking = [one for one in threading.enumerate() if one.name == "lastgood-probe"]
        assert len(asking) == 1
    asking[0].join(60)

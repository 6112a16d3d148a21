"""Requests of the coordinator to other ranks."""

from __future__ import annotations

import threading
import time

import msgspec
import pytest
import torch.distributed as dist

from boards import Board, ThreadedBoard
from lastgood.coordination.rounds import RankGroup
from lastgood.errors import Cancelled, TierDown, TimedOut
from lastgood.ranks.torch_store import Clients, GroupStore
from lastgood.run import rank_requests
from lastgood.run.node_disks import FileRequest
from lastgood.run.rank_requests import Requests, RequestServer


def answer(board: Board, number: int, what: str) -> None:
    """Answer a request as rank 1 does."""
    asked = msgspec.json.decode(board.posts[f"run/disks/{number}"])
    board.posts[f"run/disks/{asked['nonce']}/1"] = msgspec.json.encode({"answer": what})


def test_a_late_answer_to_a_lost_request_answers_no_other():
    """The reply of the store to a request was lost, and the rank had served it. The next request had the same number,
    so the answer to the first one was taken for its own: a COMMIT counted as written on a node that had not seen it."""
    board = Board()
    requests = Requests(RankGroup(0, 2, board, "run", 1.0), "disks", [1])
    board.loses_reply = True
    with pytest.raises(TierDown):
        requests.ask(FileRequest(call="list", name=""))
    answer(board, 0, "the first")
    requests.ask(FileRequest(call="put_new", name="a", data=b"b"))
    answer(board, 1, "the second")
    assert requests.answers() == ["the second"]


def test_the_answer_of_a_rank_that_has_died_is_not_awaited():
    """Rank 0 had survived the others, and could not save for them: it waited until one of them had deleted a file."""

    class Waits(Board):
        def get(self, keys, timeout_seconds, cancelled=lambda: False, poll_seconds=None):
            ranks.abandoned.set()
            assert cancelled()
            raise TimedOut("the wait for keys was cancelled")

    ranks = RankGroup(0, 2, Waits(), "run", 1.0)
    requests = Requests(ranks, "disks", [1])
    requests.ask(FileRequest(call="delete", name="a"))
    with pytest.raises(Cancelled):
        requests.answers()


class Nothing:
    """A service that nobody asks."""

    def served(self, request, stop):
        raise AssertionError("nothing was asked")


def test_a_rank_that_is_closed_does_not_wait_for_a_lost_store():
    """Rank 0 was the host of the store, and ended first. The other processes took a minute more to end."""
    asked = threading.Event()

    class Lost(Board):
        def get(self, keys, timeout_seconds, cancelled=lambda: False, poll_seconds=None):
            asked.set()
            return super().get(keys, timeout_seconds, cancelled, poll_seconds)

    board = Lost()
    board.down = True
    server = RequestServer(RankGroup(1, 2, board, "run", 40.0), "disks", Nothing())
    assert asked.wait(20)
    begun = time.monotonic()
    server.close()
    assert time.monotonic() - begun < 15


class Deaf(ThreadedBoard):
    """Its first wait for keys never sees them, as one whose connection was lost without a word."""

    waits = 0

    def get(self, keys, timeout_seconds, cancelled=lambda: False, poll_seconds=None):
        self.waits += 1
        if self.waits == 1:
            while not cancelled():
                time.sleep(0)
            raise TimedOut("the wait was cancelled")
        return super().get(keys, timeout_seconds, cancelled, poll_seconds)


def test_a_rank_that_is_closed_does_not_wait_for_a_store_that_is_cut_off():
    """Its wait for a request learns nothing from a host that is cut off without a word."""
    board = Deaf()
    server = RequestServer(RankGroup(1, 2, board, "run", 4.0), "disks", Nothing())
    board.down, begun = True, time.monotonic()
    server.close()
    assert board.waits == 1 and time.monotonic() - begun < 7, "sooner than after two timeouts"


class Echo:
    """A `Service` that returns the name that it is asked for."""

    def served(self, request, stop):
        return request["name"]


def test_a_request_is_served_whose_wait_has_lost_its_connection():
    board = Deaf()
    requests = Requests(RankGroup(0, 2, board, "run", 5.0), "disks", [1])
    server = RequestServer(RankGroup(1, 2, board, "run", 0.05), "disks", Echo())
    try:
        requests.ask(FileRequest(call="list", name="gen"))
        assert requests.answers() == ["gen"] and board.waits > 1
    finally:
        server.leave()
        server.close()


def test_a_rank_that_is_asked_for_nothing_prints_nothing(capfd):
    """torch's client logs two lines for each wait that runs out. A job of several ranks wrote them every two minutes,
    for each place of its run and on each rank but the first, for as long as it ran."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = GroupStore(Clients(lambda: dist.TCPStore("127.0.0.1", host.port, is_master=False)), 20.0)
    polled = threading.Semaphore(0)

    class Quick(Board):
        def has(self, keys):
            polled.release()
            return store.has(keys)

    server = RequestServer(RankGroup(1, 2, store, "run", 0.2, Quick()), "disks", Echo())
    for _ in range(3):
        assert polled.acquire(timeout=20), "the store is asked once in each timeout"
    Requests(RankGroup(0, 2, store, "run"), "disks", [1]).end()
    server.close()
    assert "waitForInput" not in capfd.readouterr().err


class Endless:
    """A `Service` whose work goes on until it is stopped."""

    def served(self, request, stop):
        while not stop():
            time.sleep(0)
        raise Cancelled("it was stopped")


def test_work_ends_once_the_coordinator_asks_for_the_next(monkeypatch) -> None:
    """Each reading that was given up was made to its end, and what was asked later waited behind all of them."""
    monkeypatch.setattr(rank_requests, "SUCCESSOR_POLL_SECONDS", 0.0)
    board = Board()
    coordinator, other = RankGroup(0, 2, board, "run"), RankGroup(1, 2, board, "run", 40.0)
    requests = Requests(coordinator, "disks", [1])
    server = RequestServer(other, "disks", Endless())
    for _ in range(2):
        requests.ask(FileRequest(call="list", name=""))
    requests.end()
    server._thread.join(30.0)  # neither work has an end of its own
    ended = not server._thread.is_alive()
    server.leave()
    server.close()
    assert ended

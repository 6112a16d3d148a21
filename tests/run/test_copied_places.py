"""What the ranks other than 0 know of the copies of a save."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from boards import Board
from histories import generation
from lastgood.coordination.rounds import RankGroup
from lastgood.errors import PeerDown
from lastgood.records import GenerationId
from lastgood.run.copied_places import POSTED, CopiedPlaces
from lastgood.run.save_handle import Save


@pytest.fixture
def board() -> Board:
    return Board()


def places(board: Board, rank: int) -> CopiedPlaces:
    return CopiedPlaces(RankGroup(rank, 2, board, "run"))


def at(step: int) -> GenerationId:
    return generation(step).id


def test_other_ranks_learn_what_a_save_survives(board: Board) -> None:
    """`durable("node")` was false for ever at each rank but 0, so ranks that asked it went different ways."""
    save = Save.of(generation(3), "memory:///dev/shm/run")
    save.note_posted(places(board, 1))
    node, store = Future[None](), Future[None]()
    places(board, 0).watch(at(3), {"peers://node": node, "s3://bucket/run": store})
    assert save.durable("process") and not save.durable("node")
    node.set_result(None)
    assert save.durable("node") and not save.durable()
    store.set_result(None)
    assert save.durable() and save.where() == ["memory:///dev/shm/run", "peers://node", "s3://bucket/run"]


def test_a_place_whose_copy_failed_is_not_shown(board: Board) -> None:
    failed = Future[None]()
    places(board, 0).watch(at(3), {"peers://node": failed})
    failed.set_exception(PeerDown("it is gone"))
    assert places(board, 1).of(at(3)) == []


def test_without_a_store_the_first_place_is_shown(board: Board) -> None:
    save = Save.of(generation(3), "memory:///dev/shm/run")
    save.note_posted(places(board, 1))
    board.down = True
    assert save.durable("process") and not save.durable("node")


def test_what_is_posted_does_not_grow(board: Board) -> None:
    posting, copied = places(board, 0), Future[None]()
    copied.set_result(None)
    for step in range(1, POSTED + 3):
        posting.watch(at(step), {"peers://node": copied})
    found = [step for step in range(1, POSTED + 3) if places(board, 1).of(at(step))]
    assert found == [*range(3, POSTED + 3)]

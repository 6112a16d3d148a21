"""Which nodes a job goes on with, and which of them decides."""

from __future__ import annotations

import pytest

from lastgood.errors import Refused
from lastgood.policy.membership import Bounds, leader, next_round, silent, spares_text, watched


@pytest.mark.parametrize(
    ("lost", "leaving", "waiting", "act"),
    [
        ([], [], 0, "stay"),
        ([], [], 1, "stay"),  # all nodes are there: others stay in reserve
        ([2], [], 0, "join"),  # also with too few: another node may come
        ([1, 2, 3], [], 0, "join"),
        ([], [2], 0, "join"),
        ([], [2, 3], 0, "end"),
        ([], [2, 3], 1, "join"),
        ([0], [1], 0, "end"),
        ([], [0, 1, 2, 3], 9, "end"),
    ],
)
def test_nodes_stay_join_anew_or_end(lost: list[int], leaving: list[int], waiting: int, act: str) -> None:
    assert next_round(4, lost, leaving, waiting, Bounds(3, 4)).act == act


def test_a_job_with_fewer_nodes_than_it_may_have_takes_those_that_wait() -> None:
    assert next_round(3, [], [], 1, Bounds(2, 4)).act == "join"
    assert next_round(3, [], [], 0, Bounds(2, 4)).act == "stay"


@pytest.mark.parametrize(
    ("nodes", "waiting", "says"),
    [
        (4, 0, "0 of 2 expected; start 2 more nodes with the same command"),
        (4, 1, "1 of 2 expected; start 1 more node with the same command"),
        (4, 2, "2 of 2 expected"),
        (4, 3, "3 of 2 expected; 1 more than expected, also kept in reserve"),
        (3, 1, "0 of 2 expected; start 2 more nodes with the same command"),  # the one that waits joins the job
    ],
)
def test_the_spare_nodes_that_are_missing_are_counted(nodes: int, waiting: int, says: str) -> None:
    assert spares_text(nodes, waiting, Bounds(3, 4, spares=2)) == f"spare nodes in reserve: {says}"


def test_a_node_is_lost_only_after_its_time() -> None:
    assert silent({0: 10.0, 1: 14.9, 2: 15.1}, 20.0, 5.0) == [0, 1]


def test_the_first_node_that_answers_decides_and_every_node_is_watched() -> None:
    assert leader(4, []) == 0 and leader(4, [0, 1]) == 2
    for lost in ([], [0], [0, 1, 2]):
        decides = leader(9, lost)
        assert watched(decides, 9, lost) == [one for one in range(9) if one not in lost and one != decides]
        assert all(decides in watched(one, 9, lost) for one in range(9) if one not in lost and one != decides)


@pytest.mark.parametrize("bounds", [(0, 1), (3, 2), (1.5, 2)])
def test_numbers_of_nodes_that_cannot_be_meant_are_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(Refused, match="--nnodes"):
        Bounds(*bounds)

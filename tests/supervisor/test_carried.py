"""What nodes carry from one store to the next: the last verdict, and an attempt that has none yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from lastgood.errors import TierDown
from lastgood.policy.membership import Bounds, Past
from lastgood.policy.quarantine import points_to_machine
from lastgood.supervisor import reported
from lastgood.supervisor.attempt import Lived
from lastgood.supervisor.membership import Joined, StoreLost, Waiters
from lastgood.supervisor.nodes import NodeInfo, SeveralNodes
from lastgood.supervisor.placement import Notice, Placement
from lastgood.supervisor.signals import Signals


class Store:
    """The keys of a store, and of its newest round."""

    nodes: Sequence[Member]
    keys: dict[str, str]

    def __init__(self, number: int) -> None:
        self.number, self.order, self.lost, self.job_keys = number, 0, False, dict[str, str]()

    def begin(self, *nodes: Member) -> None:
        """A round begins, of these nodes."""
        self.nodes, self.keys, self.order = nodes, {}, self.order + 1
        for one in nodes:
            one.store = self


class Member:
    """The membership of one node: the calls of `Membership`, on the store in which the test puts it."""

    moves, stores, join_seconds = True, 3, 0.0
    store: Store

    @property
    def endpoint(self) -> str:
        return f"host{self.store.number}:29400"

    def join(self, past: Past, again: bool) -> Joined:
        at = self.store
        node, nodes = at.nodes.index(self), len(at.nodes)
        return Joined(node=node, nodes=nodes, address="127.0.0.1", store=at.number, id=f"id{at.number}", order=at.order)

    def put(self, values: Mapping[str, str], job: bool = False) -> None:
        self._keys(job).update(values)

    def read(self, keys: Sequence[str], job: bool = False) -> list[str | None]:
        return [*map(self._keys(job).get, keys)]

    def claim(self, key: str, value: str, job: bool = False, before: str = "") -> str:
        keys = self._keys(job)
        if keys.get(key, "") == before:
            keys[key] = value
        return keys[key]

    def drop(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._keys(False).pop(key, None)

    def raise_to(self, key: str, value: str) -> None:
        self._keys(True)[key] = max(value, self._keys(True).get(key, ""))

    def waiting(self) -> Waiters:
        return Waiters(joining=0, reserve=0)

    def _keys(self, job: bool) -> dict[str, str]:
        if self.store.lost:
            raise StoreLost("lost")
        return self.store.job_keys if job else self.store.keys


class Node(SeveralNodes):
    """A node of the job, with its membership."""

    def __init__(self, name: str) -> None:
        self.member, info = Member(), NodeInfo(host=name, ranks=2, node_rank=None, address="")
        super().__init__(self.member, Bounds(1, 3), info, 5.0, Signals([]))  # type: ignore[arg-type]


def joined(at: int | Store, *nodes: Node) -> list[str | None]:
    """Let nodes form a round at a store, which is new if its number is given. Returns what each one is to follow."""
    store = Store(at) if isinstance(at, int) else at
    store.begin(*(one.member for one in nodes))
    with ThreadPoolExecutor(len(nodes)) as each:
        return [*each.map(lambda one: one.join(one._info.host), nodes)]


@pytest.fixture
def nodes() -> list[Node]:
    """Three nodes that live attempt 0, which lose the first of them with its store."""
    made = [Node(f"host{one}") for one in range(3)]
    assert joined(0, *made) == [None] * 3
    assert [one.begin(0).first_rank for one in made] == [0, 2, 4]  # type: ignore[union-attr]
    return made


def test_the_attempt_of_a_lost_store_is_decided_at_the_next_one(nodes: list[Node]) -> None:
    """A node that comes anew decides with them, and knows which nodes there were."""
    nodes[0].member.store.lost = True
    new = Node("new")
    others = [new, *nodes[1:]]
    assert joined(1, *others) == [None] * 3
    assert [one.begin(0) for one in others] == [Notice(kind="moved")] * 3
    lost = 0, "node 0 (host0): lost with the store of the nodes, which is at host1:29400 now"
    assert [one.lost_text() for one in others] == [lost] * 3
    assert new.of_rank(0).host == "host0" and new.world == 6
    assert [one.reports(one.member.endpoint) for one in reversed(others)][:2] == [None, None]
    assert [one.verdict("again" if one is new else None) for one in others] == ["again"] * 3
    assert all(isinstance(one.begin(1), Placement) and one.lost_text() is None for one in others)
    assert {one.job for one in others} == {nodes[1].job}


def test_an_attempt_outlives_the_nodes_that_have_lived_it(nodes: list[Node]) -> None:
    """The next store was lost too, with the last node that had lived the attempt: it had no verdict, and no record."""
    nodes[0].member.store.lost = True
    new = [Node(f"new{one}") for one in range(3)]
    assert joined(1, *new, *nodes[1:]) == [None] * 5
    new[0].member.store.lost = True
    assert joined(2, *new) == [None] * 3
    assert [one.begin(0) for one in new] == [Notice(kind="moved")] * 3
    names = "node 0 (host0), node 1 (host1), node 2 (host2)"
    assert new[0].lost_text() == (0, f"{names}: lost with the store of the nodes, which is at host2:29400 now")


def test_a_lost_node_is_missed_also_where_another_one_has_its_name(nodes: list[Node]) -> None:
    """Two nodes were in containers whose machine names were alike, and the attempt had lost a store without a node."""
    nodes[0].member.store.lost = True
    nodes[1]._info = msgspec.structs.replace(nodes[1]._info, host="host0")
    joined(1, *nodes[1:])
    nodes[1].begin(0)
    lost = nodes[1].lost_text()
    assert lost is not None and lost[0] == 0


def test_a_store_that_is_lost_without_a_node_is_no_failure_of_node_0(nodes: list[Node]) -> None:
    """The process of the store was ended, and its node was counted as lost: three times, and it was left out."""
    nodes[0].member.store.lost = True
    assert joined(1, *nodes) == [None] * 3
    assert [one.begin(0) for one in nodes] == [Notice(kind="moved")] * 3
    lost = nodes[0].lost_text()
    assert lost == (None, "the store of the nodes was lost, and none of the nodes; they go on at host1:29400")
    lived = Lived(0.0, lost=lost)
    cause = reported.cause(lived)
    assert cause is not None and (cause.kind, cause.key, cause.what) == ("store", "store", lost[1])
    assert not points_to_machine(reported.outcome(lived, cause))


def test_a_verdict_that_one_node_knows_is_followed_by_all(nodes: list[Node]) -> None:
    assert nodes[2].verdict("of attempt 0") == "of attempt 0"
    nodes[0].member.store.lost = True
    assert joined(1, *nodes[1:]) == ["of attempt 0"] * 2
    assert all(isinstance(one.begin(1), Placement) for one in nodes[1:])


def test_nodes_that_end_as_asked_with_their_store_are_not_missed(nodes: list[Node]) -> None:
    """The store showed who had ended, and was lost with its node: the others found no majority, and ended with 5."""
    assert nodes[2].verdict("go on") == "go on"
    nodes[2].left([0, 1])
    nodes[0].member.store.lost = True
    assert joined(1, nodes[2]) == ["go on"]


def test_nodes_that_are_no_majority_carry_their_attempt_with_them(nodes: list[Node]) -> None:
    """A node that was cut off with the store recorded the attempt, and so did the others at the next store."""
    nodes[1].over(Notice(kind="lost", lost=[2]))
    assert nodes[1].reports("of 1") is None and nodes[0].notice(10.0**9, []) is not None
    assert nodes[0].reports("of 0") == {0: "of 0", 1: "of 1"}
    nodes[0].lost.add(1)
    with pytest.raises(StoreLost):
        nodes[0].reports("of 0")
    assert joined(nodes[0].member.store, *nodes) == [None] * 3
    assert [one.begin(0) for one in nodes] == [Notice(kind="moved")] * 3
    text = "the nodes did not reach each other, and none of them is lost; they joined again at host0:29400"
    assert nodes[0].lost_text() == (None, text)
    assert nodes[1].reports("again") is nodes[2].reports("again") is None
    assert nodes[0].reports("again") is not None


def test_one_of_two_rounds_begins_where_each_is_half_of_the_nodes() -> None:
    """Two of four nodes were suspended while they began a round, so that the store gave the two others one, and each
    pair was half of the nodes."""
    made = [Node(f"host{one}") for one in range(4)]
    joined(0, *made)
    store = made[0].member.store
    rounds = list[tuple[Node, Joined]]()
    for pair in (made[:2], made[2:]):
        store.begin(*(one.member for one in pair))
        infos = [msgspec.structs.replace(one._info, past=one._moves.past) for one in pair]
        for one in pair:
            rounds.append((one, one.member.join(Past(), False)))
            assert one._moves.enough(rounds[-1][1], infos, 4)
    assert [one._moves.agreed(found) for one, found in reversed(rounds)] == [True, True, False, False]


def test_a_node_that_has_just_started_begins_no_job_by_itself() -> None:
    """A machine came back, its own store was the first one, and it did not reach the others yet: it trained beside the
    job."""
    with pytest.raises(TierDown, match="too few nodes of the job came"):
        joined(0, Node("host0"))


def test_a_minority_of_the_last_round_begins_nothing(nodes: list[Node]) -> None:
    nodes[0].member.store.lost = True
    with pytest.raises(TierDown, match="too few nodes of the job came to the store at host1:29400"):
        joined(1, nodes[2], Node("new"))

"""Which rounds may begin where the store of the nodes can move: one at a time, whichever nodes cannot
reach each other."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from lastgood.policy.membership import (
    Past,
    Round,
    Seen,
    Tried,
    enough,
    last_round,
    may_begin_job,
    may_move,
    store_to_join,
)

STORES = 3
FIRST, SECOND = Round(store=0, id="a", order=1, nodes=4), Round(store=1, id="b", order=1, nodes=3)
BELONGED, FRESH = Past(last=FIRST), Past()


@pytest.mark.parametrize(
    ("there", "store", "left", "begins"),
    [
        (3, 1, 0, True),
        (2, 1, 0, False),
        (2, 0, 0, True),
        (1, 0, 0, False),
        (1, 0, 2, True),
    ],
)
def test_a_round_needs_a_majority_of_the_last_one(there: int, store: int, left: int, begins: bool) -> None:
    """Half of them is enough where the last round was, and nodes that ended as asked do not count."""
    assert enough([BELONGED] * there + [FRESH] * 5, store, None, range(left)) is begins


def test_nodes_that_ended_as_asked_are_not_missed_at_the_next_store() -> None:
    """What they had put into the store was lost with it: two of four nodes, without the two others, ended with 5."""
    ended = Past(last=FIRST, left=(0, 2))
    assert enough([BELONGED, ended], 1, None, []) and not enough([ended, FRESH], 1, None, [])
    assert enough([ended], 1, None, [3]) and not enough([BELONGED, FRESH], 1, None, [3])


def test_one_of_two_nodes_moves_only_after_the_other_was_asked_to_end() -> None:
    two = Round(store=0, id="a", order=1, nodes=2)
    assert may_move(Past(last=two, left=(0,))) and not may_move(Past(last=two))
    assert may_move(BELONGED) and not may_move(FRESH)


def test_two_of_three_nodes_move_after_the_third_was_asked_to_end() -> None:
    """They took each other for two nodes of which one is lost, and both ended with 5."""
    three = Round(store=0, id="a", order=1, nodes=3)
    assert may_move(Past(last=three, left=(0,)))


def test_a_new_job_begins_in_the_first_store_only_and_once() -> None:
    assert enough([FRESH], 0, None, [])
    assert not enough([FRESH], 1, None, []) and not enough([FRESH], 0, FIRST, [])


@pytest.mark.parametrize(
    ("holds", "begins"), [([0], False), ([0, 0, None], False), ([0, 2], True), ([0, None, None, None], True)]
)
def test_a_new_job_begins_with_all_nodes_or_most_of_the_stores(holds: list[int | None], begins: bool) -> None:
    assert may_begin_job([Past(holds=one) for one in holds], 3, 4) is begins


def test_nodes_that_missed_the_newest_round_of_a_store_do_not_replace_it() -> None:
    """Two of four went on, and then the other two beside them, at the same store: each pair was half of the four."""
    newest = Round(store=0, id="a", order=2, nodes=2)
    assert not enough([BELONGED] * 2, 0, newest, [])
    assert enough([BELONGED] * 2 + [Past(last=newest)], 0, newest, [])


def test_a_round_that_may_have_begun_counts_like_one_that_has() -> None:
    """Two of its three nodes may train. The third one knows only that it has agreed to it."""
    agreed = Past(node="b", last=FIRST, tried=(Tried(round=SECOND, nodes=("b", "c", "d")),))
    others = [Past(node=one, last=FIRST) for one in "ae"]
    assert not enough([agreed, *others], 2, None, [])
    assert enough([agreed, Past(node="c", last=SECOND), *others], 2, None, [])


def test_a_round_that_one_of_its_nodes_has_left_does_not_count() -> None:
    """One node had agreed to it, and two had lost its store before: all rounds with these three waited, and ended."""
    agreed = Past(node="b", last=FIRST, tried=(Tried(round=SECOND, nodes=("b", "c", "d")),))
    assert enough([agreed, Past(node="c", last=FIRST), Past(node="d", last=FIRST)], 2, None, [])


AT_SECOND = Past(last=SECOND)
DOUBTS = Past(last=FIRST, tried=(Tried(round=SECOND),))


@pytest.mark.parametrize(
    ("seen", "past", "at", "leaves", "chosen"),
    [
        (["a", "b", None], FRESH, 0, False, 0),
        (["a", "b 0.1", "c"], FRESH, 0, False, 1),
        ([None, "b", "c"], FRESH, 0, False, None),
        (["a", "b", "c"], BELONGED, 0, True, 0),
        ([None, "b", "c"], BELONGED, 0, True, 1),
        ([None, "b", "c"], BELONGED, 0, False, None),
        ([None, None, "c"], BELONGED, 0, True, 2),
        (["new", "b", None], BELONGED, 0, True, 1),
        (["new", "b", None], BELONGED, 0, False, None),
        (["new 0.1", "b", None], BELONGED, 1, False, 1),
        (["a", "b 0.1", "c 0.1"], BELONGED, 0, True, 2),
        (["a 0.2", "b 1.1", "c 0.1"], FRESH, 0, True, 1),
        # it waits at a later store than the others
        (["a 0.1", "b", None], BELONGED, 1, False, 0),
        ([None, "b 0.1", "c"], BELONGED, 2, False, 1),
        (["a", "b", "c"], BELONGED, 2, False, 0),
        ([None, "new", "c"], BELONGED, 2, False, 1),
        # a round to which it has agreed bounds it
        (["a 0.1", "b", "c"], AT_SECOND, 1, True, 1),
        (["a 0.1", None, None], AT_SECOND, 1, True, None),
        (["a 0.1", "new", "c"], AT_SECOND, 1, True, 2),
        (["a 0.2", "b", "c"], DOUBTS, 1, True, 1),
        (["a 0.2", "new", "c"], DOUBTS, 1, False, None),
        # the others have been at a store, and have gone on since
        ([None, "b", "c 0.1"], AT_SECOND, 1, True, 1),
        ([None, "b 0.1", "c 0.1"], Past(last=Round(store=0, id="a", order=2, nodes=3)), 0, True, 1),
    ],
)
def test_a_node_joins_the_store_of_the_others_as_far_as_its_rounds_permit(
    seen: list[str | None], past: Past, at: int, leaves: bool, chosen: int | None
) -> None:
    """A node that waited at a later store did not look at the earlier ones: with all nodes needed, the job ended.

    "b 0.1": the store with the id b answers, and more than half of the nodes of round 1 of store 0 are there.
    """
    stores = [None if one is None else shown(*one.split()) for one in seen]
    assert store_to_join(stores, past, at, leaves) == chosen


def shown(id: str, active: str = "") -> Seen:
    store, _, order = active.partition(".")
    return Seen(id=id, active=(int(store), int(order)) if active else None)


@dataclass
class Nodes:
    """Nodes that try rounds in stores, and lose each other at any moment. Stores are replaced by new ones."""

    pasts: list[Past]
    names: list[int]
    """of the nodes: one that begins anew has another name"""
    ids: list[int] = field(default_factory=lambda: [0] * STORES)
    newest: dict[int, Round] = field(default_factory=dict)
    """store -> the last round that has begun there"""
    orders: list[int] = field(default_factory=lambda: [0] * STORES)
    left: dict[Round, list[int]] = field(default_factory=dict)
    """round -> those of its nodes that have ended as they were asked to"""
    tried: dict[Round, tuple[str, ...]] = field(default_factory=dict)
    """round -> its nodes"""
    waiting: list[tuple[Round, set[int], Round | None]] = field(default_factory=list)
    """rounds to which all of their nodes have agreed; those that may still learn it; and the last round before"""
    begun: dict[Round, set[int]] = field(default_factory=dict)
    """the rounds that have begun, and their nodes"""

    def attempt(self, chance: random.Random) -> None:
        store = chance.randrange(STORES)
        if chance.random() < 0.1:
            self.ids[store] += 1
            self.orders[store] = 0
            self.newest.pop(store, None)
        seen = [Seen(id=str(self.ids[store])) if one == store else None for one in range(STORES)]
        able = [one for one, past in enumerate(self.pasts) if store_to_join(seen, past, store, True) == store]
        nodes = chance.sample(able, chance.randint(0, len(able)))
        if nodes:
            self.orders[store] += 1
            order = self.orders[store]
            self.join(nodes, Round(store=store, id=str(self.ids[store]), order=order, nodes=len(nodes)), chance)
        self.begin(chance)
        if chance.random() < 0.4:
            one = chance.randrange(len(self.pasts))
            last = self.pasts[one].last
            if last is not None and not self.pasts[one].tried and chance.random() < 0.5:
                self.left[last] = [*self.left.get(last, []), self.names[one]]
                for other, past in enumerate(self.pasts):  # the verdict says so, which some of the others know
                    if past.last == last and chance.random() < 0.5:
                        self.pasts[other] = replace(past, left=(*past.left, self.names[one]))
            self.names[one] = max(self.names) + 1
            self.pasts[one] = Past(node=str(self.names[one]))

    def join(self, nodes: list[int], tried: Round, chance: random.Random) -> None:
        for _, learn, _ in self.waiting:
            learn.difference_update(self.names[one] for one in nodes)
        pasts, newest = [self.pasts[one] for one in nodes], self.newest.get(tried.store)
        last = last_round(pasts, newest)
        shows = last is not None and (last.store, last.id) == (tried.store, tried.id)
        left = self.left.get(last, []) if last is not None and shows else []
        anew = last is None and (self.begun or self.waiting)  # in the place of a lost store: no node knows the job
        if anew or not enough(pasts, tried.store, newest, left):
            return
        whole = chance.random() < 0.7
        agreed = Tried(round=tried, nodes=tuple(past.node for past in pasts))
        self.tried[tried] = agreed.nodes
        for one in nodes if whole else chance.sample(nodes, chance.randint(0, len(nodes) - 1)):
            self.pasts[one] = replace(self.pasts[one], tried=(*self.pasts[one].tried, agreed))
        if whole:
            self.waiting.append((tried, {self.names[one] for one in nodes}, newest))

    def begin(self, chance: random.Random) -> None:
        """One node of each round to which all have agreed may learn it, also much later, and begins."""
        for tried, learn, newest in [*self.waiting]:
            stands = str(self.ids[tried.store]) == tried.id and self.newest.get(tried.store) in (newest, tried)
            learn &= {*self.names}
            if not stands or not learn:
                self.waiting.remove((tried, learn, newest))
            elif chance.random() < 0.5:
                name = chance.choice(sorted(learn))
                learn.remove(name)
                self.pasts[self.names.index(name)] = Past(node=str(name), last=tried)
                self.newest[tried.store] = tried
                self.begun[tried] = {int(one) for one in self.tried[tried]}


@settings(max_examples=2000, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 7))
def test_two_groups_of_nodes_never_begin_beside_each_other(seed: int, nodes: int) -> None:
    """Each round that begins has so many nodes of the one before that the rest of it cannot begin another one."""
    chance = random.Random(seed)
    made = Nodes([Past(node=str(one)) for one in range(nodes)], [*range(nodes)])
    for _ in range(40):
        made.attempt(chance)
    for old, new in pairwise(sorted(made.begun, key=lambda one: (one.store, int(one.id), one.order))):
        common, of = 2 * len(made.begun[old] & made.begun[new]), old.nodes - len(made.left.get(old, []))
        assert common >= of if (old.store, old.id) == (new.store, new.id) else common > of, made.begun

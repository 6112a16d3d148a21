"""Which rounds may begin where the store of the nodes can move: one at a time, whichever nodes cannot
reach each other."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.policy.membership import Past, Round, Seen, enough, store_to_join

STORES = 3
FIRST, SECOND = Round(store=0, order=1, nodes=4), Round(store=1, order=1, nodes=3)
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
    assert enough([BELONGED] * there + [FRESH] * 5, store, None, left) is begins


def test_a_new_job_begins_in_the_first_store_only_and_once() -> None:
    assert enough([FRESH], 0, None, 0)
    assert not enough([FRESH], 1, None, 0) and not enough([FRESH], 0, FIRST, 0)


def test_nodes_that_missed_the_newest_round_of_a_store_do_not_replace_it() -> None:
    """Two of four went on, and then the other two beside them, at the same store: each pair was half of the four."""
    newest = Round(store=0, order=2, nodes=2)
    assert not enough([BELONGED] * 2, 0, newest, 0)
    assert enough([BELONGED] * 2 + [Past(last=newest)], 0, newest, 0)


def test_a_round_that_may_have_begun_counts_like_one_that_has() -> None:
    """Two of its three nodes may train. The third one knows only that it has agreed to it."""
    agreed = Past(last=FIRST, tried=(SECOND,))
    others = [Past(last=FIRST)] * 2
    assert not enough([agreed, *others], 2, None, 0)
    assert enough([agreed, Past(last=SECOND), *others], 2, None, 0)


@pytest.mark.parametrize(
    ("seen", "at", "known", "leaves", "chosen"),
    [
        (["a", "b", None], 0, "", False, 0),
        (["a", "b*", "c"], 0, "", False, 1),
        ([None, "b", "c"], 0, "", False, None),
        (["a", "b", "c"], 0, "a", True, 0),
        ([None, "b", "c"], 0, "a", True, 1),
        ([None, "b", "c"], 0, "a", False, None),
        ([None, None, "c"], 0, "a", True, 2),
        (["new", "b", None], 0, "a", True, 1),
        (["new", "b", None], 0, "a", False, None),
        (["a*", "b", "c"], 1, "b", True, 1),
        (["a", "b*", "c*"], 0, "a", True, 2),
        (["a*", None, None], 1, "b", True, None),
    ],
)
def test_a_node_joins_the_store_of_the_others_and_never_goes_back(
    seen: list[str | None], at: int, known: str, leaves: bool, chosen: int | None
) -> None:
    """An asterisk: the nodes of the job are there."""
    stores = [None if one is None else Seen(id=one.rstrip("*"), active="*" in one) for one in seen]
    assert store_to_join(stores, at, known, leaves) == chosen


@dataclass
class Nodes:
    """Nodes that try rounds in stores, and lose each other at any moment."""

    pasts: list[Past]
    at: list[int]
    newest: dict[int, Round] = field(default_factory=dict)
    """store -> the last round that has begun there"""
    order: int = 0
    begun: list[set[int]] = field(default_factory=list)
    """the nodes of the rounds that have begun, in their order"""
    stores: list[int] = field(default_factory=list)
    """of these"""

    def attempt(self, chance: random.Random) -> None:
        store = chance.randrange(STORES)
        able = [one for one, at in enumerate(self.at) if at <= store]
        nodes = chance.sample(able, chance.randint(0, len(able)))
        if not nodes:
            return
        self.order += 1
        for one in nodes:
            self.at[one] = store
        if not enough([self.pasts[one] for one in nodes], store, self.newest.get(store), 0):
            return
        tried = Round(store=store, order=self.order, nodes=len(nodes))
        whole = chance.random() < 0.7
        for one in nodes if whole else chance.sample(nodes, chance.randint(0, len(nodes) - 1)):
            self.pasts[one] = Past(last=self.pasts[one].last, tried=(*self.pasts[one].tried, tried))
        if whole:  # all have agreed: any of them may learn it, and begin
            begin = chance.sample(nodes, chance.randint(0, len(nodes)))
            for one in begin:
                self.pasts[one] = Past(last=tried)
            if begin:
                self.newest[store] = tried
                self.begun.append({*nodes})
                self.stores.append(store)
        if chance.random() < 0.2:
            self.pasts[chance.randrange(len(self.pasts))] = Past()


@settings(max_examples=2000, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 7))
def test_two_groups_of_nodes_never_begin_beside_each_other(seed: int, nodes: int) -> None:
    """Each round that begins has so many nodes of the one before that the rest of it cannot begin another one."""
    chance = random.Random(seed)
    made = Nodes([Past()] * nodes, [0] * nodes)
    for _ in range(40):
        made.attempt(chance)
    for before, after, old, new in zip(made.begun, made.begun[1:], made.stores, made.stores[1:], strict=False):
        common = 2 * len(before & after)
        assert common > len(before) if old != new else common >= len(before), (made.begun, made.stores)

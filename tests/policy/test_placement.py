"""Placement of copies and of parity: domains, loads, what is survived, and how little a change of the nodes moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import combinations
from math import comb

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lastgood.errors import Refused
from lastgood.policy.placement import (
    Node,
    ParityGroups,
    Placement,
    copies,
    groups,
)
from lastgood.policy.rings import windows


def racks(*sizes: int) -> list[Node]:
    """Racks with these numbers of nodes."""
    return [Node(f"r{rack}n{at:03d}", f"r{rack}") for rack, size in enumerate(sizes) for at in range(size)]


def rack_of(name: str) -> str:
    return name.partition("n")[0]


def sets_of(placement: Placement) -> set[frozenset[str]]:
    """The sets of nodes whose common failure loses a part."""
    return {frozenset((name, *others)) for name, others in placement.holders.items()}


def crossing(placement: Placement) -> list[str]:
    """The nodes whose part and copies are all in different racks."""
    window = {name: [rack_of(one) for one in (name, *others)] for name, others in placement.holders.items()}
    return [name for name, within in window.items() if len(set(within)) == len(within)]


def lost(placement: Placement, failed: Collection[str]) -> list[str]:
    """The nodes whose parts no node has any more when the nodes `failed` have failed."""
    return sorted(name for name in failed if {*failed}.issuperset(placement.holders[name]))


def group_survives(parity: ParityGroups, failed: Collection[str]) -> bool:
    """Whether every part exists, or can be rebuilt from parity, when the nodes `failed` have failed."""
    stripes = (one for ring in parity.groups for one in windows(ring, parity.k + parity.m))
    return all(sum(name in failed for name in one) <= parity.m for one in stripes)


def loads(placement: Placement) -> dict[str, int]:
    """Node -> the number of other nodes' parts of which it holds a copy."""
    held = Counter(name for others in placement.holders.values() for name in others)
    return {name: held[name] for name in placement.holders}


def moved(before: Placement, after: Placement) -> int:
    """The number of copies on nodes of both placements that have to be made anew."""
    both = before.holders.keys() & after.holders.keys()
    return sum(len(set(after.holders[name]) - set(before.holders[name])) for name in both)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[Node], int]:
    sizes = draw(st.lists(st.integers(1, 7), min_size=1, max_size=6).filter(lambda one: sum(one) >= 2))
    return racks(*sizes), draw(st.integers(1, min(4, sum(sizes))))


LIMITS = st.sampled_from([None, 0, 1])


@given(clusters(), LIMITS)
def test_each_part_has_k_holders_that_are_different_nodes(cluster, limit):
    nodes, k = cluster
    holders = copies(nodes, k, limit=limit).holders
    assert holders.keys() == {one.name for one in nodes}
    assert all(len({name, *others}) == k and holders.keys() >= set(others) for name, others in holders.items())


@given(clusters(), LIMITS)
def test_no_node_holds_more_copies_than_the_limit_permits(cluster, limit):
    nodes, k = cluster
    held = loads(copies(nodes, k, limit=limit))
    assert sum(held.values()) == len(nodes) * (k - 1)
    assert max(held.values()) <= k - 1 + (2 * (k - 1) if limit is None else limit)


@given(clusters())
def test_copies_lie_in_other_domains_wherever_these_are_large_enough(cluster):
    nodes, k = cluster
    if max(Counter(one.domain for one in nodes).values()) <= len(nodes) // k:
        found = copies(nodes, k, limit=0)
        assert len(crossing(found)) == len(nodes) and set(loads(found).values()) == {k - 1}
        assert found.domains_survived == k - 1


@given(clusters(), LIMITS)
def test_as_many_nodes_and_domains_may_fail_as_the_placement_states(cluster, limit):
    nodes, k = cluster
    found = copies(nodes, k, limit=limit)
    assert found.nodes_survived == k - 1
    for failed in combinations(sorted(found.holders), k - 1):
        assert not lost(found, failed)
    names = sorted({one.domain for one in nodes})
    within = {domain: [one.name for one in nodes if one.domain == domain] for domain in names}
    for count in range(len(names) + 1):
        outcomes = [
            not lost(found, [name for domain in failed for name in within[domain]])
            for failed in combinations(names, count)
        ]
        assert all(outcomes) == (count <= found.domains_survived)


@given(clusters(), LIMITS, st.randoms(use_true_random=False))
def test_a_placement_depends_neither_on_order_nor_on_being_repeated(cluster, limit, random):
    nodes, k = cluster
    found = copies(nodes, k, limit=limit)
    random.shuffle(nodes)
    assert copies(nodes, k, limit=limit) == found == copies(nodes, k, found, limit)


@settings(phases=(Phase.explicit, Phase.generate))  # a counterexample need not be the smallest
@given(clusters(), LIMITS, st.data())
def test_a_placement_that_follows_another_one_keeps_all_promises(cluster, limit, data):
    nodes, k = cluster
    found = copies(nodes, k, limit=limit)
    for _ in range(3):
        leaving = data.draw(st.sets(st.sampled_from(nodes), max_size=len(nodes) - k))
        joining = [Node(f"r{data.draw(st.integers(0, 6))}n{data.draw(st.integers(100, 120))}")]
        nodes = [one for one in nodes if one not in leaving]
        nodes += [Node(one.name, rack_of(one.name)) for one in joining if one.name not in {n.name for n in nodes}]
        found = copies(nodes, k, found, limit)
        assert found.holders.keys() == {one.name for one in nodes}
        assert all(len({name, *others}) == k for name, others in found.holders.items())
        held = loads(found)
        assert sum(held.values()) == len(nodes) * (k - 1)
        assert max(held.values()) <= k - 1 + (2 * (k - 1) if limit is None else limit)
        if max(Counter(one.domain for one in nodes).values()) <= len(nodes) // k:
            assert found.domains_survived == k - 1
        assert copies(nodes, k, found, limit) == found


@pytest.mark.parametrize(("sizes", "k"), [((4, 4), 2), ((16,) * 4, 2), ((3, 3, 3), 3), ((1,) * 12, 3), ((12,), 4)])
def test_groups_of_k_have_the_fewest_sets_whose_loss_loses_a_part(sizes, k):
    found = copies(racks(*sizes), k)
    assert len(sets_of(found)) == sum(sizes) // k
    assert all(set(found.holders[one]) == every - {one} for every in sets_of(found) for one in every)


@pytest.mark.parametrize(("count", "k", "sets"), [(9, 2, 3 + 3), (10, 3, 2 + 4), (11, 3, 2 + 5), (23, 4, 4 + 7)])
def test_only_one_group_is_larger_if_the_number_of_nodes_is_no_multiple(count, k, sets):
    """The group strategy with a last ring: N // k - 1 groups, and one set for each node of the ring."""
    assert len(sets_of(copies(racks(*[1] * count), k))) == sets


@pytest.mark.parametrize(
    ("sizes", "limit", "across", "most", "survived"),
    [
        ((4, 4), None, 8, 1, 1),
        ((6, 1, 1), None, 8, 3, 1),  # four nodes of the large rack hold no copy
        ((6, 1, 1), 0, 4, 1, 0),  # even loads leave four nodes of the large rack among themselves
        ((6, 1, 1), 1, 6, 2, 0),
        ((20, 1, 1), None, 8, 3, 0),
        ((9,), None, 0, 1, 0),
    ],
)
def test_a_large_domain_uses_the_limit_and_then_shares_domains(sizes, limit, across, most, survived):
    found = copies(racks(*sizes), 2, limit=limit)
    assert (len(crossing(found)), max(loads(found).values()), found.domains_survived) == (across, most, survived)


def test_nodes_that_share_a_domain_anyway_hold_equal_numbers_of_copies():
    """Only nodes whose copies are in another rack are attached to a group; the others form groups of their own."""
    assert Counter(loads(copies(racks(20, 1, 1), 2)).values()) == {1: 16, 0: 4, 3: 2}


def test_three_copies_in_two_racks_survive_the_loss_of_either():
    found = copies(racks(8, 8), 3, limit=0)
    assert found.domains_survived == 1
    assert all(len({rack_of(one) for one in every}) == 2 for every in sets_of(found))


def test_nodes_without_a_domain_are_domains_of_their_own():
    found = copies([Node("a"), Node("b"), Node("node a", "a"), Node("node b", "b")], 2)
    assert found.domains_survived == 1 and set(loads(found).values()) == {1}


def test_one_copy_is_enough_and_without_any_the_part_is_lost():
    found = copies(racks(3, 3, 3), 3)
    one, *others = sorted(next(iter(sets_of(found))))
    assert not lost(found, others) and lost(found, [one, *others]) == [one, *others]
    assert not lost(found, []) and lost(found, found.holders) == sorted(found.holders)


@pytest.mark.parametrize("k", [2, 3])
def test_a_replaced_node_moves_only_the_copies_that_it_held(k):
    nodes = racks(*[16] * 8)
    before = copies(nodes, k)
    leaving = before.holders["r3n007"]
    after = copies([*(one for one in nodes if one.name != "r3n007"), Node("r3n900", "r3")], k, before)
    assert moved(before, after) == k - 1
    assert {name for name, others in after.holders.items() if "r3n900" in others} == set(leaving)


def test_a_replaced_rack_moves_only_the_copies_that_it_held():
    nodes = racks(*[16] * 8)
    before = copies(nodes, 3)
    new = [Node(f"r3n{at}", "r3") for at in range(900, 916)]
    after = copies([*(one for one in nodes if one.domain != "r3"), *new], 3, before)
    assert moved(before, after) == 16 * 2 and after.domains_survived == 2


def test_two_larger_groups_give_a_new_one_without_moving_others():
    """Each group of three can spare a node. The two of the last rack would not survive the loss of that rack."""
    nodes = racks(9, 9, 2)
    pairs = {f"r{rack}n{at:03d}": (f"r{1 - rack}n{10 - at:03d}",) for rack in (0, 1) for at in range(2, 9)}
    rings = {f"r{rack}n{at:03d}": (f"r{(rack + 1) % 3}n{at:03d}",) for rack in range(3) for at in (0, 1)}
    before = Placement({**pairs, **rings}, 1, 1)
    after = copies(nodes, 2, before)
    assert len(sets_of(after)) == 10 and after.domains_survived == 1
    assert {name: after.holders[name] for name in pairs} == pairs


@pytest.mark.parametrize("k", [2, 3, 4])
def test_a_node_that_leaves_or_joins_changes_few_groups_only(k):
    nodes = racks(*[16] * 16)
    before = copies(nodes, k)
    smaller = copies(nodes[1:], k, before)
    assert moved(before, smaller) <= 3 * k * k and smaller.domains_survived == k - 1
    larger = copies([*nodes, Node("r20n000", "r20")], k, before)
    assert moved(before, larger) <= k * k and larger.domains_survived == k - 1
    assert copies(nodes, k, smaller).domains_survived == k - 1


def test_many_nodes_that_leave_one_by_one_leave_few_larger_groups():
    """Each loss made one group larger; without a new division, all groups had become larger ones."""
    nodes = racks(*[8] * 8)
    found = copies(nodes, 2)
    while len(nodes) > 33:
        nodes.pop(7 * len(nodes) // 11)
        found = copies(nodes, 2, found)
        assert len(sets_of(found)) <= len(nodes) // 2 + 2


def test_copies_move_to_other_domains_once_there_are_some():
    before = copies(racks(8), 2)
    after = copies([*racks(8), *[Node(f"r1n{at:03d}", "r1") for at in range(8)]], 2, before)
    assert before.domains_survived == 0 and after.domains_survived == 1


def test_groups_of_before_give_way_where_domains_would_be_shared():
    """The rest of an old group was filled from the small racks, and two nodes of the large ones were left over."""
    before = copies(racks(3, 5, 7, 1, 1), 3, limit=1)
    names = ["r0n000", "r1n001", "r1n004", "r2n000", "r4n000", "r4n112"]
    after = copies([Node(name, rack_of(name)) for name in names], 3, before, limit=1)
    assert after.domains_survived == 2


def test_a_placement_of_another_kind_is_replaced_by_groups():
    names = [one.name for one in racks(4, 4)]
    ring = Placement({name: (names[(at + 1) % 8],) for at, name in enumerate(names)}, 1, 0)
    assert len(sets_of(copies(racks(4, 4), 2, ring))) == 4
    assert copies(racks(4, 4), 3, copies(racks(4, 4), 2)).nodes_survived == 2


@pytest.mark.parametrize(
    ("sizes", "survived"),
    [((4, 4, 4), 1), ((2,) * 6, 2), ((4, 4, 4, 4), 1), ((6, 6), 0), ((12,), 0), ((1,) * 13, 2), ((16,) * 64, 2)],
)
def test_parity_spreads_each_stripe_over_the_domains(sizes, survived):
    found = groups(racks(*sizes), 4, 2)
    assert sorted(name for ring in found.groups for name in ring) == sorted(one.name for one in racks(*sizes))
    assert found.domains_survived == survived and min(map(len, found.groups)) >= 6
    assert (found.k, found.m, found.nodes_survived) == (4, 2, 2)


def test_a_group_with_parity_survives_m_failures_and_no_more():
    found = groups(racks(2, 2, 2), 4, 2)
    names = sorted(found.groups[0])
    assert all(group_survives(found, failed) for failed in combinations(names, 2))
    assert not any(group_survives(found, failed) for failed in combinations(names, 3))


def test_a_larger_group_loses_only_stripes_with_too_many_failures():
    found = groups(racks(*[1] * 9), 2, 1)
    (ring,) = (ring for ring in groups(racks(*[1] * 8), 2, 1).groups if len(ring) > 3)
    assert [len(ring) for ring in found.groups] == [3, 3, 3] and len(ring) == 5
    eight = groups(racks(*[1] * 8), 2, 1)
    outcomes = [group_survives(eight, failed) for failed in combinations(ring, 2)]
    assert outcomes.count(True) == 0 and len(outcomes) == comb(5, 2)
    long = ParityGroups((tuple("abcdefgh"),), 2, 1, 1, 0)
    assert group_survives(long, ["a", "d"]) and not group_survives(long, ["h", "b"])


def test_a_replaced_node_takes_the_place_in_the_group_with_parity():
    nodes = racks(*[4] * 12)
    before = groups(nodes, 4, 2)
    after = groups([*nodes[1:], Node("r0n900", "r0")], 4, 2, before)
    changed = [set(ring) for ring in after.groups if ring not in before.groups]
    assert len(changed) == 1 and "r0n900" in changed[0]
    assert groups(nodes, 4, 2, before) == before


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: copies(racks(2), 0), "k=0"),
        (lambda: copies(racks(2), 2.0), "k=2.0"),
        (lambda: copies(racks(2), 3), "there are 2 nodes, and k is 3"),
        (lambda: copies([], 1), "there are 0 nodes, and k is 1"),
        (lambda: copies([*racks(2), *racks(1)], 2), "two nodes are named r0n000"),
        (lambda: copies(["a", "b"], 2), "nodes=\\['a', 'b'\\]"),
        (lambda: copies(racks(2), 2, limit=-1), "limit=-1"),
        (lambda: groups(racks(6), 0, 2), "k=0"),
        (lambda: groups(racks(6), 4, 0), "m=0"),
        (lambda: groups(racks(5), 4, 2), "there are 5 nodes, and k \\+ m is 6"),
        (lambda: Node(""), "name=''"),
        (lambda: Node("a", 3), "domain=3"),
    ],
)
def test_a_mistake_is_refused_by_its_name(call, named):
    with pytest.raises(Refused, match=named):
        call()

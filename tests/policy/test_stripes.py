"""Stripes of parity among nodes: what any m losses leave, and how much memory each node gives."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from lastgood.policy.placement import Node, groups
from lastgood.policy.stripes import neighbours, stripe_sets, stripes


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, int, dict[str, list[str]]]:
    """k, m, and the chunks of each node."""
    k, m = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    nodes = [f"n{at}" for at in range(draw(st.integers(k + m, k + m + 7)))]
    return k, m, {node: [f"{node}/{at}" for at in range(draw(st.integers(0, 11)))] for node in nodes}


@given(jobs())
def test_any_m_losses_leave_k_cells_of_every_stripe(job) -> None:
    k, m, chunks = job
    sets = stripe_sets(groups([Node(name) for name in chunks], k, m))
    seen = Counter[str]()
    for one in sets:
        of_set = {member.node for member in one.data} | set(one.parity)
        assert len(of_set) == k + m, "no node has two cells of a stripe"
        for failed in combinations(sorted(of_set), m):
            assert len(of_set - set(failed)) >= k
        for stripe in stripes(one, chunks):
            assert all(
                cell is None or cell.startswith(f"{at.node}/") for cell, at in zip(stripe, one.data, strict=True)
            )
            seen.update(cell for cell in stripe if cell is not None)
    assert seen == Counter(cell for cells in chunks.values() for cell in cells), "each chunk is in one stripe"


@given(jobs())
def test_every_node_gives_as_much_memory_for_parity_as_the_others(job) -> None:
    k, m, chunks = job
    count = max(1, len(chunks["n0"]))
    even = {node: [f"{node}/{at}" for at in range(count)] for node in chunks}
    cells = Counter[str]()
    for one in stripe_sets(groups([Node(name) for name in chunks], k, m)):
        for _ in stripes(one, even):
            cells.update(one.parity)
    least, most = m * (count // k), m * -(-count // k)
    assert all(least <= cells[node] <= most for node in chunks)


@given(jobs())
def test_the_neighbours_of_a_node_have_all_other_cells_of_its_stripes(job) -> None:
    k, m, chunks = job
    sets = stripe_sets(groups([Node(name) for name in chunks], k, m))
    for node in chunks:
        beside = neighbours(sets, node)
        assert node not in beside and len(beside) <= 2 * k + m - 2
        for one in sets:
            data = {member.node for member in one.data}
            assert node not in data or (data | set(one.parity)) - {node} <= beside


def test_chunks_of_nodes_with_one_chunk_share_a_stripe() -> None:
    found = stripe_sets(groups([Node(name) for name in "abcd"], 2, 2))
    one_each = {name: [name] for name in "abcd"}
    assert [(stripes(one, one_each), one.parity) for one in found if stripes(one, one_each)] == [
        ([("a", "b")], ("c", "d")),
        ([("c", "d")], ("a", "b")),
    ]

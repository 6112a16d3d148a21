"""Which generations are packed in an object store, and which rank packs the files of which."""

from __future__ import annotations

from lastgood.policy.places import is_packed, packed_parts


def test_the_first_rank_of_each_node_packs_the_files_of_all_ranks_there():
    parts = [[0, 4], [1, 5], [2], [3]]
    assert packed_parts(parts, ["a", "b", "a", "b"]) == [[0, 2, 4], [1, 3, 5], [], []]
    assert packed_parts(parts, ["a"] * 4) == [[0, 1, 2, 3, 4, 5], [], [], []]
    assert packed_parts(parts, ()) == parts, "without names each rank is a node"


def test_only_copies_of_several_files_are_packed():
    assert is_packed(2, committed=False, packs=False)
    assert not is_packed(1, committed=False, packs=False), "other tools open a single file"
    assert not is_packed(2, committed=True, packs=False), "it is mended file by file"
    assert is_packed(2, committed=True, packs=True)

"""Which rank of the present job does the work on which files of a generation: copies, readings, parity. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def divided(
    written: Sequence[int], nodes: Sequence[int], held: Mapping[int, Collection[int]] | None = None
) -> list[list[int]]:
    """For each present rank, the ranks that wrote the generation whose files are its part. Each is in one part.

    `written`: the ranks that wrote the generation. `nodes`: the node of each present rank. `held`: node -> the written
    ranks whose files lie on its disk; None: every node sees all files. The rank of the same number takes a file, modulo
    the number of present ranks, if its node sees it; else a rank of the first node that does. Files that no node has
    are those of the rank of the same number.
    """
    size = len(nodes)
    found: list[list[int]] = [[] for _ in nodes]
    for one in written:
        reader = one % size
        if held is not None and one not in held.get(nodes[reader], ()):
            node = next((node for node in sorted(held) if one in held[node]), nodes[reader])
            of_node = [rank for rank, at in enumerate(nodes) if at == node]
            reader = reader if node == nodes[reader] else of_node[one % len(of_node)]
        found[reader].append(one)
    return found

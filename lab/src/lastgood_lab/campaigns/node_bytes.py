"""What nodes of the campaign nodes.py have of a generation, and so what they must send each other after a restart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

NODES, RANKS_OF_A_NODE = 4, 2
RANKS = NODES * RANKS_OF_A_NODE
PARITY = -1
"""stands for the files of parity, where others are named by the rank that wrote them"""

Held = Mapping[int, int]
"""rank -> bytes of its tensors on one node; PARITY -> bytes of files of parity"""


def held_in(folder: Path) -> dict[str, dict[int, int]]:
    """Folder of a generation -> what a node has of it in its memory `folder`: files with their manifest or record."""
    found: dict[str, dict[int, int]] = {}
    for manifest in (folder / "gen").glob("*/r*.manifest.json"):
        rank = manifest.name.partition(".")[0]
        size = sum(one.stat().st_size for one in manifest.parent.glob(f"{rank}*.safetensors"))
        found.setdefault(manifest.parent.name, {})[int(rank[1:])] = size
    for record in (folder / "gen").glob("*/s*.parity-*.json"):
        parts = found.setdefault(record.parent.name, {})
        parts[PARITY] = parts.get(PARITY, 0) + record.with_suffix("").stat().st_size
    return found


def lacking(held: Sequence[Held], later: Sequence[Held]) -> int:
    """The bytes that ranks want and their node lacks: the most that a restore may read from other nodes.

    `held`: what the node of each slot had. `later`: what it had at the end; files may have come from the node in
    reserve, which was cut off while it sent them.
    """
    sizes = _sizes(held, later)
    return sum(size for rank, size in sizes.items() if rank not in held[rank // RANKS_OF_A_NODE])


def due(held: Sequence[Held], copies: int, later: Sequence[Held]) -> int:
    """The bytes that must be sent: what a restore reads, and the copies that are missing. As `lacking`."""
    sizes = _sizes(held, later)
    missing = {rank: copies - sum(rank in one for one in held) for rank in sizes}
    return lacking(held, later) + sum(max(0, missing[rank]) * size for rank, size in sizes.items())


def _sizes(held: Sequence[Held], later: Sequence[Held]) -> dict[int, int]:
    """Rank -> bytes of its file, of all that lie anywhere."""
    return {rank: size for one in [*held, *later] for rank, size in one.items() if rank != PARITY}


def due_with_parity(held: Sequence[Held], code: tuple[int, int]) -> int:
    """As `due`. One byte of a file or of parity is computed from as many as a stripe has data cells.

    `code`: data and parity cells of a stripe. All files have the same size, and a node's share of parity follows from
    its part.
    """
    data, parity = code
    size = max((size for one in held for rank, size in one.items() if rank != PARITY), default=0)
    rebuilt = [rank for rank in range(RANKS) if not any(rank in one for one in held)]
    fetched = [rank for rank in range(RANKS) if rank not in held[rank // RANKS_OF_A_NODE] and rank not in rebuilt]
    share = RANKS_OF_A_NODE * size * parity // data
    lacks = sum(max(0, share - one.get(PARITY, 0)) for one in held)
    return size * (data * len(rebuilt) + len(fetched)) + data * lacks

"""Files of ranks are made whole in one place from what nodes hold: from copies of them, or from parity among nodes.

An agent does so for a node that has lost them (agent/parity_files.py), and a drill as if a node had.

Invariant: a rebuilt file counts only with its manifest, which is written after it (peers.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from ..engine.arena import Arena
from ..engine.stripes import Rebuilt
from ..errors import Damaged, LastgoodError
from ..format import layout, sealed
from ..limits import CHUNK_BYTES, EXAMINATION_CHUNKS, WORKERS
from ..ports import Mendable, Stop, Tier, never
from ..records import Generation
from . import copying


def rebuild(
    target: Mendable,
    others: Sequence[Tier],
    generation: Generation,
    ranks: Sequence[int],
    stop: Stop = never,
) -> dict[tuple[str, str], LastgoodError]:
    """Make the files of these ranks whole in `target`. `others`: what the other nodes have, in the order of asking.

    Returns what parity was computed without, as `Rebuilt.passed_over`. Raises BeyondRepair if too much was lost, and
    the errors of writing. A good file is not changed.
    """
    rebuilt = Rebuilt([target, *others], generation)
    lost, held = cast(Tier, rebuilt), {rank: rebuilt.holders(layout.blob_name(rank)) for rank in ranks}
    nowhere = [rank for rank in ranks if not held[rank]]
    copies = [one for one in others if any(one in there for there in held.values())]
    require(rebuilt, target, generation, nowhere)  # guard: feasible-before-reading
    with ThreadPoolExecutor(WORKERS, "lastgood-rebuild") as workers:
        how = copying.Copying(Arena(EXAMINATION_CHUNKS * CHUNK_BYTES, CHUNK_BYTES), workers, stop=stop)
        copying.copy_files(target, [*copies, lost], generation, ranks, how)
    for seal in generation.commit.seals:
        if seal.rank in ranks:
            _put_manifest(target, lost, generation, seal.rank)  # guard: rebuilt-manifest-last
    return rebuilt.passed_over


def require(rebuilt: Rebuilt, own: Tier, generation: Generation, ranks: Collection[int]) -> None:
    """Raise BeyondRepair unless the tensor files of these ranks, which no node has, can be computed from parity.

    It reads records alone: chunks must not cross the network for a generation that cannot be made whole. `own`: the
    place that may have manifests of these ranks.
    """
    for seal in generation.commit.seals:
        if seal.rank in ranks:
            rebuilt.require(sealed.first_sealed([own, cast(Tier, rebuilt)], generation, seal))


def _put_manifest(target: Mendable, lost: Tier, generation: Generation, rank: int) -> None:
    seal = generation.commit.seals[rank]
    try:
        sealed.sealed_record(target, generation, seal)
    except Damaged:
        name = f"{layout.folder(generation.id)}/{seal.manifest}"
        data = sealed.record_bytes([lost], generation, seal)
        target.delete(name)
        target.put_new(name, data)

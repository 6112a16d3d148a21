"""Files of parity among nodes that an agent writes in its memory, and files of ranks that it makes whole there.

Chunks are read from the agents of other nodes. Which files are written where is decided by the coordinator of the job
(run/node_parity.py).

Invariant: a rebuilt file counts only with its manifest, which is written after it (run/peers.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from ..engine import stripes
from ..engine.arena import Arena
from ..engine.stripes import Rebuilt
from ..errors import NODE_FAILED, Damaged
from ..format import layout, sealed
from ..limits import CHUNK_BYTES, EXAMINATION_CHUNKS, WORKERS
from ..policy.stripes import Member, StripeSet
from ..policy.stripes import stripes as divided
from ..ports import Mendable, Tier
from ..records import Generation, StripeFile
from ..run import copying
from ..run.peers import PeerDisk, PeerNode, Peers, StripeMember, StripeOrder

Stop = Callable[[], bool]


def write(memory: Mendable, peers: Peers, generation: Generation, orders: Sequence[StripeOrder], stop: Stop) -> None:
    """Write these files of parity of a generation. Raises as `stripes.write`."""
    for order in orders:
        _write_one(memory, peers, generation, order, stop)


def _write_one(memory: Mendable, peers: Peers, generation: Generation, order: StripeOrder, stop: Stop) -> None:
    seals = {one.rank: one for one in generation.commit.seals}
    sources = [cast(Tier, PeerDisk(peers, member.node)) for member in order.data]
    manifests = [
        [sealed.sealed_record(source, generation, seals[rank]) for rank in member.ranks]
        for source, member in zip(sources, order.data, strict=True)
    ]
    cells = {
        _name(member): stripes.cells_of([blob for one in of_member for blob in one.blobs])
        for member, of_member in zip(order.data, manifests, strict=True)
    }
    members = tuple(Member(_name(member), member.first) for member in order.data)
    carried = [seals[rank] for rank in order.data[0].ranks]  # of one data node, so that m nodes have each manifest
    record = StripeFile(
        format=layout.FORMAT,
        root=generation.root,
        data=len(members),
        parity=order.parity,
        index=order.index,
        digest=next(one.digest for of_member in manifests for one in of_member),
        stripes=[stripes.stripe_of(stripe) for stripe in divided(StripeSet(members, ()), cells)],
        manifests={seal.manifest: seal.length for seal in carried},
    )
    copies = [sealed.record_bytes([sources[0]], generation, seal) for seal in carried]
    with ThreadPoolExecutor(min(len(members), WORKERS), "lastgood-stripes") as readers:
        stripes.write(memory, layout.folder(generation.id), order.name, record, sources, copies, readers, stop)


def _name(member: StripeMember) -> str:
    return str(member.node.leader)


def rebuild(
    memory: Mendable, peers: Peers, generation: Generation, ranks: Sequence[int], nodes: Sequence[PeerNode], stop: Stop
) -> None:
    """Make the files of these ranks whole in the memory of this node, from copies or parity. `nodes`: the other nodes.

    Raises BeyondRepair if too much was lost, and the errors of writing. A good file is not changed.
    """
    others = [cast(Tier, PeerDisk(peers, node)) for node in nodes]
    rebuilt, here = Rebuilt([memory, *others], generation), memory.list(layout.folder(generation.id))
    lost = cast(Tier, rebuilt)
    for seal in generation.commit.seals:
        if seal.rank in ranks and layout.blob_name(seal.rank) not in here:
            # Before chunks cross the network for a generation that cannot be made whole.
            rebuilt.require(sealed.first_sealed([memory, lost], generation, seal))  # guard: feasible-before-reading
    with ThreadPoolExecutor(WORKERS, "lastgood-rebuild") as workers:
        how = copying.Copying(Arena(EXAMINATION_CHUNKS * CHUNK_BYTES, CHUNK_BYTES), workers, stop=stop)
        copying.copy_files(memory, [*_with_copies(others, generation, ranks), lost], generation, ranks, how)
    for seal in generation.commit.seals:
        if seal.rank in ranks:
            _put_manifest(memory, lost, generation, seal.rank)  # guard: rebuilt-manifest-last


def _with_copies(others: Sequence[Tier], generation: Generation, ranks: Sequence[int]) -> list[Tier]:
    """The nodes that have a file of these ranks, as far as they can be reached."""
    found, wanted = list[Tier](), {layout.blob_name(rank) for rank in ranks}
    for one in others:
        with contextlib.suppress(Damaged, *NODE_FAILED):
            if wanted & one.list(layout.folder(generation.id)).keys():
                found.append(one)
    return found


def _put_manifest(memory: Mendable, lost: Tier, generation: Generation, rank: int) -> None:
    seal = generation.commit.seals[rank]
    try:
        sealed.sealed_record(memory, generation, seal)
    except Damaged:
        name = f"{layout.folder(generation.id)}/{seal.manifest}"
        data = sealed.record_bytes([lost], generation, seal)
        memory.delete(name)
        memory.put_new(name, data)

"""Files of parity among nodes that an agent writes in its memory, and files of ranks that it makes whole there.

Chunks are read from the agents of other nodes. Which files are written where is decided by the coordinator of the job
(run/node_parity.py).

Invariant: a rebuilt file counts only with its manifest, which is written after it (run/peers.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from ..engine import stripes
from ..format import layout, sealed
from ..limits import WORKERS
from ..policy.stripes import Member, StripeSet
from ..policy.stripes import stripes as divided
from ..ports import Mendable, Stop, Tier
from ..records import Generation, StripeFile
from ..run import rebuilding
from ..run.peers import BACKGROUND, PeerDisk, PeerNode, Peers, StripeMember, StripeOrder


def write(memory: Mendable, peers: Peers, generation: Generation, orders: Sequence[StripeOrder], stop: Stop) -> None:
    """Write these files of parity of a generation. Raises as `stripes.write`."""
    for order in orders:
        _write_one(memory, peers, generation, order, stop)


def _write_one(memory: Mendable, peers: Peers, generation: Generation, order: StripeOrder, stop: Stop) -> None:
    seals = {one.rank: one for one in generation.commit.seals}
    # guard: parity-read-in-background
    sources = [cast(Tier, PeerDisk(peers, member.node, BACKGROUND)) for member in order.data]
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

    Raises as `rebuilding.rebuild`.
    """
    others = [cast(Tier, PeerDisk(peers, node)) for node in nodes]
    rebuilding.rebuild(memory, others, generation, ranks, stop)

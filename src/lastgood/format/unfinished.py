"""Tells what an interrupted copy has left from a generation whose COMMIT is lost, in a place that receives copies.

A later generation names the one before it, but of several that wait the newest is copied first. So a record that names
a generation does not show that it was whole in such a place. Where all its manifests are, it may have been: COMMIT is
created after them.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from ..ports import Tier
from ..records import Generation, GenerationId, PlaceList
from . import layout


def copies(
    tier: Tier, listed: PlaceList | None, incomplete: Set[GenerationId], known: Mapping[GenerationId, Generation]
) -> set[GenerationId]:
    """Those of `incomplete` that lack the manifest of a rank, if the place of `tier` receives copies.

    `listed`: the places of the run, as they were noted there. `known`: the generations of the place. One of the same
    incarnation tells how many ranks there were; without one a generation is not among them.
    """
    if listed is None or tier.place not in listed.places[1:]:  # guard: unfinished-copy-is-not-lost
        return set()
    ranks = {at.incarnation: one.commit.world.ranks for at, one in known.items()}
    return {
        at
        for at in incomplete
        # guard: copy-with-all-manifests-is-lost
        if sum(map(layout.is_manifest, tier.list(layout.folder(at)))) < ranks.get(at.incarnation, 0)
    }

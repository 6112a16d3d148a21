"""The record PLACES: which places a run has, as its last opening has noted them in each. A hint; decides nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from .. import reporting
from ..errors import LastgoodError
from ..format import commit, layout
from ..ports import Tier
from ..records import PlaceList
from .left_behind import newer_in_memory, order_beside


def listed(tier: Tier) -> list[str]:
    """The paths and URLs of all places of the run of which `tier` is one, as the last opening has noted them there."""
    found = commit.read_hint(tier, layout.PLACES, tier.list("").get(layout.PLACES), PlaceList)
    return found.places if found else []


def note(tiers: Sequence[Tier]) -> int:
    """Write the list of all places to each of them. It is a hint: where it cannot be written, nothing is lost.

    Memory of this machine that these do not look at, and that holds newer saves, is reported, and stays noted. Returns
    the highest order of the incarnations of the run there, newer or not; 0 if there is none.
    """
    before = listed(tiers[-1])
    order, left = order_beside(before, tiers), newer_in_memory(before, tiers)
    if len(tiers) == 1 and not (before or left):
        return order
    for one in left:  # guard: memory-left-behind-reported
        reporting.threat(one.described())
    record = PlaceList(format=layout.FORMAT, places=[*(one.place for one in tiers), *(one.place for one in left)])
    for tier in tiers:
        if tier.newest_only or listed(tier) == record.places:  # slots have no room for it
            continue
        with contextlib.suppress(LastgoodError):
            tier.delete(layout.PLACES)
            tier.put_new(layout.PLACES, layout.encode(record))
    return order

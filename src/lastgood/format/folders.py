"""The folders of the generations of a run: what lies in them, and whether one is gone for good. Writes nothing."""

from __future__ import annotations

from collections.abc import Mapping

from ..ports import Tier
from ..records import GenerationId
from . import layout
from .catalog import Listing


def listed(tier: Tier) -> Mapping[str, Listing]:
    """Folder of each generation -> the listing of it. Where a tree is listed at once there are no empty folders."""
    tree = getattr(tier, "tree", None)
    if tree is not None:
        listings: Mapping[str, Listing] = tree("gen")
        return listings
    # guard: generation-folder-is-no-link
    found = [name for name, length in tier.list("gen").items() if length is None]  # a link would lead out of the run
    return {name: names(tier, f"gen/{name}") for name in found if layout.parse_folder(name) is not None}


def names(tier: Tier, folder: str) -> Listing:
    """What lies in the folder of a generation. No pack is opened for it (run/packed.py): records are never in one."""
    listing: Listing = getattr(tier, "list_files", tier.list)(folder)
    return listing


def is_deleted(tier: Tier, at: GenerationId) -> bool:
    """Whether a generation that had its COMMIT was deleted since. Raises Unavailable.

    A deletion that is under way has its mark. A folder that is gone was deleted only if others are there: retention
    never deletes the last one, but a disk that is not mounted for a moment has none.
    """
    now = listed(tier)
    own = layout.folder(at).rpartition("/")[2]
    if now.get(own):
        return layout.COMMIT not in now[own] and layout.GOING in now[own]
    return any(layout.COMMIT in one for one in now.values())  # guard: vanished-run-is-not-deleted

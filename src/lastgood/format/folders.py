"""The folders of the generations of a run: what lies in them, and whether one is gone for good. Writes nothing."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import LastgoodError, NotWritable, TierDown
from ..ports import Tier
from ..records import GenerationId
from . import layout
from .catalog import Listing


def unread_errors(tier: Tier) -> tuple[type[LastgoodError], ...]:
    """The errors of one folder or file of a run that leave the others readable: it belongs to another user, or lies on
    a damaged sector. None in a place that lists all folders at once: there they concern the whole place."""
    return () if hasattr(tier, "tree") else (NotWritable, TierDown)


def listed(tier: Tier, unread: dict[str, LastgoodError]) -> Mapping[str, Listing]:
    """Folder of each generation -> the listing of it. Where a tree is listed at once there are no empty folders.

    `unread`: receives the folders that cannot be listed, each with the error.
    """
    tree = getattr(tier, "tree", None)
    if tree is not None:
        listings: Mapping[str, Listing] = tree("gen")
        return listings
    found = dict[str, Listing]()
    # guard: generation-folder-is-no-link
    folders = [name for name, length in tier.list("gen").items() if length is None]  # a link would lead out of the run
    for name in folders:
        if layout.parse_folder(name) is None:
            continue
        try:
            found[name] = names(tier, f"gen/{name}")
        except unread_errors(tier) as error:
            unread[name] = error  # guard: unlisted-folder-noted
    return found


def names(tier: Tier, folder: str) -> Listing:
    """What lies in the folder of a generation. No pack is opened for it (run/packed.py): records are never in one."""
    listing: Listing = getattr(tier, "list_files", tier.list)(folder)
    return listing


def is_deleted(tier: Tier, at: GenerationId) -> bool:
    """Whether a generation that had its COMMIT was deleted since. Raises Unavailable, NotWritable.

    A deletion that is under way has its mark. A folder that is gone was deleted only if others are there: retention
    never deletes the last one, but a disk that is not mounted for a moment has none.
    """
    unread, own = dict[str, LastgoodError](), layout.folder(at).rpartition("/")[2]
    now = listed(tier, unread)
    if own in unread:
        raise unread[own]
    if now.get(own):
        return layout.COMMIT not in now[own] and layout.GOING in now[own]
    return any(layout.COMMIT in one for one in now.values())  # guard: vanished-run-is-not-deleted

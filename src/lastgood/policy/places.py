"""One run in several places: what they hold together, and from which of them a generation is read. Pure.

The places of a run are given in one order, the nearest first. A generation has the same id and the same content in all
of them; its marks may differ, because a copy may be damaged in one place and whole in another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..format.commit import Survey
from ..records import Generation, GenerationId
from .restore import lineage
from .retention import Keep, firsts, wanted


def holder(places: Sequence[Mapping[GenerationId, Generation]], at: GenerationId) -> int | None:
    """The index of the place from which a generation is read: the nearest one whose copy may be restored.

    `places`: the generations of each place. If no copy may be restored it is the nearest place that has one; None if no
    place has one.
    """
    have = [index for index, generations in enumerate(places) if at in generations]
    # guard: whole-copy-preferred
    return next((index for index in have if places[index][at].restorable), have[0] if have else None)


def lacking(here: Survey, there: Survey, everywhere: Survey, keep: Keep) -> list[Generation]:
    """The generations that a place lacks: the newest good one, and those that its retention selects by step or label:
    of each `every` steps the oldest one of all places.

    `here`: what the place holds from which is copied. `there`: what the other place holds, whose retention is `keep`. A
    copy that was not read back, or that lacks a label, counts as absent. `everywhere`: what all places hold. The newest
    comes first.
    """
    chain = lineage(everywhere).chain
    restorable = [everywhere.generations[at] for at in chain if at in everywhere.generations]
    restorable = [one for one in restorable if one.restorable]
    oldest = firsts(keep, restorable)  # guard: first-of-each-copied
    newest, lacks = next((one.id for one in restorable), None), list[Generation]()
    for one in (here.generations[at] for at in chain if at in here.generations):
        copy = there.generations.get(one.id)
        # guard: unfinished-copy-finished-at-opening
        done = copy is not None and (copy.verified or bool(copy.unfit)) and copy.commit == one.commit
        selected = one.id in oldest or wanted(keep, one.step, one.commit.milestone, one.commit.metrics)
        if one.restorable and not done and (selected or one.id == newest):
            lacks.append(one)
    return lacks


def is_packed(files: int, committed: bool, packs: bool) -> bool:
    """Whether the files of a generation that an object store lacks are put into packs there.

    `files`: the tensor files of the generation; a single one stays as it is, so that other tools can open it.
    `committed`: whether the generation exists there. `packs`: whether a pack does. A generation that exists there
    without packs is mended file by file.
    """
    return files > 1 and (packs or not committed)


def packed_parts(parts: Sequence[Sequence[int]], nodes: Sequence[str]) -> list[list[int]]:
    """For each present rank, the ranks that wrote the generation whose files it puts into a pack.

    The first rank of each node takes the parts of all ranks there. `parts`: those that each rank copies where nothing
    is packed. `nodes`: the node of each rank; if it is not known, each rank has a node of its own.
    """
    named = list(nodes) if len(nodes) == len(parts) else [str(rank) for rank in range(len(parts))]
    taken: list[list[int]] = [[] for _ in parts]
    for node, part in zip(named, parts, strict=True):
        taken[named.index(node)] += part
    return [sorted(part) for part in taken]


def merged(surveys: Sequence[Survey]) -> Survey:
    """What all places hold together. A generation is lost or broken only if no place has a readable copy; one that is
    bad where it can be read, and cannot be read in another place, counts as unread."""
    if len(surveys) == 1:
        return surveys[0]
    places = [dict(one.generations) for one in surveys]  # a copy at once: other threads add generations meanwhile
    unread = {at: error for one in reversed(surveys) for at, error in one.unread.items()}
    generations: dict[GenerationId, Generation] = {}
    for at in {at for one in places for at in one}:
        index = holder(places, at)
        assert index is not None
        one = places[index][at]
        # What is not good in one copy, with every byte as committed, is not good in another.
        if at not in unread or not one.damaged:  # guard: unread-copy-may-be-good
            generations[at] = one
    broken = {at: error for one in reversed(surveys) for at, error in dict(one.broken).items() if at not in generations}
    broken |= {at: error for at, error in unread.items() if at not in generations}
    incomplete = {at for one in surveys for at in set(one.incomplete) if at not in generations and at not in broken}
    return Survey(
        run=next((one.run for one in surveys if one.run is not None), None),
        generations=generations,
        broken=broken,
        incomplete=incomplete,
        witnessed={at for one in surveys for at in set(one.witnessed)} & incomplete,
        unfinished={at for at in incomplete if all(at in one.unfinished for one in surveys if at in one.incomplete)},
        going={at for one in surveys for at in set(one.going)},
        incarnations={ident: found for one in reversed(surveys) for ident, found in dict(one.incarnations).items()},
        order=max(one.order for one in surveys),
        pointer=next((one.pointer for one in surveys if one.pointer is not None), None),
    )

"""Saves of a run in memory of this machine that an opening, or a command, does not look at. Reads only.

The memory of a run is found by the path of its durable place and the name of the node. A run that was renamed, or is
opened without its tier in memory, has left what was not copied there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ..errors import LastgoodError
from ..format import commit
from ..policy.places import merged
from ..policy.restore import choose, lineage
from ..ports import Tier
from . import access, memory_place, paths
from .read_places import is_whole


class Left(NamedTuple):
    """Memory that holds newer saves. `step`: the newest good one there. `whole`: not only this node's part of it.
    `order`: the highest of the incarnations there. `looked_at`: whether an opening of the run by its path, with a tier
    in memory, looks at it. `abandoned`: whether the run went on without that save."""

    place: str
    step: int
    whole: bool
    order: int
    looked_at: bool
    abandoned: bool

    def listed(self) -> str:
        """What a listing of the run says of it. A run that is in training is usually ahead in memory."""
        if not self.looked_at or self.abandoned:
            return self.described()
        if not self.whole:
            return (
                f"{self.place} holds this node's part of step {self.step}, which is newer, and lies in the memory of "
                "several nodes: a start of the job on all of them restores it, and their agents copy it here."
            )
        return (
            f"{self.place} holds step {self.step}, which is newer: a start with this tier restores it, and the agent "
            f"copies it here. `lastgood ls {self.place}` lists what is there."
        )

    def described(self) -> str:
        """What to do about it, where a run was opened without it."""
        folder = self.place.removeprefix(paths.MEMORY)
        held = "holds" if self.whole else "holds this node's part of"
        elsewhere = f"`lastgood copy {self.place} TARGET` brings it elsewhere; " if self.whole else ""
        if self.abandoned:
            what = f"which is newer, but the run went on without it. restore(step={self.step}) goes back to it"
        else:
            what = "which is newer and is not looked at here. To go on from it"
        return (
            f"{self.place} {held} step {self.step} of this run, {what}, if you open the run by the path and with the "
            f"tier with which it was saved{'' if self.abandoned else ', before a save here abandons it'}; {elsewhere}"
            f"rm -r {folder} gives it up."
        )


def given_back(place: str) -> str:
    """That a place of a run in memory is not on this machine, for people; empty where it is, and for other places."""
    if not paths.in_memory(place) or os.path.lexists(paths.parsed(place).root):
        return ""
    return (
        "not in the memory of this machine: it is given back after a clean end, once the places below have all of it; "
        "a restart of the machine empties it too"
    )


def newer_in_memory(listed: Collection[str], looked_at: Sequence[Tier]) -> list[Left]:
    """The memory of this machine among the `listed` places of a run that holds a newer good save than those that are
    looked at, the last place last. Raises nothing."""
    known, found = {one.place for one in looked_at}, list[Left]()
    others = [one for one in listed if paths.in_memory(one) and one not in known]
    roots = {one: paths.parsed(one).root for one in others}
    others = [one for one, root in roots.items() if os.path.isdir(root) and memory_place.is_private(root)]
    if not others:
        return []
    here = [one for one in map(_survey, looked_at) if one is not None]
    run, newest = next((one.run for one in here if one.run), None), max(map(_newest, here), default=-1)
    its_memory = memory_place.url_of(looked_at[-1].place)
    for place in others:
        with contextlib.suppress(LastgoodError):
            there = commit.survey(access.for_reading(place))
            if there.run != run or (step := _newest(there)) <= newest:
                continue
            at = max(choose(there, None).candidates)
            takes = next(iter(choose(merged([there, *here]), None).candidates), None)
            whole = is_whole(there, there.generations[at])
            found.append(Left(place, step, whole, there.order, place == its_memory, takes != at))
    return found


def abandoned(place: str, there: commit.Survey, everywhere: commit.Survey) -> str:
    """What to say of the newest good save in memory that is opened, if the run went on without it from an older step;
    else empty. `place`: the memory, which holds `there`. `everywhere`: what all places hold."""
    takes = next(iter(choose(everywhere, None).candidates), None)
    at = max(choose(there, None).candidates, default=None)
    # guard: abandoned-save-in-memory-reported
    if at is None or takes is None or at.step <= takes.step or at in lineage(everywhere).chain:
        return ""
    return (
        f"{place} holds step {at.step}, which is newer than step {takes.step}, but the run went on without it, "
        f"so it is deleted with the next saves. To keep it, go back to it now: restore(step={at.step})."
    )


def _survey(tier: Tier) -> commit.Survey | None:
    """What a place holds; None if it cannot be read."""
    try:
        return commit.survey(tier)
    except LastgoodError:
        return None


def _newest(survey: commit.Survey) -> int:
    """The step of the newest good generation; -1: there is none."""
    return max((at.step for at in choose(survey, None).candidates), default=-1)

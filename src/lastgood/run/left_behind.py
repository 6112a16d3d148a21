"""Saves of a run in memory of this machine that an opening, or a command, does not look at. Reads only.

The memory of a run is found by the path of its durable place and the name of the node. A run that was renamed, or is
opened without its tier in memory, has left what was not copied there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from typing import NamedTuple

from ..errors import LastgoodError
from ..format import commit
from ..policy.restore import choose
from ..ports import Tier
from . import access, memory_place, paths
from .read_places import is_whole


class Left(NamedTuple):
    """Memory that holds newer saves. `step`: the newest good one there. `whole`: not only this node's part of it."""

    place: str
    step: int
    whole: bool

    def listed(self) -> str:
        """What a listing of the run says of it. A run that is in training is usually ahead in memory."""
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
        return (
            f"{self.place} {held} step {self.step} of this run, which is newer and is not looked at here. To go on "
            f"from it, open the run by the path and with the tier with which it was saved; {elsewhere}rm -r {folder} "
            "gives it up."
        )


def given_back(place: str) -> str:
    """That a place of a run in memory is not on this machine, for people; empty where it is, and for other places."""
    if not paths.in_memory(place) or os.path.lexists(paths.parsed(place).root):
        return ""
    return (
        "not in the memory of this machine: it is given back after a clean end, once the places below have all of it; "
        "a restart of the machine empties it too"
    )


def newer_in_memory(listed: Collection[str], looked_at: Collection[Tier]) -> list[Left]:
    """The memory of this machine among the `listed` places of a run that holds a newer good save than those that are
    looked at. Raises nothing."""
    known, found = {one.place for one in looked_at}, list[Left]()
    others = [one for one in listed if paths.in_memory(one) and one not in known]
    roots = {one: paths.parsed(one).root for one in others}
    others = [one for one, root in roots.items() if os.path.isdir(root) and memory_place.is_private(root)]
    if not others:
        return []
    here = [*map(_newest, looked_at)]
    run, newest = next((run for run, *_ in here if run), None), max((step for _, step, _ in here), default=-1)
    for place in others:
        with contextlib.suppress(LastgoodError):
            other, step, whole = _newest(access.for_reading(place))
            if other == run and step > newest:
                found.append(Left(place, step, whole))
    return found


def _newest(tier: Tier) -> tuple[str | None, int, bool]:
    """The run in a place, the step of its newest good generation (-1: there is none), and whether it is whole."""
    try:
        survey = commit.survey(tier)
        at = max(choose(survey, None).candidates, default=None)
    except LastgoodError:
        return None, -1, False
    if at is None:
        return survey.run, -1, False
    return survey.run, at.step, at in survey.generations and is_whole(survey, survey.generations[at])

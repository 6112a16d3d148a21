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


class Left(NamedTuple):
    """Memory that holds newer saves. `step`: the newest good one there."""

    place: str
    step: int

    def listed(self) -> str:
        """What a listing of the run says of it. A run that is in training is usually ahead in memory."""
        return (
            f"{self.place} holds step {self.step}, which is newer: a start with this tier restores it, and the agent "
            f"copies it here. `lastgood ls {self.place}` lists what is there."
        )

    def described(self) -> str:
        """What to do about it, where a run was opened without it."""
        folder = self.place.removeprefix(paths.MEMORY)
        return (
            f"{self.place} holds step {self.step} of this run, which is newer and is not looked at here. To go on from "
            f"it, open the run by the path and with the tier with which it was saved; `lastgood copy {self.place} "
            f"TARGET` brings it elsewhere; rm -r {folder} gives it up."
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
    run, newest = next((run for run, _ in here if run), None), max((step for _, step in here), default=-1)
    for place in others:
        with contextlib.suppress(LastgoodError):
            other, step = _newest(access.for_reading(place))
            if other == run and step > newest:
                found.append(Left(place, step))
    return found


def _newest(tier: Tier) -> tuple[str | None, int]:
    """The run in a place, and the step of its newest good generation; -1 if there is none."""
    try:
        survey = commit.survey(tier)
        return survey.run, max((at.step for at in choose(survey, None).candidates), default=-1)
    except LastgoodError:
        return None, -1

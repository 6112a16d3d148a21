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
    """Memory of a run that an opening does not look at, and that holds newer saves. `step`: its newest good one.
    `whole`: not only this node's part of it. `by_path`: whether a start by the path of the run, with its tier in
    memory, looks at it. `abandoned`: whether the run went on without it."""

    place: str
    step: int
    whole: bool
    by_path: bool
    abandoned: bool

    def listed(self) -> str:
        """What a listing of the run says of it. A run that is in training is usually ahead in memory."""
        if not self.by_path or self.abandoned:
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
            what = (
                f"which is newer, but the run went on without it. restore(step={self.step}) goes back to it, in a "
                "start by the path and with the tier with which it was saved"
            )
        else:
            what = (
                "which is newer and is not looked at here. To go on from it, open the run by the path and with the "
                "tier with which it was saved, before a save here abandons it"
            )
        removal = f"if no job uses it, rm -r {folder} gives it up"
        return f"{self.place} {held} step {self.step} of this run, {what}; {elsewhere}{removal}."


def given_back(place: str) -> str:
    """That a place of a run in memory is not on this machine, for people; empty where it is, and for other places."""
    try:
        if not paths.in_memory(place) or os.path.lexists(paths.parsed(place).root):
            return ""
    except LastgoodError:  # a damaged list of places
        return ""
    return (
        "not in the memory of this machine: it is given back after a clean end, once the places below have all of it; "
        "a restart of the machine empties it too"
    )


def beside(listed: Collection[str], looked_at: Sequence[Tier]) -> dict[str, commit.Survey]:
    """The memory of this machine that holds a run, among its `listed` places and that of its path, with what it holds.
    Without the places that are `looked_at`. Raises nothing."""
    found = {one for one in listed if paths.in_memory(one)}
    with contextlib.suppress(LastgoodError):  # LASTGOOD_MEMORY may be no path
        found.add(memory_place.url_of(path_of(listed, looked_at[-1].place)))
    run, there = "", dict[str, commit.Survey]()
    for place in sorted(found - {one.place for one in looked_at}):
        with contextlib.suppress(LastgoodError):  # the list of places is a hint, and may hold anything
            root = paths.parsed(place).root
            if os.path.isdir(root) and memory_place.is_private(root):
                run = run or next((run for run in map(_run_of, looked_at) if run), "")
                survey = commit.survey(access.for_reading(place))
                if survey.run == run:
                    there[place] = survey
    return there


def newer_in_memory(listed: Collection[str], looked_at: Sequence[Tier]) -> list[Left]:
    """The memory of this machine, among `beside`, that holds a save that is newer than those that are looked at: a step
    that a start with it restores, or a higher one. Raises nothing."""
    here, found = list[commit.Survey](), list[Left]()
    for tier in looked_at if (others := beside(listed, looked_at)) else ():
        with contextlib.suppress(LastgoodError):
            here.append(commit.survey(tier))
    highest = max((at.step for one in here for at in choose(one, None).candidates), default=-1)
    for place, there in others.items():
        newest = max(choose(there, None).candidates, default=None)
        if newest is None:
            continue
        takes = next(iter(choose(merged([*here, there]), None).candidates), None)
        restores = takes == newest and not any(newest in one.generations for one in here)
        if restores or newest.step > highest:
            by_path = place == memory_place.url_of(path_of(listed, looked_at[-1].place))
            found.append(Left(place, newest.step, is_whole(there, there.generations[newest]), by_path, not restores))
    return found


def order_beside(listed: Collection[str], looked_at: Sequence[Tier]) -> int:
    """The highest order of the incarnations of a run in the memory of `beside`; 0 if there is none. Raises nothing."""
    return max((one.order for one in beside(listed, looked_at).values()), default=0)


def abandoned(place: str, there: commit.Survey, everywhere: commit.Survey) -> str:
    """What to say of the newest good save in memory that is opened, if the run went on without it; else empty.

    `place`: the memory, which holds `there`. `everywhere`: what all places hold.
    """
    takes = next(iter(choose(everywhere, None).candidates), None)
    at = next(iter(choose(there, None).candidates), None)
    # guard: abandoned-save-in-memory-reported
    if at is None or takes is None or at in lineage(everywhere).chain:
        return ""
    return (
        f"{place} holds step {at.step}, but the run went on without it, to step {takes.step}, which a restore takes. "
        f"So step {at.step} is deleted with the next saves. To keep it, go back to it now: restore(step={at.step})."
    )


def path_of(listed: Collection[str], place: str) -> str:
    """The path of a run: the last of its `listed` places on a disk or in a store, if `place` is among them; else that,
    because the run was moved there."""
    durable = [one for one in listed if not paths.in_memory(one)]
    return durable[-1] if durable and place in listed else place


def _run_of(tier: Tier) -> str | None:
    """The id of the run in a place; None if it is empty or cannot be read."""
    with contextlib.suppress(LastgoodError):
        return commit.survey(tier).run
    return None

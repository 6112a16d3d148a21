"""A run as this machine can read it: one place of it, and what only the memory of this machine has. Reads only.

A generation is read from the place that was named, if a whole copy is there, else from memory. Of several nodes each
has a part of a generation in its memory: such a part is not read, and is named.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from concurrent.futures import Executor

from ..coordination.single_rank import AnyTopic
from ..errors import LastgoodError
from ..format import commit, layout
from ..policy import restore
from ..policy.places import holder, merged
from ..ports import Tier
from ..records import Generation, GenerationId, judged
from . import access, copying, memory_place, paths
from .candidates import ReadOnlyRun
from .kept import kept, require_not_deleted


class ReadPlaces:
    """Places of one run, the preferred first, as they were when this object was made.

    `surveys`: of each of `tiers`. `part`: the newest generation of which this machine has only a part; None: there is
    none.
    """

    def __init__(
        self, tiers: Sequence[Tier], surveys: Sequence[commit.Survey], part: GenerationId | None = None
    ) -> None:
        self._tiers, self._surveys, self._part = tiers, surveys, part
        self.tier, self.place = tiers[0], tiers[0].place
        """the place that was named"""
        self.here, self.survey = surveys[0], merged(surveys)
        """what that place holds, and what all of them hold together"""

    def tier_of(self, at: GenerationId) -> Tier:
        """The place from which a generation is read."""
        return self._tiers[holder([one.generations for one in self._surveys], at) or 0]

    def give_up(self, generation: Generation) -> bool:
        """Note that a copy is damaged, as `generation` says. Returns whether another place has a whole one."""
        index = holder([one.generations for one in self._surveys], generation.id) or 0
        self._surveys[index].generations[generation.id] = judged(generation, generation.damaged)
        return any(at.restorable for one in self._surveys if (at := one.generations.get(generation.id)))

    def newer_part(self, at: GenerationId | None) -> str:
        """That this machine has a part of a generation newer than `at`, or of any for None; empty if it has none."""
        if self._part is None or (at is not None and self._part.step <= at.step):
            return ""
        return (
            f"step {self._part.step} {'is newer, and lies' if at else 'lies'} in the memory of several nodes, of "
            f"which this one has a part: the next start of the job restores it, or `lastgood agent stop "
            f"{self.place}` on each node copies it"
        )

    def remark(self, at: GenerationId | None) -> str:
        """What is to be said of a generation that was read: that only memory has it, or that a newer one exists.

        None: nothing was found to be read.
        """
        if newer := self.newer_part(at):
            return newer
        if at is None or (tier := self.tier_of(at)).place == self.place:
            return ""
        return f"step {at.step} was read from {tier.place}; {self.place} has not received it yet"


def tier_of(tier: Tier, at: GenerationId) -> Tier:
    """The place from which this machine reads a generation of the run at `tier`; raises as `found`."""
    with contextlib.suppress(LastgoodError):
        if _memory_of(tier) is not None:
            return found(tier).tier_of(at)
    return tier


def found(tier: Tier) -> ReadPlaces:
    """The place of `tier`, and the memory of this machine that a Checkpointer of this place would open.

    Raises what reading the place raises. Memory that cannot be read, or is of another run, is left out.
    """
    survey, part = commit.survey(tier), None
    tiers, surveys = [tier], [survey]
    with contextlib.suppress(LastgoodError):
        if (memory := _memory_of(tier)) is not None:
            there = commit.survey(memory)
            if copying.run_of(there) == copying.run_of(survey):  # guard: memory-of-same-run-read
                whole = {at: one for at, one in there.generations.items() if is_whole(there, one)}
                newer = [at for at in restore.choose(there, None).candidates if at not in survey.generations]
                part = next((at for at in newer if at not in whole), None)
                # Unfinished saves and deletions in memory are no matter of who reads.
                surveys.append(commit.Survey(there.run, whole, incarnations=there.incarnations, order=there.order))
                tiers.append(memory)
    return ReadPlaces(tiers, surveys, part)


class RunOfPlaces(ReadOnlyRun):
    """A run that is open for reading only, in these places."""

    def __init__(self, places: ReadPlaces, workers: Executor) -> None:
        super().__init__(places.tier, places.survey, workers)
        self._places, self._keep = places, contextlib.ExitStack()
        self._reading: tuple[GenerationId, Tier] | None = None
        """the generation that is kept (kept.py), and the place from which it is read"""

    def close(self) -> None:
        """Close the files of the generation that was read last. Called once no more is read."""
        self._keep.close()

    def place_of(self, generation: Generation, topic: AnyTopic | None = None) -> Tier:
        at, tier = generation.id, self._places.tier_of(generation.id)
        if self._reading is None or (self._reading[0], self._reading[1].place) != (at, tier.place):
            self._keep.close()
            self._reading = at, self._keep.enter_context(kept(tier, at))  # guard: loaded-generation-kept
        return self._reading[1]

    def mend(self, generation: Generation) -> bool:
        tier = self._places.tier_of(generation.id)
        if self._places.give_up(generation):  # guard: deleted-in-one-place-read-elsewhere
            return True
        require_not_deleted(tier, generation.id)
        return False


def _memory_of(tier: Tier) -> Tier | None:
    """The memory of a run on this machine; None if there is none, or if another user may have written it."""
    if paths.in_memory(tier.place):
        return None
    url = memory_place.url_of(tier.place)
    folder = paths.parsed(url).root
    is_there = os.path.isdir(os.path.join(folder, "gen")) and memory_place.is_private(folder)  # guard: own-memory-read
    return access.for_reading(url) if is_there else None


def is_whole(survey: commit.Survey, one: Generation) -> bool:
    """Whether the files of all ranks are there: a manifest is written after the files that it names."""
    listing = survey.listings[layout.folder(one.id).partition("/")[2]]
    return all(seal.manifest in listing for seal in one.commit.seals)

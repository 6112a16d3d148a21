"""The newest generation in the memory of a node that waits for its place in a job, and its removal at the end.

Holds no clock.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from .. import reporting
from ..errors import LastgoodError, NoSpace, Refused
from ..format import commit, layout
from ..policy import restore
from ..records import GenerationId
from ..run import access, memory_place, node_staging, paths, place_list, staged


class Reserve:
    """The memory of this node for one run. `run`: its last place."""

    def __init__(self, run: str) -> None:
        self._run, self._folder, self._problem = run, memory_place.folder_of(run), ""
        self._held = staged.Held(self._folder)
        self._staged: GenerationId | None = None

    def refresh(self) -> None:
        """Copy the generation that a restore would take, unless memory has it. What prevents that is reported,
        once, and tried again with the next call: the run may not exist yet, or an agent may have the memory."""
        try:
            self._copy()
            self._problem = ""
        except (LastgoodError, OSError) as error:
            # How much memory is free changes from call to call.
            problem = type(error).__name__ if isinstance(error, NoSpace) else str(error)
            if problem != self._problem:  # guard: reserve-reports-once
                self._problem = problem
                newer = "nothing" if self._staged is None else "nothing newer"
                reporting.warning(f"{newer} is staged in the memory of this node now: {error}")

    def _copy(self) -> None:
        tier = access.for_reading(self._run)
        survey = commit.survey(tier)
        at = next(iter(restore.choose(survey, None).candidates), None)
        if at is None or (at == self._staged and self._has(at)):  # guard: removed-copy-is-staged-anew
            return
        if not any(map(paths.in_memory, place_list.listed(tier))):  # guard: staged-only-for-memory
            raise Refused(
                f"the last job that opened {self._run} had no tier in memory, and would not read it",
                safe="Nothing was copied.",
                todo="Give the job Tier('memory://'): it is staged once one has opened it. Else leave out --stage.",
            )
        node_staging.stage(tier, survey, self._run, survey.generations[at], held=self._held)
        self._staged = at
        reporting.info(f"step {at.step} is staged in the memory of this node: {self._folder}")

    def _has(self, at: GenerationId) -> bool:
        """Whether the copy is still there: an agent, or systemd when the user logs out, may have removed it."""
        return os.path.exists(os.path.join(self._folder, layout.folder(at), layout.COMMIT))

    def remove_left(self) -> None:
        """Remove what killed supervisors have staged for other runs."""
        _report(staged.remove_unneeded(but=self._folder))


@contextlib.contextmanager
def unneeded_removed(run: str) -> Iterator[Callable[[], None]]:
    """At the end of the block, remove what is staged in the memory of this node and was not used by any start.

    Yields what keeps other supervisors from that until then, once it is called. `run`: its last place; empty: none is
    staged, and nothing is done.
    """
    if not run:
        yield lambda: None
        return
    held = staged.Held(memory_place.folder_of(run))
    try:
        yield held.hold
    finally:
        held.close()
        _report(staged.remove_unneeded())


def _report(folders: list[str]) -> None:
    for folder in folders:
        reporting.info(f"what was staged in the memory of this node, and no start has used, is removed: {folder}")

"""The newest generation of a run in the memory of this node, which waits for its place in a job. Holds no clock."""

from __future__ import annotations

from .. import reporting
from ..errors import LastgoodError
from ..format import commit
from ..policy import restore
from ..records import GenerationId
from ..run import access, node_staging


class Reserve:
    """The memory of this node for one run. `run`: its last place."""

    def __init__(self, run: str) -> None:
        self._run, self._problem = run, ""
        self._staged: GenerationId | None = None

    def refresh(self) -> None:
        """Copy the generation that a restore would take, unless it was copied before. What prevents that is reported,
        once, and tried again with the next call: the run may not exist yet, or an agent may have the memory."""
        try:
            self._copy()
            self._problem = ""
        except (LastgoodError, OSError) as error:
            if str(error) != self._problem:
                self._problem = str(error)
                reporting.warning(f"nothing is staged in the memory of this node now: {error}")

    def _copy(self) -> None:
        tier = access.for_reading(self._run)
        survey = commit.survey(tier)
        at = next(iter(restore.choose(survey, None).candidates), None)
        if at is None or at == self._staged:
            return
        folder = node_staging.stage(tier, survey, self._run, survey.generations[at])
        self._staged = at
        reporting.info(f"step {at.step} is staged in the memory of this node: {folder}")

"""Shell completion of a STEP: the steps of the run that is named before it."""

from __future__ import annotations

import typer

from ..errors import LastgoodError
from ..format import commit
from ..run import access


def steps(context: typer.Context, incomplete: str) -> list[str]:
    """The steps of the RUN of the command that begin with `incomplete`, the highest first; none if RUN is no run."""
    try:
        survey = commit.survey(access.for_reading(str(context.params.get("run", ""))))
    except LastgoodError:
        return []
    found = sorted({at.step for at in (*survey.generations, *survey.broken)}, reverse=True)
    return [str(step) for step in found if str(step).startswith(incomplete)]

"""What the shell completes: the steps of a run that is named already."""

from __future__ import annotations

import typer

from ..errors import LastgoodError
from ..format import commit
from ..run import access


def steps(context: typer.Context, incomplete: str) -> list[str]:
    """The steps of the RUN on the command line that begin with what is typed, newest first; none where it is no run."""
    try:
        survey = commit.survey(access.for_reading(str(context.params.get("run", ""))))
    except LastgoodError:
        return []
    found = sorted({at.step for at in (*survey.generations, *survey.broken)}, reverse=True)
    return [str(step) for step in found if str(step).startswith(incomplete)]

"""The generation that a STEP on the command line names."""

from __future__ import annotations

from ..errors import MissingBlob, NoSuchStep, NothingGood
from ..format import layout
from ..format.commit import Survey
from ..policy import restore
from ..records import Generation, GenerationId
from .arguments import step_of
from .texts import newest_first


def find(survey: Survey, wanted: str) -> GenerationId:
    """The generation that a STEP names. If several have this step: that of the lineage, else the newest.

    Raises BadParameter for a text that is no STEP, NoSuchStep for a step that the run does not know.
    """
    number, _, incarnation = step_of(wanted).partition("-")
    chain, lost = restore.lineage(survey)
    others = newest_first(survey, {*survey.generations, *survey.broken})
    known = dict.fromkeys([*chain, *others, *lost, *survey.witnessed])
    for at in known:
        if at.step == int(number) and incarnation in ("", at.incarnation):
            return at
    steps = ", ".join(map(str, sorted({at.step for at in known}))) or "none"
    raise NoSuchStep(
        f"no generation of step {wanted}", safe="Nothing was touched.", todo=f"Steps that are there: {steps}."
    )


def pick(survey: Survey, wanted: str | None, remark: str = "") -> Generation:
    """The generation that a STEP names; without a STEP the one that a restore would take.

    `remark` (default: none): what is to be said if nothing was ever committed in this place.
    Raises NoSuchStep, NothingGood, or the error for what is wrong with the named generation.
    """
    if wanted is None:
        choice = restore.choose(survey, None)
        if choice.candidates:
            return survey.generations[choice.candidates[0]]
        restore.require_read(survey)
        if choice.passed_over:
            reasons = "\n".join(f"  step {at.step}: {reason}" for at, reason in choice.passed_over)
            raise NothingGood(f"no generation of this run is good:\n{reasons}", todo="\nName a STEP to look at it.")
        raise restore.no_such_step(restore.NOTHING_YET, survey, remark)
    at = find(survey, wanted)
    if at in survey.broken:
        raise survey.broken[at]
    if at not in survey.generations:
        raise MissingBlob(f"{at} is lost: its COMMIT is gone", blob=f"{layout.folder(at)}/{layout.COMMIT}")
    return survey.generations[at]

"""Suspect generations: a restore takes another one than those that a Sentinel or a supervisor suspects. Deletes none.

A Sentinel has them marked when training has diverged, so that `lastgood ls`, `load` and an agent know of it too; each
restore that follows advice does the same, for what a process had no time for.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..policy.restore import choose, never_good
from ..records import Finding
from ..run import advice
from ..run.advice import Advice
from ..run.pipeline import Pipeline


def start_over(pipeline: Pipeline, found: Sequence[Advice]) -> bool:
    """Whether training is to start from the beginning, because the run holds nothing but what this advice suspects, and
    nothing was saved before it."""
    of_start = {one.suspect for one in advice.suspects(found) if one.suspect and one.from_start}
    return never_good(pipeline.run.known.view, of_start)


def set_aside(pipeline: Pipeline, found: Sequence[Advice], over: bool) -> list[Advice]:
    """Let restores take other generations than the suspect ones of this advice, at the coordinator. `over`: as
    `start_over` says: then there may be none. Returns the advice about those that stay, as the only good one."""
    kept = list[Advice]()
    for one in advice.suspects(found):
        candidates = choose(pipeline.run.known.view, None).candidates
        if candidates == [one.suspect] and not over:  # guard: only-good-generation-stays
            kept.append(one)
        else:
            _mark(pipeline, one, advice.finding(one, found))
    return kept


def _mark(pipeline: Pipeline, one: Advice, finding: Finding) -> None:
    """Mark the suspect generation of this advice with `finding`, if it is known to be to blame.

    What a Sentinel has found is marked. What a supervisor suspects is marked once training has come past the step at
    which it failed, without that generation: until then the script may be to blame. If training has gone on from it,
    nothing is done: retention would delete it.
    """
    survey, places, at = pipeline.run.known.view, pipeline.places, one.suspect
    assert at is not None
    candidates, known = choose(survey, None).candidates, survey.generations.get(at)
    passed = bool(candidates) and candidates[0].step > one.step
    if at not in candidates:
        if one.by == "supervisor" and passed and known is not None and known.restorable:
            places.mark_suspect(at, finding)  # guard: proven-suspect-marked
        judged = known is not None and any(other.layer == finding.layer for other in known.unfit)
        if one.by == "sentinel" and known is not None and known.unfit and not judged:
            # That its tensors are not finite is known, and not yet with which batches they were trained.
            places.mark_suspect(at, finding)
    elif one.by == "supervisor" and at != candidates[0]:  # guard: resumed-suspect-is-none
        return  # the job has gone on from it all the same
    else:
        # guard: suspect-generation-marked
        places.mark_suspect(at, finding, durably=one.by == "sentinel")

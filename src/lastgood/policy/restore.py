"""Which generation to restore: the lineage of a run, and the order in which its generations are tried.

Pure: works on a survey, reads nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from typing import NamedTuple

from ..errors import NoSuchStep
from ..format.commit import Survey
from ..records import Commit, Finding, GenerationId
from .arguments import is_whole

NOTHING_YET = "nothing has been committed in this run yet"
"""the text for a run without generations"""


class Lineage(NamedTuple):
    """The chain of generations that the current state descends from, newest first."""

    chain: list[GenerationId]
    """those that have a COMMIT, valid or not"""
    lost: list[GenerationId]
    """those whose COMMIT is missing although they were not retired: a record of the lineage or the pointer names them,
    or they hold what only a committed generation gets (`Survey.witnessed`)"""


class Choice(NamedTuple):
    """The generations to try, in this order, and those that are passed over without being read, with the reason."""

    candidates: list[GenerationId]
    passed_over: list[tuple[GenerationId, str]]


def lineage(survey: Survey) -> Lineage:
    """The generations of the newest incarnation, newest first; then those of the one that it continues, and so on.

    Steps after the one that an incarnation continues were abandoned, and are left out.
    """
    committed = survey.generations.keys() | survey.broken.keys()
    chain: list[GenerationId] = []
    committed_once: set[GenerationId] = set()  # those of the lineage that some record shows to have been committed
    # guard: newest-incarnation-first
    current = max(survey.incarnations.values(), key=lambda one: one.order, default=None)
    bound: int | None = None
    while current is not None:
        # guard: lineage-bounded-by-rewind
        mine = [at for at in committed if at.incarnation == current.id and (bound is None or at.step <= bound)]
        chain += sorted(mine, reverse=True)  # guard: newest-step-first
        witnessed = {at for at in survey.witnessed if at.incarnation == current.id}
        committed_once |= {at for at in witnessed if bound is None or at.step <= bound}
        parent = current.parent
        if parent is None:
            break
        committed_once.add(parent)
        bound, older = parent.step, survey.incarnations.get(parent.incarnation)
        if older is None:
            # Its record and every readable commit are missing; its other commits are known to be broken.
            chain += sorted((at for at in committed if at.incarnation == parent.incarnation), reverse=True)
        # guard: lineage-continues-with-parent
        current = older if older is not None and older.order < current.order else None
    for at in chain:
        if at in survey.generations and (before := survey.generations[at].commit.parent):
            committed_once.add(before)
    committed_once -= survey.unfinished
    if survey.pointer:
        committed_once.add(GenerationId(step=survey.pointer.step, incarnation=survey.pointer.incarnation))
    return Lineage(chain, sorted((committed_once & survey.incomplete) - set(chain), reverse=True))


def never_committed(survey: Survey, copied: bool = False) -> set[GenerationId]:
    """Generations that have no COMMIT and, by every record, never had one: litter.

    A broken commit may have named any generation before it, so those are not among them. `copied`: the survey is of a
    place that receives copies. Not every generation is copied, and the newest that waits is copied first, so a record
    that names a generation does not show that it was ever committed there.
    """
    named: set[GenerationId | None] = set(survey.witnessed)
    if not copied:  # guard: unfinished-copy-is-litter
        named |= {one.parent for one in survey.incarnations.values()}
        for generation in survey.generations.values():
            named |= {generation.commit.parent, generation.commit.continues}
    named -= survey.unfinished
    if survey.pointer:
        named.add(GenerationId(step=survey.pointer.step, incarnation=survey.pointer.incarnation))
    unsure = max((at.step for at in survey.broken), default=0)
    return {at for at in survey.incomplete - named if at.step >= unsure}  # guard: lost-commits-kept


def under_way(survey: Survey, intents: Mapping[GenerationId, Commit]) -> list[GenerationId]:
    """The saves that were under way when the job was lost, newest first: one of them may be committed late.

    `intents`: of each folder without a COMMIT the record that the save wrote first. A save counts only if nothing that
    is known is newer: a later save of its incarnation replaces it, and another incarnation has left it behind, unless
    its order is lower.
    """
    order = max([survey.order, *(one.order for one in intents.values())])
    of_order = {one.id for one in survey.incarnations.values() if one.order == order}
    of_order |= {at.incarnation for at, one in intents.items() if one.order == order}
    if len(of_order) > 1:  # guard: save-of-equal-order-not-committed
        return []
    committed = (*survey.generations, *survey.broken)
    newest = max((at.step for at in committed if at.incarnation in of_order), default=-1)
    unfinished = survey.incomplete - survey.witnessed  # guard: lost-commit-is-not-under-way
    mine = [
        at for at in unfinished & intents.keys() if intents[at].order == order
    ]  # guard: abandoned-save-not-committed
    return sorted((at for at in mine if at.step > newest), reverse=True)  # guard: replaced-save-not-committed


def choose(survey: Survey, step: int | None) -> Choice:
    """The candidates of a restore: those of the lineage, newest first, down to one that could not be read (`ends_at`);
    or the generations of `step`.

    An abandoned generation of `step` is a candidate only where the lineage has none, and then only the newest one.
    Raises NoSuchStep if `step` was never committed, was deleted, or is not a whole number.
    """
    chain, lost = lineage(survey)
    if step is not None:
        if not is_whole(step, 0):
            raise no_such_step(f"step={step!r} is neither a whole number nor None (the newest good one)", survey)
        order = {one.id: one.order for one in survey.incarnations.values()}
        others = sorted(survey.generations, key=lambda at: -order.get(at.incarnation, 0))
        mine = [at for at in chain if at.step == step]
        wanted = mine or [at for at in others if at.step == step][:1]
        if not wanted:
            raise no_such_step(f"no generation of step {step}", survey)
        return Choice(wanted, [])
    passed = [(at, "its COMMIT is gone") for at in lost]  # guard: lost-commits-reported
    # No readable record names their incarnation, so they may be the newest.
    passed += [(at, str(survey.broken[at])) for at in _unplaced(survey, chain)]
    candidates, end = list[GenerationId](), ends_at(survey)
    newer = chain[: chain.index(end)] if end in chain else []
    for at in chain if end is None else newer:  # guard: unread-generation-ends-restore
        if at in survey.broken:
            passed.append((at, str(survey.broken[at])))
        elif survey.generations[at].damaged:
            passed.append((at, summary(survey.generations[at].damaged)))  # guard: damaged-generations-skipped
        elif survey.generations[at].unfit:
            passed.append((at, f"intact, and not good: {summary(survey.generations[at].unfit)}"))
        else:
            candidates.append(at)
    return Choice(candidates, sorted(passed, reverse=True))


def ends_at(survey: Survey) -> GenerationId | None:
    """The newest generation of the lineage that could not be read: it may be good, so nothing older is restored in its
    place. None: all could be read."""
    if not (unread := survey.unread):
        return None
    chain = lineage(survey).chain
    return next((at for at in (*_unplaced(survey, chain), *chain) if at in unread), None)


def require_read(survey: Survey) -> None:
    """Raise the error of the generation at which a restore ends, if nothing newer may be restored."""
    end = ends_at(survey)
    if end is not None and not choose(survey, None).candidates:
        raise survey.broken[end]


def _unplaced(survey: Survey, chain: Collection[GenerationId]) -> list[GenerationId]:
    """Those of `broken` that may be the newest, because no readable record names their incarnation."""
    return [at for at in survey.broken if at.incarnation not in survey.incarnations and at not in chain]


def never_good(survey: Survey, suspects: Set[GenerationId]) -> bool:
    """Whether training is to start from the beginning. `suspects`: generations before which nothing good was saved.

    True if the lineage consists of such ones; False if anything of it is lost or cannot be read.
    """
    chain, lost = lineage(survey)
    return bool(chain) and not lost and not survey.broken and suspects >= set(chain)  # guard: start-over-if-never-good


def no_such_step(what: str, survey: Survey, todo: str = "") -> NoSuchStep:
    """The error for a step that the run does not hold. `todo` (default: the steps that it holds): what to do."""
    there = ", ".join(map(str, sorted({at.step for at in survey.generations}))) or "none"
    return NoSuchStep(what, safe="Nothing was touched.", todo=todo or f"Steps that are there: {there}.")


def summary(findings: list[Finding]) -> str:
    """The first three findings in one line, without further lines that they have, and how many more there are."""
    return "; ".join(one.what.partition("\n")[0] for one in findings[:3]) + (
        f"; and {len(findings) - 3} more" if len(findings) > 3 else ""
    )

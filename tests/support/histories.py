"""Generations that exist only in memory, and the complete history of a run, for tests of the policies."""

from __future__ import annotations

from dataclasses import dataclass, field

from lastgood.format.commit import Survey
from lastgood.records import Commit, Generation, GenerationId, Incarnation, World


def at(step: int, incarnation: str = "a") -> GenerationId:
    return GenerationId(step=step, incarnation=incarnation)


def generation(step: int, incarnation: str = "a", order: int = 1, parent=None, continues=None, **marks) -> Generation:
    commit = Commit(
        format=1,
        run="run",
        step=step,
        incarnation=incarnation,
        order=order,
        world=World(ranks=1),
        parent=parent,
        continues=continues,
        seals=[],
        created=0.0,
        milestone=marks.pop("milestone", False),
        metrics=marks.pop("metrics", {}),
    )
    return Generation(commit=commit, root=f"{step}-{incarnation}", **marks)


@dataclass
class History:
    """The complete history of a run: the model that decisions are compared with."""

    survey: Survey = field(default_factory=Survey)
    before: dict[GenerationId, GenerationId | None] = field(default_factory=dict)
    """what each generation that was ever committed descends from"""
    tip: GenerationId | None = None

    def open(self, parent: GenerationId | None) -> str:
        name, order = f"i{len(self.survey.incarnations)}", len(self.survey.incarnations) + 1
        self.survey.incarnations[name] = Incarnation(format=1, order=order, id=name, parent=parent)
        self.tip = parent
        return name

    def save(self, step: int, incarnation: str, **marks) -> GenerationId:
        one = self.survey.incarnations[incarnation]
        made = generation(step, incarnation, one.order, self.tip, one.parent, **marks)
        self.before[made.id], self.tip = self.tip, made.id
        self.survey.generations[made.id] = made
        return made.id

    def descent(self) -> list[GenerationId]:
        """The generations from the tip back along their parents, without those that were deleted."""
        found, current = [], self.tip
        while current is not None:
            found.append(current)
            current = self.before[current]
        return [one for one in found if one in self.survey.generations or one in self.survey.broken]

"""The labels that a crash state must hold: metrics and milestones that were added to generations after their commit.

A label whose write is under way or has an unknown outcome may or may not be found; an acknowledged one must be found.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lastgood.records import Generation, GenerationId

LOSS = "loss"
"""The metric that every label sets."""


@dataclass
class Labels:
    """The expected labels of each generation. Every label sets the metric `LOSS`, and some set a milestone."""

    losses: dict[GenerationId, tuple[float | None, ...]] = field(default_factory=dict)
    """the values that may be found: the last acknowledged one (None: no value), then those requested after it"""
    milestones: dict[GenerationId, bool] = field(default_factory=dict)
    """generations for which a milestone was requested, and whether one was acknowledged"""

    requested: dict[GenerationId, tuple[float, ...]] = field(default_factory=dict)
    """every value that was ever requested, of which a copy that is being made may hold any"""

    def copied(self) -> Labels:
        return Labels(dict(self.losses), dict(self.milestones), dict(self.requested))

    @property
    def asked(self) -> set[GenerationId]:
        """Generations for which a label was requested."""
        return set(self.losses)

    def key(self) -> int:
        """A hash: objects with equal keys accept the same labels."""
        return hash((frozenset(self.losses.items()), frozenset(self.milestones.items())))

    def ask(self, at: GenerationId, loss: float, milestone: bool) -> None:
        """Record that a label is about to be written."""
        self.losses[at] = (*self.losses.get(at, (None,)), loss)
        self.requested[at] = (*self.requested.get(at, ()), loss)
        if milestone:
            self.milestones.setdefault(at, False)

    def acknowledge(self, at: GenerationId, loss: float, milestone: bool) -> None:
        """Record that the label was reported as durable."""
        self.losses[at] = (loss,)
        if milestone:
            self.milestones[at] = True

    def expect_copy(self, source: Labels, at: GenerationId) -> None:
        """Record that the labels of `source`, those of another place, may be copied to this one."""
        self.losses[at] = (*self.losses.get(at, (None,)), *source.requested.get(at, ()))
        if at in source.milestones:
            self.milestones.setdefault(at, False)

    def receive(self, source: Labels, at: GenerationId) -> None:
        """Record that a copy from another place was reported as done, and so were the labels that exist there."""
        if len(losses := source.losses.get(at, ())) == 1:
            self.losses[at] = losses
        if source.milestones.get(at):
            self.milestones[at] = True

    def settle(self, generations: Iterable[Generation]) -> None:
        """Expect exactly the labels that a process read when it opened the run: they are durable, no others exist."""
        for one in generations:
            if one.id in self.losses:
                self.losses[one.id] = (one.commit.metrics.get(LOSS),)
            if one.id in self.milestones:
                self.milestones[one.id] = one.commit.milestone

    def problem(self, generation: Generation) -> str:
        """Return how the labels of a generation differ from the expected ones, or an empty text."""
        at, found = generation.id, generation.commit
        expected = self.losses.get(at, (None,))
        if found.metrics.get(LOSS) not in expected:
            return f"has the metrics {found.metrics}, and the expected loss is one of {expected}"
        if self.milestones.get(at) and not found.milestone:
            return "has lost its milestone"
        if found.milestone and at not in self.milestones:
            return "is a milestone, although none was requested"
        return ""

    def beaten(self, at: GenerationId, rivals: Iterable[GenerationId]) -> bool:
        """Whether one of `rivals` may have a loss as low as that of `at`, or `at` may have none."""
        mine = self.losses.get(at, (None,))
        others = [loss for one in rivals for loss in self.losses.get(one, ()) if loss is not None]
        return any(loss is None or any(other <= loss for other in others) for loss in mine)

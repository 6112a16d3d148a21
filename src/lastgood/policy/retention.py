"""What may go. Pure. Never the newest verified generation, never the newest committed one, never one that is damaged.
One that is intact and not good (NaN in its parameters) counts for nothing: it goes once a newer one is committed.

Only verified generations count towards what is kept; an unverified one may go once a newer verified one exists, and
goes last where fewer than `last` are verified. One that `every`, a milestone or `best` asks for stays, verified or not:
verification may have passed it by, or a power loss may have taken its mark. One with a label that cannot be read stays:
it may be a milestone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..format.commit import Survey
from ..records import Generation, GenerationId, Incarnation
from .arguments import is_whole, require


@dataclass(frozen=True)
class Keep:
    """The newest `last` verified steps; beside them every `every`-th step, the `milestones` and the `best`.

    `best`: (name of a metric, "min" or "max", how many). Metrics come from `save(step, metrics={...})`.
    """

    last: int = 3
    every: int | None = None
    milestones: tuple[int, ...] = ()
    best: tuple[str, Literal["min", "max"], int] | None = None

    def __post_init__(self) -> None:
        whole = "Give a whole number of at least 1"
        require(is_whole(self.last, 1), f"Keep(last={self.last!r})", f"{whole}.")
        require(self.every is None or is_whole(self.every, 1), f"Keep(every={self.every!r})", f"{whole}, or None.")
        listed = isinstance(self.milestones, Collection) and not isinstance(self.milestones, (str, bytes, Mapping))
        require(
            listed and all(is_whole(one, 0) for one in self.milestones),
            f"Keep(milestones={self.milestones!r})",
            "Give a tuple of steps: (1000, 2000).",
        )
        require(
            self.best is None
            or (
                isinstance(self.best, (tuple, list))
                and len(self.best) == 3
                and isinstance(self.best[0], str)
                and self.best[1] in ("min", "max")
                and is_whole(self.best[2], 1)
            ),
            f"Keep(best={self.best!r})",
            'Give ("loss", "min", 3): a metric, "min" or "max", how many.',
        )


KEEP = Keep()


def surplus(keep: Keep, chain: Sequence[Generation], abandoned: Sequence[Generation]) -> list[GenerationId]:
    """Generations that may go, oldest first. `chain`: the lineage, newest first. `abandoned`: all others.

    Abandoned generations (left behind by a rewind) go once the lineage has `last` verified generations that were
    committed after them.
    """
    good = [one for one in chain if one.good]  # guard: retention-counts-verified
    # A step that was saved again after a restore counts once: a script that is run again pushes no older step out.
    newest_of_step = {one.step: one for one in reversed(good)}  # guard: resaved-step-counts-once
    latest = sorted(newest_of_step.values(), key=good.index)[: keep.last]  # guard: keep-last-verified
    kept = {one.id for one in latest} | {one.id for one in chain[:1]}  # guard: keep-newest-committed
    whole = [one for one in chain if not one.damaged]
    kept |= {one.id for one in whole if _pinned(keep, one)}  # guard: keep-pinned
    whole = [one for one in whole if not one.unfit]
    # What has not been read yet may turn out to be damaged, so it takes no place from what is known to be good.
    kept |= {one.id for known in (good, whole) for one in _best(keep, known)}  # guard: keep-best
    newest = chain.index(good[0]) if good else len(chain)  # guard: keep-newer-than-verified
    older = [*(one for one in chain[:newest] if one.unfit), *chain[newest + 1 :]]
    # Where verification has not kept pace, unverified generations fill up what is missing to `last`.
    unread = [one.id for one in older if not one.verified and not one.damaged and not one.unfit]
    kept |= set(unread[: max(keep.last - len(latest), 0)])  # guard: unverified-fill-up
    going = [one.id for one in older if one.id not in kept and not one.damaged]  # guard: damaged-kept-as-evidence
    for one in abandoned:
        newer = sum(1 for other in good if other.commit.order > one.commit.order)  # guard: abandoned-age-by-order
        if newer >= keep.last and not one.damaged and not _pinned(keep, one):  # guard: abandoned-kept-until-outnumbered
            going.append(one.id)
    return sorted(going)


def under_pressure(keep: Keep, chain: Sequence[Generation], abandoned: Sequence[Generation]) -> list[GenerationId]:
    """Generations that may go when the disk is full, oldest first; arguments as in `surplus`.

    The newest verified and the newest committed generation stay, and what `every`, a milestone or `best` asks for: only
    `last` is given up.
    """
    return surplus(replace(keep, last=1), chain, abandoned)


def wanted(keep: Keep, step: int, milestone: bool, metrics: Mapping[str, float]) -> bool:
    """Whether a save has a reason of its own to be kept, so that a newer one does not stand in for it."""
    by_step = step in keep.milestones or (keep.every is not None and step % keep.every == 0)
    return milestone or by_step or (keep.best is not None and keep.best[0] in metrics)


def _best(keep: Keep, chain: Sequence[Generation]) -> list[Generation]:
    if keep.best is None:
        return []
    metric, direction, count = keep.best
    scored = [one for one in chain if math.isfinite(one.commit.metrics.get(metric, math.nan))]
    sign = 1 if direction == "min" else -1
    # Of equals the newer one: the sort is stable and the chain runs from the newest.
    return sorted(scored, key=lambda one: sign * one.commit.metrics[metric])[:count]


def unverified_ahead(chain: Sequence[Generation]) -> int:
    """How many unread generations are newer than the newest verified one. `chain`: newest first."""
    newest = next((at for at, one in enumerate(chain) if one.good), len(chain))
    return sum(1 for one in chain[:newest] if not one.unfit)


def stale_incarnations(survey: Survey) -> list[Incarnation]:
    """Incarnation records that lead to no generation any more. Never the newest."""
    inhabited = {at.incarnation for at in (*survey.generations, *survey.broken, *survey.incomplete, *survey.going)}
    newest = max(survey.incarnations.values(), key=lambda one: one.order, default=None)
    needed: set[str] = {newest.id} if newest else set()
    for one in survey.incarnations.values():
        passed: list[str] = []
        at: Incarnation | None = one if one.id in inhabited or one is newest else None
        while at is not None and at.id not in passed:
            passed.append(at.id)
            if at.id in inhabited:
                needed.update(passed)  # guard: needed-incarnations-kept
            at = survey.incarnations.get(at.parent.incarnation) if at.parent else None
    return [one for one in survey.incarnations.values() if one.id not in needed]


def _pinned(keep: Keep, one: Generation) -> bool:
    # guard: unreadable-label-keeps-generation
    return one.label_unread or wanted(keep, one.step, one.commit.milestone, {})

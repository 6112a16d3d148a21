"""Retention: which generations may be deleted. Pure.

Never deleted: the newest verified generation, the newest committed one, milestones, and damaged ones, which are kept as
evidence.

Only verified generations count towards `last`. An unverified generation may be deleted once a newer verified one
exists; where fewer than `last` are verified, the newest unverified ones are kept in their place. A generation that
`every`, a milestone or `best` selects is kept, verified or not: verification may have skipped it, or a power loss may
have removed its mark. `every=N` selects of each N steps of the lineage the oldest generation that may be restored, and
each one whose step is a multiple of N; saves need not hit the multiples. A lineage grows at its newest end only, so the
oldest one stays that. A milestone selects the oldest one that has reached it. Of the generations that a rewind
abandoned, only those are selected whose own step is a multiple or a milestone, and `best` selects none. A generation
with an unreadable label is kept, because the label may make it a milestone. An unfit generation (NaN or infinity in its
parameters) counts neither for `last` nor for `best`, and not as the oldest. Unless it is kept for its step or its
label, it is deleted once a newer one is committed; an abandoned one is deleted like other abandoned ones (`surplus`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from ..format.commit import Survey
from ..records import Commit, Generation, GenerationId, Incarnation
from .arguments import is_whole, require
from .cadence import crossed


@dataclass(frozen=True)
class Keep:
    """Which generations a run keeps.

    `last` (default 3): the number of newest verified steps. `every` (default None): also the first generation at or
    after each multiple of it. `milestones` (default none): also the first one at or after each of these steps. `best`
    (default None): also the best generations by a metric, as (name of the metric, "min" or "max", how many); metrics
    come from `save(step, metrics={...})`.

    Raises Refused for values that cannot be meant. Example: `Keep(last=2, every=10_000, best=("loss", "min", 3))`.
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
    """The generations that may be deleted, oldest first. `chain`: the lineage, newest first. `abandoned`: all others.

    Abandoned generations (those of before a rewind) may be deleted once the lineage has `last` verified generations of
    newer incarnations.
    """
    good = [one for one in chain if one.good]  # guard: retention-counts-verified
    # A step that was saved again after a restore counts once, so that running a script again displaces no older step.
    newest_of_step = {one.step: one for one in reversed(good)}  # guard: resaved-step-counts-once
    latest = sorted(newest_of_step.values(), key=good.index)[: keep.last]  # guard: keep-last-verified
    kept = {one.id for one in latest} | {one.id for one in chain[:1]}  # guard: keep-newest-committed
    whole = [one for one in chain if not one.damaged]
    kept |= {one.id for one in whole if _pinned(keep, one)}  # guard: keep-pinned
    whole = [one for one in whole if not one.unfit]
    kept |= firsts(keep, whole)  # guard: first-of-each-kept
    # An unverified generation may be damaged, so it takes no place among the best from verified ones.
    kept |= {one.id for known in (good, whole) for one in _best(keep, known)}  # guard: keep-best
    newest = chain.index(good[0]) if good else len(chain)  # guard: keep-newer-than-verified
    # All that are older than the newest verified one may be deleted, and of the newer ones those that are unfit.
    may_go = [*(one for one in chain[:newest] if one.unfit), *chain[newest + 1 :]]
    # Where fewer than `last` generations are verified, the newest unverified ones are kept in their place.
    unread = [one.id for one in may_go if not one.verified and not one.damaged and not one.unfit]
    kept |= set(unread[: max(keep.last - len(latest), 0)])  # guard: unverified-fill-up
    going = [one.id for one in may_go if one.id not in kept and not one.damaged]  # guard: damaged-kept-as-evidence
    for one in abandoned:
        newer = sum(1 for other in good if other.commit.order > one.commit.order)  # guard: abandoned-age-by-order
        if newer >= keep.last and not one.damaged and not _pinned(keep, one):  # guard: abandoned-kept-until-outnumbered
            going.append(one.id)
    return sorted(going)


def under_pressure(keep: Keep, chain: Sequence[Generation], abandoned: Sequence[Generation]) -> list[GenerationId]:
    """The generations that may be deleted when the disk is full, oldest first; arguments as in `surplus`.

    Only `last` is reduced to 1: the newest verified and the newest committed generation are kept, and those that
    `every`, a milestone or `best` selects.
    """
    return surplus(replace(keep, last=1), chain, abandoned)


def unlabelled(one: Generation) -> Generation:
    """The generation without the label of a milestone: memory keeps none for it once it is copied to a place below."""
    record = msgspec.structs.replace(one.commit, milestone=False)
    return msgspec.structs.replace(one, label_unread=False, commit=record)


def firsts(keep: Keep, chain: Sequence[Generation]) -> set[GenerationId]:
    """The generations that `every` and `milestones` select because none of the same steps is older.

    `chain`: a lineage, newest first, without those that do not count.
    """
    found, seen, ahead = set[GenerationId](), set[int](), sorted(keep.milestones)
    for one in reversed(chain):
        multiple = one.step // keep.every if keep.every else 0
        reached = bisect_right(ahead, one.step)
        if reached or (multiple and multiple not in seen):
            found.add(one.id)
        seen.add(multiple)
        ahead = ahead[reached:]
    return found


def wanted(keep: Keep, step: int, milestone: bool, metrics: Mapping[str, float], since: int | None = None) -> bool:
    """Whether `keep` selects a save for another reason than its age, so that a newer save cannot replace it.

    `since`: the step of the save before it, 0 if there is none: the save counts if a multiple of `every` or a milestone
    was reached since. None (default): only if its own step is one.
    """
    since = step - 1 if since is None else min(since, step - 1)  # the same step may be saved again
    reached = any(since < one <= step for one in keep.milestones)  # guard: first-at-milestone-wanted
    # guard: first-at-multiple-wanted
    multiple = keep.every is not None and (step % keep.every == 0 or crossed(keep.every, since, step))
    return milestone or reached or multiple or (keep.best is not None and keep.best[0] in metrics)


def wanted_after(keep: Keep, one: Commit) -> bool:
    """As `wanted`, of a generation that was committed: its COMMIT names the one before it."""
    return wanted(keep, one.step, one.milestone, one.metrics, one.parent.step if one.parent else 0)


def _best(keep: Keep, chain: Sequence[Generation]) -> list[Generation]:
    if keep.best is None:
        return []
    metric, direction, count = keep.best
    scored = [one for one in chain if math.isfinite(one.commit.metrics.get(metric, math.nan))]
    sign = 1 if direction == "min" else -1
    # Among equal ones the newer comes first: the sort is stable, and the chain begins with the newest.
    return sorted(scored, key=lambda one: sign * one.commit.metrics[metric])[:count]


def lacks_metric(keep: Keep, saves: Sequence[Mapping[str, float]]) -> str:
    """What is reported once so many saves have been made that `last` deletes the first one, and they have metrics, but
    none that of `best`; else empty. `saves`: the metrics of each."""
    names = ", ".join(sorted({name for one in saves for name in one}))
    if keep.best is None or len(saves) != keep.last + 1 or not names or any(keep.best[0] in one for one in saves):
        return ""
    return (
        f"none of the first {len(saves)} saves has the metric {keep.best[0]!r} that Keep(best=...) asks for "
        f"(these have: {names}): a save without it is kept by its age only. If it comes later, nothing is wrong"
    )


def unverified_ahead(chain: Sequence[Generation]) -> int:
    """How many unverified generations are newer than the newest verified one. `chain`: the lineage, newest first."""
    newest = next((at for at, one in enumerate(chain) if one.good), len(chain))
    return sum(1 for one in chain[:newest] if not one.unfit)


def stale_incarnations(survey: Survey) -> list[Incarnation]:
    """The incarnation records that lead to no generation any more. Never includes the newest incarnation."""
    populated = {at.incarnation for at in (*survey.generations, *survey.broken, *survey.incomplete, *survey.going)}
    newest = max(survey.incarnations.values(), key=lambda one: one.order, default=None)
    needed: set[str] = {newest.id} if newest else set()
    for one in survey.incarnations.values():
        passed: list[str] = []
        at: Incarnation | None = one if one.id in populated or one is newest else None
        while at is not None and at.id not in passed:
            passed.append(at.id)
            if at.id in populated:
                needed.update(passed)  # guard: needed-incarnations-kept
            at = survey.incarnations.get(at.parent.incarnation) if at.parent else None
    return [one for one in survey.incarnations.values() if one.id not in needed]


def _pinned(keep: Keep, one: Generation) -> bool:
    # guard: unreadable-label-keeps-generation
    return one.label_unread or wanted(keep, one.step, one.commit.milestone, {})

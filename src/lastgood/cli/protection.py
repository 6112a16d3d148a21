"""Which generations lack parity that others of the same run have."""

from __future__ import annotations

from collections import Counter

from ..format import layout, parity_layout
from ..format.commit import Survey
from ..policy import restore
from ..ports import Tier
from ..records import Generation, GenerationId


def unprotected(tier: Tier, survey: Survey) -> dict[GenerationId, str]:
    """Verified generations of the lineage with fewer parity files than another one has, and a text about each.

    A run does not record whether parity is wanted, so the generation with the most parity files sets the measure. After
    parity was switched on or off, the generations before or after the switch are therefore among these.
    """
    chain = [survey.generations[at] for at in restore.lineage(survey).chain if at in survey.generations]
    files = {one.id: _parity_files(tier, one) for one in chain if one.good}
    most = max(files.values(), default=0)
    return {at: _text(count, most) for at, count in files.items() if count < most}


def _parity_files(tier: Tier, generation: Generation) -> int:
    """How many parity files the files of each rank have at least, together with their records; none is read."""
    files = tier.list(layout.folder(generation.id))
    complete = [name for name in files if parity_layout.is_record(name) and name.removesuffix(".json") in files]
    of = Counter(map(parity_layout.rank_of, complete))
    return min(of[one.rank] for one in generation.commit.seals)


def _text(count: int, most: int) -> str:
    has = f"has {count} of {most} parity files" if count else "has no parity"
    return f"{has}, unlike others of this run; Checkpointer(parity=..., scrub=...) writes it"

"""Meeting: how the processes of one job find each other in a store that may still hold what dead ones have said.

    every other rank    posts a word that nobody else has      here/RANK
    rank 0              answers each word that it finds        to/WORD    the name of this meeting
    every other rank    says that it has heard of it           took/NAME/RANK
    rank 0              has heard so of all                    met/NAME   or why not

torchrun starts processes again beside the store of those that ended, which had come to different places: nothing that
was counted there is the same for all.
Invariants
  1. Whoever has a name was answered by a rank 0 that is alive, to a word of its own making.
  2. Nobody goes on before all have it.
  3. Rank 0 waits `patience_seconds` for the others, they twice that for its answer, and for the end of the meeting.
Torch-free.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from ..errors import LastgoodError, RankFailed, TierDown, TimedOut
from .rounds import COORDINATOR, Posts, raised, told

LOOK = 1 / 60
"""of the patience: how often rank 0 looks for a rank that has come since"""


def meet(posts: Posts, place: str, rank: int, size: int, patience_seconds: float) -> str:
    """The name of this meeting, the same on all ranks, and never used before. Raises RankFailed and TierDown."""
    if rank != COORDINATOR:
        return _joined(posts, place, rank, 2 * patience_seconds)
    name = secrets.token_hex(8)  # guard: unique-rendezvous-name
    try:
        _gather(posts, place, name, range(1, size), patience_seconds)
    except LastgoodError as error:
        with suppress(TierDown):
            posts.post(f"{place}/met/{name}", told(error))
        raise
    posts.post(f"{place}/met/{name}", {})
    return name


def _gather(posts: Posts, place: str, name: str, others: range, patience_seconds: float) -> None:
    here = [f"{place}/here/{rank}" for rank in others]
    took = [f"{place}/took/{name}/{rank}" for rank in others]
    until = time.monotonic() + patience_seconds

    def answer(words: Iterable[str]) -> None:
        posts.post_all({f"{place}/to/{word}": name for word in words})  # a dead one's, too, which nobody hears

    while True:
        left = max(until - time.monotonic(), 0.0)
        try:
            answer(posts.hear(here, left))
            posts.hear(took, min(left, LOOK * patience_seconds))
            break
        except TimedOut:
            if left:  # guard: late-rank-awaited
                continue
            # guard: absent-ranks-published
            answer(filter(None, map(posts.heard, here)))  # who is here hears who is not
            silent = _missing(posts, here) or _missing(posts, took)
            if not silent:
                break
            more = f" (and {len(silent) - 1} more ranks)" if len(silent) > 1 else ""
            raise _not_here(f"rank {others[silent[0]]}{more}", patience_seconds) from None


def _missing(posts: Posts, keys: Sequence[str]) -> list[int]:
    return [at for at, key in enumerate(keys) if not posts.has(key)]


def _joined(posts: Posts, place: str, rank: int, patience_seconds: float) -> str:
    word = secrets.token_hex(8)
    posts.post(f"{place}/here/{rank}", word)
    try:
        (name,) = posts.hear([f"{place}/to/{word}"], patience_seconds)
        took = f"{place}/took/{name}/{rank}"
        posts.post(took, True)
        (verdict,) = posts.hear([f"{place}/met/{name}"], patience_seconds)
    except TimedOut:
        raise _not_here(f"rank {COORDINATOR}", patience_seconds) from None
    posts.delete([f"{place}/here/{rank}", f"{place}/to/{word}", took])  # each its own: rank 0 has enough to do
    if verdict:
        raise raised(verdict)
    return str(name)


def _not_here(who: str, seconds: float) -> RankFailed:
    return RankFailed(
        f"{who} has not opened the run in {seconds:.0f} s",
        safe="Nothing was touched.",
        todo="See why that process ended or hangs, or whether it has opened another directory.",
    )

"""What several nodes report of one attempt, made one: the attempt as if one supervisor had seen all ranks. Pure.

Times are seconds since the attempt began while they travel, because the clocks of nodes differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import msgspec

from ..io.heartbeat import Progress
from ..policy.blame import Ended, had_waited, may_have_timed_out
from ..policy.hang import behind
from ..policy.recovery import Act, Outcome
from ..records import Record
from . import survivors
from .attempt import Hang, Lived

_TIMES = ("begun", "opened", "restored", "first", "beat", "sign", "phase_began", "closed", "failed", "written")
"""the fields of a Progress that are times"""


class Report(Record, frozen=True, kw_only=True):
    """What one node reports. `asked`: whether it was asked to end. `lived`: times since the attempt began there."""

    host: str
    asked: bool
    lived: Lived


class Verdict(Record, frozen=True, kw_only=True):
    """What all nodes do after an attempt. `outcomes`: of all attempts so far. `act`, `why`, `pause_seconds`:
    as in policy/recovery.py. `next`: as in policy/membership.py. `run`: the run of the job; empty if
    it is not known. `asked`: whether a node was asked to end the job. `saved`: whether a rank has ended as after a last
    save. `left`: numbers of the nodes without which the job goes on, because they were asked to end, or are left
    out."""

    outcomes: list[Outcome]
    act: Act
    why: str
    pause_seconds: float
    next: Literal["stay", "join", "end"]
    run: str
    asked: bool = False
    saved: bool = False
    left: tuple[int, ...] = ()


def encoded(host: str, asked: bool, lived: Lived) -> str:
    """The report of a node, to be read by `decoded`."""
    report = Report(host=host, asked=asked, lived=shifted(lived, -lived.began))
    return msgspec.json.encode(report).decode()


def decoded(text: str) -> Report:
    """A report as `encoded` has made it."""
    return msgspec.json.decode(text, type=Report)


def shifted(lived: Lived, seconds: float) -> Lived:
    """The same attempt, with other times."""

    def moved(one: Progress) -> Progress:
        known = {name: getattr(one, name) for name in _TIMES}
        return one._replace(**{name: at + seconds for name, at in known.items() if at is not None})

    def of_hang(one: Hang | None) -> Hang | None:
        if one is None or one.behind.signs.since is None:
            return one
        signs = replace(one.behind.signs, since=one.behind.signs.since + seconds)
        return replace(one, behind=replace(one.behind, signs=signs))

    return replace(
        lived,
        began=lived.began + seconds,
        started=lived.started + seconds,
        failed=None if lived.failed is None else lived.failed + seconds,
        over=lived.over + seconds,
        ended=[replace(one, at_seconds=one.at_seconds + seconds) for one in lived.ended],
        progress=[moved(one) for one in lived.progress],
        hang=of_hang(lived.hang),
        suspected=of_hang(lived.suspected),
    )


def merged(reports: Mapping[int, Report], lost: tuple[int | None, str] | None) -> Lived:
    """One attempt. `reports`: those of the nodes that answer, by number; at least one. `lost`: as in Lived."""
    lives = [one.lived for _, one in sorted(reports.items())]
    failed = [one.failed for one in lives if one.failed is not None]
    return Lived(
        began=min(one.began for one in lives),
        started=max(one.started for one in lives),
        failed=min(failed, default=None),
        rendezvous=min(one.rendezvous for one in lives),  # of the node that came last: another one waited in reserve
        over=max(one.over for one in lives),
        killed=any(one.killed for one in lives) or lost is not None,
        ended=[ended for one in lives for ended in one.ended],
        progress=[shown for one in lives for shown in one.progress],
        stacks={rank: text for one in lives for rank, text in one.stacks.items()},
        hang=_hang([one.hang for one in lives if one.hang is not None]) or _awaited(lives),
        lost=lost,
        grows=any(one.grows for one in lives),
        asked_by=max(one.asked_by for one in lives),
        slow=[slow for one in lives for slow in one.slow],
        findings=[finding for one in lives for finding in one.findings],
        out_of_memory={rank: where for one in lives for rank, where in one.out_of_memory.items()},
        left=survivors.merged([one.left for one in lives]),
    )


def _hang(hangs: Sequence[Hang]) -> Hang | None:
    """The rank that is behind among those that are behind on their nodes, and the stacks of all."""
    if not hangs:
        return None
    last = behind([one.behind for one in hangs])
    silent = next((one.silent for one in hangs if one.silent is not None), None)
    return Hang(last, silent, {rank: text for one in hangs for rank, text in one.stacks.items()})


def _awaited(lives: Sequence[Lived]) -> Hang | None:
    """The rank that did nothing when others had aborted, if these show that they had waited for it. Only here the ranks
    of all nodes are known."""
    found = _hang([one.suspected for one in lives if one.suspected is not None])
    if found is None:
        return None
    shown = {one.rank: one for lived in lives for one in lived.progress}
    failed = [one for lived in lives for one in lived.ended if one.failed]
    step = found.behind.signs.step
    waited = [one.rank for one in failed if shown[one.rank].step >= step and _had_waited(one, shown[one.rank])]
    return found if may_have_timed_out(failed, waited) else None


def _had_waited(one: Ended, shown: Progress) -> bool:
    """Whether a rank that has failed had waited in a step, as it has shown."""
    if shown.sign is None or shown.phase_began is not None or shown.closed is not None:
        return False
    return had_waited(one.at_seconds - shown.sign, shown.longest_seconds)

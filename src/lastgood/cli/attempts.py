"""`lastgood attempts`: what the supervisor of a run has seen: attempts, causes, and where the time went."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..format import commit
from ..policy.health import described
from ..policy.membership import Spares
from ..policy.recovery import STORE
from ..records import Commit
from ..run import side_records
from ..supervisor import attempt_log, reported
from ..supervisor.attempt_log import SUPERVISOR, Attempt, Cause
from ..supervisor.reported import PHASES, REPLAYED
from .answer import Answer
from .arguments import Json, Run
from .terminal import clean
from .texts import new_table, plural, when


def attempts(run: Run, as_json: Json = False) -> Answer:
    """The attempts of RUN under `lastgood run`: when, from which step to which, why each failed, and what followed."""
    there = side_records.of_run(run)  # raises what is wrong with the path
    with side_records.opened(run) as tier:
        ended, lost, running = attempt_log.history(tier, run=run)
    saved = [one.commit for one in commit.survey(there).generations.values()] if running else []
    found = [*ended, *lost, *(_so_far(one, saved, time.time()) for one in running)]
    return Answer({"attempts": msgspec.to_builtins(found)}, _view(found))


def _so_far(running: Attempt, saved: Sequence[Commit], now: float) -> Attempt:
    """An attempt that runs, with its time and the newest step that it has saved. `saved`: what the run holds."""
    steps = [one.step for one in saved if one.created >= running.began_at]
    seconds, saved_step = max(0.0, now - running.began_at), max(steps, default=0)
    last_step = max(running.last_step, saved_step)
    return msgspec.structs.replace(running, seconds=seconds, last_step=last_step, saved_step=saved_step)


def _view(found: Sequence[Attempt]) -> RenderableType:
    if not found:
        return Text(
            "no attempt was recorded: `lastgood run` has not started this run, or none of its attempts has opened it"
        )
    reserve = ["spares"] if any(one.spares for one in found) else []
    table = new_table("attempt", "began", "seconds", "steps", "replayed", *reserve, "failed first", "then")
    for one in found:
        table.add_row(
            str(one.number),
            when(one.began_at, "%Y-%m-%d %H:%M:%S"),
            f"{one.seconds:.1f}",
            "none" if one.restored_step is None else f"{one.restored_step} to {one.last_step}",
            str(one.replayed_steps),
            *([_spares(one.spares)] if reserve else []),
            clean("" if one.cause is None else _failed(one.cause)),
            clean(one.answer),
        )
    names = [name for name in PHASES if any(name in one.phases for one in found)]
    phases: list[RenderableType] = [_phases(found, names), Text()] if names else []
    spent = {name: sum(one.phases.get(name, 0.0) for one in found) for name in names}
    again = f", of these {spent[REPLAYED]:.1f} s in steps that were trained again" if REPLAYED in spent else ""
    added = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in spent.items() if name != REPLAYED)
    text = f"{plural(len(found), 'attempt')}. Time of the slowest rank in each, added up: {added or '0 s'}{again}."
    slow = [Text(f"attempt {one.number}: {clean(part.what)}.") for one in found for part in one.slow]
    signs = [Text(f"attempt {one.number}: {clean(described(part))}") for one in found for part in one.findings]
    return Group(table, Text(), *phases, *slow, *signs, Text(text))


def _phases(found: Sequence[Attempt], names: Sequence[str]) -> Table:
    """The seconds of each phase in each attempt."""
    table = new_table("seconds of attempt", *names)
    for column in table.columns[1:]:
        column.justify = "right"
    for one in found:
        seconds = [f"{one.phases[name]:.1f}" if name in one.phases else "" for name in names]
        table.add_row(str(one.number), *seconds)
    return table


def _failed(cause: Cause) -> str:
    """What failed first."""
    what = reported.short(cause.what)
    return what if cause.kind in (STORE, SUPERVISOR) else f"rank {cause.rank}: {what}"


def _spares(spares: Spares | None) -> str:
    """How many nodes waited in reserve when an attempt ended, of those that were expected."""
    if spares is None:
        return ""
    return f"{'?' if spares.waiting is None else spares.waiting} of {spares.expected}"

"""`lastgood agent`: the agents of this user on this machine: their state, one in the foreground, and their end."""

from __future__ import annotations

import contextlib
import os
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from ..agent.server import serve
from ..errors import NotARun, Refused, TierDown
from ..format import commit
from ..run import access, agent_link, agent_messages, copying, memory_place, node_staging, paths
from ..units import size
from .answer import Answer
from .arguments import AnyStep, Json, Run, ranks_of
from .selection import pick
from .terminal import clean, progress
from .texts import named, new_table, plural

agent = typer.Typer(
    help="Agents keep saves in memory when the training process ends, and copy them.", no_args_is_help=True
)


@agent.command("status")
def status(
    run: Annotated[str, typer.Argument(metavar="[RUN]", help="One run; by default all that are in memory.")] = "",
    as_json: Json = False,
) -> Answer:
    """The memory of the runs of this user on this machine, and its agents. Exit code 5 if an agent does not answer.

    RUN may also be a directory that each node has for itself.
    """
    rows = [state_of(folder) for folder in ([_place_of(run).root] if run else _folders())]
    silent = [row for row in rows if row["agent"] == "silent"]
    return Answer({"runs": rows}, _view(rows), TierDown.exit_code if silent else 0)


@agent.command("run")
def run(
    run: Run,
    linger_seconds: Annotated[
        float, typer.Option("--linger", min=0.0, help="Seconds for which copied memory is kept. Default 600.")
    ] = agent_link.LINGER_SECONDS,
    as_json: Json = False,
) -> Answer:
    """Be the agent of RUN in the foreground, for a service manager. Ends when everything is copied, or on SIGTERM.

    RUN is the home of a run that is saved to memory, or a directory that each node has for itself.
    """
    place = _place_of(run)
    folder = place.root
    if place.kind == "memory":
        memory_place.make(folder)
    served = serve(place.url, linger_seconds)
    kept = os.path.isdir(folder)
    if not served:
        raise TierDown(f"{folder} has an agent already", safe="It goes on.", todo="lastgood agent status shows it.")
    text = "nothing was removed; the next opening of the run continues from it" if kept else "all is copied and removed"
    return Answer({"folder": folder, "removed": not kept}, Text(f"{folder}: {text}"))


@agent.command("stage")
def stage(
    run: Run,
    step: AnyStep = None,
    ranks: Annotated[
        str,
        typer.Option("--ranks", metavar="A-B", help="Only what these ranks wrote, such as 8-15. Default: all."),
    ] = "",
    from_place: Annotated[
        str, typer.Option("--from", metavar="PLACE", help="Another place of the run, which is read instead of RUN.")
    ] = "",
    as_json: Json = False,
) -> Answer:
    """Put a generation of RUN into the memory of this node, for a start that may come: a node in reserve, for example.

    RUN is the last place of a run that is saved to memory. The next start on this node reads it from memory.
    Run it again to bring in a newer generation; memory has room for both then. It is kept until a start uses it, or
    until its folder, which is printed, is removed.
    """
    tier = access.for_reading(from_place or run)
    survey = commit.survey(tier)
    if from_place:
        _require_one_run(run, from_place, survey)
    generation = pick(survey, step)
    of = ranks_of(ranks) if ranks else None
    with progress("staging", generation.bytes) as count_bytes:
        folder = node_staging.stage(tier, survey, run, generation, of, count_bytes)
    data = {"folder": folder, **named(generation.id), "bytes": _bytes_of(folder)}
    return Answer(data, Text(f"{folder} has step {generation.id.step}, {size(data['bytes'])} in memory"))


@agent.command("stop")
def stop(run: Run, as_json: Json = False) -> Answer:
    """Copy what only this node has of RUN to the places below, and end the agent. Memory is removed then.

    Exit code 5 if a training process has the run open, or if not everything could be copied; nothing is removed then.
    """
    folder = _place_of(run).root
    process = agent_link.process_of(folder)
    if process is None:
        raise NotARun(
            f"{folder} has no agent",
            safe="Nothing was touched.",
            todo="`lastgood agent run` copies the saves in it. `lastgood agent status` lists all memory of this user.",
        )
    request = agent_messages.Request(protocol=agent_link.PROTOCOL, call="end")
    try:
        answer = agent_link.answered(folder, request, stop=lambda: False, ends_hung=False)
    except (OSError, ValueError) as error:
        raise TierDown(
            f"the agent of {folder}, process {process}, does not answer: {error}",
            safe="What is in memory stays there.",
            todo=_remedy(process, folder),
        ) from error
    if answer.error:
        raise TierDown(
            f"{folder}: {answer.error}",
            safe="Nothing was removed.",
            todo=f"Try again later. What is in memory is given up, and its agent ends, with rm -r {folder}",
        )
    removed = not os.path.isdir(folder)
    text = "all is copied and removed" if removed else "all is copied, and nothing was removed"
    return Answer({"folder": folder, "removed": removed}, Text(f"{folder}: {text}"))


def _remedy(process: int | None, folder: str) -> str:
    """What to do about an agent that does not answer."""
    if process is None:
        return "Try again: it may just have ended."
    return (
        f"If it is stopped, kill -CONT {process} lets it go on; kill -9 {process} ends it. Then the next opening of "
        f"the run, or `lastgood agent run {folder}`, copies what is in memory."
    )


def _require_one_run(run: str, other: str, survey: commit.Survey) -> None:
    """Raise Refused if two places hold different runs. One that cannot be reached now is not asked."""
    with contextlib.suppress(TierDown):
        if copying.run_of(commit.survey(access.for_reading(run))) not in (None, copying.run_of(survey)):
            raise Refused(
                f"{run} and {other} hold different runs", safe="Nothing was touched.", todo="Check the paths."
            )


def state_of(folder: str) -> dict[str, Any]:
    """What a memory folder takes, and the state of its agent."""
    row: dict[str, Any] = {"folder": folder, "bytes": _bytes_of(folder), "attached": 0, "missing": [], "process": None}
    try:
        answer = agent_link.status(folder)
    except (OSError, ValueError):
        return {**row, "agent": "silent", "process": agent_link.process_of(folder)}
    if answer is None:
        return {**row, "agent": "none"}
    state = "attached" if answer.attached else "copying" if answer.copying else "waiting"
    found = {"attached": answer.attached, "missing": answer.missing, "process": answer.process}
    return {**row, **found, "agent": state}


def _place_of(run: str) -> paths.Place:
    """The memory of a run; or the directory itself, if that is one of which this node has an agent."""
    place = paths.parsed(run)
    if place.kind == "directory" and os.path.dirname(place.root) == memory_place.folder_of_user():
        return paths.Place(place.root, "memory")
    if place.kind == "memory" or (place.kind == "directory" and agent_link.read_spec(place.root) is not None):
        return place
    return paths.parsed(memory_place.url_of(run))


def _folders() -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        found = [one for one in os.scandir(memory_place.folder_of_user()) if one.is_dir(follow_symlinks=False)]
        return sorted(one.path for one in found if not one.name.endswith(memory_place.REMOVED))
    return []


def _bytes_of(folder: str) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
    return total


def _view(rows: list[dict[str, Any]]) -> RenderableType:
    if not rows:
        return Text(f"no run has memory in {memory_place.folder_of_user()}")
    table = new_table("memory", "size", "agent", "process")
    for row in rows:
        table.add_row(clean(row["folder"]), size(row["bytes"]), row["agent"], str(row["process"] or ""))
    missing = [Text(clean(f"{row['folder']}: {one}")) for row in rows for one in row["missing"]]
    heads = [Text(f"not copied: {plural(len(missing), 'place')}")] if missing else []
    silent = [row for row in rows if row["agent"] == "silent"]
    remedies = [
        Text(clean(f"{row['folder']}: its agent does not answer. {_remedy(row['process'], row['folder'])}"))
        for row in silent
    ]
    return Group(table, *heads, *missing, *remedies)

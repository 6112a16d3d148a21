"""`lastgood agent`: the agents of this user on this machine: their state, one in the foreground, and their end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from .. import reporting
from ..agent.server import serve
from ..errors import LastgoodError, NotARun, Refused, TierDown
from ..format import commit, layout
from ..ports import never
from ..run import access, agent_link, agent_messages, copying, memory_place, node_staging, paths, place_list
from ..run.left_behind import newer_in_memory
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

    RUN may also be a directory that each node has for itself. Exit code 3 if there is no such run.
    """
    if run and (nothing := _nothing_at(run)):
        raise nothing
    rows = [state_of(folder) for folder in (_folders_of(run) if run else _folders())]
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

    RUN is the home of a run that is saved to memory, or a directory that each node has for itself. A run that does not
    exist yet is waited for; exit code 3 if none has come before the agent ends.
    """
    place = _place_of(run)
    folder = place.root
    absent = _nothing_at(run)
    if absent:
        reporting.warning(
            f"{absent.what}, and no memory of it on this machine: this agent waits for a training process that makes "
            f"the run, and ends after {linger_seconds:.0f} s without one. If the run exists, check the path."
        )
    if place.kind == "memory":
        memory_place.make(folder)
    served = serve(place.url, linger_seconds)
    kept = os.path.isdir(folder)
    if not served:
        raise TierDown(
            f"{folder} has an agent already",
            safe="Nothing was touched.",
            todo="`lastgood agent status` shows its state.",
        )
    if absent and not kept and (nothing := _nothing_at(run)):  # guard: agent-without-run-fails
        raise NotARun(f"{nothing.what}, and no training process has made it", safe=nothing.safe, todo=nothing.todo)
    text = "nothing was removed; the next opening of the run continues from it" if kept else "its memory is removed"
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
    Run it again to bring in a newer generation, for which memory must have room beside the older one. It is kept until
    a start uses it, or until its folder, which is printed, is removed.
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
    A run that was deleted, and had everything, needs no copy. RUN may be a folder that `lastgood agent status` lists.
    """
    folder = _place_of(run).root
    process = agent_link.process_of(folder)
    if process is None:
        if paths.parsed(run).root != folder and (nothing := _nothing_at(run)) is not None:
            raise nothing
        raise NotARun(f"{folder} has no agent", safe="Nothing was touched.", todo=_without_agent(folder))
    request, left_out = agent_messages.Request(protocol=agent_link.PROTOCOL, call="end"), _left_out(run, folder)
    try:
        answer = agent_link.answered(folder, request, stop=never, ends_hung=False)
    except ValueError as error:  # it has answered, in another version
        raise TierDown(
            f"the agent of {folder}, process {process}, cannot be asked to end: {error}",
            safe="What is in memory stays there.",
            todo=f"kill {process} ends it. {_copied_next(folder)}",
        ) from error
    except OSError as error:
        raise TierDown(
            f"the agent of {folder}, process {process}, does not answer: {error}",
            safe="What is in memory stays there.",
            todo=_remedy(process, folder),
        ) from error
    if answer.error:
        raise TierDown(f"{folder}: {answer.error}", safe="Nothing was removed.", todo=_not_copied(folder, answer))
    removed = not os.path.isdir(folder)
    text = "all is copied and removed" if removed else "all is copied, and nothing was removed"
    if removed and answer.deleted:
        text = f"removed; {', '.join(answer.deleted)} had all of it before the run there was deleted or moved"
    if removed and answer.given_up:
        ids = [at for one in answer.given_up if (at := layout.parse_folder(one)) is not None]
        steps = ", ".join(str(at.step) for at in ids)
        text += f"; a save of which this node has no COMMIT was removed too (step {steps})"
    text += left_out if removed else ""
    data = {"folder": folder, "removed": removed, "deleted": answer.deleted, "given_up": answer.given_up}
    return Answer(data, Text(clean(f"{folder}: {text}")))


def _left_out(run: str, folder: str) -> str:
    """That a save in memory is not copied, because the run went on without it; else empty. Raises nothing."""
    with contextlib.suppress(LastgoodError):
        tier = access.for_reading(run)
        for one in newer_in_memory(place_list.listed(tier), [tier]):
            if one.place == f"{paths.MEMORY}{folder}" and one.abandoned:
                return f"; step {one.step}, which the run went on without, was in memory only, and is gone"
    return ""


def _without_agent(folder: str) -> str:
    """What to do about memory without an agent; it may not exist."""
    listed = "`lastgood agent status` lists all memory of this user."
    if not os.path.isdir(folder):
        return listed
    frees = f" rm -r {folder} gives them up." if _is_in_memory(folder) else ""
    return f"lastgood agent run {folder} copies the saves in it.{frees} {listed}"


def _not_copied(folder: str, answer: agent_messages.Answer) -> str:
    """What to do where an agent could not copy everything."""
    if answer.attached:
        return "End the training first: its agent then copies what only this node has."
    if not _is_in_memory(folder):
        return "Try again later. What is on this disk stays there, and the next opening of the run copies it."
    if answer.absent:
        return _absent(folder)
    return (
        "Try again later; the next opening of the run copies it too, also what waits for files of other nodes. "
        f"To give up what is in memory: rm -r {folder}, which ends its agent."
    )


def _absent(folder: str) -> str:
    """What to do about memory whose run is not where it was, and may never have had what is in memory."""
    return (
        f"Move the run back if it was moved, or mount its disk. If it was deleted on purpose, rm -r {folder} frees the "
        f"memory and ends its agent; lastgood copy memory://{folder} TARGET keeps elsewhere what it has."
    )


def _remedy(process: int | None, folder: str) -> str:
    """What to do about an agent that does not answer."""
    if process is None:
        return "Try again: it may just have ended."
    return f"If it is stopped, kill -CONT {process} lets it go on; kill -9 {process} ends it. {_copied_next(folder)}"


def _copied_next(folder: str) -> str:
    return f"Then the next opening of the run, or `lastgood agent run {folder}`, copies what is in memory."


def _require_one_run(run: str, other: str, survey: commit.Survey) -> None:
    """Raise Refused if two places hold different runs. One that cannot be reached now is not asked."""
    with contextlib.suppress(TierDown):
        if copying.run_of(commit.survey(access.for_reading(run))) not in (None, copying.run_of(survey)):
            raise Refused(
                f"{run} and {other} hold different runs", safe="Nothing was touched.", todo="Check the paths."
            )


def state_of(folder: str) -> dict[str, Any]:
    """What a memory folder takes, what lies on a disk because memory was short, and the state of its agent."""
    spec = agent_link.read_spec(folder)
    spill = spec.spill if spec is not None and spec.spill else ""
    row: dict[str, Any] = {"folder": folder, "bytes": _bytes_of(folder), "spill": spill, "spilled": _bytes_of(spill)}
    row |= {"attached": 0, "process": None, "missing": [], "absent": [], "deleted": [], "error": ""}
    try:
        answer = agent_link.status(folder)
    except ValueError as error:  # it has answered, in another version
        return {**row, "agent": "silent", "process": agent_link.process_of(folder), "error": str(error)}
    except OSError:
        return {**row, "agent": "silent", "process": agent_link.process_of(folder)}
    if answer is None:
        absent = [one.url for one in spec.places if _is_absent(one.url)] if spec is not None else []
        return {**row, "agent": "none", "absent": absent}
    state = "attached" if answer.attached else "copying" if answer.copying else "waiting"
    found = {name: getattr(answer, name) for name in ("attached", "process", "missing", "absent", "deleted", "error")}
    return {**row, **found, "agent": state}


def _place_of(run: str) -> paths.Place:
    """The memory of a run; or the directory itself, if that is one of which this node has an agent."""
    place = paths.parsed(run)
    if place.kind == "directory" and _is_in_memory(place.root):
        return paths.Place(place.root, "memory")
    if place.kind == "memory" or (place.kind == "directory" and agent_link.read_spec(place.root) is not None):
        return place
    return paths.parsed(memory_place.url_of(run))


def _nothing_at(run: str) -> NotARun | None:
    """The error that there is neither a run nor memory of one; None: there is, or its place cannot be asked now."""
    if os.path.isdir(_place_of(run).root):
        return None
    try:
        access.for_reading(run)
    except NotARun as error:
        return error
    except LastgoodError:
        pass
    return None


def _is_in_memory(folder: str) -> bool:
    return os.path.dirname(folder) == memory_place.folder_of_user()


def _is_absent(url: str) -> bool:
    """Whether a place is a directory that is not there."""
    place = paths.parsed(url)
    return place.kind == "directory" and not os.path.isdir(place.root)


def _folders_of(run: str) -> list[str]:
    """The memory of a run on this machine: of this node; where there is none, that of nodes with other names."""
    own, url = _place_of(run).root, paths.parsed(run).url
    if os.path.isdir(own):
        return [own]
    named = [(one, agent_link.read_spec(one)) for one in _folders()]
    return [one for one, spec in named if spec is not None and url in [place.url for place in spec.places]] or [own]


def _folders() -> list[str]:
    return [one for one in memory_place.folders() if not one.endswith(memory_place.REMOVED)]


def _bytes_of(folder: str) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
    return total


def _view(rows: list[dict[str, Any]]) -> RenderableType:
    if not rows:
        above = memory_place.folder_of_user()
        if os.path.lexists(above) and not memory_place.is_private(os.path.join(above, "run")):
            return Text(
                f"{above} is not of this user alone, so no run is saved there: name another tmpfs in "
                f"{memory_place.VARIABLE}"
            )
        return Text(f"no run has memory in {above}")
    table = new_table("memory", "size", "agent", "process")
    for row in rows:
        table.add_row(clean(row["folder"]), size(row["bytes"]), row["agent"], str(row["process"] or ""))
    missing = [Text(clean(f"{row['folder']}: {one}")) for row in rows for one in row["missing"]]
    heads = [Text(f"not copied: {plural(len(missing), 'place')}")] if missing else []
    remedies = [Text(clean(f"{row['folder']}: {text}")) for row in rows for text in _remedies(row)]
    return Group(table, *heads, *missing, *remedies)


def _remedies(row: dict[str, Any]) -> Iterator[str]:
    """What is to be said and done about the memory of a run."""
    folder = row["folder"]
    if row["agent"] == "none" and not os.path.isdir(folder):
        yield "nothing of this run is in the memory of this machine"
    if row["spilled"]:
        yield f"{size(row['spilled'])} of its saves lie in {row['spill']}, because memory was short"
    if row["error"]:
        yield f"{row['error']}. The next opening of the run replaces it; kill {row['process']} ends it"
    elif row["agent"] == "silent":
        yield f"its agent does not answer. {_remedy(row['process'], folder)}"
    elif row["agent"] == "none" and row["bytes"] and _is_in_memory(folder) and row["absent"]:
        yield f"it has no agent, and {', '.join(row['absent'])} is not there"
    elif row["agent"] == "none" and row["bytes"] and _is_in_memory(folder):
        yield f"it has no agent. The next opening of the run copies what only this memory has. {_without_agent(folder)}"
    if row["attached"] or not _is_in_memory(folder):
        return
    if row["absent"]:
        yield f"it is kept, with saves that may be nowhere else. {_absent(folder)}"
    elif row["deleted"]:
        places = ", ".join(row["deleted"])
        yield (
            f"{places} had all of it before the run there was deleted or moved. It is removed, and its agent ends, if "
            f"no training process comes for a while; at once: lastgood agent stop {folder}"
        )

"""`lastgood replay`: a training is started twice from one generation, and each of its next steps compared."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.text import Text

from ..errors import Damaged, Diverged, NoSpace, Refused
from ..format import commit
from ..io import os_errors, processes
from ..io.files import free_bytes
from ..records import Generation
from ..run import access, drill_scratch, paths, replay_request
from ..run.content import Content
from ..run.replay_request import Replay
from .answer import Answer
from .arguments import Json, Run
from .compare import compared
from .copying import copied
from .interrupts import ended_as_by_ctrl_c
from .replay_causes import by_group, usual_cause
from .selection import pick
from .terminal import clean
from .texts import new_table, plural

END_SECONDS = 15.0
"""how long a command may take to end after SIGTERM, once the replay is ended, before it is killed"""
TAIL_CHARACTERS = 3000
"""of the output of a command that failed"""


class Step(NamedTuple):
    """One step in both replays. `groups`: group of `replay_causes` that differs -> its first name. `first`: that of the
    first group; empty: no tensor and no value differs."""

    step: int
    metrics: tuple[dict[str, float], dict[str, float]]
    differing: int
    compared: int
    first: str
    groups: dict[str, str]


def replay(
    run: Run,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="Starts the training on RUN.")],
    steps: Annotated[int, typer.Option("--steps", min=1, help="So many steps are compared. Default 5.")] = 5,
    step: Annotated[
        str | None, typer.Option("--from", metavar="STEP", help="The generation; by default the newest good one.")
    ] = None,
    scratch: Annotated[
        str | None, typer.Option("--in", metavar="DIR", help="For the copies; by default the directory of RUN.")
    ] = None,
    as_json: Json = False,
) -> Answer:
    """Start COMMAND twice from one generation of RUN, and compare each of the next steps, bit by bit.

    Both work on copies: RUN is only read. They end after these steps. Exit code 6 if any tensor, value or metric
    differs. What does is named in the order of cause: samples, random numbers, other values, buffers, parameters,
    optimizer; with what usually causes the first. Example: lastgood replay runs/gpt -- python train.py
    """
    tier = access.for_reading(run)
    generation = pick(commit.survey(tier), step)
    parent = drill_scratch.parent_folder(run, scratch)
    _require_room(parent, 2 * (steps + 1) * generation.bytes, paths.parsed(run))
    with os_errors.translated(parent):
        made = tempfile.TemporaryDirectory(prefix="replay-", dir=parent)
    with ended_as_by_ctrl_c(), made as folder:
        sides = [Path(folder) / name for name in ("first", "second")]
        for source, side in ((run, sides[0]), (str(sides[0]), sides[1])):  # training may delete the generation
            _copy(source, str(side), generation)
        for side in sides:
            request = Replay(of=paths.parsed(run).url, run=str(side), until=generation.step + steps)
            _played(command, request, Path(folder) / f"{side.name}.log")
        found = _steps(sides, generation)
    same = all(not one.first and one.metrics[0] == one.metrics[1] for one in found)
    data = {"step": generation.step, "same": same, "steps": [one._asdict() for one in found]}
    return Answer(data, _view(found, same), 0 if same else Diverged.exit_code)


def _require_room(parent: str, needed: int, run: paths.Place) -> None:
    """Raise NoSpace if the copies do not fit, or need more than half of what is free on the disk of the run: a save of
    the job that finds a full disk deletes generations. Raises what `os_errors.at_path` returns too."""
    with os_errors.translated(parent):
        free = free_bytes(parent)
        beside = os.path.exists(run.root) and os.stat(parent).st_dev == os.stat(run.root).st_dev
    if free // (2 if beside else 1) < needed:  # guard: replay-needs-free-space
        half = ", of which it gets half" if beside else ""
        raise NoSpace(
            f"a replay of so many steps needs {needed:,} bytes in {parent}, free are {free:,}{half}",
            safe="Nothing was copied, and the rest is left for the saves of the job.",
            todo="Compare fewer steps (--steps), free space on this disk, or name another directory: --in DIR.",
        )


def _copy(source: str, target: str, generation: Generation) -> None:
    """Copy a generation. Raises Damaged if it is damaged, and what copying raises."""
    failed = copied(source, target, [f"{generation.step}-{generation.id.incarnation}"], take_over=False)["failed"]
    if failed:  # guard: replay-needs-its-generation
        raise Damaged(
            f"step {generation.step} cannot be copied: {failed[0]['why']}",
            safe="RUN was only read.",
            todo="Name another generation, --from STEP.",
        )


def _played(command: list[str], request: Replay, log: Path) -> None:
    """Run the command on a copy of the run. Raises Refused if it fails."""
    environment = {**os.environ, replay_request.VARIABLE: msgspec.json.encode(request).decode()}
    with open(log, "w") as output:
        try:
            process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            raise Refused(f"{command[0]} cannot be started: {error.strerror}", safe="RUN was only read.") from error
        try:
            processes.wait_unreaped(process)
        finally:
            processes.end_group_gently(process, END_SECONDS)  # guard: ended-replay-leaves-no-process
        code = process.returncode
    if code:
        tail = log.read_text(errors="replace")[-TAIL_CHARACTERS:]
        raise Refused(
            f"the command ended with status {code}:\n" + "\n".join(map(clean, tail.splitlines())),
            safe="RUN was only read.",
            todo="Give the command with which the training is started, after --.",
        )


def _steps(sides: list[Path], start: Generation) -> list[Step]:
    """The steps that both replays have made, in ascending order."""
    tiers = [access.for_reading(one) for one in sides]
    surveys = [commit.survey(one) for one in tiers]
    made = [
        {at.step: one for at, one in survey.generations.items() if at.incarnation != start.id.incarnation}
        for survey in surveys
    ]
    found = list[Step]()
    for number in sorted(made[0].keys() & made[1].keys()):
        first, second = (by_step[number] for by_step in made)
        contents = Content(tiers[0], first), Content(tiers[1], second)
        data = compared(*contents)
        groups = by_group(data, *contents)
        firsts = {group: names[0] for group, names in groups.items()}
        differing = sum(map(len, groups.values()))
        metrics = first.commit.metrics, second.commit.metrics
        names = {row["name"] for row in data["tensors"]}
        found.append(Step(number, metrics, differing, len(names), next(iter(firsts.values()), ""), firsts))
    if lacking := made[0].keys() ^ made[1].keys():
        raise Refused(
            f"the replays made different steps: only one of them made {', '.join(map(str, sorted(lacking)))}",
            safe="RUN was only read.",
            todo="Let the training depend on its state and arguments only, and not on the time, for example.",
        )
    if not found:
        raise Refused(
            "the command has made no step",
            safe="RUN was only read.",
            todo="It has to open a Checkpointer, call restore() and then step(n). A run that is done has none left.",
        )
    return found


def _view(found: list[Step], same: bool) -> RenderableType:
    table = new_table("step", "metrics", "in the second", "differing", "of", "first that differs")
    for one in found:
        texts = [", ".join(f"{name} {value!r}" for name, value in side.items()) for side in one.metrics]
        table.add_row(str(one.step), *map(clean, texts), str(one.differing), str(one.compared), clean(one.first))
    if same:
        return Group(table, Text(f"{plural(len(found), 'step')}, twice: the same, bit for bit", style="bold"))
    worst = next(one for one in found if one.first or one.metrics[0] != one.metrics[1])
    names = [f"{group} ({clean(name)})" for group, name in worst.groups.items()]
    verdict = f"From step {worst.step} on they differ: {', '.join(names) or 'a metric'}."
    return Group(table, Text(verdict, style="bold"), Text(f"Usually: {usual_cause(worst.groups)}."))

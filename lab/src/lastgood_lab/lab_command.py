"""The commands `lastgood lab NAME`, and the arguments that they share with those of `bench` (command.py)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from lastgood.cli.app import Answer
from lastgood.cli.interrupts import ended_as_by_ctrl_c
from lastgood.errors import Refused
from lastgood.io import os_errors
from lastgood.run import paths


def one_path(option: typer.CallbackParam, given: Path | None) -> Path | None:
    """Return the path that an option gives, with `~` expanded. Raises Refused for a URL."""
    return None if given is None else Path(paths.local(str(given), option.opts[0]))


def each_path(option: typer.CallbackParam, given: Sequence[Path]) -> list[Path | None]:
    """The same for an option that may be given several times."""
    return [one_path(option, one) for one in given]


def _directory(option: typer.CallbackParam, given: Path | None) -> Path | None:
    """Return the directory that an option gives, which need not exist. Raises Refused if a file is in its place."""
    given = one_path(option, given)
    for one in (given, *given.parents) if given is not None else ():
        if os.path.lexists(one) and not os.path.isdir(one):
            raise Refused(
                f"{option.opts[0]} {given}: {one} is no directory",
                safe="Nothing was run, and the file is untouched.",
                todo="Give a directory, or a path at which there is nothing yet.",
            )
    return given


Out = Annotated[
    Path,
    typer.Option(
        metavar="DIR", help="Directory for the journal, tables and figures.", show_default=False, callback=_directory
    ),
]
Place = Annotated[
    Path | None,
    typer.Option(
        "--place",
        metavar="DIR",
        help="Directory to save into, on the disk to measure (default: --out).",
        callback=_directory,
    ),
]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds, each of which measures every contender once.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

lab = typer.Typer(
    help="Run experiments that try to break a promise in many trials. They resume where they stopped.",
    no_args_is_help=True,
)
Trials = Annotated[int, typer.Option(min=1, help="Trials of each kind.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed from which every trial is drawn.")]
Jobs = Annotated[int, typer.Option(min=1, help="Processes that run trials.")]


@lab.command()
def corrupt(out: Out, trials: Trials = 400, seed: Seed = 0, jobs: Jobs = 2, as_json: Json = False) -> Answer:
    """Change committed bytes: which layer detects it, and is the state rebuilt, rolled back, or loaded wrong?"""
    from . import corrupt as experiment
    from .trials import Options

    return _tried(experiment, Options(out, trials, seed, jobs), out)


@lab.command()
def crash(out: Out, trials: Trials = 400, seed: Seed = 0, jobs: Jobs = 2, as_json: Json = False) -> Answer:
    """Kill a process at every step of the commit protocol, in all three write modes: is the run usable afterwards?"""
    from . import crash as experiment
    from .trials import Options

    return _tried(experiment, Options(out, trials, seed, jobs), out)


@lab.command()
def latency(out: Out, trials: Trials = 400, seed: Seed = 0, place: Place = None, as_json: Json = False) -> Answer:
    """Measure the latency of a save in the three write modes, from 192 KB to 1 GB."""
    from . import latency as experiment

    return _tried(experiment, experiment.Options(out, trials, seed, place=place), out)


@lab.command()
def timeline(
    out: Out,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds to train.")] = 20.0,
    place: Place = None,
    as_json: Json = False,
) -> Answer:
    """Record disk activity and the events of saves, as a figure and as a trace file for Perfetto."""
    from . import timeline as experiment

    return _tried(experiment, experiment.Options(out, seconds, place=place), out)


@lab.command()
def peers(out: Out, trials: Trials = 200, seed: Seed = 0, jobs: Jobs = 2, as_json: Json = False) -> Answer:
    """Apply the same damage, kills and failing writes to torch.save, DCP and lastgood."""
    from . import peers as experiment
    from .trials import Options

    return _tried(experiment, Options(out, trials, seed, jobs), out)


@lab.command()
def powerloss(
    out: Out,
    trials: Annotated[int, typer.Option(min=1, help="Trials of each fault, file system and write mode.")] = 40,
    seed: Seed = 0,
    jobs: Jobs = 2,
    plays: Annotated[
        int, typer.Option(min=1, help="Times that each scenario of the crash model is played in each write mode.")
    ] = 3,
    as_json: Json = False,
) -> Answer:
    """Test crash states in a model of a disk and, as root, power loss on ext4, xfs and btrfs in image files."""
    from . import powerloss as experiment

    return _tried(experiment, experiment.Options(out, trials, seed, jobs, plays), out)


@lab.command()
def scale(out: Out, place: Place = None, as_json: Json = False) -> Answer:
    """Measure the cost of a save's records with up to 16,384 ranks and a million pieces."""
    from . import scale as experiment

    return _tried(experiment, experiment.Options(out, place=place), out)


@lab.command()
def outage(
    out: Out,
    saves: Annotated[int, typer.Option(min=1, help="Saves of each phase: server up, down, up again.")] = 100,
    place: Place = None,
    as_json: Json = False,
) -> Answer:
    """Take the bucket behind a directory away for many saves: what the loop waits, memory, disk, what is missing."""
    from . import outage as experiment

    return _tried(experiment, experiment.Options(out, saves, place=place), out)


@lab.command()
def placement(out: Out, trials: Trials = 2000, seed: Seed = 0, jobs: Jobs = 2, as_json: Json = False) -> Answer:
    """Draw failures of nodes and racks: how often are all copies of a part lost, with 16 to 4,096 nodes?"""
    from . import placement as experiment

    return _tried(experiment, experiment.Options(out, trials, seed, jobs), out)


@lab.command()
def wire(out: Out, rounds: Rounds = 5, as_json: Json = False) -> Answer:
    """Measure the processor time of sender and receiver for each GB between two nodes, in every mode of the wire."""
    from . import wire as experiment

    return _tried(experiment, experiment.Options(out, rounds), out)


@lab.command()
def recovery(
    out: Out,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each suite.")] = 5,
    suites: Annotated[str, typer.Option(help="Suites such as digits-resnet18-base,photos-resnet50-late.")] = "",
    size: Annotated[
        str,
        typer.Option(
            metavar="NAME=NUMBER,...",
            help="Fields of study.unit.Size that differ: scale=5,width=16. Several values make a sweep: every=50:100.",
        ),
    ] = "",
    condition: Annotated[
        str, typer.Option(help="How it fails: exit, kill, hang, errors, delayed, nan, node or elastic.")
    ] = "exit",
    storage: Annotated[str, typer.Option(help="Where it saves: disk, objects, memory or peers.")] = "disk",
    cifar: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder with CIFAR's unpacked archives (the Python version).", callback=one_path
        ),
    ] = None,
    as_json: Json = False,
) -> Answer:
    """Reproduce ECRL's recovery study: failures under `lastgood run`, with blocking and with overlapped saves."""
    from .report import command_line
    from .study import matrix, sweep, tables
    from .study.unit import sized

    only = tuple(filter(None, suites.split(",")))
    options = matrix.Options(out=out, seeds=seeds, only=only, cifar=cifar, condition=condition, storage=storage)
    with ended_as_by_ctrl_c():
        if ":" in size:
            found = sweep.run(sweep.cells(size, options), report_progress, command_line())
            gates = sweep.write(found, options, command_line())
        else:
            options = replace(options, size=sized(size, cifar is not None))
            gates = tables.write(matrix.run(options, report_progress), options, command_line())
    text = (out / "analysis.md").read_text()
    return Answer({"lab": "recovery", "gates": gates}, Text(text), code=6 if any(gates.values()) else 0)


def _tried(experiment: Any, options: Any, out: Path) -> Answer:
    """Run an experiment, write its report, and return it as the answer."""
    from . import trials
    from .report import command_line, today

    make(out)
    with ended_as_by_ctrl_c():
        rows = experiment.run(options, report_progress)
    found = experiment.report(rows, options)
    files = trials.write(found, summary := experiment.summary(rows), out, command_line(), today())
    written = "\n".join(f"wrote {path}" for path in files)
    data = {"lab": found.name, "files": [str(path) for path in files], **summary}
    return Answer(data, Text(f"{found.markdown(command_line(), today())}\n{written}"))


def make(out: Path) -> None:
    """Make the directory of --out. Raises what `os_errors.at_path` returns."""
    with os_errors.translated(str(out)):
        out.mkdir(parents=True, exist_ok=True)


def report_progress(line: str) -> None:
    """Print a line of progress of a benchmark or an experiment."""
    print(line, file=sys.stderr, flush=True)

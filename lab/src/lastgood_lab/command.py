"""The commands `lastgood bench NAME`, `lastgood lab NAME` and `lastgood report`: their arguments and answers.

They are entry points of the group "lastgood.commands". Every command of lastgood imports this module, because the help
lists these commands, too. Therefore torch and matplotlib are imported only when a benchmark runs.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from rich.text import Text

from lastgood.cli.app import Answer
from lastgood.errors import Refused
from lastgood.run import paths
from lastgood.units import size as size_text

app = typer.Typer(
    help="Measure lastgood and other packages on this machine. Long runs show progress and resume where they stopped.",
    no_args_is_help=True,
)
Out = Annotated[
    Path, typer.Option(metavar="DIR", help="Directory for the journal, tables and figures.", show_default=False)
]
Place = Annotated[
    Path | None,
    typer.Option("--place", metavar="DIR", help="Directory to save into, on the disk to measure (default: --out)."),
]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds, each of which measures every contender once.")]
Scale = Annotated[
    float, typer.Option(min=0.001, max=1, help="Size of the networks, as a share of their published parameters.")
]
Work = Annotated[
    float,
    typer.Option(min=0.001, max=4, help="Size of the batch, as a share of the standard one: shorter or longer steps."),
]
Writers = Annotated[int, typer.Option(min=1, help="Writer threads of each save.")]
Device = Annotated[str, typer.Option(help="Device of the tensors: cpu or cuda.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


class Benchmark(Protocol):
    """The interface of a module that is a benchmark: it measures, and makes a report of its measurements."""

    def run(self, options: Any, progress: Any) -> Sequence[Any]: ...
    def report(self, rows: Any, options: Any) -> Any: ...


@app.command()
def durable(
    out: Out,
    place: Place = None,
    only: Annotated[list[str], typer.Option(help="Measure only this contender; may be given several times.")] = [],  # noqa: B006
    scale: Scale = 1.0,
    rounds: Rounds = 5,
    device: Device = "cpu",
    as_json: Json = False,
) -> Answer:
    """Time a durable write of one large state and the caller's wait, beside raw direct I/O, torch.save and DCP."""
    from . import durable as bench
    from .contenders import CONTENDERS

    _require_known(only, CONTENDERS, "--only")
    return _measured(bench, bench.Options(out, place, only, scale, rounds, device), out)


@app.command()
def interval(
    out: Out,
    place: Place = None,
    models: Annotated[str, typer.Option(help="Networks, comma-separated, or `all`.")] = "gpt2-124m",
    policies: Annotated[str, typer.Option(help="Checkpointing policies, comma-separated, or `all`.")] = "all",
    intervals: Annotated[str, typer.Option(help="Steps between saves, comma-separated.")] = "1,10,25,50,100",
    scale: Scale = 1.0,
    work: Work = 1.0,
    rounds: Rounds = 5,
    least_steps: Annotated[int, typer.Option(min=1, help="Smallest number of timed steps of a measurement.")] = 10,
    kills: Annotated[
        int,
        typer.Option(min=0, help="Kills for each policy and interval of the first model; 0: recovery is not measured."),
    ] = 3,
    in_flight: Annotated[int, typer.Option(min=1, help="Saves in flight (PCcheck and lastgood).")] = 2,
    writers: Writers = 2,
    chunk_mib: Annotated[int, typer.Option(min=1, help="Size of the chunks that policies copy, MiB.")] = 8,
    memory_mib: Annotated[int, typer.Option(min=0, help="Bound of the arena, MiB; 0: the size of the state.")] = 0,
    device: Device = "cpu",
    as_json: Json = False,
) -> Answer:
    """Measure training throughput and recovery time at each interval between saves, for each policy."""
    from . import interval as bench
    from .models import MODELS
    from .policies import POLICIES
    from .policy import Settings

    options = bench.Options(
        out,
        place,
        _chosen(models, list(MODELS), "--models"),
        _chosen(policies, list(POLICIES), "--policies"),
        tuple(_whole(one, "--intervals") for one in intervals.split(",")),
        scale,
        work,
        rounds,
        least_steps,
        kills,
        device,
        Settings(in_flight, writers, chunk_mib << 20, memory_mib << 20),
    )
    return _measured(bench, options, out)


@app.command()
def goodput(
    out: Out,
    trace: Annotated[list[Path], typer.Option(metavar="FILE", help="A spot trace; may be given several times.")],
    journal: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Journal of `bench interval` (default: the one in --out)."),
    ] = None,
    model: Annotated[str, typer.Option(help="Network whose measurements in the journal are used.")] = "gpt2-124m",
    scale: Annotated[
        float | None, typer.Option(help="Measurements with this --scale, if the journal has several.")
    ] = None,
    work: Annotated[
        float | None, typer.Option(help="Measurements with this --work, if the journal has several.")
    ] = None,
    policy: Annotated[
        str, typer.Option(help="Policy of the given costs, which determines the published formula.")
    ] = "lastgood",
    intervals: Annotated[
        str, typer.Option(help="Steps between saves, comma-separated, for given costs.")
    ] = "1,10,25,50,100",
    step_seconds: Annotated[
        float,
        typer.Option(min=0, help="Seconds of a step (t). If given, costs are those of the options, not of a journal."),
    ] = 0.0,
    stall_seconds: Annotated[float, typer.Option(min=0, help="Seconds by which a save delays the loop.")] = 0.0,
    save_seconds: Annotated[float, typer.Option(min=0, help="Seconds until a save is durable (Tw).")] = 0.0,
    load_seconds: Annotated[float, typer.Option(min=0, help="Seconds of loading (l).")] = 0.0,
    restart_seconds: Annotated[float, typer.Option(min=0, help="Seconds from a failure until loading begins.")] = 0.0,
    in_flight: Annotated[int, typer.Option(min=1, help="Saves in flight (N).")] = 1,
    as_json: Json = False,
) -> Answer:
    """Compute goodput at each interval when a spot trace is replayed, and by the published formula."""
    from . import goodput as bench
    from .replay import Costs

    given = [
        Costs(
            policy,
            _whole(one, "--intervals"),
            step_seconds,
            stall_seconds,
            save_seconds,
            load_seconds,
            restart_seconds,
            in_flight,
        )
        for one in intervals.split(",")
        if step_seconds
    ]
    source = journal or (None if given else out / "interval.journal.jsonl")
    return _measured(bench, bench.Options(out, trace, source, model, given, scale, work), out)


@app.command()
def size(
    out: Out,
    place: Place = None,
    sizes_mib: Annotated[
        str, typer.Option(help="Sizes of the state, MiB, comma-separated.")
    ] = "1,4,16,64,256,1024,4096",
    knob_mib: Annotated[
        int, typer.Option(min=0, help="Size of the state with which each option is varied, MiB; 0: vary none.")
    ] = 512,
    burst: Annotated[int, typer.Option(min=1, help="Saves in a row when an option is varied.")] = 6,
    rounds: Rounds = 5,
    device: Device = "cpu",
    as_json: Json = False,
) -> Answer:
    """Time saves of states of several sizes, and with several values of each option of a Checkpointer."""
    from . import size as bench

    sizes = tuple(_whole(one, "--sizes-mib") for one in sizes_mib.split(","))
    return _measured(bench, bench.Options(out, place, sizes, knob_mib, burst, rounds, device), out)


@app.command()
def restore(out: Out, place: Place = None, scale: Scale = 1.0, rounds: Rounds = 5, as_json: Json = False) -> Answer:
    """Time a verified restore of one large state, beside a raw direct read, torch.load and dcp.load."""
    from . import restore as bench

    return _measured(bench, bench.Options(out, place, scale, rounds), out)


@app.command()
def objects(out: Out, place: Place = None, scale: Scale = 1.0, rounds: Rounds = 5, as_json: Json = False) -> Answer:
    """Time saves to a local S3 server and restores from it, beside obstore's own requests and DCP, with their CPU."""
    from . import objects as bench

    return _measured(bench, bench.Options(out, place, scale, rounds), out)


@app.command()
def tensors(
    out: Out,
    place: Place = None,
    counts: Annotated[
        str, typer.Option(help="Numbers of tensors of the state, comma-separated.")
    ] = "10,100,1000,10000,100000",
    rounds: Rounds = 5,
    in_flight: Annotated[int, typer.Option(min=1, help="Saves in flight while memory is measured.")] = 2,
    as_json: Json = False,
) -> Answer:
    """Measure time, metadata and memory of a save as the number of tensors grows."""
    from . import tensors as bench

    return _measured(
        bench,
        bench.Options(out, place, tuple(_whole(one, "--counts") for one in counts.split(",")), rounds, in_flight),
        out,
    )


@app.command()
def guard(
    out: Out,
    mib: Annotated[int, typer.Option(min=1, help="Size of the state, MiB.")] = 1024,
    rounds: Rounds = 5,
    as_json: Json = False,
) -> Answer:
    """Measure the cost of verification, beside reading memory, and the cost of parity."""
    from . import guard as bench

    return _measured(bench, bench.Options(out, mib, rounds), out)


@app.command()
def ranks(
    out: Out,
    mib: Annotated[int, typer.Option(min=1, help="Size of the state of all ranks, MiB.")] = 768,
    rounds: Rounds = 5,
    place: Place = None,
    as_json: Json = False,
) -> Answer:
    """Time saves and loads by several processes, beside torch.distributed.checkpoint."""
    from . import ranks as bench

    return _measured(bench, bench.Options(out, mib, rounds=rounds, place=place), out)


@app.command()
def gpu(out: Out, place: Place = None, as_json: Json = False) -> Answer:
    """Run `durable` and `interval` on CUDA in about eight minutes, with a short table at the end."""
    import torch

    if not torch.cuda.is_available():
        raise Refused(
            "torch.cuda.is_available() is false here", safe="Nothing was measured.", todo="Run it on a CUDA machine."
        )
    from . import gpu as bench

    return _measured(bench, bench.Options(out, place), out)


def _measured(bench: Benchmark, options: Any, out: Path) -> Answer:
    """Run a benchmark, write its report, and return it as the answer."""
    from .report import command_line, today

    out.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # from DCP, at every save
        found = bench.report(bench.run(options, _report_progress), options)
    command = command_line()
    files = found.write(out, command, today())
    text = found.markdown(command, today())
    written = "\n".join(f"wrote {path}" for path in files)
    data = {"bench": found.name, "files": [str(path) for path in files], "rows": list(found.rows)}
    return Answer(data, Text(f"{text}\n{written}"))


def _report_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _chosen(text: str, known: Sequence[str], option: str) -> tuple[str, ...]:
    names = tuple(known) if text == "all" else tuple(text.split(","))
    _require_known(names, known, option)
    return names


def _require_known(names: Sequence[str], known: Any, option: str) -> None:
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{option}: {name!r} is not one of {', '.join(known)}.")


def _whole(text: str, option: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise typer.BadParameter(f"{option}: {text!r} is not a whole number >= 1.")
    return int(text)


# ---- lab -----------------------------------------------------------------------------------------------------

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


def _tried(experiment: Any, options: Any, out: Path) -> Answer:
    """Run an experiment, write its report, and return it as the answer."""
    from . import trials
    from .report import command_line, today

    out.mkdir(parents=True, exist_ok=True)
    rows = experiment.run(options, _report_progress)
    found = experiment.report(rows, options)
    files = trials.write(found, summary := experiment.summary(rows), out, command_line(), today())
    written = "\n".join(f"wrote {path}" for path in files)
    data = {"lab": found.name, "files": [str(path) for path in files], **summary}
    return Answer(data, Text(f"{found.markdown(command_line(), today())}\n{written}"))


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Directories that bench and lab wrote.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="File of the page.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "lastgood: measurements",
    as_json: Json = False,
) -> Answer:
    """Write one self-contained page with the tables and figures of every bench and lab in these directories."""
    from . import page

    folders = [Path(paths.local(str(one), "DIR")) for one in folders]
    out = Path(paths.local(str(out), "--out"))
    data = {"file": str(out), "bytes": (length := page.write(folders, out, title)), "folders": [*map(str, folders)]}
    return Answer(data, Text(f"{out}: {size_text(length)}"))

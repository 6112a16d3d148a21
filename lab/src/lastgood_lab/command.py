"""The commands `lastgood bench NAME` and `lastgood report`: their arguments and answers. For `lab`: lab_command.py.

They are entry points of the group "lastgood.commands". Every command of lastgood imports this module, because the help
lists these commands, too. Therefore torch and matplotlib are imported only when a benchmark runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from rich.text import Text

from lastgood.cli.app import Answer
from lastgood.cli.interrupts import ended_as_by_ctrl_c
from lastgood.errors import Refused
from lastgood.run import paths
from lastgood.units import size as size_text

from .lab_command import Json, Out, Place, Rounds, each_path, make, one_path, report_progress
from .lab_command import lab as lab

app = typer.Typer(
    help="Measure lastgood and other packages on this machine. Long runs show progress and resume where they stopped.",
    no_args_is_help=True,
)
Scale = Annotated[
    float, typer.Option(min=0.001, max=1, help="Size of the networks, as a share of their published parameters.")
]
Work = Annotated[
    float,
    typer.Option(min=0.001, max=4, help="Size of the batch, as a share of the standard one: shorter or longer steps."),
]
Writers = Annotated[int, typer.Option(min=1, help="Writer threads of each save.")]


def _device(given: str) -> str:
    """Return the device that an option gives. Raises Refused unless torch has it here."""
    if given != "cpu":
        import torch

        known = ["cpu"]
        if torch.cuda.is_available():
            known += ["cuda", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        if given not in known:
            raise Refused(
                f"--device {given}: torch has {', '.join(known)} here",
                safe="Nothing was measured.",
                todo="Give one of these, or install a torch for this device.",
            )
    return given


Device = Annotated[str, typer.Option(help="Device of the tensors: cpu or cuda.", callback=_device)]


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
    trace: Annotated[
        list[Path],
        typer.Option(metavar="FILE", help="A spot trace; may be given several times.", callback=each_path),
    ],
    journal: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Journal of `bench interval` (default: the one in --out).", callback=one_path
        ),
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
def memory(out: Out, place: Place = None, scale: Scale = 1.0, rounds: Rounds = 5, as_json: Json = False) -> Answer:
    """Measure saves to the memory of the machine and to a directory: processor, what the loop waits, and restores."""
    from . import memory as bench

    return _measured(bench, bench.Options(out, place, scale, rounds), out)


@app.command()
def peer(out: Out, place: Place = None, scale: Scale = 1.0, rounds: Rounds = 5, as_json: Json = False) -> Answer:
    """Time a restore from the memory of another node, beside one TCP stream of the same bytes."""
    from . import peer_restore as bench

    return _measured(bench, bench.Options(out, place, scale, rounds), out)


@app.command("slow-peer")
def slow_peer(out: Out, place: Place = None, rounds: Rounds = 5, as_json: Json = False) -> Answer:
    """Time the steps of a loop whose saves are copied to another node that is slow, or does not answer."""
    from . import slow_peer as bench

    return _measured(bench, bench.Options(out, place, rounds), out)


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
def trace(
    out: Out,
    trace: Annotated[Path, typer.Option(metavar="FILE", help="A spot trace (docs/bench.md).", callback=one_path)],
    place: Place = None,
    compress: Annotated[float, typer.Option(min=1, help="Divides the time of the trace.")] = 10.0,
    until: Annotated[float, typer.Option(min=0, help="Seconds of the trace that are replayed; 0: all.")] = 0.0,
    interval: Annotated[int, typer.Option(min=1, help="Steps between two saves.")] = 5,
    device_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds of each step in which the processor waits, as for a device.")
    ] = 0.2,
    as_json: Json = False,
) -> Answer:
    """Replay a failure trace through real supervisors, agents and loops, and for the policies of papers."""
    from . import trace_bench as bench

    return _measured(bench, bench.Options(out, trace, place, compress, until, interval, device_seconds), out)


@app.command()
def restart(out: Out, place: Place = None, rounds: Rounds = 5, as_json: Json = False) -> Answer:
    """Time a crash and a hang to the first new step, under `lastgood run` and under torchrun, split by phase."""
    from . import restart as bench

    return _measured(bench, bench.Options(out, place, rounds), out)


@app.command()
def overhead(
    out: Out,
    place: Place = None,
    rounds: Rounds = 5,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of ten steps in each segment.")] = 4,
    width: Annotated[int, typer.Option(min=1, help="Width of the four layers; wider ones, longer steps.")] = 512,
    as_json: Json = False,
) -> Answer:
    """Measure what the heartbeat and the Sentinel add to a training step, by paired segments in one process."""
    from . import overhead as bench

    return _measured(bench, bench.Options(out, place, rounds, blocks, width), out)


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

    make(out)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # from DCP, at every save
        with ended_as_by_ctrl_c():
            rows = bench.run(options, report_progress)
        found = bench.report(rows, options)
    command = command_line()
    files = found.write(out, command, today())
    text = found.markdown(command, today())
    written = "\n".join(f"wrote {path}" for path in files)
    data = {"bench": found.name, "files": [str(path) for path in files], "rows": list(found.rows)}
    return Answer(data, Text(f"{text}\n{written}"))


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

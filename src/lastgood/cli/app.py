"""The command line. Asks the rooms below and tells; makes no rule.

A command returns an Answer; only `main` prints it, so that `--json`, pipes and exit codes are the same everywhere.
torch is imported for `.pt` files only. Exit codes: docs/cli.md.
"""

from __future__ import annotations

import functools
import importlib.metadata
import io
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import RenderableType
from rich.text import Text

from .. import __version__, units
from ..convert import exporting, importing
from ..engine import guard
from ..errors import (
    Damaged,
    LastgoodError,
    MissingBlob,
    NoSuchStep,
    NotFinite,
    NothingGood,
    NotInstalled,
    Unavailable,
)
from ..format import commit, layout
from ..format.commit import Survey
from ..policy import restore
from ..policy import sizing as sums
from ..policy.retention import KEEP, Keep
from ..records import LAYERS, Finding, Generation, GenerationId
from ..run import access, paths
from ..run.content import Content
from ..run.reader import WORKERS
from ..run.watched import Watched
from . import compare, completion, mending, sizing, sweep, tuning
from . import show as views
from .protection import unprotected
from .terminal import clean, console, progress

USAGE, DIFFERS, INTERRUPTED, BROKEN_PIPE = 2, 7, 130, 141
GUESTS = "lastgood.commands"
"""entry points of other packages: a typer.Typer is a group, `lastgood NAME COMMAND`; a function is one command"""
LAB = ("bench", "lab", "report")
"""commands that the package lastgood-lab brings"""
KINDS = (".safetensors", ".pt", ".pth")

# typer carries its own copy of click, or uses click's, depending on its version; this is the class in either.
UsageError: type[Any] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    help="Look at a run of lastgood, check it, clean it, and take tensors out of it or into it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Run = Annotated[str, typer.Argument(metavar="RUN", help="Directory of the run.", show_default=False)]
Step = Annotated[str, typer.Argument(metavar="STEP", help="4000, or 4000-9f3ac21b to name the incarnation too.")]
AnyStep = Annotated[
    str | None,
    typer.Argument(
        metavar="STEP",
        help="4000, or 4000-9f3ac21b to name the incarnation too; without it, what a restore would take.",
        show_default=False,
        autocompletion=completion.steps,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


class Answer(NamedTuple):
    """What a command has to say: as data, and for people."""

    data: dict[str, Any]
    view: RenderableType
    code: int = 0
    error: bool = False
    note: str = ""
    """for people, on stderr, whatever stdout is"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. A bug in this package leaves as a traceback, exit code 1."""
    args = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that this terminal cannot show is no failure
    try:
        answer = _answer(args)
        if isinstance(answer, int):
            return answer
        if "--json" in args:
            print(json.dumps(answer.data, indent=2, allow_nan=False))
        else:
            whole = answer.error or isinstance(answer.view, Text)  # a message or a report is never cut in a pipe
            console(stderr=answer.error).print(answer.view, soft_wrap=whole)
        sys.stdout.flush()
        if answer.note:
            console(stderr=True).print(Text(answer.note, style="yellow"), soft_wrap=True)
        return answer.code
    except BrokenPipeError:  # whoever read our output has gone: no more to say, also not at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (KeyboardInterrupt, typer.Abort):
        print("lastgood: interrupted", file=sys.stderr)
        return INTERRUPTED


def _answer(args: list[str]) -> Answer | int:
    try:
        answer: Answer | int | None = _face_with_guests()(args=args, prog_name="lastgood", standalone_mode=False)
        return answer or 0
    except UsageError as error:
        if "--json" not in args:
            error.show()
            return USAGE
        told = {"error": "Usage", "message": error.format_message(), "safe": "Nothing was touched.", "todo": ""}
        return Answer(told, "", USAGE, True)
    except LastgoodError as error:
        told = {"error": type(error).__name__, "message": error.what, "safe": error.safe, "todo": error.todo}
        lines = Text.assemble(("lastgood: ", "bold red"), clean(error.what, "\n"))
        for part in (error.safe, error.todo):
            lines.append("\n" + clean(part.strip(), "\n") if part else "")
        return Answer(told, lines, error.exit_code, True)


@functools.cache
def _face_with_guests() -> typer.Typer:
    """The command line with the commands that other packages bring."""
    guests = {guest.name: guest.load() for guest in importlib.metadata.entry_points(group=GUESTS)}
    for name, commands in guests.items():
        if isinstance(commands, typer.Typer):
            app.add_typer(commands, name=name)
        else:
            app.command(name)(commands)
    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    for name in LAB:
        if name not in guests:
            app.command(name, hidden=True, add_help_option=False, context_settings=anything)(_lab_is_not_installed)
    return app


def _lab_is_not_installed(context: typer.Context) -> Answer:
    raise NotInstalled(f"`lastgood {context.info_name}`", "lastgood-lab", "pip install lastgood-lab")


def find(survey: Survey, wanted: str) -> GenerationId:
    """The generation that a STEP names: of several the lineage's, else the newest. Raises NoSuchStep."""
    found = re.fullmatch(r"(\d{1,12})(?:-([0-9a-f]{8}))?", wanted)
    if not found:
        raise typer.BadParameter(f"{wanted!r} is no STEP: give 4000, or 4000-9f3ac21b as `lastgood ls` shows them.")
    chain, lost = restore.lineage(survey)
    others = views.newest_first(survey, {*survey.generations, *survey.broken})
    known = dict.fromkeys([*chain, *others, *lost, *survey.witnessed])
    for at in known:
        if at.step == int(found[1]) and found[2] in (None, at.incarnation):
            return at
    there = ", ".join(map(str, sorted({at.step for at in known}))) or "none"
    raise NoSuchStep(
        f"no generation of step {wanted}", safe="Nothing was touched.", todo=f"Steps that are there: {there}."
    )


def pick(survey: Survey, wanted: str | None) -> Generation:
    """The generation that a STEP names, or what a restore would take. Raises what is wrong with it, NothingGood."""
    if wanted is None:
        choice = restore.choose(survey, None)
        if choice.candidates:
            return survey.generations[choice.candidates[0]]
        if choice.passed_over:
            told = "\n".join(f"  step {at.step}: {reason}" for at, reason in choice.passed_over)
            raise NothingGood(f"no generation of this run is good:\n{told}", todo="\nName a STEP to look at it.")
        raise restore.no_such_step(views.NOTHING_YET, survey)
    at = find(survey, wanted)
    if at in survey.broken:
        raise survey.broken[at]
    if at not in survey.generations:
        raise MissingBlob(f"{at} is lost: its COMMIT is gone", blob=f"{layout.folder(at)}/{layout.COMMIT}")
    return survey.generations[at]


# ---- looking ---------------------------------------------------------------------------------------------------


@app.callback(invoke_without_command=True)
def _face(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"lastgood {__version__}")
        raise typer.Exit


@app.command("ls")
def list_run(run: Run, as_json: Json = False) -> Answer:
    """Every generation of a run, newest first, and which one a restore would take."""
    tier = access.for_reading(run)
    data = views.listing(tier, commit.survey(tier))
    return Answer(data, views.listing_view(data))


@app.command()
def show(
    run: Run,
    step: AnyStep = None,
    depth: Annotated[int | None, typer.Option(min=1, help="Levels of the tree; what is below is counted.")] = None,
    as_json: Json = False,
) -> Answer:
    """What a generation holds: names, types, shapes, bytes, aliases, values. Reads no tensor."""
    tier = access.for_reading(run)
    survey = commit.survey(tier)
    data = views.contents(survey, Content(tier, pick(survey, step)), tier.place)
    return Answer(data, views.contents_view(data, depth))


@app.command()
def verify(
    run: Run,
    step: AnyStep = None,
    every: Annotated[bool, typer.Option("--all", help="Every generation, abandoned ones too.")] = False,
    without: Annotated[
        list[str],
        typer.Option(metavar="LAYER", help=f"A layer that does not look: {', '.join(LAYERS)}.", show_default=False),
    ] = [],  # noqa: B006 - typer's way to say "none"; it makes a list of its own
    as_json: Json = False,
) -> Answer:
    """Read a generation past the page cache and check every byte. Changes nothing.

    Exit code 4 on damage, 8 where all is intact and something holds NaN or infinity that must not.

    Without STEP: what a restore would take, and what is newer and known to be damaged or lost.
    """
    if every and step is not None:
        raise typer.BadParameter("STEP and --all exclude each other.")
    if unknown := set(without) - set(LAYERS):
        raise typer.BadParameter(f"no layer {', '.join(sorted(unknown))}: there are {', '.join(LAYERS)}.")
    layers = [one for one in LAYERS if one not in without]
    if not layers:
        raise typer.BadParameter("--without every layer leaves nothing to check.")
    tier = access.for_reading(run)
    survey = commit.survey(tier)
    bad = {at: [guard.finding(error)] for at, error in survey.broken.items()}
    gone = Finding(kind="MissingBlob", what="its COMMIT is gone", layer="structure")
    bad |= {at: [gone] for at in restore.lineage(survey).lost}
    if every:
        wanted = views.newest_first(survey, {*survey.generations, *bad})
    elif step is not None:
        wanted = [find(survey, step)]
    else:
        candidates, over = restore.choose(survey, None)
        wanted = [at for at, _ in over if not candidates or at.step >= candidates[0].step] + candidates[:1]
        known = {at: survey.generations[at] for at in wanted if at in survey.generations and at not in candidates}
        bad |= {at: one.damaged or one.unfit for at, one in known.items()}
        if not wanted:
            raise restore.no_such_step(views.NOTHING_YET, survey)
    results, lacking = [], unprotected(tier, survey)
    total = sum(survey.generations[at].bytes for at in wanted if at not in bad)
    with progress("reading", total) as seen, ThreadPoolExecutor(WORKERS) as workers:
        for at in wanted:
            begun = time.monotonic()
            findings = (
                bad[at] if at in bad else sweep.damage(Watched(tier, seen), survey.generations[at], workers, layers)
            )
            read_bytes = 0 if at in bad else survey.generations[at].bytes
            seconds = time.monotonic() - begun
            results.append(views.verified(at, findings, read_bytes, seconds, lacking.get(at, "")))
    data = {
        "place": tier.place,
        "good": all(one["good"] for one in results),
        "intact": all(one["intact"] for one in results),
        "layers": layers,
        "generations": results,
    }
    code = 0 if data["good"] else NotFinite.exit_code if data["intact"] else Damaged.exit_code
    return Answer(data, views.verified_view(data), code)


@app.command()
def diff(
    run: Run,
    step1: Annotated[str, typer.Argument(metavar="STEP1", show_default=False)],
    step2: Annotated[str, typer.Argument(metavar="STEP2", show_default=False)],
    as_json: Json = False,
) -> Answer:
    """Which tensors and values differ between two generations, and how much. Exit code 7 when any does."""
    tier = access.for_reading(run)
    survey = commit.survey(tier)
    one, two = pick(survey, step1), pick(survey, step2)
    with progress("comparing", one.bytes + two.bytes) as seen:
        data = compare.compared(Watched(tier, seen), one, two)
    return Answer(data, compare.compared_view(data), 0 if data["same"] else DIFFERS)


# ---- changing ----------------------------------------------------------------------------------------------------


@app.command()
def gc(
    run: Run,
    keep_last: Annotated[
        int | None,
        typer.Option(min=1, help="Keep the newest N verified generations; older ones go.", show_default=False),
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option(min=1, help="Beside them (3, if not said) keep every N-th step.", show_default=False),
    ] = None,
    damaged: Annotated[bool, typer.Option("--damaged", help="Delete what is damaged or lost, too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing; say what would go.")] = False,
    as_json: Json = False,
) -> Answer:
    """Finish deletions and clear saves that did not end; with --keep-*, delete what retention lets go.

    Milestones and the newest verified generation always stay. Before any goes, the newest is read and checked.
    """
    keep = Keep(last=keep_last or KEEP.last, every=keep_every) if keep_last or keep_every else None
    data = sweep.swept(run, keep, damaged, dry_run)
    code = Damaged.exit_code if data["damaged"] else Unavailable.exit_code if data["stuck"] else 0
    return Answer(data, sweep.swept_view(data), code)


@app.command()
def scrub(
    run: Run,
    rate: Annotated[
        int | None,
        typer.Option(metavar="SIZE", parser=tuning.bytes_of, help="Bytes a second, at most.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> Answer:
    """Read every generation again, past the page cache; mark what is damaged, and rebuild it where there is parity.

    After one that is damaged come its neighbours in time. Exit code 4 where one stays damaged, 8 where one is not good.
    """
    data = mending.scrubbed(run, rate or float("inf"))
    code = 0 if data["good"] else NotFinite.exit_code if data["intact"] else Damaged.exit_code
    return Answer(data, mending.scrubbed_view(data), code)


@app.command()
def repair(
    run: Run,
    step: AnyStep = None,
    known: Annotated[bool, typer.Option("--known", help="Read only what is known to be damaged already.")] = False,
    as_json: Json = False,
) -> Answer:
    """Read STEP, or every generation, and rebuild what is damaged from parity. Exit code 4 where that is too much.

    A damaged file stays until its replacement is durable and was read back.
    """
    survey = commit.survey(access.for_reading(run))
    data = mending.repaired(run, find(survey, step) if step else None, known)
    return Answer(data, mending.repaired_view(data), 0 if data["good"] else Damaged.exit_code)


@app.command()
def export(
    run: Run,
    step: AnyStep = None,
    *,
    to: Annotated[
        str,
        typer.Option(
            metavar="TARGET",
            help="model.safetensors or model.pt; a folder: model.dcp of torch.distributed.checkpoint, model/ of "
            "Hugging Face.",
            show_default=False,
        ),
    ],
    only: Annotated[
        str | None,
        typer.Option(metavar="PREFIX", help="Tensors under this name, which is taken off.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file when it is there.")] = False,
    shard: Annotated[
        int, typer.Option(metavar="SIZE", parser=tuning.bytes_of, help="Of a file of Hugging Face's: 5GB.")
    ] = "5GB",  # type: ignore[assignment]  # typer parses it
    as_json: Json = False,
) -> Answer:
    """Write the tensors of a generation, verified on the way. The file or folder appears whole or not at all."""
    to = paths.local(to, "--to")
    _require_kind(to, (*KINDS, ".dcp", "/"))
    tier = access.for_reading(run)
    survey = commit.survey(tier)
    generation = pick(survey, step)
    with progress("exporting", generation.bytes) as seen:
        data = exporting.export(Watched(tier, seen), generation, to, only, force, shard)
    count = views.plural(data["tensors"], "tensor")
    text = f"{data['file']}: {count}, {units.size(data['bytes'])}, from {generation.id}"
    text += "".join(f"\n  {name}: {dtype}, written as its bytes (U8)" for name, dtype in data["as_bytes"].items())
    newer = restore.choose(survey, None).passed_over if step is None else []
    over = [(at, why) for at, why in newer if at.step >= generation.step]
    data["stepped_over"] = [{**views.named(at), "why": why} for at, why in over]
    note = "\n".join(f"stepped over {at}: {clean(why)}" for at, why in over)
    return Answer(data, Text(clean(text, "\n")), note=note)


@app.command("import")
def import_file(
    file: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="model.safetensors, model.pt, or a folder of torch.distributed.checkpoint or of Hugging Face.",
            show_default=False,
        ),
    ],
    run: Run,
    step: Annotated[int, typer.Option(min=0, max=layout.STEP_LIMIT - 1, help="Of the new generation.")] = 0,
    under: Annotated[
        str,
        typer.Option(
            metavar="PREFIX", help="Put the names under this one: the opposite of export --only.", show_default=False
        ),
    ] = "",
    as_json: Json = False,
) -> Answer:
    """Make a new generation from a file or folder, and verify it. Nothing that lies in there is run."""
    file = paths.local(file, "SOURCE")
    if not importing.is_known_folder(file):
        _require_kind(file, KINDS)
    with importing.opened(file, under) as source:
        total = sum(one.length for one in source.tensors)
        with progress("importing", 2 * total) as seen:
            generation = importing.bring(source, run, step, seen)
    data = {
        "place": access.directory(run),
        **views.named(generation.id),
        "verified": generation.verified,
        "tensors": len(source.tensors),
        "aliases": len(source.aliases),
        "values": len(source.values),
        "bytes": generation.bytes,
    }
    text = f"{generation.id}: {views.plural(len(source.tensors), 'tensor')}, {units.size(total)}, verified"
    return Answer(data, Text(text))


# ---- measuring ---------------------------------------------------------------------------------------------------


@app.command()
def tune(
    run: Run,
    *,
    state_bytes: Annotated[
        int,
        typer.Option(metavar="SIZE", parser=tuning.bytes_of, help="What one save holds: 1.5GB.", show_default=False),
    ],
    step_seconds: Annotated[
        float,
        typer.Option(metavar="SECONDS", parser=tuning.positive, help="One step, no save.", show_default=False),
    ],
    memory: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            parser=tuning.bytes_of,
            help="Bound of the staging memory; without it, one state.",
            show_default=False,
        ),
    ] = None,
    disk: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            parser=tuning.bytes_of,
            help="Bound of the run on the disk; without it, what is free.",
            show_default=False,
        ),
    ] = None,
    overhead: Annotated[
        float, typer.Option(metavar="PART", parser=tuning.share, help="By how much saving may slow training.")
    ] = 0.03,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller samples: some 20 s instead of 120 at most.")] = False,
    as_json: Json = False,
) -> Answer:
    """Measure this disk and memory beside RUN, and say how often to save and with which settings.

    RUN need not exist. Everything that is written is removed; run it while nothing else is at work here.
    """
    data = tuning.tuned(run, state_bytes, step_seconds, memory, disk, overhead, quick)
    return Answer(data, tuning.tuned_view(data))


@app.command()
def plan(
    parameters: Annotated[
        float | None, typer.Option(metavar="COUNT", parser=tuning.positive, help="1e12.", show_default=False)
    ] = None,
    bytes_per_parameter: Annotated[
        float,
        typer.Option(metavar="BYTES", parser=tuning.positive, help="14: bf16 weights, fp32 master and two moments."),
    ] = 14.0,
    state_bytes: Annotated[
        int | None,
        typer.Option(metavar="SIZE", parser=tuning.bytes_of, help="Instead of these two.", show_default=False),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="That share the state evenly.")] = 1,
    copy_rate: Annotated[
        int | None,
        typer.Option(metavar="SIZE", parser=tuning.bytes_of, help="Bytes a second, each rank's snapshot."),
    ] = None,
    write_rate: Annotated[
        int | None, typer.Option(metavar="SIZE", parser=tuning.bytes_of, help="Bytes a second, all ranks together.")
    ] = None,
    restore_rate: Annotated[
        list[str], typer.Option(metavar="NAME=SIZE", help="Of a tier, bytes a second; several times.")
    ] = [],  # noqa: B006
    mtbf_seconds: Annotated[
        float | None, typer.Option(metavar="SECONDS", parser=tuning.positive, help="M, of the whole job.")
    ] = None,
    device_days: Annotated[
        float | None, typer.Option(metavar="DAYS", parser=tuning.positive, help="Mean days until one device fails.")
    ] = None,
    devices: Annotated[int | None, typer.Option(min=1, help="How many of them (default: --ranks).")] = None,
    stall_seconds: Annotated[
        float | None, typer.Option(metavar="SECONDS", parser=tuning.positive, help="C, instead of shard / copy rate.")
    ] = None,
    write_seconds: Annotated[
        float | None, typer.Option(metavar="SECONDS", parser=tuning.positive, help="Tw, instead of state / write rate.")
    ] = None,
    in_flight: Annotated[int, typer.Option(min=1, help="N.")] = 1,
    restart_seconds: Annotated[
        float,
        typer.Option(metavar="SECONDS", parser=tuning.not_negative, help="R, from a failure until training goes on."),
    ] = 0.0,
    minutes: Annotated[str, typer.Option(metavar="LIST", help="Intervals to weigh: 5,15,60.")] = "",
    run_days: Annotated[
        float | None, typer.Option(metavar="DAYS", parser=tuning.positive, help="Length of the run.")
    ] = None,
    as_json: Json = False,
) -> Answer:
    """Size a job on paper: its state, a save, how often to save, what failures cost. Nothing is measured."""
    mtbf = mtbf_seconds or (sums.mtbf_seconds(device_days, devices or ranks) if device_days else None)
    held = state_bytes or (sums.state_bytes(parameters, bytes_per_parameter) if parameters else None)
    if mtbf is None and held is None:
        raise typer.BadParameter("give the state (--parameters or --state-bytes), failures (--mtbf-seconds), or both.")
    data = sizing.sized(
        state_bytes=held,
        ranks=ranks,
        copy_rate=copy_rate,
        write_rate=write_rate,
        tiers=[sizing.tier(one) for one in restore_rate],
        mtbf_seconds=mtbf,
        stall_seconds=stall_seconds,
        write_seconds=write_seconds,
        in_flight=in_flight,
        restart_seconds=restart_seconds,
        intervals=[60 * tuning.positive(one) for one in minutes.split(",") if minutes],
        run_days=run_days,
    )
    if minutes and not data["intervals"]:
        raise typer.BadParameter(
            "--minutes needs M (--mtbf-seconds, or --device-days) and C (--stall-seconds, or --copy-rate and a state)."
        )
    return Answer(data, sizing.sized_view(data))


def _require_kind(path: str, kinds: tuple[str, ...]) -> None:
    if not path.endswith(kinds):
        raise typer.BadParameter(f"{path!r}: give a name that ends in {', '.join(kinds)}.")


if __name__ == "__main__":
    sys.exit(main())

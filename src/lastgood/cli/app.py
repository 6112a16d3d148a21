"""The command line: registers the commands, runs one, prints its answer.

Each command is in a module of its own; scrub and repair share one.

A command returns an Answer, which `main` prints, so that `--json`, pipes and exit codes are the same everywhere.
torch is imported for `.pt` files and folders of torch.distributed.checkpoint only. Exit codes: docs/cli.md.
"""

from __future__ import annotations

import functools
import importlib.metadata
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, TextIO

import typer
from rich.text import Text

from .. import __version__
from ..errors import LastgoodError, NotInstalled, Unavailable
from . import (
    agent,
    attempts,
    compare,
    copying,
    drill,
    exporting,
    importing,
    listing,
    mending,
    replay,
    run,
    show,
    sizing,
    sweep,
    tiers,
    tuning,
    verify,
)
from .answer import BROKEN_PIPE, INTERRUPTED, USAGE
from .answer import Answer as Answer
from .terminal import clean, console

GUESTS = "lastgood.commands"
"""entry points of other packages: a typer.Typer is a group, `lastgood NAME COMMAND`; a function is one command"""
LAB = ("bench", "lab", "report")
"""commands that the package lastgood-lab brings"""

# typer carries its own copy of click, or uses click's, depending on its version; this is the class in either.
UsageError: type[Any] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    help="Look at a run of lastgood, check it, clean it, and take tensors out of it or into it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"lastgood {__version__}")
        raise typer.Exit


PASSED_ON = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}
"""Settings of `run`, which parses its arguments as torchrun does."""

# Help lists the commands in this order.
app.command("run", context_settings=PASSED_ON)(run.run)
app.command("attempts")(attempts.attempts)
app.command("ls")(listing.list_run)
app.command("show")(show.show)
app.command("verify")(verify.verify)
app.command("diff")(compare.diff)
app.command("replay")(replay.replay)
app.command("gc")(sweep.gc)
app.command("scrub")(mending.scrub)
app.command("repair")(mending.repair)
app.command("copy")(copying.copy)
app.command("tiers")(tiers.tiers)
app.command("drill")(drill.drill)
app.command("export")(exporting.export)
app.command("import")(importing.import_file)
app.command("tune")(tuning.tune)
app.command("plan")(sizing.plan)
app.add_typer(agent.agent, name="agent")


def _open_standard_streams() -> None:
    """Let standard streams that are closed, as by `>&-`, lead to /dev/null, also in processes that this one starts: a
    file of a run, or one with the output of a rank, must not get their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the life of the process


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code. A bug in this package ends in a traceback, with exit code 1.

    `argv`: the arguments without the name of the program (default: those of this process).
    """
    args = list(sys.argv[1:] if argv is None else argv)
    _open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names that this terminal cannot show are escaped
    try:
        answer = _answer(args)
        if not isinstance(answer, int):
            return _printed(answer, _as_json(args))
        sys.stdout.flush()  # help, or the version
        return answer
    except BrokenPipeError:  # the reader of our output has ended
        return _discarded(sys.stdout, BROKEN_PIPE)
    except SystemExit as end:  # typer found a broken pipe while it printed help
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        return _discarded(sys.stdout, BROKEN_PIPE)
    except (KeyboardInterrupt, typer.Abort):
        print("lastgood: interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:  # of help, which typer prints; any other one is a bug
        try:
            print(flush=True)  # fails where stdout is what failed, buffered or not
        except OSError:
            return _output_lost(error)
        raise


def _printed(answer: Answer, as_json: bool) -> int:
    """Print an answer; returns the exit code. Raises BrokenPipeError."""
    try:
        if as_json:
            print(json.dumps(answer.data, indent=2, allow_nan=False))
        else:
            whole = answer.error or isinstance(answer.view, Text)  # a message or a report is never cut in a pipe
            console(stderr=answer.error).print(answer.view, soft_wrap=whole, crop=False)
        sys.stdout.flush()
        if answer.note:
            console(stderr=True).print(Text(answer.note, style="yellow"), soft_wrap=True)
        return answer.code
    except BrokenPipeError:
        raise
    except OSError as error:  # as on a full disk
        return _output_lost(error)


def _output_lost(error: OSError) -> int:
    """Report that stdout cannot be written; returns the exit code."""
    _discarded(sys.stdout)
    try:
        print(f"lastgood: the output cannot be written: {error.strerror}", file=sys.stderr)
        print("Only the output is lost: what the command did is done.", file=sys.stderr)
    except OSError:
        _discarded(sys.stderr)
    return Unavailable.exit_code


def _discarded(stream: TextIO, code: int = 0) -> int:
    """Let a stream write to nowhere, so that Python's own flush at the end does not fail. Returns `code`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code


def _answer(args: list[str]) -> Answer | int:
    try:
        answer: Answer | int | None = _face_with_guests()(args=args, prog_name="lastgood", standalone_mode=False)
        return answer or 0
    except UsageError as error:
        if not _as_json(args):
            error.show()
            return USAGE
        data = {"error": "Usage", "message": error.format_message(), "safe": "Nothing was touched.", "todo": ""}
        return Answer(data, "", USAGE, True)
    except LastgoodError as error:
        data = {"error": type(error).__name__, "message": error.what, "safe": error.safe, "todo": error.todo}
        lines = Text.assemble(("lastgood: ", "bold red"), clean(error.what, "\n"))
        for part in (error.safe, error.todo):
            lines.append("\n" + clean(part.strip(), "\n") if part else "")
        return Answer(data, lines, error.exit_code, True)


def _as_json(args: list[str]) -> bool:
    """Whether the answer is asked for as JSON; not by an argument of the user's own program."""
    own = args[: args.index("--")] if "--" in args else args
    return "--json" in own and own[0] != "run"


@functools.cache
def _face_with_guests() -> typer.Typer:
    """The command line with the commands that other packages bring as entry points of the group GUESTS."""
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
    raise NotInstalled(
        f"`lastgood {context.info_name}`", "lastgood-lab", "pip install ./lab, in a checkout of lastgood"
    )


if __name__ == "__main__":
    sys.exit(main())

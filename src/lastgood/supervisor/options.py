"""The options of `lastgood run`: names, defaults, and what each takes. Refuses nothing but what no option takes.

The first ones are those of torchrun, with the same names, defaults and environment variables.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence

from ..errors import Refused
from ..policy.hang import Limits
from ..policy.recovery import Budget
from ..policy.slow import Pace
from . import policy_file
from .option_values import (
    cause_restarts,
    factor,
    filters,
    local_ranks,
    meant,
    names,
    port,
    positive_seconds,
    remedies,
    seconds,
    signals,
    slow_factor,
    whole,
)
from .policy_file import Policy
from .rendezvous_options import ADDRESS, STATIC_PORT

NO_ID = "none"
"""--rdzv-id, if it is not given"""
NO_EVENTS = "null"
"""--event-log-handler, if it is not given"""
NUMA = ["node", "socket", "exclusive", "core-complex"]
"""values of --numa-binding"""
OTHER_VARIABLES = {"shutdown_timeout": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"}
"""option -> a further variable of its value, which torchrun takes where the option is not given"""


class _Parser(argparse.ArgumentParser):
    """Raises Refused where argparse would end the process."""

    def error(self, message: str) -> None:  # type: ignore[override]
        unknown = re.search(r"unrecognized arguments: (--[^ =]+)", message)
        hint = f"{meant(unknown[1], self._option_string_actions)} " if unknown else ""
        several = re.search(r"ambiguous option: .* could match (.*)", message)
        options = {one.replace("_", "-") for one in several[1].split(", ")} if several else set()
        if len(options) == 1:  # one option, with dashes and with underscores
            hint = f"Did you mean {options.pop()}? "
        todo = f"{hint}lastgood run --help lists the arguments.".lstrip()
        raise Refused(message, safe="Nothing was started.", todo=todo)


class _Options:
    """Adds options to a parser, each with its default. `environ`: None: they have none."""

    def __init__(
        self, made: argparse.ArgumentParser, environ: Mapping[str, str] | None, policy: Mapping[str, str]
    ) -> None:
        self._made, self._environ, self._policy = made, environ, policy

    def option(self, *names: str, **settings: object) -> None:
        """An option. `settings`: those of argparse."""
        dest = names[-1].lstrip("-").replace("-", "_")
        default = self._policy.get(dest, settings.pop("default", None))
        environ = self._environ
        default = argparse.SUPPRESS if environ is None else environ.get(variable(dest, environ), default)
        if settings.get("action") == "store_true" and self._environ is not None:
            default = default == "1"
        self._made.add_argument(*names, default=default, **settings)  # type: ignore[arg-type]

    def both(self, name: str, **settings: object) -> None:
        """An option that may be written with dashes or with underscores."""
        self.option(*dict.fromkeys((f"--{name.replace('-', '_')}", f"--{name}")), **settings)


def parser(environ: Mapping[str, str] | None, policy: Policy | None = None) -> argparse.ArgumentParser:
    """The parser. The default of an option --name is its variable of the environment, as for torchrun, else what the
    policy file says. `environ`: None: options that are not given are left out of what the parser returns.
    """
    made = _Parser(prog="lastgood run", description="Start the ranks of a training script, and start them again.")
    options = _Options(made, environ, {} if policy is None else policy.values)
    _add_those_of_torchrun(options)
    _add_own(options)
    _add_watching(options)
    _add_nodes(options)
    _add_health(options)
    made.add_argument("training_script", help="The script, with its arguments after it.")
    made.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return made


def split(arguments: Sequence[str], known: Mapping[str, argparse.Action]) -> tuple[list[str], list[str]]:
    """The arguments up to the script, and those of the script. argparse would take an option of the script for a short
    form of one of its own, and refuse --run, which may be --run-path or --run_path. `known`: the options, by name.
    """
    at = 0
    while at < len(arguments) and arguments[at].startswith("-"):
        text = arguments[at]
        if text == "--":
            at += 1
            break
        found = [known[text]] if text in known else [one for name, one in known.items() if name.startswith(text)]
        at += 2 if found and found[0].nargs != 0 else 1
    return [*arguments[: at + 1]], [*arguments[at + 1 :]]


def variable(dest: str, environ: Mapping[str, str]) -> str:
    """The variable of the environment for an option: PET_NAME, or torch's other one if only that is there."""
    name = f"PET_{dest.upper()}"
    other = OTHER_VARIABLES.get(dest, name)
    return other if other in environ and name not in environ else name


def _add_those_of_torchrun(to: _Options) -> None:
    to.both("nnodes", default="1:1", help="Nodes of the job: a number, or the least and the most: 2:4.")
    to.both("nproc-per-node", default="1", help="Ranks: a number, or cpu, gpu, xpu, auto.")
    to.both("rdzv-backend", default="static", help="static, with --node-rank; or c10d.")
    to.both("rdzv-endpoint", default="", help="HOST:PORT of the node that holds their store, or of all that can.")
    to.both("rdzv-id", default=NO_ID, help="TORCHELASTIC_RUN_ID of the ranks. Default on one node: a new one.")
    to.both("rdzv-conf", default="", help="As for torchrun: join_timeout=600,last_call_timeout=30.")
    to.option("--standalone", action="store_true", help="As for torchrun: one node.")
    to.both("max-restarts", type=whole(0), help="Restarts in all. Default: no bound while newer steps are saved.")
    to.both("monitor-interval", type=seconds, default=0.1, help="Accepted; the end of a rank is noticed at once.")
    to.both("start-method", default="spawn", choices=["spawn", "fork", "forkserver"], help="Accepted, as for scripts.")
    to.both("event-log-handler", default=NO_EVENTS, help="Accepted; `lastgood attempts` has the events.")
    to.option("--role", default="default", help="ROLE_NAME of the ranks.")
    to.option("-m", "--module", action="store_true", help="The script is a module.")
    to.both("no-python", action="store_true", help="The script is a command.")
    to.both("run-path", action="store_true", help="Accepted: a script always runs by its path.")
    to.both("log-dir", help="Folder for the output of ranks.")
    to.option(
        "-r", "--redirects", default="0", help="Output that goes to files: 1 stdout, 2 stderr, 3 both; or 0:3,1:1."
    )
    to.option("-t", "--tee", default="0", help="Output that goes to files and to the console, as for --redirects.")
    to.both("local-ranks-filter", type=local_ranks, default="", help="The console gets the output of these ranks: 0,1.")
    duplicates = "Lines of --tee that have one of these texts go to filtered_{}.log as well: a,b."
    to.both("duplicate-stdout-filters", type=filters, default="", help=duplicates.format("stdout"))
    to.both("duplicate-stderr-filters", type=filters, default="", help=duplicates.format("stderr"))
    to.both("node-rank", type=whole(0), default=0, help="Number of this node, for --rdzv-backend static.")
    to.both(
        "master-addr", default=ADDRESS, help="With static, where the store of all nodes is; on one node, MASTER_ADDR."
    )
    port_help = (
        f"With static, the port of that store (default {STATIC_PORT}); on one node, MASTER_PORT (default: a new one)."
    )
    to.both("master-port", type=port, help=port_help)
    to.both("local-addr", help="Address of this node for the others.")
    to.both("logs-specs", help="Not done: it names a class of torchrun's agent.")
    to.both("numa-binding", choices=NUMA, help="Bind each rank to processors near its GPU.")
    ending = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    to.both("signals-to-handle", type=signals, default=ending, help="Signals that end the job.")
    to.both("shutdown-timeout", type=seconds, default=30.0, help="Seconds that ranks have to end after such a signal.")
    to.both("virtual-local-rank", action="store_true", help="Each rank sees its own GPU alone, as number 0.")


def _add_own(to: _Options) -> None:
    to.option("--spawn", action="store_true", help="Start each rank as a new process; it imports torch by itself.")
    to.option(
        "--preload", type=names, default="", help="Further modules that are imported before ranks are forked: a,b."
    )
    to.option(
        "--warm-ranks",
        action="store_true",
        help="While ranks train, a process for each rank of the next attempt waits, with torch imported and the CUDA "
        "context of its device, which takes memory of that device.",
    )
    to.option(
        "--without-progress",
        type=whole(1),
        default=Budget.without_progress,
        help="Attempts in a row that neither restore nor save a newer step, before the job is given up. "
        f"Default {Budget.without_progress}.",
    )
    to.option(
        "--cause-restarts",
        type=cause_restarts,
        default="",
        help="Restarts after failures of a cause, in all: hang=5,OutOfMemoryError=1. Default: no bound.",
    )
    to.option(
        "--remedies",
        type=remedies,
        default="back,skip",
        help="Against a failure that comes again: back, skip, or none. Default back,skip.",
    )
    to.option("--records", metavar="DIR", help="Directory for logs of steps, saves and attempts.")
    to.option(
        "--policy", help=f"File with options as `name: value`. Default: {policy_file.NAME} in this folder, if there."
    )


def _add_watching(to: _Options) -> None:
    to.option(
        "--hang-timeout",
        type=seconds,
        default=Limits.least_seconds,
        help=f"Least limit of a step in seconds; 0: no limits. Default {Limits.least_seconds:g}.",
    )
    to.option(
        "--hang-factor",
        type=factor,
        default=Limits.times,
        help=f"A step may last so many times the longest one. Default {Limits.times:g}.",
    )
    to.option(
        "--hang-long-timeout",
        type=seconds,
        help="Limit in seconds of what has no measure yet, as the first step, and of a save; at least --hang-timeout. "
        f"Default {Limits.long_seconds:g}, or --hang-timeout if that is longer. If given, it also ends the wait for a "
        "rank that has not opened its run; otherwise that is reported.",
    )
    to.option(
        "--slow-factor",
        type=slow_factor,
        default=Pace.factor,
        help="The slow rank is named when steps take so many times as long as usual, or as on the other ranks; 0: "
        f"never. Default {Pace.factor:g}.",
    )
    to.option(
        "--slow-window",
        type=positive_seconds,
        default=Pace.window_seconds,
        help=f"Seconds of training over which the duration of a step is taken. Default {Pace.window_seconds:g}.",
    )


def _add_nodes(to: _Options) -> None:
    to.option(
        "--spares",
        type=whole(0),
        default=0,
        help="Nodes beyond --nnodes that are expected in reserve; a missing one is reported. Default 0.",
    )
    to.option(
        "--stage",
        metavar="RUN",
        default="",
        help="While this node waits for others, its memory receives the newest generation of this run, which the last "
        "job must have opened with a tier in memory. It is removed at the end if no start has used it.",
    )
    to.option(
        "--quarantine-after",
        type=whole(0),
        default=3,
        help="So many failures in a row that point to one node leave it out, if others are there; 0: never. Default 3.",
    )


def _add_health(to: _Options) -> None:
    to.option(
        "--health-file", metavar="FILE", help="A fleet's own tool writes a line here for each fault of this node."
    )
    to.option(
        "--health-seconds",
        type=seconds,
        default=30.0,
        help="How often this node is examined (kernel log, GPUs, disks, --health-file); 0: never. Default 30.",
    )
    to.option(
        "--unhealthy",
        choices=["report", "leave"],
        default="report",
        help="With leave, the ranks save and this node ends (75; 143 without a last save) when it is likely to fail. "
        "Default report.",
    )

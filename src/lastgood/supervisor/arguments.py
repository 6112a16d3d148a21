"""The arguments of `lastgood run`: those of torchrun, with the same names, defaults and environment variables.

A flag replaces a variable of the environment, which replaces what the policy file says, which replaces the default.
What torchrun takes and this supervisor does not do is refused by name.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import shutil
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import Refused
from ..policy.hang import Limits
from ..policy.health import Unhealthy
from ..policy.recovery import Budget
from ..policy.slow import Pace
from ..run import paths
from . import devices, policy_file
from .option_values import fault
from .options import NO_EVENTS, NO_ID, parser, split, variable
from .outputs import NAMES, PREFIX, STDERR, STDOUT, TEMPLATE, Outputs
from .policy_file import Policy
from .program import Program
from .rendezvous_options import Options, Rendezvous, without_effect
from .rendezvous_options import rendezvous as several_nodes

PYTHON_VARIABLE = "PYTHON_EXEC"
"""what starts Python in place of this one, as for torchrun"""


@dataclass(frozen=True)
class Job:
    """What is started, and how."""

    program: Program
    ranks: int
    budget: Budget
    limits: Limits
    """of the time without progress"""
    pace: Pace
    """when steps count as slow"""
    master: tuple[str, int | None]
    """address, and port; None: a new one for each attempt"""
    role: str
    run_id: str
    log_dir: Path | None
    """where the output of ranks goes if it is redirected; None: a temporary folder"""
    outputs: Outputs
    """what is done with the output of ranks"""
    bindings: list[list[int]]
    """local rank -> the processors to which it is bound; empty: to none"""
    virtual_local_rank: bool
    """whether each rank sees its own device alone"""
    spawn: bool
    """whether ranks are started without a zygote"""
    preload: tuple[str, ...]
    """further modules that are imported before ranks are forked"""
    warm_ranks: bool
    """whether the processes of the next attempt are forked while ranks train"""
    shutdown_seconds: float
    signals: tuple[int, ...]
    """those that ask for the end of the job"""
    rendezvous: Rendezvous | None
    """with the other nodes of the job; None: there are none"""
    stage: str
    """the run whose newest generation is put into the memory of this node while it waits for others; empty: of none"""
    records: Path | None
    """where the ranks and the supervisor put their logs (run/job_logs.py); None: nowhere"""
    health_file: str | None
    """findings of a fleet's own tool about this node; None: it has none"""
    health_seconds: float
    """how often this node is examined; 0: never"""
    unhealthy: Unhealthy
    quarantine_after: int
    """So many failures in a row that point to one machine are the reason to leave it out; 0: never."""
    notes: Sequence[str]
    """lines to report: about the policy file, and options that have no effect"""


def parsed(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> Job:
    """Parse the arguments of one command, with the policy file. Raises Refused, and what `policy_file.read` raises."""
    without_defaults = parser(None)
    known = without_defaults._option_string_actions
    own, rest = split(arguments, known)
    given = without_defaults.parse_args(own)
    named_by = "--policy" if hasattr(given, "policy") else "PET_POLICY"
    path = policy_file.found(getattr(given, "policy", environ.get("PET_POLICY")))
    policy = None if path is None else policy_file.read(path, known, named_by)
    try:
        _check_variables(known, given, environ)
        args = parser(environ, policy).parse_args(own)
        return _job(args, rest, environ, "" if policy is None else _in_use(policy, given, environ))
    except Refused as error:
        sources = _sources(error.what, given, environ, policy)
        if not sources or type(error) is not Refused:
            raise
        raise Refused(f"{error.what} ({sources})", safe=error.safe, todo=error.todo) from error


def _require_program(kind: Literal["module", "command", "script"], name: str) -> None:
    """Raise Refused if there is no such script, or no command of this name."""
    if kind == "command" and shutil.which(name) is None:
        todo = "Make it executable (chmod +x)." if os.path.isfile(name) else "Give a program."
        raise Refused(f"there is no command {name}", safe="Nothing was started.", todo=todo)
    if kind == "script" and not os.path.exists(name):
        todo = "Give the path of the script."
        if shutil.which(name) is not None:
            todo += f" {name} is a command: leave it out, or put --no-python before it. A module: -m NAME."
        raise Refused(f"there is no file {name}", safe="Nothing was started.", todo=todo)
    if kind == "script" and not (os.path.isfile(name) or os.path.isdir(name)):
        todo = "Write the script to a file: each rank reads it, in each attempt."
        raise Refused(f"{name} is neither a file nor a folder", safe="Nothing was started.", todo=todo)


def _job(args: argparse.Namespace, rest: list[str], environ: Mapping[str, str], policy: str) -> Job:
    """What the options say. `rest`: the arguments of the script. `policy`: as in Job. Raises Refused."""
    _make_absolute(args)
    python = "" if args.no_python or args.run_path else _python(environ)
    _refuse(args, python)
    name = args.training_script
    kind: Literal["module", "command", "script"] = (
        "script" if args.run_path else "module" if args.module else "command" if args.no_python else "script"
    )
    _require_program(kind, name)
    program = Program(kind=kind, name=name, arguments=rest)
    if python:
        program = Program(kind="command", name=python, arguments=["-u", *(["-m"] if args.module else []), name, *rest])
    ranks = _ranks(args.nproc_per_node)
    if args.virtual_local_rank:
        devices.one_visible(ranks - 1, environ)  # raises if there are not enough
    nodes = _nodes(args)
    rendezvous, outputs = several_nodes(nodes), _outputs(args, ranks, environ)
    one_attempt = rendezvous is None and args.max_restarts == 0
    return Job(
        program=program,
        ranks=ranks,
        budget=Budget(
            restarts=args.max_restarts,
            without_progress=args.without_progress,
            remedies=args.remedies,
            of_causes=args.cause_restarts,
        ),
        limits=_limits(args.hang_timeout, args.hang_factor, args.hang_long_timeout),
        pace=Pace(args.slow_factor, args.slow_window),
        master=(args.master_addr, args.master_port),
        role=args.role,
        run_id=args.rdzv_id if rendezvous or args.rdzv_id != NO_ID else str(uuid.uuid4()),
        log_dir=Path(args.log_dir) if args.log_dir not in (None, "", os.devnull) else None,
        outputs=outputs,
        bindings=devices.bindings(args.numa_binding, ranks) if args.numa_binding else [],
        virtual_local_rank=args.virtual_local_rank,
        spawn=args.spawn or program.kind == "command",
        preload=args.preload,
        warm_ranks=args.warm_ranks and not one_attempt,
        shutdown_seconds=args.shutdown_timeout,
        signals=args.signals_to_handle,
        rendezvous=rendezvous,
        stage=_staged(args.stage, rendezvous),
        records=Path(args.records) if args.records else None,
        health_file=args.health_file or None,
        health_seconds=args.health_seconds,
        unhealthy=args.unhealthy,
        quarantine_after=args.quarantine_after,
        notes=[
            *([policy] if policy else []),
            *without_effect(nodes),
            *_without_effect(args, outputs, ranks, one_attempt),
        ],
    )


def _make_absolute(args: argparse.Namespace) -> None:
    """Put absolute paths in the place of those that are written to or read from here. Raises Refused, as for a URL."""
    for dest in ("log_dir", "records", "health_file"):
        if text := getattr(args, dest):
            setattr(args, dest, paths.absolute(text, f"--{dest.replace('_', '-')}"))


def _check_variables(
    known: Mapping[str, argparse.Action], given: argparse.Namespace, environ: Mapping[str, str]
) -> None:
    """Raise Refused for a variable of the environment that an option does not take, where no flag replaces it.

    argparse asks neither whether a default is one of the choices, nor anything of switches.
    """
    for option in known.values():
        name = variable(option.dest, environ)
        text = environ.get(name)
        if text is not None and not hasattr(given, option.dest) and (why := fault(option, text)):
            todo = f"Correct or unset {name}; a flag replaces it."
            raise Refused(f"{name}: {why}", safe="Nothing was started.", todo=todo)


def _sources(what: str, given: argparse.Namespace, environ: Mapping[str, str], policy: Policy | None) -> str:
    """Where the options that an error names come from, if not from the command line."""
    found = dict[str, str]()
    for dest in (name.replace("-", "_") for name in re.findall(r"--([a-z_-]+)", what)):
        if not hasattr(given, dest) and variable(dest, environ) in environ:
            found[dest] = variable(dest, environ)
        elif not hasattr(given, dest) and policy is not None and dest in policy.values:
            found[dest] = policy.path
    return ", ".join(f"--{dest.replace('_', '-')} comes from {source}" for dest, source in found.items())


def _in_use(policy: Policy, given: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """A line about a policy file, with those of its values that nothing replaces."""
    used = [
        f"--{dest.replace('_', '-')} {text}"
        for dest, text in policy.values.items()
        if not hasattr(given, dest) and variable(dest, environ) not in environ
    ]
    return f"policy from {policy.path}: {' '.join(used) or 'nothing of it is in use'}"


def _python(environ: Mapping[str, str]) -> str:
    """The program that PYTHON_EXEC names to start Python, as torchrun takes it; empty: this Python. Raises Refused."""
    name = environ.get(PYTHON_VARIABLE, "")
    path = shutil.which(name) if name else None
    if name and path is None:
        todo = f"Correct or unset {PYTHON_VARIABLE}."
        raise Refused(f"{PYTHON_VARIABLE}: there is no command {name}", safe="Nothing was started.", todo=todo)
    if path is None:
        return ""
    # The same program may have several names in its folder: python, python3. In another folder it is another venv.
    path, own = os.path.abspath(path), sys.executable
    same = os.path.dirname(path) == os.path.dirname(own) and os.path.realpath(path) == os.path.realpath(own)
    return "" if same else name


def _refuse(args: argparse.Namespace, python: str) -> None:
    """Raise Refused for what contradicts itself, and for what is not done. `python`: as `_python` returns it."""
    if args.no_python and args.module and not args.run_path:
        raise Refused(
            "--no-python and --module contradict each other", safe="Nothing was started.", todo="Leave one out."
        )
    command = args.no_python and not args.run_path
    not_forked = "--spawn" if args.spawn else "--no-python" if command else PYTHON_VARIABLE if python else ""
    if args.preload and not_forked:
        raise Refused(
            f"--preload and {not_forked} contradict each other: nothing is imported before ranks that are not forked",
            safe="Nothing was started.",
            todo="Leave one of them out; an empty --preload= replaces that of a policy file.",
        )
    if args.warm_ranks and not_forked:
        raise Refused(
            f"--warm-ranks and {not_forked} contradict each other: only ranks that are forked can be forked ahead",
            safe="Nothing was started.",
            todo="Leave one of them out.",
        )
    if not args.health_seconds and (args.health_file or args.unhealthy == "leave"):
        raise Refused(
            "--health-seconds 0 contradicts --health-file and --unhealthy leave: the node is never examined",
            safe="Nothing was started.",
            todo="Give the seconds between two examinations.",
        )
    if args.health_file:
        _require_readable(args.health_file)
    if args.logs_specs:
        raise Refused(
            f"`lastgood run` does not do --logs-specs {args.logs_specs}: it names a class of torchrun's agent",
            safe="Nothing was started.",
            todo="Leave it out, or use torchrun.",
        )
    if args.log_dir and os.path.exists(args.log_dir) and not os.path.isdir(args.log_dir) and args.log_dir != os.devnull:
        raise Refused(f"--log-dir {args.log_dir} is no folder", safe="Nothing was started.", todo="Give a folder.")


def _require_readable(health_file: str) -> None:
    """Raise Refused for a --health-file that can never be read. It may be absent."""
    try:
        if os.path.isdir(health_file) or not os.path.isdir(os.path.dirname(health_file)):
            raise OSError(errno.EINVAL, "there can be no such file")
        if os.path.exists(health_file):
            os.close(os.open(health_file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        raise Refused(
            f"--health-file {health_file}: {error.strerror}",
            safe="Nothing was started.",
            todo="Give the path of a file that can be read, or that may come, in a folder that exists.",
        ) from error


def _limits(step_seconds: float, times: float, long_seconds: float | None) -> Limits:
    """The limits of the time without progress. `long_seconds`: None: not given. Raises Refused."""
    if long_seconds is None:
        return Limits(step_seconds, times, max(Limits.long_seconds, step_seconds))
    if long_seconds and not step_seconds:
        raise Refused(
            f"--hang-timeout 0 and --hang-long-timeout {long_seconds:g} contradict each other: there are no limits",
            safe="Nothing was started.",
            todo="Leave one of them out; --hang-long-timeout 0 replaces that of a policy file.",
        )
    if step_seconds > long_seconds:
        raise Refused(
            f"--hang-long-timeout {long_seconds:g} is less than --hang-timeout {step_seconds:g}: the first step and "
            "saves would have less time than any other step",
            safe="Nothing was started.",
            todo="Give --hang-long-timeout at least the value of --hang-timeout, or leave it out.",
        )
    return Limits(step_seconds, times, long_seconds, ends_late=True)


def _staged(run: str, several: Rendezvous | None) -> str:
    """The value of --stage, the last place of a run, as an absolute path or a URL. Raises Refused."""
    if not run:
        return ""
    if several is None:
        raise Refused(f"--stage {run} with one node", safe="Nothing was started.", todo="Give --nnodes too.")
    place = paths.parsed(run)
    is_file = place.kind == "directory" and os.path.isfile(place.root)
    if is_file or place.kind not in ("directory", "objects"):
        todo = "Give the last place of the run, a directory or a bucket."
        raise Refused(f"--stage {run}", safe="Nothing was started.", todo=todo)
    return place.root if place.kind == "directory" else place.url


def _nodes(args: argparse.Namespace) -> Options:
    """The options about the nodes of the job."""
    return Options(
        nnodes=args.nnodes,
        backend=args.rdzv_backend,
        endpoint=args.rdzv_endpoint,
        run_id=args.rdzv_id,
        configuration=args.rdzv_conf,
        node_rank=args.node_rank,
        master=(args.master_addr, args.master_port),
        local_address=args.local_addr or "",
        standalone=args.standalone,
        spares=args.spares,
    )


def _without_effect(args: argparse.Namespace, outputs: Outputs, ranks: int, one_attempt: bool) -> list[str]:
    """Lines about options that are given and have no effect; those about nodes are in rendezvous_options.py."""
    lines = list[str]()
    if args.event_log_handler != NO_EVENTS:
        handler = f"--event-log-handler {args.event_log_handler}"
        lines.append(f"{handler} has no effect: `lastgood attempts` shows what happened")
    if args.warm_ranks and one_attempt:
        lines.append("--warm-ranks has no effect with --max-restarts 0: no attempt follows the first one")
    if args.log_dir == os.devnull and (args.tee != "0" or args.redirects != "0" or args.local_ranks_filter):
        lines.append(f"--tee, --redirects and --local-ranks-filter have no effect with --log-dir {os.devnull}")
    for stream, name in NAMES.items():
        copied = any(what & stream and outputs.to_console(local) for local, what in outputs.tee.items())
        if getattr(args, f"duplicate_{name}_filters") and not copied:
            lines.append(f"--duplicate-{name}-filters has no effect: --tee copies {name} of no rank")
    for local in sorted(outputs.shown or ()):
        if not 0 <= local < ranks:
            lines.append(f"--local-ranks-filter {local} shows no output: this node has local ranks 0 to {ranks - 1}")
    return lines


def _ranks(text: str) -> int:
    """The number of ranks of one node: a number, or a kind of device; torch knows of more kinds than those that are
    named here, of backends that are installed beside it."""
    if text == "cpu":
        return len(os.sched_getaffinity(0))
    if text.isidentifier() and (ranks := devices.count(text)) is not None:
        return ranks
    if not text.isdecimal() or int(text) < 1:
        raise Refused(
            f"--nproc-per-node {text} is no number of ranks",
            safe="Nothing was started.",
            todo="Give a number of at least 1, or cpu, gpu, xpu or auto.",
        )
    return int(text)


def _outputs(args: argparse.Namespace, ranks: int, environ: Mapping[str, str]) -> Outputs:
    redirects, tee = _streams("--redirects", args.redirects, ranks), _streams("--tee", args.tee, ranks)
    if args.log_dir == os.devnull:  # no file is written, as for torchrun
        return Outputs()
    return Outputs(
        redirects=redirects,
        tee=tee,
        shown=args.local_ranks_filter,
        filters={STDOUT: args.duplicate_stdout_filters, STDERR: args.duplicate_stderr_filters},
        template=environ.get(TEMPLATE, "") or PREFIX,
    )


def _streams(option: str, text: str, ranks: int) -> dict[int, int]:
    """Local rank -> which of its streams. `text`: as for torchrun, for all ranks "3", or for some "0:3,1:1"."""
    try:
        if text.isdecimal():
            found = dict.fromkeys(range(ranks), int(text))
        else:
            found = {int(rank): int(what) for rank, what in (one.split(":") for one in text.split(","))}
    except ValueError:
        found = {-1: -1}
    if not all(0 <= rank < ranks and 0 <= what <= 3 for rank, what in found.items()):
        raise Refused(f"{option} {text}", safe="Nothing was started.", todo="Give 0 to 3, or 0:3,1:1 for ranks.")
    return found

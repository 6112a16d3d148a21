"""The arguments of `lastgood run`: those of torchrun, with the same names, defaults and environment variables.

What torchrun takes and this supervisor does not do is refused by name.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import Refused
from ..policy.hang import Limits
from ..policy.recovery import Budget
from .program import Program
from .rendezvous_options import Options, Rendezvous, rendezvous

ACCELERATORS = ("auto", "gpu", "xpu")
"""values of --nproc-per-node that ask for one rank a device"""


@dataclass(frozen=True)
class Job:
    """What is started, and how."""

    program: Program
    ranks: int
    budget: Budget
    limits: Limits
    """of the time without progress"""
    master: tuple[str, int | None]
    """address, and port; None: a new one for each attempt"""
    role: str
    run_id: str
    log_dir: str | None
    """where the output of ranks goes if it is redirected; None: a temporary folder"""
    redirects: Mapping[int, int]
    """local rank -> 1: its stdout goes to a file, 2: its stderr, 3: both"""
    spawn: bool
    """whether ranks are started without a zygote"""
    preload: tuple[str, ...]
    """further modules that are imported before ranks are forked"""
    shutdown_seconds: float
    signals: tuple[int, ...]
    """those that ask for the end of the job"""
    rendezvous: Rendezvous | None = None
    """with the other nodes of the job; None: there are none"""
    records: Path | None = None
    """where the ranks and the supervisor put their logs (run/job_logs.py); None: nowhere"""


class _Parser(argparse.ArgumentParser):
    """Raises Refused where argparse would end the process."""

    def error(self, message: str) -> None:  # type: ignore[override]
        unknown = re.search(r"unrecognized arguments: (--[^ =]+)", message)
        near = difflib.get_close_matches(unknown[1], self._option_string_actions, 1) if unknown else []
        meant = f"Did you mean {near[0]}? " if near else ""
        raise Refused(message, safe="Nothing was started.", todo=f"{meant}lastgood run --help lists the arguments.")


def parsed(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> Job:
    """Parse the arguments of one command. Raises Refused."""
    args = parser(environ).parse_args(arguments)
    _refuse(args)
    name, rest = args.training_script, [*args.training_script_args]
    kind: Literal["module", "command", "script"] = (
        "module" if args.module else "command" if args.no_python else "script"
    )
    if args.no_python and args.module:
        raise Refused("--no-python and --module contradict each other", safe="Nothing was started.", todo="")
    if kind == "command" and shutil.which(name) is None:
        raise Refused(f"there is no command {name}", safe="Nothing was started.", todo="Give a program.")
    if kind == "script" and not os.path.exists(name):
        raise Refused(f"there is no file {name}", safe="Nothing was started.", todo="Give the path of the script.")
    ranks = _ranks(args.nproc_per_node)
    return Job(
        program=Program(kind=kind, name=name, arguments=rest),
        ranks=ranks,
        budget=Budget(
            restarts=args.max_restarts,
            without_progress=args.without_progress,
            remedies=() if args.remedies == "none" else tuple(args.remedies.split(",")),
        ),
        limits=Limits(least_seconds=args.hang_timeout),
        master=(args.master_addr, args.master_port),
        role=args.role,
        run_id=args.rdzv_id,
        log_dir=args.log_dir,
        redirects=_redirects(args.redirects, ranks),
        spawn=args.spawn or args.no_python,
        preload=tuple(filter(None, args.preload.split(","))),
        shutdown_seconds=args.shutdown_timeout,
        signals=_signals(args.signals_to_handle),
        rendezvous=_rendezvous(args),
        records=Path(args.records).absolute() if args.records else None,
    )


def parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """The parser. A variable PET_NAME of the environment is the default of the option --name, as for torchrun."""
    made = _Parser(prog="lastgood run", description="Start the ranks of a training script, and start them again.")

    def option(*names: str, **settings: object) -> None:
        dest = names[-1].lstrip("-").replace("-", "_")
        default = environ.get(f"PET_{dest.upper()}", settings.pop("default", None))
        if settings.get("action") == "store_true" and isinstance(default, str):
            default = default == "1"
        made.add_argument(*names, default=default, **settings)  # type: ignore[arg-type]

    def both(name: str, **settings: object) -> None:
        option(f"--{name.replace('-', '_')}", f"--{name}", **settings)

    both("nnodes", default="1:1", help="Nodes of the job: a number, or the least and the most: 2:4.")
    both("nproc-per-node", default="1", help="Ranks: a number, or cpu, gpu, xpu, auto.")
    both("rdzv-backend", default="static", help="static, with --node-rank; or c10d.")
    both("rdzv-endpoint", default="", help="HOST:PORT of the node that holds the store of the nodes.")
    both("rdzv-id", default="none", help="TORCHELASTIC_RUN_ID of the ranks.")
    both("rdzv-conf", default="", help="As for torchrun: join_timeout=600,last_call_timeout=30.")
    option("--standalone", action="store_true", help="As for torchrun: one node.")
    both("max-restarts", type=int, help="Restarts in all. Default: no bound while newer steps are saved.")
    both("monitor-interval", type=float, default=0.1, help="Accepted; the end of a rank is noticed at once.")
    both("start-method", default="spawn", choices=["spawn", "fork", "forkserver"], help="Accepted, as for scripts.")
    both("event-log-handler", default="null", help="Accepted; `lastgood attempts` has the events.")
    option("--role", default="default", help="ROLE_NAME of the ranks.")
    option("-m", "--module", action="store_true", help="The script is a module.")
    both("no-python", action="store_true", help="The script is a command.")
    both("run-path", action="store_true", help="Accepted: a script always runs by its path.")
    both("log-dir", help="Folder for the output of ranks.")
    option("-r", "--redirects", default="0", help="Output that goes to files: 1 stdout, 2 stderr, 3 both; or 0:3,1:1.")
    option("-t", "--tee", default="0", help="Not done.")
    both("local-ranks-filter", default="", help="Not done.")
    both("duplicate-stdout-filters", default="", help="Not done.")
    both("duplicate-stderr-filters", default="", help="Not done.")
    both("node-rank", type=int, default=0, help="Number of this node, for --rdzv-backend static.")
    both("master-addr", default="127.0.0.1", help="MASTER_ADDR of the ranks; of several nodes: the one of rank 0.")
    both("master-port", type=int, help="MASTER_PORT of the ranks. Default: a new one for each attempt.")
    both("local-addr", help="Address of this node for the others.")
    both("logs-specs", help="Not done.")
    both("numa-binding", choices=["node", "socket", "exclusive", "core-complex"], help="Not done.")
    both("signals-to-handle", default="SIGTERM,SIGINT,SIGHUP,SIGQUIT", help="Signals that end the job.")
    both("shutdown-timeout", type=float, default=30.0, help="Seconds that ranks have to end after such a signal.")
    both("virtual-local-rank", action="store_true", help="Not done.")
    option("--spawn", action="store_true", help="Start each rank as a new process; it imports torch by itself.")
    option("--preload", default="", help="Further modules that are imported before ranks are forked: a,b.")
    option("--without-progress", type=int, default=3, help="Attempts in a row that save nothing newer. Default 3.")
    option("--remedies", default="back,skip", help="Against a failure that comes again: back, skip, or none.")
    option("--hang-timeout", type=float, default=60.0, help="Least limit of a step in seconds; 0: none. Default 60.")
    option("--records", metavar="DIR", help="Directory for logs of steps, saves and attempts.")
    made.add_argument("training_script", help="The script, with its arguments after it.")
    made.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return made


def _refuse(args: argparse.Namespace) -> None:
    """Raise Refused for what is not done."""
    asked = {
        "--tee": args.tee != "0",
        "--local-ranks-filter": args.local_ranks_filter,
        "--duplicate-stdout-filters": args.duplicate_stdout_filters,
        "--duplicate-stderr-filters": args.duplicate_stderr_filters,
        "--logs-specs": args.logs_specs,
        "--numa-binding": args.numa_binding,
        "--virtual-local-rank": args.virtual_local_rank,
    }
    if refused := [name for name, given in asked.items() if given]:
        raise Refused(
            f"`lastgood run` does not do {', '.join(refused)}",
            safe="Nothing was started.",
            todo="Leave it out, or use torchrun.",
        )


def _rendezvous(args: argparse.Namespace) -> Rendezvous | None:
    return rendezvous(
        Options(
            nnodes=args.nnodes,
            backend=args.rdzv_backend,
            endpoint=args.rdzv_endpoint,
            run_id=args.rdzv_id,
            configuration=args.rdzv_conf,
            node_rank=int(args.node_rank),
            master=(args.master_addr, args.master_port),
            local_address=args.local_addr or "",
            standalone=args.standalone,
        )
    )


def _ranks(text: str) -> int:
    """The number of ranks of one node."""
    if text in ACCELERATORS:
        raise Refused(f"--nproc-per-node {text} is not done", safe="Nothing was started.", todo="Give a number.")
    if text == "cpu":
        return os.cpu_count() or 1
    try:
        ranks = int(text)
    except ValueError:
        ranks = 0
    if ranks < 1:
        raise Refused(f"--nproc-per-node {text}", safe="Nothing was started.", todo="Give a number of at least 1.")
    return ranks


def _signals(text: str) -> tuple[int, ...]:
    """The numbers of signals. `text`: their names."""
    known = {one.name: one.value for one in signal.Signals if one not in (signal.SIGKILL, signal.SIGSTOP)}
    names = [*filter(None, text.split(","))]
    if unknown := [one for one in names if one not in known]:
        raise Refused(
            f"--signals-to-handle {unknown[0]}: no such signal can be handled",
            safe="Nothing was started.",
            todo="Give names such as SIGTERM,SIGINT.",
        )
    return tuple(known[one] for one in names)


def _redirects(text: str, ranks: int) -> dict[int, int]:
    """Local rank -> what is redirected. `text`: as for torchrun, for all ranks "3", or for some "0:3,1:1"."""
    try:
        if text.isdecimal():
            found = dict.fromkeys(range(ranks), int(text))
        else:
            found = {int(rank): int(what) for rank, what in (one.split(":") for one in text.split(","))}
    except ValueError:
        found = {-1: -1}
    if not all(0 <= rank < ranks and 0 <= what <= 3 for rank, what in found.items()):
        raise Refused(f"--redirects {text}", safe="Nothing was started.", todo="Give 0 to 3, or 0:3,1:1 for ranks.")
    return found

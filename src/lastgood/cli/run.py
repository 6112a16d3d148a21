"""`lastgood run`: starts the ranks of a training script as torchrun does, and starts them again after a failure."""

from __future__ import annotations

import contextlib
import sys

import typer

from ..supervisor import arguments, output_folders, outputs
from ..supervisor.supervise import Supervisor


def run(context: typer.Context) -> int:
    """Start a training script in place of torchrun, and start it again after a failure.

    lastgood run [torchrun's options] SCRIPT [its arguments]. The ranks go on from what they restore. A job that fails
    three times without a newer saved step is given up (exit code 9). SIGTERM is passed on, and ends the job.
    `lastgood run --help` lists the options.
    """
    job = arguments.parsed(context.args)
    output_folders.require_writable(job)
    with outputs.unread_lines_dropped():
        for line in job.notes:
            _report(line)
        return Supervisor(job, ["lastgood", "run", *context.args], _report).supervise()


def _report(line: str) -> None:
    with contextlib.suppress(OSError):  # the reader of stderr may have ended: that ends no job
        print(f"lastgood: {line}\n", end="", file=sys.stderr, flush=True)  # one write: see reporting.py

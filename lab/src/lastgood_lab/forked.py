"""Runs a Python script in a process that is forked from one that has imported torch, and what trainers use with it.

An interpreter that imports all of that for itself needs six seconds of a processor; a forked one starts at once. The
process is as real as another: it is killed, and its files are left as they are. Nothing here restarts a script.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from .worlds import CONTEXT, PRELOAD

CONTEXT.set_forkserver_preload([*PRELOAD, "sklearn.datasets", "obstore.store"])


def started(
    script: Path, arguments: Sequence[str], errors: Path, printed: Connection | None = None, folder: Path | None = None
) -> ForkServerProcess:
    """Start `python script arguments` in a session of its own, with the environment that this process has now.

    `errors`: file to which its stderr is appended. `printed`: a pipe that gets its stdout, and which the caller closes;
    None: it goes to `errors` too. `folder`: where it runs (default: the folder of this process).
    """
    work = str(folder or Path.cwd()), dict(os.environ)
    process = CONTEXT.Process(target=_run, args=(str(script), [*arguments], str(errors), printed, *work))
    process.start()
    return process


def _run(
    script: str,
    arguments: list[str],
    errors: str,
    printed: Connection | None,
    folder: str,
    environment: dict[str, str],
) -> None:
    os.setsid()
    with open(errors, "ab") as file:
        os.dup2(file.fileno() if printed is None else printed.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if printed is not None:
        printed.close()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    multiprocessing.set_start_method("fork", force=True)  # as in any other process; a fork server would be its own
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")

"""A process beside a node that waits, which puts the newest generation of a run into its memory.

`lastgood run --stage RUN` has one for each wait for a round. It may be killed at any time: what it has copied in part
is no generation. It decides nothing about the job, and a training process that opens the memory goes first. What no
start has used is removed when the supervisor ends (staging.py), or by the next one if this one was killed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from .. import reporting
from ..io import processes
from . import program

MODULE = "lastgood.supervisor.reserve"
BEGIN_SECONDS = 3.0
"""before it begins: most waits are shorter, and ranks that are started again need the processor"""
END_SECONDS = 2.0
"""how long its end may hold up the node"""
POLL_SECONDS = 10.0
"""how often the run is read for a newer generation"""


@contextlib.contextmanager
def staged(run: str) -> Iterator[None]:
    """Bring the newest generation of `run` into memory while the block lasts. Empty: nothing is done."""
    if not run:
        yield
        return
    try:
        process = subprocess.Popen([*program.PYTHON, MODULE, run, str(os.getpid())], start_new_session=True)
    except OSError as error:
        reporting.warning(f"nothing is staged in the memory of this node: {error}")
        yield
        return
    try:
        yield
    finally:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a disk that does not answer
            process.wait(END_SECONDS)


def main() -> None:
    """Stage generations of a run until the supervisor kills this process, or ends."""
    program.forget_current_folder()
    processes.die_with(int(sys.argv[2]))
    time.sleep(BEGIN_SECONDS)
    from .staging import Reserve  # not before: importing takes processor time

    reserve = Reserve(sys.argv[1])
    reserve.remove_left()
    while True:
        reserve.refresh()
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()

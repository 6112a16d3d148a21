"""Starts the agent of a run on this node, which writes what it reports to a file beside the saves."""

from __future__ import annotations

import os
import subprocess

from ..io import processes
from ..io.files import regular_file
from . import paths

LOG = "agent.log"
START_SECONDS = 60.0


def started(url: str) -> str:
    """Start an agent in a session of its own, so that it outlives this process. Returns why that failed, or "".

    `url`: as for `AgentLink`. Its log is a regular file; another one in its place is an error.

    The command returns once the agent listens. It inherits no descriptor: a socket of this process that stayed open in
    the agent would hide the end of this process from the other ranks.
    """
    place = paths.parsed(url)
    try:
        with open(os.path.join(place.root, LOG), "a", opener=regular_file) as log:
            ended = subprocess.run(
                processes.command_of("lastgood.agent", place.url),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=START_SECONDS,
                start_new_session=True,
                cwd="/",  # guard: agent-starts-outside-all-folders
                env={**os.environ, "PYTHONPATH": processes.python_path()},
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if ended.returncode == 0 else f"it ended with status {ended.returncode}"

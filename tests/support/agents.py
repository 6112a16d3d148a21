"""Agents of tests: started in the foreground, watched, and ended."""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lastgood.run import agent_link, agent_messages

LIMIT_SECONDS = 60.0


SERVES = """
import sys
{prelude}
from lastgood.agent.server import serve
sys.exit(0 if serve("memory://" + sys.argv[1], float(sys.argv[2]), first_seconds=0.0) else 5)
"""


@contextlib.contextmanager
def agent(folder: Path, linger_seconds: float = 600.0, prelude: str = "") -> Iterator[subprocess.Popen[str]]:
    """An agent of a memory folder, which is killed at the end of the block. It listens when the block begins.

    `prelude`: code that its process runs before.
    """
    command = [sys.executable, "-c", SERVES.format(prelude=prelude), str(folder), str(linger_seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        until(lambda: process.poll() is not None or answers(folder))
        yield process
    finally:
        process.kill()
        process.communicate()


def answers(folder: Path) -> bool:
    """Whether the folder has an agent that answers."""
    return state(folder) is not None


def state(folder: Path) -> agent_messages.Answer | None:
    """The state of the agent of a folder; None if there is none that answers."""
    with contextlib.suppress(OSError, ValueError):
        return agent_link.status(str(folder))
    return None


def ended(folder: str) -> None:
    """Kill the agent of a folder, if there is one, and wait for its end."""
    with contextlib.suppress(OSError), contextlib.closing(agent_link.connected(folder)) as connection:
        agent_link.kill(connection)


def until(condition: Callable[[], object]) -> None:
    """Poll a condition on another process until it is true. Raises TimeoutError after a minute."""
    end = time.monotonic() + LIMIT_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the other process did not come so far")
        select.select([], [], [], 0.02)

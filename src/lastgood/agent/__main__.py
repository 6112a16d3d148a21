"""`python -m lastgood.agent URL`: starts the agent of a run on this node, and returns once it listens.

`lastgood agent run` serves in the foreground instead.
"""

from __future__ import annotations

import os
import sys

from .server import serve


def main(url: str) -> int:
    """Fork the agent. Returns 0 once it listens, or if there is one already; 1 if it could not be started."""
    read, write = os.pipe()
    if os.fork():
        os.close(write)
        with open(read, "rb") as pipe:
            return 0 if pipe.read(1) else 1
    os.close(read)
    serve(url, ready=lambda: _post(write))
    return 0


def _post(pipe: int) -> None:
    os.write(pipe, b"1")
    os.close(pipe)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

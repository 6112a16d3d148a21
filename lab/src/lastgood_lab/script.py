"""The command `lastgood-lab NAME`, which is `lastgood lab NAME` under the name of its package. Does nothing else."""

from __future__ import annotations

import sys

from lastgood.cli import app


def main() -> int:
    """Run one experiment. Returns its exit code. The arguments are those of this process."""
    return app.main(["lab", *sys.argv[1:]])

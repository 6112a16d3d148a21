"""`python -m lastgood`: the command line, for where the `lastgood` command is not on the PATH."""

from __future__ import annotations

import sys

from .cli.app import main

if __name__ == "__main__":
    sys.exit(main())

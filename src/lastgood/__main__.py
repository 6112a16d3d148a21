"""The command `lastgood`, and `python -m lastgood` for where that command is not on the PATH."""

from __future__ import annotations

import sys

from .errors import NotInstalled
from .extras import needed


def main() -> int:
    """Run the command line; returns its exit code. Without typer and rich it says in one line how to install them."""
    try:
        with needed("cli", "The command line of lastgood"):
            from .cli import app
    except NotInstalled as error:
        print(f"lastgood: {error}", file=sys.stderr)
        return error.exit_code
    return app.main()


if __name__ == "__main__":
    sys.exit(main())

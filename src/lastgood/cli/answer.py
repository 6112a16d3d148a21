"""What every command returns, and the exit codes that are not those of an error class (docs/cli.md lists all)."""

from __future__ import annotations

from typing import Any, NamedTuple

from rich.console import RenderableType

USAGE, DIFFERS, INTERRUPTED, BROKEN_PIPE = 2, 7, 130, 141


class Answer(NamedTuple):
    """The result of a command. Commands print nothing to stdout; `main` prints the answer."""

    data: dict[str, Any]
    """printed as JSON when `--json` is given"""
    view: RenderableType
    """printed otherwise"""
    code: int = 0
    """exit code"""
    error: bool = False
    """`view` goes to stderr"""
    note: str = ""
    """a further text for people, always on stderr"""

"""Which code a report was made of: the commit of the checkout, and a digest of the sources that the report is about."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
NO_CHECKOUT = "no commit known: not run from a git checkout"


def commit() -> str:
    """Short name of the commit that this package runs from, and whether its sources had been changed since."""
    name = _git("rev-parse", "--short=7", "HEAD")
    if not name:
        return NO_CHECKOUT
    return f"{name} with uncommitted changes" if _git("status", "--porcelain", "--", str(PACKAGE)) else name


def digest(rooms: Iterable[str]) -> str:
    """SHA-256 over the Python sources of these rooms ("" is all of the package), as hexadecimal text.

    It needs no git, so a source archive can be held against a report too.
    """
    found = hashlib.sha256()
    for path in sorted({path for room in rooms for path in (PACKAGE / room).rglob("*.py")}):
        found.update(f"{path.relative_to(PACKAGE).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()


def _git(*words: str) -> str:
    """What git prints; empty where there is no git or no checkout."""
    try:
        done = subprocess.run(["git", "-C", str(PACKAGE), *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()

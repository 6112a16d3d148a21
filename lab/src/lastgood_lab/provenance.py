"""Which code a report was made of: the commit of the checkout, and a digest of the sources that the report is about."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable
from pathlib import Path

import lastgood

PACKAGE = Path(lastgood.__file__).resolve().parent
LAB = Path(__file__).resolve().parent
NO_CHECKOUT = "no commit known: not run from a git checkout"


def commit() -> str:
    """Short name of the commit that lastgood runs from, and whether its sources or the lab's were changed since."""
    name = _git(PACKAGE, "rev-parse", "--short=7", "HEAD")
    if not name:
        return NO_CHECKOUT
    changed = any(_git(folder, "status", "--porcelain", "--", ".") for folder in (PACKAGE, LAB))
    return f"{name} with uncommitted changes" if changed else name


def digest(rooms: Iterable[str]) -> str:
    """SHA-256 over the Python sources of these rooms ("" is all of lastgood), as hexadecimal text.

    It needs no git, so a source archive can be held against a report too.
    """
    found = hashlib.sha256()
    for path in sorted({path for room in rooms for path in (PACKAGE / room).rglob("*.py")}):
        found.update(f"{path.relative_to(PACKAGE).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()


def _git(folder: Path, *arguments: str) -> str:
    """What git prints in this folder; empty where there is no git or no checkout."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()

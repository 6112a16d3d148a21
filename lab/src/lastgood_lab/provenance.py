"""Identifies the code that a report is about: the commit of the checkout, and a digest of the sources."""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import subprocess
import tokenize
from collections.abc import Iterable
from pathlib import Path

import lastgood

PACKAGE = Path(lastgood.__file__).resolve().parent
LAB = Path(__file__).resolve().parent
NO_CHECKOUT = "no commit known: not run from a git checkout"


def commit() -> str:
    """The short hash of the checkout's commit, and whether the sources of lastgood or the lab have uncommitted changes.

    Returns `NO_CHECKOUT` outside of a git checkout.
    """
    name = _git(PACKAGE, "rev-parse", "--short=7", "HEAD")
    if not name:
        return NO_CHECKOUT
    changed = any(_git(folder, "status", "--porcelain", "--", ".") for folder in (PACKAGE, LAB))
    return f"{name} with uncommitted changes" if changed else name


def digest(rooms: Iterable[str]) -> str:
    """The SHA-256 of the code in these folders of the package ("" is the whole package), as hexadecimal text.

    Docstrings, comments and blank lines do not count. No git is needed, so a source archive can be compared with a
    report too.
    """
    found = hashlib.sha256()
    for path in sorted({path for room in rooms for path in (PACKAGE / room).rglob("*.py")}):
        found.update(f"{path.relative_to(PACKAGE).as_posix()}\0".encode() + code_of(path.read_text()).encode() + b"\0")
    return found.hexdigest()


@functools.cache  # a page of reports asks for the digests of many rooms, which hold the same files
def code_of(source: str) -> str:
    """The lines of a Python source without docstrings, comments and blank lines; every version of Python agrees."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            start, end = node.lineno - 1, node.end_lineno or node.lineno
            lines[start:end] = [""] * (end - start)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _git(folder: Path, *arguments: str) -> str:
    """Run git in this folder and return its output; empty without git or outside of a checkout."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()

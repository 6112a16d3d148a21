"""Arguments that several commands take, and parsers of sizes and numbers. Every parser raises BadParameter."""

from __future__ import annotations

import math
import os
import re
from typing import Annotated

import typer

from . import completion

_STEP = re.compile(r"\d{1,12}(-[0-9a-f]{8})?")


def step_of(text: str) -> str:
    """A STEP, as it was given: 4000, or 4000-9f3ac21b."""
    if not _STEP.fullmatch(text):
        order = " RUN comes first." if "/" in text or os.path.exists(text) else ""
        raise typer.BadParameter(
            f"{text!r} is not a STEP: give 4000, or 4000-9f3ac21b as `lastgood ls` shows them.{order}"
        )
    return text


Run = Annotated[str, typer.Argument(metavar="RUN", help="Directory or URL of the run.", show_default=False)]
AnyStep = Annotated[
    str | None,
    typer.Argument(
        metavar="STEP",
        help="4000, or 4000-9f3ac21b to name the incarnation too; without it, what a restore takes (`repair`: all).",
        show_default=False,
        parser=step_of,
        autocompletion=completion.steps,
    ),
]
TakeOver = Annotated[
    bool,
    typer.Option(
        "--take-over",
        help="In an object store: go on though the run was not closed; who has it open cannot save any more.",
    ),
]
From = Annotated[
    list[str] | None,
    typer.Option("--from", metavar="PLACE", help="Another place of the run, from which damage is repaired too."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]

MOST_RANKS = 10**6
LEAST, MOST = 1e-9, 1e18
"""bounds of every number, so that what `plan` computes of several of them stays finite"""
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e\+?[0-9]+)?)\s*(?:([kmgt]?)b?|([kmgt])ib)\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def bytes_of(text: str) -> int:
    """A size in bytes: 1.5GB (powers of 1000), 512MiB (powers of 1024) or 1e9."""
    found = _SIZE.fullmatch(text)
    count = 0.0
    if found:
        decimal, binary = (found[2] or "").lower(), (found[3] or "").lower()
        count = float(found[1]) * (1024 ** _POWERS[binary] if binary else 1000 ** _POWERS[decimal])
    if not 1 <= count < 2**63:
        raise typer.BadParameter(f"{text!r} is not a size: give 1.5GB, 512MiB or 1e9.")
    return int(count)


def positive(text: str) -> float:
    """A number above zero, from LEAST to MOST."""
    number = _number(text)
    if not LEAST <= number <= MOST:
        raise typer.BadParameter(
            f"{text!r} is not a number above zero, such as 0.5 or 7e9 (from {LEAST:g} to {MOST:g})."
        )
    return number


def not_negative(text: str) -> float:
    """A number of at least zero, and at most MOST."""
    number = _number(text)
    if not 0 <= number <= MOST:
        raise typer.BadParameter(f"{text!r} is not a number of at least zero (up to {MOST:g}).")
    return number


def fraction(text: str) -> float:
    """A number above zero and below one."""
    number = positive(text)
    if number >= 1:
        raise typer.BadParameter(f"{text!r} is not a fraction below one: give 0.03 for 3 %.")
    return number


def ranks_of(text: str) -> list[int]:
    """Ranks such as 3, 0-7 or 0-3,8."""
    found = list[int]()
    for part in text.split(","):
        numbers = re.fullmatch(r"\s*(\d{1,8})\s*(?:-\s*(\d{1,8})\s*)?", part)
        if not numbers or not int(numbers[1]) <= int(numbers[2] or numbers[1]) < MOST_RANKS:
            raise typer.BadParameter(f"{text!r} names no ranks: give 3, 0-7 or 0-3,8.")
        found += range(int(numbers[1]), int(numbers[2] or numbers[1]) + 1)
    return sorted(set(found))


def require_suffix(path: str, suffixes: tuple[str, ...]) -> None:
    """Raise BadParameter for a path that ends in none of `suffixes`."""
    if not path.endswith(suffixes):
        raise typer.BadParameter(f"{path!r}: give a name that ends in {', '.join(suffixes)}.")


def _number(text: str) -> float:
    """The number in a text; NaN if there is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan

"""The values of options, as texts on a command line, in the environment or in a policy file <-> what they mean. Pure.

Each function raises argparse.ArgumentTypeError for a text that cannot be meant. argparse puts the name of the option
before it, and a policy file the line.
"""

from __future__ import annotations

import argparse
import difflib
import math
import signal
from collections.abc import Callable, Collection

from ..policy.recovery import CAUSES, REMEDIES, Act

HANDLED = {one.name: one.value for one in signal.Signals if one not in (signal.SIGKILL, signal.SIGSTOP)}
"""name -> number of the signals that a process can handle"""

BEGINNING_CHARACTERS = 5
"""of a known name, at least, that an unknown one begins with if it is meant by its beginning"""


def whole(least: int) -> Callable[[str], int]:
    """A function that takes a whole number of at least `least`."""

    def taken(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return number

    return taken


def port(text: str) -> int:
    """The number of a TCP port. 0: any."""
    number = int(text) if text.isascii() and text.isdigit() else -1
    if 0 <= number < 2**16:
        return number
    raise argparse.ArgumentTypeError(f"{text!r} is no port: give a whole number from 0 to 65535")


def seconds(text: str) -> float:
    """A finite number of seconds, at least 0."""
    return _number(text, "a number of seconds")


def factor(text: str) -> float:
    """A finite number, at least 0."""
    return _number(text, "a number")


def positive_seconds(text: str) -> float:
    """A finite number of seconds above 0."""
    if found := seconds(text):
        return found
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")


def slow_factor(text: str) -> float:
    """A number above 1, or 0."""
    found = factor(text)
    if 0 < found <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number above 1 nor 0")
    return found


def names(text: str) -> tuple[str, ...]:
    """The names in a list with commas between them."""
    return tuple(filter(None, (one.strip() for one in text.split(","))))


def remedies(text: str) -> tuple[Act, ...]:
    """Remedies in the order in which they are tried; "none": no remedy."""
    if text.strip() == "none":
        return ()
    found = list[Act]()
    for name in names(text):
        if name == "none":
            raise argparse.ArgumentTypeError(f"{text!r}: none stands alone, for no remedy at all")
        act = next((one for one in REMEDIES if one == name), None)
        if act is None:
            raise argparse.ArgumentTypeError(f"{name!r} is no remedy. {meant(name, [*REMEDIES, 'none'])}")
        if act in found:
            raise argparse.ArgumentTypeError(f"{name} is given twice")
        found.append(act)
    return tuple(found)


def cause_restarts(text: str) -> dict[str, int]:
    """Cause -> the restarts that are allowed after it, from hang=5,OutOfMemoryError=1."""
    found = dict[str, int]()
    for one in names(text):
        cause, _, most = (part.strip() for part in one.partition("="))
        if cause in signal.Signals.__members__:
            cause = signal.Signals[cause].name  # a signal may have two names
        elif cause not in CAUSES and not _may_be_an_exception(cause):  # guard: mistyped-cause-is-refused
            kinds = ", ".join(CAUSES)
            why = f"{cause!r} is no cause: a kind ({kinds}), a signal, or an exception. {meant(cause, CAUSES)}"
            raise argparse.ArgumentTypeError(why)
        if cause in found:
            raise argparse.ArgumentTypeError(f"{cause} is given twice")
        try:
            found[cause] = whole(0)(most)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{one}: {error}. Write {cause}=5, a cause and its restarts") from error
    return found


def _may_be_an_exception(cause: str) -> bool:
    """Whether a name may be that of an exception, which cannot be known here: it begins with a capital, unlike kinds,
    and is no kind or signal that is written wrongly."""
    kind = cause.lower() in CAUSES and cause != Exception.__name__
    mistyped = kind or (cause.startswith("SIG") and cause.isupper())
    return cause.isidentifier() and cause[:1].isupper() and not mistyped


def signals(text: str) -> tuple[int, ...]:
    """The numbers of signals, from their names."""
    given = names(text)
    for one in given:
        if one not in HANDLED:
            raise argparse.ArgumentTypeError(f"{one!r} is no signal that can be handled. {meant(one, HANDLED)}")
    return tuple(HANDLED[one] for one in given)


def local_ranks(text: str) -> frozenset[int] | None:
    """Local ranks; None for an empty text: all."""
    try:
        return frozenset(map(int, text.split(","))) if text else None
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of local ranks, such as 0,1") from error


def filters(text: str) -> tuple[str, ...]:
    """Texts with commas between them; two commas stand for one in a text, as for torchrun."""
    mark = "\0"
    return tuple(one.replace(mark, ",") for one in text.replace(",,", mark).split(",") if one)


LISTS = (names, remedies, cause_restarts, signals, local_ranks, filters)
"""those that take several values"""


def fault(option: argparse.Action, text: str) -> str:
    """Why an option does not take a text, of the environment or of a policy file, as its value; empty: it does."""
    if isinstance(option.const, bool):
        return "" if text in ("0", "1") else f"{text!r} is neither 1 nor 0"
    if option.choices is not None and text not in option.choices:
        return f"{text!r} is none of its values. {meant(text, [*option.choices])}".rstrip()
    if callable(option.type):
        try:
            option.type(text)
        except argparse.ArgumentTypeError as error:
            return str(error)
    return ""


def meant(name: str, known: Collection[str]) -> str:
    """What to do about an unknown name: a near one, or, if there is none, all of a few."""
    begins = name[: max(len(name) - 1, BEGINNING_CHARACTERS)]
    if starts := [one for one in known if one.startswith(begins)]:
        return f"Did you mean {min(starts)}?"  # difflib finds no long name from its beginning
    if near := difflib.get_close_matches(name, known, 1):
        return f"Did you mean {near[0]}?"
    return f"Give some of {', '.join(known)}." if len(known) < 6 else ""


def _number(text: str, what: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}, at least 0")
    return number

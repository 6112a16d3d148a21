"""Checks of the numbers that a caller passes: a wrong type or value raises Refused with its name. Pure."""

from __future__ import annotations

import math
import operator
from typing import Any

from ..errors import Refused

LONGEST_SECONDS = 100 * 365 * 24 * 3600
"""the longest timeout; some operating systems raise OverflowError for infinity, and for 300 years"""


def is_whole(value: Any, least: int) -> bool:
    """Whether `value` is an integer of at least `least`. True and 2.0 are not integers."""
    try:
        return operator.index(value) >= least and not isinstance(value, bool)
    except TypeError:
        return False


def is_number(value: Any) -> bool:
    """Whether `value` is a number. Infinity is one; True, NaN and text are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def is_positive(value: Any) -> bool:
    """Whether `value` is a finite number above 0."""
    return is_number(value) and 0 < value < math.inf


def is_switch(value: Any) -> bool:
    """Whether `value` is True or False, or one such value of numpy or torch. 1, text and a dict are not."""
    is_scalar = str(getattr(value, "dtype", "")) in ("bool", "torch.bool") and not value.shape
    return isinstance(value, bool) or is_scalar


def require_seconds(timeout: Any) -> None:
    """Raise Refused for a `timeout` that is neither None (no limit) nor a number of at most LONGEST_SECONDS.

    A negative number is accepted.
    """
    holds = timeout is None or (is_number(timeout) and timeout <= LONGEST_SECONDS)
    require(holds, f"timeout={timeout!r}", "Give seconds, or None for no limit.")


def require_positive(**numbers: float) -> None:
    """Raise Refused with the name of the first of `numbers` that is not finite and above 0."""
    for name, one in numbers.items():
        require(0 < one < math.inf, f"{name}={one}", "Give a number above 0.")  # a NaN is neither


def require(holds: bool, what: str, todo: str) -> None:
    """Raise Refused with the texts `what` and `todo` unless `holds`."""
    if not holds:
        raise Refused(what, safe="Nothing was touched.", todo=todo)

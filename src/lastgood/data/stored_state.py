"""The stored state of a sampler, decoded and checked field by field. Raises Refused for malformed fields."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..errors import Refused
from .order import Order, whole_number
from .skips import Skips

UNCHANGED = "The sampler is unchanged."


class Saved(NamedTuple):
    """A checked state from which a sampler can continue."""

    epoch: int
    cursor: int
    step: int | None
    order: Order
    earlier: list[tuple[int, Order]]
    """(epoch, order of the epochs before it), ascending by epoch"""
    skips: Skips


def stored_number(name: str, value: object) -> int:
    return whole_number(f"{name} of the sampler's state", value, safe=UNCHANGED)


def stored_order(fields: list[Any]) -> Order:
    *numbers, shuffle = fields
    size, batch, seed = map(stored_number, Order._fields, numbers)
    if type(shuffle) is not bool or not 0 < batch <= size:
        raise _malformed(fields)
    return Order(size, batch, seed, shuffle)


def stored_change(fields: object, seed: int) -> tuple[int, Order]:
    if not isinstance(fields, list) or len(fields) != 4:
        raise _malformed(fields)
    until, size, batch, shuffle = fields
    return stored_number("earlier", until), stored_order([size, batch, seed, shuffle])


def stored_skips(fields: object) -> Skips:
    found = Skips()
    for one in fields if isinstance(fields, list) else [fields]:
        if not isinstance(one, list) or len(one) != 2 or not isinstance(one[1], list):
            raise _malformed(one)
        found.add(stored_number("skipped", one[0]), [stored_number("skipped", window) for window in one[1]])
    return found


def _malformed(found: object) -> Refused:
    return Refused(f"the sampler's state is malformed: {found}", safe=UNCHANGED)

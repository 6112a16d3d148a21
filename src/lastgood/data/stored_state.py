"""The stored state of a sampler, decoded and checked field by field. Raises Refused for malformed fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import Refused
from .order import Order, whole_number
from .skips import Skips

_UNCHANGED = "The sampler is unchanged."
_PLACE = {"epoch", "cursor_step", "seed"}
"""keys of the states that earlier versions wrote"""
_KEYS = _PLACE | {"dataset_size", "earlier", "global_batch", "shuffle", "step"}
SKIPPED = "skipped"
"""key of the windows that are left out; a state without any does not have it"""


class Saved(NamedTuple):
    """A checked state from which a sampler can continue."""

    epoch: int
    cursor: int
    step: int | None
    order: Order
    earlier: list[tuple[int, Order]]
    """(epoch, order of the epochs before it), ascending by epoch"""
    skips: Skips


def stored_state(state: object, own: Order) -> Saved:
    """The checked fields of a state. Raises Refused unless a sampler of the order `own` can continue from it."""
    if not isinstance(state, Mapping) or set(state) - {SKIPPED} not in (_KEYS, _PLACE):
        found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise Refused(f"a sampler's state has {', '.join(sorted(_KEYS))}; this one is {found}", safe=_UNCHANGED)
    # what an older state lacks is taken from this sampler
    full = {**own._asdict(), "step": None, "earlier": [], SKIPPED: [], **state}
    epoch, cursor = (_number(name, full[name]) for name in ("epoch", "cursor_step"))
    order = _order([full[name] for name in Order._fields])
    step = None if full["step"] is None else _number("step", full["step"])
    earlier = [_change(one, order.seed) for one in full["earlier"]]
    if order != own and (cursor or order.seed != own.seed):  # guard: changed-order-refused
        raise Refused(
            f"the state, at step {cursor} of epoch {epoch}, has another order: {differences(order, own)}",
            safe=_UNCHANGED,
            todo="Make the sampler with the values of the state. dataset_size, global_batch and shuffle may change "
            "where an epoch begins (until then use torch.utils.data.Subset of a dataset that grew), seed never.",
        )
    if cursor >= order.steps_per_epoch:
        raise Refused(
            f"the state is at step {cursor} of epoch {epoch}, and an epoch has {own.steps_per_epoch} steps "
            f"here (dataset_size {own.dataset_size}, global_batch {own.global_batch}): one of these has changed",
            safe=_UNCHANGED,
            todo="Use the dataset and the global batch that the state was saved with.",
        )
    return Saved(epoch, cursor, step, order, earlier, _skips(full[SKIPPED]))


def differences(saved: Order, own: Order) -> str:
    """The parameters in which the order of a state differs from that of the sampler."""
    pairs = zip(Order._fields, saved, own, strict=True)
    return ", ".join(f"{name} {stored} in the state, {here} here" for name, stored, here in pairs if stored != here)


def _number(name: str, value: object) -> int:
    return whole_number(f"{name} of the sampler's state", value, safe=_UNCHANGED)


def _order(fields: list[Any]) -> Order:
    *numbers, shuffle = fields
    size, batch, seed = map(_number, Order._fields, numbers)
    if type(shuffle) is not bool or not 0 < batch <= size:
        raise _malformed(fields)
    return Order(size, batch, seed, shuffle)


def _change(fields: object, seed: int) -> tuple[int, Order]:
    if not isinstance(fields, list) or len(fields) != 4:
        raise _malformed(fields)
    until, size, batch, shuffle = fields
    return _number("earlier", until), _order([size, batch, seed, shuffle])


def _skips(fields: object) -> Skips:
    found = Skips()
    for one in fields if isinstance(fields, list) else [fields]:
        if not isinstance(one, list) or len(one) != 2 or not isinstance(one[1], list):
            raise _malformed(one)
        found.add(_number("skipped", one[0]), [_number("skipped", window) for window in one[1]])
    return found


def _malformed(found: object) -> Refused:
    return Refused(f"the sampler's state is malformed: {found}", safe=_UNCHANGED)

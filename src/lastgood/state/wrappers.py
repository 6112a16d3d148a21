"""Wrappers: optimizers that only delegate to another one, as those of Accelerate and Lightning Fabric do.

A wrapper is stored as the optimizer inside of it. So a run that was saved with a wrapper can be restored without it,
and the reverse, and the fence of a save hooks the step of the inner optimizer. An optimizer that has data of its own,
such as Lookahead, is not a wrapper. Its state_dict() may equal that of the inner one until its data exists, so equality
alone does not prove a wrapper: the class must also come from a library whose wrappers only delegate, or the object must
hold nothing but the inner optimizer.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

from torch.optim import Optimizer

from .objects import tag_of

_LIBRARIES = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
"""packages whose optimizers with an `optimizer` inside only delegate to it"""
_OF_SCHEDULERS = ("step", "_opt_called")
"""attributes that the schedulers of torch set on the optimizer that they are given"""


class Wrappers:
    """Finds the optimizers inside of wrappers. Remembers of each object whether it is one."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], bool]] = {}

    def unwrapped(self, obj: Any) -> Any:
        """The optimizer inside of `obj`, if `obj` is a wrapper; else `obj` itself."""
        if tag_of(obj) not in ("!object", "!optimizer"):
            return obj
        direct = getattr(obj, "optimizer", None)
        if not isinstance(direct, Optimizer) or getattr(obj, "param_groups", None) is not direct.param_groups:
            return obj
        if not _holds_nothing_of_its_own(obj, direct):  # checked each time: any step may add data
            return obj
        inner = self.unwrapped(direct)
        return inner if tag_of(inner) == "!optimizer" and self._delegates(obj, inner) else obj

    def _delegates(self, obj: Any, inner: Optimizer) -> bool:
        known = self._known.get(id(obj))
        if known is not None and known[0]() is obj:
            return known[1]
        answer = _same(obj.state_dict(), inner.state_dict())
        with suppress(TypeError):  # an object without weak references is compared each time
            self._known[id(obj)] = weakref.ref(obj), answer
        return answer


def _holds_nothing_of_its_own(obj: Any, inner: Optimizer) -> bool:
    """Whether the object cannot have any data except the optimizer inside of it."""
    if type(obj).__module__.partition(".")[0] in _LIBRARIES:
        return True
    own = {key: one for key, one in getattr(obj, "__dict__", {}).items() if key not in _OF_SCHEDULERS}
    return bool(own) and all(one is inner or one is vars(inner).get(key) for key, one in own.items())


def _same(one: Any, other: Any) -> bool:
    """Whether two state_dicts are equal; tensors must be the same objects."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return one is other or (isinstance(one, (int, float, str)) and bool(one == other))

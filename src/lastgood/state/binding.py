"""What the binders of data, modules and optimizers share while a live state is compared with a stored one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..format.values import Filter
from .decode import Stored, TensorRef
from .differences import Differences
from .tensor_plan import Making, TensorPlan

Put = Callable[[], Any]
"""Called once the tensors are written: makes and returns what belongs at a place; where it can, the live object itself,
refilled."""

ABSENT: Any = type("Absent", (), {"__doc__": "Stands where the live state has nothing."})()


class Placement(Protocol):
    """Where the new tensors of an optimizer or object are made."""

    def making(self, ref: TensorRef, path: str) -> Making: ...


class Walk(Protocol):
    """One comparison of a live state with a stored one, and what it has found (`binder.Binder`)."""

    stored: Stored
    names: Filter
    differences: Differences
    tensors: TensorPlan
    last: list[Callable[[], object]]
    """what is done after everything else"""

    def bind(self, live: Any, saved: Any, path: str, placement: Placement | None = None) -> Put: ...

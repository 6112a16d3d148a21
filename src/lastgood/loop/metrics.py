"""Metrics: the numbers among what a loop measures, for retention to compare."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from .. import reporting
from ..errors import Refused


def numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Name -> finite number. NaN, infinity and None are left out, with a line; a loss may be any of them.

    Takes numbers, and tensors and arrays of numpy without a dimension. Raises Refused, which names the metric.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise _refused(f"metrics={metrics!r}")
    found = {name: _number(name, value) for name, value in metrics.items()}
    odd = [f"{name} is {value}" for name, value in found.items() if not math.isfinite(value)]
    if odd:
        reporting.info(f"metrics left out: {', '.join(odd)}")
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _number(name: str, value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, (str, bytes)) or getattr(value, "shape", None):
        raise _refused(f"metric {name!r} is {value!r}")
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, OverflowError):
        raise _refused(f"metric {name!r} is {value!r}") from None


def _refused(what: str) -> Refused:
    return Refused(what, safe="Nothing was written.", todo='Give names and numbers: metrics={"loss": 0.5}.')

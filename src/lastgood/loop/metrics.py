"""Metrics: the values that a loop gives with a save, checked and converted to numbers that retention can compare."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from .. import reporting
from ..errors import Refused
from ..state import dtensor


def whole(metrics: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The same metrics, with the tensor itself in place of each DTensor, of which this process may hold a part, such as
    the norm that `clip_grad_norm_` of FSDP2 returns. A collective of the ranks of such a one: all of them call it, for
    a save and for the comparison of a Sentinel, at the same steps.
    """
    parts = [name for name, one in metrics.items() if dtensor.is_sharded(one)] if isinstance(metrics, Mapping) else []
    if not parts or metrics is None:
        return metrics
    found = {name: metrics[name].detach().full_tensor() for name in parts}  # guard: sharded-metric-is-whole
    return {**metrics, **found}


def numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Name -> finite number. NaN, infinity and None, which a loss may be, are left out and reported. All ranks call it.

    `metrics`: name -> number, or tensor or numpy array of shape []; None means no metrics. Raises Refused, with the
    name of the metric, for anything else.
    """
    metrics = whole(metrics)
    found = checked(metrics)
    left_out = {name: value for name, value in found.items() if not math.isfinite(value)}
    if metrics is not None and left_out:
        named = [f"{name} is {None if metrics[name] is None else value}" for name, value in left_out.items()]
        reporting.info(f"metrics left out: {', '.join(named)}")
    return {name: value for name, value in found.items() if name not in left_out}


def checked(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """The same with NaN and infinity, and NaN for None. Raises as `numbers`."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise _refused(f"metrics={metrics!r}")
    return {name: number(name, value) for name, value in metrics.items()}


def number(name: str, value: Any) -> float:
    """A metric as a number; NaN for None. Raises Refused, with its name, for what is no number."""
    if value is None:
        return math.nan
    if isinstance(value, (str, bytes)) or getattr(value, "shape", None):
        raise _refused(f"metric {name!r} is {value!r}")
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a complex tensor
        raise _refused(f"metric {name!r} is {value!r}") from None


def _refused(what: str) -> Refused:
    return Refused(what, safe="Nothing was written.", todo='Give names and numbers: metrics={"loss": 0.5}.')

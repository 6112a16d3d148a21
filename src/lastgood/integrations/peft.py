"""PEFT: the entry of a state that stores which adapters are active, and AdaLoRA's ranks."""

from __future__ import annotations

from ..state.adapters import Adapters

__all__ = ["Adapters"]

"""Finds NaN and infinity among the bytes of a tensor of any dtype. Pure; torch-free.

In each of these float formats the bits below the sign tell whether an element is finite: all patterns from some value
on, or one single pattern, are not. So elements are compared as integers, which needs no conversion, and works for
formats that numpy does not have.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np

from ..errors import NotFinite
from ..limits import FINITE_BLOCK_BYTES


class _Pattern(NamedTuple):
    """Which elements are not finite, as unsigned integers of type `kind`.

    After masking: those of at least `least`, or, if `single`, only those equal to `least`.
    """

    kind: str
    mask: int
    least: int
    single: bool = False


_PATTERNS = {  # guard: nan-pattern-of-float32
    "float64": _Pattern("u8", 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    "float32": _Pattern("u4", 0x7FFF_FFFF, 0x7F80_0000),
    "float16": _Pattern("u2", 0x7FFF, 0x7C00),
    "bfloat16": _Pattern("u2", 0x7FFF, 0x7F80),
    "float8_e5m2": _Pattern("u1", 0x7F, 0x7C),
    "float8_e4m3fn": _Pattern("u1", 0x7F, 0x7F),
    "float8_e8m0fnu": _Pattern("u1", 0xFF, 0xFF),
    # The only NaN of these formats has the bits of minus zero.
    "float8_e5m2fnuz": _Pattern("u1", 0xFF, 0x80, single=True),
    "float8_e4m3fnuz": _Pattern("u1", 0xFF, 0x80, single=True),
}
_PATTERNS |= {
    "complex128": _PATTERNS["float64"],
    "complex64": _PATTERNS["float32"],
    "complex32": _PATTERNS["float16"],
    "bcomplex32": _PATTERNS["bfloat16"],
}


def not_finite(dtype: str, data: memoryview) -> bool:
    """Whether `data`, whole elements of `dtype`, holds NaN or infinity. False for a dtype that has neither."""
    pattern = _PATTERNS.get(dtype)
    if pattern is None:
        return False
    mask, least = (np.array(bits, dtype=pattern.kind) for bits in (pattern.mask, pattern.least))
    elements = np.frombuffer(data, dtype=pattern.kind)
    step = FINITE_BLOCK_BYTES // elements.itemsize
    room = np.empty(min(step, len(elements)), dtype=pattern.kind)
    for start in range(0, len(elements), step):
        block = elements[start : start + step]
        seen = np.bitwise_and(block, mask, out=room[: len(block)])  # guard: non-finite-ignores-sign
        if (seen == least).any() if pattern.single else seen.max() >= least:  # guard: single-pattern-formats
            return True
    return False


def exception(*tensors: str) -> str:
    """The argument of a save that exempts these tensors, for messages: finite_except=["model.mask"]."""
    return f"finite_except={json.dumps(sorted(set(tensors)))}"


def not_finite_error(tensor: str) -> NotFinite:
    """The error for a tensor that holds NaN or infinity."""
    return NotFinite(
        f"{tensor} holds NaN or infinity",
        tensor=tensor,
        safe="The generation is intact and is kept; it is loaded only if its step is requested.",
        todo=f"Go back to an older step, or save with {exception(tensor)} if it may hold them.",
    )

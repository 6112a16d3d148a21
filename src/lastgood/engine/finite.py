"""Are they numbers: NaN and infinity among the bytes of a tensor, whatever its dtype. Pure; knows no torch.

Every float format here says "not finite" in the bits below its sign: from some pattern on, or at one single pattern.
So integers are compared: no rounding and no overflow can come in between, and numpy need not know the format.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np

from ..errors import NotFinite

BLOCK_BYTES = 1 << 18
"""looked at at once: what is made of it stays in the processor's cache"""


class _Pattern(NamedTuple):
    """Elements as unsigned integers: those that reach `least` behind the mask, or, if it is `single`, are just that."""

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
    # Their one NaN stands where minus zero would.
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
    """Whether there is NaN or infinity in whole elements of `dtype`; False for what has neither."""
    pattern = _PATTERNS.get(dtype)
    if pattern is None:
        return False
    mask, least = (np.array(bits, dtype=pattern.kind) for bits in (pattern.mask, pattern.least))
    elements = np.frombuffer(data, dtype=pattern.kind)
    step = BLOCK_BYTES // elements.itemsize
    room = np.empty(min(step, len(elements)), dtype=pattern.kind)
    for start in range(0, len(elements), step):
        block = elements[start : start + step]
        seen = np.bitwise_and(block, mask, out=room[: len(block)])  # guard: non-finite-ignores-sign
        if (seen == least).any() if pattern.single else seen.max() >= least:  # guard: single-pattern-formats
            return True
    return False


def exception(*tensors: str) -> str:
    """The argument that exempts these tensors: finite_except=["model.mask"]."""
    return f"finite_except={json.dumps(sorted(set(tensors)))}"


def not_finite_error(tensor: str) -> NotFinite:
    return NotFinite(
        f"{tensor} holds NaN or infinity",
        tensor=tensor,
        safe="The generation is intact and stays; it is loaded only when its step is asked for.",
        todo=f"Go back to an older step, or open the run with {exception(tensor)} if it may hold them.",
    )

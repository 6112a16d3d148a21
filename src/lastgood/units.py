"""Numbers as texts for people. Pure."""

from __future__ import annotations


def size(count: float) -> str:
    """A number of bytes with a decimal unit and three digits: 1.23 GB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}" if count < 999.5 * scale else f"{count / scale:.0f} {unit}"
    return f"{count:.0f} B"

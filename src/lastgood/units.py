"""Numbers and lists as texts for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def size(count: float) -> str:
    """A number of bytes with a decimal unit and three digits: 1.23 GB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}" if count < 999.5 * scale else f"{count / scale:.0f} {unit}"
    return f"{count:.0f} B"


def span(seconds: float) -> str:
    """A time span for people: 45 s, 12 min, 3.2 h, 2.1 d."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 36 * 3600 else f"{seconds / 86400:.1f} d"


def plural(count: int, noun: str) -> str:
    """1 tensor, 2 tensors, 2 aliases."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}{'es' if noun.endswith('s') else 's'}"


def shortened(texts: Sequence[str], most: int, separator: str = ", ") -> str:
    """The first of these texts, and how many more there are: `a, b and 3 more`."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more

"""Stored values (the tagged JSON of format/values.py) as a tree of names and short texts."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from typing import Any

from ..errors import ManifestInvalid
from ..format import values
from .terminal import clean

TEXT_LENGTH = 100
"""characters of a value that are shown at most"""


def parts_of(value: Any) -> list[tuple[str, Any]]:
    """Names and parts of a stored value; empty for a leaf. A list without nested objects is one leaf."""
    if isinstance(value, dict):
        tag = next(iter(value), "")
        if tag in ("!dict", "!OrderedDict", "!Counter"):
            return [(key if isinstance(key, str) else value_text(key), part) for key, part in value[tag]]
        if not tag.startswith("!"):
            return list(value.items())
        if tag == "!permuted":
            return [("memory_order", value[tag][0])]
        value = value[tag]
        if isinstance(value, dict):  # an object and its attributes
            return parts_of(value)
    if isinstance(value, list) and any(isinstance(part, dict) for part in value):
        return [(str(index), part) for index, part in enumerate(value)]
    return []


def is_place(value: Any) -> bool:
    """Whether this leaf is the place of a tensor, or a module that holds nothing but tensors."""
    return isinstance(value, dict) and next(iter(value), "!module") in ("!module", "!tensor", "!ndarray")


def leaves_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and leaf, for every leaf of a stored value."""
    parts = parts_of(value)
    for name, part in parts:
        yield from leaves_of(part, f"{path}.{name}" if path else name)
    if not parts:
        yield path, value


class _Tagged:
    """A value that only lastgood.state can build, shown as its tag and its stored form."""

    def __init__(self, tag: str, body: Any) -> None:
        self._text = f"{tag[1:]} {_short.repr(body)}"

    def __repr__(self) -> str:
        return self._text


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


def value_text(value: Any) -> str:
    """A leaf as one short line."""
    try:
        text = _short.repr(values.decode(value, lambda tag, body, _: _Tagged(tag, body)))
    except (ManifestInvalid, ValueError):  # Python writes no number of more than 4,300 digits
        text = _short.repr(value)
    return clean(text if len(text) <= TEXT_LENGTH else f"{text[: TEXT_LENGTH - 4]} ...")

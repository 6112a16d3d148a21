"""Encodings: single values of the standard library and of numpy <-> simpler values that JSON with tags can hold.

Pure. values.py encodes the parts that `taken_apart` returns, and passes decoded parts to `rebuilt`. Each encoding
builds one fixed type from checked parts. The result is taken apart again and must give the same parts, so every value
has exactly one accepted form.
"""

from __future__ import annotations

import os
import re
import struct
import zoneinfo
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Context, Decimal
from fractions import Fraction
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np

from ..errors import ManifestInvalid, Refused
from ..limits import DTYPE_DEPTH_LIMIT


def need(holds: object, what: str) -> None:
    """Raise ManifestInvalid unless `holds`; `what` describes what is wrong with the stored value."""
    if not holds:
        raise ManifestInvalid(f"a stored value is malformed: {what}")


def parsed(parse: Callable[..., Any], *parts: Any) -> Any:
    """The result of `parse(*parts)`. Raises ManifestInvalid if it fails."""
    try:
        return parse(*parts)
    except (ValueError, TypeError, ArithmeticError, struct.error) as error:
        raise ManifestInvalid(f"a stored value is malformed: {error}") from error


# ---- the standard library --------------------------------------------------------------------------------------


class Encoding(NamedTuple):
    """How the values of one type are taken apart into parts and rebuilt from them."""

    part_types: tuple[tuple[type, ...], ...]
    """the types that each part may have"""
    apart: Callable[[Any], list[Any]]
    rebuild: Callable[..., Any]


_TEXT, _INT = (str,), (int,)
_ZONE = (timezone, zoneinfo.ZoneInfo, type(None))
_TIMEZONE_KEY = re.compile(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*")
_ON_POSIX = os.name == "posix"


def _zone(key: str) -> zoneinfo.ZoneInfo:
    need(_TIMEZONE_KEY.fullmatch(key), f"no time zone {key[:100]!r}")
    try:
        return zoneinfo.ZoneInfo(key)
    except (zoneinfo.ZoneInfoNotFoundError, OSError) as error:
        raise Refused(
            f"a stored value refers to the time zone {key!r}, which this machine does not know",
            safe="Nothing was touched.",
            todo="Install the time zone database: pip install tzdata",
        ) from error


ENCODINGS: dict[type, Encoding] = {
    range: Encoding((_INT, _INT, _INT), lambda one: [one.start, one.stop, one.step], range),
    Decimal: Encoding((_TEXT,), lambda one: [Context(capitals=1).to_sci_string(one)], Decimal),
    Fraction: Encoding((_INT, _INT), lambda one: [one.numerator, one.denominator], Fraction),
    UUID: Encoding((_TEXT,), lambda one: [str(one)], UUID),
    timedelta: Encoding((_INT, _INT, _INT), lambda one: [one.days, one.seconds, one.microseconds], timedelta),
    date: Encoding((_TEXT,), lambda one: [one.isoformat()], date.fromisoformat),
    time: Encoding(
        (_TEXT, _INT, _ZONE),
        lambda one: [one.replace(tzinfo=None).isoformat(), one.fold, one.tzinfo],
        lambda text, fold, zone: time.fromisoformat(text).replace(fold=fold, tzinfo=zone),
    ),
    datetime: Encoding(
        (_TEXT, _INT, _ZONE),
        lambda one: [one.replace(tzinfo=None).isoformat(), one.fold, one.tzinfo],
        lambda text, fold, zone: datetime.fromisoformat(text).replace(fold=fold, tzinfo=zone),
    ),
    timezone: Encoding(
        ((timedelta,), (str, type(None))),
        lambda one: [*one.__getinitargs__(), None][:2],
        lambda offset, name: timezone(offset) if name is None else timezone(offset, name),
    ),
    zoneinfo.ZoneInfo: Encoding((_TEXT,), lambda one: [one.key], _zone),
    PurePosixPath: Encoding((_TEXT,), lambda one: [str(one)], PurePosixPath),
    PureWindowsPath: Encoding((_TEXT,), lambda one: [str(one)], PureWindowsPath),
    PosixPath: Encoding((_TEXT,), lambda one: [str(one)], PosixPath if _ON_POSIX else PurePosixPath),
    WindowsPath: Encoding((_TEXT,), lambda one: [str(one)], PureWindowsPath if _ON_POSIX else WindowsPath),
}
"""exact type -> its encoding; a path of another operating system is decoded as a pure path"""

_BY_TAG = {f"!{kind.__name__}": one for kind, one in ENCODINGS.items()}


def taken_apart(obj: Any) -> list[Any] | None:
    """The parts of a value whose exact type is in ENCODINGS, for the tag `!<name of the type>`; otherwise None."""
    found = ENCODINGS.get(type(obj))
    return None if found is None else found.apart(obj)


def is_encoding(tag: str) -> bool:
    """Whether `rebuilt` accepts this tag."""
    return tag in _BY_TAG


def rebuilt(tag: str, parts: list[Any]) -> Any:
    """The value that these parts were taken from.

    Raises ManifestInvalid for parts that `taken_apart` does not return, and Refused for a time zone that this machine
    does not know.
    """
    found = _BY_TAG[tag]
    types = list(map(type, parts))
    need(
        len(parts) == len(found.part_types)
        and all(kind in allowed for kind, allowed in zip(types, found.part_types, strict=True)),
        f"{tag} without its parts",
    )
    made = parsed(found.rebuild, *parts)
    need(found.apart(made) == parts, f"{tag} in another form than it is written")
    return made


# ---- numpy's dtypes --------------------------------------------------------------------------------------------

_DTYPE = re.compile(r"[<>|][biufcmMSUV]\d{1,9}(\[\d{0,9}[A-Za-z]{1,7}\])?")


def dtype_tree(dtype: np.dtype[Any]) -> Any:
    """A dtype as JSON: a string such as `<f4`, or a dict for a dtype with fields or subarrays.

    An empty string for a dtype that holds objects, titles or metadata, or whose class is not numpy's own.
    """
    if _DTYPE.fullmatch(dtype.str) and np.dtype(dtype.str) == dtype:
        return dtype.str
    if dtype.hasobject or dtype.metadata or dtype.type is not np.void:
        return ""
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        inner = dtype_tree(base)
        return inner and {"base": inner, "shape": list(shape)}
    fields = [(name, *dtype.fields[name]) for name in dtype.names or ()] if dtype.fields else []
    trees = [[name, offset, dtype_tree(kind)] for name, kind, offset, *title in fields if not title]
    if not trees or len(trees) < len(fields) or not all(tree for _, _, tree in trees):
        return ""
    return {"fields": trees, "itemsize": dtype.itemsize, "aligned": dtype.isalignedstruct}


def numpy_dtype(tree: Any) -> np.dtype[Any]:
    """The dtype that `dtype_tree` described. Raises ManifestInvalid."""
    made = _dtype(tree, 0)
    need(dtype_tree(made) == tree, "a dtype in another form than it is written")
    return made


def _dtype(tree: Any, depth: int) -> np.dtype[Any]:
    if type(tree) is str:
        need(_DTYPE.fullmatch(tree), f"no dtype {tree[:100]!r}")
        return parsed(np.dtype, tree)  # type: ignore[no-any-return]
    need(type(tree) is dict and depth < DTYPE_DEPTH_LIMIT, "a dtype")
    if tree.keys() == {"base", "shape"}:
        shape = tree["shape"]
        need(type(shape) is list and all(type(size) is int for size in shape), "a dtype")
        return parsed(np.dtype, (_dtype(tree["base"], depth + 1), tuple(shape)))  # type: ignore[no-any-return]
    need(tree.keys() == {"fields", "itemsize", "aligned"} and type(tree["aligned"]) is bool, "a dtype")
    fields = tree["fields"]
    need(type(fields) is list and all(type(one) is list and len(one) == 3 for one in fields), "a dtype")
    need(all(type(name) is str and type(offset) is int for name, offset, _ in fields), "a dtype")
    described = {
        "names": [name for name, _, _ in fields],
        "formats": [_dtype(kind, depth + 1) for _, _, kind in fields],
        "offsets": [offset for _, offset, _ in fields],
        "itemsize": tree["itemsize"],
    }
    return parsed(np.dtype, described, tree["aligned"])  # type: ignore[no-any-return]

"""Instances: Enum members, namedtuples, dataclasses and their like, stored as the name of a class and plain parts.

No stored code runs when they are loaded. A class is found by its name among the modules that are imported already, by
reading their dictionaries: nothing is imported, and no attribute hook runs. It must be a class of the kind that the
tag says, with the same members or fields. The instance is made by the builtin base (`object.__new__`,
`tuple.__new__`, ...) and its fields are set in its dictionary: no `__init__`, `__post_init__`, `__new__` or
`__setattr__` of the class is called. A class with `__del__` is refused, because dropping an instance would run it.
See docs/decisions/0016.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
from collections.abc import Callable
from types import MemberDescriptorType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from ..format.values import LEFT_OUT, Filter, join, refusal

# ---- classes ---------------------------------------------------------------------------------------------------

_SCALARS = (int, float, str)
_HEAP_TYPE = 1 << 9
"""flag of a class that a class statement has made, in `type.__flags__`"""


def class_name(kind: type) -> str:
    """`package.module:Class.Inner`. The main module of a spawned process has the name that it has in its parent."""
    module = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__
    return f"{module}:{kind.__qualname__}"


def find_class(name: str, live: Any = None) -> type | None:
    """The class of this name: that of the live object if its qualified name agrees, else an imported one, or None.

    It reads dictionaries only: no module is imported, and no code of a module or a metaclass runs.
    """
    module, _, qualified = name.partition(":")
    if type(live).__qualname__ == qualified:
        return type(live)
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        reader: Any = type if issubclass(type(found), type) else object
        if reader is object and not issubclass(type(found), ModuleType):
            return None
        found = reader.__getattribute__(found, "__dict__").get(part)
    return found if issubclass(type(found), type) else None


def attribute(kind: type, name: str) -> Any:
    """What a class or a base of it defines under this name, without asking its metaclass; None if nothing does."""
    dictionaries = [vars(one) for one in type.__getattribute__(kind, "__mro__")]
    return next((one[name] for one in dictionaries if name in one), None)


def tag_of_class(kind: type) -> str:
    """The tag for the instances of a class; empty for a class that is of no kind known here."""
    if kind is np.ma.MaskedArray:
        return "!np.ma"
    if type(kind).__getattribute__ is not type.__getattribute__ or not kind.__flags__ & _HEAP_TYPE:
        return ""
    if attribute(kind, "__del__") is not None:
        return ""
    if issubclass(type(kind), enum.EnumMeta):
        return "!Enum"
    bases = kind.__mro__
    builtin = next(one for one in bases if not one.__flags__ & _HEAP_TYPE)
    if builtin in _SCALARS:
        return "!subclass"
    fields = attribute(kind, "_fields")
    if builtin is tuple and type(fields) is tuple and all(type(one) is str for one in fields):
        return "!namedtuple"
    return "!dataclass" if builtin is object and attribute(kind, "__dataclass_fields__") is not None else ""


# ---- their instances -------------------------------------------------------------------------------------------


class Form(NamedTuple):
    """How the instances behind one tag are taken apart, and put together again."""

    names: Callable[[Any], list[str]]
    """class -> the names of the parts that each instance has"""
    apart: Callable[[Any], dict[str, Any]]
    """instance -> its parts by name; those that cannot be read plainly are absent"""
    differs: Callable[[Any, dict[str, Any]], str]
    """(class, all stored parts) -> why no instance can be made of them, or nothing"""
    together: Callable[[Any, dict[str, Any], Any], Any]
    """(class, all parts, live instance or None) -> the live instance if it can hold them, else a new one"""


def _dictionary(one: Any) -> dict[str, Any]:
    return object.__getattribute__(one, "__dict__") if attribute(type(one), "__dict__") is not None else {}


def _slots(kind: type) -> dict[str, Any]:
    """The slots of a class and its bases; a base comes before what is derived from it."""
    layers = [vars(one) for one in reversed(type.__getattribute__(kind, "__mro__"))]
    return {name: one for layer in layers for name, one in layer.items() if type(one) is MemberDescriptorType}


def _attributes(one: Any) -> dict[str, Any]:
    """What an instance holds: its dictionary without cached properties, and the slots that are set."""
    slots = {name: slot for name, slot in _slots(type(one)).items() if hasattr(one, name)}
    inside = {name: part for name, part in _dictionary(one).items() if not _is_cached(type(one), name)}
    return {**inside, **{name: slot.__get__(one) for name, slot in slots.items()}}


def _is_cached(kind: type, name: str) -> bool:
    """Whether the class computes this attribute when it is first read (`functools.cached_property`)."""
    return type(attribute(kind, name)) is functools.cached_property


def _drop_cached(one: Any) -> None:
    """Remove the values of cached properties: what they were computed from has been restored."""
    inside = _dictionary(one)
    for name in [name for name in inside if _is_cached(type(one), name)]:
        del inside[name]


def _member(kind: Any, stored: Any) -> Any:
    """The member of this name; of a Flag also the combination of this number. None if there is none."""
    if type(stored) is str:
        return kind._member_map_.get(stored)
    if type(stored) is not int or not issubclass(kind, enum.Flag):
        return None
    try:
        found = kind._value2member_map_.get(stored)
        return enum.Flag._missing_.__func__(kind, stored) if found is None else found  # type: ignore[attr-defined]
    except ValueError:
        return None


def _member_key(one: Any) -> str | int:
    name = one._name_
    return name if type(one)._member_map_.get(name) is one else int(one._value_)


def _scalar_base(kind: type) -> Any:
    return next(base for base in _SCALARS if issubclass(kind, base))


def _scalar_differs(kind: Any, parts: dict[str, Any]) -> str:
    base = _scalar_base(kind)
    return "" if type(parts["value"]) is base else f"no {base.__name__} in the generation"


def _tuple_together(kind: Any, parts: dict[str, Any], live: Any) -> Any:
    items = [parts[name] for name in kind._fields]
    _drop_cached(live)
    same = live is not None and all(one is other for one, other in zip(items, live, strict=True))
    return live if same else tuple.__new__(kind, items)


def _dataclass_together(kind: Any, parts: dict[str, Any], live: Any) -> Any:
    _drop_cached(live)
    if live is not None and kind.__dataclass_params__.frozen:
        before = _attributes(live)
        if all(name in before and before[name] is part for name, part in parts.items()):
            return live
        live = None
    made = object.__new__(kind) if live is None else live
    slots, inside = _slots(kind), _dictionary(made)
    for name, part in parts.items():
        if name in slots:
            slots[name].__set__(made, part)
        else:
            inside[name] = part
    return made


def _masked_apart(one: Any) -> dict[str, Any]:
    mask = np.ma.getmask(one)
    fill = one._fill_value  # the property would set a default
    return {
        "data": one.data,
        "mask": None if mask is np.ma.nomask else mask,
        "fill_value": None if fill is None else fill[()],
        "hard": bool(one.hardmask),
    }


def _masked_together(_: Any, parts: dict[str, Any], live: Any) -> Any:
    mask = parts["mask"]
    if live is None or not live.flags.writeable:  # then `data` is a new array
        mask = np.ma.nomask if mask is None else mask
        return np.ma.MaskedArray(parts["data"], mask, fill_value=parts["fill_value"], hard_mask=parts["hard"])
    live.soften_mask()  # the memory of `data` is its own, and was written
    live.mask = False if mask is None else mask
    live.fill_value = parts["fill_value"]
    if parts["hard"]:
        live.harden_mask()
    return live


def _nothing(_: Any, __: dict[str, Any]) -> str:
    return ""


FORMS: dict[str, Form] = {
    "!Enum": Form(
        lambda kind: ["member"],
        lambda one: {"member": _member_key(one)},
        lambda kind, parts: "" if _member(kind, parts["member"]) is not None else f"no member {parts['member']!r} here",
        lambda kind, parts, live: _member(kind, parts["member"]),
    ),
    "!subclass": Form(
        lambda kind: ["value"],
        lambda one: {"value": _scalar_base(type(one)).__getnewargs__(one)[0]},
        _scalar_differs,
        lambda kind, parts, live: _scalar_base(kind).__new__(kind, parts["value"]),
    ),
    "!namedtuple": Form(
        lambda kind: list(kind._fields),
        lambda one: dict(zip(type(one)._fields, tuple.__iter__(one), strict=False)),
        _nothing,
        _tuple_together,
    ),
    "!dataclass": Form(
        lambda kind: [one.name for one in dataclasses.fields(kind)],
        _attributes,
        _nothing,
        _dataclass_together,
    ),
    "!np.ma": Form(lambda kind: ["data", "mask", "fill_value", "hard"], _masked_apart, _nothing, _masked_together),
}


def parts_of(obj: Any) -> dict[str, Any]:
    """The fields of a namedtuple or a dataclass, in which objects may be held; nothing of anything else."""
    tag = tag_of_class(type(obj))
    return FORMS[tag].apart(obj) if tag in ("!namedtuple", "!dataclass") else {}


def encode(obj: Any, path: str, inner: Callable[[Any, str], Any], names: Filter) -> Any:
    """An instance as its tag with the name of its class and its encoded parts; NotImplemented for any other object.

    Raises Unstorable, by name, for an instance that would not come back as it is.
    """
    kind = type(obj)
    tag = tag_of_class(kind)
    if not tag:
        return NotImplemented
    parts = FORMS[tag].apart(obj)
    if why := _obstacle(obj, tag, parts):
        if not names.keeps(path):
            return LEFT_OUT
        raise refusal(path, f"is a {class_name(kind).replace(':', '.')} {why[0]}", why[1])
    trees = {name: inner(part, join(path, name)) for name, part in parts.items()}
    wanted = {name: tree for name, tree in trees.items() if tree is not LEFT_OUT}
    if not wanted and not names.keeps(path):
        return LEFT_OUT
    return {tag: {"class": class_name(kind), "parts": wanted}}


def _obstacle(obj: Any, tag: str, parts: dict[str, Any]) -> tuple[str, str] | None:
    """Why an instance would not come back as it is, and the remedy."""
    kind = type(obj)
    if find_class(class_name(kind)) is not kind:
        return "whose class cannot be found under its name", "Define the class at the top level of a module"
    names = FORMS[tag].names(kind)
    held = _attributes(obj) if tag in ("!dataclass", "!subclass", "!namedtuple") else {}
    if extra := held.keys() - names:
        return f"with attributes that are no fields: {', '.join(sorted(extra))}", "Make them fields, or store a dict"
    if lacking := [name for name in names if name not in parts]:
        return f"without a value of its own for the field {lacking[0]}", "Set the field, or store a dict"
    return None


def resolve(tag: str, name: str, parts: dict[str, Any], live: Any) -> tuple[Any, str]:
    """The class for a stored instance that is to stand where `live` is, and why none can be made; nothing if it can."""
    kind, noun = find_class(name, live), f"a {tag[1:]} of class {name[:200].replace(':', '.')}"
    if kind is None:
        return None, f"{noun} in the generation, which is not imported here: import its module before the restore"
    if tag_of_class(kind) != tag:
        return None, f"{noun} in the generation, and no such class here"
    names = FORMS[tag].names(kind)
    held = parts.keys() | (FORMS[tag].apart(live).keys() if type(live) is kind else ())
    if parts.keys() - names or set(names) - held:
        return None, f"{noun} with the fields {sorted(parts)} in the generation, {sorted(names)} here"
    why = FORMS[tag].differs(kind, parts) if parts.keys() == set(names) else ""
    return kind, why and f"{noun} in the generation, and {why}"

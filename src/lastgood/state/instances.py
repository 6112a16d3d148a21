"""Instances: Enum members, namedtuples, dataclasses and their like, stored as the name of a class and plain parts.

Loading runs no stored code. A class is found by its name in modules that are already imported, by reading their
dictionaries: nothing is imported, and no attribute hook of a class runs (an attribute hook of a live instance may, when
it is asked for `load_state_dict`). It must be a class of the kind that the tag names, with
the same members or fields. The builtin base makes the instance (`object.__new__`, `tuple.__new__`, ...), and its fields
are set in its dictionary: no `__init__`, `__post_init__`, `__new__` or `__setattr__` of the class is called. A class
with `__del__` is refused, because deleting an instance would run it. See docs/decisions/0016.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from types import MemberDescriptorType, ModuleType
from typing import Any

import numpy as np

from ..format.values import LEFT_OUT, Filter, join, refusal

Inner = Callable[[Any, str], Any]
"""(part, path) -> its JSON: how the codec encodes what an object consists of"""

# ---- classes ---------------------------------------------------------------------------------------------------

_SCALARS = (int, float, str)
_HEAP_TYPE = 1 << 9
"""flag in `type.__flags__` of a class that a class statement has made"""


def class_name(kind: type) -> str:
    """`package.module:Class.Inner`. The main module is `__main__` in a spawned process too."""
    module = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__
    return f"{module}:{kind.__qualname__}"


def find_class(name: str, live: Any = None) -> type | None:
    """The class of this name: that of the live object if its qualified name agrees, else an imported one, else None.

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
    """The tag for the instances of a class; empty for a class that none of `FORMS` is for."""
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


class Form(ABC):
    """How instances of one kind of class (the class behind one tag) are taken apart into parts, and assembled again."""

    @abstractmethod
    def names(self, kind: Any) -> list[str]:
        """The names of the parts that each instance of the class has."""

    @abstractmethod
    def parts(self, one: Any) -> dict[str, Any]:
        """The parts of an instance, by name, without those that cannot be read from its dictionary or slots."""

    def differs(self, kind: Any, parts: dict[str, Any]) -> str:
        """Why no instance can be assembled from all its stored parts; empty if one can."""
        return ""

    @abstractmethod
    def assemble(self, kind: Any, parts: dict[str, Any], live: Any) -> Any:
        """The live instance if there is one that can hold all these parts, otherwise a new one."""


def _dictionary(one: Any) -> dict[str, Any]:
    return object.__getattribute__(one, "__dict__") if attribute(type(one), "__dict__") is not None else {}


def _slots(kind: type) -> dict[str, Any]:
    """The slots of a class and its bases; a base comes before what is derived from it."""
    layers = [vars(one) for one in reversed(type.__getattribute__(kind, "__mro__"))]
    return {name: one for layer in layers for name, one in layer.items() if type(one) is MemberDescriptorType}


def _attributes(one: Any) -> dict[str, Any]:
    """The attributes of an instance: its dictionary without cached properties, and the slots that are set."""
    found = {name: part for name, part in _dictionary(one).items() if not _is_cached(type(one), name)}
    for name, slot in _slots(type(one)).items():
        with suppress(AttributeError):  # the slot is not set
            found[name] = slot.__get__(one)  # hasattr() asks the class's `__getattr__` too
    return found


def _is_cached(kind: type, name: str) -> bool:
    """Whether the class computes this attribute when it is first read (`functools.cached_property`)."""
    return type(attribute(kind, name)) is functools.cached_property


def _drop_cached(one: Any) -> None:
    """Remove the values of cached properties, because the values that they were computed from have been restored."""
    inside = _dictionary(one)
    for name in [name for name in inside if _is_cached(type(one), name)]:
        del inside[name]


class _EnumForm(Form):
    def names(self, kind: Any) -> list[str]:
        return ["member"]

    def parts(self, one: Any) -> dict[str, Any]:
        name = one._name_
        return {"member": name if type(one)._member_map_.get(name) is one else int(one._value_)}

    def differs(self, kind: Any, parts: dict[str, Any]) -> str:
        return "" if _member(kind, parts["member"]) is not None else f"no member {parts['member']!r} here"

    def assemble(self, kind: Any, parts: dict[str, Any], live: Any) -> Any:
        return _member(kind, parts["member"])


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


class _ScalarForm(Form):
    """Subclasses of int, float and str."""

    def names(self, kind: Any) -> list[str]:
        return ["value"]

    def parts(self, one: Any) -> dict[str, Any]:
        return {"value": _scalar_base(type(one)).__getnewargs__(one)[0]}

    def differs(self, kind: Any, parts: dict[str, Any]) -> str:
        base = _scalar_base(kind)
        return "" if type(parts["value"]) is base else f"no {base.__name__} in the generation"

    def assemble(self, kind: Any, parts: dict[str, Any], live: Any) -> Any:
        return _scalar_base(kind).__new__(kind, parts["value"])


def _scalar_base(kind: type) -> Any:
    return next(base for base in _SCALARS if issubclass(kind, base))


class _NamedTupleForm(Form):
    def names(self, kind: Any) -> list[str]:
        return list(kind._fields)

    def parts(self, one: Any) -> dict[str, Any]:
        return dict(zip(type(one)._fields, tuple.__iter__(one), strict=False))

    def assemble(self, kind: Any, parts: dict[str, Any], live: Any) -> Any:
        items = [parts[name] for name in kind._fields]
        _drop_cached(live)
        same = live is not None and all(one is other for one, other in zip(items, live, strict=True))
        return live if same else tuple.__new__(kind, items)


class _DataclassForm(Form):
    def names(self, kind: Any) -> list[str]:
        return [one.name for one in dataclasses.fields(kind)]

    def parts(self, one: Any) -> dict[str, Any]:
        return _attributes(one)

    def assemble(self, kind: Any, parts: dict[str, Any], live: Any) -> Any:
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


class _MaskedArrayForm(Form):
    def names(self, kind: Any) -> list[str]:
        return ["data", "mask", "fill_value", "hard"]

    def parts(self, one: Any) -> dict[str, Any]:
        mask = np.ma.getmask(one)
        fill = one._fill_value  # the property would set a default
        return {
            "data": one.data,
            "mask": None if mask is np.ma.nomask else mask,
            "fill_value": None if fill is None else fill[()],
            "hard": bool(one.hardmask),
        }

    def assemble(self, kind: Any, parts: dict[str, Any], live: Any) -> Any:
        mask = parts["mask"]
        if live is None or not live.flags.writeable:  # then `data` is a new array
            mask = np.ma.nomask if mask is None else mask
            return np.ma.MaskedArray(parts["data"], mask, fill_value=parts["fill_value"], hard_mask=parts["hard"])
        live.soften_mask()  # its `data` was written in place already
        live.mask = False if mask is None else mask
        live.fill_value = parts["fill_value"]
        if parts["hard"]:
            live.harden_mask()
        return live


FORMS: dict[str, Form] = {
    "!Enum": _EnumForm(),
    "!subclass": _ScalarForm(),
    "!namedtuple": _NamedTupleForm(),
    "!dataclass": _DataclassForm(),
    "!np.ma": _MaskedArrayForm(),
}


def parts_of(obj: Any) -> dict[str, Any]:
    """The fields of a namedtuple or a dataclass, which may hold objects; an empty dict for anything else."""
    tag = tag_of_class(type(obj))
    return FORMS[tag].parts(obj) if tag in ("!namedtuple", "!dataclass") else {}


def encode(obj: Any, path: str, inner: Inner, names: Filter) -> Any:
    """An instance as its tag with the name of its class and its encoded parts; NotImplemented for any other object.

    Raises Unstorable, by name, for an instance that a load could not make again exactly.
    """
    kind = type(obj)
    tag = tag_of_class(kind)
    if not tag:
        return NotImplemented
    parts = FORMS[tag].parts(obj)
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
    """Why a load could not make this instance again exactly, and the remedy; None if it could."""
    kind = type(obj)
    if find_class(class_name(kind)) is not kind:
        return "whose class cannot be found under its name", "Define the class at the top level of a module"
    names = FORMS[tag].names(kind)
    held = _attributes(obj) if tag in ("!dataclass", "!subclass", "!namedtuple") else {}
    if extra := held.keys() - names:
        return f"with attributes that are not fields: {', '.join(sorted(extra))}", "Make them fields, or store a dict"
    if lacking := [name for name in names if name not in parts]:
        return f"without a value of its own for the field {lacking[0]}", "Set the field, or store a dict"
    return None


def resolve(tag: str, name: str, parts: dict[str, Any], live: Any) -> tuple[Any, str]:
    """The class for a stored instance that will replace or refill `live`, and why it does not fit; empty if it does."""
    kind, noun = find_class(name, live), f"a {tag[1:]} of class {name[:200].replace(':', '.')}"
    if kind is None:
        return None, f"{noun} in the generation, which is not imported here: import its module before the restore"
    if tag_of_class(kind) != tag:
        return None, f"{noun} in the generation, and no such class here"
    names = FORMS[tag].names(kind)
    held = parts.keys() | (FORMS[tag].parts(live).keys() if type(live) is kind else ())
    if parts.keys() - names or set(names) - held:
        return None, f"{noun} with the fields {sorted(parts)} in the generation, {sorted(names)} here"
    why = FORMS[tag].differs(kind, parts) if parts.keys() == set(names) else ""
    return kind, why and f"{noun} in the generation, and {why}"

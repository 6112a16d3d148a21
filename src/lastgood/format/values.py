"""Values: Python data <-> JSON with typed tags, and the dotted names of its parts.

The codec of everything in a state that is no tensor. It never imports torch, reads no pickle and runs no stored code:
`decode` builds only the types of the table below, and those that its hook adds.

None, bool, int (64 bit), float (finite), str and list are encoded as themselves, and so is a dict whose keys are
strings in sorted order (a writer of JSON may sort them) none of which begins with "!". Everything else is a dict with
one key, the tag:

    {"!int": "0x1f..."}                 beyond 64 bits            {"!float": "inf" | "-inf" | bits of the nan, hex}
    {"!complex": bits of both, hex}                               {"!str": base64}    with lone surrogates
    {"!bytes": base64}                  {"!bytearray": base64}    {"!tuple": [...]}
    {"!set": [...]}                     {"!frozenset": [...]}     {"!dict": [[key, value], ...]}
    {"!OrderedDict": [[key, value], ...]}                         {"!Counter": [[key, count], ...]}
    {"!np.scalar": [dtype, hex]}        {"!np.dtype": dtype}      {"!excluded": null}    a place in a list left out
    {"!deque": [maxlen or null, [...]]} {"!defaultdict": [factory or null, [[key, value], ...]]}
    {"!range": [start, stop, step]}     {"!Decimal": ["1.50"]}    {"!Fraction": [numerator, denominator]}
    {"!UUID": ["8-4-4-4-12"]}           {"!timedelta": [days, seconds, microseconds]}
    {"!date": [iso]}                    {"!time": [iso, fold, zone or null]}    {"!datetime": [iso, fold, zone or null]}
    {"!timezone": [timedelta, name or null]}                      {"!ZoneInfo": ["Europe/Berlin"]}
    {"!PosixPath": ["a/b"]}             and "!WindowsPath", "!PurePosixPath", "!PureWindowsPath"

A dtype is a string such as "<f4" ("U" or "S" for a scalar of text or bytes); {"fields": [[name, offset, dtype], ...],
"itemsize": bytes, "aligned": bool} for structures; {"base": dtype, "shape": [...]} for subarrays. The factory of a
defaultdict is the name of a builtin type of FACTORIES; any other is refused, because a function cannot be stored.

Of types outside numpy only exact ones are stored: a subclass, which would be restored as another type, is refused by
name unless the hook encodes it. Containers nest up to DEPTH_LIMIT levels, so a state that contains itself is refused.

A name is the path from the key of the state, joined with dots. In a key of a dict, "%" is written %25, "." is %2E and
a lone surrogate as its bytes likewise; a key that is not a string is written as its repr.
"""

from __future__ import annotations

import argparse
import base64
import enum
import fnmatch
import glob
import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from ..errors import ManifestInvalid, Refused, Unstorable
from ..limits import DEPTH_LIMIT
from .encodings import dtype_tree, is_encoding, need, numpy_dtype, parsed, rebuilt, taken_apart

FACTORIES: Final[dict[str, type]] = {
    kind.__name__: kind
    for kind in (bool, bytearray, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)
}
"""builtin types that may be the factory of a stored defaultdict, by name"""


class _LeftOut(enum.Enum):
    LEFT_OUT = enum.auto()


LEFT_OUT: Final = _LeftOut.LEFT_OUT
"""stands in place of what a filter has left out"""

EncodeHook = Callable[[Any, str, Callable[[Any, str], Any]], Any]
"""(object, its path, a function that encodes a part of it) -> tagged JSON, LEFT_OUT or NotImplemented"""
WholeHook = Callable[[Any, str, Callable[[], Any]], Any]
"""(container, its path, a function that encodes it) -> its JSON, which the hook may have kept from an earlier call"""
DecodeHook = Callable[[str, Any, Callable[[Any], Any]], Any]
"""(tag, its body, a function that decodes a part) -> object or NotImplemented"""


# ---- names -----------------------------------------------------------------------------------------------------


def component(key: object) -> str:
    """A key of a dict as one component of a name; reversible for strings."""
    return _SPECIAL.sub(_percent, key if type(key) is str else repr(key))


def join(path: str, key: object) -> str:
    """The name of the entry `key` of the dict named `path`."""
    return f"{path}.{component(key)}"


_SPECIAL = re.compile("[%.\ud800-\udfff]")


def _percent(found: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in found[0].encode("utf-8", "surrogatepass"))


class Filter:
    """Which names are wanted. A pattern (fnmatch) that matches a name covers everything below that name too."""

    def __init__(self, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> None:
        for patterns in (include, exclude):
            if isinstance(patterns, str):
                raise Refused(f"include and exclude are lists of patterns, not {patterns!r}", todo=f"[{patterns!r}]")
        self.everything = not include and not exclude
        self._include, self._exclude = _any_of(include), _any_of(exclude)
        self._literals = [re.split(r"[*?\[]", pattern)[0] for pattern in include]

    def keeps(self, name: str) -> bool:
        """Whether this very name is wanted."""
        if self.everything:
            return True
        if self._exclude is not None and self._exclude.fullmatch(name):
            return False
        return self._include is None or self._include.fullmatch(name) is not None

    def enters(self, name: str) -> bool:
        """Whether this name, or some name below it, may be wanted."""
        if self.everything or self.keeps(name):
            return True
        if self._exclude is not None and self._exclude.fullmatch(name):
            return False
        below = name + "."
        return any(one.startswith(below) or below.startswith(one) for one in self._literals)


def _any_of(patterns: Sequence[str]) -> re.Pattern[str] | None:
    if not patterns:
        return None
    bodies = (fnmatch.translate(one)[:-2] for one in patterns)  # without its end-of-string anchor, \Z or \z
    return re.compile(rf"(?s:(?:{'|'.join(bodies)})(?:\..*)?)")


EVERYTHING: Final = Filter()

# ---- encode ----------------------------------------------------------------------------------------------------


def nothing(*_: Any) -> Any:
    """The hook that handles no type and no tag."""
    return NotImplemented


def _walked(_: Any, __: str, walk: Callable[[], Any]) -> Any:
    return walk()


def encode(
    obj: Any, path: str, leaf: EncodeHook = nothing, names: Filter = EVERYTHING, whole: WholeHook = _walked
) -> Any:
    """`obj`, named `path`, as a tree that `msgspec.json` stores unchanged; LEFT_OUT if no name in it is wanted.

    `leaf(obj, path, inner)` is called for types that are not in the table and returns `{"!tag": body}`, LEFT_OUT or
    NotImplemented; `inner(part, path)` encodes the parts of `obj`. It is not called for members of sets, keys of dicts,
    counts of a Counter and parts of types such as datetime. `whole(obj, path, walk)` is called for each dict,
    OrderedDict, list and tuple; returns what `walk()` returns. `names` (default: all): those wanted. Raises Unstorable
    for types that neither the table nor `leaf` handles, two entries of one name, and nesting deeper than DEPTH_LIMIT.
    """
    return _Encoder(leaf, names, whole).tree(obj, path, 0)


def refusal(path: str, what: str, remedy: str = "") -> Unstorable:
    """The error for something at `path` that cannot be stored."""
    known = "Store it as numbers or tensors, or give the object a state_dict()/load_state_dict() pair"
    todo = f'{remedy or known}, or leave it out: exclude=["{glob.escape(path)}"]'
    return Unstorable(f"{path} {what}", safe="Nothing was touched.", todo=todo, names=(path,))


class _Encoder:
    def __init__(self, leaf: EncodeHook, names: Filter, whole: WholeHook) -> None:
        self._leaf, self._names, self._whole = leaf, names, whole

    def tree(self, obj: Any, path: str, depth: int) -> Any:
        if not self._names.enters(path):
            return LEFT_OUT
        if depth > DEPTH_LIMIT:
            where = path if len(path) < 200 else f"{path[:200]}..."
            raise refusal(where, f"is nested deeper than {DEPTH_LIMIT} levels (or contains itself)", "Flatten it")
        kind = type(obj)
        if kind is dict or kind is OrderedDict:
            return self._whole(obj, path, lambda: self._mapping(obj, path, depth))
        if kind is list or kind is tuple:
            return self._whole(obj, path, lambda: self._sequence(obj, path, depth))
        if kind is deque:
            return self._deque(obj, path, depth)
        if kind is defaultdict:
            return self._defaultdict(obj, path, depth)
        kept = self._names.keeps(path)
        found = self._datum(obj, path, depth) if kept else NotImplemented
        if found is NotImplemented:
            found = self._leaf(obj, path, lambda part, at: self.tree(part, at, depth + 1))
        if found is not NotImplemented:
            return found
        if not kept:
            return LEFT_OUT
        todo = "Store it as dict(...)" if isinstance(obj, Mapping) else ""
        if isinstance(obj, (argparse.Namespace, SimpleNamespace)):
            todo = "Store the dict of its attributes: vars(args)"
        raise refusal(path, f"is a {_type_name(obj)}, which cannot be stored without running code on load", todo)

    def _mapping(self, obj: dict[Any, Any], path: str, depth: int) -> Any:
        entries = self._entries(obj, path, depth)
        if not entries and not self._names.keeps(path):
            return LEFT_OUT
        if type(obj) is dict and _plain_keys([key for key, _ in entries]):
            return dict(entries)
        return {f"!{type(obj).__name__}": self._pairs(entries, path, depth)}

    def _defaultdict(self, obj: defaultdict[Any, Any], path: str, depth: int) -> Any:
        entries = self._entries(obj, path, depth)
        if not entries and not self._names.keeps(path):
            return LEFT_OUT
        factory: Any = obj.default_factory
        name = None if factory is None else next((name for name, one in FACTORIES.items() if one is factory), "")
        if name == "":
            what = f"is a defaultdict whose factory is {factory!r}, which cannot be stored without running code on load"
            raise refusal(path, what, "Use a builtin type such as list as its factory, or store dict(...)")
        return {"!defaultdict": [name, self._pairs(entries, path, depth)]}

    def _pairs(self, entries: Iterable[tuple[Any, Any]], path: str, depth: int) -> list[Any]:
        return [[_opaque(key, join(path, key), depth), tree] for key, tree in entries]

    def _entries(self, obj: dict[Any, Any], path: str, depth: int) -> list[tuple[Any, Any]]:
        """The keys and encoded values of the wanted entries of a dict."""
        names: set[str] = set()
        entries: list[tuple[Any, Any]] = []
        for key, value in obj.items():
            name = join(path, key)
            if name in names:
                raise refusal(path, f"has two entries that would both be named {name}", "Rename one of the keys")
            names.add(name)
            tree = self.tree(value, name, depth + 1)
            if tree is not LEFT_OUT:
                entries.append((key, tree))
        return entries

    def _deque(self, obj: deque[Any], path: str, depth: int) -> Any:
        trees = self._items(list(obj), path, depth)
        return trees if trees is LEFT_OUT else {"!deque": [obj.maxlen, trees]}

    def _sequence(self, obj: Sequence[Any], path: str, depth: int) -> Any:
        trees = self._items(obj, path, depth)
        return trees if trees is LEFT_OUT or type(obj) is list else {"!tuple": trees}

    def _items(self, obj: Sequence[Any], path: str, depth: int) -> Any:
        if self._names.everything and depth < DEPTH_LIMIT and only_numbers(obj):
            return list(obj)
        trees = [self.tree(item, f"{path}.{index}", depth + 1) for index, item in enumerate(obj)]
        if not self._names.keeps(path) and all(tree is LEFT_OUT for tree in trees):
            return LEFT_OUT
        return [{"!excluded": None} if tree is LEFT_OUT else tree for tree in trees]

    def _datum(self, obj: Any, path: str, depth: int) -> Any:
        kind = type(obj)
        if obj is None or kind is bool:
            return obj
        if kind is int:
            return obj if -(2**63) <= obj < 2**63 else {"!int": hex(obj)}
        if kind is float:
            return obj if math.isfinite(obj) else {"!float": _float_text(obj)}
        if kind is str:
            return obj if _encodable(obj) else {"!str": _base64(obj.encode("utf-8", "surrogatepass"))}
        if kind is complex:
            return {"!complex": struct.pack(">2d", obj.real, obj.imag).hex()}
        if kind is bytes or kind is bytearray:
            return {f"!{kind.__name__}": _base64(obj)}
        if kind is set or kind is frozenset:
            return {f"!{kind.__name__}": [_opaque(item, path, depth) for item in obj]}
        if kind is Counter:
            return {"!Counter": [[_opaque(part, path, depth) for part in pair] for pair in obj.items()]}
        if (parts := taken_apart(obj)) is not None:
            return {f"!{kind.__name__}": [_opaque(part, path, depth) for part in parts]}
        if isinstance(obj, np.dtype) and (tree := dtype_tree(obj)):
            return {"!np.dtype": tree}
        if kind is np.str_:
            return {"!np.scalar": ["U", obj.encode("utf-8", "surrogatepass").hex()]}
        if kind is np.bytes_:
            return {"!np.scalar": ["S", obj.hex()]}
        if isinstance(obj, np.generic) and (tree := dtype_tree(obj.dtype)):
            return {"!np.scalar": [tree, obj.tobytes().hex()]}
        return NotImplemented


def _opaque(obj: Any, path: str, depth: int) -> Any:
    """A key of a dict or a member of a set, encoded: it has no name of its own, and no hook is called for it."""
    if type(obj) is str and obj.isascii():
        return obj
    return _Encoder(nothing, EVERYTHING, _walked).tree(obj, path, depth + 1)


def _plain_keys(keys: list[Any]) -> bool:
    return all(type(key) is str and key[:1] != "!" and _encodable(key) for key in keys) and keys == sorted(keys)


def only_numbers(items: Sequence[Any]) -> bool:
    """Whether all items are ints, or all are floats, that need no tag: long lists of them are copied at once."""
    kinds = set(map(type, items))
    if kinds == {int}:
        return bool(min(items) >= -(2**63) and max(items) < 2**63)
    return not kinds or (kinds == {float} and all(map(math.isfinite, items)))


def _encodable(text: str) -> bool:
    return text.isascii() or not re.search("[\ud800-\udfff]", text)


def _float_text(number: float) -> str:
    return struct.pack(">d", number).hex() if math.isnan(number) else str(number)


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _type_name(obj: Any) -> str:
    kind = type(obj)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


# ---- decode ----------------------------------------------------------------------------------------------------


def decode(json: Any, leaf: DecodeHook = nothing) -> Any:
    """The object that `encode` made this JSON from, with LEFT_OUT in place of what was left out of a list.

    `leaf(tag, body, inner)` is called for tags that are not in the table; `inner(part)` decodes what the `inner` of
    `encode`'s hook has encoded. Accepts some JSON that `encode` writes in another form, such as unsorted keys. Raises
    ManifestInvalid for all other JSON, Refused for a time zone that this machine does not know, and nothing else.
    """
    return _Decoder(leaf).tree(json, 0)


class _Decoder:
    def __init__(self, leaf: DecodeHook) -> None:
        self._leaf = leaf

    def tree(self, json: Any, depth: int) -> Any:
        need(depth <= DEPTH_LIMIT, f"nested deeper than {DEPTH_LIMIT} levels")
        kind = type(json)
        if json is None or kind is bool or kind is str:
            return json
        if kind is int or kind is float:
            need(only_numbers([json]), "a number without its tag")
            return json
        if kind is list:
            if depth < DEPTH_LIMIT and only_numbers(json):
                return list(json)
            return [self.tree(item, depth + 1) for item in json]
        need(kind is dict and all(type(key) is str for key in json), f"a {kind.__name__}")
        if not any(key.startswith("!") for key in json):
            return {key: self.tree(item, depth + 1) for key, item in json.items()}
        need(len(json) == 1, "a tag that does not stand alone")
        ((tag, body),) = json.items()
        return self._tagged(tag, body, depth)

    def _tagged(self, tag: str, body: Any, depth: int) -> Any:
        if tag in _TEXTS:
            need(type(body) is str, f"{tag} without its text")
            return parsed(_TEXTS[tag], body)
        if tag == "!np.dtype":
            return numpy_dtype(body)
        if tag == "!np.scalar":
            need(type(body) is list and len(body) == 2 and type(body[1]) is str, f"{tag} without its parts")
            return parsed(_scalar, *body)
        if tag == "!excluded":
            need(body is None, f"{tag} with a body")
            return LEFT_OUT
        if is_encoding(tag):
            need(type(body) is list, f"{tag} without its list")
            return rebuilt(tag, [_Decoder(nothing).tree(part, depth + 1) for part in body])
        if tag in _CONTAINERS:
            return self._container(tag, body, depth)
        if tag in ("!deque", "!defaultdict"):
            need(type(body) is list and len(body) == 2 and type(body[1]) is list, f"{tag} without its list")
            first, items = body
            return (self._deque if tag == "!deque" else self._defaultdict)(first, items, depth)
        found = self._leaf(tag, body, lambda part: self.tree(part, depth + 1))
        need(found is not NotImplemented, f"an unknown tag {tag[:100]!r}")
        return found

    def _container(self, tag: str, body: Any, depth: int) -> Any:
        need(type(body) is list, f"{tag} without its list")
        if tag == "!tuple":
            return tuple(self.tree(item, depth + 1) for item in body)
        if tag in ("!set", "!frozenset"):
            members = _hashable([_Decoder(nothing).tree(item, depth + 1) for item in body])
            found = set(members) if tag == "!set" else frozenset(members)
            need(len(found) == len(body), f"{tag} with a member twice")
            return found
        return _CONTAINERS[tag](self._entries(tag, body, depth))

    def _deque(self, maxlen: Any, items: Any, depth: int) -> Any:
        need(maxlen is None or (type(maxlen) is int and len(items) <= maxlen < 2**63), "!deque without its maxlen")
        return deque((self.tree(item, depth + 1) for item in items), maxlen)

    def _defaultdict(self, factory: Any, pairs: Any, depth: int) -> Any:
        need(factory is None or (type(factory) is str and factory in FACTORIES), "!defaultdict without its factory")
        return defaultdict(FACTORIES.get(factory), self._entries("!defaultdict", pairs, depth))

    def _entries(self, tag: str, pairs: list[Any], depth: int) -> dict[Any, Any]:
        need(all(type(pair) is list and len(pair) == 2 for pair in pairs), f"{tag} without its pairs")
        keys = _hashable([_Decoder(nothing).tree(key, depth + 1) for key, _ in pairs])
        values = _Decoder(nothing) if tag == "!Counter" else self
        entries = dict(zip(keys, [values.tree(item, depth + 1) for _, item in pairs], strict=True))
        need(len(entries) == len(pairs), f"{tag} with a key twice")
        return entries


def _hashable(items: list[Any]) -> list[Hashable]:
    try:
        hash(tuple(items))
    except (TypeError, ValueError, OverflowError) as error:
        raise ManifestInvalid(f"a stored value is malformed: {error}") from error
    return items


def _float(text: str) -> float:
    if text in ("inf", "-inf"):
        return float(text)
    (number,) = struct.unpack(">d", bytes.fromhex(text)) if len(text) == 16 else (0.0,)
    need(math.isnan(number), "!float without a nan")
    return float(number)


def _scalar(dtype: Any, text: str) -> np.generic:
    data = bytes.fromhex(text)
    if dtype == "U":
        return np.str_(data.decode("utf-8", "surrogatepass"))
    if dtype == "S":
        return np.bytes_(data)
    found = numpy_dtype(dtype)
    need(len(data) == found.itemsize > 0, "!np.scalar of another length")
    return np.frombuffer(data, found).copy()[0]  # type: ignore[no-any-return]


_TEXTS: dict[str, Callable[[str], Any]] = {
    "!int": lambda text: int(text, 16),
    "!float": _float,
    "!complex": lambda text: complex(*struct.unpack(">2d", bytes.fromhex(text))),
    "!str": lambda text: base64.b64decode(text, validate=True).decode("utf-8", "surrogatepass"),
    "!bytes": lambda text: base64.b64decode(text, validate=True),
    "!bytearray": lambda text: bytearray(base64.b64decode(text, validate=True)),
}
_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "!tuple": tuple,
    "!set": set,
    "!frozenset": frozenset,
    "!dict": dict,
    "!OrderedDict": OrderedDict,
    "!Counter": Counter,
}

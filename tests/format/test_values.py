"""Values round-trip through JSON, and decoding JSON never creates an object of a user's class or runs code."""

from __future__ import annotations

import collections
import datetime
import enum
import random
import struct
import threading
from collections import Counter, OrderedDict, defaultdict, deque

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from generated import examples
from lastgood.errors import ManifestInvalid, Refused, Unstorable
from lastgood.format.encodings import ENCODINGS
from lastgood.format.values import LEFT_OUT, Filter, component, decode, encode
from lastgood.limits import DEPTH_LIMIT

writer = msgspec.json.Encoder(order="deterministic")


def through_json(obj):
    return decode(msgspec.json.decode(writer.encode(encode(obj, "it"))))


def bits(number):
    return struct.pack(">d", number)


def same(one, other):
    """Whether two values are equal in type, bits and order, at any depth."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.generic):
        return (one.dtype, one.tobytes()) == (other.dtype, other.tobytes())
    if isinstance(one, float):
        return bits(one) == bits(other)
    if isinstance(one, complex):
        return bits(one.real) + bits(one.imag) == bits(other.real) + bits(other.imag)
    if isinstance(one, dict):
        return same(list(one), list(other)) and same(list(one.values()), list(other.values()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


texts = st.text(st.characters(exclude_categories=()), max_size=8) | st.sampled_from(["!tag", "a.b", "%", "\ud800"])
floats = st.integers(0, 2**64 - 1).map(lambda number: struct.unpack(">d", number.to_bytes(8, "big"))[0])
numpy_scalars = st.one_of(
    st.tuples(st.sampled_from(list("?bBhHiIlLefdFDg")), st.binary(min_size=32, max_size=32)).map(
        lambda pair: np.frombuffer(pair[1], np.uint8 if pair[0] == "?" else pair[0])[0]
    ),
    st.booleans().map(np.bool_),
    texts.map(np.str_),
    st.binary(max_size=6).map(np.bytes_),
    st.integers(-(2**63), 2**63 - 1).map(lambda number: np.datetime64(number, "ns")),
    st.binary(min_size=3, max_size=3).map(np.void),
)
dtypes = st.sampled_from(["<f4", ">i2", "|b1", "<M8[25s]", "<U7", "|S3", "|V5"]).map(np.dtype)
plain = st.none() | st.booleans() | st.integers() | st.integers(-(2**70), 2**70) | texts | st.binary(max_size=9)
hashable = st.recursive(
    plain | st.floats(allow_nan=False),
    lambda one: st.lists(one, max_size=3).map(tuple) | st.frozensets(one, max_size=3),
)
leaves = st.one_of(
    plain,
    floats,
    st.builds(complex, floats, floats),
    st.binary(max_size=9).map(bytearray),
    numpy_scalars,
    dtypes,
    st.sets(hashable, max_size=4),
    st.frozensets(hashable, max_size=4),
    st.dictionaries(hashable, st.integers(-5, 5), max_size=4).map(Counter),
    st.lists(st.integers(-(2**65), 2**65) | floats, max_size=5),
)
trees = st.recursive(
    leaves,
    lambda one: st.one_of(
        st.lists(one, max_size=4),
        st.lists(one, max_size=4).map(tuple),
        st.dictionaries(texts, one, max_size=4),
        st.dictionaries(texts, one, max_size=4).map(OrderedDict),
        st.dictionaries(hashable, one, max_size=3),
    ),
    max_leaves=12,
)


def has_clash(obj):
    """Whether two keys of a dict inside this value have the same name, like 1 and "1"."""
    if isinstance(obj, (list, tuple)):
        return any(map(has_clash, obj))
    if not isinstance(obj, dict):
        return False
    return len({component(key) for key in obj}) < len(obj) or any(map(has_clash, obj.values()))


@given(trees)
@examples(400)
def test_values_keep_type_bits_and_order_through_a_key_sorting_writer(tree):
    assume(not has_clash(tree))
    assert same(through_json(tree), tree)


@pytest.mark.parametrize(
    "number", [-0.0, 5e-324, 1e16, 0.1, float("inf"), -float("inf"), struct.unpack(">d", b"\xff\xf0\0\0\0\0\0\x07")[0]]
)
def test_a_float_keeps_its_bits(number):
    assert bits(through_json(number)) == bits(number)
    assert bits(through_json([number])[0]) == bits(number)


def test_plain_data_is_written_as_plain_json():
    plain_tree = {"a": [1, 2.5, "x", None, True], "b": {}}
    assert encode(plain_tree, "it") == plain_tree


# ---- malicious input -------------------------------------------------------------------------------------------

TAGS = """int float complex str bytes bytearray tuple set frozenset dict OrderedDict Counter np.scalar np.dtype excluded
deque defaultdict"""
tags = st.sampled_from(
    [f"!{tag}" for tag in [*TAGS.split(), *(kind.__name__ for kind in ENCODINGS), "tensor", "__reduce__"]]
)
bodies = st.sampled_from(
    [
        "2026-01-01",
        "2026-01-01T00:00:00",
        "00:00:00",
        "UTC",
        "../etc",
        "a/b",
        "list",
        "inf",
        "7ff8000000000000",
        "0x1f",
        "AAAA",
        "|O",
        "O",
        "<U0",
        "<M8[zz]",
        "<f3",
        "<f4",
        "|V999999999",
        "S",
        "é",
    ]
)
json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | bodies,
    lambda one: st.one_of(
        st.lists(one, max_size=3),
        st.lists(st.lists(one, min_size=2, max_size=2), max_size=3),
        st.dictionaries(st.text(max_size=3) | tags, one, max_size=2),
        st.tuples(tags, one).map(lambda pair: dict([pair])),
    ),
    max_leaves=8,
)


def nested_dtype(depth):
    tree = "<f4"
    for _ in range(depth):
        tree = {"base": tree, "shape": [1]}
    return tree


TABLE = (type(None), bool, int, float, str, list, dict, complex, bytes, bytearray, tuple, set, frozenset)


def parts(obj):
    yield obj
    if isinstance(obj, dict):
        for pair in obj.items():
            yield from parts(pair)
    elif isinstance(obj, (list, tuple, set, frozenset, deque)):
        for one in obj:
            yield from parts(one)


@given(json)
@examples(500)
def test_malformed_json_is_refused_and_creates_no_other_type(tree):
    try:
        found = decode(tree)
    except (ManifestInvalid, Refused):  # a time zone that this machine lacks
        return
    for part in parts(found):
        known = type(part) in (*TABLE, *ENCODINGS, OrderedDict, Counter, deque, defaultdict) or part is LEFT_OUT
        assert known or not np.dtype(part if isinstance(part, np.dtype) else part.dtype).hasobject


@pytest.mark.parametrize(
    "tree",
    [
        {"!int": 5},
        {"!int": "0xzz"},
        {"!float": "3ff0000000000000"},
        {"!float": "nan"},
        {"!complex": [1.0, 2.0]},
        {"!complex": "3ff0"},
        {"!bytes": "ab c"},
        {"!str": "//8="},
        {"!tuple": {"a": 1}},
        {"!set": [[1]]},
        {"!set": [1, 1]},
        {"!dict": [["a", 1], ["a", 2]]},
        {"!dict": [["a"]]},
        {"!dict": [[{"!dict": []}, 1]]},
        {"!dict": [[{"!tensor": "x"}, 1]]},
        {"!np.scalar": ["|O8", "00" * 8]},
        {"!np.scalar": ["<f8", "00"]},
        {"!np.dtype": "i4,f8"},
        {"!np.dtype": {"fields": [["a", 0, "|O8"]], "itemsize": 8, "aligned": False}},
        {"!np.dtype": {"fields": [["a", 0, "<i4"], ["a", 4, "<i4"]], "itemsize": 8, "aligned": False}},
        {"!np.dtype": {"fields": [["a", 6, "<i4"]], "itemsize": 8, "aligned": False}},
        {"!np.dtype": {"base": "<i4", "shape": [-1]}},
        pytest.param({"!np.dtype": nested_dtype(500)}, id="a dtype nested 500 deep"),
        {"!deque": []},
        {"!deque": [1, [1, 2]]},
        {"!deque": [-1, []]},
        {"!defaultdict": ["object", []]},
        {"!defaultdict": ["os.system", []]},
        {"!defaultdict": ["int", [["a"]]]},
        {"!range": [0, 1, 0]},
        {"!range": [0, True, 1]},
        {"!Decimal": ["1_000"]},
        {"!Decimal": ["1e5"]},
        {"!Fraction": [2, 4]},
        {"!Fraction": [1, 0]},
        {"!UUID": ["12345678123456781234567812345678"]},
        {"!timedelta": [0, 86400, 0]},
        {"!timedelta": [10**10, 0, 0]},
        {"!date": ["2026-02-30"]},
        {"!datetime": ["2026-01-01T00:00:00+01:00", 0, None]},
        {"!datetime": ["2026-01-01T00:00:00", 2, None]},
        {"!datetime": ["2026-01-01T00:00:00", 0, "UTC"]},
        {"!timezone": [{"!timedelta": [2, 0, 0]}, None]},
        {"!ZoneInfo": ["../../etc/passwd"]},
        {"!ZoneInfo": ["/etc/passwd"]},
        {"!ZoneInfo": ["os.path"]},
        {"!PosixPath": ["a//b"]},
        {"!PosixPath": "a"},
        {"!excluded": 1},
        {"!pickle": "gASVCAAAAAAAAACMBHRydWWULg=="},
        {"!tuple": [], "!set": []},
        {"!tuple": [], "plain": 1},
        {"": float("nan")},
        {1: 2},
        2**64,
        (1, 2),
        pytest.param(object(), id="object"),
    ],
    ids=repr,
)
def test_json_that_encode_never_writes_is_refused(tree):
    with pytest.raises(ManifestInvalid, match="malformed"):
        decode(tree)


# ---- refusals --------------------------------------------------------------------------------------------------


class Colour(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


class Words(dict):
    pass


class Text(str):
    pass


class Moon(datetime.tzinfo):
    pass


@pytest.mark.parametrize(
    "thing",
    [
        len,
        lambda: 0,
        Colour.RED,
        Point(1, 2),
        Words(),
        Text("a"),
        collections.defaultdict(lambda: 0),
        collections.UserDict(),
        datetime.datetime(2026, 1, 1, tzinfo=Moon()),
        slice(3),
        int,
        pytest.param(object(), id="object"),
        threading.Lock(),
        random.Random(0),
        np.ones(2),
        np.zeros(1, [("a", "O")])[0],
        np.dtype([(("title", "a"), "i4")]),
        np.dtype(object),
        {Colour.RED},
        {Point(1, 2): 0},
        Counter([Colour.RED]),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_values_that_would_change_type_are_refused_with_the_remedy(thing):
    with pytest.raises(Unstorable) as caught:
        encode({"lambdas": [0, thing]}, "scheduler")
    assert caught.value.what.startswith("scheduler.lambdas.1")
    assert "exclude=[" in caught.value.todo
    assert isinstance(caught.value, Refused)


def nested(levels, around=lambda inside: [inside], core=0):
    for _ in range(levels):
        core = around(core)
    return core


AROUND = {
    "list": lambda inside: [inside],
    "tuple": lambda inside: (inside,),
    "dict": lambda inside: {"b": inside, "a": 0},
    "pairs": lambda inside: {0: inside},
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_nesting_is_bounded_and_values_below_the_bound_round_trip(around):
    deepest = nested(DEPTH_LIMIT, around)
    assert same(through_json(deepest), deepest)
    with pytest.raises(Unstorable, match="deeper than 100"):
        encode(nested(DEPTH_LIMIT + 1, around), "it")


def test_a_state_that_contains_itself_is_refused():
    loop = {}
    loop["again"] = [loop]
    with pytest.raises(Unstorable, match=r"it\.again\.0.*contains itself"):
        encode(loop, "it")


@pytest.mark.parametrize("tag", ["!tuple", "!set", "!complex", "!dict", "!Counter", "!box"])
def test_json_nested_too_deep_is_refused_without_a_recursion_error(tag):
    for around in (
        lambda inside: [inside],
        lambda inside: {"a": inside},
        lambda inside: {tag: [inside]},
        lambda inside: {tag: [[0, inside]]},
    ):
        deep = 0
        for _ in range(500):
            deep = around(deep)
        with pytest.raises(ManifestInvalid):
            decode(deep, unbox)


def test_two_entries_of_one_name_are_refused():
    with pytest.raises(Unstorable, match=r"it has two entries that would both be named it\.1"):
        encode({1: "a", "1": "b"}, "it")


# ---- names -----------------------------------------------------------------------------------------------------


@given(texts, texts)
def test_different_keys_have_different_names_of_one_utf8_component(one, other):
    assert (component(one) == component(other)) == (one == other)
    assert "." not in component(one)
    component(one).encode()


@pytest.mark.parametrize(
    ("key", "name"), [("a.b", "a%2Eb"), ("%", "%25"), (7, "7"), (0.5, "0%2E5"), ((1, "x.y"), "(1, 'x%2Ey')")]
)
def test_keys_are_escaped_reversibly(key, name):
    assert component(key) == name


TREE = {"a": {"lora_x": 1, "w": 2}, "b": [10, 20, 30], "lora": 3, "c": {"deep": {"w": 4}}}


@pytest.mark.parametrize(
    ("include", "exclude", "remaining"),
    [
        ([], ["it.a"], {"b": [10, 20, 30], "lora": 3, "c": {"deep": {"w": 4}}}),
        ([], ["*.w"], {"a": {"lora_x": 1}, "b": [10, 20, 30], "lora": 3, "c": {"deep": {}}}),
        ([], ["it.b.1"], {**TREE, "b": [10, LEFT_OUT, 30]}),
        (["*lora*"], [], {"a": {"lora_x": 1}, "lora": 3}),
        (["it.c", "it.a.w"], [], {"a": {"w": 2}, "c": {"deep": {"w": 4}}}),
        (["it"], ["it.[ab]*"], {"lora": 3, "c": {"deep": {"w": 4}}}),
        (["it.b.2"], [], {"b": [LEFT_OUT, LEFT_OUT, 30]}),
    ],
)
def test_a_pattern_matches_names_and_everything_below_them(include, exclude, remaining):
    assert decode(encode(TREE, "it", names=Filter(include, exclude))) == remaining


def test_values_that_no_pattern_can_match_are_not_visited():
    def hook(obj, path, inner):
        raise AssertionError(path)

    state = {"loader": object(), "model": 1}
    assert encode(state, "it", hook, Filter(["it.model*"])) == {"model": 1}
    assert encode(state, "it", hook, Filter([], ["it.loader"])) == {"model": 1}
    assert encode(object(), "it", hook, Filter(["other"])) is LEFT_OUT


def test_excluded_values_are_not_refused():
    assert encode({"f": len, "x": 1}, "it", names=Filter([], ["it.f"])) == {"x": 1}
    assert encode({"f": len, "x_1": 1}, "it", names=Filter(["*x_*"])) == {"x_1": 1}


def test_a_bare_string_of_patterns_is_refused():
    with pytest.raises(Refused, match=r"\['model\.\*'\]"):
        Filter("model.*")


# ---- hooks -----------------------------------------------------------------------------------------------------


class Box:
    def __init__(self, inside):
        self.inside = inside


def box(obj, path, inner):
    return {"!box": inner(obj.inside, path)} if isinstance(obj, Box) else NotImplemented


def unbox(tag, body, inner):
    return Box(inner(body)) if tag == "!box" else NotImplemented


def test_a_hook_adds_a_kind_at_any_depth():
    tree = msgspec.json.decode(writer.encode(encode({"z": (Box([Box(5)]),), "a": 1}, "it", box)))
    found = decode(tree, unbox)
    assert found["z"][0].inside[0].inside == 5


def test_nesting_through_a_hook_is_bounded_too():
    with pytest.raises(Unstorable, match="deeper"):
        encode(nested(101, Box), "it", box)
    with pytest.raises(ManifestInvalid, match="deeper"):
        decode(nested(101, lambda inside: {"!box": inside}), unbox)
    assert decode(encode(nested(100, Box), "it", box), unbox).inside.inside


def test_members_and_keys_are_never_passed_to_a_hook():
    with pytest.raises(Unstorable, match="Box"):
        encode({"a": {Box(1)}}, "it", box)
    for tree in ({"!set": [{"!box": 1}]}, {"!dict": [[{"!box": 1}, 1]]}, {"!Counter": [["a", {"!box": 1}]]}):
        with pytest.raises(ManifestInvalid, match="unknown tag"):
            decode(tree, unbox)
